//! Handles of the C API that were destroyed, are of another type, or never existed. Each call
//! refuses them.

use rnic_tests::{Daemon, Process, verbs};

#[test]
fn handles_that_are_not_live_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/handles.c", scratch.path()) else { return };
    let daemon = Daemon::start("");
    let mut command = verbs::command(&program, &daemon);
    command.env("RNIC_DEVICES", "rnicd1").env("RNIC_LOG", "debug");
    assert_eq!(Process::start(command).succeed(), ["done"]);
    daemon.is_empty();
}
