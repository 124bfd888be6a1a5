//! The device's ports and their services: port spaces of rdma_cm on the RoCE device.
//!
//! The daemon manages these port spaces itself, for the addresses of the device's ports. No kernel
//! socket is bound to them.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::roce::PortSpace;
use rnic_abi::roce::mad::Exchange;
use rnic_abi::types::{Gid, ListenerId, Time};
use rnic_core::engine::DatagramPort;

use super::listener::Listener;
use crate::rate::{Buckets, host};

/// State shared by all services.
#[derive(Debug)]
pub(super) struct ServicePort {
    /// The device's ports.
    pub(super) port: Arc<DatagramPort>,
    /// Addresses of 127.0.0.0/8 without a port of their own are aliases of 127.0.0.1.
    pub(super) has_loopback: bool,
    /// Key of the transaction IDs. They are unpredictable, so only a host that sees a request can
    /// answer it.
    secret: RandomState,
    transactions: u64,
    /// The port chosen last for a bind or a request without a port.
    last_port: u16,
    /// Slots of undecided SIDR requests by source address and exchange.
    pub(super) undecided: HashMap<(IpAddr, Exchange), usize>,
    /// Listeners by port space and port.
    pub(super) listeners: BTreeSet<(PortSpace, u16, ListenerId)>,
    /// Rate of messages to other daemons without a program's decision.
    answers: Buckets<()>,
    /// Rate of these messages to one host.
    answers_to_host: Buckets<IpAddr>,
}

impl Default for ServicePort {
    fn default() -> Self {
        ServicePort {
            port: Arc::default(),
            has_loopback: false,
            secret: RandomState::new(),
            transactions: 0,
            last_port: LAST_PORT,
            undecided: HashMap::new(),
            listeners: BTreeSet::new(),
            answers: Buckets::new(1, Duration::from_secs(1)),
            answers_to_host: Buckets::new(HOSTS_REMEMBERED, Duration::from_secs(1)),
        }
    }
}

impl ServicePort {
    /// Returns true if messages between these addresses stay in this daemon. Aliases never appear
    /// in packets.
    pub(super) fn stays_local(&self, from: IpAddr, to: IpAddr) -> bool {
        self.is_local(to) || self.is_alias(from)
    }

    /// Returns true if only this daemon sends messages from this address.
    pub(super) fn is_local(&self, ip: IpAddr) -> bool {
        let has_port = || self.index_of(ip).is_some() && self.port.needs_no_packet(Gid::from(ip));
        self.is_alias(ip) || has_port()
    }

    /// Returns the index of the device's GID for an address.
    pub(super) fn index_of(&self, ip: IpAddr) -> Option<u16> {
        self.exact_index(self.port_of(ip))
    }

    /// Returns the address of the port that `ip` belongs to: 127.0.0.1 for an alias.
    pub(super) fn port_of(&self, ip: IpAddr) -> IpAddr {
        if self.is_alias(ip) { LOOPBACK } else { ip }
    }

    fn is_alias(&self, ip: IpAddr) -> bool {
        let loopback = self.has_loopback && ip.is_ipv4() && ip.is_loopback();
        loopback && self.exact_index(ip).is_none() && self.exact_index(LOOPBACK).is_some()
    }

    fn exact_index(&self, ip: IpAddr) -> Option<u16> {
        let wanted = Some(Gid::from(ip)).filter(|gid| !gid.is_zero())?;
        let at = self.port.gids.iter().position(|gid| *gid == wanted)?;
        u16::try_from(at).ok()
    }

    /// Returns the device's first address of the same family.
    pub(super) fn first_of_family(&self, ip: IpAddr) -> Option<IpAddr> {
        let taken = self.port.gids.iter().filter(|gid| !gid.is_zero());
        let mut all = taken.map(|gid| gid.address());
        all.find(|own| own.is_ipv4() == ip.is_ipv4())
    }

    /// Returns a port without a listener.
    pub(super) fn free_port(&mut self, space: PortSpace) -> Option<u16> {
        for _ in FIRST_PORT..=LAST_PORT {
            let last = self.last_port;
            let next = if last == LAST_PORT { FIRST_PORT } else { last + 1 };
            self.last_port = next;
            if self.listeners_at(space, next).next().is_none() {
                return Some(next);
            }
        }
        None
    }

    pub(super) fn forget_listener(&mut self, id: ListenerId, listener: &Listener) {
        if let Some(space) = listener.space() {
            self.listeners.remove(&(space, listener.address.port(), id));
        }
    }

    pub(super) fn listeners_at(
        &self,
        space: PortSpace,
        port: u16,
    ) -> impl Iterator<Item = ListenerId> {
        let all = (space, port, ListenerId(0))..=(space, port, ListenerId(u32::MAX));
        self.listeners.range(all).map(|(_, _, id)| *id)
    }

    pub(super) fn new_transaction(&mut self) -> u64 {
        self.transactions += 1;
        self.secret.hash_one(self.transactions)
    }

    /// Returns true if the daemon may send an answer that no program has decided. Answers to other
    /// daemons are rate-limited in total, so that the daemon does not amplify a flood, and per
    /// host, so that a flooding host does not consume all answers.
    pub(super) fn may_answer(&mut self, from: IpAddr, to: IpAddr, now: Time) -> bool {
        self.stays_local(from, to)
            || self.answers_to_host.take(host(to), ANSWERS_TO_HOST, now)
                && self.answers.take((), ANSWERS_PER_SECOND, now)
    }

    /// Forgets a request that is decided or withdrawn.
    pub(super) fn forget(&mut self, from: IpAddr, exchange: Exchange) {
        self.undecided.remove(&(from, exchange));
    }
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Range of ports that the daemon chooses from: IANA's dynamic ports.
const FIRST_PORT: u16 = 49_152;
const LAST_PORT: u16 = u16::MAX;
/// Maximum answers per second to other daemons that no program has decided.
const ANSWERS_PER_SECOND: u32 = 1000;
/// Maximum of these answers per second to one host.
const ANSWERS_TO_HOST: u32 = 200;
/// Number of hosts whose rate is known.
const HOSTS_REMEMBERED: usize = 1024;
