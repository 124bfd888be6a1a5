//! Calls of the C verbs API during a disconnect, a cancellation of the thread, or the end of the
//! daemon.

use std::process::Command;

use rnic_tests::daemon::Daemon;
use rnic_tests::verbs::BOTH_DEVICES;
use rnic_tests::{Process, built};
use tempfile::TempDir;

/// Starts a part of the program.
fn start(part: &str, daemon: &Daemon) -> (TempDir, Process) {
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("calls");
    let libraries = built::libraries();
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
        .env("RNIC_DEVICES", BOTH_DEVICES)
        .env_remove("RNIC_LOG");
    (scratch, Process::start(command))
}

/// Runs a part of the program with its own daemon.
fn run(part: &str) {
    let daemon = Daemon::start("");
    let (_scratch, process) = start(part, &daemon);
    assert_eq!(process.succeed(), ["done"]);
    daemon.is_empty();
}

#[test]
fn ended_connection_may_be_disconnected_again() {
    run("twice");
}

#[test]
fn destroyed_qp_ends_its_connect() {
    run("lost");
}

#[test]
fn cancelled_thread_ends_after_its_call() {
    run("cancelled");
}

#[test]
fn a_thread_is_cancelled_in_rdma_connect() {
    run("waits");
}

#[test]
fn refused_qp_leaves_its_attributes_unchanged() {
    run("refused");
}

#[test]
fn unreadable_memory_is_not_registered() {
    run("unreadable");
}

#[test]
fn every_context_gets_one_fatal_event() {
    let daemon = Daemon::start("");
    let (_scratch, mut process) = start("died", &daemon);
    process.line_after("ready");
    daemon.kill();
    assert_eq!(process.succeed().last().map(String::as_str), Some("done"));
}
