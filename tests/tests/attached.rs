//! Attached memory between processes: every way, and every way in which it can vanish.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Instant;

use rnic_client::{
    Access, Context, DisconnectReason, ListKind, Refusal, Rows, Scope, SendRequest, TerminateCode,
    TerminateOrigin,
};
use rnic_core::abi::control::{MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_tests::attached::{Guest, LENT, pattern};
use rnic_tests::raw::Raw;
use rnic_tests::{DEADLINE, Daemon, Process, binaries};

/// A client of `host` that lends, and this process as a guest of it at `guest`.
fn lent(host: &Daemon, guest: &Daemon, fate: &[&str]) -> (Process, Context, Guest) {
    let mut lender = host.actor(&[&["lend"], fate].concat());
    let address: SocketAddr = lender.line_after("listening on ").parse().expect("an address");
    let context = Context::open_at(guest.socket()).expect("the daemon answers");
    let guest = Guest::connect(&context, address, pattern(1)).expect("somebody lends");
    (lender, context, guest)
}

fn there_and_back(host: &Daemon, guest: &Daemon) {
    let (mut lender, _context, guest) = lent(host, guest, &[]);
    rnic_tests::attached::there_and_back(&guest).expect("the same comes back");
    lender.release();
    let checksum = format!("{:08x}", crc32c::crc32c(&pattern(3)));
    assert_eq!(lender.line_after("checksum "), checksum);
    lender.succeed();
}

#[test]
fn both_ends_over_both_paths() {
    for config in ["", "[engine]\nworkers = 3\nloopback = \"tcp\"\n", "[mpa]\ncrc = false\n"] {
        let daemon = Daemon::start(binaries!(), config);
        let start = daemon.at_rest();
        there_and_back(&daemon, &daemon);
        daemon.shrinks_to(start);
    }
    let daemons = ["[mpa]\ncrc = false\n"; 2].map(|c| Daemon::start(binaries!(), c));
    there_and_back(&daemons[0], &daemons[1]);
}

/// Bytes are read when they are sent, and not when the request is posted.
#[test]
fn what_is_written_after_posting_and_before_sending_is_sent() {
    let daemon = Daemon::start(binaries!(), "");
    let (mut lender, _context, guest) = lent(&daemon, &daemon, &[]);
    // Behind a Read of everything, a fenced Write waits while its source changes.
    let all = guest.own.sge(0, LENT as u32);
    let read = SendRequest::read(1, all, guest.lent.at(0)).signaled();
    let small = [guest.own.sge(0, 64)];
    let write = SendRequest::write(2, &small, guest.lent.at(0)).signaled().fence();
    guest.qp.post_send(&[read, write]).expect("room");
    // The Read brings zeros over the pattern before the Write is sent.
    guest.completion().and_then(|c| Ok(c.ok()?)).expect("read");
    guest.completion().and_then(|c| Ok(c.ok()?)).expect("written");
    lender.release();
    let checksum = format!("{:08x}", crc32c::crc32c(&vec![0; LENT]));
    assert_eq!(lender.line_after("checksum "), checksum);
}

/// Waits until a process has become another program.
fn becomes(process: &Process, name: &str) {
    let deadline = Instant::now() + DEADLINE;
    let comm = format!("/proc/{}/comm", process.id());
    while std::fs::read_to_string(&comm).expect("it lives").trim() != name {
        assert!(Instant::now() < deadline, "it is still what it was");
        std::thread::yield_now();
    }
}

#[test]
fn a_program_that_execs_takes_its_session_along() {
    for config in ["", "[engine]\nloopback = \"tcp\"\n"] {
        let daemon = Daemon::start(binaries!(), config);
        let (mut lender, _context, guest) = lent(&daemon, &daemon, &["--exec"]);
        guest.write().expect("it lends");
        lender.release();
        becomes(&lender, "sleep");
        // Whatever was under way, it ends; and the sleeper sleeps.
        while guest.write().is_ok() {}
        assert!(!lender.has_ended());
        lender.kill();
        drop(guest);
    }
}

/// Its session lives on, by the descriptors that it kept; its memory does not.
#[test]
fn memory_is_detached_when_its_program_is_replaced() {
    for config in ["", "[engine]\nworkers = 3\nloopback = \"tcp\"\n"] {
        let daemon = Daemon::start(binaries!(), config);
        let (mut lender, context, guest) = lent(&daemon, &daemon, &["--exec", "--keep"]);
        guest.write().expect("it lends");
        lender.release();
        becomes(&lender, "sleep");
        let ended = loop {
            if let Err(e) = guest.write() {
                break e;
            }
        };
        // By the Terminate of an RNIC that cannot reach its memory (RFC 5041 section 7.1).
        let reason = guest.qp.wait_disconnected(Some(DEADLINE)).expect("it was told");
        let code = TerminateCode { layer: 1, etype: 0, code: 0 };
        let by_peer = matches!(
            reason,
            DisconnectReason::Terminate { origin: TerminateOrigin::Peer, code: c, .. } if c == code
        );
        assert!(by_peer, "{reason:?} after {ended}");
        assert!(!lender.has_ended());
        let listed = context.list(ListKind::Clients, 0).expect("the daemon answers");
        assert_eq!(listed.total, 2, "{listed:?}");
        lender.kill();
        drop((guest, context));
        daemon.is_empty();
    }
}

#[test]
fn killed_under_traffic_nothing_is_left() {
    for config in ["", "[engine]\nloopback = \"tcp\"\n"] {
        let daemon = Daemon::start(binaries!(), config);
        let start = daemon.at_rest();
        for round in 0..20 {
            let (lender, context, guest) = lent(&daemon, &daemon, &[]);
            for id in 0..8 {
                let all = [guest.own.sge(0, LENT as u32)];
                guest.post(SendRequest::write(id, &all, guest.lent.at(0))).expect("room");
            }
            for _ in 0..round % 8 {
                guest.completion().and_then(|c| Ok(c.ok()?)).expect("written");
            }
            lender.kill();
            for _ in round % 8..8 {
                guest.completion().expect("every request completes");
            }
            drop((guest, context));
        }
        daemon.shrinks_to(start);
    }
}

#[test]
fn nothing_but_its_own_memory_is_attached() {
    let daemon = Daemon::start(binaries!(), "");
    let start = daemon.at_rest();
    let mut raw = Raw::open(daemon.socket());
    let pd = raw.pd();
    let register = |raw: &mut Raw, address: u64, length: u64| {
        let source = MrSource::Attached { address };
        let (access, scope) = (Access::LOCAL_WRITE, Scope::Pd);
        raw.call(RequestBody::RegMr(MrRequest { pd, source, length, iova: 0, access, scope }))
    };
    let early = register(&mut raw, 4096, 1).expect_err("nothing is attached");
    assert!(early.to_string().contains("has not attached"), "{early}");

    rnic_tests::attached::offer_wrong_descriptors(&mut raw).expect("all are refused by name");
    let own = rnic_tests::attached::own_memory().expect("it is there");
    let attached = raw.try_call(RequestBody::AttachMemory, &[own.as_fd()]);
    assert_eq!(attached, Some(Ok(ReplyBody::Done)));
    let again = raw.try_call(RequestBody::AttachMemory, &[own.as_fd()]);
    assert!(matches!(again, Some(Err(Refusal::InUse { .. }))), "{again:?}");
    for (address, length, field) in [
        (u64::MAX - 10, 5, "address"),
        (u64::MAX - 10, 20, "address"),
        (1 << 60, 1, "address"),
        (0, u64::MAX, "address"),
        (1 << 60, 0, "address"),
    ] {
        let refusal = register(&mut raw, address, length).expect_err("no such range");
        let named = matches!(&refusal, Refusal::Invalid { field: f, .. } if f == field);
        assert!(named, "{length} at {address:#x}: {refusal}");
    }
    let Ok(ReplyBody::Mr { mr, .. }) = register(&mut raw, 4096, 1 << 30) else {
        panic!("what is mapped there is found out when it is used")
    };
    let listed = raw.try_call(RequestBody::List { what: ListKind::Mrs, from: 0 }, &[]);
    let Some(Ok(ReplyBody::Rows { rows: Rows::Mrs(rows), .. })) = listed else {
        panic!("{listed:?}")
    };
    assert_eq!(rows.iter().map(|r| (r.mr, r.buffer)).collect::<Vec<_>>(), [(mr, None)]);
    assert_eq!(raw.call(RequestBody::DeregMr { mr }), Ok(ReplyBody::Done));

    // The right number of descriptors, or the session ends.
    let mut careless = Raw::open(daemon.socket());
    careless.try_call(RequestBody::AttachMemory, &[]);
    assert_eq!(careless.try_call(RequestBody::QueryDevice, &[]), None);
    let mut generous = Raw::open(daemon.socket());
    generous.try_call(RequestBody::AttachMemory, &[own.as_fd(), own.as_fd()]);
    assert_eq!(generous.try_call(RequestBody::QueryDevice, &[]), None);
    drop((raw, careless, generous));
    daemon.shrinks_to(start);
}

/// A daemon that serves everybody, with clients of another user, whose memory copiers reach. Only
/// root can become somebody else: nothing, otherwise.
struct Strangers {
    daemon: Daemon,
    actor: std::path::PathBuf,
}

impl Strangers {
    fn new(config: &str) -> Option<Self> {
        use std::os::unix::fs::PermissionsExt;
        if !rustix::process::getuid().is_root() {
            rnic_tests::omit("not root: attached memory of other users is not tested");
            return None;
        }
        let daemon = Daemon::start(binaries!(), &format!("[control]\nmode = \"0666\"\n{config}"));
        let open_to_all = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(daemon.dir(), open_to_all).expect("our own directory");
        // Where others can run it. Copied by a process of its own, because whatever another test
        // starts while this one has it open for writing would keep it from being run.
        let actor = daemon.dir().join("actor");
        let mut copy = std::process::Command::new("cp");
        copy.arg(binaries!().actor).arg(&actor);
        Process::start(copy).succeed();
        Some(Strangers { daemon, actor })
    }

    fn actor(&self, part: &[&str]) -> Process {
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.arg(&self.actor).args(part).env("RNIC_SOCKET", self.daemon.socket());
        Process::start(command)
    }

    /// A stranger who lends, and this process as his guest.
    fn lent(&self, fate: &[&str]) -> (Process, Context, Guest) {
        let mut lender = self.actor(&[&["lend"], fate].concat());
        let address: SocketAddr = lender.line_after("listening on ").parse().expect("an address");
        let context = Context::open_at(self.daemon.socket()).expect("the daemon answers");
        let guest = Guest::connect(&context, address, pattern(1)).expect("somebody lends");
        (lender, context, guest)
    }

    /// Process ids of the daemon's copiers: children of the process that starts them, which is the
    /// daemon's own child.
    fn copiers(&self) -> Vec<i32> {
        let spawners = children(self.daemon.pid() as i32);
        assert_eq!(spawners.len(), 1, "{spawners:?}");
        children(spawners[0])
    }

    /// Every thread of every copier has a filter of its own behind its spawner's, and no copier has
    /// an environment.
    fn copiers_are_confined(&self) {
        for pid in self.copiers() {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
            for task in tasks.flatten() {
                let status = std::fs::read_to_string(task.path().join("status")).expect("it lives");
                let has = |line| status.lines().any(|l| l == line);
                assert!(has("Seccomp:\t2") && has("Seccomp_filters:\t2"), "{status}");
                assert!(has("NoNewPrivs:\t1"), "{status}");
            }
            let environment = std::fs::read(format!("/proc/{pid}/environ")).expect("it lives");
            assert_eq!(environment, b"");
        }
    }

    /// Waits until no copier is left.
    fn has_no_copiers(&self) {
        let deadline = Instant::now() + DEADLINE;
        while !self.copiers().is_empty() {
            assert!(Instant::now() < deadline, "copiers are left: {:?}", self.copiers());
            std::thread::yield_now();
        }
        // The daemon hears of it a moment later.
        let context = Context::open_at(self.daemon.socket()).expect("the daemon answers");
        let counted = || match context.list(ListKind::Limits, 0).expect("the daemon answers").rows {
            Rows::Limits(rows) => {
                rows.into_iter().find(|r| r.key == "limits.copiers").unwrap().used
            }
            other => panic!("{other:?}"),
        };
        while counted() > 0 {
            assert!(Instant::now() < deadline, "copiers are counted that have ended");
            std::thread::yield_now();
        }
    }
}

/// Process ids of a process's children.
fn children(parent: i32) -> Vec<i32> {
    let parent = format!("PPid:\t{parent}");
    let all = std::fs::read_dir("/proc").expect("this is Linux").flatten();
    let numbers = all.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok());
    let is_child = |pid: &i32| {
        // It may be gone by now.
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
        status.is_ok_and(|s| s.lines().any(|line| line == parent))
    };
    numbers.filter(is_child).collect()
}

const PATHS: [&str; 3] = [
    "",
    "[engine]\nworkers = 3\nloopback = \"tcp\"\n",
    "[engine]\nworkers = 1\nloopback = \"tcp\"\n[mpa]\ncrc = false\n",
];

#[test]
fn memory_of_other_users_goes_by_copiers() {
    for config in PATHS {
        let Some(strangers) = Strangers::new(config) else { return };
        let start = strangers.daemon.at_rest();
        for both in [false, true] {
            let mut lender = strangers.actor(&["lend"]);
            let address = lender.line_after("listening on ");
            let borrower = match both {
                true => strangers.actor(&["borrow", &address]),
                false => strangers.daemon.actor(&["borrow", &address]),
            };
            borrower.succeed();
            lender.release();
            let checksum = format!("{:08x}", crc32c::crc32c(&pattern(3)));
            assert_eq!(lender.line_after("checksum "), checksum);
            lender.succeed();
        }
        strangers.has_no_copiers();
        strangers.daemon.shrinks_to(start);
    }
}

/// Stops a process, and waits until every thread of it has stopped.
fn stop(pid: i32) {
    let process = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(process, rustix::process::Signal::STOP).expect("it lives");
    let deadline = Instant::now() + DEADLINE;
    let runs = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status"));
        status.is_ok_and(|s| !s.lines().any(|line| line == "State:\tT (stopped)"))
    };
    while std::fs::read_dir(format!("/proc/{pid}/task")).expect("it lives").flatten().any(runs) {
        assert!(Instant::now() < deadline, "it does not stop");
        std::thread::yield_now();
    }
}

#[test]
fn a_copy_that_does_not_return_costs_its_session_and_nobody_else() {
    for config in PATHS {
        let engine = "[engine]\ncopier_deadline = \"2s\"\n";
        let config = match config.strip_prefix("[engine]\n") {
            Some(rest) => format!("{engine}{rest}"),
            None => format!("{engine}{config}"),
        };
        let Some(strangers) = Strangers::new(&config) else { return };
        let start = strangers.daemon.at_rest();
        let (lender, context, guest) = strangers.lent(&[]);
        guest.write().expect("it lends");
        let ended = strangers.daemon.status().sessions_ended;
        // As if stuck in the kernel.
        let copiers = strangers.copiers();
        assert_eq!(copiers.len(), 1, "{copiers:?}");
        strangers.copiers_are_confined();
        copiers.into_iter().for_each(stop);
        let all = [guest.own.sge(0, LENT as u32)];
        guest.post(SendRequest::write(1, &all, guest.lent.at(0))).expect("room");
        // Meanwhile others do as they like, also with attached memory.
        there_and_back(&strangers.daemon, &strangers.daemon);
        guest.completion().expect("every request completes");
        let reason = guest.qp.wait_disconnected(Some(DEADLINE)).expect("it ends");
        assert!(reason != DisconnectReason::Orderly, "{reason:?}");
        strangers.daemon.settles("rid of the session", |s| s.sessions_ended > ended);
        drop((guest, context));
        lender.kill();
        strangers.has_no_copiers();
        strangers.daemon.shrinks_to(start);
    }
}

#[test]
fn strangers_killed_or_replaced_under_traffic_leave_nothing() {
    for config in PATHS {
        let Some(strangers) = Strangers::new(config) else { return };
        let start = strangers.daemon.at_rest();
        for round in 0..12 {
            let replaced = round % 3 == 0;
            let fate: &[&str] = if replaced { &["--exec", "--keep"] } else { &[] };
            let (mut lender, context, guest) = strangers.lent(fate);
            for id in 0..8 {
                let all = [guest.own.sge(0, LENT as u32)];
                guest.post(SendRequest::write(id, &all, guest.lent.at(0))).expect("room");
            }
            for _ in 0..round % 8 {
                guest.completion().and_then(|c| Ok(c.ok()?)).expect("written");
            }
            if replaced {
                lender.release();
                becomes(&lender, "sleep");
                while guest.write().is_ok() {}
                guest.qp.wait_disconnected(Some(DEADLINE)).expect("it ends");
                assert!(!lender.has_ended());
            }
            lender.kill();
            drop((guest, context));
        }
        strangers.has_no_copiers();
        strangers.daemon.shrinks_to(start);
    }
}

#[test]
fn strangers_are_refused_by_name() {
    let Some(strangers) = Strangers::new("") else { return };
    let start = strangers.daemon.at_rest();
    let said = strangers.actor(&["offer"]).succeed();
    assert_eq!(said, ["all are refused"]);
    strangers.has_no_copiers();
    strangers.daemon.shrinks_to(start);
    for (limits, told) in [
        ("[limits]\ncopiers = 2\n", "limits.copiers = 2 reached"),
        ("[limits.user]\ncopiers = 2\n", "limits.user.copiers (user 65534) = 2 reached"),
    ] {
        too_many_copiers(limits, told);
    }
}

/// The third copier of a user is refused by this limit, as long as the first two live.
fn too_many_copiers(limits: &str, told: &str) {
    let Some(strangers) = Strangers::new(limits) else { return };
    let start = strangers.daemon.at_rest();
    for _ in 0..2 {
        let mut lenders = [(); 2].map(|()| strangers.actor(&["lend"]));
        for lender in &mut lenders {
            lender.line_after("listening on ");
            lender.line_after("attached");
        }
        let mut one_too_many = strangers.actor(&["lend"]);
        let refused = one_too_many.line_after("refused: ");
        assert!(refused.starts_with(told), "{refused}");
        for lender in lenders {
            lender.kill();
        }
        strangers.has_no_copiers();
    }
    strangers.daemon.shrinks_to(start);
}
