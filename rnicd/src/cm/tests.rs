//! Connections between two managers in one process, and with hand-written peers.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use mio::{Events, Poll};
use rnic_abi::types::AddressPair;
use rnic_core::stream::startup::{Negotiated, Options, Role, RtrKinds};

use super::*;
use crate::config::Tcp;
use crate::socket::Socket;

mod ask_back;
mod connection;
mod frames;
mod keepalive;
mod passed;
mod sidr;
mod startups;

const SESSION: SessionId = SessionId(1);
const OTHER: SessionId = SessionId(2);
const LISTENER: ListenerId = ListenerId(10);
const ACTIVE: QpId = QpId(100);
const PASSIVE: QpId = QpId(200);
const START: Time = Time(1_000_000_000);
/// Real time after which a test counts as stuck.
const WATCHDOG: Duration = Duration::from_secs(180);

fn options() -> CmOptions {
    CmOptions {
        startup: Options {
            revision: 2,
            crc: true,
            markers: false,
            rdmac: false,
            peer_to_peer: true,
            ird: 16,
            ord: 8,
            rtr: RtrKinds::all(),
        },
        max_ird: 32,
        max_ord: 32,
        ports: Default::default(),
        tcp: Tcp::default(),
        direct: false,
        startups: 5000,
        startups_key: "limits.startups".into(),
        buffers: SocketBuffers { send: 512 << 10, receive: 1 << 20 },
        peer_connections_per_second: 1_000_000,
        stag_guesses_per_minute: 3,
        connect_deadline: Duration::from_secs(1),
        reply_deadline: Duration::from_secs(2),
        request_deadline: Duration::from_secs(3),
        decision_deadline: Duration::from_secs(4),
        close_deadline: Duration::from_secs(5),
    }
}

/// A connection manager with its poll and a clock that the test advances.
struct Node {
    cm: ConnectionManager,
    poll: Poll,
    now: Time,
}

impl Node {
    fn new(options: CmOptions) -> Self {
        let poll = Poll::new().expect("epoll");
        let registry = poll.registry().try_clone().expect("epoll");
        Node { cm: ConnectionManager::new(registry, 7, options), poll, now: START }
    }

    fn direct() -> Self {
        Node::new(CmOptions { direct: true, ..options() })
    }

    /// Listens on a port that the kernel chooses.
    fn listen(&mut self, ip: &str, backlog: u32) -> SocketAddr {
        let address = SocketAddr::new(ip.parse().expect("an address"), 0);
        let bound = self.cm.bind(SESSION, LISTENER, address.into()).expect("bind");
        self.cm.listen(LISTENER, backlog).expect("listen");
        bound
    }

    fn connect(&mut self, qp: QpId, peer: SocketAddr, private_data: &[u8]) {
        self.start(qp, peer, None, private_data);
    }

    /// Connects from a local address.
    fn connect_from(&mut self, qp: QpId, peer: SocketAddr, local: SocketAddr) {
        self.start(qp, peer, Some(local), &[]);
    }

    fn start(
        &mut self,
        qp: QpId,
        peer: SocketAddr,
        local: Option<SocketAddr>,
        private_data: &[u8],
    ) {
        let params = ConnectParams {
            session: OTHER,
            qp,
            peer,
            local,
            ird: None,
            ord: None,
            private_data: private_data.to_vec(),
            peer_to_peer: true,
        };
        self.cm.connect(params, self.now).expect("connect");
    }

    fn accept(&mut self, request: RequestId, private_data: &[u8]) -> Result<(), Refusal> {
        let private_data = private_data.to_vec();
        let params = AcceptParams { request, qp: PASSIVE, ird: None, ord: None, private_data };
        self.cm.accept(params, self.now)
    }

    /// Handles readiness, after a wait of up to `wait`.
    fn turn(&mut self, wait: Duration) {
        let mut events = Events::with_capacity(256);
        self.poll.poll(&mut events, Some(wait)).expect("epoll");
        for e in &events {
            assert!(self.cm.handle_ready(e.token(), e.is_readable(), e.is_writable(), self.now));
        }
        if self.cm.next_timeout().is_some_and(|at| at <= Time(self.now.0 + 1)) {
            self.cm.handle_timeout(Time(self.now.0 + 1));
        }
    }

    /// Runs until there is an event.
    fn event(&mut self) -> CmEvent {
        let begun = Instant::now();
        loop {
            match self.cm.poll_event() {
                // This event may precede any result.
                Some(CmEvent::Reached { .. }) => continue,
                Some(event) => return event,
                None => {}
            }
            assert!(begun.elapsed() < WATCHDOG, "no event");
            self.turn(Duration::from_millis(5));
        }
    }

    /// Runs until `done`.
    fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let begun = Instant::now();
        while !done(self) {
            assert!(begun.elapsed() < WATCHDOG, "the condition did not become true");
            self.turn(Duration::from_millis(5));
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now.after(time);
        self.cm.handle_timeout(self.now);
    }

    fn request(&mut self) -> Request {
        match self.event() {
            CmEvent::Request {
                request,
                addresses,
                peer_ird,
                peer_ord,
                revision,
                peer_to_peer,
                private_data,
                ..
            } => Request {
                id: request,
                addresses,
                reads: (peer_ird, peer_ord),
                revision,
                peer_to_peer,
                private_data,
            },
            other => panic!("expected a request, got {other:?}"),
        }
    }

    fn connected(&mut self) -> Connected {
        match self.event() {
            CmEvent::ConnectedTcp { qp, stream, negotiated, addresses } => {
                let stream = stream.as_fd().try_clone_to_owned().expect("a descriptor").into();
                Connected { qp, stream, negotiated: *negotiated, addresses }
            }
            other => panic!("expected a connection, got {other:?}"),
        }
    }

    fn unreachable(&mut self) -> String {
        self.no_connection().reason
    }

    fn no_connection(&mut self) -> ConnectFailure {
        match self.event() {
            CmEvent::Unreachable { qp: ACTIVE, why } => why,
            other => panic!("expected Unreachable, got {other:?}"),
        }
    }

    fn withdrawn(&mut self, request: RequestId) -> String {
        match self.event() {
            CmEvent::Withdrawn { listener: LISTENER, request: r, reason } if r == request => reason,
            other => panic!("expected Withdrawn, got {other:?}"),
        }
    }

    fn row(&self) -> ListenerRow {
        self.cm.listener(LISTENER).expect("the listener exists")
    }
}

struct Request {
    id: RequestId,
    addresses: AddressPair,
    reads: (Option<u16>, Option<u16>),
    revision: u8,
    peer_to_peer: bool,
    private_data: Vec<u8>,
}

struct Connected {
    qp: QpId,
    stream: TcpStream,
    negotiated: Negotiated,
    addresses: AddressPair,
}

/// A hand-written start-up frame (RFC 5044 section 7.1.1).
fn frame(reply: bool, flags: u8, revision: u8, private_data: &[u8]) -> Vec<u8> {
    let mut f = if reply { *b"MPA ID Rep Frame" } else { *b"MPA ID Req Frame" }.to_vec();
    f.extend([flags, revision]);
    f.extend((private_data.len() as u16).to_be_bytes());
    f.extend(private_data);
    f
}

fn raw(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(WATCHDOG)).expect("timeout");
    stream
}

fn raw_listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let address = listener.local_addr().expect("bound");
    (listener, address)
}

/// Accepts the next connection while the node runs.
fn take(listener: &TcpListener, node: &mut Node) -> TcpStream {
    listener.set_nonblocking(true).expect("flag");
    let mut taken = None;
    node.until(|_| {
        taken = listener.accept().ok();
        taken.is_some()
    });
    let (stream, _) = taken.expect("just taken");
    stream.set_nonblocking(true).expect("flag");
    stream
}

/// Reads exactly `bytes` bytes while the node runs.
fn read(stream: &mut TcpStream, bytes: usize, node: &mut Node) -> Vec<u8> {
    stream.set_nonblocking(true).expect("flag");
    let mut all = Vec::new();
    node.until(|_| {
        let mut buffer = vec![0; bytes - all.len()];
        if let Ok(n) = stream.read(&mut buffer) {
            assert_ne!(n, 0, "closed after {} bytes", all.len());
            all.extend(&buffer[..n]);
        }
        all.len() == bytes
    });
    all
}

/// Waits until the node has closed the connection, gracefully or with a reset. Returns the bytes
/// before that.
fn closed(stream: &mut TcpStream, node: &mut Node) -> Vec<u8> {
    stream.set_nonblocking(true).expect("flag");
    let mut all = Vec::new();
    node.until(|_| {
        let mut buffer = [0; 1024];
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(n) => all.extend(&buffer[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return false,
                Err(_) => return true,
            }
        }
    });
    all
}

#[test]
fn two_ends_connect_over_tcp() {
    let mut a = Node::new(options());
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 1);
    a.connect(ACTIVE, address, b"hello");
    a.turn(Duration::from_millis(100));
    let request = b.request();
    assert_eq!(request.private_data, b"hello");
    assert_eq!(request.reads, (Some(16), Some(8)));
    assert!(request.peer_to_peer);
    assert_eq!(b.row().pending, 1);
    b.accept(request.id, b"welcome").expect("accept");
    let passive = b.connected();
    let active = a.connected();
    assert_eq!((active.qp, passive.qp), (ACTIVE, PASSIVE));
    assert_eq!(active.negotiated.private_data, b"welcome");
    assert_eq!((active.negotiated.ird, active.negotiated.ord), (8, 8));
    assert_eq!((passive.negotiated.ird, passive.negotiated.ord), (16, 8));
    assert_eq!(active.addresses.local, passive.addresses.peer);
    assert_eq!(active.addresses.peer, passive.addresses.local);
    assert_eq!(passive.addresses, request.addresses);
    assert_eq!((b.row().pending, b.row().accepted), (0, 1));
    assert_eq!((a.cm.in_startup(), b.cm.in_startup()), (0, 0));
    assert_eq!((a.cm.next_timeout(), b.cm.next_timeout()), (None, None));
    // The test owns the streams now, and they carry bytes.
    (&active.stream).write_all(b"x").expect("write");
    assert_eq!(read(&mut { passive.stream }, 1, &mut b), b"x");
}

#[test]
fn direct_path_negotiates_like_tcp() {
    let mut a = Node::new(options());
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 1);
    a.connect(ACTIVE, address, b"hello");
    a.turn(Duration::from_millis(100));
    let request = b.request();
    b.accept(request.id, b"welcome").expect("accept");
    let tcp_passive = b.connected();
    let tcp_active = a.connected();

    let mut d = Node::direct();
    let address = d.listen("127.0.0.1", 1);
    d.connect(ACTIVE, address, b"hello");
    let request = d.request();
    assert_eq!(request.private_data, b"hello");
    assert_eq!(request.addresses.local, address);
    d.accept(request.id, b"welcome").expect("accept");
    let CmEvent::ConnectedDirect { active, passive } = d.event() else { panic!("not direct") };
    assert_eq!(active.negotiated, tcp_active.negotiated);
    assert_eq!(passive.negotiated, tcp_passive.negotiated);
    assert_eq!((active.qp, passive.qp), (ACTIVE, PASSIVE));
    assert_eq!(active.addresses.local, passive.addresses.peer);
    assert_eq!(passive.addresses, request.addresses);
    assert!(matches!(active.negotiated.role, Role::Initiator { rtr: Some(_) }));
    assert_eq!(d.cm.in_startup(), 0);
}

#[test]
fn direct_path_needs_a_local_listener() {
    let mut d = Node::direct();
    let address = d.listen("127.0.0.1", 1);
    // Another address of this host, to which this listener is not bound.
    d.connect(ACTIVE, SocketAddr::from(([127, 0, 0, 2], address.port())), &[]);
    assert!(d.unreachable().contains("refused"));

    // A wildcard takes all addresses.
    let mut w = Node::direct();
    let port = w.listen("0.0.0.0", 2).port();
    w.connect(ACTIVE, SocketAddr::from(([127, 0, 0, 2], port)), &[]);
    let request = w.request();
    assert_eq!(request.addresses.local, SocketAddr::from(([127, 0, 0, 2], port)));
    w.accept(request.id, &[]).expect("accept");
    assert!(matches!(w.event(), CmEvent::ConnectedDirect { .. }));

    // A bound address that does not listen takes no connections.
    let mut b = Node::direct();
    let bound =
        b.cm.bind(SESSION, LISTENER, SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("bind");
    b.connect(ACTIVE, bound, &[]);
    assert!(b.unreachable().contains("refused"));
}

#[test]
fn rejection_has_private_data_on_both_paths() {
    let mut a = Node::new(options());
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 1);
    a.connect(ACTIVE, address, &[]);
    a.turn(Duration::from_millis(100));
    let request = b.request().id;
    let now = b.now;
    b.cm.reject(request, b"no", now).expect("reject");
    assert!(b.cm.reject(request, b"no", now).is_err());
    match a.event() {
        CmEvent::Rejected { qp: ACTIVE, private_data } => assert_eq!(private_data, b"no"),
        other => panic!("{other:?}"),
    }
    b.until(|b| b.cm.in_startup() == 0);
    assert_eq!((b.row().pending, b.row().rejected), (0, 1));

    let mut d = Node::direct();
    let address = d.listen("127.0.0.1", 1);
    d.connect(ACTIVE, address, &[]);
    let request = d.request().id;
    let too_long = d.cm.reject(request, &[0; 509], now);
    assert!(matches!(too_long, Err(Refusal::AboveMaximum { limit: 508, .. })), "{too_long:?}");
    d.cm.reject(request, b"no", now).expect("still undecided");
    assert!(matches!(d.event(), CmEvent::Rejected { private_data, .. } if private_data == b"no"));
}

#[test]
fn requests_beyond_the_backlog_are_rejected() {
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 2);
    let mut peers: Vec<_> = (0..2).map(|_| raw(address)).collect();
    let mut requests = Vec::new();
    for peer in &mut peers {
        peer.write_all(&frame(false, 0x40, 1, &[])).expect("write");
        requests.push(b.request().id);
    }
    let mut third = raw(address);
    third.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let reply = read(&mut third, 20, &mut b);
    assert_eq!(reply[16] & 0x20, 0x20);
    assert!(b.cm.poll_event().is_none());
    assert_eq!((b.row().pending, b.row().rejected), (2, 1));
    // A decision makes room in the backlog.
    b.accept(requests[0], &[]).expect("accept");
    b.connected();
    let mut fourth = raw(address);
    fourth.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    b.request();

    let mut d = Node::direct();
    let address = d.listen("127.0.0.1", 1);
    d.connect(ACTIVE, address, &[]);
    d.request();
    d.connect(QpId(101), address, &[]);
    assert!(matches!(d.event(), CmEvent::Rejected { qp: QpId(101), .. }));
}

//= MPA-7.1.2-8a
//= MPA-7.1.2-10
#[test]
fn every_phase_has_a_deadline() {
    let tick = Duration::from_nanos(1);
    // A peer that sends no request.
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 1);
    let mut silent = raw(address);
    b.until(|b| b.cm.in_startup() == 1);
    b.pass(options().request_deadline - tick);
    assert_eq!(b.cm.in_startup(), 1);
    b.pass(tick);
    assert_eq!(b.cm.in_startup(), 0);
    assert_eq!(closed(&mut silent, &mut b), b"");
    // An application that does not decide.
    let mut peer = raw(address);
    peer.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = b.request().id;
    b.pass(options().decision_deadline);
    assert!(b.withdrawn(request).contains("deadline"));
    assert_eq!((b.row().pending, b.cm.in_startup()), (0, 0));
    // A peer that does not close after a rejection.
    let mut peer = raw(address);
    peer.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = b.request().id;
    let now = b.now;
    b.cm.reject(request, &[], now).expect("reject");
    assert_eq!(b.cm.in_startup(), 1);
    b.pass(options().close_deadline);
    assert_eq!(b.cm.in_startup(), 0);
    // A peer that does not reply.
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    a.connect(ACTIVE, address, &[]);
    let _silent = take(&listener, &mut a);
    a.until(|a| a.cm.next_timeout() == Some(START.after(options().reply_deadline)));
    a.pass(options().reply_deadline);
    assert!(a.unreachable().contains("reply"));
    // A TCP connection that is never established.
    a.connect(ACTIVE, address, &[]);
    a.pass(options().connect_deadline);
    assert!(a.unreachable().contains("TCP"));
    // The direct path: the shorter of the reply and decision deadlines.
    let mut d = Node::direct();
    let address = d.listen("127.0.0.1", 1);
    d.connect(ACTIVE, address, &[]);
    let request = d.request().id;
    d.pass(options().reply_deadline);
    assert!(d.withdrawn(request).contains("deadline"));
    d.unreachable();
    assert_eq!((d.row().pending, d.cm.in_startup()), (0, 0));
}

#[test]
fn a_thousand_silent_connections_expire_together() {
    raise_descriptor_limit();
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 1);
    let mut silent = Vec::new();
    for n in 1..=1000 {
        silent.push(raw(address));
        if n % 100 == 0 {
            b.until(|b| b.cm.in_startup() == n);
        }
    }
    // Other connections still get through.
    let mut peer = raw(address);
    peer.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = b.request().id;
    b.accept(request, &[]).expect("accept");
    b.connected();
    // Some were accepted a nanosecond later, after other listeners had run.
    b.pass(options().request_deadline + Duration::from_nanos(1));
    assert_eq!((b.cm.in_startup(), b.cm.next_timeout()), (0, None));
}

#[test]
fn oldest_silent_connection_is_evicted() {
    let mut b = Node::new(CmOptions { startups: 10, ..options() });
    let address = b.listen("127.0.0.1", 1);
    let mut silent = Vec::new();
    for n in 1..=10 {
        silent.push(raw(address));
        b.until(|b| b.cm.in_startup() == n);
    }
    let mut eleventh = raw(address);
    closed(&mut silent[0], &mut b);
    assert_eq!(b.cm.in_startup(), 10);
    eleventh.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    b.request();
    assert_eq!(b.cm.in_startup(), 10);
}

#[test]
fn closed_listener_rejects_undecided_requests() {
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 1);
    let mut decided_never = raw(address);
    decided_never.write_all(&frame(false, 0x40, 1, &[])).expect("write");
    let request = b.request().id;
    let mut silent = raw(address);
    b.until(|b| b.cm.in_startup() == 2);
    let now = b.now;
    b.cm.close_listener(LISTENER, now).expect("close");
    assert_eq!(read(&mut decided_never, 20, &mut b)[16] & 0x20, 0x20);
    assert_eq!(closed(&mut silent, &mut b), b"");
    assert!(matches!(b.accept(request, &[]), Err(Refusal::NoSuchObject { .. })));
    assert!(matches!(b.cm.listen(LISTENER, 1), Err(Refusal::NoSuchObject { .. })));
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn session_end_closes_listeners_and_connects() {
    let mut d = Node::direct();
    let address = d.listen("127.0.0.1", 2);
    d.connect(ACTIVE, address, &[]);
    let request = d.request().id;
    let now = d.now;
    d.cm.drop_session(OTHER, now);
    assert!(d.withdrawn(request).contains("initiator"));
    d.connect(ACTIVE, address, &[]);
    d.request();
    d.cm.drop_session(SESSION, now);
    assert!(matches!(d.event(), CmEvent::Rejected { qp: ACTIVE, .. }));
    assert!(d.cm.listener(LISTENER).is_none());
    assert_eq!((d.cm.in_startup(), d.cm.next_timeout()), (0, None));
}

#[test]
fn cancelled_connect_sends_no_event() {
    let mut a = Node::new(options());
    let (listener, address) = raw_listener();
    a.connect(ACTIVE, address, &[]);
    let mut peer = take(&listener, &mut a);
    let again = ConnectParams {
        session: OTHER,
        qp: ACTIVE,
        peer: address,
        local: None,
        ird: None,
        ord: None,
        private_data: Vec::new(),
        peer_to_peer: true,
    };
    let now = a.now;
    assert!(matches!(a.cm.connect(again, now), Err(Refusal::WrongState { .. })));
    a.cm.cancel(ACTIVE);
    closed(&mut peer, &mut a);
    assert!(a.cm.poll_event().is_none());
    assert_eq!(a.cm.in_startup(), 0);
}

#[test]
fn an_address_is_bound_once() {
    let mut b = Node::new(options());
    let address = b.listen("127.0.0.1", 1);
    let again = b.cm.bind(SESSION, ListenerId(11), address.into());
    assert!(matches!(again, Err(Refusal::InUse { .. })), "{again:?}");
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
    assert!(b.cm.bind(SESSION, ListenerId(11), any.into()).is_err());
    let foreign = b.cm.bind(SESSION, ListenerId(11), SocketAddr::from(([192, 0, 2, 1], 0)).into());
    assert!(matches!(foreign, Err(Refusal::System { .. })), "{foreign:?}");
    assert!(matches!(b.cm.listen(LISTENER, 0), Err(Refusal::Invalid { .. })));
}

fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("within the maximum");
}
