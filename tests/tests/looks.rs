//! Programs that look for RDMA devices in `/sys` and `/dev` find the daemon's devices.

use std::process::Command;

use rnic_tests::{Daemon, Process, built, verbs};

#[test]
fn every_path_call_finds_the_devices() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/looks.c", scratch.path()) else { return };
    let daemon = Daemon::start("");
    let mut command = verbs::command(&program, &daemon);
    command.env("LD_PRELOAD", built::libraries().join("librnic_preload.so"));
    command.env("RNIC_TREE", daemon.socket().with_file_name("rnicd.sock.tree"));
    assert_eq!(Process::start(command).succeed(), ["done"]);
}

#[test]
fn rnic_run_has_them_shown() {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/looks.c", scratch.path()) else { return };
    let tree = scratch.path().join("elsewhere");
    let daemon = Daemon::start(&format!("[device]\ntree = {tree:?}\n"));
    let mut command = Command::new(built::program("rnic-run"));
    command.args(["--no-start", "--lib-dir"]).arg(built::libraries()).arg(&program);
    command.env("RNIC_SOCKET", daemon.socket());
    assert_eq!(Process::start(command).succeed(), ["done"]);
    // Without a tree, programs see the kernel's files.
    let daemon = Daemon::start("[device]\ntree = \"off\"\n");
    let mut command = Command::new(built::program("rnic-run"));
    command.args(["--no-start", "--lib-dir"]).arg(built::libraries());
    command.args(["sh", "-c", "echo \"${LD_PRELOAD:-nothing} ${RNIC_TREE:-nowhere}\""]);
    command.env("RNIC_SOCKET", daemon.socket());
    assert_eq!(Process::start(command).succeed(), ["nothing nowhere"]);
}
