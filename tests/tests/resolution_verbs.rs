//! IDs of `RDMA_PS_UDP` in librdmacm, with both ends in one program: events and their contents.

use rnic_tests::verbs::{BOTH_DEVICES, run_part};

fn run(part: &str) {
    // Short only for the part without an answer. For others, a busy machine may take longer.
    let deadline = if part == "no answer" { "1s" } else { "60s" };
    let config = format!("workers = 1\n[mpa]\nreply_deadline = \"{deadline}\"\n");
    run_part("tests/resolution.c", part, &config, BOTH_DEVICES);
}

macro_rules! parts {
    ($($name:ident: $part:literal,)*) => {
        $(#[test]
        fn $name() {
            run($part);
        })*
    };
}

parts! {
    resolution_returns_a_qp: "accepted",
    program_may_create_the_qps: "own queue pair",
    a_lookup_needs_no_queue_pair: "without a queue pair",
    rejection_status_matches_the_kernel: "rejected",
    missing_listener_status_matches_the_kernel: "no listener",
    a_program_that_does_not_answer_is_unreachable: "no answer",
    an_announced_request_stays: "announced",
    every_loopback_address_is_served: "other loopback",
    endpoints_wait: "endpoints",
}
