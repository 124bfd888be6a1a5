//! Objects of the C API and the device context that they are made with.

use rnic_tests::{Daemon, Process, binaries, verbs};

#[test]
fn a_context_owns_its_objects() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/contexts.c", scratch.path()) else { return };
    let daemon = Daemon::start(binaries!(), "");
    let mut command = verbs::command(&program, &daemon);
    command.env("RNIC_LOG", "debug");
    assert_eq!(Process::start(command).succeed(), ["done"]);
    daemon.is_empty();
}

#[test]
fn objects_are_destroyed_without_a_daemon() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/contexts.c", scratch.path()) else { return };
    let daemon = Daemon::start(binaries!(), "");
    let mut command = verbs::command(&program, &daemon);
    command.arg("orphaned");
    let mut process = Process::start(command);
    process.line_after("ready");
    daemon.kill();
    assert_eq!(process.succeed().last().map(String::as_str), Some("done"));
}
