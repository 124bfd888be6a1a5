//! Connections of RC QPs in one daemon, between two, and with hosts that forge messages.

use rnic_abi::abi::control::{RcOffer, RcPeer};
use rnic_abi::roce::connection::{self, Ids, Message, Reason, Rejected, Service};
use rnic_abi::roce::mad::{self, Exchange, zero_padded};
use rnic_abi::roce::{PortSpace, ServiceId};
use rnic_abi::types::Gid;

use super::sidr::{A, B, Mad, PORT, ip};
use super::*;

/// Time after which a message is repeated.
const REPEAT: Duration = Duration::from_millis(4_300);
/// Time for which messages of an ended connection may still arrive: twice the packet lifetime.
const TIMEWAIT: Duration = Duration::from_nanos(4096 << 17);
const GUID: u64 = 0x0230_95FF_FEB1_D8CE;

fn offer(psn: u32) -> RcOffer {
    RcOffer {
        psn,
        responder_resources: 4,
        initiator_depth: 2,
        retry_count: 6,
        rnr_retry: 5,
        path_mtu: 1024,
        traffic_class: 0x28,
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
            Some(CmEvent::RcRejected { qp, reason, private_data, .. }) if qp == of => {
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

    /// Checks that no connection remains, once messages that were under way have arrived.
    fn has_no_connection(&mut self) {
        self.pass(TIMEWAIT);
        self.is_done();
        assert!(!self.cm.has_connection(ACTIVE) && !self.cm.has_connection(PASSIVE));
        assert_eq!(self.cm.slots.len(), self.cm.listeners.len());
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
    // REP is lost. It is repeated after a timeout, and for a repeated REQ.
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
        let params = a.params(A, 0, B, &n.to_be_bytes());
        a.cm.connect_rc(RcConnectParams { qp: QpId(n + 1), ..params }, a.now).expect("asked");
        mads.push(a.mad());
    }
    for mad in &mads {
        b.take(mad);
    }
    let (first, ..) = b.asked_rc();
    b.asked_rc();
    b.is_silent();
    assert_eq!(b.row().pending, 2);
    // After a decision, a repeated request finds room.
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

#[test]
fn first_message_replaces_a_lost_rtu() {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    b.serve_rc(B, 1);
    let request = asked_by(&mut a, &mut b);
    // Before the program decides, no message of the peer can establish a connection.
    b.cm.communication_established(PASSIVE);
    b.is_silent();
    b.accept_rc(request);
    a.take(&b.mad());
    a.replied_rc();
    a.cm.establish_rc(ACTIVE, a.now).expect("a reply");
    let rtu = a.mad();
    b.cm.communication_established(PASSIVE);
    b.established_rc();
    // No repetition of REP follows, and the late RTU is ignored.
    b.pass(Duration::from_secs(1000));
    b.take(&rtu);
    b.cm.communication_established(PASSIVE);
    b.is_silent();
    // The program reports the message itself.
    let mut b = Node::at(B, options());
    b.serve_rc(B, 1);
    let request = asked_by(&mut Node::at(A, options()), &mut b);
    b.accept_rc(request);
    b.mad();
    b.cm.establish_rc(PASSIVE, b.now).expect("accepted");
    b.established_rc();
    // A program cannot know that its message has already established the connection.
    b.cm.establish_rc(PASSIVE, b.now).expect("accepted");
    b.is_silent();
    assert!(a.cm.establish_rc(ACTIVE, a.now).is_err());
}

/// Returns the reason of the next rejection that the node sends.
fn rejects(node: &mut Node) -> u16 {
    match message(&node.mad()) {
        Message::Reject(reject) => reject.reason.0,
        other => panic!("expected REJ, got {other:?}"),
    }
}

#[test]
fn request_with_a_connected_qp_is_stale() {
    let (_, mut b, [req, ..]) = connected();
    // The peer has restarted and lost the connection.
    let mut restarted = Node::at(A, options());
    restarted.ask_rc(A, B, b"again");
    b.take(&restarted.mad());
    assert_eq!(rejects(&mut b), Reason::STALE.0);
    match b.cm.poll_event() {
        Some(CmEvent::RcStale { qp: PASSIVE, remote_qp: ACTIVE, peer }) => assert_eq!(peer, ip(A)),
        other => panic!("expected RcStale, got {other:?}"),
    }
    b.is_silent();
    // DREQ follows if the QPs have no stream.
    b.cm.disconnect_rc(PASSIVE, b.now).expect("connected");
    restarted.take(&b.mad());
    b.take(&restarted.mad());
    b.disconnected_rc(PASSIVE);
    // The QP number of another host is another QP.
    let (_, mut b, _) = connected();
    let mut other = request_of(&req);
    let host = ip("192.0.2.9");
    other.from = SocketAddr::new(host, 7);
    other.from_gid = Gid::from(host);
    b.take(&(host, ip(B), Box::new(other.emit())));
    b.asked_rc();
}

#[test]
fn second_request_of_an_accepted_qp_is_refused() {
    let mut b = Node::at(B, options());
    b.serve_rc(B, 2);
    let first = asked_by(&mut Node::at(A, options()), &mut b);
    let request = asked_by(&mut Node::at(A, options()), &mut b);
    b.accept_rc(first);
    b.mad();
    let (kind, offer, private_data) = (None, offer(1), Vec::new());
    let params = RcAcceptParams { request, qp: QpId(77), kind, offer, guid: GUID, private_data };
    let refused = b.cm.accept_rc(params, b.now);
    assert!(matches!(refused, Err(Refusal::WrongState { .. })), "{refused:?}");
    b.is_silent();
    assert_eq!(b.row().pending, 1);
}

#[test]
fn reply_with_a_connected_qp_is_stale() {
    let (mut a, ..) = connected();
    // The peer has restarted and lost the connection.
    let mut restarted = Node::at(B, options());
    restarted.serve_rc(B, 1);
    let params = RcConnectParams { qp: QpId(50), ..a.params(A, 0, B, b"") };
    a.cm.connect_rc(params, a.now).expect("asked");
    restarted.take(&a.mad());
    let (request, ..) = restarted.asked_rc();
    restarted.accept_rc(request);
    a.take(&restarted.mad());
    restarted.take(&a.mad());
    assert_eq!(restarted.rejected_rc(PASSIVE).0, Reason::STALE.0);
    match a.cm.poll_event() {
        Some(CmEvent::RcStale { qp: ACTIVE, remote_qp: PASSIVE, peer }) => assert_eq!(peer, ip(B)),
        other => panic!("expected RcStale, got {other:?}"),
    }
    a.is_silent();
}

#[test]
fn delayed_messages_of_an_ended_connection_do_nothing() {
    let (mut a, mut b, [req, rep, rtu]) = connected();
    a.cm.disconnect_rc(ACTIVE, a.now).expect("connected");
    let dreq = a.mad();
    b.take(&dreq);
    b.disconnected_rc(PASSIVE);
    let drep = b.mad();
    a.take(&drep);
    a.disconnected_rc(ACTIVE);
    b.take(&rtu);
    b.is_silent();
    a.take(&rep);
    a.take(&drep);
    a.is_silent();
    b.take(&req);
    assert_eq!(rejects(&mut b), Reason::STALE.0);
    b.is_silent();
    // The QPs may connect again at once, with other IDs.
    let request = asked_by(&mut a, &mut b);
    b.accept_rc(request);
    b.mad();
    b.take(&req);
    assert_eq!(rejects(&mut b), 10);
    a.cm.abandon_rc(ACTIVE, a.now);
    b.pass(TIMEWAIT);
    assert_eq!((a.cm.in_startup(), a.cm.startups()), (0, 0));
}

#[test]
fn rejections_do_not_prolong_timewait() {
    let (mut a, mut b, [req, ..]) = connected();
    a.cm.disconnect_rc(ACTIVE, a.now).expect("connected");
    b.take(&a.mad());
    b.disconnected_rc(PASSIVE);
    b.mad();
    let ids = Ids { exchange: request_of(&req).exchange, receiver: 0 };
    let private_data = [0; connection::REJECT_DATA];
    let (of, reason) = (Rejected::OTHER, Reason::CONSUMER);
    let reject = connection::Reject { ids, of, reason, private_data };
    b.pass(TIMEWAIT / 2);
    b.take(&(ip(A), ip(B), Box::new(reject.emit())));
    b.is_silent();
    b.pass(TIMEWAIT / 2);
    assert_eq!(b.cm.slots.len(), b.cm.listeners.len());
}

#[test]
fn delayed_request_of_a_given_up_attempt_is_none() {
    let mut a = Node::at(A, options());
    let mut b = Node::at(B, options());
    b.serve_rc(B, 2);
    a.ask_rc(A, B, b"");
    let req = a.mad();
    b.take(&req);
    let (request, ..) = b.asked_rc();
    a.cm.abandon_rc(ACTIVE, a.now);
    b.take(&a.mad());
    b.withdrawn(request);
    b.take(&req);
    rejects(&mut b);
    b.is_silent();
    // Given up after the decision.
    a.ask_rc(A, B, b"");
    let req = a.mad();
    b.take(&req);
    let (request, ..) = b.asked_rc();
    b.accept_rc(request);
    b.mad();
    a.cm.abandon_rc(ACTIVE, a.now);
    b.take(&a.mad());
    b.rejected_rc(PASSIVE);
    b.take(&req);
    assert_eq!(rejects(&mut b), Reason::STALE.0);
    b.has_no_connection();
}

#[test]
fn both_local_ends_lose_the_address() {
    for phase in 0..3 {
        let mut node = Node::at(A, options());
        node.serve_rc(A, 1);
        node.ask_rc(A, A, b"");
        let (request, ..) = node.asked_rc();
        if phase > 0 {
            node.accept_rc(request);
            node.replied_rc();
        }
        if phase > 1 {
            node.cm.establish_rc(ACTIVE, node.now).expect("a reply");
            node.established_rc();
        }
        node.set_addresses(&["192.0.2.77"], true, false);
        let mut ended = Vec::new();
        while let Some(event) = node.cm.poll_event() {
            ended.push(match event {
                CmEvent::Withdrawn { .. } => (phase == 0, PASSIVE),
                CmEvent::RcUnreachable { qp, .. } => (phase < 2, qp),
                CmEvent::RcDisconnected { qp } => (phase == 2, qp),
                other => panic!("{other:?}"),
            });
        }
        ended.sort();
        assert_eq!(ended, [(true, ACTIVE), (true, PASSIVE)], "{phase}");
        node.has_no_connection();
    }
    // A connection to another host remains.
    let (mut a, ..) = connected();
    a.set_addresses(&[], true, false);
    a.is_silent();
    assert!(a.cm.has_connection(ACTIVE));
}

/// Sends a request of `host`, with the number as IDs and QP.
fn forge(to: &mut Node, host: &str, number: u32, template: &connection::Request) {
    let host = ip(host);
    let request = connection::Request {
        exchange: Exchange { transaction: number.into(), id: number },
        qp: QpId(number),
        from: SocketAddr::new(host, 7),
        from_gid: Gid::from(host),
        ..template.clone()
    };
    to.take(&(host, ip(B), Box::new(request.emit())));
}

#[test]
fn hosts_share_the_undecided_requests() {
    let mut a = Node::at(A, options());
    a.ask_rc(A, B, b"");
    let template = request_of(&a.mad());
    // The backlog, the limit of the user and that of the daemon.
    for (backlog, of_user, of_all) in [(8, 100, 100), (100, 8, 100), (100, 100, 8)] {
        let mut b = Node::at(B, CmOptions { startups: of_all, ..options() });
        let startups_key = "limits.user.startups".into();
        let quota =
            Quota { user: 1000, startups: of_user, startups_key, accepts_per_second: 1_000_000 };
        b.cm.set_quota(SESSION, quota);
        b.serve_rc(B, backlog);
        for n in 1..=20 {
            forge(&mut b, "192.0.2.66", 100 + n, &template);
        }
        let flood: Vec<_> = (0..8).map(|_| b.asked_rc().0).collect();
        b.is_silent();
        for (n, first) in (1..=20).zip(&flood) {
            forge(&mut b, A, 200 + n, &template);
            if n <= 4 {
                // The oldest request of the flood is evicted.
                b.withdrawn(*first);
                b.asked_rc();
            }
        }
        // Now each host has half of the requests.
        forge(&mut b, "192.0.2.66", 300, &template);
        b.is_silent();
        // A third host gets its share from both.
        for n in 1..=3 {
            forge(&mut b, "192.0.2.5", 400 + n, &template);
        }
        let mut events = 0;
        while let Some(event) = b.cm.poll_event() {
            assert!(matches!(event, CmEvent::Withdrawn { .. } | CmEvent::RcRequest { .. }));
            events += 1;
        }
        assert_eq!((events, b.row().pending), (4, 8));
    }
}

#[test]
fn request_above_the_rate_evicts_none() {
    let mut a = Node::at(A, options());
    a.ask_rc(A, B, b"");
    let template = request_of(&a.mad());
    let mut b = Node::at(B, options());
    b.serve_rc(B, 8);
    for n in 1..=8 {
        forge(&mut b, "192.0.2.66", 100 + n, &template);
        b.asked_rc();
    }
    b.cm.set_options(CmOptions { peer_connections_per_second: 1, ..options() });
    forge(&mut b, A, 201, &template);
    assert!(matches!(b.cm.poll_event(), Some(CmEvent::Withdrawn { .. })));
    b.asked_rc();
    forge(&mut b, A, 202, &template);
    b.is_silent();
    assert_eq!(b.row().pending, 8);
}

#[test]
fn other_classes_are_answered_as_unsupported() {
    let mut b = Node::at(B, options());
    // A performance management Get.
    let mut get = Box::new([0; mad::LEN]);
    get[..4].copy_from_slice(&[1, 4, 1, 1]);
    b.take(&(ip(A), ip(B), get));
    let (from, to, answer) = b.mad();
    assert_eq!((from, to, &answer[..6]), (ip(B), ip(A), &[1, 4, 1, 0x81, 0, 0x0C][..]));
    // The answer of another host, an alternate path and its answer are ignored.
    b.take(&(ip(A), ip(B), answer));
    for attribute in [0x19, 0x1A] {
        let mut path = Box::new([0; mad::LEN]);
        path[..4].copy_from_slice(&[1, 7, 2, 3]);
        path[17] = attribute;
        b.take(&(ip(A), ip(B), path));
    }
    b.is_silent();
}
