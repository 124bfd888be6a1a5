//! Connection and asynchronous events, sorted by the object they concern.
//!
//! The daemon sends all events of a session on one socket. A thread that blocks for one object, as
//! [`Qp::connect`](crate::Qp::connect) does, *claims* that object's events of the awaited kinds;
//! everything else waits, in order of arrival, for
//! [`Context::next_event`](crate::Context::next_event). What waits is bounded by the number of
//! objects: a new attempt to connect forgets the events of the last one, and an object that is
//! dropped takes its events along.

use std::collections::{BTreeMap, HashMap, VecDeque};

use rnic_core::abi::control::{DisconnectReason, Event};
use rnic_core::types::{CqId, ListenerId, QpId, RequestId, SrqId};

use crate::error::Error;

/// The object an event concerns.
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
            | Event::Resolved { qp, .. } => Subject::Qp(qp),
            Event::CqError { cq, .. } => Subject::Cq(cq),
            Event::SrqLimit { srq, .. }
            | Event::SrqError { srq, .. }
            | Event::SrqUnfair { srq, .. } => Subject::Srq(srq),
            Event::EventsLost { .. } | Event::Detached { .. } | Event::GidsChanged => {
                Subject::Session
            }
        }
    }
}

/// A kind of event that a thread can wait for.
pub(crate) type EventFilter = fn(&Event) -> bool;

/// A decision about an attempt to connect or accept.
pub(crate) fn settles_connection(event: &Event) -> bool {
    use Event::*;
    matches!(event, Established { .. } | Rejected { .. } | Unreachable { .. } | QpFatal { .. })
        || ends_connection(event)
}

/// An answer to the question which queue pair serves a port, or that there is none.
pub(crate) fn settles_resolution(event: &Event) -> bool {
    matches!(event, Event::Resolved { .. } | Event::Rejected { .. } | Event::Unreachable { .. })
}

/// The end of a connection.
pub(crate) fn ends_connection(event: &Event) -> bool {
    matches!(event, Event::Disconnected { .. })
}

/// What concerns the end of a connection: that, and the peer's half of it.
pub(crate) fn concerns_end(event: &Event) -> bool {
    matches!(event, Event::PeerClosed { .. } | Event::PeerClosing { .. }) || ends_connection(event)
}

/// A peer asks to connect.
pub(crate) fn asks_to_connect(event: &Event) -> bool {
    matches!(event, Event::ConnectionRequest { .. })
}

/// What becomes of a connection that was passed to be served: the request, or that none will come.
pub(crate) fn answers_passed(event: &Event) -> bool {
    asks_to_connect(event) || brings_no_request(event)
}

fn brings_no_request(event: &Event) -> bool {
    matches!(event, Event::RequestWithdrawn { request: RequestId(0), .. })
}

/// Events that nobody has taken yet.
#[derive(Default)]
pub(crate) struct Events {
    /// In order of arrival.
    waiting: BTreeMap<u64, Event>,
    /// Order number of the next event.
    next: u64,
    /// State of each object that exists and may have events.
    subjects: HashMap<Subject, SubjectState>,
    /// The program reads events itself, so notices that no blocking call takes are kept too.
    read_raw: bool,
}

/// What waits for one object.
#[derive(Default)]
struct SubjectState {
    /// Order numbers of its events.
    waiting: VecDeque<u64>,
    /// Kinds that blocked threads wait for.
    claims: Vec<EventFilter>,
    /// The peer has finished sending on the present connection.
    peer_closed: bool,
    /// How the last connection ended, if it has.
    ended: Option<DisconnectReason>,
}

/// How far a connection is from its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The peer has finished sending; we have not, as far as is known.
    PeerClosed,
    /// The connection has ended, for this reason.
    Ended(DisconnectReason),
}

impl Events {
    pub(crate) fn new() -> Self {
        let mut events = Events::default();
        events.open(Subject::Session);
        events
    }

    /// Decodes and sorts one packet of the event socket.
    pub(crate) fn sort(&mut self, packet: &[u8]) -> Result<(), Error> {
        let event = postcard::from_bytes(packet)
            .map_err(|e| Error::protocol(format!("an event did not decode: {e}")))?;
        self.push(event);
        Ok(())
    }

    /// Starts keeping events of an object.
    pub(crate) fn open(&mut self, subject: Subject) {
        self.subjects.insert(subject, SubjectState::default());
    }

    /// Forgets an object and its events.
    pub(crate) fn close(&mut self, subject: Subject) {
        let state = self.subjects.remove(&subject);
        for n in state.into_iter().flat_map(|m| m.waiting) {
            self.waiting.remove(&n);
        }
    }

    /// Forgets what a QP's earlier connection left behind: a new attempt begins.
    pub(crate) fn renew(&mut self, qp: QpId) {
        let Some(state) = self.subjects.get_mut(&Subject::Qp(qp)) else { return };
        (state.ended, state.peer_closed) = (None, false);
        let waiting = &mut self.waiting;
        state.waiting.retain(|n| match waiting.get(n) {
            Some(event) if settles_connection(event) || concerns_end(event) => {
                waiting.remove(n);
                false
            }
            kept => kept.is_some(),
        });
    }

    /// Reserves an object's events of this kind for the caller's thread.
    pub(crate) fn claim(&mut self, subject: Subject, kind: EventFilter) {
        if let Some(state) = self.subjects.get_mut(&subject) {
            state.claims.push(kind);
        }
    }

    /// Ends one reservation that [`claim`](Self::claim) made.
    pub(crate) fn unclaim(&mut self, subject: Subject, kind: EventFilter) {
        if let Some(state) = self.subjects.get_mut(&subject)
            && let Some(i) = state.claims.iter().position(|k| std::ptr::fn_addr_eq(*k, kind))
        {
            state.claims.swap_remove(i);
        }
    }

    /// The first event of this kind that waits for the object.
    pub(crate) fn take(&mut self, subject: Subject, kind: EventFilter) -> Option<Event> {
        let state = self.subjects.get_mut(&subject)?;
        let waiting = &self.waiting;
        let at = state.waiting.iter().position(|n| waiting.get(n).is_some_and(kind))?;
        let n = state.waiting.remove(at)?;
        self.waiting.remove(&n)
    }

    /// The first event that nobody has claimed.
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

    /// How the QP's last connection ended, as often as asked; or, once, that its peer has finished.
    /// Takes the events.
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
        // An event of an object that has been dropped meanwhile concerns nobody.
        let Some(state) = self.subjects.get_mut(&subject) else { return };
        match &event {
            Event::RequestWithdrawn { request, .. } if !brings_no_request(&event) => {
                let unread = state
                    .waiting
                    .iter()
                    .position(|n| self.waiting.get(n).is_some_and(|e| asks(e, *request)));
                if let Some(n) = unread.and_then(|at| state.waiting.remove(at)) {
                    // Nobody has seen the request: both vanish.
                    self.waiting.remove(&n);
                    return;
                }
                // Whoever holds the request learns it from `accept`; only a program that reads
                // events itself can make use of the notice.
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
            // A program that reads no events itself: the latest of each kind is enough.
            Event::SrqLimit { .. } | Event::SrqUnfair { .. } | Event::GidsChanged => {
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

fn asks(event: &Event, id: RequestId) -> bool {
    matches!(event, Event::ConnectionRequest { request, .. } if *request == id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    use rnic_core::types::AddressPair;

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
    fn raw_events_come_in_order_and_without_claimed_ones() {
        let mut e = events();
        e.push(request(1));
        e.push(disconnected());
        e.push(request(2));
        e.claim(Subject::Listener(LISTENER), asks_to_connect);
        assert_eq!(e.take_any(), Some(disconnected()));
        assert_eq!(e.take_any(), None);
        assert_eq!(e.take(Subject::Listener(LISTENER), asks_to_connect), Some(request(1)));
        e.unclaim(Subject::Listener(LISTENER), asks_to_connect);
        assert_eq!(e.take_any(), Some(request(2)));
    }

    #[test]
    fn a_request_withdrawn_unread_leaves_no_trace() {
        let mut e = events();
        e.push(request(1));
        e.push(request(2));
        e.push(withdrawn(1));
        assert_eq!(e.take_any(), Some(request(2)));
        e.push(withdrawn(2));
        assert_eq!(e.take_any(), Some(withdrawn(2)));
    }

    #[test]
    fn that_no_request_will_come_is_kept_for_whoever_awaits_one() {
        let mut e = events();
        e.push(withdrawn(0));
        assert_eq!(e.take(Subject::Listener(LISTENER), asks_to_connect), None);
        assert_eq!(e.take(Subject::Listener(LISTENER), answers_passed), Some(withdrawn(0)));
    }

    #[test]
    fn nothing_piles_up_for_a_program_that_reads_no_raw_events() {
        let mut e = events();
        for n in 1..=1000 {
            e.push(request(n));
            assert!(e.take(Subject::Listener(LISTENER), asks_to_connect).is_some());
            e.push(withdrawn(n));
            e.push(disconnected());
            assert_eq!(e.ending(QP), Some(Ending::Ended(DisconnectReason::Orderly)));
            e.push(Event::EventsLost { count: 1 });
        }
        assert_eq!(e.waiting.len(), 1);
        assert_eq!(e.take_any(), Some(Event::EventsLost { count: 1000 }));
    }

    #[test]
    fn the_end_of_a_connection_is_remembered_until_the_next_one() {
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
    fn that_the_peer_has_finished_is_told_once_and_not_after_the_end() {
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
    fn of_notices_about_a_shared_receive_queue_the_latest_is_kept() {
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
    fn bytes_that_are_no_event_are_the_daemons_fault() {
        assert!(matches!(events().sort(&[0xFF; 9]), Err(Error::Protocol(_))));
    }
}
