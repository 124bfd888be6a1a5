//! The device model: STags, completion queues, queue pair state.
