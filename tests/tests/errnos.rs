//! Errors of the C API: the expected `errno(3)` value, and the first refused request of a list.

use rnic_tests::{Daemon, Process, verbs};

#[test]
fn calls_are_refused_by_number_and_with_a_reason() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/errnos.c", scratch.path()) else { return };
    let daemon = Daemon::start("");
    let mut command = verbs::command(&program, &daemon);
    command.env("RNIC_DEVICES", "rnicd0").env("RNIC_LOG", "debug");
    assert_eq!(Process::start(command).succeed(), ["done"]);
    daemon.is_empty();
}
