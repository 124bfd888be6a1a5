//! Lines of `RNIC_LOG=debug` about lost datagrams, rejected connections and GID tables.

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

#[test]
fn rejections_name_addresses_and_reason() {
    run("rejected", "");
}

#[test]
fn empty_gid_entries_leave_no_line() {
    let scratch = tempfile::tempdir().unwrap();
    let profile = scratch.path().join("wide.toml");
    std::fs::write(&profile, "gid_tbl_len = 64\n").unwrap();
    run("table", &format!("[wired]\nprofile = {profile:?}\n"));
}
