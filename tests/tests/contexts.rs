//! Objects of the C API and the device context that creates them.

use rnic_tests::{Daemon, Process, verbs};
use tempfile::TempDir;

/// Starts the program with its own daemon.
fn start(arguments: &[&str]) -> Option<(TempDir, Daemon, Process)> {
    let scratch = tempfile::tempdir().unwrap();
    let program = verbs::program("tests/contexts.c", scratch.path())?;
    let daemon = Daemon::start("");
    let mut command = verbs::command(&program, &daemon);
    command.args(arguments).env("RNIC_LOG", "debug");
    Some((scratch, daemon, Process::start(command)))
}

#[test]
fn a_context_owns_its_objects() {
    let Some((_scratch, daemon, process)) = start(&[]) else { return };
    assert_eq!(process.succeed(), ["done"]);
    daemon.is_empty();
}

#[test]
fn objects_are_destroyed_without_a_daemon() {
    let Some((_scratch, daemon, mut process)) = start(&["orphaned"]) else { return };
    process.line_after("ready");
    daemon.kill();
    assert_eq!(process.succeed().last().map(String::as_str), Some("done"));
}
