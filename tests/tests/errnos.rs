//! What the C API says to what it must refuse: the number of `errno(3)` that programs expect, and
//! the request at which a list of them was refused.

use rnic_tests::{Daemon, Process, binaries, verbs};

#[test]
fn calls_are_refused_by_number_and_with_a_reason() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/errnos.c", scratch.path()) else { return };
    let daemon = Daemon::start(binaries!(), "");
    let mut command = verbs::command(&program, &daemon);
    command.env("RNIC_DEVICES", "rnicd0").env("RNIC_LOG", "debug");
    assert_eq!(Process::start(command).succeed(), ["done"]);
    daemon.is_empty();
}
