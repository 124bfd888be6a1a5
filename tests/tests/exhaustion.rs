//! One client takes all there is of something: it is refused by name, others get the same results in
//! the same time, and when it is gone the daemon has what it had.

use std::time::Instant;

use rnic_tests::pinger::Pinger;
use rnic_tests::{DEADLINE, Daemon, Process, binaries};
use rustix::process::Signal;

/// Round trips of one measurement.
const ROUNDS: usize = 1000;

/// Runs the hoarder as another user where that is possible.
fn hoarder(daemon: &Daemon, what: &str) -> Process {
    if !rustix::process::getuid().is_root() {
        eprintln!("not root: the hoarder is of the same user as everybody else");
        return daemon.actor(&["exhaust", what]);
    }
    daemon.actor_as(61_001, &["exhaust", what])
}

/// Has somebody exhaust `what`, and expects every one of `named` in the refusal.
fn exhausted(daemon: &Daemon, what: &str, named: &[&str]) {
    let start = daemon.at_rest();
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    let mut visitor = daemon.actor(&["traffic", &address, "5"]);
    visitor.line_after("under way");
    // The measurement is of this pair alone, beside the hoarder alone.
    visitor.release();
    visitor.succeed();

    let pinger = Pinger::new(daemon);
    pinger.median(ROUNDS);
    let mut hoarder = hoarder(daemon, what);
    let refusal = hoarder.line_after("refused: ");
    for name in named {
        assert!(refusal.contains(name), "{what}: {refusal:?} does not name {name}");
    }
    // A machine with other work has bad moments; a daemon that lets a hoarder harm others has no
    // good ones.
    let began = Instant::now();
    let mut ratio = f64::INFINITY;
    while ratio >= 2.0 {
        assert!(began.elapsed() < DEADLINE, "{what}: round trips take {ratio:.1} times as long");
        hoarder.signal(Signal::STOP);
        let alone = pinger.median(ROUNDS);
        hoarder.signal(Signal::CONT);
        ratio = ratio.min(pinger.median(ROUNDS).as_secs_f64() / alone.as_secs_f64());
    }
    eprintln!("{what}: {refusal}; round trips take {ratio:.2} times as long");

    // What others have and do is what it was, also new traffic of those who were there before.
    // A user may use up his own share of sessions and descriptors, so those of the same user have to
    // wait.
    let same_user = !rustix::process::getuid().is_root();
    if !(same_user && ["sessions", "channels"].contains(&what)) {
        daemon.actor(&["traffic", &address, "6", "20"]).succeed();
    }
    hoarder.release();
    hoarder.line_after("had ");
    hoarder.succeed();
    drop(pinger);
    daemon.actor(&["traffic", &address, "7", "20"]).succeed();
    server.release();
    let lines = server.succeed();
    assert!(!lines.iter().any(|l| l.contains("CORRUPTED")), "{lines:?}");
    let end = daemon.shrinks_to(start);
    assert_eq!(end.threads, start.threads);
    assert!(end.resident < start.resident + 8 * 1024, "{what}: {start:?} has become {end:?}");
}

fn config(limits: &str) -> String {
    format!("[control]\nmode = \"0666\"\n[engine]\nworkers = 2\n{limits}")
}

fn daemon(limits: &str) -> Daemon {
    Daemon::start(binaries!(), &config(limits))
}

#[test]
fn shared_memory() {
    let daemon = daemon("[limits.session]\nsegment_bytes = \"64MiB\"\n");
    exhausted(&daemon, "memory", &["limits.session.segment_bytes = 67108864 reached"]);
}

#[test]
fn memory_regions() {
    let daemon = daemon("[limits.session]\nmrs = 5000\n");
    exhausted(&daemon, "regions", &["limits.session.mrs = 5000 reached", "5000 in use"]);
}

#[test]
fn queue_memory() {
    let daemon = daemon("[limits.session]\narena_bytes = \"8MiB\"\n");
    exhausted(&daemon, "arena", &["limits.session.arena_bytes = 8388608 reached"]);
}

#[test]
fn queue_pairs() {
    let daemon = daemon("[limits.session]\nqps = 500\n");
    exhausted(&daemon, "queue-pairs", &["limits.session.qps = 500 reached"]);
}

#[test]
fn descriptors_by_channels() {
    let daemon = daemon("[limits.session]\nchannels = 100\n");
    exhausted(&daemon, "channels", &["limits.session.channels = 100 reached"]);
}

#[test]
fn bound_addresses() {
    let daemon = daemon("[limits.session]\nlisteners = 50\n");
    exhausted(&daemon, "listeners", &["limits.session.listeners = 50 reached"]);
}

#[test]
fn connections() {
    let daemon = daemon("[limits.session]\nqps = 800\n");
    exhausted(&daemon, "connections", &["limits.session.qps = 800 reached"]);
}

#[test]
fn sessions() {
    let daemon = daemon("[limits.user]\nsessions = 40\n");
    exhausted(&daemon, "sessions", &["limits.user.sessions"]);
}

#[test]
fn descriptors_of_the_daemon() {
    let daemon = Daemon::start_limited(binaries!(), &config(""), "ulimit -n 400");
    exhausted(
        &daemon,
        "channels",
        &["descriptors for sessions, channels and listeners", "RLIMIT_NOFILE = 400"],
    );
}

#[test]
fn address_space_of_the_daemon() {
    let daemon = Daemon::start_limited(binaries!(), &config(""), "ulimit -v 1500000");
    exhausted(&daemon, "memory", &["cannot map the segment", "vm.max_map_count"]);
}
