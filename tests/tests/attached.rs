//! Attached memory between processes: every way, and every way in which it can vanish.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rnic_client::{
    Access, Context, DisconnectReason, ListKind, Refusal, Rows, Scope, SendRequest, TerminateCode,
    TerminateOrigin,
};
use rnic_core::abi::control::{MrSource, ReplyBody, RequestBody};
use rnic_tests::attached::{Guest, LENT, octets};
use rnic_tests::raw::Raw;
use rnic_tests::{DEADLINE, Daemon, Process, binaries};

fn pattern(seed: u32) -> Vec<u8> {
    (0..LENT as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed as u8).collect()
}

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
    for seed in [2, 3] {
        let octets_sent = pattern(seed);
        guest.own.write_at(0, &octets_sent).expect("in range");
        guest.write().expect("written");
        guest.own.fill(0, LENT, 0).expect("in range");
        guest.read().expect("read");
        assert!(octets(&guest.own).expect("in range") == octets_sent);
    }
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

/// Octets are read when they are sent, and not when the request is posted.
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
        let (rows, sessions) = context.list(ListKind::Clients, 0).expect("the daemon answers");
        assert_eq!(sessions, 2, "{rows:?}");
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

fn refusal(raw: &mut Raw, descriptor: impl AsFd) -> Refusal {
    let answer = raw.call(RequestBody::AttachMemory, &[descriptor.as_fd()]);
    answer.expect("the session lives").expect_err("it is refused")
}

fn open(path: &str) -> OwnedFd {
    std::fs::File::open(path).expect("it is there").into()
}

fn open_both(path: &str) -> OwnedFd {
    let both = std::fs::File::options().read(true).write(true).open(path);
    both.expect("it is there").into()
}

#[test]
fn nothing_but_its_own_memory_is_attached() {
    let daemon = Daemon::start(binaries!(), "");
    let start = daemon.at_rest();
    let mut raw = Raw::open(daemon.socket()).expect("a session");
    let pd = match raw.call(RequestBody::OpenPd { name: None }, &[]) {
        Some(Ok(ReplyBody::Pd { pd })) => pd,
        other => panic!("{other:?}"),
    };
    let register = |raw: &mut Raw, address: u64, length: u64| {
        let source = MrSource::Attached { address };
        let (access, scope) = (Access::LOCAL_WRITE, Scope::Pd);
        raw.call(RequestBody::RegMr { pd, source, length, iova: 0, access, scope }, &[])
            .expect("the session lives")
    };
    let early = register(&mut raw, 4096, 1).expect_err("nothing is attached");
    assert!(early.to_string().contains("has not attached"), "{early}");

    let (pipe, other_end) = rustix::pipe::pipe().expect("a pipe");
    let memfd = rnic_tests::raw::memfd(4096);
    let stranger = Process::start(std::process::Command::new("cat"));
    let strangers = open_both(&format!("/proc/{}/mem", stranger.id()));
    for (what, descriptor) in [
        ("a pipe", pipe),
        ("its other end", other_end),
        ("a directory", open("/tmp")),
        ("/dev/zero", open("/dev/zero")),
        ("a memfd", memfd),
        ("a socket", raw.socket.try_clone().expect("a descriptor")),
        ("another file of /proc", open("/proc/self/maps")),
        ("the memory of another process", strangers),
        ("its own memory, to be read only", open("/proc/self/mem")),
    ] {
        let refusal = refusal(&mut raw, descriptor);
        let named = matches!(&refusal, Refusal::Invalid { field, .. } if field == "memory");
        assert!(named, "{what}: {refusal}");
    }
    stranger.kill();

    let own = open_both("/proc/self/mem");
    let attached = raw.call(RequestBody::AttachMemory, &[own.as_fd()]);
    assert_eq!(attached, Some(Ok(ReplyBody::Done)));
    assert!(matches!(refusal(&mut raw, &own), Refusal::InUse { .. }));
    for (address, length, field) in [
        (u64::MAX - 10, 5, "address"),
        (u64::MAX - 10, 20, "address"),
        (1 << 60, 1, "address"),
        (0, u64::MAX, "address"),
        (4096, 0, "length"),
    ] {
        let refusal = register(&mut raw, address, length).expect_err("no such range");
        let named = matches!(&refusal, Refusal::Invalid { field: f, .. } if f == field);
        assert!(named, "{length} at {address:#x}: {refusal}");
    }
    let Ok(ReplyBody::Mr { mr, .. }) = register(&mut raw, 4096, 1 << 30) else {
        panic!("what is mapped there is found out when it is used")
    };
    let listed = raw.call(RequestBody::List { what: ListKind::Mrs, from: 0 }, &[]);
    let Some(Ok(ReplyBody::Rows { rows: Rows::Mrs(rows), .. })) = listed else {
        panic!("{listed:?}")
    };
    assert_eq!(rows.iter().map(|r| (r.mr, r.segment)).collect::<Vec<_>>(), [(mr, None)]);
    assert_eq!(raw.call(RequestBody::DeregMr { mr }, &[]), Some(Ok(ReplyBody::Done)));

    // The right number of descriptors, or the session ends.
    let mut careless = Raw::open(daemon.socket()).expect("a session");
    careless.call(RequestBody::AttachMemory, &[]);
    assert_eq!(careless.call(RequestBody::QueryDevice, &[]), None);
    let mut generous = Raw::open(daemon.socket()).expect("a session");
    generous.call(RequestBody::AttachMemory, &[own.as_fd(), own.as_fd()]);
    assert_eq!(generous.call(RequestBody::QueryDevice, &[]), None);
    drop((raw, careless, generous));
    daemon.shrinks_to(start);
}
