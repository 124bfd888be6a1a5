//! Connections of librdmacm, opened and closed in every order, over both paths: the events at both
//! ends, their contents, and the state of QPs and receives.

use rnic_tests::verbs::{BOTH_DEVICES, run_part};

fn run(part: &str) {
    // Short only for the peer that never answers. In other tests a busy machine may need longer.
    let deadline = if part == "no answer" { "1s" } else { "60s" };
    let config = format!("workers = 1\n[mpa]\nreply_deadline = \"{deadline}\"\n");
    run_part("tests/connections.c", part, &config, BOTH_DEVICES);
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
    pending_connection_can_be_disconnected: "too early",
    sent_messages_precede_the_disconnect: "behind sends",
    silent_peer_exit_is_noticed: "without a word",
    qp_may_be_destroyed_before_its_id: "queue pair first",
    a_queue_pair_moved_to_error_ends_its_connection: "errored",
    a_killed_peer_is_noticed: "killed",
    forked_child_cannot_use_the_parents_cq: "forked",
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
    a_port_without_a_listener_rejects: "no listener",
    a_peer_that_does_not_answer_is_unreachable: "no answer",
    a_rejected_request_is_acknowledged: "synchronous",
    events_follow_an_id_to_its_channel: "migrated",
    listeners_share_channels_and_families_ports: "many listeners",
    an_id_stays_until_its_events_are_acknowledged: "unacknowledged",
    a_backlog_counts_requests_not_fetched: "backlog",
}
