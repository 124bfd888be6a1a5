//! Connections of librdmacm, made and ended in every order, over both paths: the events at both
//! ends, what they bring, and what becomes of queue pairs and receives.

use rnic_tests::{Daemon, PATHS, Process, binaries, engine, verbs};

/// Runs a part of the program over each path.
fn run(part: &str) {
    let scratch = tempfile::tempdir().unwrap();
    let Some(program) = verbs::program("tests/connections.c", scratch.path()) else { return };
    for path in PATHS {
        // Only where no answer comes: elsewhere a busy machine may take longer.
        let deadline = if part == "nobody answers" { "1s" } else { "60s" };
        let config = engine(1, path) + &format!("[mpa]\nreply_deadline = \"{deadline}\"\n");
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
    the_active_end_disconnects_first: "active first",
    the_passive_end_disconnects_first: "passive first",
    both_ends_disconnect_at_once: "at once",
    a_connection_to_be_can_be_ended: "too early",
    what_was_sent_comes_before_the_end: "behind sends",
    an_end_that_goes_without_a_word_is_noticed: "without a word",
    a_queue_pair_may_go_before_its_id: "queue pair first",
    a_queue_pair_moved_to_error_ends_its_connection: "errored",
    a_killed_peer_is_noticed: "killed",
    a_forked_child_has_no_completion_queue_of_its_parent: "forked",
    a_rejection_brings_its_private_data: "rejected",
    a_request_goes_with_its_id: "undecided",
    a_withdrawn_request_resets: "withdrawn",
    an_announced_request_stays: "announced",
    a_refused_attempt_leaves_the_qp_its_id: "taken",
    qps_of_the_roce_device_do_not_connect: "foreign",
    the_source_port_of_an_id_is_its_own: "source port",
    a_fetched_request_outlives_its_listener: "listener first",
    accepting_takes_the_reads_of_the_request: "reads",
    an_endpoint_connects_at_once: "endpoint",
    a_listening_endpoint_has_a_domain: "domain",
    a_port_without_a_listener_rejects: "nobody listens",
    a_peer_that_does_not_answer_is_unreachable: "nobody answers",
    a_rejected_request_is_acknowledged: "synchronous",
    events_follow_an_id_to_its_channel: "migrated",
    listeners_share_channels_and_families_ports: "many listeners",
    an_id_stays_until_its_events_are_acknowledged: "unacknowledged",
    a_backlog_counts_requests_not_fetched: "backlog",
}
