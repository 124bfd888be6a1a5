//! Reasons of failures on stderr, if the environment has `RNIC_LOG=debug`. Otherwise the library
//! writes nothing, because stderr belongs to the program, except for one line if the user may not
//! use the daemon: many programs report that as a missing device.

use std::sync::{Once, OnceLock};

use crate::system::variable;

/// Returns true if the log is enabled.
pub(crate) fn is_on() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| variable(c"RNIC_LOG").is_some_and(|v| v == "debug" || v == "trace"))
}

/// Writes a line if the log is enabled.
pub(crate) fn debug(line: impl FnOnce() -> String) {
    if is_on() {
        write(&line());
    }
}

/// Writes that the user may not use the daemon, once per process.
pub(crate) fn denied(why: &str) {
    static ONCE: Once = Once::new();
    if !is_on() {
        ONCE.call_once(|| write(why));
    }
}

fn write(line: &str) {
    // A program may have closed its stderr.
    let _ = rustix::io::write(std::io::stderr(), format!("rnic: {line}\n").as_bytes());
}
