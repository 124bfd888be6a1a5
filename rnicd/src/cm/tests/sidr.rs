//! SIDR in one daemon, between two, and with hosts that forge messages.

use std::net::IpAddr;
use std::sync::Arc;

use rnic_abi::roce::mad::{self, Exchange};
use rnic_abi::roce::sidr::{self, Message, Reply, Status};
use rnic_abi::roce::{PortSpace, ServiceId};
use rnic_abi::types::Gid;
use rnic_core::engine::DatagramPort;

use super::*;

pub(super) const A: &str = "192.0.2.1";
pub(super) const B: &str = "192.0.2.2";
pub(super) const PORT: u16 = 7471;
const Q_KEY: u32 = 0x0123_4567;

pub(super) type Mad = (IpAddr, IpAddr, Box<mad::Bytes>);

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

impl Node {
    /// A node with this address.
    pub(super) fn at(address: &str, options: CmOptions) -> Self {
        let mut node = Node::new(options);
        node.set_addresses(&["192.0.2.77", address], true, false);
        node
    }

    /// Replaces the addresses of the device.
    pub(super) fn set_addresses(&mut self, addresses: &[&str], direct: bool, loopback: bool) {
        let gids = addresses.iter().map(|address| Gid::from(ip(address))).collect();
        let port = DatagramPort { gids, mtu: 1024, udp: 4791, direct, ..DatagramPort::default() };
        self.cm.set_datagram_port(&Arc::new(port), loopback, self.now);
    }

    /// A node with the addresses of this host, including loopback.
    pub(super) fn with_loopback(direct: bool) -> Self {
        let mut node = Node::new(options());
        node.set_addresses(&[A, "127.0.0.1"], direct, true);
        node
    }

    fn serve(&mut self, address: &str, backlog: u32) {
        let address = SocketAddr::new(ip(address), PORT);
        let bound = self.cm.bind_service(SESSION, LISTENER, PortSpace::Udp, address.into());
        assert_eq!(bound.expect("bind"), address);
        self.cm.listen(LISTENER, backlog).expect("listen");
    }

    fn ask(&mut self, from: &str, to: &str, private_data: &[u8]) {
        let params = ConnectParams {
            session: OTHER,
            qp: ACTIVE,
            peer: SocketAddr::new(ip(to), PORT),
            local: Some(SocketAddr::new(ip(from), 0)),
            ird: None,
            ord: None,
            private_data: private_data.to_vec(),
            peer_to_peer: false,
        };
        self.cm.resolve(params, self.now).expect("asked");
    }

    /// Returns the next message that the node sends.
    pub(super) fn mad(&mut self) -> Mad {
        match self.cm.poll_event() {
            Some(CmEvent::Management { from, to, mad }) => (from, to, mad),
            other => panic!("expected a message, got {other:?}"),
        }
    }

    pub(super) fn take(&mut self, (from, to, mad): &Mad) {
        self.cm.handle_management(*from, *to, mad, self.now);
    }

    pub(super) fn is_silent(&mut self) {
        let event = self.cm.poll_event();
        assert!(event.is_none(), "{event:?}");
    }

    fn resolved(&mut self) -> (AddressPair, u16, QpId, u32, Vec<u8>) {
        match self.cm.poll_event() {
            Some(CmEvent::Resolved { qp, addresses, source, remote_qp, q_key, private_data }) => {
                assert_eq!(qp, ACTIVE);
                (addresses, source, remote_qp, q_key, private_data)
            }
            other => panic!("expected Resolved, got {other:?}"),
        }
    }

    fn errno(&mut self) -> i32 {
        match self.cm.poll_event() {
            Some(CmEvent::Unreachable { qp: ACTIVE, why }) => why.errno.into(),
            other => panic!("expected Unreachable, got {other:?}"),
        }
    }

    /// Checks that no state remains.
    pub(super) fn is_done(&mut self) {
        self.is_silent();
        assert_eq!((self.cm.in_startup(), self.cm.startups()), (0, 0));
        assert_eq!((self.cm.next_timeout(), self.cm.is_busy(ACTIVE)), (None, false));
    }
}

/// Returns private data as it arrives: padded with zeros.
fn filled<const N: usize>(data: &[u8]) -> Vec<u8> {
    mad::zero_padded::<N>(data).expect("it fits").to_vec()
}

fn request_of(mad: &Mad) -> sidr::Request {
    match sidr::parse(&mad.2[..]) {
        Ok(Message::Request(request)) => request,
        other => panic!("expected a request, got {other:?}"),
    }
}

fn reply_of(mad: &Mad) -> Reply {
    match sidr::parse(&mad.2[..]) {
        Ok(Message::Reply(reply)) => reply,
        other => panic!("expected a reply, got {other:?}"),
    }
}

/// A hand-written request.
fn played(from: &str, to: &str, transaction: u64) -> Mad {
    let request = sidr::Request {
        exchange: Exchange { transaction, id: 5 },
        service: ServiceId::new(PortSpace::Udp, PORT),
        from: SocketAddr::new(ip(from), 50_000),
        to: ip(to),
        private_data: [0; sidr::REQUEST_DATA],
    };
    (ip(from), ip(to), Box::new(request.emit()))
}

#[test]
fn loopback_addresses_share_one_port() {
    for direct in [true, false] {
        for (serves, from, to) in [
            ("127.0.0.2", "127.0.0.3", "127.0.0.2"),
            ("127.0.0.2", "127.0.0.1", "127.0.0.2"),
            ("127.0.0.1", "127.0.0.2", "127.0.0.1"),
            ("0.0.0.0", "0.0.0.0", "127.0.0.2"),
        ] {
            let mut node = Node::with_loopback(direct);
            node.serve(serves, 1);
            node.ask(from, to, b"hello");
            let request = node.request();
            assert_eq!(request.addresses.local, SocketAddr::new(ip(to), PORT));
            node.cm.accept_datagrams(request.id, PASSIVE, Q_KEY, b"", node.now).expect("accepted");
            let (addresses, source, qp, ..) = node.resolved();
            assert_eq!((qp, source), (PASSIVE, 1));
            assert_eq!(addresses.peer, SocketAddr::new(ip("127.0.0.1"), PORT));
            assert_eq!(addresses.local.ip(), ip("127.0.0.1"));
            node.is_done();
        }
    }
    // The listener takes only requests to its own address.
    let mut node = Node::with_loopback(true);
    node.serve("127.0.0.2", 1);
    node.ask("127.0.0.2", "127.0.0.1", b"");
    assert_eq!(node.errno(), rustix::io::Errno::CONNREFUSED.raw_os_error());
    // Other loopback addresses belong to other daemons unless the device has all of them.
    let mut node = Node::at("127.0.0.1", options());
    let other = SocketAddr::new(ip("127.0.0.2"), PORT);
    let bound = node.cm.bind_service(SESSION, LISTENER, PortSpace::Udp, other.into());
    assert!(matches!(bound, Err(Refusal::System { .. })), "{bound:?}");
    node.ask("127.0.0.1", "127.0.0.2", b"");
    assert_eq!(node.mad().1, ip("127.0.0.2"));
}

#[test]
fn local_resolution_sends_no_packet() {
    let mut node = Node::at(A, options());
    node.serve("0.0.0.0", 1);
    node.ask(A, A, b"hello");
    let request = node.request();
    assert_eq!(request.private_data, filled::<{ sidr::REQUEST_DATA }>(b"hello"));
    assert_eq!(request.addresses.local, SocketAddr::new(ip(A), PORT));
    assert!(node.cm.is_for_ud(request.id) && node.cm.is_busy(ACTIVE));
    assert_eq!(node.row().pending, 1);
    node.cm.accept_datagrams(request.id, PASSIVE, Q_KEY, b"welcome", node.now).expect("accepted");
    let (addresses, source, qp, q_key, data) = node.resolved();
    assert_eq!((qp, q_key, source), (PASSIVE, Q_KEY, 1));
    assert_eq!(data, filled::<{ sidr::REPLY_DATA }>(b"welcome"));
    assert_eq!(
        (addresses.peer, addresses.local),
        (request.addresses.local, request.addresses.peer)
    );
    assert!(addresses.local.port() >= 49_152);
    assert_eq!((node.row().pending, node.row().accepted), (0, 1));
    node.is_done();
}

#[test]
fn resolution_between_two_daemons() {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    b.serve(B, 2);
    a.ask(A, B, b"hello");
    let asked = a.mad();
    assert_eq!((asked.0, asked.1), (ip(A), ip(B)));
    b.take(&asked);
    let request = b.request();
    // A repeated request while the first is undecided.
    b.take(&asked);
    b.is_silent();
    b.cm.accept_datagrams(request.id, PASSIVE, Q_KEY, b"welcome", b.now).expect("accepted");
    let answer = b.mad();
    assert_eq!((answer.0, answer.1), (ip(B), ip(A)));
    // The reply is lost. The repeated request gets the same reply.
    b.take(&asked);
    assert_eq!(b.mad().2, answer.2);
    a.take(&answer);
    assert_eq!(a.resolved().2, PASSIVE);
    // A late reply is ignored.
    a.take(&answer);
    a.is_done();
    b.is_done();
}

#[test]
fn rejection_differs_from_missing_listener() {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    a.ask(A, B, b"");
    b.take(&a.mad());
    a.take(&b.mad());
    assert_eq!(a.errno(), rustix::io::Errno::CONNREFUSED.raw_os_error());
    a.ask(A, A, b"");
    assert_eq!(a.errno(), rustix::io::Errno::CONNREFUSED.raw_os_error());
    // A bound address does not listen yet.
    let address = SocketAddr::new(ip(B), PORT);
    b.cm.bind_service(SESSION, LISTENER, PortSpace::Udp, address.into()).expect("bind");
    a.ask(A, B, b"");
    b.take(&a.mad());
    assert_eq!(reply_of(&b.mad()).status, Status::UNSUPPORTED);
    a.cm.cancel(ACTIVE);
    b.cm.listen(LISTENER, 1).expect("listen");
    a.ask(A, B, b"");
    b.take(&a.mad());
    let request = b.request();
    assert!(b.cm.reject(request.id, &[1; 137], b.now).is_err(), "too long");
    b.cm.reject(request.id, b"no", b.now).expect("rejected");
    a.take(&b.mad());
    match a.cm.poll_event() {
        Some(CmEvent::Rejected { qp: ACTIVE, private_data }) => {
            assert_eq!(private_data, filled::<{ sidr::REPLY_DATA }>(b"no"));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((b.row().pending, b.row().rejected), (0, 1));
    b.cm.set_draining(true);
    a.ask(A, B, b"");
    b.take(&a.mad());
    assert_eq!(reply_of(&b.mad()).status, Status::REJECTED);
}

#[test]
fn resolution_times_out() {
    let mut a = Node::at(A, options());
    a.ask(A, B, b"");
    let first = a.mad();
    let begun = a.now;
    let mut asked = 1;
    loop {
        a.now = a.cm.next_timeout().expect("it waits");
        a.cm.handle_timeout(a.now);
        match a.cm.poll_event() {
            Some(CmEvent::Management { mad, .. }) => assert_eq!(mad, first.2),
            Some(CmEvent::Unreachable { why, .. }) => {
                assert_eq!(i32::from(why.errno), rustix::io::Errno::TIMEDOUT.raw_os_error());
                break;
            }
            other => panic!("{other:?}"),
        }
        asked += 1;
    }
    // After 250, 750 and 1750 ms.
    assert_eq!((asked, a.now.since(begun)), (4, options().reply_deadline));
    a.is_done();
}

#[test]
fn unsolicited_replies_are_ignored() {
    let mut a = Node::at(A, options());
    a.ask(A, B, b"");
    let asked = request_of(&a.mad());
    let right = Reply {
        exchange: asked.exchange,
        service: asked.service,
        status: Status::VALID,
        qp: PASSIVE,
        q_key: Q_KEY,
        private_data: [0; sidr::REPLY_DATA],
    };
    let guessed = |exchange| Reply { exchange, ..right.clone() };
    let Exchange { transaction, id } = asked.exchange;
    let forged = [
        (B, A, guessed(Exchange { transaction: transaction ^ 1, id })),
        (B, A, guessed(Exchange { transaction, id: id + 1 })),
        (B, A, guessed(Exchange { transaction, id: u32::MAX })),
        // From another source, to another destination, and with the address of this daemon.
        ("192.0.2.3", A, right.clone()),
        (B, "192.0.2.77", right.clone()),
        ("192.0.2.77", A, right.clone()),
    ];
    for (from, to, reply) in forged {
        a.take(&(ip(from), ip(to), Box::new(reply.emit())));
        a.is_silent();
    }
    // QP 1 is never a program's QP.
    let odd = Reply { qp: QpId(1), ..right.clone() };
    a.take(&(ip(B), ip(A), Box::new(odd.emit())));
    assert_eq!(a.errno(), rustix::io::Errno::PROTO.raw_os_error());
    a.ask(A, B, b"");
    let exchange = request_of(&a.mad()).exchange;
    assert_ne!(exchange.transaction, transaction);
    let odd = Reply { exchange, status: Status(77), ..right };
    a.take(&(ip(B), ip(A), Box::new(odd.emit())));
    assert_eq!(a.errno(), rustix::io::Errno::PROTO.raw_os_error());
    a.is_done();
}

#[test]
fn flood_fills_only_the_backlog() {
    let mut b = Node::at(B, CmOptions { startups: 6, ..options() });
    b.serve(B, 4);
    for n in 0..20_000_u64 {
        // A single host can forge many source addresses.
        let from = IpAddr::from([198, 51, (n >> 8) as u8, n as u8]).to_string();
        b.take(&played(&from, B, n));
    }
    let requests: Vec<RequestId> = (0..4).map(|_| b.request().id).collect();
    b.is_silent();
    assert_eq!((b.row().pending, b.cm.startups(), b.cm.in_startup()), (4, 4, 4));
    // An accept makes room for another request. Requests wait no longer than the requester does.
    b.cm.accept_datagrams(requests[0], PASSIVE, Q_KEY, b"", b.now).expect("accepted");
    assert_eq!(b.mad().1, ip("198.51.0.0"));
    b.take(&played(A, B, 1));
    let last = b.request();
    b.pass(options().reply_deadline);
    let mut waited: Vec<_> = requests[1..].iter().copied().chain([last.id]).collect();
    while let Some(CmEvent::Withdrawn { request, .. }) = b.cm.poll_event() {
        waited.retain(|other| *other != request);
        assert!(b.cm.accept_datagrams(request, PASSIVE, Q_KEY, b"", b.now).is_err());
    }
    assert_eq!(waited, []);
    b.is_done();
}

#[test]
fn unserved_requests_get_rate_limited_replies() {
    let mut b = Node::at(B, options());
    let mut answers = 0;
    for n in 0..5000_u64 {
        let from = IpAddr::from([198, 51, (n >> 8) as u8, n as u8]);
        let asked = played(&from.to_string(), B, n);
        b.take(&asked);
        if let Some(CmEvent::Management { to, .. }) = b.cm.poll_event() {
            assert_eq!(to, from);
            answers += 1;
        }
    }
    assert_eq!(answers, 1000);
    // A single host cannot consume all answers.
    b.pass(Duration::from_secs(2));
    let mut answers_to = |from: &str, requests: u64| {
        let answered = |n: &u64| {
            b.take(&played(from, B, *n));
            b.cm.poll_event().is_some()
        };
        (0..requests).filter(answered).count()
    };
    assert_eq!(answers_to("203.0.113.1", 5000), 200);
    assert_eq!(answers_to("203.0.113.2", 20), 20);
    // A request with a forged address gets no reply.
    b.pass(Duration::from_secs(2));
    let (_, to, mad) = played("198.51.100.1", B, 1);
    b.take(&(ip("198.51.100.2"), to, mad));
    b.take(&(ip(A), ip(B), Box::new([0; mad::LEN])));
    b.is_done();
}

#[test]
fn sidr_requests_obey_the_connection_rate() {
    let mut b = Node::at(B, CmOptions { peer_connections_per_second: 5, ..options() });
    b.serve(B, 100);
    for n in 0..50 {
        b.take(&played(A, B, n));
    }
    assert_eq!(b.row().pending, 5);
}

#[test]
fn sidr_requests_respect_the_startup_limits() {
    let mut b = Node::at(B, CmOptions { startups: 3, ..options() });
    b.serve(B, 100);
    for n in 0..50 {
        b.take(&played(A, B, n));
    }
    assert_eq!((b.row().pending, b.cm.startups()), (3, 3));
}

#[test]
fn remembered_replies_are_bounded() {
    let mut b = Node::at(B, options());
    b.serve(B, 1);
    for n in 0..200 {
        b.take(&played(A, B, n));
        let request = b.request();
        b.cm.accept_datagrams(request.id, PASSIVE, Q_KEY, b"", b.now).expect("accepted");
        b.mad();
    }
    b.take(&played(A, B, 199));
    assert_eq!(reply_of(&b.mad()).exchange.transaction, 199);
    // A repeated request whose reply was evicted counts as new.
    b.take(&played(A, B, 0));
    b.request();
}

#[test]
fn ends_withdraw_waiting_requests() {
    let mut node = Node::at(A, options());
    node.serve(A, 4);
    node.ask(A, A, b"");
    let request = node.request();
    node.cm.cancel(ACTIVE);
    assert_eq!(node.withdrawn(request.id), "the requester gave up");
    node.is_done();
    // The session of the client.
    node.ask(A, A, b"");
    let request = node.request();
    node.cm.drop_session(OTHER, node.now);
    node.withdrawn(request.id);
    node.is_done();
    // The listener.
    node.ask(A, A, b"");
    node.request();
    node.cm.close_listener(LISTENER, node.now).expect("closed");
    assert!(matches!(node.cm.poll_event(), Some(CmEvent::Rejected { qp: ACTIVE, .. })));
    node.is_done();
    // The session of the listener.
    node.serve(A, 4);
    node.ask(A, A, b"");
    node.request();
    node.cm.drop_session(SESSION, node.now);
    assert!(matches!(node.cm.poll_event(), Some(CmEvent::Rejected { qp: ACTIVE, .. })));
    node.is_done();
}

#[test]
fn udp_port_space_is_separate() {
    let mut node = Node::at(A, options());
    node.serve(A, 1);
    let mut bind = |id, address: &str, port| {
        let address = SocketAddr::new(ip(address), port);
        node.cm.bind_service(SESSION, ListenerId(id), PortSpace::Udp, address.into())
    };
    for address in [A, "0.0.0.0", "::"] {
        assert!(matches!(bind(20, address, PORT), Err(Refusal::InUse { .. })), "{address}");
    }
    // Not an address of the device.
    assert!(matches!(bind(20, B, PORT), Err(Refusal::System { .. })));
    let first = bind(21, "0.0.0.0", 0);
    let second = bind(22, "0.0.0.0", 0);
    assert_ne!(first.expect("bind").port(), second.expect("bind").port());
    let any = SocketAddr::new(ip("127.0.0.1"), 0);
    let tcp = node.cm.bind(SESSION, ListenerId(24), any.into()).expect("bind");
    let same = SocketAddr::new(ip("0.0.0.0"), tcp.port());
    assert!(node.cm.bind_service(SESSION, ListenerId(23), PortSpace::Udp, same.into()).is_ok());
    // Invalid parameters are refused.
    let params = |peer: &str| ConnectParams {
        session: OTHER,
        qp: ACTIVE,
        peer: SocketAddr::new(ip(peer), PORT),
        local: Some(SocketAddr::new(ip(A), 0)),
        ird: None,
        ord: None,
        private_data: vec![0; 181],
        peer_to_peer: false,
    };
    for peer in ["224.0.0.1", "255.255.255.255", "0.0.0.0", "::1"] {
        let params = ConnectParams { private_data: Vec::new(), ..params(peer) };
        assert!(node.cm.resolve(params, START).is_err(), "{peer}");
    }
    assert!(matches!(node.cm.resolve(params(A), START), Err(Refusal::AboveMaximum { .. })));
    let from = |address: &str, port| ConnectParams {
        local: Some(SocketAddr::new(ip(address), port)),
        private_data: Vec::new(),
        ..params(A)
    };
    assert!(node.cm.resolve(from(B, 0), START).is_err());
    // Another session cannot ask from a port that this one serves.
    let refused = node.cm.resolve(from(A, PORT), START);
    assert!(matches!(refused, Err(Refusal::InUse { .. })), "{refused:?}");
    assert!(!node.cm.is_busy(ACTIVE));
}
