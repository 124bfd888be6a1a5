//! The process that starts copiers: what clients cannot do to it, and what is said when it is gone.

use std::os::unix::fs::MetadataExt;
use std::time::Instant;

use rnic_client::Context;
use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::Hello;
use rnic_tests::raw::Raw;
use rnic_tests::{DEADLINE, Daemon, Process, binaries};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getpgid, kill_process};

/// Users that are neither the daemon's nor each other's.
const DAEMON: u32 = 61_020;
const LENDER: u32 = 61_021;
/// What a user has in flight is counted over all his processes: these are of one test each.
const FULL: u32 = 61_022;
const PRIVATE: u32 = 61_023;

const PATIENCE: Timespec = Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };

/// Whether this process may become others.
fn is_root() -> bool {
    let root = rustix::process::getuid().is_root();
    if !root {
        rnic_tests::omit("not root: nobody needs a copier");
    }
    root
}

/// Whoever lends his memory needs a copier; the refusal, if he gets none.
fn lends(daemon: &Daemon) -> Result<(), String> {
    let mut lender = daemon.actor_as(LENDER, &["lend"]);
    let line = loop {
        let line = lender.line_after("");
        if !line.contains("listening on ") {
            break line;
        }
    };
    lender.kill();
    match line.as_str() {
        "attached" => Ok(()),
        refused => Err(refused.to_owned()),
    }
}

/// The one child of a process: a daemon's spawner, or its copier.
fn only_child(parent: Pid) -> Pid {
    let parent = parent.as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let child = children.expect("it lives").trim().parse().expect("one child");
    Pid::from_raw(child).expect("a process")
}

/// The process that starts a daemon's copiers.
fn spawner(daemon: &Daemon) -> Pid {
    only_child(Pid::from_raw(daemon.pid() as i32).expect("it lives"))
}

/// A file of `/proc`.
fn of(process: Pid, file: &str) -> String {
    format!("/proc/{}/{file}", process.as_raw_nonzero())
}

/// Somebody who has a copier.
fn lender(daemon: &Daemon) -> Process {
    let mut lender = daemon.actor_as(LENDER, &["lend"]);
    lender.line_after("attached");
    lender
}

/// Of a daemon's descriptors none, not even one that the daemon knows nothing of: whoever has made
/// it could keep the process waiting.
#[test]
fn who_starts_copiers_has_nothing_that_its_daemon_was_started_with() {
    if !is_root() {
        return;
    }
    // Left open by somebody careless.
    let daemon = Daemon::start_limited(binaries!(), "", "exec 7</dev/zero 8</dev/zero");
    for left in [7, 8] {
        let file = format!("/proc/{}/fd/{left}", daemon.pid());
        assert_eq!(std::fs::read_link(file).expect("it has it").to_str(), Some("/dev/zero"));
    }
    let spawner = spawner(&daemon);
    let open = std::fs::read_dir(of(spawner, "fd")).expect("it lives").flatten();
    let mut open: Vec<_> = open.map(|entry| entry.file_name()).collect();
    open.sort();
    assert_eq!(open, ["0", "1", "2"]);
    assert_eq!(std::fs::read(of(spawner, "environ")).expect("it lives"), b"");
    // A terminal's signals are for the daemon.
    assert_eq!(getpgid(Some(spawner)), Ok(spawner));
}

/// What a copier sees of a client is nobody's business, not even of who could look into it as the
/// same user; and it writes no file.
#[test]
fn who_moves_is_closed_to_others_of_the_daemons_user_and_writes_nothing() {
    if !is_root() {
        return;
    }
    let config = format!("[control]\nmode = \"0666\"\nuser = \"{PRIVATE}\"\n");
    let daemon =
        Daemon::start_limited(binaries!(), &config, &format!("chown {PRIVATE} \"${{3%/*}}\""));
    let lender = lender(&daemon);
    let spawner = spawner(&daemon);
    let copier = only_child(spawner);
    let owner = |file| std::fs::metadata(file).expect("it lives").uid();
    for process in [Pid::from_raw(daemon.pid() as i32).expect("it lives"), spawner, copier] {
        assert_eq!(owner(of(process, "")), PRIVATE);
        // The kernel gives root what others may not look into.
        assert_eq!(owner(of(process, "mem")), 0);
    }
    for process in [spawner, copier] {
        let limits = std::fs::read_to_string(of(process, "limits")).expect("it lives");
        for limit in ["Max core file size", "Max file size"] {
            let line = limits.lines().find_map(|l| l.strip_prefix(limit)).expect("a limit");
            let amounts: Vec<&str> = line.split_whitespace().take(2).collect();
            assert_eq!(amounts, ["0", "0"], "{limit}");
        }
    }
    lender.kill();
}

/// Descriptors that clients leave unread count against whoever sends more, as one user.
#[test]
fn clients_that_read_nothing_keep_nobody_from_having_a_copier() {
    if !is_root() {
        return;
    }
    // As root it would be exempt.
    let config = format!("[control]\nmode = \"0666\"\nuser = \"{DAEMON}\"\n");
    let limit = format!("ulimit -Sn 256; chown {DAEMON} \"${{3%/*}}\"");
    let daemon = Daemon::start_limited(binaries!(), &config, &limit);
    let silent: Vec<Raw> = (0..110)
        .map(|_| {
            let raw = Raw::connect(daemon.socket());
            let hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };
            raw.send(&hello.to_bytes(), &[]);
            // The answer is there, and stays there.
            let mut answer = [PollFd::new(&raw.socket, PollFlags::IN)];
            assert_eq!(poll(&mut answer, Some(&PATIENCE)), Ok(1));
            raw
        })
        .collect();
    assert_eq!(lends(&daemon), Ok(()));
    drop(silent);
    assert_eq!(lends(&daemon), Ok(()));
}

/// Nothing tells when others have read enough for an answer with descriptors to be sent.
#[test]
fn an_answer_comes_when_others_have_read_what_kept_it_back() {
    if !is_root() {
        return;
    }
    let config = format!("[control]\nmode = \"0666\"\nuser = \"{DAEMON}\"\n");
    let limit = format!("ulimit -n 256; chown {DAEMON} \"${{3%/*}}\"");
    let daemon = Daemon::start_limited(binaries!(), &config, &limit);
    let watcher = Context::open_at(daemon.socket()).expect("the daemon answers");
    let mut holder = daemon.actor_as(DAEMON, &["in-flight", "400"]);
    holder.line_after("in flight");
    let raw = Raw::connect(daemon.socket());
    let hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };
    raw.send(&hello.to_bytes(), &[]);
    // It has a session, and nothing of it.
    let deadline = Instant::now() + DEADLINE;
    while watcher.status().expect("answers without descriptors come").sessions < 2 {
        assert!(Instant::now() < deadline, "no session was made");
        std::thread::yield_now();
    }
    let mut answer = [PollFd::new(&raw.socket, PollFlags::IN)];
    let (start, worked) = (Instant::now(), daemon.worked());
    assert_eq!(poll(&mut answer, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })), Ok(0));
    // It tries again now and then, and does not go round and round: that would take all of a CPU.
    // Its other work in this second takes a tenth of it, on a busy machine as well.
    let (worked, passed) = (daemon.worked() - worked, start.elapsed());
    assert!(worked < passed / 2, "{worked:?} of {passed:?}");
    holder.release();
    holder.succeed();
    let (_, descriptors) = raw.receive().expect("it is answered");
    assert!(descriptors.len() > 2);
}

/// The kernel lets nobody pass a descriptor meanwhile, and does later.
#[test]
fn a_copier_that_cannot_be_started_now_can_be_started_later() {
    if !is_root() {
        return;
    }
    let config = format!("[control]\nmode = \"0666\"\nuser = \"{FULL}\"\n");
    let limit = format!("ulimit -n 256; chown {FULL} \"${{3%/*}}\"");
    let daemon = Daemon::start_limited(binaries!(), &config, &limit);
    let mut lender = daemon.actor_as(LENDER, &["attach"]);
    lender.line_after("has a session");
    let mut holder = daemon.actor_as(FULL, &["in-flight", "400"]);
    holder.line_after("in flight");
    let refused = lender.ask("now", "memory: ");
    assert!(refused.contains("cannot start a copier: Too many references"), "{refused}");
    holder.release();
    holder.succeed();
    assert_eq!(lender.ask("and now", "memory: "), "attached");
    lender.release();
    lender.succeed();
}

#[test]
fn without_its_spawner_a_daemon_says_so_once_and_serves_on() {
    if !is_root() {
        return;
    }
    let daemon = Daemon::start(binaries!(), "[control]\nmode = \"0666\"\n");
    assert_eq!(lends(&daemon), Ok(()));
    kill_process(spawner(&daemon), Signal::KILL).expect("ours");
    for _ in 0..2 {
        let refused = lends(&daemon).expect_err("nobody starts copiers");
        let why = "cannot start a copier: the process that starts copiers has ended";
        assert!(refused.contains(why), "{refused}");
    }
    daemon.actor(&["duet"]).succeed();
    let said = daemon.stop();
    let errors = said.iter().filter(|l| l.contains("no copier can be started any more")).count();
    assert_eq!(errors, 1, "{said:?}");
}

#[test]
fn copiers_can_be_allowed_later() {
    if !is_root() {
        return;
    }
    let config = |copiers| format!("[control]\nmode = \"0666\"\n[limits]\ncopiers = {copiers}\n");
    let daemon = Daemon::start(binaries!(), &config(0));
    let refused = lends(&daemon).expect_err("none is allowed");
    assert!(refused.contains("limits.copiers = 0 reached"), "{refused}");
    std::fs::write(daemon.dir().join("rnicd.toml"), config(1)).expect("a file of ours");
    daemon.signal(Signal::HUP);
    let deadline = Instant::now() + DEADLINE;
    while let Err(refused) = lends(&daemon) {
        assert!(Instant::now() < deadline, "{refused}");
    }
}
