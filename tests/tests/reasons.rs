//! Lines of `RNIC_LOG=debug` about lost datagrams.

#![allow(clippy::unwrap_used, missing_docs)]

use rnic_tests::{Daemon, Process, verbs};

/// Runs a part of the program, which sees the RoCE device, with a daemon of this configuration.
fn run(part: &str, config: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/reasons.c", scratch.path()) else { return };
    let daemon = Daemon::start(config);
    let mut command = verbs::command(&program, &daemon);
    command.env("RNIC_DEVICES", "rnicd1").env("RNIC_LOG", "debug").arg(part);
    assert_eq!(Process::start(command).succeed(), ["done"]);
    daemon.is_empty();
}

#[test]
fn lost_datagrams_leave_a_line_for_each_reason() {
    run("datagrams", "");
}
