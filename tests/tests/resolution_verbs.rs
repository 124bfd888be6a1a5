//! Ids of `RDMA_PS_UDP` of librdmacm, both ends in one program: the events, and what they bring.

use rnic_tests::{Daemon, PATHS, Process, binaries, engine, ports, verbs};

/// Runs a part of the program, with messages in memory and with packets.
fn run(part: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/resolution.c", scratch.path()) else { return };
    for path in PATHS {
        // Only where no answer comes: elsewhere a busy machine may take longer.
        let deadline = if part == "nobody answers" { "1s" } else { "60s" };
        // The port of packets is this daemon's alone.
        let port = ports::of_nobody();
        let more = format!("[mpa]\nreply_deadline = \"{deadline}\"\n[wired]\nport = {port}\n");
        let config = engine(1, path) + &more;
        let daemon = Daemon::start(binaries!(), &config);
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
    who_connects_is_told_of_a_queue_pair: "accepted",
    queue_pairs_may_be_the_programs_own: "own queue pair",
    a_lookup_needs_no_queue_pair: "without a queue pair",
    a_rejection_has_the_number_of_the_kernel: "rejected",
    so_has_a_port_without_a_listener: "nobody listens",
    a_program_that_does_not_answer_is_unreachable: "nobody answers",
    an_announced_request_stays: "announced",
    every_loopback_address_is_served: "other loopback",
    endpoints_wait: "endpoints",
}
