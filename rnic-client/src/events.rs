//! Connection events and asynchronous events, by object.
//!
//! The daemon sends all events of a session on one socket. A thread that blocks for one object, as
//! [`Qp::connect`](crate::Qp::connect) does, *claims* that object's events of the awaited kinds.
//! All other events wait, in order of arrival, for
//! [`Context::next_event`](crate::Context::next_event). The number of waiting events is bounded by
//! the number of objects: a new connection attempt discards the events of the last one, and
//! dropping an object discards its events.

use std::collections::{BTreeMap, HashMap, VecDeque};

use rnic_abi::abi::control::{AsyncObject, DisconnectReason, Event};
use rnic_abi::types::{CqId, ListenerId, QpId, RequestId, SrqId};

use crate::error::Error;

/// The object of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Subject {
    Session,
    Qp(QpId),
    Cq(CqId),
    Srq(SrqId),
    Listener(ListenerId),
}

impl Subject {
    pub(crate) fn of(event: &Event) -> Self {
        match *event {
            Event::ConnectionRequest { listener, .. }
            | Event::RcRequest { listener, .. }
            | Event::RequestWithdrawn { listener, .. } => Subject::Listener(listener),
            Event::Established { qp, .. }
            | Event::Rejected { qp, .. }
            | Event::Unreachable { qp, .. }
            | Event::Disconnected { qp, .. }
            | Event::PeerClosed { qp, .. }
            | Event::PeerClosing { qp, .. }
            | Event::QpFatal { qp, .. } => Subject::Qp(qp),
            Event::LastWqeReached { qp, .. }
            | Event::CommunicationEstablished { qp, .. }
            | Event::SendQueueDrained { qp, .. }
            | Event::AccessError { qp, .. }
            | Event::RequestError { qp, .. }
            | Event::RcReply { qp, .. }
            | Event::RcRejected { qp, .. }
            | Event::DatagramLost { qp, .. }
            | Event::Resolved { qp, .. } => Subject::Qp(qp),
            Event::CqError { cq, .. } => Subject::Cq(cq),
            Event::SrqLimit { srq, .. }
            | Event::SrqError { srq, .. }
            | Event::SrqUnfair { srq, .. } => Subject::Srq(srq),
            Event::EventsLost { .. }
            | Event::ResolutionFailed { .. }
            | Event::Detached { .. }
            | Event::GidsChanged
            | Event::DevicesChanged
            | Event::DeviceRemoved { .. } => Subject::Session,
            Event::Async { ref object, .. } => match *object {
                AsyncObject::Device(_) => Subject::Session,
                AsyncObject::Qp(qp) => Subject::Qp(qp),
                AsyncObject::Cq(cq) => Subject::Cq(cq),
                AsyncObject::Srq(srq) => Subject::Srq(srq),
            },
        }
    }
}

/// A kind of event that a thread can wait for.
pub(crate) type EventFilter = fn(&Event) -> bool;

/// Returns true if the event is the outcome of a connection attempt or an accept.
pub(crate) fn settles_connection(event: &Event) -> bool {
    use Event::*;
    matches!(event, Established { .. } | Rejected { .. } | Unreachable { .. } | QpFatal { .. })
        || matches!(event, RcReply { .. } | RcRejected { .. })
        || ends_connection(event)
}

/// Returns true if the event is the outcome of a resolution ([`crate::resolution`]).
pub(crate) fn settles_resolution(event: &Event) -> bool {
    matches!(event, Event::Resolved { .. } | Event::Rejected { .. } | Event::Unreachable { .. })
}

/// Returns true if the event is the end of a connection.
pub(crate) fn ends_connection(event: &Event) -> bool {
    matches!(event, Event::Disconnected { .. })
}

/// Returns true if the event is the end of a connection or of the peer's half of it.
pub(crate) fn concerns_end(event: &Event) -> bool {
    matches!(event, Event::PeerClosed { .. } | Event::PeerClosing { .. }) || ends_connection(event)
}

/// Returns true if the event is a connection request.
pub(crate) fn is_connection_request(event: &Event) -> bool {
    matches!(event, Event::ConnectionRequest { .. } | Event::RcRequest { .. })
}

/// Returns true if the event ends the wait for a request on a connection that the program passed to
/// the daemon: the request, or the notice that none will follow.
pub(crate) fn settles_socket(event: &Event) -> bool {
    is_connection_request(event) || announces_no_request(event)
}

fn announces_no_request(event: &Event) -> bool {
    matches!(event, Event::RequestWithdrawn { request: RequestId(0), .. })
}

/// Events that have arrived and that no call has returned.
#[derive(Default)]
pub(crate) struct Events {
    /// Events, in order of arrival.
    waiting: BTreeMap<u64, Event>,
    /// Sequence number of the next event.
    next: u64,
    /// State of each object that exists and may have events.
    subjects: HashMap<Subject, SubjectState>,
    /// The program has called [`Events::take_any`]. Only then are withdrawals of taken requests
    /// kept.
    read_raw: bool,
}

/// Events and claims of one object.
#[derive(Default)]
struct SubjectState {
    /// Sequence numbers of its events.
    waiting: VecDeque<u64>,
    /// Kinds of events that blocked threads wait for.
    claims: Vec<EventFilter>,
    /// The peer has finished sending on the current connection.
    peer_closed: bool,
    /// Reason for the end of the last connection; `None` while it lasts.
    ended: Option<DisconnectReason>,
}

/// Stage of the end of a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The peer has finished sending. This end may still send.
    PeerClosed,
    /// The connection has ended for this reason.
    Ended(DisconnectReason),
}

impl Events {
    pub(crate) fn new() -> Self {
        let mut events = Events::default();
        events.open(Subject::Session);
        events
    }

    /// Decodes a packet from the event socket and stores its event.
    pub(crate) fn handle_packet(&mut self, packet: &[u8]) -> Result<(), Error> {
        let event = postcard::from_bytes(packet)
            .map_err(|e| Error::protocol(format!("cannot decode an event: {e}")))?;
        self.push(event);
        Ok(())
    }

    /// Starts keeping the events of an object.
    pub(crate) fn open(&mut self, subject: Subject) {
        self.subjects.insert(subject, SubjectState::default());
    }

    /// Removes an object and its events.
    pub(crate) fn close(&mut self, subject: Subject) {
        let state = self.subjects.remove(&subject);
        for n in state.into_iter().flat_map(|m| m.waiting) {
            self.waiting.remove(&n);
        }
    }

    /// Discards the state and events of a QP's last connection before a new attempt.
    pub(crate) fn renew(&mut self, qp: QpId) {
        let Some(state) = self.subjects.get_mut(&Subject::Qp(qp)) else { return };
        state.ended = None;
        state.peer_closed = false;
        let waiting = &mut self.waiting;
        state.waiting.retain(|n| match waiting.get(n) {
            // A fatal error concerns the QP itself. An RC QP may have failed before it connects.
            Some(Event::QpFatal { .. }) => true,
            Some(event) if settles_connection(event) || concerns_end(event) => {
                waiting.remove(n);
                false
            }
            kept => kept.is_some(),
        });
    }

    /// Reserves an object's events of this kind for the calling thread.
    pub(crate) fn claim(&mut self, subject: Subject, kind: EventFilter) {
        if let Some(state) = self.subjects.get_mut(&subject) {
            state.claims.push(kind);
        }
    }

    /// Ends one reservation made by [`claim`](Self::claim).
    pub(crate) fn unclaim(&mut self, subject: Subject, kind: EventFilter) {
        if let Some(state) = self.subjects.get_mut(&subject)
            && let Some(i) = state.claims.iter().position(|k| std::ptr::fn_addr_eq(*k, kind))
        {
            state.claims.swap_remove(i);
        }
    }

    /// Takes the first waiting event of this kind for the object.
    pub(crate) fn take(&mut self, subject: Subject, kind: EventFilter) -> Option<Event> {
        let state = self.subjects.get_mut(&subject)?;
        let waiting = &self.waiting;
        let at = state.waiting.iter().position(|n| waiting.get(n).is_some_and(kind))?;
        let n = state.waiting.remove(at)?;
        self.waiting.remove(&n)
    }

    /// Takes the first event that is not claimed.
    pub(crate) fn take_any(&mut self) -> Option<Event> {
        self.read_raw = true;
        let (n, subject) = self.waiting.iter().find_map(|(n, event)| {
            let subject = Subject::of(event);
            let claims = self.subjects.get(&subject).map_or(&[][..], |m| &m.claims);
            (!claims.iter().any(|kind| kind(event))).then_some((*n, subject))
        })?;
        if let Some(state) = self.subjects.get_mut(&subject) {
            state.waiting.retain(|m| *m != n);
        }
        self.waiting.remove(&n)
    }

    /// Removes the events about the end of a QP's connection. If it has ended, every call returns
    /// the reason. Otherwise, if the peer has finished sending, the first call returns
    /// `PeerClosed`.
    pub(crate) fn ending(&mut self, qp: QpId) -> Option<Ending> {
        while self.take(Subject::Qp(qp), concerns_end).is_some() {}
        let state = self.subjects.get_mut(&Subject::Qp(qp))?;
        if let Some(reason) = &state.ended {
            return Some(Ending::Ended(reason.clone()));
        }
        std::mem::take(&mut state.peer_closed).then_some(Ending::PeerClosed)
    }

    fn push(&mut self, event: Event) {
        let subject = Subject::of(&event);
        // Drops events of objects that no longer exist.
        let Some(state) = self.subjects.get_mut(&subject) else { return };
        match &event {
            Event::RequestWithdrawn { request, .. } if !announces_no_request(&event) => {
                let unread = state.waiting.iter().position(|n| {
                    self.waiting.get(n).is_some_and(|e| is_request_with(e, *request))
                });
                if let Some(n) = unread.and_then(|at| state.waiting.remove(at)) {
                    // The request is unread, so drop both.
                    self.waiting.remove(&n);
                    return;
                }
                // The holder of the request gets an error from `accept`. Only a program that reads
                // events itself needs this event.
                if !self.read_raw {
                    return;
                }
            }
            Event::EventsLost { count } => {
                let earlier = state.waiting.front().and_then(|n| self.waiting.get_mut(n));
                if let Some(Event::EventsLost { count: sum }) = earlier {
                    *sum = sum.saturating_add(*count);
                    return;
                }
            }
            // Keeps only the latest of each kind, because the program may not read events.
            Event::SrqLimit { .. }
            | Event::SrqUnfair { .. }
            | Event::GidsChanged
            | Event::DevicesChanged => {
                let same = |e: &Event| std::mem::discriminant(e) == std::mem::discriminant(&event);
                let waiting = &mut self.waiting;
                state.waiting.retain(|n| {
                    let kept = !waiting.get(n).is_some_and(same);
                    if !kept {
                        waiting.remove(n);
                    }
                    kept
                });
            }
            Event::Disconnected { reason, .. } => state.ended = Some(reason.clone()),
            Event::PeerClosed { .. } => state.peer_closed = true,
            _ => {}
        }
        state.waiting.push_back(self.next);
        self.waiting.insert(self.next, event);
        self.next += 1;
    }
}

fn is_request_with(event: &Event, id: RequestId) -> bool {
    let (Event::ConnectionRequest { request, .. } | Event::RcRequest { request, .. }) = event
    else {
        return false;
    };
    *request == id
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    use rnic_abi::types::AddressPair;

    const QP: QpId = QpId(7);
    const LISTENER: ListenerId = ListenerId(3);

    fn disconnected() -> Event {
        Event::Disconnected { qp: QP, context: 0, reason: DisconnectReason::Orderly }
    }

    fn request(n: u32) -> Event {
        let any: SocketAddr = ([127, 0, 0, 1], 1).into();
        Event::ConnectionRequest {
            listener: LISTENER,
            context: 0,
            request: RequestId(n),
            addresses: AddressPair { local: any, peer: any },
            peer_ird: None,
            peer_ord: None,
            revision: 1,
            peer_to_peer: false,
            private_data: vec![],
        }
    }

    fn withdrawn(n: u32) -> Event {
        Event::RequestWithdrawn {
            listener: LISTENER,
            context: 0,
            request: RequestId(n),
            reason: "gone".into(),
        }
    }

    fn events() -> Events {
        let mut e = Events::new();
        e.open(Subject::Qp(QP));
        e.open(Subject::Listener(LISTENER));
        e
    }

    #[test]
    fn raw_events_skip_claimed_ones() {
        let mut e = events();
        e.push(request(1));
        e.push(disconnected());
        e.push(request(2));
        e.claim(Subject::Listener(LISTENER), is_connection_request);
        assert_eq!(e.take_any(), Some(disconnected()));
        assert_eq!(e.take_any(), None);
        assert_eq!(e.take(Subject::Listener(LISTENER), is_connection_request), Some(request(1)));
        e.unclaim(Subject::Listener(LISTENER), is_connection_request);
        assert_eq!(e.take_any(), Some(request(2)));
    }

    #[test]
    fn unread_request_is_dropped_if_withdrawn() {
        let mut e = events();
        e.push(request(1));
        e.push(request(2));
        e.push(withdrawn(1));
        assert_eq!(e.take_any(), Some(request(2)));
        e.push(withdrawn(2));
        assert_eq!(e.take_any(), Some(withdrawn(2)));
    }

    #[test]
    fn notice_of_no_request_is_kept() {
        let mut e = events();
        e.push(withdrawn(0));
        assert_eq!(e.take(Subject::Listener(LISTENER), is_connection_request), None);
        assert_eq!(e.take(Subject::Listener(LISTENER), settles_socket), Some(withdrawn(0)));
    }

    #[test]
    fn unread_raw_events_do_not_accumulate() {
        let mut e = events();
        for n in 1..=1000 {
            e.push(request(n));
            assert!(e.take(Subject::Listener(LISTENER), is_connection_request).is_some());
            e.push(withdrawn(n));
            e.push(disconnected());
            assert_eq!(e.ending(QP), Some(Ending::Ended(DisconnectReason::Orderly)));
            e.push(Event::EventsLost { count: 1 });
        }
        assert_eq!(e.waiting.len(), 1);
        assert_eq!(e.take_any(), Some(Event::EventsLost { count: 1000 }));
    }

    #[test]
    fn end_is_remembered_until_next_connection() {
        let mut e = events();
        e.push(disconnected());
        assert_eq!(e.take_any(), Some(disconnected()));
        for _ in 0..2 {
            assert_eq!(e.ending(QP), Some(Ending::Ended(DisconnectReason::Orderly)));
        }
        e.renew(QP);
        assert_eq!(e.ending(QP), None);
    }

    #[test]
    fn peer_closed_is_reported_once() {
        let peer_closed = || Event::PeerClosed { qp: QP, context: 0 };
        let mut e = events();
        e.push(peer_closed());
        assert_eq!(e.ending(QP), Some(Ending::PeerClosed));
        assert_eq!(e.ending(QP), None);
        e.push(peer_closed());
        e.push(disconnected());
        assert_eq!(e.ending(QP), Some(Ending::Ended(DisconnectReason::Orderly)));
        assert!(e.waiting.is_empty());
        e.push(peer_closed());
        e.renew(QP);
        assert_eq!((e.ending(QP), e.take_any()), (None, None));
    }

    #[test]
    fn latest_srq_notice_is_kept() {
        let srq = SrqId(4);
        let unfair = |taken| Event::SrqUnfair { srq, context: 0, qp: QP, taken, of_last: 64 };
        let mut e = events();
        e.open(Subject::Srq(srq));
        for n in 0..100 {
            e.push(Event::SrqLimit { srq, context: n });
            e.push(unfair(n as u32));
        }
        assert_eq!(e.waiting.len(), 2);
        assert_eq!(e.take_any(), Some(Event::SrqLimit { srq, context: 99 }));
        assert_eq!(e.take_any(), Some(unfair(99)));
        e.close(Subject::Srq(srq));
        e.push(unfair(1));
        assert_eq!(e.take_any(), None);
    }

    #[test]
    fn a_dropped_object_takes_its_events_along() {
        let mut e = events();
        e.push(disconnected());
        e.close(Subject::Qp(QP));
        e.push(disconnected());
        assert_eq!(e.take_any(), None);
        assert!(e.waiting.is_empty());
    }

    #[test]
    fn a_new_attempt_forgets_the_last_one() {
        let mut e = events();
        e.push(Event::Rejected { qp: QP, context: 0, private_data: vec![] });
        e.renew(QP);
        assert_eq!(e.take(Subject::Qp(QP), settles_connection), None);
    }

    #[test]
    fn invalid_events_are_protocol_errors() {
        assert!(matches!(events().handle_packet(&[0xFF; 9]), Err(Error::Protocol(_))));
    }
}
