//! Requesters whose peer leaves under traffic: each gets `IBV_WC_RETRY_EXC_ERR` for its oldest
//! request, and no access error, because QPs stop answering before their memory is released.

use rnic_tests::{Daemon, Process, on_path, verbs};

/// Runs the program with its own daemon, over the direct path and over TCP.
fn leaves_by(way: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/leaving.c", scratch.path()) else { return };
    for loopback in ["direct", "tcp"] {
        let daemon = Daemon::start(&on_path(loopback));
        let mut command = verbs::command(&program, &daemon);
        command.arg(way);
        assert_eq!(Process::start(command).succeed(), ["done"], "{loopback}");
        daemon.is_empty();
    }
}

#[test]
fn peer_is_killed_under_traffic() {
    leaves_by("kill");
}

#[test]
fn peer_exits_under_traffic() {
    leaves_by("exit");
}

#[test]
fn peer_destroys_its_qps_under_traffic() {
    leaves_by("destroy");
}
