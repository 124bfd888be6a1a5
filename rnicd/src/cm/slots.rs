//! Slots: one object per poll token, with its deadline and charge. Indices find the slots of a
//! session or listener without a scan of all slots.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use rnic_abi::types::{ListenerId, QpId, RequestId, SessionId, Time};

use super::ConnectionManager;
use super::active::Active;
use super::ask_back::RequestCheck;
use super::direct::Direct;
use super::passed::Returning;
use super::passive::{Closing, Passive};
use super::sidr::client::SidrResolution;
use super::sidr::server::SidrRequest;
use super::startups::{Charge, WaitsFor};
use crate::socket::Socket;

/// The object of one token.
#[derive(Debug)]
pub(super) struct SlotEntry {
    pub(super) slot: Slot,
    pub(super) deadline: Option<Time>,
    /// Set while it holds a descriptor and no QP.
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
    SidrResolution(Box<SidrResolution>),
    SidrRequest(Box<SidrRequest>),
    RequestCheck(Box<RequestCheck>),
}

/// Slots by owner.
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

    /// Returns the current slots of one owner.
    pub(super) fn of(&self, owner: &K) -> Vec<usize> {
        self.0.get(owner).into_iter().flatten().copied().collect()
    }
}

impl ConnectionManager {
    pub(super) fn insert(&mut self, slot: Slot) -> usize {
        let session = slot.session();
        let listener = slot.listener();
        let key = self.slots.insert(SlotEntry { slot, deadline: None, charge: None });
        if let Some(session) = session {
            self.of_session.add(session, key);
        }
        if let Some(listener) = listener {
            self.of_listener.add(listener, key);
        }
        key
    }

    /// Empties a slot and removes its deadline, charge, request and QP. Dropping a stream closes
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
        // Closing our descriptor does not deregister the socket if the client holds it too.
        if let Some(stream) = slot.stream().filter(|s| s.is_passed()) {
            self.deregister(stream);
        }
        if let Some(request) = slot.request() {
            self.requests.remove(&request);
            if let Some(check) = self.request_checks.remove(&request) {
                self.remove(check);
            }
        }
        if let Slot::RequestCheck(check) = &slot {
            self.request_checks.remove(&check.request);
        }
        if let Some(qp) = slot.qp() {
            self.qps.remove(&qp);
        }
        if let Slot::SidrRequest(asked) = &slot {
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

    /// Charges a session's user for a slot. Replaces an earlier charge.
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

    /// Removes the charge of a slot.
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
            Slot::SidrRequest(a) => Some(a.request),
            Slot::Listener { .. } | Slot::Active(_) | Slot::SidrResolution(_) => None,
            Slot::Closing(_) | Slot::Returning(_) | Slot::RequestCheck(_) => None,
        }
    }

    pub(super) fn qp(&self) -> Option<QpId> {
        match self {
            Slot::Active(a) => Some(a.params.qp),
            Slot::Passive(p) => p.qp(),
            Slot::Direct(d) => Some(d.qp),
            Slot::SidrResolution(a) => Some(a.qp),
            Slot::Listener { .. } | Slot::SidrRequest(_) => None,
            Slot::Closing(_) | Slot::Returning(_) | Slot::RequestCheck(_) => None,
        }
    }

    /// Returns the session that listens or connects.
    fn session(&self) -> Option<SessionId> {
        match self {
            Slot::Active(a) => Some(a.params.session),
            Slot::Passive(p) => Some(p.session),
            Slot::Direct(d) => Some(d.session),
            Slot::Returning(r) => Some(r.session()),
            Slot::SidrResolution(a) => Some(a.session),
            Slot::SidrRequest(a) => Some(a.session),
            Slot::Listener { session, .. } => Some(*session),
            // A query ends with its request.
            Slot::Closing(_) | Slot::RequestCheck(_) => None,
        }
    }

    /// Returns the listener that received it.
    fn listener(&self) -> Option<ListenerId> {
        match self {
            Slot::Passive(p) => Some(p.listener),
            Slot::Direct(d) => Some(d.listener),
            Slot::SidrRequest(a) => Some(a.listener),
            Slot::Listener { .. } | Slot::Active(_) | Slot::SidrResolution(_) => None,
            Slot::Closing(_) | Slot::Returning(_) | Slot::RequestCheck(_) => None,
        }
    }

    pub(super) fn stream(&self) -> Option<&Socket> {
        match self {
            Slot::Active(a) => Some(a.stream()),
            Slot::Passive(p) => Some(&p.stream),
            Slot::Closing(c) => Some(&c.stream),
            Slot::Returning(r) => Some(r.stream()),
            Slot::RequestCheck(q) => Some(q.active.stream()),
            Slot::Listener { .. }
            | Slot::Direct(_)
            | Slot::SidrResolution(_)
            | Slot::SidrRequest(_) => None,
        }
    }
}
