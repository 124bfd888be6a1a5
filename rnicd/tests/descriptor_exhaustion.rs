//! Connection management without free descriptors. Alone in its process, because it lowers
//! `RLIMIT_NOFILE`.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use mio::{Events, Poll};
use rnic_abi::types::{ListenerId, SessionId, Time};
use rnic_core::stream::startup::{Options, RtrKinds};
use rnicd::cm::{CmEvent, CmOptions, ConnectionManager, SocketBuffers};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const NOW: Time = Time(1_000_000_000);
const WATCHDOG: Duration = Duration::from_secs(180);
const LISTENER: ListenerId = ListenerId(1);
/// Descriptors left for accepted connections.
const LEFT: usize = 10;
const PEERS: usize = 40;

fn options() -> CmOptions {
    let minute = Duration::from_secs(60);
    CmOptions {
        startup: Options {
            revision: 2,
            crc: true,
            markers: false,
            rdmac: false,
            peer_to_peer: true,
            ird: 16,
            ord: 16,
            rtr: RtrKinds::all(),
        },
        max_ird: 16,
        max_ord: 16,
        ports: Default::default(),
        tcp: Default::default(),
        direct: false,
        startups: 1000,
        startups_key: "limits.startups".into(),
        buffers: SocketBuffers { send: 512 << 10, receive: 1 << 20 },
        peer_connections_per_second: 1_000_000,
        stag_guesses_per_minute: 1000,
        connect_deadline: minute,
        reply_deadline: minute,
        request_deadline: minute,
        decision_deadline: minute,
        close_deadline: minute,
    }
}

struct Node {
    poll: Poll,
    cm: ConnectionManager,
    requests: usize,
}

impl Node {
    fn turn(&mut self) {
        let mut events = Events::with_capacity(64);
        self.poll.poll(&mut events, Some(Duration::from_millis(5))).expect("epoll");
        for e in &events {
            self.cm.handle_ready(e.token(), e.is_readable(), e.is_writable(), NOW);
        }
        // A listener that has exhausted its share continues a nanosecond later.
        let next = Time(NOW.0 + 1);
        if self.cm.next_timeout().is_some_and(|at| at <= next) {
            self.cm.handle_timeout(next);
        }
        while let Some(event) = self.cm.poll_event() {
            assert!(matches!(event, CmEvent::Request { .. }), "{event:?}");
            self.requests += 1;
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let begun = Instant::now();
        while !done(self) {
            assert!(begun.elapsed() < WATCHDOG, "never: {what}");
            self.turn();
        }
    }
}

fn peer(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the kernel has room");
    stream.set_nonblocking(true).expect("flag");
    stream
}

/// Returns true if the daemon has ended the connection.
fn is_over(mut stream: &TcpStream) -> bool {
    match stream.read(&mut [0; 64]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != std::io::ErrorKind::WouldBlock,
    }
}

fn set_limit(current: u64) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum }).expect("below maximum");
}

/// Leaves room for `count` more descriptors. The kernel compares descriptor numbers with the limit
/// and uses the lowest free one, so gaps count, and inherited descriptors above the limit do not.
fn leave_descriptors(count: usize) {
    let is_free = |fd: &u64| !std::fs::exists(format!("/proc/self/fd/{fd}")).expect("proc");
    set_limit((0..).filter(is_free).nth(count).expect("endless"));
}

/// Returns a raw request: MPA revision 1 with CRC.
fn request() -> Vec<u8> {
    let mut frame = b"MPA ID Req Frame".to_vec();
    frame.extend([0x40, 1, 0, 0]);
    frame
}

#[test]
fn oldest_silent_connections_are_evicted() {
    let before = getrlimit(Resource::Nofile).current.expect("a soft limit");
    let poll = Poll::new().expect("epoll");
    let registry = poll.registry().try_clone().expect("epoll");
    let mut node = Node { poll, cm: ConnectionManager::new(registry, 0, options()), requests: 0 };
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    let address = node.cm.bind(SessionId(1), LISTENER, any_port.into()).expect("bind");
    node.cm.listen(LISTENER, 1000).expect("listen");

    // Silent connections: the oldest are ended, the newest stay.
    let silent: Vec<_> = (0..PEERS).map(|_| peer(address)).collect();
    leave_descriptors(LEFT);
    // An old connection is ended before a new one is accepted, which may happen in a later turn.
    // With all descriptors in use, an empty listen queue evicts nothing.
    node.until("the oldest are over and the newest are in", |n| {
        silent[..PEERS - LEFT].iter().all(is_over) && n.cm.startups() == LEFT
    });
    assert!(!silent[PEERS - LEFT..].iter().any(is_over));

    // Undecided requests stay, and new connections are refused instead.
    for mut stream in &silent[PEERS - LEFT..] {
        stream.write_all(&request()).expect("write");
    }
    node.until("all are requests", |n| n.requests == LEFT);
    set_limit(before);
    let late: Vec<_> = (0..PEERS).map(|_| peer(address)).collect();
    // Opened before the limit is lowered, which leaves no descriptor for an accept.
    leave_descriptors(0);
    node.until("all are turned away", |_| late.iter().all(is_over));
    assert_eq!(node.cm.startups(), LEFT);
    assert!(!silent[PEERS - LEFT..].iter().any(is_over));

    // With free descriptors, new connections are accepted again.
    set_limit(before);
    let mut last = peer(address);
    last.write_all(&request()).expect("write");
    node.until("one more request", |n| n.requests == LEFT + 1);
}
