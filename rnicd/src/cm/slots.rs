//! Slots: one object per poll token, with its deadline and charge. Indices find the slots of a
//! session or listener without a scan of all slots.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use rnic_abi::types::{AddressPair, ListenerId, QpId, RequestId, SessionId, Time};
use rnic_core::stream::startup::{Initiator, Responder};

use super::connection::{RcConnection, RcRequest};
use super::sidr::{SidrRequest, SidrResolution};
use super::startups::Charge;
use super::tcp::active::Active;
use super::tcp::passive::Passive;
use super::tcp::rejected::{Closing, Returning};
use crate::socket::Socket;

/// The object of one token.
#[derive(Debug)]
pub(super) struct SlotEntry {
    pub(super) slot: Slot,
    pub(super) deadline: Option<Time>,
    /// Set while it holds a descriptor and no QP.
    pub(super) charge: Option<Charge>,
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
    RcRequest(Box<RcRequest>),
    Rc(Box<RcConnection>),
}

/// An undecided request inside this daemon.
#[derive(Debug)]
pub(super) struct Direct {
    /// Session of the initiator.
    pub(super) session: SessionId,
    pub(super) qp: QpId,
    pub(super) initiator: Initiator,
    pub(super) listener: ListenerId,
    pub(super) request: RequestId,
    pub(super) responder: Responder,
    /// Addresses as the initiator sees them.
    pub(super) addresses: AddressPair,
}

/// A query to a peer's daemon about a request.
#[derive(Debug)]
pub(super) struct RequestCheck {
    pub(super) request: RequestId,
    pub(super) active: Active,
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
    pub(super) fn add(&mut self, owner: K, key: usize) {
        self.0.entry(owner).or_default().insert(key);
    }

    pub(super) fn remove(&mut self, owner: &K, key: usize) {
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

impl Slot {
    pub(super) fn request(&self) -> Option<RequestId> {
        match self {
            Slot::Passive(p) => p.request(),
            Slot::Direct(d) => Some(d.request),
            Slot::SidrRequest(a) => Some(a.request),
            Slot::RcRequest(a) => Some(a.request),
            Slot::Listener { .. } | Slot::Active(_) | Slot::SidrResolution(_) => None,
            Slot::Closing(_) | Slot::Returning(_) | Slot::RequestCheck(_) | Slot::Rc(_) => None,
        }
    }

    pub(super) fn qp(&self) -> Option<QpId> {
        match self {
            Slot::Active(a) => Some(a.params.qp),
            Slot::Passive(p) => p.qp(),
            Slot::Direct(d) => Some(d.qp),
            Slot::SidrResolution(a) => Some(a.qp),
            Slot::Listener { .. } | Slot::SidrRequest(_) | Slot::RcRequest(_) => None,
            // The QP of `Rc` may also have a stream in start-up.
            Slot::Closing(_) | Slot::Returning(_) | Slot::RequestCheck(_) | Slot::Rc(_) => None,
        }
    }

    /// Returns the session that listens or connects.
    pub(super) fn session(&self) -> Option<SessionId> {
        match self {
            Slot::Active(a) => Some(a.params.session),
            Slot::Passive(p) => Some(p.session),
            Slot::Direct(d) => Some(d.session),
            Slot::Returning(r) => Some(r.session()),
            Slot::SidrResolution(a) => Some(a.session),
            Slot::SidrRequest(a) => Some(a.session),
            Slot::RcRequest(a) => Some(a.session),
            Slot::Rc(c) => Some(c.session),
            Slot::Listener { session, .. } => Some(*session),
            // A query ends with its request.
            Slot::Closing(_) | Slot::RequestCheck(_) => None,
        }
    }

    /// Returns the listener that received it.
    pub(super) fn listener(&self) -> Option<ListenerId> {
        match self {
            Slot::Passive(p) => Some(p.listener),
            Slot::Direct(d) => Some(d.listener),
            Slot::SidrRequest(a) => Some(a.listener),
            Slot::RcRequest(a) => Some(a.listener),
            Slot::Listener { .. } | Slot::Active(_) | Slot::SidrResolution(_) => None,
            Slot::Closing(_) | Slot::Returning(_) | Slot::RequestCheck(_) | Slot::Rc(_) => None,
        }
    }

    /// Returns the local and the peer's address of a connection of an RC or UC QP, or of a request
    /// for such a connection.
    pub(super) fn rc_addresses(&self) -> Option<(IpAddr, IpAddr)> {
        match self {
            Slot::Rc(c) => Some(c.ends()),
            Slot::RcRequest(asked) => Some(asked.ends()),
            _ => None,
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
            | Slot::SidrRequest(_)
            | Slot::RcRequest(_)
            | Slot::Rc(_) => None,
        }
    }
}
