//! Connection events and the threads that wait for them.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use rnic_abi::abi::control::{DisconnectMode, Event, RequestBody};

use super::{PATIENCE, Rig, rig};
use crate::fake::Answer;
use crate::*;

fn addresses() -> AddressPair {
    AddressPair { local: ([127, 0, 0, 1], 1).into(), peer: ([127, 0, 0, 1], 2).into() }
}

fn peer() -> SocketAddr {
    addresses().peer
}

fn established(qp: QpId, ird: u16) -> Event {
    let private_data = qp.0.to_le_bytes().to_vec();
    Event::Established {
        qp,
        context: 0,
        addresses: addresses(),
        ird,
        ord: 4,
        private_data,
        revision: 2,
    }
}

fn asks(listener: ListenerId, request: u32) -> Event {
    Event::ConnectionRequest {
        listener,
        context: 0,
        request: RequestId(request),
        addresses: addresses(),
        peer_ird: Some(3),
        peer_ord: Some(4),
        revision: 2,
        peer_to_peer: true,
        private_data: vec![request as u8],
    }
}

fn ended(qp: QpId) -> Event {
    Event::Disconnected { qp, context: 0, reason: DisconnectReason::Orderly }
}

fn await_connect(r: &Rig, qp: QpId) {
    r.daemon.await_request(|b| matches!(b, RequestBody::Connect { qp: q, .. } if *q == qp));
}

#[test]
fn each_of_several_threads_gets_its_own_outcome() {
    let r = rig();
    let qps: Vec<_> = (0..4).map(|_| r.pd.create_qp(&QpOptions::new(&r.cq)).unwrap()).collect();
    let listener = r.context.listen("127.0.0.1:0", 8).unwrap();
    thread::scope(|scope| {
        let connecting: Vec<_> = qps
            .iter()
            .map(|qp| scope.spawn(|| qp.connect(peer(), &ConnectOptions::default())))
            .collect();
        let accepting = scope.spawn(|| listener.accept_request(Some(PATIENCE)));
        let ending = scope.spawn(|| r.qp.wait_disconnected(Some(PATIENCE)));
        for qp in &qps {
            await_connect(&r, qp.id());
        }
        // In a different order than requested.
        r.daemon.event(&Event::Unreachable {
            qp: qps[3].id(),
            context: 0,
            errno: 111,
            reason: "R".into(),
        });
        r.daemon.event(&asks(listener.id(), 77));
        r.daemon.event(&Event::Rejected { qp: qps[2].id(), context: 0, private_data: vec![9] });
        r.daemon.event(&ended(r.qp.id()));
        r.daemon.event(&established(qps[1].id(), 8));
        r.daemon.event(&Event::CqError { cq: r.cq.id(), context: 1 });
        r.daemon.event(&established(qps[0].id(), 7));
        let mut outcomes = connecting.into_iter().map(|t| t.join().unwrap());
        for (n, ird) in [(0, 7), (1, 8)] {
            let connected = outcomes.next().unwrap().unwrap();
            assert_eq!((connected.ird, connected.ord, connected.addresses), (ird, 4, addresses()));
            assert_eq!(connected.private_data, qps[n].id().0.to_le_bytes());
        }
        let rejected = outcomes.next().unwrap().unwrap_err();
        assert_eq!(rejected.fault(), Fault::Peer);
        assert!(matches!(rejected, Error::Rejected { private_data } if private_data == [9]));
        let failed = outcomes.next().unwrap().unwrap_err();
        assert!(matches!(failed, Error::Unreachable { reason } if reason == "R"));
        let request = accepting.join().unwrap().unwrap();
        assert_eq!((request.id(), request.private_data()), (RequestId(77), &[77][..]));
        assert_eq!(
            (request.peer(), request.peer_ird(), request.peer_ord()),
            (peer(), Some(3), Some(4))
        );
        assert_eq!((request.revision(), request.peer_to_peer()), (2, true));
        assert_eq!(ending.join().unwrap().unwrap(), DisconnectReason::Orderly);
        // Must come last: `next_event` may take events that a thread has not claimed yet.
        let event = r.context.next_event(Some(PATIENCE)).unwrap();
        assert_eq!(event, Some(Event::CqError { cq: r.cq.id(), context: 1 }));
    });
    // No event remains.
    assert_eq!(r.context.next_event(Some(Duration::ZERO)).unwrap(), None);
}

/// The daemon reuses QP numbers.
#[test]
fn events_of_destroyed_qp_skip_its_successor() {
    let Rig { daemon, context, pd, cq, qp } = rig();
    let id = qp.id();
    daemon.event(&ended(id));
    drop(qp);
    daemon.device().last_handle = id.0 - 1;
    let successor = pd.create_qp(&QpOptions::new(&cq)).unwrap();
    assert_eq!(successor.id(), id);
    assert_eq!(context.next_event(Some(Duration::ZERO)).unwrap(), None);
}

#[test]
fn a_connection_can_be_made_by_events_alone() {
    let r = rig();
    let listener = r.context.listen("127.0.0.1:0", 8).unwrap();
    r.daemon.event(&asks(listener.id(), 5));
    let event = r.context.next_event(None).unwrap().unwrap();
    let request = r.context.connection_request(event).ok().unwrap();
    assert_eq!(request.listener(), listener.id());
    request.start_accept(&r.qp, &AcceptOptions::default()).unwrap();
    r.daemon.event(&established(r.qp.id(), 1));
    let event = r.context.next_event(None).unwrap().unwrap();
    let event = r.context.connection_request(event).err().unwrap();
    assert_eq!(event, established(r.qp.id(), 1));
    r.daemon.event(&ended(r.qp.id()));
    assert_eq!(r.context.next_event(None).unwrap(), Some(ended(r.qp.id())));
    assert_eq!(r.qp.wait_disconnected(None).unwrap(), DisconnectReason::Orderly);
}

#[test]
fn accept_waits_for_establishment() {
    let r = rig();
    let listener = r.context.listen("127.0.0.1:0", 8).unwrap();
    r.daemon.event(&asks(listener.id(), 5));
    let request = listener.accept_request(None).unwrap();
    let options = AcceptOptions { private_data: vec![1, 2], ..AcceptOptions::default() };
    thread::scope(|scope| {
        let accepting = scope.spawn(|| request.accept(&r.qp, &options));
        r.daemon.await_request(
            |b| matches!(b, RequestBody::Accept { private_data, .. } if *private_data == [1, 2]),
        );
        r.daemon.event(&established(r.qp.id(), 1));
        assert_eq!(accepting.join().unwrap().unwrap().ird, 1);
    });
    let device = r.daemon.device();
    assert!(!device.requests.iter().any(|b| matches!(b, RequestBody::Reject { .. })));
    drop(device);
}

#[test]
fn a_peer_that_never_begins_ends_the_accept() {
    let r = rig();
    let listener = r.context.listen("127.0.0.1:0", 8).unwrap();
    r.daemon.event(&asks(listener.id(), 5));
    r.daemon.event(&ended(r.qp.id()));
    let request = listener.accept_request(None).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| request.accept(&r.qp, &AcceptOptions::default()));
        r.daemon.await_request(|b| matches!(b, RequestBody::Accept { .. }));
        let reason = DisconnectReason::Lost { why: "reset".into() };
        r.daemon.event(&Event::Disconnected { qp: r.qp.id(), context: 0, reason });
        let error = accepting.join().unwrap().unwrap_err();
        // The event of an earlier connection of this QP must not end this one.
        assert!(matches!(error, Error::Disconnected(DisconnectReason::Lost { .. })), "{error}");
    });
}

#[test]
fn a_request_left_undecided_is_rejected() {
    let r = rig();
    let listener = r.context.listen("127.0.0.1:0", 8).unwrap();
    r.daemon.event(&asks(listener.id(), 5));
    r.daemon.event(&asks(listener.id(), 6));
    r.daemon.event(&asks(listener.id(), 7));
    drop(listener.accept_request(None).unwrap());
    listener.accept_request(None).unwrap().reject(b"no").unwrap();
    let request = listener.accept_request(None).unwrap();
    let gone = Refusal::NoSuchObject { kind: "request".into(), handle: 7 };
    r.daemon.answer_next(Answer::Refuse(gone));
    let error = request.accept(&r.qp, &AcceptOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Refused { refusal: Refusal::NoSuchObject { .. }, .. }));
    let device = r.daemon.device();
    let rejected = device.requests.iter().filter_map(|b| match b {
        RequestBody::Reject { request, private_data } => Some((request.0, private_data.clone())),
        _ => None,
    });
    assert_eq!(rejected.collect::<Vec<_>>(), [(5, vec![]), (6, b"no".to_vec()), (7, vec![])]);
    drop(device);
}

#[test]
fn slow_connect_is_aborted() {
    let r = rig();
    let options =
        ConnectOptions { timeout: Some(Duration::from_millis(20)), ..ConnectOptions::default() };
    let error = r.qp.connect(peer(), &options).unwrap_err();
    assert!(matches!(error, Error::TimedOut { .. }));
    r.daemon.await_request(|b| {
        matches!(b, RequestBody::Disconnect { mode: DisconnectMode::Abort, .. })
    });
}

/// Returns a TCP connection of the program and its peer's end.
fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

#[test]
fn socket_returns_if_refused_or_rejected() {
    let options = ConnectOptions::default();
    let rejected = |qp| Event::Rejected { qp, context: 0, private_data: vec![] };
    let unreachable =
        |qp| Event::Unreachable { qp, context: 0, errno: 104, reason: "closed".into() };
    let cases: [(&dyn Fn(QpId) -> Event, bool); 2] = [(&rejected, true), (&unreachable, false)];
    for (event, comes_back) in cases {
        let r = rig();
        let (ours, _theirs) = tcp();
        let failed = thread::scope(|scope| {
            let connecting = scope.spawn(|| r.qp.connect_over(ours, &options));
            r.daemon.await_request(|b| matches!(b, RequestBody::ConnectOver { .. }));
            r.daemon.event(&event(r.qp.id()));
            connecting.join().unwrap().unwrap_err()
        });
        assert_eq!(failed.stream.is_some(), comes_back, "{failed}");
    }
    let refusal = Refusal::NotAllowed { rule: "user.sockets".into(), what: "a socket".into() };
    for (answer, comes_back) in [(Answer::Refuse(refusal), true), (Answer::HangUp, false)] {
        let r = rig();
        r.daemon.answer_next(answer);
        let failed = r.qp.connect_over(tcp().0, &options).unwrap_err();
        assert_eq!(failed.stream.is_some(), comes_back, "{failed}");
    }
}

#[test]
fn waits_time_out() {
    let r = rig();
    let listener = r.context.listen("127.0.0.1:0", 8).unwrap();
    let short = Some(Duration::from_millis(5));
    assert!(matches!(listener.accept_request(short), Err(Error::TimedOut { .. })));
    assert!(matches!(r.qp.wait_disconnected(short), Err(Error::TimedOut { .. })));
    assert_eq!(r.context.next_event(short).unwrap(), None);
}

#[test]
fn too_much_private_data_fails_locally() {
    let r = rig();
    let options = ConnectOptions { private_data: vec![0; 513], ..ConnectOptions::default() };
    let before = r.daemon.device().requests.len();
    let error = r.qp.connect(peer(), &options).unwrap_err();
    assert!(matches!(error, Error::PrivateDataTooLong { given: 513, max: 512 }));
    assert_eq!(r.daemon.device().requests.len(), before);
}

#[test]
fn wait_disconnected_answers_peer_close() {
    let r = rig();
    r.daemon.event(&Event::PeerClosed { qp: r.qp.id(), context: 0 });
    thread::scope(|scope| {
        let ending = scope.spawn(|| r.qp.wait_disconnected(Some(PATIENCE)));
        r.daemon.await_request(|b| {
            matches!(b, RequestBody::Disconnect { mode: DisconnectMode::Orderly, .. })
        });
        r.daemon.event(&ended(r.qp.id()));
        assert_eq!(ending.join().unwrap().unwrap(), DisconnectReason::Orderly);
    });
    assert_eq!(r.context.next_event(Some(Duration::ZERO)).unwrap(), None);
}

#[test]
fn a_refused_connect_waits_for_nothing() {
    let r = rig();
    let refusal = Refusal::NotAllowed { rule: "[[connect]]".into(), what: "127.0.0.1:2".into() };
    r.daemon.answer_next(Answer::Refuse(refusal));
    let error = r.qp.connect(peer(), &ConnectOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "refused: not allowed by [[connect]]: 127.0.0.1:2");
}

#[test]
fn event_waiters_see_daemon_gone() {
    let r = rig();
    let listener = r.context.listen("127.0.0.1:0", 8).unwrap();
    thread::scope(|scope| {
        let a = scope.spawn(|| listener.accept_request(None).err());
        let b = scope.spawn(|| r.qp.wait_disconnected(None).err());
        let c = scope.spawn(|| r.qp.connect(peer(), &ConnectOptions::default()).err());
        await_connect(&r, r.qp.id());
        r.daemon.hang_up();
        for thread in [a, b, c] {
            assert!(matches!(thread.join().unwrap(), Some(Error::DaemonGone)));
        }
    });
}

#[test]
fn context_and_teardown_requests_are_sent() {
    let r = rig();
    r.qp.set_context(5).unwrap();
    r.cq.set_context(6).unwrap();
    let listener = r.context.bind("127.0.0.1:0").unwrap();
    listener.set_context(7).unwrap();
    r.qp.disconnect().unwrap();
    r.qp.disconnect_within(Duration::from_secs(2)).unwrap();
    r.qp.abort().unwrap();
    r.qp.to_error().unwrap();
    let device = r.daemon.device();
    let contexts = device.requests.iter().filter_map(|b| match b {
        RequestBody::SetContext { context, .. } => Some(*context),
        _ => None,
    });
    assert_eq!(contexts.collect::<Vec<_>>(), [5, 6, 7]);
    let modes = device.requests.iter().filter_map(|b| match b {
        RequestBody::Disconnect { mode, .. } => Some(*mode),
        _ => None,
    });
    use DisconnectMode::{Abort, OrderlyWithin};
    let within = [30_000, 2000].map(|ms| OrderlyWithin { ms });
    assert_eq!(modes.collect::<Vec<_>>(), [within[0], within[1], Abort]);
    assert!(matches!(device.requests.last(), Some(RequestBody::QpToError { .. })));
    drop(device);
}
