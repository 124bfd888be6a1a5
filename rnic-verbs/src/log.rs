//! Why something failed, on stderr, for whoever sets `RNIC_LOG=debug`. Nothing is written
//! otherwise: the program's output is its own.

use std::sync::OnceLock;

/// Writes a line if the environment asks for it.
pub(crate) fn debug(line: impl FnOnce() -> String) {
    static ON: OnceLock<bool> = OnceLock::new();
    let on = ON
        .get_or_init(|| std::env::var_os("RNIC_LOG").is_some_and(|v| v == "debug" || v == "trace"));
    if *on {
        // A program may have closed its stderr.
        let _ = rustix::io::write(std::io::stderr(), format!("rnic: {}\n", line()).as_bytes());
    }
}
