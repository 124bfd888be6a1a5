//! Semantics of the C verbs API from the manual pages and the IBTA specification, on either path.

use rnic_tests::verbs::{BOTH_DEVICES, run_part};

fn run(part: &str) {
    run_part("tests/semantics.c", part, "", BOTH_DEVICES);
}

#[test]
fn zero_length_requests_need_no_region() {
    run("zero");
}

#[test]
fn a_type_2_bind_takes_the_low_8_bits() {
    run("bind");
}

#[test]
fn receives_posted_around_err_are_flushed_once() {
    run("flush");
}

#[test]
fn a_refusing_responder_raises_an_event() {
    run("refused");
}

#[test]
fn a_refusing_iwarp_responder_raises_an_event() {
    run("refused-iwarp");
}

#[test]
fn requests_before_a_local_error_complete() {
    run("local");
}

#[test]
fn failed_uc_or_ud_send_moves_to_sqe() {
    run("sqe");
}

#[test]
fn a_fenced_send_follows_the_read_before_it() {
    run("fence");
}

#[test]
fn an_unsolicited_send_raises_no_cq_event() {
    run("solicited");
}

#[test]
fn established_precedes_the_first_completion() {
    run("established");
}

#[test]
fn a_failed_bind_keeps_the_window_key() {
    run("rebind");
}

#[test]
fn an_extended_qp_has_the_requested_operations() {
    run("operations");
}

#[test]
fn sqd_ends_an_iwarp_connection() {
    run("closes");
}

#[test]
fn a_uc_qp_takes_receives_of_an_srq() {
    run("uc-srq");
}

#[test]
fn unsignaled_requests_need_no_room_in_a_cq() {
    run("unsignaled");
}

#[test]
fn receives_overrun_a_cq_and_sends_wait() {
    run("overrun");
}

#[test]
fn sends_overrun_a_cq_by_profile() {
    let scratch = tempfile::tempdir().expect("a folder");
    let profile = scratch.path().join("overrun.toml");
    std::fs::write(&profile, "cq_overrun = \"error\"\n").expect("the profile is written");
    let config = format!("[wired]\nprofile = {profile:?}\n");
    run_part("tests/semantics.c", "overrun-by-send", &config, BOTH_DEVICES);
}

#[test]
fn buffers_are_registered_like_other_memory() {
    run("buffers");
}

#[test]
fn receives_posted_in_err_are_flushed() {
    run("flush-in-error");
}

#[test]
fn ignored_capacities_are_ignored() {
    run("ignored");
}

#[test]
fn deregistered_memory_can_be_moved() {
    run("moved-memory");
}

#[test]
fn sges_need_not_be_aligned() {
    run("packed-sges");
}

#[test]
fn events_of_destroyed_cqs_are_dropped() {
    run("destroyed-cq");
}
