//! The verbs-shaped client library.
