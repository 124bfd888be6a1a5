//! Hostile peers at `wired.port`, where daemons connect their RC and UC QPs: peers that connect to
//! the daemon, and peers that the daemon connects to. The daemon refuses each with a reason, and
//! other peers are unaffected.

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
use rnic_tests::{DEADLINE, Daemon, ports};
use rustix::net::{AddressFamily, SocketType};

/// Addresses of the attacked daemon, and of peers with a lower and a higher address.
const LOWER: [u8; 4] = [127, 0, 52, 1];
const HERE: [u8; 4] = [127, 0, 52, 2];
const HIGHER: [u8; 4] = [127, 0, 52, 3];

/// Source address of a crowd of peers, so that the ports of the other addresses stay free.
const CROWD: [u8; 4] = [127, 0, 52, 9];

/// QP number that the peer claims to have.
const THEIRS: u32 = 7777;

/// Requests fail after half a minute without an acknowledgement.
const SENDING: Sending = Sending { sq_psn: 7, timeout: 20, retry_count: 7, rnr_retry: 7, ord: 4 };

/// Number of connections that a peer accepts and ends.
const DIALS: u32 = 20;
/// Shortest pause between the end of a connection and the next connection request.
const PAUSE: Duration = Duration::from_millis(10);

/// Requests fail after a second. On a busy machine, the diagnosis may not be ready in this time,
/// but one of many attempts succeeds.
const QUICK: Sending = Sending { timeout: 10, retry_count: 1, ..SENDING };

/// Starts a daemon at this address. Daemons and peers of a fabric use the same port.
fn daemon(address: [u8; 4], port: u16, config: &str) -> Daemon {
    let address = IpAddr::from(address);
    let base = format!("[device]\naddresses = [\"{address}\"]\n[wired]\nport = {port}\n");
    Daemon::start(&format!("{base}{config}"))
}

/// Returns the resources that an idle daemon holds after it began to listen for other daemons,
/// which it does when the first RC or UC QP is created.
fn at_rest(daemon: &Daemon) -> Footprint {
    drop(End::new(daemon));
    daemon.at_rest()
}

/// Opens `wired.port` of a peer's host and confirms each request of this peer, as its daemon would.
fn confirming(address: [u8; 4], port: u16) -> WiredPort {
    WiredPort::confirming((address, port).into())
}

fn gid(address: [u8; 4]) -> Gid {
    Gid::from(IpAddr::from(address))
}

/// A client with an RC QP.
struct End {
    client: Client,
    qp: Qp,
}

impl End {
    fn new(daemon: &Daemon) -> Self {
        let client = Client::new(daemon);
        let qp = client.qp_of(QpType::Rc);
        End { client, qp }
    }

    /// Moves the QP to RTR, with QP [`THEIRS`] at the address `there` as its peer.
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

    /// Posts a Send that gets no acknowledgement, and returns the text of its diagnosis.
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

/// Connects two QPs of two daemons, and exchanges a message.
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

/// Introduction of a peer, encoded by this test.
#[derive(Clone)]
struct Introduction {
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

impl Introduction {
    /// Returns the introduction that an honest daemon would send for [`THEIRS`] at this address.
    fn to(end: &End, from: [u8; 4]) -> Self {
        Introduction {
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
        // 3 encodes a path MTU of 1024 bytes.
        bytes.extend([self.min_rnr_timer, sends | 3 << 2]);
        bytes.extend(self.rq_psn.to_be_bytes());
        bytes.extend(self.dial.to_be_bytes());
        bytes.extend(self.daemon.to_be_bytes());
        bytes
    }
}

/// Connects to the daemon and sends this introduction.
fn dial(from: [u8; 4], port: u16, private_data: &[u8]) -> TcpStream {
    let mut peer = wire::dial_from(from, (HERE, port).into());
    wire::send_bytes(&mut peer, &wire::request(CRC, 2, private_data));
    peer
}

/// Returns the code with which a peer is rejected, or 0, and waits for the end of its connection.
fn rejection(peer: &mut TcpStream) -> u8 {
    let reply = wire::reply(peer);
    if reply[16] & REJECTED == 0 {
        return 0;
    }
    assert_eq!(&reply[20..25], b"RNWD\x02");
    assert_eq!(wire::ending(peer), Ending::Fin(Vec::new()));
    reply[25]
}

/// Asserts that a peer is accepted. Returns the daemon's introduction.
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
fn mismatched_dials_get_a_reason() {
    let port = ports::unused_port();
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
    let good = Introduction::to(&end, LOWER);
    let rejected = |private_data: &[u8], code: u8, what: &str| {
        assert_eq!(rejection(&mut dial(LOWER, port, private_data)), code, "{what}");
    };
    let says = |sent: Introduction, code: u8, what: &str| rejected(&sent.bytes(), code, what);
    // No introduction, or a malformed one.
    rejected(&[], MALFORMED, "no private data");
    rejected(&good.bytes()[..71], MALFORMED, "a byte is missing");
    rejected(&[0xAA; 500], MALFORMED, "noise");
    says(Introduction { magic: *b"RNWE", ..good.clone() }, MALFORMED, "another magic");
    says(Introduction { version: 3, ..good.clone() }, MALFORMED, "another version");
    says(Introduction { version: 1, ..good.clone() }, MALFORMED, "a version without a dial number");
    says(Introduction { version: 0, ..good.clone() }, MALFORMED, "no version");
    // An address of another host.
    says(Introduction { gid: gid(HIGHER), ..good.clone() }, OTHER_GID, "GID of another host");
    says(Introduction { gid: gid(HERE), ..good.clone() }, OTHER_GID, "GID of this host");
    says(Introduction { to_gid: gid(HIGHER), ..good.clone() }, OTHER_GID, "GID of another target");
    // QP numbers.
    for number in [0, 1, end.qp.id().0 + 1000, 1 << 24, u32::MAX] {
        says(Introduction { to_qp: number, ..good.clone() }, NO_QUEUE_PAIR, "an unknown QP number");
    }
    let to_qp = plain.1.id().0;
    says(Introduction { to_qp, ..good.clone() }, NO_QUEUE_PAIR, "an iWARP QP");
    for qp in [0, THEIRS + 1, u32::MAX] {
        says(Introduction { qp, ..good.clone() }, OTHER_PEER, "another number of the peer's");
    }
    {
        let other = Introduction { gid: gid(HIGHER), ..good.clone() };
        let mut peer = dial(HIGHER, port, &other.bytes());
        assert_eq!(rejection(&mut peer), OTHER_PEER, "another address with the right number");
    }
    // Once this side is in RTS, a PSN other than its own first one is refused.
    end.qp.to_rts(&SENDING).unwrap();
    says(Introduction { rq_psn: 8, ..good.clone() }, PSN, "another PSN");
    says(Introduction { sq_psn: Some(8), ..good.clone() }, OWN_PSN, "another PSN of the peer's");
    assert_eq!(end.state(), QpState::Rts);
    // The right peer is accepted. All later requests are refused, even a repetition of this one.
    let mut peer = dial(LOWER, port, &good.bytes());
    let reply = accepted(&mut peer);
    assert_eq!(reply[8..40], [gid(HERE).0, gid(LOWER).0].concat());
    assert_eq!(reply[40..48], [end.qp.id().0.to_be_bytes(), THEIRS.to_be_bytes()].concat());
    says(good.clone(), BUSY, "a second stream");
    // A QP in ERR.
    let failed = End::new(&daemon);
    failed.await_peer(HERE, LOWER);
    failed.qp.to_error().unwrap();
    // A worker moves the QP to ERR.
    let began = Instant::now();
    while failed.state() != QpState::Error {
        assert!(began.elapsed() < DEADLINE, "the QP does not fail");
    }
    says(Introduction::to(&failed, LOWER), IN_ERROR, "in Error");
    drop((peer, failed));
    drop((end, plain));
    daemon.wait_status("rid of them", |s| s.startups == 0 && s.qps == 0);
    daemon.shrinks_to(start);
}

#[test]
fn silent_or_malformed_dials_time_out() {
    let port = ports::unused_port();
    let config = "[mpa]\nstartup_deadline = \"300ms\"\ndecision_deadline = \"300ms\"\n";
    let first = daemon(HERE, port, config);
    let start = at_rest(&first);
    let peer_port = confirming(LOWER, port);
    let end = End::new(&first);
    let address = SocketAddr::from((HERE, port));
    // Nothing, half a frame, and bytes that are not a frame.
    let whole = wire::request(CRC, 2, &Introduction::to(&end, LOWER).bytes());
    let mut noise = vec![0x5A; 600];
    noise[0] = b'M';
    let huge = [b"MPA ID Req Frame".as_slice(), &[CRC, 2, 0xFF, 0xFF], &[0; 700]].concat();
    for sent in [&[][..], &whole[..16], &whole[..19], &whole[..60], &noise, &huge] {
        let mut peer = wire::dial_from(LOWER, address);
        wire::send_bytes(&mut peer, sent);
        match wire::ending(&mut peer) {
            Ending::Fin(bytes) | Ending::Reset(bytes) => assert!(bytes.is_empty()),
            silence @ Ending::Silence(_) => panic!("{silence:?} after {} bytes", sent.len()),
        }
    }
    // One byte after the request, before the reply.
    let mut peer = wire::dial_from(LOWER, address);
    wire::send_bytes(&mut peer, &[&whole[..], &[0]].concat());
    assert!(!matches!(wire::ending(&mut peer), Ending::Silence(_)));
    // A peer that requests a QP which never reaches RTR.
    let mut peer = wire::dial_from(LOWER, address);
    wire::send_bytes(&mut peer, &whole);
    assert!(!matches!(wire::ending(&mut peer), Ending::Silence(_)));
    assert_eq!(peer_port.queries().len(), 1);
    first.wait_status("rid of them", |s| s.startups == 0);
    drop((end, peer));
    first.shrinks_to(start);
    drop(first);
    // A peer that sends nothing after it was accepted: the QP waits for the next connection.
    let daemon = daemon(HERE, port, "");
    let start = at_rest(&daemon);
    let end = End::new(&daemon);
    end.await_peer(HERE, LOWER);
    end.qp.to_rts(&SENDING).unwrap();
    for _ in 0..3 {
        let mut peer = dial(LOWER, port, &Introduction::to(&end, LOWER).bytes());
        accepted(&mut peer);
        let mut frame = fpdu(&untagged(3, 0, 1, b"something"));
        *frame.last_mut().unwrap() ^= 1;
        wire::send_bytes(&mut peer, &frame);
        assert!(!matches!(wire::ending(&mut peer), Ending::Silence(_)), "a wrong CRC");
        drop(peer);
        wait_until_unlinked(&end);
        assert_eq!(end.state(), QpState::Rts);
    }
    // The last reason is that the connection ended, or that the daemon cannot connect.
    let why = end.fails_because();
    assert!(why.contains("queue pair 7777") || why.contains("CRC"), "{why}");
    drop(end);
    daemon.shrinks_to(start);
}

/// Waits until the daemon has noticed the end of a connection.
fn wait_until_unlinked(end: &End) {
    let began = Instant::now();
    while end.qp.query().unwrap().path != "none" {
        assert!(began.elapsed() < DEADLINE, "the stream does not end");
    }
}

#[test]
fn peer_depths_and_timers_are_clamped() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    let _peer_port = confirming(LOWER, port);
    // A peer that allows any number of Reads gets at most as many as the program requested. A peer
    // that allows none still gets one, which it can refuse.
    for (ird, expected) in [(u16::MAX, 4), (4, 4), (1, 1), (0, 0)] {
        let end = End::new(&daemon);
        end.await_peer(HERE, LOWER);
        end.qp.to_rts(&SENDING).unwrap();
        let sent = Introduction { ird, min_rnr_timer: u8::MAX, ..Introduction::to(&end, LOWER) };
        let mut peer = dial(LOWER, port, &sent.bytes());
        accepted(&mut peer);
        // The peer is the initiator, so it sends first.
        end.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
        end.client.completes(1, CompletionOpcode::Receive);
        assert_eq!(end.qp.query().unwrap().ord, expected);
        let sink = end.client.region(64, READ_WRITE);
        let mut remote = sink.remote().at(0);
        remote.addr = 0;
        let reads: Vec<_> =
            (0..10).map(|n| SendRequest::read(n, sink.sge(0, 8), remote).signaled()).collect();
        end.qp.post_send(&reads).unwrap();
        assert_eq!(wire::ulpdu(&mut peer), send_is_done(1));
        for number in 1..=u32::from(expected.max(1)) {
            let request = wire::ulpdu(&mut peer);
            assert_eq!((request[1] & 0xF, request[13]), (READ_REQUEST, number as u8));
        }
        let more = wire::ending_after(&mut peer, Duration::from_millis(200));
        assert_eq!(more, Ending::Silence(Vec::new()), "{ird}");
    }
    // Whatever RNR timer the peer requests, retries are unlimited only if the program requested it.
    for min_rnr_timer in [0, 31, u8::MAX] {
        let end = End::new(&daemon);
        end.await_peer(HERE, LOWER);
        end.qp.to_rts(&Sending { rnr_retry: 1, ..SENDING }).unwrap();
        let sent = Introduction { min_rnr_timer, ird: 0, ..Introduction::to(&end, LOWER) };
        let mut peer = dial(LOWER, port, &sent.bytes());
        accepted(&mut peer);
        end.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
        end.client.completes(1, CompletionOpcode::Receive);
        end.qp.post_send(&[SendRequest::send_inline(2, b"")]).unwrap();
        assert_eq!(wire::ulpdu(&mut peer), send_is_done(1));
        // The peer reports that it has no receive for this Send, the first of this end.
        assert_eq!(wire::ulpdu(&mut peer)[1] & 0xF, SEND);
        wire::send_bytes(&mut peer, &fpdu(&notice(1)));
        let failed = end.client.completion();
        let expected = (2, CompletionStatus::ReceiverNotReady);
        assert_eq!((failed.wr_id, failed.status), expected, "{min_rnr_timer}");
    }
    daemon.wait_status("rid of them", |s| s.startups == 0 && s.qps == 0);
}

/// A second RNR notice for a Send ends the connection. Otherwise a peer that keeps sending notices
/// could delay a Send without limit.
#[test]
fn rnr_notice_counts_once_per_send() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    let _peer_port = confirming(LOWER, port);
    let end = End::new(&daemon);
    end.await_peer(HERE, LOWER);
    end.qp.to_rts(&Sending { rnr_retry: 1, ..SENDING }).unwrap();
    // RNR timer of about 655 ms.
    let sent = Introduction { min_rnr_timer: 0, ..Introduction::to(&end, LOWER) };
    let mut peer = dial(LOWER, port, &sent.bytes());
    accepted(&mut peer);
    end.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    wire::send_bytes(&mut peer, &fpdu(&untagged(3, 0, 1, b"")));
    end.client.completes(1, CompletionOpcode::Receive);
    end.qp.post_send(&[SendRequest::send_inline(2, b"")]).unwrap();
    assert_eq!(wire::ulpdu(&mut peer), send_is_done(1));
    assert_eq!(wire::ulpdu(&mut peer)[1] & 0xF, SEND);
    for says in [notice(1), goes_on(), notice(1)] {
        wire::send_bytes(&mut peer, &fpdu(&says));
    }
    wait_until_unlinked(&end);
    assert_eq!(end.state(), QpState::Rts);
}

/// Opcodes of RDMAP.
const READ_REQUEST: u8 = 1;
const SEND: u8 = 3;

/// Returns the peer's RNR notice for the Send with this MSN, a Write of zero bytes.
fn notice(msn: u32) -> Vec<u8> {
    let mut write = vec![0xC1, 0x40, 0, 0, 0, 0];
    write.extend(0x524e_5201_u32.to_be_bytes());
    write.extend(msn.to_be_bytes());
    write
}

/// Returns the notice that the Send with this MSN is done.
fn send_is_done(msn: u32) -> Vec<u8> {
    let mut write = notice(msn);
    write[9] = 3;
    write
}

/// Returns the notice that the peer has posted a receive.
fn goes_on() -> Vec<u8> {
    let mut write = notice(0);
    write[9] = 0;
    write
}

/// Many requests for a QP that is not in RTR yet: when the QP reaches RTR, it accepts the matching
/// request, and all others are refused.
#[test]
fn waiting_dials_do_not_block_the_right_peer() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    let end = End::new(&daemon);
    let crowd_port = confirming(CROWD, port);
    let lower_port = confirming(LOWER, port);
    let hostile: Vec<_> = (0..20)
        .map(|n| {
            dial(CROWD, port, &Introduction { qp: n, ..Introduction::to(&end, CROWD) }.bytes())
        })
        .collect();
    let mut honest = dial(LOWER, port, &Introduction::to(&end, LOWER).bytes());
    // Waits until all requests are confirmed.
    let are_held = |count: u32| {
        daemon.wait_status("held", |s| {
            let asked = crowd_port.queries().len() + lower_port.queries().len();
            asked == count as usize && s.startups == count
        });
    };
    are_held(21);
    // Only 32 of the further requests are kept.
    let mut kept = 0;
    let mut crowd = Vec::new();
    let other = End::new(&daemon);
    for n in 0..100 {
        let mut peer =
            dial(CROWD, port, &Introduction { qp: n, ..Introduction::to(&other, CROWD) }.bytes());
        if n < 32 {
            kept += 1;
            are_held(21 + kept);
            crowd.push(peer);
        } else {
            assert_eq!(rejection(&mut peer), CROWDED);
        }
    }
    drop(crowd);
    daemon.wait_status("rid of them", |s| s.startups == 21);
    end.await_peer(HERE, LOWER);
    accepted(&mut honest);
    for mut peer in hostile {
        assert_eq!(rejection(&mut peer), OTHER_PEER);
    }
    daemon.wait_status("rid of them", |s| s.startups == 0);
}

#[test]
fn thousand_dials_do_not_block_other_qps() {
    let port = ports::unused_port();
    // Silent connections and requests have separate limits.
    let limits = "[limits]\nstartups = 100\n[limits.user]\nstartups = 100\n";
    let config = format!("{limits}[mpa]\nstartup_deadline = \"3600s\"\n");
    let daemon = daemon(HERE, port, &config);
    let start = at_rest(&daemon);
    let _crowd_port = confirming(CROWD, port);
    let far = self::daemon(LOWER, port, "");
    let idle = End::new(&daemon);
    rnic_tests::process::raise_descriptor_limit();
    // Silent connections, and requests for a QP that never reaches RTR.
    let silent: Vec<_> = (0..1000).map(|_| wire::dial_from(CROWD, (HERE, port).into())).collect();
    let sent = Introduction::to(&idle, CROWD);
    let waiting: Vec<_> = (0..1000)
        .map(|n| dial(CROWD, port, &Introduction { qp: n, ..sent.clone() }.bytes()))
        .collect();
    let a = End::new(&daemon);
    let b = End::new(&far);
    exchange(&a, HERE, &b, LOWER);
    let c = End::new(&daemon);
    let d = End::new(&daemon);
    exchange(&c, HERE, &d, HERE);
    assert!(daemon.status().startups <= 100);
    drop((silent, waiting));
    drop((a, b, c, d));
    daemon.wait_status("rid of them", |s| s.startups == 0 && s.qps == 1);
    drop(idle);
    daemon.shrinks_to(start);
}

/// Stops a thread of a test when dropped.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Replies of peers that the daemon connects to, and the diagnosis that the program gets.
#[test]
fn malformed_replies_to_dials_are_reported() {
    let port = ports::unused_port();
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
            let server = &server;
            let end = &end;
            scope.spawn(move || {
                // The daemon connects repeatedly.
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
            // Stops the thread even if the test fails.
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
    let introduction = |end: &End| Introduction {
        gid: gid(HIGHER),
        to_gid: gid(HERE),
        ..Introduction::to(end, HIGHER)
    };
    answered(&|_, _| (), "7777");
    answered(&|_, peer| peer.write_all(&[0x5A; 100]).unwrap(), "7777");
    answered(&|_, peer| peer.shutdown(Shutdown::Both).unwrap(), "7777");
    answered(&|_, peer| wire::send_bytes(peer, &reply(0, b"")), "did not introduce itself");
    answered(&|_, peer| wire::send_bytes(peer, &reply(0, &[7; 56])), "did not introduce itself");
    answered(&|_, peer| wire::send_bytes(peer, &reply(REJECTED, b"")), "reason unknown");
    answered(
        &|_, peer| wire::send_bytes(peer, &reply(REJECTED, b"RNWD\x02\xFF")),
        "reason unknown",
    );
    answered(
        &|_, peer| wire::send_bytes(peer, &reply(REJECTED, b"RNWD\x02\x03")),
        "it has another peer",
    );
    answered(
        &|_, peer| wire::send_bytes(peer, &reply(REJECTED, b"RNWD\x02\x0C")),
        "got no confirmation",
    );
    // The peer claims to have, or to be connected to, another QP or address.
    for spoil in [
        |sent: &mut Introduction| sent.qp += 1,
        |sent: &mut Introduction| sent.to_qp += 1,
        |sent: &mut Introduction| sent.gid = gid(LOWER),
        |sent: &mut Introduction| sent.to_gid = gid(LOWER),
    ] {
        answered(
            &|end, peer| {
                let mut sent = introduction(end);
                sent.to_qp = end.qp.id().0;
                sent.qp = THEIRS;
                spoil(&mut sent);
                wire::send_bytes(peer, &reply(0, &sent.bytes()));
            },
            "answered for a different connection",
        );
    }
    let differs = |end: &End, peer: &mut TcpStream| {
        let sent = Introduction { rq_psn: 8, ..introduction(end) };
        wire::send_bytes(peer, &reply(0, &Introduction { to_qp: end.qp.id().0, ..sent }.bytes()));
    };
    answered(&differs, "PSNs differ");
    // The first PSN that the peer sends is compared before this end is in RTS.
    let other = |end: &End, peer: &mut TcpStream| {
        let sent = Introduction { sq_psn: Some(9), to_qp: end.qp.id().0, ..introduction(end) };
        wire::send_bytes(peer, &reply(0, &sent.bytes()));
    };
    answered(&other, "queue pair 7777 starts with 9");
    let [a, b] = bystanders;
    exchange(&a, HERE, &b, HERE);
    let mut none = [Completion::default()];
    assert_eq!(a.client.cq.poll(&mut none).unwrap(), 0);
}

#[test]
fn lower_address_dials_and_wins_collisions() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    // No peer replies, so the QP keeps trying to connect.
    let [below, above] =
        [LOWER, HIGHER].map(|at| TcpListener::bind((IpAddr::from(at), port)).unwrap());
    // The end with the higher address lets the lower one connect for half a second.
    let end = End::new(&daemon);
    let began = Instant::now();
    end.await_peer(HERE, LOWER);
    let (_dialled, _) = below.accept().unwrap();
    assert!(began.elapsed() >= Duration::from_millis(500), "{:?}", began.elapsed());
    let mut peer = dial(LOWER, port, &Introduction::to(&end, LOWER).bytes());
    confirm(&mut below.accept().unwrap().0);
    accepted(&mut peer);
    // The end with the lower address connects at once, repeatedly.
    let end = End::new(&daemon);
    end.await_peer(HERE, HIGHER);
    let (_dialled, _) = above.accept().unwrap();
    let mut peer = dial(HIGHER, port, &Introduction::to(&end, HIGHER).bytes());
    confirm(&mut above.accept().unwrap().0);
    assert_eq!(rejection(&mut peer), BUSY);
}

#[test]
fn tcp_cannot_impersonate_a_local_qp() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    let [a, b] = [End::new(&daemon), End::new(&daemon)];
    a.wire(HERE, HERE, b.qp.id().0);
    let sent = Introduction { qp: b.qp.id().0, ..Introduction::to(&a, HERE) };
    assert_eq!(rejection(&mut dial(HERE, port, &sent.bytes())), NOT_CONFIRMED);
    a.qp.to_rts(&SENDING).unwrap();
    b.wire(HERE, HERE, a.qp.id().0);
    b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    a.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
    a.client.completes(2, CompletionOpcode::Send);
}

#[test]
fn dials_to_a_closing_peer_pause() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    let listener = TcpListener::bind((IpAddr::from(HIGHER), port)).unwrap();
    let end = End::new(&daemon);
    end.await_peer(HERE, HIGHER);
    let sent = Introduction::to(&end, HIGHER).bytes();
    let mut first = None;
    for _ in 0..DIALS {
        let (mut stream, _) = listener.accept().unwrap();
        first.get_or_insert_with(Instant::now);
        let mut frame = wire::exactly(&mut stream, 20 + 4 + sent.len());
        // Accepts the request, with a smaller number of Reads for this end.
        frame[7..10].copy_from_slice(b"Rep");
        frame[22] &= 0xC0;
        frame[23] = 4;
        frame[24..].copy_from_slice(&sent);
        wire::send_bytes(&mut stream, &frame);
    }
    // A lower bound, so that it also holds on a busy machine: each pause is at least 10 ms. The
    // first connection may have been accepted late.
    let took = first.unwrap().elapsed();
    assert!(took >= PAUSE * (DIALS - 2), "{DIALS} times in {took:?}");
}

#[test]
fn unreachable_peer_can_dial_in() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    // The backlog of this listener is full, so that further connections are not established.
    let there = SocketAddr::from((HIGHER, port));
    let deaf = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&deaf, &there).unwrap();
    rustix::net::listen(&deaf, 0).unwrap();
    let full = TcpStream::connect(there).unwrap();
    let end = End::new(&daemon);
    end.await_peer(HERE, HIGHER);
    drop(full);
    // The peer's host is reachable again for confirmations. It closes the daemon's own connections.
    rustix::net::listen(&deaf, 64).unwrap();
    let peers_port = WiredPort::on(TcpListener::from(deaf));
    let began = Instant::now();
    loop {
        let mut peer = dial(HIGHER, port, &Introduction::to(&end, HIGHER).bytes());
        let reply = wire::reply(&mut peer);
        if reply[16] & REJECTED == 0 {
            break;
        }
        assert_eq!(reply[25], BUSY, "a request of the daemon is pending");
        assert!(began.elapsed() < DEADLINE, "the peer is not reached");
    }
    assert!(!peers_port.queries().is_empty());
}

/// Each wrong STag ends the peer's connection. After too many of them, the daemon neither accepts
/// connections from the peer's address nor connects to it for a while.
#[test]
fn stag_guesser_is_barred_for_a_minute() {
    let port = ports::unused_port();
    let limits = "[limits.peer]\nstag_guesses_per_minute = 3\n";
    let daemon = daemon(HERE, port, limits);
    let _peers = [LOWER, [127, 0, 52, 0]].map(|at| confirming(at, port));
    for guess in 1..=3_u8 {
        let end = End::new(&daemon);
        end.await_peer(HERE, LOWER);
        let mut peer = dial(LOWER, port, &Introduction::to(&end, LOWER).bytes());
        accepted(&mut peer);
        let write = [0xC1, 0x40, 0, 0, 77, guess, 0, 0, 0, 0, 0, 0, 0, 0, b'!'];
        wire::send_bytes(&mut peer, &fpdu(&write));
        let began = Instant::now();
        while end.state() != QpState::Error {
            assert!(began.elapsed() < DEADLINE, "guess {guess} is not an error");
        }
    }
    let end = End::new(&daemon);
    end.await_peer(HERE, LOWER);
    assert_eq!(rejection(&mut dial(LOWER, port, &Introduction::to(&end, LOWER).bytes())), GUESSER);
    // After a while, this end would connect to the peer. The diagnosis names the reason why it does
    // not.
    let why = end.fails_after(&Sending { timeout: 19, ..QUICK });
    assert!(why.contains("limits.peer.stag_guesses_per_minute"), "{why}");
    // Other peers are unaffected.
    let other = End::new(&daemon);
    other.await_peer(HERE, [127, 0, 52, 0]);
    accepted(&mut dial([127, 0, 52, 0], port, &Introduction::to(&other, [127, 0, 52, 0]).bytes()));
}
