//! The connection of an RC QP goes to the QP of the daemon at the peer's `wired.port`, and to no
//! other program of that host, of a third host or of this host. Each attacker is a raw TCP client.

use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rnic_client::{
    Access, Completion, CompletionOpcode, Error, Gid, Qp, QpState, QpType, RecvRequest,
    SendRequest, Sending, Wiring,
};
use rnic_tests::client::Client;
use rnic_tests::wire::{self, CRC, Ending};
use rnic_tests::wired_port::{VerificationQuery, WiredPort, answer, private_data, reject};
use rnic_tests::{Daemon, ports, timing};

/// Host addresses. The hosts with an address below [`HERE`] connect to it.
const FAR: [u8; 4] = [127, 0, 54, 1];
const LOWER: [u8; 4] = [127, 0, 54, 2];
const HERE: [u8; 4] = [127, 0, 54, 3];
const HIGHER: [u8; 4] = [127, 0, 54, 4];
const CROWD: [u8; 4] = [127, 0, 54, 9];

/// QP number claimed by a raw peer.
const THEIRS: u32 = 7777;

/// Requests fail after half a minute without an acknowledgement.
const SENDING: Sending = Sending { sq_psn: 7, timeout: 20, retry_count: 7, rnr_retry: 7, ord: 4 };

/// Private data of a rejection without a confirmation. Reveals nothing about the QP.
const NOT_CONFIRMED: &[u8] = b"RNWD\x02\x0c";
/// Private data of a rejection because the request is for another daemon.
const OTHER_DAEMON: &[u8] = b"RNWD\x02\x0d";

fn daemon(address: [u8; 4], port: u16, config: &str) -> Daemon {
    let address = IpAddr::from(address);
    let base = format!("[device]\naddresses = [\"{address}\"]\n[wired]\nport = {port}\n");
    Daemon::start(&format!("{base}{config}"))
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

    fn number(&self) -> u32 {
        self.qp.id().0
    }

    fn to_rtr(&self, here: [u8; 4], there: [u8; 4], remote_qp: u32) {
        self.rtr(here, there, remote_qp).unwrap();
    }

    fn rtr(&self, here: [u8; 4], there: [u8; 4], remote_qp: u32) -> Result<(), Error> {
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
        self.qp.to_rtr(&wiring)
    }

    fn to_rts(&self) {
        self.qp.to_rts(&SENDING).unwrap();
    }

    fn has_stream(&self) -> bool {
        self.qp.query().unwrap().path != "none"
    }
}

/// Exchanges a message between two QPs in RTS.
fn exchange(from: &End, to: &End) {
    to.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    from.qp.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
    from.client.completes(2, CompletionOpcode::Send);
    to.client.completes(1, CompletionOpcode::Receive);
}

/// A decoded introduction.
#[derive(Clone, Copy)]
struct Introduction {
    from: [u8; 4],
    qp: u32,
    to_qp: u32,
    rq_psn: u32,
    sq_psn: Option<u32>,
    number: u64,
    /// Instance number of the intended daemon, or zero if unknown.
    daemon: u64,
}

impl Introduction {
    /// Returns the introduction of [`THEIRS`] at an address, for a QP of [`HERE`].
    fn to(to_qp: u32, from: [u8; 4]) -> Self {
        Introduction {
            from,
            qp: THEIRS,
            to_qp,
            rq_psn: 7,
            sq_psn: Some(7),
            number: 0x1234,
            daemon: 0,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"RNWD\x02".to_vec();
        bytes.extend(&self.sq_psn.unwrap_or(0).to_be_bytes()[1..]);
        bytes.extend(gid(self.from).0);
        bytes.extend(gid(HERE).0);
        bytes.extend(self.qp.to_be_bytes());
        bytes.extend(self.to_qp.to_be_bytes());
        bytes.extend(4_u16.to_be_bytes());
        let sends = if self.sq_psn.is_some() { 2 } else { 0 };
        // Code 3 is a path MTU of 1024 bytes.
        bytes.extend([12, sends | 3 << 2]);
        bytes.extend(self.rq_psn.to_be_bytes());
        bytes.extend(self.number.to_be_bytes());
        bytes.extend(self.daemon.to_be_bytes());
        bytes
    }

    /// Connects to [`HERE`] and sends the introduction.
    fn dial(&self, port: u16) -> TcpStream {
        send(self.from, (HERE, port).into(), &self.bytes())
    }
}

/// Connects and sends an MPA Request with this private data.
fn send(from: [u8; 4], to: SocketAddr, private_data: &[u8]) -> TcpStream {
    let mut stream = wire::dial_from(from, to);
    wire::send_bytes(&mut stream, &wire::request(CRC, 2, private_data));
    stream
}

/// Returns the private data of a rejection, or `None` if the connection was accepted.
fn rejection(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let reply = wire::reply(stream);
    if reply[16] & 0x20 == 0 {
        return None;
    }
    assert_eq!(wire::ending(stream), Ending::Fin(Vec::new()));
    Some(reply[20..].to_vec())
}

#[test]
fn unconfirmed_requests_get_no_reply() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    let ends = [End::new(&daemon), End::new(&daemon), End::new(&daemon), End::new(&daemon)];
    let [reset, rtr, rts, failed] = &ends;
    for end in [rtr, rts, failed] {
        end.to_rtr(HERE, LOWER, THEIRS);
        end.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    }
    rts.to_rts();
    failed.qp.to_error().unwrap();
    failed.client.completion();
    let attack = |how: &str| {
        let unknown = rts.number() + 1000;
        for to_qp in [reset, rtr, rts, failed].map(End::number).into_iter().chain([unknown]) {
            let sent = Introduction::to(to_qp, LOWER);
            let [other_psn, other_qp] =
                [Introduction { rq_psn: 8, ..sent }, Introduction { qp: 5, ..sent }];
            for sent in [sent, other_psn, other_qp, Introduction { sq_psn: None, ..sent }] {
                let found = rejection(&mut sent.dial(port));
                assert_eq!(found.as_deref(), Some(NOT_CONFIRMED), "{how}, QP {to_qp}");
            }
        }
    };
    attack("without a daemon there");
    type Reply = fn() -> Vec<u8>;
    let replies: [(&str, Reply); 5] = [
        ("denied", || answer(false)),
        ("rejected with other data", || reject(b"RNWD\x02\x01")),
        ("rejected without data", || reject(b"")),
        ("accepted", || {
            let mut accept = reject(b"RNWQ\x02\x01");
            accept[16] &= !0x20;
            accept
        }),
        ("closed", Vec::new),
    ];
    for (how, reply) in replies {
        let address = SocketAddr::from((LOWER, port));
        let _denying =
            WiredPort::replying(address, move |peer, _| wire::send_bytes(peer, &reply()));
        attack(how);
    }
    for end in [rtr, rts] {
        assert!(!end.has_stream());
        assert_eq!(end.client.cq.poll(&mut [Completion::default()]).unwrap(), 0);
    }
    // A request that the daemon there confirms is served.
    let peer = WiredPort::confirming((LOWER, port).into());
    let sent =
        Introduction { number: 0xABCD_EF01_2345_6789, ..Introduction::to(rts.number(), LOWER) };
    assert_eq!(rejection(&mut sent.dial(port)), None);
    let expected = VerificationQuery {
        dialled: (gid(HERE).0, rts.number()),
        dialler: (gid(LOWER).0, THEIRS),
        number: sent.number,
    };
    assert_eq!(peer.queries(), [expected]);
}

#[test]
fn other_programs_of_a_peers_host_are_refused() {
    let port = ports::unused_port();
    let [here, there] = [HERE, FAR].map(|address| daemon(address, port, ""));
    let [a, b] = [End::new(&here), End::new(&there)];
    a.to_rtr(HERE, FAR, b.number());
    a.to_rts();
    let sent = Introduction { qp: b.number(), ..Introduction::to(a.number(), FAR) };
    let attack = || rejection(&mut sent.dial(port));
    // Before the peer is in RTR, and while its connection exists.
    assert_eq!(attack().as_deref(), Some(NOT_CONFIRMED));
    assert!(!a.has_stream());
    b.to_rtr(FAR, HERE, a.number());
    b.to_rts();
    exchange(&a, &b);
    assert_eq!(attack().as_deref(), Some(NOT_CONFIRMED));
    exchange(&b, &a);
}

#[test]
fn dial_is_confirmed_once_to_its_peer() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    let peer = TcpListener::bind((IpAddr::from(HIGHER), port)).unwrap();
    let end = End::new(&daemon);
    end.to_rtr(HERE, HIGHER, THEIRS);
    let (mut dial, _) = peer.accept().unwrap();
    let sent = private_data(&mut dial).unwrap();
    let number = u64::from_be_bytes(sent[56..64].try_into().unwrap());
    // The instance number of a remote daemon is unknown.
    assert_eq!(sent[64..], [0; 8]);
    let right = VerificationQuery {
        dialled: (gid(HIGHER).0, THEIRS),
        dialler: (gid(HERE).0, end.number()),
        number,
    };
    let ask = |from: [u8; 4], question: &VerificationQuery| {
        let answer = rejection(&mut send(from, (HERE, port).into(), &question.bytes())).unwrap();
        assert_eq!(answer[..5], *b"RNWQ\x02");
        answer[5]
    };
    // Wrong queries do not consume the number.
    let wrong = [
        VerificationQuery { number: number ^ 1, ..right.clone() },
        VerificationQuery { number: 0, ..right.clone() },
        VerificationQuery { dialled: (gid(HIGHER).0, THEIRS + 1), ..right.clone() },
        VerificationQuery { dialled: (gid(LOWER).0, THEIRS), ..right.clone() },
        VerificationQuery { dialler: (gid(HERE).0, end.number() + 1), ..right.clone() },
        VerificationQuery { dialler: (gid(HIGHER).0, end.number()), ..right.clone() },
    ];
    for question in &wrong {
        assert_eq!(ask(HIGHER, question), 0, "{question:?}");
    }
    assert_eq!(ask(LOWER, &right), 0, "from a third host");
    assert_eq!(ask(HIGHER, &right), 1);
    assert_eq!(ask(HIGHER, &right), 0, "a second time");
    // The daemon replies to each query and sends none in return, so the next connection is the next
    // request.
    drop(dial);
    let (mut next, _) = peer.accept().unwrap();
    assert_eq!(private_data(&mut next).unwrap()[..5], *b"RNWD\x02");
    // The number of the former request is no longer valid.
    assert_eq!(ask(HIGHER, &right), 0, "for a dial that has ended");
}

#[test]
fn each_dial_has_its_own_number() {
    let port = ports::unused_port();
    let daemon = daemon(HERE, port, "");
    let peer = TcpListener::bind((IpAddr::from(HIGHER), port)).unwrap();
    let ends: Vec<_> = (0..32).map(|_| End::new(&daemon)).collect();
    let mut numbers = BTreeSet::new();
    let mut dials = Vec::new();
    for end in &ends {
        end.to_rtr(HERE, HIGHER, THEIRS);
        let (mut dial, _) = peer.accept().unwrap();
        let sent = private_data(&mut dial).unwrap();
        numbers.insert(u64::from_be_bytes(sent[56..64].try_into().unwrap()));
        dials.push(dial);
    }
    assert_eq!(numbers.len(), ends.len());
    // Each bit must be set in some and clear in others. A false failure has a probability of 2^-25.
    let all = numbers.iter().fold(u64::MAX, |all, number| all & number);
    let any = numbers.iter().fold(0, |any, number| any | number);
    assert_eq!((all, any), (0, u64::MAX));
}

#[test]
fn daemons_do_not_confirm_for_each_other() {
    let port = ports::unused_port();
    let [first, second] = [(); 2].map(|()| daemon(HERE, port, "[engine]\nloopback = \"tcp\"\n"));
    let [a, b] = [End::new(&first), End::new(&first)];
    let [c, d] = [End::new(&second), End::new(&second)];
    assert_eq!([a.number(), b.number()], [c.number(), d.number()], "or the test shows nothing");
    // The first daemon has the port. One of its QPs waits for a peer that is not in RTR.
    b.to_rtr(HERE, HERE, a.number());
    b.to_rts();
    b.qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    // A request of the second daemon would reach the first one, so its QPs use the direct path.
    for (end, peer) in [(&c, &d), (&d, &c)] {
        end.to_rtr(HERE, HERE, peer.number());
        end.to_rts();
    }
    exchange(&c, &d);
    assert_eq!(c.qp.query().unwrap().path, "direct");
    // Only peers at other daemons need the port.
    let refusal = End::new(&second).rtr(HERE, HIGHER, THEIRS).unwrap_err().to_string();
    assert!(refusal.contains("wired.port"), "{refusal}");
    // A daemon that has lost the port in the meantime still connects, with its instance number.
    let own = Introduction { qp: a.number(), daemon: 77, ..Introduction::to(b.number(), HERE) };
    assert_eq!(rejection(&mut own.dial(port)).as_deref(), Some(OTHER_DAEMON));
    assert!(!b.has_stream());
    assert_eq!(b.client.cq.poll(&mut [Completion::default()]).unwrap(), 0);
    // The intended peer still reaches it.
    a.to_rtr(HERE, HERE, b.number());
    a.to_rts();
    a.qp.post_send(&[SendRequest::send_inline(3, b"").signaled()]).unwrap();
    a.client.completes(3, CompletionOpcode::Send);
    b.client.completes(1, CompletionOpcode::Receive);
}

#[test]
fn waiting_requests_are_evicted_by_host() {
    let port = ports::unused_port();
    let daemon = self::daemon(HERE, port, "[limits.user]\nstartups = 16\n");
    let far = self::daemon(FAR, port, "");
    let _peer = WiredPort::confirming((LOWER, port).into());
    let crowd = WiredPort::confirming((CROWD, port).into());
    // A host with one request, and a host with many for QPs that never reach RTR.
    let held = End::new(&daemon);
    let mut honest = Introduction::to(held.number(), LOWER).dial(port);
    daemon.wait_status("holding one request", |s| s.startups == 1);
    let idle = [End::new(&daemon), End::new(&daemon), End::new(&daemon)];
    let mut flood = Vec::new();
    for n in 0..60_u32 {
        let to_qp = idle[n as usize % idle.len()].number();
        flood.push(Introduction { qp: n, ..Introduction::to(to_qp, CROWD) }.dial(port));
        daemon.wait_status("asking the peer about it", |_| crowd.queries().len() > n as usize);
    }
    assert!(daemon.status().startups <= 2 * 16);
    // A QP in RTS needs no further call of its program, so its request is not held.
    link(&daemon, &far);
    if timing("links beside held requests") {
        let to_qps = idle.each_ref().map(End::number);
        let times: Vec<Duration> = std::thread::scope(|scope| {
            let (held, is_held) = mpsc::channel();
            scope.spawn(|| hold_requests(&to_qps, port, held));
            is_held.recv().unwrap();
            (0..21).map(|_| link(&daemon, &far)).collect()
        });
        let longest = times.iter().max();
        assert!(longest < Some(&Duration::from_millis(50)), "{times:?}");
    }
    held.to_rtr(HERE, LOWER, THEIRS);
    assert_eq!(rejection(&mut honest), None);
    drop(flood);
}

/// Connects to these QPs until the receiver of `held` is dropped. Keeps the last 1,024 connections
/// open and sends to `held` for each further one. At 2,000 connections per second, the kernel's
/// backlog stays empty (`limits.user.accepts_per_second` is 5,000).
fn hold_requests(to_qps: &[u32], port: u16, held: mpsc::Sender<()>) {
    rnic_tests::process::raise_descriptor_limit();
    let mut open = VecDeque::new();
    for n in 1_000.. {
        let to_qp = to_qps[n as usize % to_qps.len()];
        open.push_back(Introduction { qp: n, ..Introduction::to(to_qp, CROWD) }.dial(port));
        if open.len() > 1024 {
            open.pop_front();
            if held.send(()).is_err() {
                return;
            }
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}

/// Connects two new QPs. Returns the time from RTS to the completion of their first message.
fn link(here: &Daemon, far: &Daemon) -> Duration {
    let [a, b] = [End::new(here), End::new(far)];
    a.to_rtr(HERE, FAR, b.number());
    b.to_rtr(FAR, HERE, a.number());
    let start = Instant::now();
    a.to_rts();
    b.to_rts();
    exchange(&a, &b);
    start.elapsed()
}

#[test]
fn simultaneous_dials_become_one_connection() {
    let port = ports::unused_port();
    let daemons = [FAR, HERE].map(|address| daemon(address, port, ""));
    let pairs: Vec<_> = (0..40).map(|_| [End::new(&daemons[0]), End::new(&daemons[1])]).collect();
    for (n, [a, b]) in pairs.iter().enumerate() {
        let wire_a = || a.to_rtr(FAR, HERE, b.number());
        let wire_b = || b.to_rtr(HERE, FAR, a.number());
        if n % 2 == 0 {
            wire_a();
            wire_b();
        } else {
            wire_b();
            wire_a();
        }
        a.to_rts();
        b.to_rts();
    }
    for [a, b] in &pairs {
        exchange(a, b);
        exchange(b, a);
        assert_eq!([a, b].map(|end| end.qp.query().unwrap().state), [QpState::Rts; 2]);
    }
}
