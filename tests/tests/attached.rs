//! Attached memory of several processes: transfers over each path, and each way in which the memory
//! can disappear. Workers access the memory of processes of the daemon's own user. For other users
//! the library copies the data, which only root can test.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::{Features, MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_abi::abi::copies::copy_entry;
use rnic_abi::abi::queue::{QUEUE_HEADER_LEN, arena_header, queue_header};
use rnic_abi::shm::Mapping;
use rnic_abi::types::MrId;
use rnic_client::{
    Access, Context, DisconnectReason, ListKind, Refusal, RemoteMr, Rows, Scope, SendRequest,
    TerminateCode, TerminateOrigin,
};
use rnic_tests::attached::{CopyQueue, Guest, Insider, LENT, copying_threads, pattern};
use rnic_tests::raw::Raw;
use rnic_tests::{DEADLINE, Daemon, Process};
use rustix::process::Signal;

/// Starts a lender at `host`, and connects this process to it as a guest at `guest`.
fn lent(host: &Daemon, guest: &Daemon, fate: &[&str]) -> (Process, Context, Guest) {
    let mut lender = host.actor(&[&["lend"], fate].concat());
    let address: SocketAddr = lender.line_after("listening on ").parse().expect("an address");
    let context = Context::open_at(guest.socket()).expect("the daemon answers");
    let guest = Guest::connect(&context, address, pattern(1)).expect("a lender");
    (lender, context, guest)
}

fn there_and_back(host: &Daemon, guest: &Daemon) {
    let (mut lender, _context, guest) = lent(host, guest, &[]);
    rnic_tests::attached::there_and_back(&guest).expect("a correct round trip");
    lender.release();
    let checksum = format!("{:08x}", crc32c::crc32c(&pattern(3)));
    assert_eq!(lender.line_after("checksum "), checksum);
    lender.succeed();
}

#[test]
fn both_ends_over_both_paths() {
    for config in ["", "[engine]\nworkers = 3\nloopback = \"tcp\"\n", "[mpa]\ncrc = false\n"] {
        let daemon = Daemon::start(config);
        let start = daemon.at_rest();
        there_and_back(&daemon, &daemon);
        daemon.shrinks_to(start);
    }
    let daemons = ["[mpa]\ncrc = false\n"; 2].map(Daemon::start);
    there_and_back(&daemons[0], &daemons[1]);
}

/// The daemon reads bytes when it sends them, not when the request is posted.
#[test]
fn data_written_before_transmission_is_sent() {
    let daemon = Daemon::start("");
    let (mut lender, _context, guest) = lent(&daemon, &daemon, &[]);
    // A fenced Write waits for a Read of everything, which changes its source.
    let all = guest.own.sge(LENT as u32);
    let read = SendRequest::read(1, all, guest.lent.at(0)).signaled();
    let small = [guest.own.sge(64)];
    let write = SendRequest::write(2, &small, guest.lent.at(0)).signaled().fence();
    guest.qp.post_send(&[read, write]).expect("room in the queue");
    // The Read replaces the pattern with zeros before the Write is sent.
    guest.completion().and_then(|c| Ok(c.ok()?)).expect("a completed Read");
    guest.completion().and_then(|c| Ok(c.ok()?)).expect("a completed Write");
    lender.release();
    let checksum = format!("{:08x}", crc32c::crc32c(&vec![0; LENT]));
    assert_eq!(lender.line_after("checksum "), checksum);
}

/// Waits until a process has executed another program.
fn becomes(process: &Process, name: &str) {
    let deadline = Instant::now() + DEADLINE;
    let comm = format!("/proc/{}/comm", process.id());
    while std::fs::read_to_string(&comm).expect("a running process").trim() != name {
        assert!(Instant::now() < deadline, "the process did not exec");
        std::thread::yield_now();
    }
}

#[test]
fn exec_ends_the_session_of_a_program() {
    for config in ["", "[engine]\nloopback = \"tcp\"\n"] {
        let daemon = Daemon::start(config);
        let (mut lender, _context, guest) = lent(&daemon, &daemon, &["--exec"]);
        guest.write().expect("a write to lent memory");
        lender.release();
        becomes(&lender, "sleep");
        // The traffic fails, but the new program keeps running.
        while guest.write().is_ok() {}
        assert!(!lender.has_ended());
        lender.kill();
        drop(guest);
    }
}

/// The session survives in the inherited descriptors. The memory does not.
#[test]
fn memory_is_detached_on_exec() {
    for config in ["", "[engine]\nworkers = 3\nloopback = \"tcp\"\n"] {
        let daemon = Daemon::start(config);
        let (mut lender, context, guest) = lent(&daemon, &daemon, &["--exec", "--keep"]);
        guest.write().expect("a write to lent memory");
        lender.release();
        becomes(&lender, "sleep");
        let ended = loop {
            if let Err(e) = guest.write() {
                break e;
            }
        };
        // A Terminate, as from an RNIC that cannot reach its memory (RFC 5041 section 7.1).
        let reason = guest.qp.wait_disconnected(Some(DEADLINE)).expect("a disconnect");
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
fn a_lender_killed_under_traffic_leaves_nothing() {
    for config in ["", "[engine]\nloopback = \"tcp\"\n"] {
        let daemon = Daemon::start(config);
        let start = daemon.at_rest();
        for round in 0..20 {
            let (lender, context, guest) = lent(&daemon, &daemon, &[]);
            for id in 0..8 {
                let all = [guest.own.sge(LENT as u32)];
                guest
                    .post(SendRequest::write(id, &all, guest.lent.at(0)))
                    .expect("room in the queue");
            }
            for _ in 0..round % 8 {
                guest.completion().and_then(|c| Ok(c.ok()?)).expect("a completed Write");
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
fn only_own_memory_can_be_attached() {
    let daemon = Daemon::start("");
    let start = daemon.at_rest();
    let mut raw = Raw::open(daemon.socket());
    let pd = raw.pd();
    let register = |raw: &mut Raw, address: u64, length: u64| {
        let source = MrSource::Attached { address };
        let access = Access::LOCAL_WRITE;
        let scope = Scope::Pd;
        raw.call(RequestBody::RegMr(MrRequest { pd, source, length, iova: 0, access, scope }))
    };
    let early = register(&mut raw, 4096, 1).expect_err("nothing is attached");
    assert!(early.to_string().contains("has not attached"), "{early}");

    rnic_tests::attached::offer_wrong_descriptors(&mut raw).expect("refusals by name");
    let own = rnic_tests::attached::own_memory().expect("a descriptor of own memory");
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
        panic!("registration must not check that pages are mapped")
    };
    let listed = raw.try_call(RequestBody::List { what: ListKind::Mrs, from: 0 }, &[]);
    let Some(Ok(ReplyBody::Rows { rows: Rows::Mrs(rows), .. })) = listed else {
        panic!("{listed:?}")
    };
    assert_eq!(rows.iter().map(|r| (r.mr, r.buffer)).collect::<Vec<_>>(), [(mr, None)]);
    assert_eq!(raw.call(RequestBody::DeregMr { mr }), Ok(ReplyBody::Done));

    // A wrong number of descriptors ends the session.
    let mut careless = Raw::open(daemon.socket());
    careless.try_call(RequestBody::AttachMemory, &[]);
    assert_eq!(careless.try_call(RequestBody::QueryDevice, &[]), None);
    let mut generous = Raw::open(daemon.socket());
    generous.try_call(RequestBody::AttachMemory, &[own.as_fd(), own.as_fd()]);
    assert_eq!(generous.try_call(RequestBody::QueryDevice, &[]), None);
    drop((raw, careless, generous));
    daemon.shrinks_to(start);
}

/// User ID of clients whose memory the daemon cannot access.
const STRANGER: u32 = 61_014;

/// Starts a daemon that serves all users. Returns `None` if this test cannot run as other users.
fn open_to_all(config: &str) -> Option<Daemon> {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit("not root: attached memory of other users is not tested");
        return None;
    }
    let daemon = Daemon::start(&format!("[control]\nmode = \"0666\"\n{config}"));
    let all = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(daemon.dir(), all).expect("a writable directory");
    Some(daemon)
}

/// Starts a lender as another user, and connects this process to it as a guest.
fn lent_by_stranger(daemon: &Daemon, fate: &[&str]) -> (Process, Context, Guest) {
    let mut lender = daemon.actor_as(STRANGER, &[&["lend"], fate].concat());
    let address: SocketAddr = lender.line_after("listening on ").parse().expect("an address");
    let context = Context::open_at(daemon.socket()).expect("the daemon answers");
    let guest = Guest::connect(&context, address, pattern(1)).expect("a lender");
    (lender, context, guest)
}

/// Lends memory of another user to a client of this user or, with `both`, of that other user.
fn exchange_between_strangers(daemon: &Daemon, both: bool) {
    let mut lender = daemon.actor_as(STRANGER, &["lend"]);
    let address = lender.line_after("listening on ");
    let borrower = if both {
        daemon.actor_as(STRANGER, &["borrow", &address])
    } else {
        daemon.actor(&["borrow", &address])
    };
    borrower.succeed();
    lender.release();
    let checksum = format!("{:08x}", crc32c::crc32c(&pattern(3)));
    assert_eq!(lender.line_after("checksum "), checksum);
    lender.succeed();
}

const PATHS: [&str; 3] = [
    "[engine]\n",
    "[engine]\nworkers = 3\nloopback = \"tcp\"\n",
    "[engine]\nworkers = 1\nloopback = \"tcp\"\n[mpa]\ncrc = false\n",
];

/// Returns a configuration of [`PATHS`] with this copy deadline.
fn with_deadline(config: &str, deadline: &str) -> String {
    config.replacen("[engine]\n", &format!("[engine]\ncopy_deadline = \"{deadline}\"\n"), 1)
}

#[test]
fn libraries_copy_for_other_users() {
    for config in PATHS {
        let Some(daemon) = open_to_all(config) else { return };
        let start = daemon.at_rest();
        for both in [false, true] {
            exchange_between_strangers(&daemon, both);
        }
        daemon.shrinks_to(start);
    }
}

/// Returns the targets of those descriptors of the daemon that refer to the memory of a process.
fn memories(daemon: &Daemon) -> Vec<String> {
    let open = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid()))
        .expect("a running process")
        .flatten();
    let targets = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let targets = targets.map(|target| target.to_string_lossy().into_owned());
    targets.filter(|target| target.starts_with("/proc/") && target.ends_with("/mem")).collect()
}

#[test]
fn memory_of_other_users_is_not_opened() {
    for config in PATHS {
        let Some(daemon) = open_to_all(config) else { return };
        let mut stranger = daemon.actor_as(STRANGER, &["lend"]);
        stranger.line_after("attached");
        assert_eq!(memories(&daemon), [""; 0]);
        let mut own = daemon.actor(&["lend"]);
        own.line_after("attached");
        assert_eq!(memories(&daemon), [format!("/proc/{}/mem", own.id())]);
        stranger.kill();
        own.kill();
    }
}

/// The daemon's descriptors give access to clients' memory, so its processes must be undumpable.
#[test]
fn the_daemon_is_undumpable() {
    use std::os::unix::fs::MetadataExt;
    const PRIVATE: u32 = 61_023;
    if !rustix::process::getuid().is_root() {
        return rnic_tests::omit("not root: the daemon has the user of this test");
    }
    let config = format!("[control]\nmode = \"0666\"\nuser = \"{PRIVATE}\"\n");
    let owns_folder = format!("chown {PRIVATE} \"${{3%/*}}\"");
    let daemon = Daemon::start_limited(&config, &owns_folder);
    let owner = |file: &str| {
        let file = format!("/proc/{}/{file}", daemon.pid());
        std::fs::metadata(file).expect("a running process").uid()
    };
    assert_eq!(owner(""), PRIVATE);
    // The kernel assigns the files of an undumpable process to root.
    assert_eq!(owner("mem"), 0);
}

/// Waits until a process has `count` copying threads.
fn has_copying_threads(process: &Process, count: usize) {
    let deadline = Instant::now() + DEADLINE;
    while copying_threads(process.id()) != count {
        assert!(Instant::now() < deadline, "{} threads copy", copying_threads(process.id()));
        std::thread::yield_now();
    }
}

/// Returns the numbers of the signals that the copying threads of a process do not block.
fn unblocked(process: &Process) -> Vec<u32> {
    let tasks =
        std::fs::read_dir(format!("/proc/{}/task", process.id())).expect("a running process");
    let status = tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("status")));
    let mut found = Vec::new();
    for status in status.map(|status| status.expect("a running thread")) {
        if status.starts_with("Name:\trnic-copies\n") {
            let blocked = status.lines().find_map(|l| l.strip_prefix("SigBlk:\t")).expect("a mask");
            let blocked = u64::from_str_radix(blocked, 16).expect("a mask");
            found.extend((1..=31).filter(|signal| blocked & (1 << (signal - 1)) == 0));
        }
    }
    found
}

#[test]
fn copying_threads_last_as_long_as_the_session() {
    let Some(daemon) = open_to_all("[engine]\nworkers = 3\n") else { return };
    let start = daemon.at_rest();
    let mut stranger = daemon.actor_as(STRANGER, &["attach"]);
    stranger.line_after("has a session");
    assert_eq!(copying_threads(stranger.id()), 0);
    for _ in 0..2 {
        assert_eq!(stranger.ask("now", "memory: "), "attached");
        has_copying_threads(&stranger, 3);
    }
    // They block every signal that can be blocked.
    let never_blocked = [Signal::KILL, Signal::STOP].map(|signal| signal.as_raw() as u32);
    assert_eq!(unblocked(&stranger), [never_blocked; 3].concat());
    stranger.release();
    stranger.line_after("no thread copies");
    stranger.succeed();

    let mut own = daemon.actor(&["attach"]);
    assert_eq!(own.ask("now", "memory: "), "attached");
    assert_eq!(copying_threads(own.id()), 0);
    own.release();
    own.succeed();
    daemon.shrinks_to(start);
}

#[test]
fn copy_queues_count_as_arena_bytes() {
    // The copy queue of one worker takes half a MiB.
    let limit = "[engine]\nworkers = 3\n[limits.session]\narena_bytes = \"1MiB\"\n";
    let Some(daemon) = open_to_all(limit) else { return };
    let start = daemon.at_rest();
    let mut stranger = daemon.actor_as(STRANGER, &["attach"]);
    for _ in 0..2 {
        let refused = stranger.ask("now", "memory: ");
        assert!(refused.contains("limits.session.arena_bytes = "), "{refused}");
        assert_eq!(copying_threads(stranger.id()), 0);
    }
    stranger.kill();
    daemon.shrinks_to(start);
}

/// Stops a process and waits until all its threads have stopped.
fn stop(process: &Process) {
    process.signal(Signal::STOP);
    let deadline = Instant::now() + DEADLINE;
    let runs = |task: std::fs::DirEntry| {
        let status = std::fs::read_to_string(task.path().join("status"));
        status.is_ok_and(|s| !s.lines().any(|line| line == "State:\tT (stopped)"))
    };
    let tasks = format!("/proc/{}/task", process.id());
    while std::fs::read_dir(&tasks).expect("a running process").flatten().any(runs) {
        assert!(Instant::now() < deadline, "the process does not stop");
        std::thread::yield_now();
    }
}

#[test]
fn a_stopped_client_blocks_its_own_connections() {
    for config in PATHS {
        let Some(daemon) = open_to_all(&with_deadline(config, "1h")) else { return };
        let start = daemon.at_rest();
        let (mut lender, context, guest) = lent_by_stranger(&daemon, &[]);
        guest.write().expect("a write to lent memory");
        stop(&lender);
        guest.own.memory.fill(0, LENT, 0).expect("access to own memory");
        let all = guest.own.sge(LENT as u32);
        guest.post(SendRequest::read(1, all, guest.lent.at(0))).expect("room in the queue");
        there_and_back(&daemon, &daemon);
        for both in [false, true] {
            exchange_between_strangers(&daemon, both);
        }
        // The stopped lender cannot have made these copies.
        assert!(guest.has_no_completion());
        lender.signal(Signal::CONT);
        guest.completion().and_then(|c| Ok(c.ok()?)).expect("a completed Read");
        assert!(guest.own.bytes() == pattern(1));
        rnic_tests::attached::there_and_back(&guest).expect("a correct round trip");
        lender.release();
        let checksum = format!("{:08x}", crc32c::crc32c(&pattern(3)));
        assert_eq!(lender.line_after("checksum "), checksum);
        lender.succeed();
        drop((guest, context));
        daemon.shrinks_to(start);
    }
}

#[test]
fn a_copy_beyond_its_deadline_ends_the_session() {
    for config in PATHS {
        for reads in [false, true] {
            let Some(mut daemon) = open_to_all(&with_deadline(config, "5s")) else { return };
            let start = daemon.at_rest();
            let (lender, context, guest) = lent_by_stranger(&daemon, &[]);
            guest.write().expect("a write to lent memory");
            stop(&lender);
            let all = guest.own.sge(LENT as u32);
            let request = if reads {
                SendRequest::read(1, all, guest.lent.at(0))
            } else {
                SendRequest::write(1, std::slice::from_ref(&all), guest.lent.at(0))
            };
            guest.post(request).expect("room in the queue");
            let completion = guest.completion().expect("every request completes");
            let reason = guest.qp.wait_disconnected(Some(DEADLINE)).expect("a disconnect");
            assert!(reason != DisconnectReason::Orderly, "{reason:?} after {completion:?}");
            let after = daemon.line_after("a copy of attached memory did not return in ");
            assert!(after.starts_with("5 s"), "{after}");
            drop((guest, context));
            // The client is still stopped, but nothing of its session remains.
            daemon.is_empty();
            lender.kill();
            daemon.shrinks_to(start);
        }
    }
}

#[test]
fn other_users_killed_under_traffic_leave_nothing() {
    for config in PATHS {
        // A short deadline, because a program that kept its session after `exec` makes no copies.
        let Some(daemon) = open_to_all(&with_deadline(config, "5s")) else { return };
        let start = daemon.at_rest();
        for round in 0..12 {
            let fate: &[&str] = match round % 6 {
                0 => &["--exec", "--keep"],
                3 => &["--exec"],
                _ => &[],
            };
            let (mut lender, context, guest) = lent_by_stranger(&daemon, fate);
            for id in 0..8 {
                let all = [guest.own.sge(LENT as u32)];
                guest
                    .post(SendRequest::write(id, &all, guest.lent.at(0)))
                    .expect("room in the queue");
            }
            for _ in 0..round % 8 {
                guest.completion().and_then(|c| Ok(c.ok()?)).expect("a completed Write");
            }
            if !fate.is_empty() {
                lender.release();
                becomes(&lender, "sleep");
                while guest.write().is_ok() {}
                guest.qp.wait_disconnected(Some(DEADLINE)).expect("a disconnect");
                assert!(!lender.has_ended());
            }
            lender.kill();
            drop((guest, context));
        }
        daemon.shrinks_to(start);
    }
}

/// Returns true if the library of this client must copy.
fn leaves_copies_to_the_library(raw: &Raw) -> bool {
    let features = raw.arenas[0].load_u64(arena_header::FEATURES).expect("the header");
    Features::from_bits_retain(features).contains(Features::LIBRARY_COPIES)
}

#[test]
fn the_wrong_way_to_attach_is_refused() {
    let Some(daemon) = open_to_all("[engine]\nworkers = 2\n") else { return };
    let start = daemon.at_rest();
    let mut stranger = Raw::open_as(daemon.socket(), STRANGER);
    assert!(leaves_copies_to_the_library(&stranger));
    rnic_tests::attached::offer_wrong_descriptors(&mut stranger).expect("refusals by name");
    let own = rnic_tests::attached::own_memory().expect("a descriptor of own memory");
    let refused =
        stranger.call_with(RequestBody::AttachMemory, &[own.as_fd()]).expect_err("closed");
    let why = "memory: the daemon accesses memory of trusted users only";
    assert!(refused.to_string().starts_with(why), "{refused}");
    // The daemon closes the descriptors in a separate thread.
    let deadline = Instant::now() + DEADLINE;
    while !memories(&daemon).is_empty() {
        assert!(Instant::now() < deadline, "{:?} stay open", memories(&daemon));
        std::thread::yield_now();
    }

    let mut trusted = Raw::open(daemon.socket());
    assert!(!leaves_copies_to_the_library(&trusted));
    let why = "client: the daemon copies for it; use AttachMemory";
    for worker in [0, 1, u32::MAX] {
        assert_eq!(trusted.refused(RequestBody::ServeCopies { worker }), why);
    }
    assert_eq!(trusted.call_with(RequestBody::AttachMemory, &[own.as_fd()]), Ok(ReplyBody::Done));
    drop((stranger, trusted));
    daemon.shrinks_to(start);
}

#[test]
fn workers_are_served_once_and_in_order() {
    let Some(daemon) = open_to_all("[engine]\nworkers = 2\n") else { return };
    let start = daemon.at_rest();
    let mut raw = Raw::open_as(daemon.socket(), STRANGER);
    let out_of_order = |raw: &mut Raw, worker: u32| {
        let refused = raw.refused(RequestBody::ServeCopies { worker });
        let why = format!("worker: {worker}: serve each of the 2 workers once, in order from 0");
        assert_eq!(refused, why);
    };
    for worker in [1, 2, u32::MAX] {
        out_of_order(&mut raw, worker);
    }
    for worker in [0, 1] {
        let made = raw.call(RequestBody::ServeCopies { worker });
        assert!(matches!(made, Ok(ReplyBody::Copies { .. })), "{made:?}");
        for again in [0, worker, 2, u32::MAX] {
            out_of_order(&mut raw, again);
        }
    }
    // Unexpected descriptors end the session.
    let own = rnic_tests::attached::own_memory().expect("a descriptor of own memory");
    raw.ask(RequestBody::ServeCopies { worker: 0 }, &[own.as_fd()]);
    let unasked = raw.reply().expect("a refusal").result;
    assert!(matches!(unasked, Err(Refusal::Malformed { .. })), "{unasked:?}");
    assert_eq!(raw.reply(), None);
    drop(raw);
    daemon.shrinks_to(start);
}

/// A client that serves its copy queues itself, and lends a page of its memory to the domain of an
/// [`Insider`].
struct HandServed {
    raw: Raw,
    queues: Vec<CopyQueue>,
    mr: MrId,
    lent: RemoteMr,
    memory: std::sync::Arc<Mapping>,
}

impl HandServed {
    fn new(socket: &Path) -> HandServed {
        let mut raw = Raw::open_as(socket, STRANGER);
        let queues = CopyQueue::of_each_worker(&mut raw).expect("attached");
        let bytes = pattern(5)[..Insider::LEN as usize].to_vec();
        let memory = Mapping::from_vec(bytes).expect("memory");
        let registered = rnic_tests::attached::register_raw(&mut raw, "shared", &memory);
        let (mr, lent) = registered.expect("a region");
        HandServed { raw, queues, mr, lent, memory }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        self.memory.read(0, &mut bytes).expect("access to own memory");
        bytes
    }
}

/// Waits for a pending copy. Returns its queue.
fn wanted(queues: &[CopyQueue]) -> &CopyQueue {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(queue) = queues.iter().find(|queue| queue.consumer.is_wanted()) {
            return queue;
        }
        assert!(Instant::now() < deadline, "no copy is pending");
        std::thread::yield_now();
    }
}

/// Starts a daemon on each path, with a domain for [`HandServed`] and [`Insider`].
fn daemons_with_a_domain() -> impl Iterator<Item = Daemon> {
    let config = |path| {
        let engine = with_deadline(&rnic_tests::engine(2, path), "1h");
        format!("{engine}[[pd]]\nname = \"shared\"\nusers = [0, {STRANGER}]\n")
    };
    rnic_tests::PATHS.into_iter().map_while(move |path| open_to_all(&config(path)))
}

#[test]
fn deregistration_waits_for_a_copy() {
    for daemon in daemons_with_a_domain() {
        let start = daemon.at_rest();
        let mut lender = HandServed::new(daemon.socket());
        let insider = Insider::new(&daemon, "shared");
        insider.post_read(lender.lent);
        let queue = wanted(&lender.queues);
        let mr = lender.mr;
        let id = lender.raw.ask(RequestBody::DeregMr { mr }, &[]);
        // Long enough to catch a premature answer.
        assert!(!lender.raw.has_input_within(Duration::from_millis(200)));
        assert!(queue.serve());
        // The rest of the Read may be copied or not.
        while !lender.raw.has_input_within(Duration::from_millis(1)) {
            for queue in &lender.queues {
                queue.serve();
            }
        }
        let reply = lender.raw.reply().expect("the session goes on");
        assert_eq!((reply.id, reply.result), (id, Ok(ReplyBody::Done)));
        // The Read may succeed or fail.
        let completion = insider.client.completion();
        if completion.ok().is_ok() {
            assert_eq!(insider.bytes(), lender.bytes());
        }
        // From now on the daemon must not queue copies for this memory.
        Insider::new(&daemon, "shared").fails_to_read(lender.lent);
        assert!(lender.queues.iter().all(|queue| !queue.consumer.is_wanted()));
        drop((lender, insider));
        daemon.shrinks_to(start);
    }
}

#[test]
fn an_impossible_consumer_index_ends_its_session() {
    for mut daemon in daemons_with_a_domain() {
        let start = daemon.at_rest();
        // One beyond the producer, one before the last index, and a distant one.
        for ahead in [2, u32::MAX, 1 << 31] {
            let mut lender = HandServed::new(daemon.socket());
            let bystander = HandServed::new(daemon.socket());
            let insider = Insider::new(&daemon, "shared");
            insider.post_read(lender.lent);
            let queue = wanted(&lender.queues);
            let at = queue.location.offset as usize + queue_header::CONSUMER;
            queue.arena.store_u64(at, ahead.into()).expect("access to own arena");
            queue.ring();
            assert!(insider.client.completion().ok().is_err());
            let said = daemon.line_after("its copy queue: ");
            assert!(said.starts_with(&format!("consumer index {ahead} is not within")), "{said}");
            assert_eq!(lender.raw.reply(), None);
            // Another session of the same user is unaffected.
            let insider = Insider::new(&daemon, "shared");
            insider.post_read(bystander.lent);
            assert!(wanted(&bystander.queues).serve());
            insider.client.completion().ok().expect("a completed Read");
            assert_eq!(insider.bytes(), bystander.bytes());
        }
        daemon.shrinks_to(start);
    }
}

#[test]
fn a_lying_library_affects_only_its_own_memory() {
    for daemon in daemons_with_a_domain() {
        let start = daemon.at_rest();
        let mut lender = HandServed::new(daemon.socket());
        // The client reports a copy after filling the whole entry with other bytes.
        let insider = Insider::new(&daemon, "shared");
        insider.post_read(lender.lent);
        let queue = wanted(&lender.queues);
        let entry = queue.location.offset as usize + QUEUE_HEADER_LEN;
        let len = queue.location.shape.stride as usize;
        queue.arena.write(entry, &vec![0xff; len]).expect("access to own arena");
        let outcome = entry + copy_entry::OUTCOME;
        queue.arena.store_u64(outcome, copy_entry::COPIED).expect("access to own arena");
        let consumer = queue.location.offset as usize + queue_header::CONSUMER;
        queue.arena.store_u64(consumer, 1).expect("access to own arena");
        queue.ring();
        insider.client.completion().ok().expect("a completed Read");
        assert_eq!(insider.bytes(), [0xff; Insider::LEN as usize]);

        // The client reports a failed copy, which ends the connection that accesses its memory.
        insider.post_read(lender.lent);
        let queue = wanted(&lender.queues);
        let entry = entry + len;
        queue.arena.store_u64(entry + copy_entry::OUTCOME, 0).expect("access to own arena");
        queue.arena.store_u64(consumer, 2).expect("access to own arena");
        queue.ring();
        assert!(insider.client.completion().ok().is_err());
        assert!(matches!(lender.raw.call(RequestBody::Status), Ok(ReplyBody::Status(_))));
        daemon.actor(&["duet"]).succeed();
        drop((lender, insider));
        daemon.shrinks_to(start);
    }
}
