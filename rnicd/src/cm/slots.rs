//! What stands behind the tokens: one slot each, with its deadline, its charge, and the indices by
//! which a session's or a listener's are found without looking at anybody else's.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use rnic_core::types::{ListenerId, QpId, RequestId, SessionId, Time};

use super::ConnectionManager;
use super::active::Active;
use super::ask_back::Question;
use super::direct::Direct;
use super::passed::Returning;
use super::passive::{Closing, Passive};
use super::sidr::asked::Asked;
use super::sidr::asking::Asking;
use super::startups::{Charge, WaitsFor};
use crate::socket::Socket;

/// What stands behind one token.
#[derive(Debug)]
pub(super) struct SlotEntry {
    pub(super) slot: Slot,
    pub(super) deadline: Option<Time>,
    /// While it holds a descriptor and no QP.
    charge: Option<Charge>,
}

#[derive(Debug)]
pub(super) enum Slot {
    Listener { id: ListenerId, session: SessionId },
    Active(Box<Active>),
    Passive(Box<Passive>),
    Direct(Box<Direct>),
    Closing(Closing),
    Returning(Returning),
    Asking(Box<Asking>),
    Asked(Box<Asked>),
    Question(Box<Question>),
}

/// Slots by what they belong to.
#[derive(Debug)]
pub(super) struct Index<K>(HashMap<K, BTreeSet<usize>>);

impl<K> Default for Index<K> {
    fn default() -> Self {
        Index(HashMap::new())
    }
}

impl<K: Eq + Hash> Index<K> {
    fn add(&mut self, owner: K, key: usize) {
        self.0.entry(owner).or_default().insert(key);
    }

    fn remove(&mut self, owner: &K, key: usize) {
        if let Some(keys) = self.0.get_mut(owner) {
            keys.remove(&key);
            if keys.is_empty() {
                self.0.remove(owner);
            }
        }
    }

    /// Those of one owner, as they are now.
    pub(super) fn of(&self, owner: &K) -> Vec<usize> {
        self.0.get(owner).into_iter().flatten().copied().collect()
    }
}

impl ConnectionManager {
    pub(super) fn insert(&mut self, slot: Slot) -> usize {
        let (session, listener) = (slot.session(), slot.listener());
        let key = self.slots.insert(SlotEntry { slot, deadline: None, charge: None });
        if let Some(session) = session {
            self.of_session.add(session, key);
        }
        if let Some(listener) = listener {
            self.of_listener.add(listener, key);
        }
        key
    }

    /// Empties a slot and forgets its deadline, charge, request and QP. Dropping a stream closes
    /// it.
    pub(super) fn remove(&mut self, key: usize) -> Option<Slot> {
        self.set_deadline(key, None);
        self.credit(key);
        let slot = self.slots.try_remove(key)?.slot;
        if let Some(session) = slot.session() {
            self.of_session.remove(&session, key);
        }
        if let Some(listener) = slot.listener() {
            self.of_listener.remove(&listener, key);
        }
        // Closing our descriptor would not take it out of the poll if the client holds one as well.
        if let Some(stream) = slot.stream().filter(|s| s.is_passed()) {
            self.deregister(stream);
        }
        if let Some(request) = slot.request() {
            self.requests.remove(&request);
            if let Some(question) = self.questions.remove(&request) {
                self.remove(question);
            }
        }
        if let Slot::Question(question) = &slot {
            self.questions.remove(&question.request);
        }
        if let Some(qp) = slot.qp() {
            self.qps.remove(&qp);
        }
        if let Slot::Asked(asked) = &slot {
            self.sidr.forget(asked.from, asked.exchange);
        }
        Some(slot)
    }

    /// Replaces a slot's deadline.
    pub(super) fn set_deadline(&mut self, key: usize, at: Option<Time>) {
        let Some(entry) = self.slots.get_mut(key) else { return };
        if let Some(old) = entry.deadline {
            self.deadlines.remove(old, key);
        }
        entry.deadline = at;
        if let Some(at) = at {
            self.deadlines.insert(at, key);
        }
    }

    /// Charges a session's user for a slot from now on.
    pub(super) fn charge(
        &mut self,
        key: usize,
        session: SessionId,
        peer: IpAddr,
        awaits: WaitsFor,
    ) {
        self.credit(key);
        let user = self.quotas.user(session);
        if let Some(entry) = self.slots.get_mut(key) {
            entry.charge = Some(self.startups.charge(user, peer, awaits, key));
        }
    }

    /// Charges nobody for a slot any more.
    pub(super) fn credit(&mut self, key: usize) {
        if let Some(charge) = self.slots.get_mut(key).and_then(|entry| entry.charge.take()) {
            self.startups.credit(charge);
        }
    }
}

impl Slot {
    pub(super) fn request(&self) -> Option<RequestId> {
        match self {
            Slot::Passive(p) => p.request(),
            Slot::Direct(d) => Some(d.request),
            Slot::Asked(a) => Some(a.request),
            Slot::Listener { .. } | Slot::Active(_) | Slot::Asking(_) => None,
            Slot::Closing(_) | Slot::Returning(_) | Slot::Question(_) => None,
        }
    }

    pub(super) fn qp(&self) -> Option<QpId> {
        match self {
            Slot::Active(a) => Some(a.params.qp),
            Slot::Passive(p) => p.qp(),
            Slot::Direct(d) => Some(d.qp),
            Slot::Asking(a) => Some(a.qp),
            Slot::Listener { .. } | Slot::Asked(_) => None,
            Slot::Closing(_) | Slot::Returning(_) | Slot::Question(_) => None,
        }
    }

    /// The session that it belongs to, as one that listens or as one that connects.
    fn session(&self) -> Option<SessionId> {
        match self {
            Slot::Active(a) => Some(a.params.session),
            Slot::Passive(p) => Some(p.session),
            Slot::Direct(d) => Some(d.session),
            Slot::Returning(r) => Some(r.session()),
            Slot::Asking(a) => Some(a.session),
            Slot::Asked(a) => Some(a.session),
            Slot::Listener { session, .. } => Some(*session),
            // A question ends with its request.
            Slot::Closing(_) | Slot::Question(_) => None,
        }
    }

    /// The listener that it came to.
    fn listener(&self) -> Option<ListenerId> {
        match self {
            Slot::Passive(p) => Some(p.listener),
            Slot::Direct(d) => Some(d.listener),
            Slot::Asked(a) => Some(a.listener),
            Slot::Listener { .. } | Slot::Active(_) | Slot::Asking(_) => None,
            Slot::Closing(_) | Slot::Returning(_) | Slot::Question(_) => None,
        }
    }

    pub(super) fn stream(&self) -> Option<&Socket> {
        match self {
            Slot::Active(a) => Some(a.stream()),
            Slot::Passive(p) => Some(&p.stream),
            Slot::Closing(c) => Some(&c.stream),
            Slot::Returning(r) => Some(r.stream()),
            Slot::Question(q) => Some(q.active.stream()),
            Slot::Listener { .. } | Slot::Direct(_) | Slot::Asking(_) | Slot::Asked(_) => None,
        }
    }
}
