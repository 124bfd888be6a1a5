//! Calls of the C verbs API that programs make at their worst moments.

use std::process::Command;

use rnic_tests::daemon::Daemon;
use rnic_tests::{Process, binaries, verbs};
use tempfile::TempDir;

/// Starts a part of the program.
fn start(part: &str, daemon: &Daemon) -> (TempDir, Process) {
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("calls");
    let libraries = verbs::directory();
    let built = Command::new("cc")
        .args(["-Wall", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/calls.c"))
        .args(["libibverbs.so.1", "librdmacm.so.1"].map(|name| libraries.join(name)))
        .status()
        .expect("a C compiler");
    assert!(built.success());
    let mut command = Command::new(&program);
    command
        .arg(part)
        .env("LD_LIBRARY_PATH", libraries)
        .env("RNIC_SOCKET", daemon.socket())
        .env_remove("RNIC_LOG");
    (scratch, Process::start(command))
}

/// Runs a part of the program, with a daemon of its own.
fn run(part: &str) {
    let daemon = Daemon::start(binaries!(), "");
    let (_scratch, process) = start(part, &daemon);
    assert_eq!(process.succeed(), ["done"]);
    daemon.is_empty();
}

#[test]
fn a_connection_that_has_ended_may_be_ended_again() {
    run("twice");
}

#[test]
fn a_queue_pair_that_goes_ends_the_attempt_to_connect() {
    run("lost");
}

#[test]
fn a_cancelled_thread_ends_behind_the_call_that_it_is_in() {
    run("cancelled");
}

#[test]
fn a_thread_is_cancelled_in_rdma_connect() {
    run("waits");
}

#[test]
fn a_refused_queue_pair_leaves_what_was_asked_for() {
    run("refused");
}

#[test]
fn what_may_not_be_read_is_not_registered() {
    run("unreadable");
}

#[test]
fn every_context_is_told_once_that_the_daemon_has_died() {
    let daemon = Daemon::start(binaries!(), "");
    let (_scratch, mut process) = start("died", &daemon);
    process.line_after("ready");
    daemon.kill();
    assert_eq!(process.succeed().last().map(String::as_str), Some("done"));
}
