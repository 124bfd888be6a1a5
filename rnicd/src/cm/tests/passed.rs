//! Start-up on connections passed in by clients: which bytes are read or left, and hostile clients.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use socket2::SockRef;

use super::*;
use crate::config::Seccomp;
use crate::reaper::Reaper;

/// A node with a reaper, and both ends of a connection: the client's and its peer's.
pub(super) struct Rig {
    pub(super) node: Node,
    reaper: Reaper,
    pub(super) client: TcpStream,
    pub(super) peer: TcpStream,
}

impl Rig {
    pub(super) fn new() -> Self {
        let node = Node::new(CmOptions { direct: true, ..options() });
        let waker = Poll::new().and_then(|poll| mio::Waker::new(poll.registry(), mio::Token(0)));
        let reaper =
            Reaper::start(Arc::new(waker.expect("a waker")), Seccomp::Off).expect("threads");
        let (listener, address) = raw_listener();
        let client = raw(address);
        let (peer, _) = listener.accept().expect("accept");
        peer.set_read_timeout(Some(WATCHDOG)).expect("timeout");
        Rig { node, reaper, client, peer }
    }

    /// Returns the descriptor as the daemon gets it. The client keeps its own.
    fn pass(&self) -> Socket {
        let descriptor: OwnedFd = self.client.try_clone().expect("a descriptor").into();
        Socket::passed(descriptor.into(), 0, self.reaper.clone())
    }

    pub(super) fn connect_over(&mut self) -> Result<(), Refusal> {
        let socket = self.pass();
        let AddressPair { local, peer } = examine(&socket)?;
        let params = ConnectParams {
            session: OTHER,
            qp: ACTIVE,
            peer,
            local: Some(local),
            ird: None,
            ord: None,
            private_data: b"over".to_vec(),
            peer_to_peer: true,
        };
        self.node.cm.connect_over(params, socket, self.node.now)
    }

    pub(super) fn serve_over(&mut self) {
        let socket = self.pass();
        let addresses = examine(&socket).expect("a connected TCP socket");
        let now = self.node.now;
        self.node.cm.serve_over(SESSION, LISTENER, addresses, socket, now).expect("served");
    }

    /// Checks that both ends can exchange plain bytes, in both directions and up to the FIN.
    fn goes_on_in_plain_tcp(mut self) {
        self.client.set_nonblocking(false).expect("flag");
        self.peer.set_nonblocking(false).expect("flag");
        for (from, to) in [(&self.client, &self.peer), (&self.peer, &self.client)] {
            let mut from = from;
            let mut to = to;
            from.write_all(b"plain").expect("write");
            let mut bytes = [0; 5];
            to.read_exact(&mut bytes).expect("read");
            assert_eq!(&bytes, b"plain");
        }
        drop(self.client);
        assert_eq!(self.peer.read(&mut [0; 1]).expect("read"), 0);
    }

    fn no_request(&mut self) -> String {
        match self.node.event() {
            CmEvent::NoRequest { listener: LISTENER, reason } => reason,
            other => panic!("expected NoRequest, got {other:?}"),
        }
    }

    fn in_startup(&self) -> usize {
        self.node.cm.in_startup()
    }
}

pub(super) fn request() -> Vec<u8> {
    frame(false, 0x40, 1, b"please")
}

#[test]
fn accepted_connection_keeps_bytes_after_reply() {
    let mut r = Rig::new();
    r.connect_over().expect("connect");
    assert_eq!(r.in_startup(), 1);
    let asked = read(&mut r.peer, 28, &mut r.node);
    assert_eq!((&asked[..16], &asked[24..]), (&b"MPA ID Req Frame"[..], &b"over"[..]));
    r.peer
        .write_all(&[frame(true, 0x40, 1, b"ok"), b"first FPDU".to_vec()].concat())
        .expect("write");
    let connected = r.node.connected();
    assert_eq!((connected.qp, connected.negotiated.private_data.as_slice()), (ACTIVE, &b"ok"[..]));
    assert!(connected.negotiated.leftover.is_empty());
    assert_eq!(connected.addresses.peer, r.peer.local_addr().expect("bound"));
    let mut bytes = [0; 10];
    (&connected.stream).read_exact(&mut bytes).expect("bytes left in the socket");
    assert_eq!((&bytes, r.in_startup()), (b"first FPDU", 0));
}

//= MPA-7.1.2-3b
#[test]
fn rejected_initiator_leaves_bytes_after_reply() {
    let mut r = Rig::new();
    r.connect_over().expect("connect");
    read(&mut r.peer, 28, &mut r.node);
    // The bytes arrive one at a time, except that the last byte arrives with the bytes after it.
    let reply = frame(true, 0x60, 1, b"no");
    let (last, earlier) = reply.split_last().expect("not empty");
    for byte in earlier {
        r.peer.write_all(&[*byte]).expect("write");
        r.node.turn(Duration::ZERO);
    }
    r.peer.write_all(&[&[*last], &b"behind"[..]].concat()).expect("write");
    match r.node.event() {
        CmEvent::Rejected { qp: ACTIVE, private_data } => assert_eq!(private_data, b"no"),
        other => panic!("expected Rejected, got {other:?}"),
    }
    let mut bytes = [0; 6];
    r.client.read_exact(&mut bytes).expect("bytes left in the socket");
    assert_eq!((&bytes, r.in_startup()), (b"behind", 0));
    r.goes_on_in_plain_tcp();
}

#[test]
fn passed_socket_has_no_revision_1_retry() {
    let mut r = Rig::new();
    r.connect_over().expect("connect");
    read(&mut r.peer, 28, &mut r.node);
    r.peer.shutdown(Shutdown::Write).expect("shutdown");
    assert!(r.node.unreachable().contains("without an MPA reply"));
    assert_eq!(closed(&mut r.peer, &mut r.node), b"");
    assert_eq!(r.in_startup(), 0);
}

//= MPA-7.1-7
#[test]
fn bytes_after_a_request_are_too_early() {
    let mut r = Rig::new();
    r.serve_over();
    assert_eq!((r.in_startup(), r.node.row().backlog), (1, 1));
    r.peer.write_all(&request()).expect("write");
    let asked = r.node.request();
    assert_eq!(asked.private_data, b"please");
    r.node.accept(asked.id, b"welcome").expect("accept");
    let connected = r.node.connected();
    assert_eq!(connected.qp, PASSIVE);
    assert_eq!(&read(&mut r.peer, 27, &mut r.node)[20..], b"welcome");
    assert_eq!((r.in_startup(), r.node.row().accepted), (0, 1));
    let now = r.node.now;
    r.node.cm.close_listener(LISTENER, now).expect("close");

    let mut r = Rig::new();
    r.serve_over();
    r.peer.write_all(&[request(), b"early".to_vec()].concat()).expect("write");
    assert!(r.no_request().contains("before it had the MPA reply"));
    closed(&mut r.peer, &mut r.node);
    assert_eq!(r.in_startup(), 0);
}

//= MPA-7.1.2-2d
#[test]
fn rejected_request_returns_the_connection() {
    let mut r = Rig::new();
    r.serve_over();
    r.peer.write_all(&request()).expect("write");
    let asked = r.node.request();
    let now = r.node.now;
    assert_eq!(r.node.cm.reject(asked.id, b"no", now), Ok(Rejection::Done));
    let reply = read(&mut r.peer, 22, &mut r.node);
    assert_eq!((reply[16] & 0x20, &reply[20..]), (0x20, &b"no"[..]));
    r.node.cm.close_listener(LISTENER, now).expect("close");
    assert_eq!(r.in_startup(), 0);
    r.goes_on_in_plain_tcp();
}

/// SO_LINGER time of a client's socket.
const LINGER: Duration = Duration::from_secs(900);

/// Fills all buffers between the client and its peer. Returns the number of bytes.
fn fill(client: &TcpStream, peer: &TcpStream) -> usize {
    SockRef::from(client).set_send_buffer_size(4096).expect("size");
    SockRef::from(peer).set_recv_buffer_size(4096).expect("size");
    let mut sent = 0;
    client.set_nonblocking(true).expect("flag");
    let mut last = Instant::now();
    // The kernel may still free buffer space after the first call fails.
    while last.elapsed() < Duration::from_millis(50) {
        for len in [4096, 1] {
            while let Ok(n) = (&mut &*client).write(&vec![0; len]) {
                sent += n;
                last = Instant::now();
            }
        }
    }
    sent
}

#[test]
fn rejection_without_room_delays_the_client() {
    let mut r = Rig::new();
    r.serve_over();
    let sent = fill(&r.client, &r.peer);
    r.peer.write_all(&request()).expect("write");
    let asked = r.node.request();
    let now = r.node.now;
    assert_eq!(r.node.cm.reject(asked.id, b"", now), Ok(Rejection::Sending));
    assert_eq!(r.in_startup(), 1);
    read(&mut r.peer, sent, &mut r.node);
    assert!(matches!(r.node.event(), CmEvent::Returned { session: SESSION }));
    assert_eq!(read(&mut r.peer, 20, &mut r.node)[16] & 0x20, 0x20);
    assert_eq!(r.in_startup(), 0);
    r.goes_on_in_plain_tcp();
}

#[test]
fn rejection_without_room_has_a_deadline() {
    let mut r = Rig::new();
    r.serve_over();
    fill(&r.client, &r.peer);
    r.peer.write_all(&request()).expect("write");
    let asked = r.node.request();
    let now = r.node.now;
    assert_eq!(r.node.cm.reject(asked.id, b"", now), Ok(Rejection::Sending));
    r.node.pass(Duration::from_secs(10));
    assert!(matches!(r.node.event(), CmEvent::Returned { session: SESSION }));
    assert_eq!((r.in_startup(), r.node.cm.next_timeout()), (0, None));
    // No event once the session of the waiting client has ended.
    let mut r = Rig::new();
    r.serve_over();
    fill(&r.client, &r.peer);
    r.peer.write_all(&request()).expect("write");
    let asked = r.node.request();
    let now = r.node.now;
    assert_eq!(r.node.cm.reject(asked.id, b"", now), Ok(Rejection::Sending));
    r.node.cm.drop_session(SESSION, now);
    assert!(r.node.cm.poll_event().is_none());
    assert_eq!((r.in_startup(), r.node.cm.next_timeout()), (0, None));
}

//= MPA-7.1.1-2
//= MPA-7.1.1-16
#[test]
fn every_missing_request_is_reported() {
    // No byte at all.
    let mut r = Rig::new();
    r.serve_over();
    r.node.pass(options().request_deadline);
    assert!(r.no_request().contains("deadline"));
    assert_eq!(closed(&mut r.peer, &mut r.node), b"");
    // Not MPA.
    let mut r = Rig::new();
    r.serve_over();
    r.peer.write_all(b"HTTP/1.1 200 OK and so on").expect("write");
    assert!(r.no_request().contains("not an MPA"));
    // A revision that is rejected with a frame.
    let mut r = Rig::new();
    r.serve_over();
    r.peer.write_all(&frame(false, 0xC0, 0, &[])).expect("write");
    assert!(r.no_request().contains("revision 0"));
    assert_eq!(read(&mut r.peer, 20, &mut r.node)[17], 1);
    // A newer connection evicts the older one: the limit is 1.
    let mut r = Rig::new();
    r.node = Node::new(CmOptions { startups: 1, ..options() });
    r.serve_over();
    let id = ListenerId(11);
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let address = r.node.cm.bind(SESSION, id, any.into()).expect("bind");
    r.node.cm.listen(id, 1).expect("listen");
    let _newer = raw(address);
    assert!(r.no_request().contains("limits.startups"));
    closed(&mut r.peer, &mut r.node);
}

#[test]
fn other_sockets_are_refused_with_a_reason() {
    use std::os::unix::net::UnixStream;
    let why = |socket: &dyn AsFd| match examine(socket.as_fd()) {
        Err(Refusal::Invalid { field, why }) if field == "socket" => why,
        other => panic!("{other:?}"),
    };
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
    assert_eq!(why(&udp), "it is not a stream socket");
    assert_eq!(why(&UnixStream::pair().expect("a pair").0), "it is not an IPv4 or IPv6 socket");
    assert_eq!(why(&raw_listener().0), "it is a listening socket");
    let fresh = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::STREAM, None);
    assert_eq!(why(&fresh.expect("a socket")), "it is not connected");
    // A reset connection.
    let r = Rig::new();
    SockRef::from(&r.peer).set_linger(Some(Duration::ZERO)).expect("linger");
    drop(r.peer);
    let begun = Instant::now();
    while examine(&r.client).is_ok() {
        assert!(begun.elapsed() < WATCHDOG);
        std::thread::yield_now();
    }
    assert_eq!(why(&r.client), "it is not connected");
}

#[test]
fn passed_socket_adds_no_listening_address() {
    let mut r = Rig::new();
    r.serve_over();
    let listen = r.node.cm.listen(LISTENER, 4);
    assert!(matches!(listen, Err(Refusal::WrongState { .. })), "{listen:?}");
    // A connect to its address does not reach it either.
    let address = r.client.local_addr().expect("bound");
    r.node.connect(ACTIVE, address, &[]);
    assert!(matches!(r.node.event(), CmEvent::Unreachable { qp: ACTIVE, .. }));
    // Dropped unused, so the socket is unchanged.
    let r = Rig::new();
    drop(r.pass());
    r.goes_on_in_plain_tcp();
}

#[test]
fn client_socket_flags_do_not_block_the_daemon() {
    let mut r = Rig::new();
    r.serve_over();
    r.client.set_nonblocking(false).expect("flag");
    let client = SockRef::from(&r.client);
    client.set_linger(Some(LINGER)).expect("linger");
    client.set_recv_buffer_size(4096).expect("size");
    let begun = Instant::now();
    r.peer.write_all(&request()[..21]).expect("write");
    r.node.turn(Duration::from_millis(20));
    // The send buffer is full, so a close with SO_LINGER would wait.
    fill(&r.client, &r.peer);
    r.client.set_nonblocking(false).expect("flag");
    let Rig { mut node, client, peer, .. } = r;
    drop(client);
    let now = node.now;
    node.cm.drop_session(SESSION, now);
    assert_eq!(node.cm.in_startup(), 0);
    assert!(begun.elapsed() < WATCHDOG);
    drop(peer);
}
