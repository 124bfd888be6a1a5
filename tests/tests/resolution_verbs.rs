//! IDs of `RDMA_PS_UDP` in librdmacm, with both ends in one program: events and their contents.

use rnic_tests::{Daemon, PATHS, Process, engine, verbs};

/// Runs a part of the program, once in memory and once with packets.
fn run(part: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/resolution.c", scratch.path()) else { return };
    for path in PATHS {
        // Short only for the part without an answer. For others, a busy machine may take longer.
        let deadline = if part == "no answer" { "1s" } else { "60s" };
        let config = engine(1, path) + &format!("[mpa]\nreply_deadline = \"{deadline}\"\n");
        let daemon = Daemon::start(&config);
        let mut command = verbs::command(&program, &daemon);
        command.arg(part);
        assert_eq!(Process::start(command).succeed(), ["done"], "{path}");
        daemon.is_empty();
    }
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
