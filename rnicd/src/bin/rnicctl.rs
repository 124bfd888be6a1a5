//! Shows what the daemon knows.

fn main() {}
