//! The process that starts movers: what clients cannot do to it, and what is said when it is gone.

use std::time::Instant;

use rnic_client::Context;
use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::Hello;
use rnic_tests::raw::Raw;
use rnic_tests::{DEADLINE, Daemon, binaries};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

/// Users that are neither the daemon's nor each other's.
const DAEMON: u32 = 61_020;
const LENDER: u32 = 61_021;

const PATIENCE: Timespec = Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };

/// Whether this process may become others.
fn is_root() -> bool {
    let root = rustix::process::getuid().is_root();
    if !root {
        rnic_tests::omit("not root: nobody needs a mover");
    }
    root
}

/// Whoever lends his memory needs a mover; the refusal, if he gets none.
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

/// Descriptors that clients leave unread count against whoever sends more, as one user.
#[test]
fn clients_that_read_nothing_keep_nobody_from_having_a_mover() {
    if !is_root() {
        return;
    }
    // As root it would be exempt.
    let config = format!("[control]\nmode = \"0666\"\nuser = \"{DAEMON}\"\n");
    let limit = format!("ulimit -Sn 256; chown {DAEMON} \"${{3%/*}}\"");
    let daemon = Daemon::start_limited(binaries!(), &config, &limit);
    let silent: Vec<Raw> = (0..110)
        .map(|_| {
            let raw = Raw::connect(daemon.socket()).expect("the daemon is there");
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
    let raw = Raw::connect(daemon.socket()).expect("the daemon is there");
    let hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };
    raw.send(&hello.to_bytes(), &[]);
    // It has a session, and nothing of it.
    let deadline = Instant::now() + DEADLINE;
    while watcher.status().expect("answers without descriptors come").sessions < 2 {
        assert!(Instant::now() < deadline, "no session was made");
        std::thread::yield_now();
    }
    let mut answer = [PollFd::new(&raw.socket, PollFlags::IN)];
    assert_eq!(poll(&mut answer, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0));
    holder.release();
    holder.succeed();
    let (_, descriptors) = raw.receive().expect("it is answered");
    assert!(descriptors.len() > 2);
}

#[test]
fn without_its_starter_a_daemon_says_so_once_and_serves_on() {
    if !is_root() {
        return;
    }
    let daemon = Daemon::start(binaries!(), "[control]\nmode = \"0666\"\n");
    assert_eq!(lends(&daemon), Ok(()));
    let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
    let starter = std::fs::read_to_string(children).expect("it lives");
    let starter = Pid::from_raw(starter.trim().parse().expect("one child")).expect("a process");
    kill_process(starter, Signal::KILL).expect("ours");
    for _ in 0..2 {
        let refused = lends(&daemon).expect_err("nobody starts movers");
        let why = "cannot start a mover: the process that starts movers has ended";
        assert!(refused.contains(why), "{refused}");
    }
    daemon.actor(&["duet"]).succeed();
    let said = daemon.stop();
    let errors = said.iter().filter(|l| l.contains("no mover can be started any more")).count();
    assert_eq!(errors, 1, "{said:?}");
}

#[test]
fn movers_can_be_allowed_later() {
    if !is_root() {
        return;
    }
    let config = |movers| format!("[control]\nmode = \"0666\"\n[limits]\nmovers = {movers}\n");
    let daemon = Daemon::start(binaries!(), &config(0));
    let refused = lends(&daemon).expect_err("none is allowed");
    assert!(refused.contains("limits.movers = 0 reached"), "{refused}");
    std::fs::write(daemon.dir().join("rnicd.toml"), config(1)).expect("a file of ours");
    daemon.signal(Signal::HUP);
    let deadline = Instant::now() + DEADLINE;
    while let Err(refused) = lends(&daemon) {
        assert!(Instant::now() < deadline, "{refused}");
    }
}
