//! Files and pages that never load: a FUSE server leaves requests unanswered, so that a process
//! that closes its file or touches the file's pages blocks, even after `SIGKILL`.

use std::process::Command;
use std::time::Instant;

use rnic_client::{DisconnectReason, RemoteMr, Stag};
use rnic_tests::attached::Insider;
use rnic_tests::{DEADLINE, Daemon, Process, built, frozen};

/// User ID of the client with the file. Differs from the daemon's user and from the bystander's.
const HOSTILE: u32 = 61_013;

/// Starts a daemon that serves all users. Returns `None` if FUSE mounts are impossible.
fn daemon(config: &str) -> Option<Daemon> {
    if !rustix::process::getuid().is_root() || !std::path::Path::new("/dev/fuse").exists() {
        rnic_tests::omit("not root, or no /dev/fuse: files that never answer are not tested");
        return None;
    }
    Some(Daemon::start(&format!("[control]\nmode = \"0666\"\n{config}")))
}

/// Starts the server of a frozen file and a client that plays `part` with the file.
fn freeze(daemon: &Daemon, part: &[&str]) -> Process {
    freeze_as(HOSTILE, daemon, part)
}

/// Like [`freeze`], as another user.
fn freeze_as(uid: u32, daemon: &Daemon, part: &[&str]) -> Process {
    let mount = tempfile::TempDir::new_in(daemon.dir()).expect("a directory").keep();
    let mount = mount.to_string_lossy();
    let uid = uid.to_string();
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
fn stuck_close_delays_no_other_client() {
    let closed = "asked: flush";
    // In the last two cases the daemon never takes the descriptor.
    for (how, told) in [
        ("shared-buffer", ["refused: malformed request: the descriptor is not a memfd", closed]),
        ("socket", ["refused: malformed request: the descriptor is not a socket", closed]),
        ("memory", ["refused: memory: the daemon accesses memory of trusted users only", closed]),
        ("unasked", ["refused: malformed request: an unexpected descriptor", "passed"]),
        ("hello", ["passed"; 2]),
    ] {
        let Some(daemon) = daemon("") else { return };
        let start = daemon.at_rest();
        let mut hostile = freeze(&daemon, &["pass-frozen", how]);
        says(&mut hostile, &told);
        daemon.actor(&["duet"]).succeed();
        // The daemon must not query the type of a file, because the reply might never arrive.
        let (_, lines) = hostile.killed();
        assert!(!lines.iter().any(|line| line.contains("asked: statfs")), "{lines:?}");
        daemon.shrinks_to(start);
    }
}

/// The daemon closes a user's descriptors in sequence, so the first one blocks the others.
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

/// Lends attached memory of one user to a client of another, and ends both.
fn exchanges_with_attached_memory(daemon: &Daemon) {
    let mut lender = daemon.actor_as(HOSTILE + 1, &["lend"]);
    let address = lender.line_after("listening on ");
    daemon.actor_as(HOSTILE + 2, &["borrow", &address]).succeed();
    lender.release();
    lender.succeed();
}

/// Unfinished closes count against their user, which can pass no more descriptors. The daemon still
/// closes descriptors of other users.
#[test]
fn too_many_stuck_closes_are_refused_by_name() {
    let Some(daemon) = daemon("[limits.user]\nclosing = 5\n") else { return };
    let start = daemon.at_rest();
    let mut hostile = [(); 5].map(|()| freeze(&daemon, &["pass-frozen", "shared-buffer"]));
    hostile.iter_mut().for_each(|one| says(one, &["the descriptor is not a memfd"]));
    let mut one_too_many = freeze(&daemon, &["pass-frozen", "shared-buffer"]);
    let limit = format!("limits.user.closing (user {HOSTILE}) = 5 reached");
    says(&mut one_too_many, &[&limit, "passed"]);
    // The daemon still closes another user's descriptor.
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
fn next_daemon_starts_despite_a_stuck_close() {
    let Some(daemon) = daemon("") else { return };
    let mut hostile = freeze(&daemon, &["pass-frozen", "shared-buffer"]);
    hostile.line_after("asked: flush");
    gives_up_its_path(&daemon);
    let mut successor = Command::new(built::program("rnicd"));
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

/// Starts a client that lends the pages of a frozen file, and posts a Read of them, on which the
/// client's copy blocks.
fn read_from_pages_that_never_load(daemon: &Daemon) -> (Process, Insider) {
    let mut hostile = freeze(daemon, &["lend-frozen", "shared"]);
    let line = hostile.line_after("region ");
    let (addr, rkey) = line.split_once(' ').expect("address and STag");
    let addr = addr.parse().unwrap();
    let rkey = Stag(rkey.parse().unwrap());
    let insider = Insider::new(daemon, "shared");
    insider.post_read(RemoteMr { addr, len: frozen::LEN as u64, rkey });
    hostile.line_after("asked: read");
    (hostile, insider)
}

/// Returns the configuration of a daemon for [`read_from_pages_that_never_load`].
fn with_deadline(deadline: &str, loopback: &str) -> String {
    format!(
        "[engine]\nworkers = 1\ncopy_deadline = \"{deadline}\"\nloopback = \"{loopback}\"\n\
         [[pd]]\nname = \"shared\"\nusers = [0, {HOSTILE}]\n"
    )
}

#[test]
fn missing_pages_block_no_other_session() {
    for loopback in rnic_tests::PATHS {
        let Some(daemon) = daemon(&with_deadline("1h", loopback)) else { return };
        let start = daemon.at_rest();
        let (hostile, insider) = read_from_pages_that_never_load(&daemon);
        daemon.actor(&["duet"]).succeed();
        exchanges_with_attached_memory(&daemon);
        // The end of the client ends the copy, although its thread is stuck.
        hostile.kill();
        assert!(insider.client.completion().ok().is_err());
        drop(insider);
        daemon.shrinks_to(start);
    }
}

#[test]
fn missing_pages_end_their_session() {
    for loopback in rnic_tests::PATHS {
        let Some(mut daemon) = daemon(&with_deadline("1s", loopback)) else { return };
        let start = daemon.at_rest();
        let ended = daemon.status().sessions_ended;
        let (hostile, insider) = read_from_pages_that_never_load(&daemon);
        assert!(insider.client.completion().ok().is_err());
        let reason = insider.qp.wait_disconnected(Some(DEADLINE)).unwrap();
        assert!(reason != DisconnectReason::Orderly, "{reason:?}");
        daemon.wait_status("rid of the session", |s| s.sessions_ended > ended);
        let after = daemon.line_after("a copy of attached memory did not return in ");
        assert!(after.starts_with("1 s"), "{after}");
        drop(insider);
        // The client's thread still waits for a page, but nothing of the session remains.
        daemon.is_empty();
        // Other processes of the same user are still admitted.
        daemon.actor_as(HOSTILE, &["lend"]).line_after("attached");
        hostile.kill();
        daemon.shrinks_to(start);
    }
}
