//! Peers that mean harm at the port at which daemons find each other for queue pairs that are wired
//! by hand: those that dial it, and those that it dials. Each is turned away with its reason, and
//! nobody else notices.

use std::io::Write;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rnic_client::{
    Access, Completion, CompletionOpcode, CompletionStatus, Gid, Qp, QpState, QpType, RecvRequest,
    SendRequest, Sending, Wiring,
};
use rnic_tests::client::{Client, READ_WRITE};
use rnic_tests::daemon::Footprint;
use rnic_tests::wire::{self, CRC, Ending, fpdu, untagged};
use rnic_tests::wired_port::{WiredPort, confirm};
use rnic_tests::{DEADLINE, Daemon, binaries, ports};
use rustix::net::{AddressFamily, SocketType};

/// The daemon that is attacked, between the addresses of two peers.
const LOWER: [u8; 4] = [127, 0, 52, 1];
const HERE: [u8; 4] = [127, 0, 52, 2];
const HIGHER: [u8; 4] = [127, 0, 52, 3];

/// Where many come from at once, so that the ports of the others stay free.
const CROWD: [u8; 4] = [127, 0, 52, 9];

/// A number that the peer claims to have.
const THEIRS: u32 = 7777;

/// Half a minute until nobody acknowledges.
const SENDING: Sending = Sending { sq_psn: 7, timeout: 20, retry_count: 7, rnr_retry: 7, ord: 4 };

/// Streams that a peer accepts and ends.
const DIALS: u32 = 20;
/// Shortest time between the end of a stream and the next connection request.
const PAUSE: Duration = Duration::from_millis(10);

/// Fails after a second. A busy machine may not find the reason in this time, but in one of many
/// tries.
const QUICK: Sending = Sending { timeout: 10, retry_count: 1, ..SENDING };

/// A daemon at this address; daemons and peers of a fabric have the same port.
fn daemon(address: [u8; 4], port: u16, config: &str) -> Daemon {
    let address = IpAddr::from(address);
    let base = format!("[device]\naddresses = [\"{address}\"]\n[wired]\nport = {port}\n");
    Daemon::start(binaries!(), &format!("{base}{config}"))
}

/// What a daemon holds that has listened for other daemons, as it does from its first queue pair
/// that is wired by hand on.
fn at_rest(daemon: &Daemon) -> Footprint {
    drop(End::new(daemon));
    daemon.at_rest()
}

/// The wired port of a peer's host, where a daemon confirms all that this peer sends.
fn confirming(address: [u8; 4], port: u16) -> WiredPort {
    WiredPort::confirming((address, port).into())
}

fn gid(address: [u8; 4]) -> Gid {
    Gid::from(IpAddr::from(address))
}

/// A client with a QP to be wired.
struct End {
    client: Client,
    qp: Qp,
}

impl End {
    fn new(daemon: &Daemon) -> Self {
        let client = Client::new(daemon);
        let qp = client.qp_of(QpType::Wired);
        End { client, qp }
    }

    /// To Rtr, wired to what claims to be [`THEIRS`] there.
    fn await_peer(&self, here: [u8; 4], there: [u8; 4]) {
        self.wire(here, there, THEIRS);
    }

    fn wire(&self, here: [u8; 4], there: [u8; 4], remote_qp: u32) {
        let mut remote = self.qp.id();
        remote.0 = remote_qp;
        let wiring = Wiring {
            local: gid(here),
            remote: gid(there),
            remote_qp: remote,
            rq_psn: 7,
            path_mtu: 1024,
            min_rnr_timer: 12,
            ird: 4,
            rights: Access::REMOTE_WRITE | Access::REMOTE_READ,
        };
        self.qp.to_rtr(&wiring).unwrap();
    }

    fn state(&self) -> QpState {
        self.qp.query().unwrap().state
    }

    /// A Send that nobody acknowledges fails; what is said of it.
    fn fails_because(&self) -> String {
        self.fails_after(&QUICK)
    }

    fn fails_after(&self, sending: &Sending) -> String {
        self.qp.to_rts(sending).unwrap();
        self.qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
        let failed = self.client.completion();
        assert_eq!(failed.status, CompletionStatus::TransportRetryExceeded);
        self.client.context.diagnosis(failed.diagnosis_id).unwrap().text
    }
}

/// Two of two daemons that are wired to each other work.
fn exchange(a: &End, a_at: [u8; 4], b: &End, b_at: [u8; 4]) {
    a.wire(a_at, b_at, b.qp.id().0);
    b.wire(b_at, a_at, a.qp.id().0);
    a.qp.to_rts(&SENDING).unwrap();
    b.qp.to_rts(&SENDING).unwrap();
    b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    a.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
    a.client.completes(2, CompletionOpcode::Send);
    b.client.completes(1, CompletionOpcode::Receive);
}

/// What a peer says of itself, written by hand.
#[derive(Clone)]
struct Said {
    magic: [u8; 4],
    version: u8,
    gid: Gid,
    to_gid: Gid,
    qp: u32,
    to_qp: u32,
    ird: u16,
    min_rnr_timer: u8,
    rq_psn: u32,
    sq_psn: Option<u32>,
    dial: u64,
    daemon: u64,
}

impl Said {
    /// What an honest daemon would say for [`THEIRS`] at this address.
    fn to(end: &End, from: [u8; 4]) -> Self {
        Said {
            magic: *b"RNWD",
            version: 2,
            gid: gid(from),
            to_gid: gid(HERE),
            qp: THEIRS,
            to_qp: end.qp.id().0,
            ird: 4,
            min_rnr_timer: 12,
            rq_psn: 7,
            sq_psn: None,
            dial: 0x0102_0304_0506_0708,
            daemon: 0,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.push(self.version);
        bytes.extend(&self.sq_psn.unwrap_or(0).to_be_bytes()[1..]);
        bytes.extend(self.gid.0);
        bytes.extend(self.to_gid.0);
        bytes.extend(self.qp.to_be_bytes());
        bytes.extend(self.to_qp.to_be_bytes());
        bytes.extend(self.ird.to_be_bytes());
        let sends = if self.sq_psn.is_some() { 2 } else { 0 };
        // A path MTU of 1024 bytes is the third.
        bytes.extend([self.min_rnr_timer, sends | 3 << 2]);
        bytes.extend(self.rq_psn.to_be_bytes());
        bytes.extend(self.dial.to_be_bytes());
        bytes.extend(self.daemon.to_be_bytes());
        bytes
    }
}

/// A peer that has dialled and said this.
fn dial(from: [u8; 4], port: u16, private_data: &[u8]) -> TcpStream {
    let mut peer = wire::dial_from(from, (HERE, port).into());
    wire::say(&mut peer, &wire::request(CRC, 2, private_data));
    peer
}

/// The code with which a peer is rejected, 0 if it is not, and the end of its connection behind it.
fn rejection(peer: &mut TcpStream) -> u8 {
    let reply = wire::reply(peer);
    if reply[16] & REJECTED == 0 {
        return 0;
    }
    assert_eq!(&reply[20..25], b"RNWD\x02");
    assert_eq!(wire::ending(peer), Ending::Fin(Vec::new()));
    reply[25]
}

/// A peer that was accepted; what it is told.
fn accepted(peer: &mut TcpStream) -> Vec<u8> {
    let reply = wire::reply(peer);
    assert_eq!(reply[16] & REJECTED, 0, "{reply:?}");
    assert_eq!(&reply[20..25], b"RNWD\x02");
    reply[20..].to_vec()
}

/// Flag of an MPA Reply.
const REJECTED: u8 = 0x20;

const MALFORMED: u8 = 1;
const NO_QUEUE_PAIR: u8 = 2;
const OTHER_PEER: u8 = 3;
const OTHER_GID: u8 = 4;
const IN_ERROR: u8 = 5;
const PSN: u8 = 6;
const OWN_PSN: u8 = 11;
const BUSY: u8 = 7;
const CROWDED: u8 = 8;
const GUESSER: u8 = 9;
const NOT_CONFIRMED: u8 = 12;

#[test]
fn whoever_is_not_meant_is_told_why() {
    let port = ports::of_nobody();
    let daemon = daemon(HERE, port, "");
    let start = at_rest(&daemon);
    let _peers = [LOWER, HIGHER].map(|at| confirming(at, port));
    let plain = {
        let client = Client::new(&daemon);
        let qp = client.qp();
        (client, qp)
    };
    let end = End::new(&daemon);
    end.await_peer(HERE, LOWER);
    let good = Said::to(&end, LOWER);
    let rejected = |private_data: &[u8], code: u8, what: &str| {
        assert_eq!(rejection(&mut dial(LOWER, port, private_data)), code, "{what}");
    };
    let says = |said: Said, code: u8, what: &str| rejected(&said.bytes(), code, what);
    // No introduction, or none that is understood.
    rejected(&[], MALFORMED, "nothing");
    rejected(&good.bytes()[..71], MALFORMED, "a byte is missing");
    rejected(&[0xAA; 500], MALFORMED, "noise");
    says(Said { magic: *b"RNWE", ..good.clone() }, MALFORMED, "another magic");
    says(Said { version: 3, ..good.clone() }, MALFORMED, "another version");
    says(Said { version: 1, ..good.clone() }, MALFORMED, "without a number to ask for");
    says(Said { version: 0, ..good.clone() }, MALFORMED, "no version");
    // Somebody else's address.
    says(Said { gid: gid(HIGHER), ..good.clone() }, OTHER_GID, "comes from elsewhere");
    says(Said { gid: gid(HERE), ..good.clone() }, OTHER_GID, "claims to be here");
    says(Said { to_gid: gid(HIGHER), ..good.clone() }, OTHER_GID, "wants somebody else");
    // Numbers.
    for number in [0, 1, end.qp.id().0 + 1000, 1 << 24, u32::MAX] {
        says(Said { to_qp: number, ..good.clone() }, NO_QUEUE_PAIR, "a number of nobody's");
    }
    let to_qp = plain.1.id().0;
    says(Said { to_qp, ..good.clone() }, NO_QUEUE_PAIR, "one that connects");
    for qp in [0, THEIRS + 1, u32::MAX] {
        says(Said { qp, ..good.clone() }, OTHER_PEER, "another number of the peer's");
    }
    {
        let other = Said { gid: gid(HIGHER), ..good.clone() };
        let mut peer = dial(HIGHER, port, &other.bytes());
        assert_eq!(rejection(&mut peer), OTHER_PEER, "another address with the right number");
    }
    // Another PSN than this side begins with, once that is known.
    end.qp.to_rts(&SENDING).unwrap();
    says(Said { rq_psn: 8, ..good.clone() }, PSN, "another PSN");
    says(Said { sq_psn: Some(8), ..good.clone() }, OWN_PSN, "another PSN of the peer's");
    assert_eq!(end.state(), QpState::Rts);
    // The right one, and after it nobody else, not even the same once more.
    let mut peer = dial(LOWER, port, &good.bytes());
    let told = accepted(&mut peer);
    assert_eq!(told[8..40], [gid(HERE).0, gid(LOWER).0].concat());
    assert_eq!(told[40..48], [end.qp.id().0.to_be_bytes(), THEIRS.to_be_bytes()].concat());
    says(good.clone(), BUSY, "a second stream");
    // A queue pair in Error.
    let failed = End::new(&daemon);
    failed.await_peer(HERE, LOWER);
    failed.qp.to_error().unwrap();
    // A worker does it.
    let began = Instant::now();
    while failed.state() != QpState::Error {
        assert!(began.elapsed() < DEADLINE, "it does not fail");
    }
    says(Said::to(&failed, LOWER), IN_ERROR, "in Error");
    drop((peer, failed));
    drop((end, plain));
    daemon.settles("rid of them", |s| s.startups == 0 && s.qps == 0);
    daemon.shrinks_to(start);
}

#[test]
fn whoever_says_nothing_or_nonsense_is_gone_in_time() {
    let port = ports::of_nobody();
    let config = "[mpa]\nstartup_deadline = \"300ms\"\ndecision_deadline = \"300ms\"\n";
    let first = daemon(HERE, port, config);
    let start = at_rest(&first);
    let peer_port = confirming(LOWER, port);
    let end = End::new(&first);
    let address = SocketAddr::from((HERE, port));
    // Nothing, half a frame, and what is no frame.
    let whole = wire::request(CRC, 2, &Said::to(&end, LOWER).bytes());
    let mut noise = vec![0x5A; 600];
    noise[0] = b'M';
    let huge = [b"MPA ID Req Frame".as_slice(), &[CRC, 2, 0xFF, 0xFF], &[0; 700]].concat();
    for said in [&[][..], &whole[..16], &whole[..19], &whole[..60], &noise, &huge] {
        let mut peer = wire::dial_from(LOWER, address);
        wire::say(&mut peer, said);
        match wire::ending(&mut peer) {
            Ending::Fin(bytes) | Ending::Reset(bytes) => assert!(bytes.is_empty()),
            silence @ Ending::Silence(_) => panic!("{silence:?} after {} bytes", said.len()),
        }
    }
    // A byte more than the request, which is one too early.
    let mut peer = wire::dial_from(LOWER, address);
    wire::say(&mut peer, &[&whole[..], &[0]].concat());
    assert!(!matches!(wire::ending(&mut peer), Ending::Silence(_)));
    // One that names a queue pair which is never told of a peer.
    let mut peer = wire::dial_from(LOWER, address);
    wire::say(&mut peer, &whole);
    assert!(!matches!(wire::ending(&mut peer), Ending::Silence(_)));
    assert_eq!(peer_port.questions().len(), 1);
    first.settles("rid of them", |s| s.startups == 0);
    drop((end, peer));
    first.shrinks_to(start);
    drop(first);
    // One that keeps still after it was accepted: the queue pair waits for the next one.
    let daemon = daemon(HERE, port, "");
    let start = at_rest(&daemon);
    let end = End::new(&daemon);
    end.await_peer(HERE, LOWER);
    end.qp.to_rts(&SENDING).unwrap();
    for _ in 0..3 {
        let mut peer = dial(LOWER, port, &Said::to(&end, LOWER).bytes());
        accepted(&mut peer);
        let mut frame = fpdu(&untagged(3, 0, 1, b"something"));
        *frame.last_mut().unwrap() ^= 1;
        wire::say(&mut peer, &frame);
        assert!(!matches!(wire::ending(&mut peer), Ending::Silence(_)), "a wrong CRC");
        drop(peer);
        wait_until_unlinked(&end);
        assert_eq!(end.state(), QpState::Rts);
    }
    // What it says last: that it dials, in vain, or why its stream ended.
    let why = end.fails_because();
    assert!(why.contains("queue pair 7777") || why.contains("CRC"), "{why}");
    drop(end);
    daemon.shrinks_to(start);
}

/// Waits until the daemon knows that a stream is gone.
fn wait_until_unlinked(end: &End) {
    let began = Instant::now();
    while end.qp.query().unwrap().path != "none" {
        assert!(began.elapsed() < DEADLINE, "the stream does not end");
    }
}

#[test]
fn depths_and_timers_of_a_peer_are_kept_within_what_there_is() {
    let port = ports::of_nobody();
    let daemon = daemon(HERE, port, "");
    let _peer_port = confirming(LOWER, port);
    // A peer that takes any number of reads gets as many as the program wants. One that takes none
    // is sent one, to refuse it.
    for (ird, expected) in [(u16::MAX, 4), (4, 4), (1, 1), (0, 0)] {
        let end = End::new(&daemon);
        end.await_peer(HERE, LOWER);
        end.qp.to_rts(&SENDING).unwrap();
        let said = Said { ird, min_rnr_timer: u8::MAX, ..Said::to(&end, LOWER) };
        let mut peer = dial(LOWER, port, &said.bytes());
        accepted(&mut peer);
        // It is the initiator, and so it speaks first.
        end.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        wire::say(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
        end.client.completes(1, CompletionOpcode::Receive);
        assert_eq!(end.qp.query().unwrap().ord, expected);
        let sink = end.client.region(64, READ_WRITE);
        let mut remote = sink.remote().at(0);
        remote.addr = 0;
        let reads: Vec<_> =
            (0..10).map(|n| SendRequest::read(n, sink.sge(0, 8), remote).signaled()).collect();
        end.qp.post_send(&reads).unwrap();
        for number in 1..=u32::from(expected.max(1)) {
            let request = wire::next_ulpdu(&mut peer);
            assert_eq!((request[1] & 0xF, request[13]), (READ_REQUEST, number as u8));
        }
        let more = wire::ending_after(&mut peer, Duration::from_millis(200));
        assert_eq!(more, Ending::Silence(Vec::new()), "{ird}");
    }
    // However long the peer wants to be waited for, it is for ever only if the program says so.
    for min_rnr_timer in [0, 31, u8::MAX] {
        let end = End::new(&daemon);
        end.await_peer(HERE, LOWER);
        end.qp.to_rts(&Sending { rnr_retry: 1, ..SENDING }).unwrap();
        let said = Said { min_rnr_timer, ird: 0, ..Said::to(&end, LOWER) };
        let mut peer = dial(LOWER, port, &said.bytes());
        accepted(&mut peer);
        end.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        wire::say(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
        end.client.completes(1, CompletionOpcode::Receive);
        end.qp.post_send(&[SendRequest::send_inline(2, b"")]).unwrap();
        // It has no receive for it, which is the first of this side.
        assert_eq!(wire::next_ulpdu(&mut peer)[1] & 0xF, SEND);
        wire::say(&mut peer, &fpdu(&notice(1)));
        let failed = end.client.completion();
        let expected = (2, CompletionStatus::ReceiverNotReady);
        assert_eq!((failed.wr_id, failed.status), expected, "{min_rnr_timer}");
    }
    daemon.settles("rid of them", |s| s.startups == 0 && s.qps == 0);
}

/// Whoever says again and again that it waits would be waited for without end.
#[test]
fn a_send_that_waits_does_so_once() {
    let port = ports::of_nobody();
    let daemon = daemon(HERE, port, "");
    let _peer_port = confirming(LOWER, port);
    let end = End::new(&daemon);
    end.await_peer(HERE, LOWER);
    end.qp.to_rts(&Sending { rnr_retry: 1, ..SENDING }).unwrap();
    // Two thirds of a second for a receive.
    let said = Said { min_rnr_timer: 0, ..Said::to(&end, LOWER) };
    let mut peer = dial(LOWER, port, &said.bytes());
    accepted(&mut peer);
    end.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    wire::say(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
    end.client.completes(1, CompletionOpcode::Receive);
    end.qp.post_send(&[SendRequest::send_inline(2, b"")]).unwrap();
    assert_eq!(wire::next_ulpdu(&mut peer)[1] & 0xF, SEND);
    for says in [notice(1), goes_on(), notice(1)] {
        wire::say(&mut peer, &fpdu(&says));
    }
    wait_until_unlinked(&end);
    assert_eq!(end.state(), QpState::Rts);
}

/// Opcodes of RDMAP.
const READ_REQUEST: u8 = 1;
const SEND: u8 = 3;

/// What a peer says that has no receive for the Send of this number: a Write of nothing.
fn notice(msn: u32) -> Vec<u8> {
    let mut write = vec![0xC1, 0x40, 0, 0, 0, 0];
    write.extend(0x524e_5201_u32.to_be_bytes());
    write.extend(msn.to_be_bytes());
    write
}

/// That it has found one.
fn goes_on() -> Vec<u8> {
    let mut write = notice(0);
    write[9] = 0;
    write
}

/// Many requests for a queue pair that its program has told nothing yet: when it has, all that were
/// not meant are told so, and the one that is meant gets it.
#[test]
fn those_who_wait_for_a_queue_pair_do_not_stand_in_its_peers_way() {
    let port = ports::of_nobody();
    let daemon = daemon(HERE, port, "");
    let end = End::new(&daemon);
    let crowd_port = confirming(CROWD, port);
    let lower_port = confirming(LOWER, port);
    let hostile: Vec<_> = (0..20)
        .map(|n| dial(CROWD, port, &Said { qp: n, ..Said::to(&end, CROWD) }.bytes()))
        .collect();
    let mut honest = dial(LOWER, port, &Said::to(&end, LOWER).bytes());
    // All of them have been confirmed by now.
    let are_held = |count: u32| {
        daemon.settles("held", |s| {
            let asked = crowd_port.questions().len() + lower_port.questions().len();
            asked == count as usize && s.startups == count
        });
    };
    are_held(21);
    // Of many more some are kept.
    let (mut kept, mut crowd) = (0, Vec::new());
    let other = End::new(&daemon);
    for n in 0..100 {
        let mut peer = dial(CROWD, port, &Said { qp: n, ..Said::to(&other, CROWD) }.bytes());
        match n < 32 {
            true => {
                kept += 1;
                are_held(21 + kept);
                crowd.push(peer);
            }
            false => assert_eq!(rejection(&mut peer), CROWDED),
        }
    }
    drop(crowd);
    daemon.settles("rid of them", |s| s.startups == 21);
    end.await_peer(HERE, LOWER);
    accepted(&mut honest);
    for mut peer in hostile {
        assert_eq!(rejection(&mut peer), OTHER_PEER);
    }
    daemon.settles("rid of them", |s| s.startups == 0);
}

#[test]
fn a_thousand_connections_are_in_nobodys_way() {
    let port = ports::of_nobody();
    // Silent connections and requests are of different accounts.
    let limits = "[limits]\nstartups = 100\n[limits.user]\nstartups = 100\n";
    let config = format!("{limits}[mpa]\nstartup_deadline = \"3600s\"\n");
    let daemon = daemon(HERE, port, &config);
    let start = at_rest(&daemon);
    let _crowd_port = confirming(CROWD, port);
    let far = self::daemon(LOWER, port, "");
    let idle = End::new(&daemon);
    rnic_tests::process::raise_descriptor_limit();
    // Silent ones, and some who wait for a queue pair that is told nothing.
    let silent: Vec<_> = (0..1000).map(|_| wire::dial_from(CROWD, (HERE, port).into())).collect();
    let said = Said::to(&idle, CROWD);
    let waiting: Vec<_> =
        (0..1000).map(|n| dial(CROWD, port, &Said { qp: n, ..said.clone() }.bytes())).collect();
    let (a, b) = (End::new(&daemon), End::new(&far));
    exchange(&a, HERE, &b, LOWER);
    let (c, d) = (End::new(&daemon), End::new(&daemon));
    exchange(&c, HERE, &d, HERE);
    assert!(daemon.status().startups <= 100);
    drop((silent, waiting));
    drop((a, b, c, d));
    daemon.settles("rid of them", |s| s.startups == 0 && s.qps == 1);
    drop(idle);
    daemon.shrinks_to(start);
}

/// Ends a thread of a test.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Those that a queue pair dials: what they answer, and what its program is told.
#[test]
fn whoever_is_dialled_and_answers_nonsense_is_said_to() {
    let port = ports::of_nobody();
    let config = "[mpa]\nreply_deadline = \"300ms\"\n";
    let daemon = daemon(HERE, port, config);
    let bystanders = [End::new(&daemon), End::new(&daemon)];
    let server = TcpListener::bind((IpAddr::from(HIGHER), port)).unwrap();
    let reply = |flags: u8, private_data: &[u8]| {
        let mut reply = wire::request(CRC | flags, 2, private_data);
        reply[..16].copy_from_slice(b"MPA ID Rep Frame");
        reply
    };
    let answered_once = |says: &(dyn Fn(&End, &mut TcpStream) + Sync)| {
        let end = End::new(&daemon);
        end.await_peer(HERE, HIGHER);
        let stop = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (server, end) = (&server, &end);
            scope.spawn(move || {
                // It is tried again and again.
                let mut all = Vec::new();
                server.set_nonblocking(true).unwrap();
                while !stop.load(Relaxed) {
                    let Ok((mut peer, _)) = server.accept() else {
                        std::thread::yield_now();
                        continue;
                    };
                    peer.set_nonblocking(false).unwrap();
                    says(end, &mut peer);
                    all.push(peer);
                }
            });
            // Also if it fails.
            let _stops = Stops(stop);
            let why = end.fails_because();
            assert_eq!(end.state(), QpState::Error);
            why
        })
    };
    let answered = |says: &(dyn Fn(&End, &mut TcpStream) + Sync), expected: &str| {
        let deadline = Instant::now() + DEADLINE;
        let mut why = answered_once(says);
        while !why.contains(expected) {
            assert!(Instant::now() < deadline, "{expected}: {why}");
            why = answered_once(says);
        }
    };
    let introduction =
        |end: &End| Said { gid: gid(HIGHER), to_gid: gid(HERE), ..Said::to(end, HIGHER) };
    answered(&|_, _| (), "7777");
    answered(&|_, peer| peer.write_all(&[0x5A; 100]).unwrap(), "7777");
    answered(&|_, peer| peer.shutdown(Shutdown::Both).unwrap(), "7777");
    answered(&|_, peer| wire::say(peer, &reply(0, b"")), "did not introduce itself");
    answered(&|_, peer| wire::say(peer, &reply(0, &[7; 56])), "did not introduce itself");
    answered(&|_, peer| wire::say(peer, &reply(REJECTED, b"")), "without a reason");
    answered(&|_, peer| wire::say(peer, &reply(REJECTED, b"RNWD\x02\xFF")), "without a reason");
    answered(&|_, peer| wire::say(peer, &reply(REJECTED, b"RNWD\x02\x03")), "wired to another one");
    answered(&|_, peer| wire::say(peer, &reply(REJECTED, b"RNWD\x02\x0C")), "got no confirmation");
    // It says that it is somebody else, or that it means somebody else.
    for spoil in [
        |said: &mut Said| said.qp += 1,
        |said: &mut Said| said.to_qp += 1,
        |said: &mut Said| said.gid = gid(LOWER),
        |said: &mut Said| said.to_gid = gid(LOWER),
    ] {
        answered(
            &|end, peer| {
                let mut said = introduction(end);
                said.to_qp = end.qp.id().0;
                said.qp = THEIRS;
                spoil(&mut said);
                wire::say(peer, &reply(0, &said.bytes()));
            },
            "somebody else",
        );
    }
    let differs = |end: &End, peer: &mut TcpStream| {
        let said = Said { rq_psn: 8, ..introduction(end) };
        wire::say(peer, &reply(0, &Said { to_qp: end.qp.id().0, ..said }.bytes()));
    };
    answered(&differs, "PSNs differ");
    // The first PSN that the peer sends is compared before this end is in RTS.
    let other = |end: &End, peer: &mut TcpStream| {
        let said = Said { sq_psn: Some(9), to_qp: end.qp.id().0, ..introduction(end) };
        wire::say(peer, &reply(0, &said.bytes()));
    };
    answered(&other, "queue pair 7777 would send from 9");
    let [a, b] = bystanders;
    exchange(&a, HERE, &b, HERE);
    let mut none = [Completion::default()];
    assert_eq!(a.client.cq.poll(&mut none).unwrap(), 0);
}

#[test]
fn the_lower_end_dials_and_of_two_that_dial_each_other_it_goes_on() {
    let port = ports::of_nobody();
    let daemon = daemon(HERE, port, "");
    // Nobody answers, so that the queue pair goes on dialling.
    let [below, above] =
        [LOWER, HIGHER].map(|at| TcpListener::bind((IpAddr::from(at), port)).unwrap());
    // The higher end leaves it to the lower one for half a second.
    let end = End::new(&daemon);
    let began = Instant::now();
    end.await_peer(HERE, LOWER);
    let (_dialled, _) = below.accept().unwrap();
    assert!(began.elapsed() >= Duration::from_millis(500), "{:?}", began.elapsed());
    let mut peer = dial(LOWER, port, &Said::to(&end, LOWER).bytes());
    confirm(&mut below.accept().unwrap().0);
    accepted(&mut peer);
    // The lower one does not give way.
    let end = End::new(&daemon);
    end.await_peer(HERE, HIGHER);
    let (_dialled, _) = above.accept().unwrap();
    let mut peer = dial(HIGHER, port, &Said::to(&end, HIGHER).bytes());
    confirm(&mut above.accept().unwrap().0);
    assert_eq!(rejection(&mut peer), BUSY);
}

#[test]
fn nobody_speaks_by_tcp_for_a_queue_pair_of_the_same_daemon() {
    let port = ports::of_nobody();
    let daemon = daemon(HERE, port, "");
    let [a, b] = [End::new(&daemon), End::new(&daemon)];
    a.wire(HERE, HERE, b.qp.id().0);
    let said = Said { qp: b.qp.id().0, ..Said::to(&a, HERE) };
    assert_eq!(rejection(&mut dial(HERE, port, &said.bytes())), NOT_CONFIRMED);
    a.qp.to_rts(&SENDING).unwrap();
    b.wire(HERE, HERE, a.qp.id().0);
    b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    a.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
    a.client.completes(2, CompletionOpcode::Send);
}

#[test]
fn a_peer_that_takes_a_stream_and_ends_it_is_not_dialled_without_a_pause() {
    let port = ports::of_nobody();
    let daemon = daemon(HERE, port, "");
    let listener = TcpListener::bind((IpAddr::from(HIGHER), port)).unwrap();
    let end = End::new(&daemon);
    end.await_peer(HERE, HIGHER);
    let said = Said::to(&end, HIGHER).bytes();
    let mut first = None;
    for _ in 0..DIALS {
        let (mut stream, _) = listener.accept().unwrap();
        first.get_or_insert_with(Instant::now);
        let mut frame = wire::exactly(&mut stream, 20 + 4 + said.len());
        // What was asked for is agreed to, with fewer Reads of this side's.
        frame[7..10].copy_from_slice(b"Rep");
        (frame[22], frame[23]) = (frame[22] & 0xC0, 4);
        frame[24..].copy_from_slice(&said);
        wire::say(&mut stream, &frame);
    }
    // A lower bound, which a busy machine does not break: the pause is 10 ms at least. The first
    // stream may have been accepted late.
    let took = first.unwrap().elapsed();
    assert!(took >= PAUSE * (DIALS - 2), "{DIALS} times in {took:?}");
}

#[test]
fn who_cannot_get_through_to_a_peer_is_reached_by_it() {
    let port = ports::of_nobody();
    let daemon = daemon(HERE, port, "");
    // The backlog of this one is full, so that further connections do not come about.
    let there = SocketAddr::from((HIGHER, port));
    let deaf = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&deaf, &there).unwrap();
    rustix::net::listen(&deaf, 0).unwrap();
    let full = TcpStream::connect(there).unwrap();
    let end = End::new(&daemon);
    end.await_peer(HERE, HIGHER);
    drop(full);
    // The peer's host is reached again, to confirm what the peer sends; dials of the daemon that
    // come through as well are closed.
    rustix::net::listen(&deaf, 64).unwrap();
    let peers_port = WiredPort::on(TcpListener::from(deaf));
    let began = Instant::now();
    loop {
        let mut peer = dial(HIGHER, port, &Said::to(&end, HIGHER).bytes());
        let reply = wire::reply(&mut peer);
        if reply[16] & REJECTED == 0 {
            break;
        }
        assert_eq!(reply[25], BUSY, "a dial of the daemon goes on");
        assert!(began.elapsed() < DEADLINE, "it is not reached");
    }
    assert!(!peers_port.questions().is_empty());
}

/// Each wrong STag costs whoever guesses a stream; an address that has named too many is not let in
/// any more, nor called.
#[test]
fn who_guesses_stags_is_kept_out_for_a_minute() {
    let port = ports::of_nobody();
    let limits = "[limits.peer]\nstag_guesses_per_minute = 3\n";
    let daemon = daemon(HERE, port, limits);
    let _peers = [LOWER, [127, 0, 52, 0]].map(|at| confirming(at, port));
    for guess in 1..=3_u8 {
        let end = End::new(&daemon);
        end.await_peer(HERE, LOWER);
        let mut peer = dial(LOWER, port, &Said::to(&end, LOWER).bytes());
        accepted(&mut peer);
        let write = [0xC1, 0x40, 0, 0, 77, guess, 0, 0, 0, 0, 0, 0, 0, 0, b'!'];
        wire::say(&mut peer, &fpdu(&write));
        let began = Instant::now();
        while end.state() != QpState::Error {
            assert!(began.elapsed() < DEADLINE, "guess {guess} is no error");
        }
    }
    let end = End::new(&daemon);
    end.await_peer(HERE, LOWER);
    assert_eq!(rejection(&mut dial(LOWER, port, &Said::to(&end, LOWER).bytes())), GUESSER);
    // This end would call by itself after a while, and says why it does not.
    let why = end.fails_after(&Sending { timeout: 19, ..QUICK });
    assert!(why.contains("limits.peer.stag_guesses_per_minute"), "{why}");
    // Others are none of this.
    let other = End::new(&daemon);
    other.await_peer(HERE, [127, 0, 52, 0]);
    accepted(&mut dial([127, 0, 52, 0], port, &Said::to(&other, [127, 0, 52, 0]).bytes()));
}
