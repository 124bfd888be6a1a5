//! Semantics of the C API that the manual pages prescribe and external test suites check.

use rnic_tests::{Daemon, PATHS, Process, engine, verbs};

/// Runs a part of the program over each path.
fn run(part: &str, config: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/man_pages.c", scratch.path()) else { return };
    for path in PATHS {
        let daemon = Daemon::start(&(engine(1, path) + config));
        let mut command = verbs::command(&program, &daemon);
        command.arg(part).env("RNIC_LOG", "debug");
        assert_eq!(Process::start(command).succeed(), ["done"], "{path}");
        daemon.is_empty();
    }
}

#[test]
fn queries_of_other_attributes_keep_the_state() {
    run("states", "");
}

#[test]
fn receive_capacities_are_ignored_with_an_srq() {
    run("ignored", "");
}

#[test]
fn sends_and_writes_complete_with_their_length() {
    run("lengths", "");
}

#[test]
fn acknowledged_events_are_counted() {
    run("counts", "");
}

#[test]
fn reregistration_fails_by_its_own_codes() {
    run("reregistered", "");
}

#[test]
fn device_maxima_are_usable() {
    run("maxima", SMALL_LIMITS);
}

#[test]
fn iwarp_qps_cannot_move_to_rtr() {
    run("iWARP states", "");
}

#[test]
fn enum_names_match_rdma_core() {
    run("named", "");
}

#[test]
fn built_requests_are_posted_together() {
    run("built", "");
}

#[test]
fn a_cq_keeps_room_for_unpolled_completions() {
    run("resized", "");
}

#[test]
fn unserved_operations_are_refused_at_creation() {
    run("unserved", "");
}

/// Session limits that are small enough for a program to reach.
const SMALL_LIMITS: &str = "
[limits.session]
pds = 4
mrs = 9
cqs = 5
qps = 6
windows = 7
srqs = 3
";
