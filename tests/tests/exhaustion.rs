//! One client takes all there is of something: it is refused by name, others get the same results
//! in the same time, and when it is gone the daemon has what it had.

use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rnic_client::Context;
use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::{Hello, HelloReply, HelloStatus};
use rnic_tests::attacks::cpu;
use rnic_tests::pinger::Pinger;
use rnic_tests::raw::Raw;
use rnic_tests::wire;
use rnic_tests::{DEADLINE, Daemon, Process, binaries, timing};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

/// One hoarder at a time: others' would be measured too.
static MEASURING: Mutex<()> = Mutex::new(());

/// Round trips of one measurement.
const ROUNDS: usize = 1000;

/// Workers of every daemon here.
const WORKERS: usize = 2;

/// Pairs of measurements from which a verdict is tried; an odd number.
const PAIRS: usize = 7;

/// Runs the hoarder as another user where that is possible.
fn hoarder(daemon: &Daemon, what: &str) -> Process {
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit(
            "not root: the hoarder is of everybody else's user, and time is not measured",
        );
        return daemon.actor(&["exhaust", what]);
    }
    daemon.actor_as(61_001, &["exhaust", what])
}

/// Has somebody exhaust `what`, and expects every one of `named` in the refusal.
fn exhausted(daemon: &Daemon, what: &str, named: &[&str]) {
    let _alone = MEASURING.lock().unwrap_or_else(PoisonError::into_inner);
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
    // A share is a user's: within one, who always asks may slow others down.
    let same_user = !rustix::process::getuid().is_root();
    if !same_user && timing(&format!("round trips beside a user who has exhausted {what}")) {
        let ratio = slowed_down(daemon, &pinger, &hoarder, what);
        eprintln!("{what}: {refusal}; round trips take {ratio:.2} times as long");
    } else {
        pinger.rounds(ROUNDS as u64);
    }

    // What others have and do is what it was, also new traffic of those who were there before.
    // A user may use up his own share of sessions and descriptors, so those of the same user have
    // to wait. Nobody has a share of the daemon's address space: what somebody leaves of it is what
    // is less than one more of his buffers, in which those of new traffic may fit or not.
    let own_share = same_user && ["sessions", "channels", "connections"].contains(&what);
    if !own_share && !named.contains(&"vm.max_map_count") {
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

/// How many times as long round trips take beside a hoarder: the median of measurements that take
/// turns with some in which it is stopped, so that a moment in which the machine does something
/// else decides nothing. Where that is not below 2, more are taken.
///
/// The hoarder has one CPU, the round trips and the workers another: which CPU wakes whom decides
/// about a round trip more than anything that the daemon does, and what the hoarder takes of a CPU
/// itself is not what the daemon lets it take.
fn slowed_down(daemon: &Daemon, pinger: &Pinger, hoarder: &Process, what: &str) -> f64 {
    let cpus = cpu::allowed();
    let (&ours, &theirs) = (cpus.first().expect("a CPU"), cpus.last().expect("a CPU"));
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
        // Nobody gets faster by company: then it was not the hoarder who was measured.
        if (0.3..2.0).contains(&ratio) {
            return ratio;
        }
        assert!(ratios.len() < 15 * PAIRS, "{what}: round trips take {ratio:.2} times as long");
    }
}

/// Whoever writes files has one more descriptor now and then, which decides who gets the last one.
const NO_TREE: &str = "[device]\ntree = \"off\"\n";

fn config(limits: &str) -> String {
    format!("[control]\nmode = \"0666\"\n[engine]\nworkers = {WORKERS}\n{limits}")
}

fn daemon(limits: &str) -> Daemon {
    Daemon::start(binaries!(), &config(limits))
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
    // Each end may read one thing at a time.
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
    let daemon = Daemon::start_limited(binaries!(), &config(""), "ulimit -n 400");
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
    // The hoarder takes 4 MiB at a time. What is left of the last step is for new sessions of
    // others, so it must not depend on how much the daemon itself has mapped.
    let limit = Some((size << 10) + (300 << 20) + (7 << 19));
    let pid = Pid::from_raw(daemon.pid() as i32);
    prlimit(pid, Resource::As, Rlimit { current: limit, maximum: limit }).unwrap();
    exhausted(&daemon, "memory", &["cannot map the shared buffer", "vm.max_map_count"]);
}

/// Clients without a Hello have descriptors that no limit counts. With one more or one less of
/// them, the last one goes to a client's socket, or there is one left for what tells of its
/// process's end: of two daemons that differ by one, one answers whom it cannot watch.
#[test]
fn a_daemon_without_descriptors_says_so_and_takes_clients_in_again() {
    let give_up = Instant::now() + DEADLINE;
    // On a busy machine the Hello deadline may have passed before the answers are looked at.
    for nofile in [120, 121].into_iter().cycle() {
        assert!(Instant::now() < give_up, "no client's socket took the last descriptor");
        let limit = format!("ulimit -n {nofile}");
        let config = format!("{NO_TREE}[engine]\nworkers = 1\n");
        let mut daemon = Daemon::start_limited(binaries!(), &config, &limit);
        let start = Instant::now();
        let connect = |_| Raw::connect(daemon.socket());
        let silent: Vec<Raw> = (0..64).map(connect).collect();
        let said = daemon.says("cannot accept clients for now");
        assert!(said.contains("Too many open files"), "{said}");
        let heard: Vec<_> = silent.iter().filter_map(heard).collect();
        let in_time = start.elapsed() < Duration::from_secs(4);
        drop(silent);
        let deadline = Instant::now() + DEADLINE;
        while let Err(error) = Context::open_at(daemon.socket()) {
            assert!(Instant::now() < deadline, "{error}");
            std::thread::yield_now();
        }
        // Later it has hung up on those who said no Hello.
        if in_time && !heard.is_empty() {
            assert!(heard.iter().all(|s| *s == Some(HelloStatus::Resources as u32)), "{heard:?}");
            return;
        }
    }
}

/// Who connects while there is no descriptor is reset, and that counts like everything that is
/// accepted.
#[test]
fn connections_are_turned_away_no_faster_than_they_may_be_accepted() {
    // With one more or one less the last descriptor goes to a client's socket, or is left.
    for nofile in [120, 121] {
        let limit = format!("ulimit -n {nofile}");
        let rate = "[limits.user]\naccepts_per_second = 1\n";
        let config = format!("{NO_TREE}[engine]\nworkers = 1\n{rate}");
        let mut daemon = Daemon::start_limited(binaries!(), &config, &limit);
        let context = Context::open_at(daemon.socket()).unwrap();
        let listener = context.listen("127.0.0.1:0", 128).unwrap();
        let silent: Vec<Raw> = (0..64).filter_map(|_| Raw::try_connect(daemon.socket())).collect();
        daemon.says("cannot accept clients for now");
        let start = Instant::now();
        let peers: Vec<TcpStream> =
            (0..100).filter_map(|_| wire::knock(listener.local_addr())).collect();
        daemon.says("connections turned away");
        let ended = |peer: &&TcpStream| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(*peer, PollFlags::IN)], Some(&now)) == Ok(1)
        };
        // Without a rate the last of them is gone in no time.
        while start.elapsed() < Duration::from_millis(500) {
            let turned_away = peers.iter().filter(ended).count();
            let most = 1 + start.elapsed().as_secs() as usize;
            assert!(turned_away <= most, "{turned_away} of {most}");
        }
        drop(silent);
    }
}

/// Configuration of a daemon that serves everybody as this user, and a command that limits its
/// descriptors with `ulimit`. Only root can start it: `None`, otherwise.
fn limited_as(user: u32, ulimit: &str) -> Option<(String, String)> {
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit(
            "not root: root has no limit of descriptors in flight, others' is unknown",
        );
        return None;
    }
    let config = format!("[control]\nmode = \"0666\"\nuser = \"{user}\"\n");
    Some((config, format!("{ulimit}; chown {user} \"${{3%/*}}\"")))
}

/// A client with a Hello that is not answered yet.
fn greeting(daemon: &Daemon) -> Raw {
    let raw = Raw::connect(daemon.socket());
    let hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };
    raw.send(&hello.to_bytes(), &[]);
    raw
}

/// Descriptors that clients leave unread count against the user of the daemon that sends more.
#[test]
fn unread_answers_leave_room_for_those_of_others() {
    let Some((config, limit)) = limited_as(61_020, "ulimit -Sn 256") else { return };
    let daemon = Daemon::start_limited(binaries!(), &config, &limit);
    let silent: Vec<Raw> = (0..110)
        .map(|_| {
            let raw = greeting(&daemon);
            // The answer is there, and stays there.
            assert!(raw.hears_within(DEADLINE));
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

/// No event tells when others have read enough for an answer with descriptors to be sent.
#[test]
fn an_answer_comes_when_others_have_read_theirs() {
    const FULL: u32 = 61_022;
    let Some((config, limit)) = limited_as(FULL, "ulimit -n 256") else { return };
    let daemon = Daemon::start_limited(binaries!(), &config, &limit);
    let watcher = Context::open_at(daemon.socket()).unwrap();
    let mut holder = daemon.actor_as(FULL, &["in-flight", "400"]);
    holder.line_after("in flight");
    let raw = greeting(&daemon);
    // It has a session, of which it has not received anything.
    let deadline = Instant::now() + DEADLINE;
    while watcher.status().expect("answers without descriptors come").sessions < 2 {
        assert!(Instant::now() < deadline, "no session was made");
        std::thread::yield_now();
    }
    let (start, worked) = (Instant::now(), daemon.worked());
    assert!(!raw.hears_within(Duration::from_secs(1)));
    // The daemon tries again now and then and does not spin, which would take all of a CPU. Its
    // other work in this second takes a tenth of it, on a busy machine as well.
    let (worked, passed) = (daemon.worked() - worked, start.elapsed());
    assert!(worked < passed / 2, "{worked:?} of {passed:?}");
    holder.release();
    holder.succeed();
    let (_, descriptors) = raw.receive().expect("it is answered");
    assert!(descriptors.len() > 2);
}

/// The status that a client was told, if it has heard anything; none if that was the end.
fn heard(raw: &Raw) -> Option<Option<u32>> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let heard = poll(&mut [PollFd::new(&raw.socket, PollFlags::IN)], Some(&now));
    let status = || HelloReply::from_bytes(&raw.receive()?.0).map(|reply| reply.status);
    (heard == Ok(1)).then(status)
}
