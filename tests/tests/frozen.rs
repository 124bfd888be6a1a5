//! Files and pages that never come: a FUSE server that takes what it is asked and never answers,
//! so that whoever closes its file or touches its pages waits for it past `SIGKILL`.

use std::process::Command;
use std::time::Instant;

use rnic_client::{DisconnectReason, RemoteMr, Stag};
use rnic_tests::attached::Insider;
use rnic_tests::{DEADLINE, Daemon, Process, binaries, frozen};

/// The client that has the file: another user than the daemon, and than the one beside him.
const HOSTILE: u32 = 61_013;

/// A daemon that serves everybody, if anybody may mount a file system here.
fn daemon(config: &str) -> Option<Daemon> {
    if !rustix::process::getuid().is_root() || !std::path::Path::new("/dev/fuse").exists() {
        rnic_tests::omit("not root, or no /dev/fuse: files that never answer are not tested");
        return None;
    }
    Some(Daemon::start(binaries!(), &format!("[control]\nmode = \"0666\"\n{config}")))
}

/// A client that plays `part` with a frozen file, behind the server of that file.
fn freeze(daemon: &Daemon, part: &[&str]) -> Process {
    freeze_as(HOSTILE, daemon, part)
}

/// The same of another user.
fn freeze_as(uid: u32, daemon: &Daemon, part: &[&str]) -> Process {
    let mount = tempfile::TempDir::new_in(daemon.dir()).expect("a directory").keep();
    let (mount, uid) = (mount.to_string_lossy(), uid.to_string());
    let mut arguments = vec!["freeze", &mount, &uid, "--"];
    arguments.extend(part);
    let mut server = daemon.actor_unseen(&arguments);
    server.line_after("mounted");
    server
}

/// Waits until a process has printed all of these, in any order.
fn says(process: &mut Process, all: &[&str]) {
    let mut left = all.to_vec();
    while !left.is_empty() {
        let line = process.line_after("");
        left.retain(|part| !line.contains(part));
    }
}

#[test]
fn a_descriptor_that_cannot_be_closed_delays_nobody() {
    let closed = "asked: flush";
    // The last two it never takes.
    for (how, told) in [
        ("shared-buffer", ["refused: malformed request: the descriptor is not a memfd", closed]),
        ("socket", ["refused: malformed request: the descriptor is not a socket", closed]),
        ("memory", ["refused: memory: this daemon takes the memory of trusted users only", closed]),
        ("unasked", ["refused: malformed request: a descriptor that nobody asked for", "passed"]),
        ("hello", ["passed"; 2]),
    ] {
        let Some(daemon) = daemon("") else { return };
        let start = daemon.at_rest();
        let mut hostile = freeze(&daemon, &["pass-frozen", how]);
        says(&mut hostile, &told);
        daemon.actor(&["duet"]).succeed();
        // Of no file the daemon asks what it is: the answer might not come either.
        let (_, lines) = hostile.killed();
        assert!(!lines.iter().any(|line| line.contains("asked: statfs")), "{lines:?}");
        daemon.shrinks_to(start);
    }
}

/// The daemon closes descriptors of a user one after the other: here the first blocks the rest.
#[test]
fn stuck_closes_block_no_attachment_of_others() {
    let Some(daemon) = daemon("") else { return };
    let start = daemon.at_rest();
    let mut hostile = [(); 3].map(|()| freeze(&daemon, &["pass-frozen", "shared-buffer"]));
    hostile.iter_mut().for_each(|one| says(one, &["passed"]));
    exchanges_with_attached_memory(&daemon);
    hostile.into_iter().for_each(Process::kill);
    daemon.shrinks_to(start);
}

/// Lets another user lend attached memory to a third one, and both end.
fn exchanges_with_attached_memory(daemon: &Daemon) {
    let mut lender = daemon.actor_as(HOSTILE + 1, &["lend"]);
    let address = lender.line_after("listening on ");
    daemon.actor_as(HOSTILE + 2, &["borrow", &address]).succeed();
    lender.release();
    lender.succeed();
}

/// What is never closed counts against its user, who may pass no more, and keeps no other user's
/// from being closed.
#[test]
fn whoever_passes_too_many_that_cannot_be_closed_is_refused_by_name() {
    let Some(daemon) = daemon("[limits.user]\nclosing = 5\n") else { return };
    let start = daemon.at_rest();
    let mut hostile = [(); 5].map(|()| freeze(&daemon, &["pass-frozen", "shared-buffer"]));
    hostile.iter_mut().for_each(|one| says(one, &["the descriptor is not a memfd"]));
    let mut one_too_many = freeze(&daemon, &["pass-frozen", "shared-buffer"]);
    let limit = format!("limits.user.closing (user {HOSTILE}) = 5 reached");
    says(&mut one_too_many, &[&limit, "passed"]);
    // Another user's is being closed all the same.
    let mut other = freeze_as(HOSTILE + 2, &daemon, &["pass-frozen", "shared-buffer"]);
    says(&mut other, &["asked: flush"]);
    daemon.actor(&["duet"]).succeed();
    one_too_many.kill();
    other.kill();
    hostile.into_iter().for_each(Process::kill);
    daemon.shrinks_to(start);
}

/// Sends `SIGTERM` and waits until the daemon's socket is gone.
fn gives_up_its_path(daemon: &Daemon) {
    daemon.signal(rustix::process::Signal::TERM);
    let deadline = Instant::now() + DEADLINE;
    while daemon.socket().exists() {
        assert!(Instant::now() < deadline, "the socket stays");
        std::thread::yield_now();
    }
}

#[test]
fn a_successor_need_not_wait_for_a_descriptor_that_cannot_be_closed() {
    let Some(daemon) = daemon("") else { return };
    let mut hostile = freeze(&daemon, &["pass-frozen", "shared-buffer"]);
    hostile.line_after("asked: flush");
    gives_up_its_path(&daemon);
    let mut successor = Command::new(binaries!().rnicd);
    successor.arg("run").arg("--socket").arg(daemon.socket());
    let mut successor = Process::start(successor);
    successor.line_after("listening");
    daemon.actor(&["duet"]).succeed();
    successor.signal(rustix::process::Signal::TERM);
    successor.succeed();
    hostile.kill();
    let said = daemon.ends();
    assert!(!said.iter().any(|l| l.contains("ERROR")), "{said:?}");
}

/// A client that lends the pages of a frozen file, and a Read of them that the client's copy does
/// not return from.
fn read_of_pages_that_never_come(daemon: &Daemon) -> (Process, Insider) {
    let mut hostile = freeze(daemon, &["lend-frozen", "shared"]);
    let line = hostile.line_after("region ");
    let (addr, rkey) = line.split_once(' ').expect("address and STag");
    let (addr, rkey) = (addr.parse().unwrap(), Stag(rkey.parse().unwrap()));
    let insider = Insider::new(daemon, "shared");
    insider.post_read(RemoteMr { addr, len: frozen::LEN as u64, rkey });
    hostile.line_after("asked: read");
    (hostile, insider)
}

/// Configuration of a daemon for [`read_of_pages_that_never_come`].
fn with_deadline(deadline: &str, loopback: &str) -> String {
    format!(
        "[engine]\nworkers = 1\ncopy_deadline = \"{deadline}\"\nloopback = \"{loopback}\"\n\
         [[pd]]\nname = \"shared\"\nusers = [0, {HOSTILE}]\n"
    )
}

#[test]
fn pages_that_never_come_block_nobody_else() {
    for loopback in rnic_tests::PATHS {
        let Some(daemon) = daemon(&with_deadline("1h", loopback)) else { return };
        let start = daemon.at_rest();
        let (hostile, insider) = read_of_pages_that_never_come(&daemon);
        daemon.actor(&["duet"]).succeed();
        exchanges_with_attached_memory(&daemon);
        // The client's end is the end of the copy, however its thread is stuck.
        hostile.kill();
        assert!(insider.client.completion().ok().is_err());
        drop(insider);
        daemon.shrinks_to(start);
    }
}

#[test]
fn pages_that_never_come_end_their_session() {
    for loopback in rnic_tests::PATHS {
        let Some(mut daemon) = daemon(&with_deadline("1s", loopback)) else { return };
        let start = daemon.at_rest();
        let ended = daemon.status().sessions_ended;
        let (hostile, insider) = read_of_pages_that_never_come(&daemon);
        assert!(insider.client.completion().ok().is_err());
        let reason = insider.qp.wait_disconnected(Some(DEADLINE)).unwrap();
        assert!(reason != DisconnectReason::Orderly, "{reason:?}");
        daemon.settles("rid of the session", |s| s.sessions_ended > ended);
        let after = daemon.says("a copy of attached memory did not return in ");
        assert!(after.starts_with("1 s"), "{after}");
        drop(insider);
        // The client's thread still waits for a page, and nothing of the session is left.
        daemon.is_empty();
        // Other processes of the same user are welcome.
        daemon.actor_as(HOSTILE, &["lend"]).line_after("attached");
        hostile.kill();
        daemon.shrinks_to(start);
    }
}
