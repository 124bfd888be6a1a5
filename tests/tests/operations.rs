//! Every operation between two processes, over both paths and every variant of the wire protocol.

use rnic_tests::Daemon;

/// Number of operations in a tour, including connect and disconnect.
const STEPS: usize = 21;

fn tour(host: &Daemon, guest: &Daemon) {
    let mut hosting = host.actor(&["host", "1"]);
    let address = hosting.line_after("listening on ");
    let steps = guest.actor(&["visit", &address]).succeed();
    assert_eq!(steps.len(), STEPS, "{}", steps.join("\n"));
    hosting.succeed();
}

fn one_daemon(config: &str, path: &str) {
    let daemon = Daemon::start(config);
    assert_eq!(daemon.status().loopback, path);
    tour(&daemon, &daemon);
    daemon.is_empty();
}

fn two_daemons(host: &str, guest: &str) {
    let host = Daemon::start(host);
    let guest = Daemon::start(guest);
    tour(&host, &guest);
}

#[test]
fn direct_path_with_one_worker() {
    one_daemon("[engine]\nworkers = 1\n", "direct");
}

#[test]
fn direct_path_with_three_workers() {
    one_daemon("[engine]\nworkers = 3\n", "direct");
}

#[test]
fn tcp_inside_one_daemon_with_one_worker() {
    one_daemon("[engine]\nworkers = 1\nloopback = \"tcp\"\n", "tcp");
}

#[test]
fn tcp_inside_one_daemon_with_three_workers() {
    one_daemon("[engine]\nworkers = 3\nloopback = \"tcp\"\n", "tcp");
}

#[test]
fn tcp_without_crc() {
    one_daemon("[engine]\nworkers = 3\nloopback = \"tcp\"\n[mpa]\ncrc = false\n", "tcp");
}

#[test]
fn two_daemons_with_defaults() {
    two_daemons("", "");
}

#[test]
fn markers_towards_the_host_only() {
    two_daemons("[mpa]\nmarkers = true\n", "");
}

#[test]
fn markers_towards_the_guest_only() {
    two_daemons("", "[mpa]\nmarkers = true\n");
}

#[test]
fn markers_both_ways_without_crc() {
    let config = "[mpa]\nmarkers = true\ncrc = false\n[engine]\nworkers = 1\n";
    two_daemons(config, config);
}

#[test]
fn one_side_that_wants_crc_is_enough() {
    two_daemons("[mpa]\ncrc = false\n", "[mpa]\ncrc = true\n");
}

#[test]
fn revision_1_connects_to_revision_2() {
    two_daemons("[mpa]\nrevision = 2\n", "[mpa]\nrevision = 1\n");
}

#[test]
fn revision_2_falls_back_to_revision_1() {
    two_daemons("[mpa]\nrevision = 1\n", "[mpa]\nrevision = 2\n");
}
