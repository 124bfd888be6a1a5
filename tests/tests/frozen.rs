//! Files and pages that never come: a FUSE server that takes what it is asked and never answers,
//! so that whoever closes its file or touches its pages waits for it past `SIGKILL`.

use std::process::Command;
use std::time::Instant;

use rnic_client::{
    Access, Completion, Context, DisconnectReason, QpOptions, RemoteMr, SendRequest, Stag,
};
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
        ("unasked", ["refused: malformed request: a descriptor that nobody asked for", "passed"]),
        ("hello", ["passed"; 2]),
    ] {
        let Some(daemon) = daemon("") else { return };
        let start = daemon.at_rest();
        let mut hostile = freeze(&daemon, &["pass-frozen", how]);
        says(&mut hostile, &told);
        daemon.actor(&["duet"]).succeed();
        hostile.kill();
        daemon.shrinks_to(start);
    }
}

/// What a new process inherits it closes before it runs its program: neither may the daemon wait
/// for that, nor may a client be without a copier because of it.
#[test]
fn descriptors_that_cannot_be_closed_keep_nobody_from_having_a_copier() {
    let Some(daemon) = daemon("") else { return };
    let start = daemon.at_rest();
    // The first is being closed, for ever, the others wait behind it.
    let mut hostile = [(); 3].map(|()| freeze(&daemon, &["pass-frozen", "shared-buffer"]));
    hostile.iter_mut().for_each(|one| says(one, &["passed"]));
    let mut lender = daemon.actor_as(HOSTILE + 1, &["lend"]);
    lender.line_after("attached");
    lender.kill();
    hostile.into_iter().for_each(Process::kill);
    daemon.shrinks_to(start);
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

#[test]
fn memory_whose_pages_never_come_costs_its_session_and_nobody_else() {
    for loopback in ["direct", "tcp"] {
        let config = format!(
            "[engine]\ncopier_deadline = \"2s\"\nloopback = \"{loopback}\"\n\
             [[user]]\nwho = {HOSTILE}\nuser = {{ copiers = 1 }}\n\
             [[pd]]\nname = \"shared\"\nusers = [0, {HOSTILE}]\n",
        );
        let Some(daemon) = daemon(&config) else { return };
        let start = daemon.at_rest();
        let mut hostile = freeze(&daemon, &["lend-frozen", "shared"]);
        let line = hostile.line_after("region ");
        let (addr, rkey) = line.split_once(' ').expect("address and STag");
        let (addr, rkey) = (addr.parse().unwrap(), Stag(rkey.parse().unwrap()));
        let lent = RemoteMr { addr, len: frozen::LEN as u64, rkey };

        // Two ends of one session, which shares the domain: its peer's memory is where nobody
        // comes back from.
        let context = Context::open_at(daemon.socket()).unwrap();
        let pd = context.open_pd(Some("shared")).unwrap();
        let cq = context.create_cq(16, None).unwrap();
        let [reader, partner] = [(); 2].map(|()| pd.create_qp(&QpOptions::new(&cq)).unwrap());
        let listener = context.listen("127.0.0.1:0", 4).unwrap();
        rnic_tests::join(&listener, &reader, &partner);
        let buffer = context.create_shared_buffer(4096).unwrap();
        let own = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let ended = daemon.status().sessions_ended;
        let read = SendRequest::read(1, own.sge(0, 4096), lent.at(0)).signaled();
        reader.post_send(&[read]).unwrap();
        hostile.line_after("asked: read");

        daemon.actor(&["duet"]).succeed();
        let mut one = [Completion::default()];
        assert_eq!(cq.wait(&mut one, Some(DEADLINE)).unwrap(), 1);
        assert!(one[0].ok().is_err(), "{one:?}");
        let reason = reader.wait_disconnected(Some(DEADLINE)).unwrap();
        assert!(reason != DisconnectReason::Orderly, "{reason:?}");
        daemon.settles("rid of the session", |s| s.sessions_ended > ended);
        drop((reader, partner, listener, own, buffer, pd, cq, context));
        // While its copier still waits in the kernel for a page, nothing of the session is left.
        daemon.is_empty();
        // The copier itself counts against its user, and against nobody else.
        let lend = |uid| daemon.actor_as(uid, &["lend"]);
        let refused = lend(HOSTILE).line_after("refused: ");
        let limit = format!("user.{HOSTILE}.user.copiers = 1 reached");
        assert!(refused.starts_with(&limit), "{refused}");
        lend(HOSTILE + 1).line_after("attached");
        hostile.kill();
        daemon.shrinks_to(start);
    }
}

#[test]
fn a_file_that_never_says_what_it_is_cannot_be_attached() {
    let Some(daemon) = daemon("[engine]\ncopier_deadline = \"2s\"\n") else { return };
    let start = daemon.at_rest();
    let mut hostile = freeze(&daemon, &["pass-frozen", "memory"]);
    let told = "cannot start a copier: the descriptor could not be examined in time";
    says(&mut hostile, &["asked: statfs", told, "passed"]);
    daemon.actor(&["duet"]).succeed();
    hostile.kill();
    daemon.shrinks_to(start);
}
