//! Connections of RC QPs in one daemon, between two, and with hosts that forge messages.

use rnic_abi::abi::control::{RcOffer, RcPeer};
use rnic_abi::roce::connection::{self, Ids, Message, Reason, Service};
use rnic_abi::roce::mad::{Exchange, zero_padded};
use rnic_abi::roce::{PortSpace, ServiceId};
use rnic_abi::types::Gid;

use super::sidr::{A, B, Mad, PORT, ip};
use super::*;

/// Time after which a message is repeated.
const REPEAT: Duration = Duration::from_millis(4_300);
const GUID: u64 = 0x0230_95FF_FEB1_D8CE;

fn offer(psn: u32) -> RcOffer {
    RcOffer {
        psn,
        responder_resources: 4,
        initiator_depth: 2,
        retry_count: 6,
        rnr_retry: 5,
        path_mtu: 1024,
        srq: false,
    }
}

impl Node {
    fn serve_rc(&mut self, address: &str, backlog: u32) {
        let address = SocketAddr::new(ip(address), PORT);
        let bound = self.cm.bind_service(SESSION, LISTENER, PortSpace::Tcp, address.into());
        assert_eq!(bound.expect("bind"), address);
        self.cm.listen(LISTENER, backlog).expect("listen");
    }

    fn params(&self, from: &str, port: u16, to: &str, private_data: &[u8]) -> RcConnectParams {
        RcConnectParams {
            session: OTHER,
            qp: ACTIVE,
            kind: Service::Reliable,
            space: PortSpace::Tcp,
            peer: SocketAddr::new(ip(to), PORT),
            local: Some(SocketAddr::new(ip(from), port)),
            offer: offer(0x111),
            guid: GUID,
            private_data: private_data.to_vec(),
        }
    }

    fn ask_rc(&mut self, from: &str, to: &str, private_data: &[u8]) {
        let params = self.params(from, 0, to, private_data);
        self.cm.connect_rc(params, self.now).expect("asked");
    }

    fn asked_rc(&mut self) -> (RequestId, AddressPair, RcPeer, Vec<u8>) {
        match self.cm.poll_event() {
            Some(CmEvent::RcRequest { request, addresses, peer, private_data, .. }) => {
                (request, addresses, peer, private_data)
            }
            other => panic!("expected a request, got {other:?}"),
        }
    }

    fn accept_rc(&mut self, request: RequestId) {
        let private_data = b"welcome".to_vec();
        let (qp, offer, guid) = (PASSIVE, offer(0x222), GUID);
        let kind = Some(Service::Reliable);
        let params = RcAcceptParams { request, qp, kind, offer, guid, private_data };
        self.cm.accept_rc(params, self.now).expect("accepted");
    }

    fn replied_rc(&mut self) -> (RcPeer, Vec<u8>) {
        match self.cm.poll_event() {
            Some(CmEvent::RcReply { qp: ACTIVE, peer, private_data, .. }) => (peer, private_data),
            other => panic!("expected a reply, got {other:?}"),
        }
    }

    fn established_rc(&mut self) {
        let event = self.cm.poll_event();
        assert!(matches!(event, Some(CmEvent::RcEstablished { qp: PASSIVE, .. })), "{event:?}");
    }

    fn disconnected_rc(&mut self, of: QpId) {
        let event = self.cm.poll_event();
        assert!(matches!(event, Some(CmEvent::RcDisconnected { qp }) if qp == of), "{event:?}");
    }

    fn rejected_rc(&mut self, of: QpId) -> (u16, Vec<u8>) {
        match self.cm.poll_event() {
            Some(CmEvent::RcRejected { qp, reason, private_data }) if qp == of => {
                (reason, private_data)
            }
            other => panic!("expected a rejection, got {other:?}"),
        }
    }

    fn timed_out_rc(&mut self, of: QpId) {
        let timed_out = rustix::io::Errno::TIMEDOUT.raw_os_error();
        match self.cm.poll_event() {
            Some(CmEvent::RcUnreachable { qp, why }) if qp == of => {
                assert_eq!(i32::from(why.errno), timed_out, "{}", why.reason);
            }
            other => panic!("expected a timeout, got {other:?}"),
        }
    }

    /// Checks that no connection remains.
    fn has_no_connection(&mut self) {
        self.is_done();
        assert!(!self.cm.has_connection(ACTIVE) && !self.cm.has_connection(PASSIVE));
    }
}

fn message(mad: &Mad) -> Message {
    connection::parse(&mad.2[..]).expect("a connection message")
}

fn request_of(mad: &Mad) -> connection::Request {
    match message(mad) {
        Message::Request(request) => *request,
        other => panic!("expected REQ, got {other:?}"),
    }
}

/// Sends a request from one daemon to the other. Returns the request there.
fn asked_by(a: &mut Node, b: &mut Node) -> RequestId {
    a.ask_rc(A, B, b"");
    b.take(&a.mad());
    b.asked_rc().0
}

/// Two daemons, and the messages of an established connection: REQ, REP, RTU.
fn connected() -> (Node, Node, [Mad; 3]) {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    b.serve_rc(B, 2);
    a.ask_rc(A, B, b"hello");
    let req = a.mad();
    b.take(&req);
    let (request, ..) = b.asked_rc();
    b.accept_rc(request);
    let rep = b.mad();
    a.take(&rep);
    a.replied_rc();
    a.cm.establish_rc(ACTIVE, a.now).expect("a reply");
    let rtu = a.mad();
    b.take(&rtu);
    b.established_rc();
    (a, b, [req, rep, rtu])
}

#[test]
fn local_connection_sends_no_packet() {
    for (serves, from, to) in [(A, A, A), ("0.0.0.0", "127.0.0.3", "127.0.0.2")] {
        let mut node = Node::with_loopback(true);
        node.serve_rc(serves, 1);
        node.ask_rc(from, to, b"hello");
        let (request, addresses, peer, data) = node.asked_rc();
        assert_eq!(data, zero_padded::<56>(b"hello").expect("it fits"));
        assert_eq!(addresses.local, SocketAddr::new(ip(to), PORT));
        assert_eq!((peer.qp, peer.psn, peer.path_mtu), (ACTIVE, 0x111, 1024));
        assert_eq!((peer.responder_resources, peer.initiator_depth), (4, 2));
        assert_eq!((peer.retry_count, peer.rnr_retry, peer.ack_timeout), (6, 5, 17));
        let own = if to == A { A } else { "127.0.0.1" };
        assert_eq!(peer.gid, Gid::from(ip(own)));
        // A request of this daemon is not charged to the listener's user.
        assert_eq!((node.row().pending, node.cm.startups()), (1, 0));
        node.accept_rc(request);
        assert_eq!((node.row().pending, node.row().accepted, node.cm.startups()), (0, 1, 0));
        let (peer, data) = node.replied_rc();
        assert_eq!((peer.qp, peer.psn, peer.gid), (PASSIVE, 0x222, Gid::from(ip(own))));
        assert_eq!(data, zero_padded::<196>(b"welcome").expect("it fits"));
        node.cm.establish_rc(ACTIVE, node.now).expect("a reply");
        node.established_rc();
        assert_eq!((node.cm.in_startup(), node.cm.next_timeout()), (0, None));
        node.cm.disconnect_rc(PASSIVE, node.now).expect("connected");
        node.disconnected_rc(ACTIVE);
        node.disconnected_rc(PASSIVE);
        node.has_no_connection();
    }
}

#[test]
fn lost_messages_are_repeated() {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    b.serve_rc(B, 2);
    a.ask_rc(A, B, b"hello");
    let req = a.mad();
    assert_eq!((req.0, req.1), (ip(A), ip(B)));
    // REQ is lost.
    a.pass(REPEAT);
    let again = a.mad();
    assert_eq!(again.2, req.2);
    b.take(&again);
    let (request, ..) = b.asked_rc();
    // An undecided request is answered with MRA, which postpones the next repetition.
    b.take(&req);
    let mra = b.mad();
    a.take(&mra);
    a.pass(REPEAT);
    a.is_silent();
    b.accept_rc(request);
    let rep = b.mad();
    // REP is lost: repeated by itself, and for another REQ.
    b.pass(REPEAT);
    assert_eq!(b.mad().2, rep.2);
    b.take(&req);
    assert_eq!(b.mad().2, rep.2);
    a.take(&rep);
    a.replied_rc();
    // A repeated REP before the confirmation is answered with MRA.
    a.take(&rep);
    let mra = a.mad();
    assert!(matches!(message(&mra), Message::Delay(_)));
    b.take(&mra);
    a.cm.establish_rc(ACTIVE, a.now).expect("a reply");
    let rtu = a.mad();
    // RTU is lost. MRA postpones the next REP, but only once.
    b.pass(REPEAT);
    b.is_silent();
    b.take(&mra);
    b.pass(Duration::from_secs(69));
    a.take(&b.mad());
    assert_eq!(a.mad().2, rtu.2);
    b.take(&rtu);
    b.established_rc();
    b.take(&rtu);
    b.take(&req);
    b.is_silent();
    b.pass(Duration::from_secs(1000));
    b.is_silent();
    // DREQ is lost, then DREP.
    a.cm.disconnect_rc(ACTIVE, a.now).expect("connected");
    let dreq = a.mad();
    a.pass(REPEAT);
    assert_eq!(a.mad().2, dreq.2);
    b.take(&dreq);
    b.disconnected_rc(PASSIVE);
    let drep = b.mad();
    b.take(&dreq);
    assert_eq!(b.mad().2, drep.2);
    a.take(&drep);
    a.disconnected_rc(ACTIVE);
    a.has_no_connection();
    b.has_no_connection();
}

#[test]
fn silent_peer_ends_the_attempt_after_sixteen_messages() {
    let mut a = Node::at(A, options());
    a.ask_rc(A, B, b"");
    let mut sent = 0;
    while let Message::Request(_) = message(&a.mad()) {
        sent += 1;
        a.pass(REPEAT);
    }
    // The last message was REJ.
    a.timed_out_rc(ACTIVE);
    assert_eq!(sent, 16);
    a.has_no_connection();
    // The same for a reply that is not confirmed, and for DREQ.
    let mut b = Node::at(B, options());
    b.serve_rc(B, 1);
    let request = asked_by(&mut a, &mut b);
    b.accept_rc(request);
    let mut sent = 0;
    while let Message::Reply(_) = message(&b.mad()) {
        sent += 1;
        b.pass(REPEAT);
    }
    b.timed_out_rc(PASSIVE);
    assert_eq!(sent, 16);
    b.has_no_connection();
    let (mut a, ..) = connected();
    a.cm.disconnect_rc(ACTIVE, a.now).expect("connected");
    for _ in 0..16 {
        assert!(matches!(message(&a.mad()), Message::Disconnect(_, PASSIVE)));
        a.pass(REPEAT);
    }
    a.disconnected_rc(ACTIVE);
    a.has_no_connection();
}

#[test]
fn rejections_have_their_reason() {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    a.ask_rc(A, B, b"");
    b.take(&a.mad());
    a.take(&b.mad());
    assert_eq!(a.rejected_rc(ACTIVE).0, Reason::INVALID_SERVICE.0);
    b.serve_rc(B, 1);
    a.ask_rc(A, B, b"");
    let req = a.mad();
    b.take(&req);
    let (request, ..) = b.asked_rc();
    b.cm.reject(request, b"no", b.now).expect("rejected");
    let rej = b.mad();
    // REJ is lost.
    b.take(&req);
    assert_eq!(b.mad().2, rej.2);
    a.take(&rej);
    let (reason, data) = a.rejected_rc(ACTIVE);
    assert_eq!((reason, &data[..3]), (Reason::CONSUMER.0, &b"no\0"[..]));
    a.take(&rej);
    a.has_no_connection();
    assert_eq!((b.row().pending, b.row().rejected), (0, 1));
    // The requester gives up before and after the decision.
    let request = asked_by(&mut a, &mut b);
    a.cm.abandon_rc(ACTIVE, a.now);
    b.take(&a.mad());
    assert_eq!(b.withdrawn(request), "the requester gave up");
    // While REP is under way.
    let request = asked_by(&mut a, &mut b);
    b.accept_rc(request);
    a.cm.abandon_rc(ACTIVE, a.now);
    b.take(&a.mad());
    b.mad();
    assert_eq!(b.rejected_rc(PASSIVE).0, Reason::CONSUMER.0);
    let request = asked_by(&mut a, &mut b);
    b.accept_rc(request);
    a.take(&b.mad());
    a.replied_rc();
    a.cm.disconnect_rc(ACTIVE, a.now).expect("a reply");
    b.take(&a.mad());
    assert_eq!(b.rejected_rc(PASSIVE).0, Reason::CONSUMER.0);
    assert!(matches!(a.cm.poll_event(), Some(CmEvent::RcUnreachable { qp: ACTIVE, .. })));
    a.has_no_connection();
    b.has_no_connection();
}

#[test]
fn undecided_request_ends_at_the_deadline() {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    b.serve_rc(B, 1);
    let request = asked_by(&mut a, &mut b);
    b.pass(options().decision_deadline);
    assert_eq!(b.withdrawn(request), "the deadline passed");
    a.take(&b.mad());
    assert_eq!(a.rejected_rc(ACTIVE).0, Reason::TIMEOUT.0);
    // A reply that the program does not confirm.
    let request = asked_by(&mut a, &mut b);
    b.accept_rc(request);
    a.take(&b.mad());
    a.replied_rc();
    a.pass(options().decision_deadline);
    b.take(&a.mad());
    a.timed_out_rc(ACTIVE);
    assert_eq!(b.rejected_rc(PASSIVE).0, Reason::TIMEOUT.0);
    a.has_no_connection();
    b.has_no_connection();
}

#[test]
fn destroyed_qps_and_sessions_leave_their_peer() {
    let (mut a, mut b, _) = connected();
    a.cm.abandon_rc(ACTIVE, a.now);
    a.is_done_but_for_one();
    let (mut a, mut b2, _) = connected();
    b2.cm.drop_session(SESSION, b2.now);
    a.take(&b2.mad());
    a.disconnected_rc(ACTIVE);
    assert!(matches!(message(&a.mad()), Message::Disconnected(_)));
    a.has_no_connection();
    b2.has_no_connection();
    b.cm.abandon_rc(PASSIVE, b.now);
    assert!(matches!(message(&b.mad()), Message::Disconnect(_, ACTIVE)));
    b.has_no_connection();
}

impl Node {
    /// Checks that one DREQ leaves, and that no state remains.
    fn is_done_but_for_one(&mut self) {
        assert!(matches!(message(&self.mad()), Message::Disconnect(_, PASSIVE)));
        self.has_no_connection();
    }
}

#[test]
fn forged_messages_have_no_effect() {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    b.serve_rc(B, 2);
    a.ask_rc(A, B, b"");
    let req = a.mad();
    // Another host in the name of A, and A in the name of another GID.
    let mut forged = request_of(&req);
    b.take(&(ip("192.0.2.9"), ip(B), req.2.clone()));
    b.is_silent();
    forged.from_gid = Gid::from(ip("192.0.2.9"));
    b.take(&(ip(A), ip(B), Box::new(forged.emit())));
    match message(&b.mad()) {
        Message::Reject(reject) => assert_eq!(reject.reason, Reason::INVALID_GID),
        other => panic!("expected REJ, got {other:?}"),
    }
    b.take(&req);
    let (request, ..) = b.asked_rc();
    b.accept_rc(request);
    let rep = b.mad();
    let Message::Reply(genuine) = message(&rep) else { panic!("expected REP") };
    for change in 0..3 {
        let mut forged = genuine.clone();
        let mut from = B;
        match change {
            0 => forged.ids.exchange.transaction ^= 1,
            1 => forged.ids.receiver ^= 1,
            _ => from = "192.0.2.9",
        }
        a.take(&(ip(from), ip(A), Box::new(forged.emit())));
        a.is_silent();
    }
    a.take(&rep);
    a.replied_rc();
    a.cm.establish_rc(ACTIVE, a.now).expect("a reply");
    let rtu = a.mad();
    let Message::Ready(ids) = message(&rtu) else { panic!("expected RTU") };
    let transaction = ids.exchange.transaction;
    let guess = Ids { exchange: Exchange { transaction: transaction ^ 1, ..ids.exchange }, ..ids };
    b.take(&(ip(A), ip(B), Box::new(guess.emit_ready())));
    b.is_silent();
    b.take(&rtu);
    b.established_rc();
    // DREQ with a wrong ID or QP, or from another host, is answered and has no effect.
    let wrong = Ids { exchange: Exchange { id: 7, ..ids.exchange }, ..ids };
    for (from, forged) in [
        (A, wrong.emit_disconnect(PASSIVE)),
        (A, ids.emit_disconnect(ACTIVE)),
        ("192.0.2.9", ids.emit_disconnect(PASSIVE)),
    ] {
        b.take(&(ip(from), ip(B), Box::new(forged)));
        assert!(matches!(message(&b.mad()), Message::Disconnected(_)));
        b.is_silent();
    }
    // DREP and REJ without a cause.
    b.take(&(ip(A), ip(B), Box::new(ids.emit_disconnected())));
    b.is_silent();
    assert!(b.cm.has_connection(PASSIVE));
}

#[test]
fn port_spaces_are_separate() {
    let mut node = Node::at(A, options());
    let address = SocketAddr::new(ip(A), PORT);
    for (id, space) in [(21, PortSpace::Tcp), (22, PortSpace::Udp), (23, PortSpace::Ib)] {
        let bound = node.cm.bind_service(SESSION, ListenerId(id), space, address.into());
        assert_eq!(bound, Ok(address));
        node.cm.listen(ListenerId(id), 1).expect("listen");
    }
    let again = node.cm.bind_service(SESSION, ListenerId(24), PortSpace::Ib, address.into());
    assert!(matches!(again, Err(Refusal::InUse { .. })), "{again:?}");
    // Another session cannot ask from a port that this one serves.
    let refused = node.cm.connect_rc(node.params(A, PORT, A, b""), node.now);
    assert!(matches!(refused, Err(Refusal::InUse { .. })), "{refused:?}");
    node.ask_rc(A, A, b"");
    match node.cm.poll_event() {
        Some(CmEvent::RcRequest { listener, .. }) => assert_eq!(listener, ListenerId(21)),
        other => panic!("expected a request, got {other:?}"),
    }
    node.cm.close_listener(ListenerId(21), node.now).expect("a listener");
    assert_eq!(node.rejected_rc(ACTIVE).0, Reason::CONSUMER.0);
    let service = ServiceId::new(PortSpace::Tcp, PORT);
    assert_eq!(service.port(), Some((PortSpace::Tcp, PORT)));
}

#[test]
fn requests_without_room_are_dropped() {
    let mut b = Node::at(B, options());
    b.serve_rc(B, 2);
    let mut mads = Vec::new();
    for n in 1..=3_u32 {
        let mut a = Node::at(A, options());
        a.ask_rc(A, B, &n.to_be_bytes());
        mads.push(a.mad());
    }
    for mad in &mads {
        b.take(mad);
    }
    let (first, ..) = b.asked_rc();
    b.asked_rc();
    b.is_silent();
    assert_eq!(b.row().pending, 2);
    // A repetition finds room after a decision.
    b.accept_rc(first);
    b.mad();
    b.take(&mads[2]);
    assert_eq!(b.asked_rc().3[..4], [0, 0, 0, 3]);
    // A QP has one connection.
    b.ask_refused();
}

impl Node {
    fn ask_refused(&mut self) {
        let params = RcAcceptParams {
            request: RequestId(2),
            qp: PASSIVE,
            kind: None,
            offer: offer(1),
            guid: GUID,
            private_data: Vec::new(),
        };
        let refused = self.cm.accept_rc(params, self.now);
        assert!(matches!(refused, Err(Refusal::WrongState { .. })), "{refused:?}");
    }
}

#[test]
fn an_ending_connection_gives_way_to_the_next() {
    let (mut a, ..) = connected();
    a.cm.disconnect_rc(ACTIVE, a.now).expect("connected");
    a.mad();
    a.ask_rc(A, B, b"again");
    assert!(matches!(message(&a.mad()), Message::Disconnect(..)));
    assert!(matches!(message(&a.mad()), Message::Request(_)));
}

#[test]
fn the_types_of_both_qps_are_the_same() {
    let mut b = Node::at(B, options());
    b.serve_rc(B, 2);
    let mut a = Node::at(A, options());
    let params = RcConnectParams { kind: Service::Unreliable, ..a.params(A, 0, B, b"") };
    a.cm.connect_rc(params, a.now).expect("asked");
    b.take(&a.mad());
    a.take(&b.mad());
    assert_eq!(a.rejected_rc(ACTIVE).0, Reason::INVALID_SERVICE_TYPE.0);
    let request = asked_by(&mut a, &mut b);
    let kind = Some(Service::Unreliable);
    let (offer, private_data) = (offer(1), Vec::new());
    let params = RcAcceptParams { request, qp: PASSIVE, kind, offer, guid: GUID, private_data };
    assert!(matches!(b.cm.accept_rc(params, b.now), Err(Refusal::WrongState { .. })));
    b.accept_rc(request);
}
