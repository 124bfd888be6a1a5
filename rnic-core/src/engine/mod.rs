//! The engine: the one place where wire and device meet.
