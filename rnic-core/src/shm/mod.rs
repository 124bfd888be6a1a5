//! Shared memory: mappings, queues, doorbells and the waits between two processes.
