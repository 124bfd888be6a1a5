//! A client takes all of one resource. The refusal names the limit, other clients get the same
//! results in the same time, and afterwards the daemon returns to its former footprint.

use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::{Hello, HelloReply, HelloStatus};
use rnic_client::Context;
use rnic_tests::attacks::cpu;
use rnic_tests::pinger::Pinger;
use rnic_tests::raw::Raw;
use rnic_tests::wire;
use rnic_tests::{DEADLINE, Daemon, Process, timing};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

/// Serialises the tests, because several hoarders would disturb each other's measurements.
static MEASURING: Mutex<()> = Mutex::new(());

/// Round trips per measurement.
const ROUNDS: usize = 1000;

/// Workers of each daemon.
const WORKERS: usize = 2;

/// Number of pairs of measurements before each verdict. Must be odd.
const PAIRS: usize = 7;

/// Starts the hoarder, as another user if possible.
fn hoarder(daemon: &Daemon, what: &str) -> Process {
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit("not root: the hoarder runs as the same user, and time is not measured");
        return daemon.actor(&["exhaust", what]);
    }
    daemon.actor_as(61_001, &["exhaust", what])
}

/// Exhausts `what`, and expects every string of `named` in the refusal.
fn exhausted(daemon: &Daemon, what: &str, named: &[&str]) {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
    let start = daemon.at_rest();
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    let mut visitor = daemon.actor(&["traffic", &address, "5"]);
    visitor.line_after("under way");
    // Only the ping-pong pair and the hoarder run during the measurement.
    visitor.release();
    visitor.succeed();

    let pinger = Pinger::new(daemon);
    pinger.median(ROUNDS);
    let mut hoarder = hoarder(daemon, what);
    let refusal = hoarder.line_after("refused: ");
    for name in named {
        assert!(refusal.contains(name), "{what}: {refusal:?} does not name {name}");
    }
    // Only users are isolated from each other. Busy clients of one user may slow each other down.
    let same_user = !rustix::process::getuid().is_root();
    if !same_user && timing(&format!("round trips beside a user who has exhausted {what}")) {
        let ratio = slowed_down(daemon, &pinger, &hoarder, what);
        eprintln!("{what}: {refusal}; round trips take {ratio:.2} times as long");
    } else {
        pinger.rounds(ROUNDS as u64);
    }

    // Other clients continue unaffected, including new traffic of existing clients. A user can
    // exhaust its own share of sessions and descriptors, so other clients of that user have to
    // wait. Address space is not divided among users: the rest is smaller than one more buffer of
    // the hoarder, and the buffers of new traffic may or may not fit.
    let own_share = same_user && ["sessions", "channels", "connections"].contains(&what);
    if !own_share && !named.contains(&"vm.max_map_count") {
        daemon.actor(&["traffic", &address, "6", "20"]).succeed();
    }
    hoarder.release();
    hoarder.line_after("created ");
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

/// Returns the ratio of round-trip times next to a hoarder and without it: the median of
/// alternating measurements with the hoarder running and stopped, so that a short disturbance has
/// no effect. Takes more measurements while the ratio is not below 2.
///
/// The hoarder runs on one CPU, the round trips and the workers on another. Otherwise wake-ups
/// between CPUs and the hoarder's own CPU time would dominate the measurement.
fn slowed_down(daemon: &Daemon, pinger: &Pinger, hoarder: &Process, what: &str) -> f64 {
    let cpus = cpu::allowed();
    let ours = *cpus.first().expect("a CPU");
    let theirs = *cpus.last().expect("a CPU");
    cpu::confine(&[ours]);
    assert_eq!(cpu::confine_threads(daemon.pid(), "rnicd-worker", ours), WORKERS);
    cpu::confine_threads(hoarder.id(), "", theirs);
    let ratio = round_trips_beside(pinger, hoarder, what);
    cpu::confine(&cpus);
    ratio
}

fn round_trips_beside(pinger: &Pinger, hoarder: &Process, what: &str) -> f64 {
    let mut ratios = Vec::new();
    loop {
        hoarder.signal(Signal::STOP);
        let alone = pinger.median(ROUNDS);
        hoarder.signal(Signal::CONT);
        ratios.push(pinger.median(ROUNDS).as_secs_f64() / alone.as_secs_f64());
        if ratios.len() % PAIRS != 0 {
            continue;
        }
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios[ratios.len() / 2];
        // A ratio far below 1 means that something else disturbed the measurement.
        if (0.3..2.0).contains(&ratio) {
            return ratio;
        }
        assert!(ratios.len() < 15 * PAIRS, "{what}: round trips take {ratio:.2} times as long");
    }
}

/// Disables the device tree, because writing its files occasionally needs one more descriptor.
const NO_TREE: &str = "[device]\ntree = \"off\"\n";

fn config(limits: &str) -> String {
    format!("[control]\nmode = \"0666\"\n[engine]\nworkers = {WORKERS}\n{limits}")
}

fn daemon(limits: &str) -> Daemon {
    Daemon::start(&config(limits))
}

#[test]
fn shared_memory() {
    let daemon = daemon("[limits.session]\nshared_bytes = \"64MiB\"\n");
    exhausted(&daemon, "memory", &["limits.session.shared_bytes = 67108864 reached"]);
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
    // Each end allows one outstanding Read.
    let daemon = daemon("[limits.user]\nird_total = 600\n");
    exhausted(&daemon, "connections", &["limits.user.ird_total", "= 600 reached"]);
}

#[test]
fn sessions() {
    let daemon = daemon("[limits.user]\nsessions = 40\n");
    exhausted(&daemon, "sessions", &["limits.user.sessions"]);
}

#[test]
fn descriptors_of_the_daemon() {
    let daemon = Daemon::start_limited(&config(""), "ulimit -n 400");
    exhausted(
        &daemon,
        "channels",
        &["descriptors for sessions, channels and listeners", "RLIMIT_NOFILE = 400"],
    );
}

#[test]
fn address_space_of_the_daemon() {
    let daemon = daemon("");
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    // The hoarder takes 4 MiB at a time. The rest of the last 4 MiB is for new sessions of other
    // clients, so it must not depend on the daemon's own mappings.
    let limit = Some((size << 10) + (300 << 20) + (7 << 19));
    let pid = Pid::from_raw(daemon.pid() as i32);
    prlimit(pid, Resource::As, Rlimit { current: limit, maximum: limit }).unwrap();
    exhausted(&daemon, "memory", &["cannot map the shared buffer", "vm.max_map_count"]);
}

/// Clients without Hello hold descriptors that no limit counts. The last descriptor is either a
/// client's socket or the pidfd of its process, depending on parity. So one of two daemons, with
/// limits that differ by one, accepts a client whose process it cannot watch.
#[test]
fn daemon_recovers_from_lack_of_descriptors() {
    let give_up = Instant::now() + DEADLINE;
    // On a busy machine the Hello deadline may pass before the answers are read.
    for nofile in [120, 121].into_iter().cycle() {
        assert!(Instant::now() < give_up, "no client's socket took the last descriptor");
        let limit = format!("ulimit -n {nofile}");
        let config = format!("{NO_TREE}[engine]\nworkers = 1\n");
        let mut daemon = Daemon::start_limited(&config, &limit);
        let start = Instant::now();
        let connect = |_| Raw::connect(daemon.socket());
        let silent: Vec<Raw> = (0..64).map(connect).collect();
        let said = daemon.line_after("cannot accept clients for now");
        assert!(said.contains("Too many open files"), "{said}");
        let heard: Vec<_> = silent.iter().filter_map(heard).collect();
        let in_time = start.elapsed() < Duration::from_secs(4);
        drop(silent);
        let deadline = Instant::now() + DEADLINE;
        while let Err(error) = Context::open_at(daemon.socket()) {
            assert!(Instant::now() < deadline, "{error}");
            std::thread::yield_now();
        }
        // After the Hello deadline the daemon has closed the silent connections.
        if in_time && !heard.is_empty() {
            assert!(heard.iter().all(|s| *s == Some(HelloStatus::Resources as u32)), "{heard:?}");
            return;
        }
    }
}

/// The daemon resets connections that arrive while it has no descriptor. The limits on the accept
/// rate apply to them, too.
#[test]
fn refusals_are_rate_limited_like_accepts() {
    // Depending on parity, the last descriptor goes to a client's socket or stays free.
    for nofile in [120, 121] {
        let limit = format!("ulimit -n {nofile}");
        let rate = "[limits.user]\naccepts_per_second = 1\n";
        let config = format!("{NO_TREE}[engine]\nworkers = 1\n{rate}");
        let mut daemon = Daemon::start_limited(&config, &limit);
        let context = Context::open_at(daemon.socket()).unwrap();
        let listener = context.listen("127.0.0.1:0", 128).unwrap();
        let silent: Vec<Raw> = (0..64).filter_map(|_| Raw::try_connect(daemon.socket())).collect();
        daemon.line_after("cannot accept clients for now");
        let start = Instant::now();
        let peers: Vec<TcpStream> =
            (0..100).filter_map(|_| wire::try_dial(listener.local_addr())).collect();
        daemon.line_after("connections rejected");
        let ended = |peer: &&TcpStream| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(*peer, PollFlags::IN)], Some(&now)) == Ok(1)
        };
        // Without a rate limit, all of them would be reset at once.
        while start.elapsed() < Duration::from_millis(500) {
            let turned_away = peers.iter().filter(ended).count();
            let most = 1 + start.elapsed().as_secs() as usize;
            assert!(turned_away <= most, "{turned_away} of {most}");
        }
        drop(silent);
    }
}

/// Returns the configuration of a daemon that serves all users as `user`, and a command that limits
/// its descriptors with `ulimit`. Returns `None` if not root, which is required to start it.
fn limited_as(user: u32, ulimit: &str) -> Option<(String, String)> {
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit("not root: the limit on descriptors in flight is unknown");
        return None;
    }
    let config = format!("[control]\nmode = \"0666\"\nuser = \"{user}\"\n");
    Some((config, format!("{ulimit}; chown {user} \"${{3%/*}}\"")))
}

/// Connects a client that has sent Hello and not read the answer.
fn greeting(daemon: &Daemon) -> Raw {
    let raw = Raw::connect(daemon.socket());
    let hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };
    raw.send(&hello.to_bytes(), &[]);
    raw
}

/// Descriptors in unread answers count against the daemon's user (`RLIMIT_NOFILE` for descriptors
/// in flight).
#[test]
fn unread_replies_leave_room_for_other_users() {
    let Some((config, limit)) = limited_as(61_020, "ulimit -Sn 256") else { return };
    let daemon = Daemon::start_limited(&config, &limit);
    let silent: Vec<Raw> = (0..110)
        .map(|_| {
            let raw = greeting(&daemon);
            // The answer has arrived and stays unread.
            assert!(raw.has_input_within(DEADLINE));
            raw
        })
        .collect();
    let attaches = || {
        let mut other = daemon.actor_as(61_021, &["attach"]);
        assert_eq!(other.ask("now", "memory: "), "attached");
        other.release();
        other.succeed();
    };
    attaches();
    drop(silent);
    attaches();
}

/// The kernel reports no event when the descriptors in flight fall below the limit.
#[test]
fn a_reply_arrives_once_descriptors_are_received() {
    const FULL: u32 = 61_022;
    let Some((config, limit)) = limited_as(FULL, "ulimit -n 256") else { return };
    let daemon = Daemon::start_limited(&config, &limit);
    let watcher = Context::open_at(daemon.socket()).unwrap();
    let mut holder = daemon.actor_as(FULL, &["in-flight", "400"]);
    holder.line_after("in flight");
    let raw = greeting(&daemon);
    // The session exists, but the client has received nothing.
    let deadline = Instant::now() + DEADLINE;
    while watcher.status().expect("answers without descriptors arrive").sessions < 2 {
        assert!(Instant::now() < deadline, "no session was made");
        std::thread::yield_now();
    }
    let start = Instant::now();
    let worked = daemon.cpu_time();
    assert!(!raw.has_input_within(Duration::from_secs(1)));
    // The daemon retries periodically. Spinning would take a whole CPU. Its other work takes a
    // tenth of this second, even on a busy machine.
    let worked = daemon.cpu_time() - worked;
    let passed = start.elapsed();
    assert!(worked < passed / 2, "{worked:?} of {passed:?}");
    holder.release();
    holder.succeed();
    let (_, descriptors) = raw.receive().expect("a reply");
    assert!(descriptors.len() > 2);
}

/// Returns the status in the answer that a client has received. `None` if nothing has arrived,
/// `Some(None)` at the end of the connection.
fn heard(raw: &Raw) -> Option<Option<u32>> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let heard = poll(&mut [PollFd::new(&raw.socket, PollFlags::IN)], Some(&now));
    let status = || HelloReply::from_bytes(&raw.receive()?.0).map(|reply| reply.status);
    (heard == Ok(1)).then(status)
}
