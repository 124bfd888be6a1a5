//! Service ID resolution (SIDR): which UD QP serves a port of `RDMA_PS_UDP`.
//!
//! The daemon manages this port space itself: its addresses are those of the device's ports, and no
//! kernel socket is bound to them. The [`client`] repeats its request until a reply arrives or its
//! deadline passes. The [`server`] remembers its replies, so a repeated request gets the same
//! reply. Between two ends in this daemon, messages are passed in memory. Others leave as
//! [`CmEvent::Management`] and arrive in
//! [`handle_management`](ConnectionManager::handle_management).

pub(super) mod client;
pub(super) mod server;

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::roce::sidr::{self, Exchange, Message};
use rnic_abi::types::{Gid, ListenerId, Time};
use rnic_core::engine::DatagramPort;

use super::{CmEvent, ConnectionManager, Slot};
use crate::rate::Buckets;

/// State shared by all resolutions.
#[derive(Debug)]
pub(super) struct Sidr {
    /// The device's ports.
    port: Arc<DatagramPort>,
    /// Addresses of 127.0.0.0/8 without a port of their own are aliases of 127.0.0.1.
    has_loopback: bool,
    /// Key of the transaction IDs. They are unpredictable, so only a host that sees a request can
    /// answer it.
    secret: RandomState,
    transactions: u64,
    /// The port chosen last for a bind or resolution without a port.
    last_port: u16,
    /// Slots of undecided requests by source address and exchange.
    undecided: HashMap<(IpAddr, Exchange), usize>,
    /// Listeners by port.
    pub(in crate::cm) listeners: BTreeSet<(u16, ListenerId)>,
    /// Rate of replies to other daemons without a program's decision.
    refusals: Buckets<()>,
}

impl Default for Sidr {
    fn default() -> Self {
        let port = DatagramPort { gids: Vec::new(), mtu: 0, udp: 0, direct: false };
        Sidr {
            port: Arc::new(port),
            has_loopback: false,
            secret: RandomState::new(),
            transactions: 0,
            last_port: LAST_PORT,
            undecided: HashMap::new(),
            listeners: BTreeSet::new(),
            refusals: Buckets::new(1, Duration::from_secs(1)),
        }
    }
}

impl Sidr {
    /// Returns true if messages between these addresses stay in this daemon. Aliases never appear
    /// in packets.
    fn stays_local(&self, from: IpAddr, to: IpAddr) -> bool {
        self.is_local(to) || self.is_alias(from)
    }

    /// Returns true if only this daemon sends messages from this address.
    fn is_local(&self, ip: IpAddr) -> bool {
        self.is_alias(ip) || self.port.direct && self.index_of(ip).is_some()
    }

    /// Returns the index of the device's GID for an address.
    fn index_of(&self, ip: IpAddr) -> Option<u16> {
        self.exact_index(self.port_of(ip))
    }

    /// Returns the address of the port that `ip` belongs to: 127.0.0.1 for an alias.
    fn port_of(&self, ip: IpAddr) -> IpAddr {
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
    fn first_of_family(&self, ip: IpAddr) -> Option<IpAddr> {
        let taken = self.port.gids.iter().filter(|gid| !gid.is_zero());
        let mut all = taken.map(|gid| gid.address());
        all.find(|own| own.is_ipv4() == ip.is_ipv4())
    }

    fn listeners_at(&self, port: u16) -> impl Iterator<Item = ListenerId> {
        let all = (port, ListenerId(0))..=(port, ListenerId(u32::MAX));
        self.listeners.range(all).map(|(_, id)| *id)
    }

    fn new_transaction(&mut self) -> u64 {
        self.transactions += 1;
        self.secret.hash_one(self.transactions)
    }

    /// Forgets a request that is decided or withdrawn.
    pub(super) fn forget(&mut self, from: IpAddr, exchange: Exchange) {
        self.undecided.remove(&(from, exchange));
    }
}

impl ConnectionManager {
    /// Sets the ports of the device. With `has_loopback` the port of 127.0.0.1 serves all of
    /// 127.0.0.0/8; otherwise other daemons of this host may use the rest.
    pub fn set_datagram_port(&mut self, port: &Arc<DatagramPort>, has_loopback: bool) {
        self.sidr.port = port.clone();
        self.sidr.has_loopback = has_loopback;
    }

    /// Handles a management datagram from another daemon. Ignores datagrams that are no SIDR
    /// messages or that claim to come from this daemon.
    pub fn handle_management(&mut self, from: IpAddr, to: IpAddr, mad: &sidr::Bytes, now: Time) {
        if !self.sidr.is_local(from) {
            self.message_arrived(from, to, mad, now);
        }
    }

    /// Sends a message, in memory or as an event.
    fn send_message(&mut self, from: IpAddr, to: IpAddr, message: sidr::Bytes, now: Time) {
        if self.sidr.stays_local(from, to) {
            self.message_arrived(from, to, &message, now);
        } else {
            let mad = Box::new(message);
            self.events.push_back(CmEvent::Management { from, to, mad });
        }
    }

    fn message_arrived(&mut self, from: IpAddr, to: IpAddr, message: &sidr::Bytes, now: Time) {
        match sidr::parse(message) {
            Ok(Message::Request(request)) => self.handle_request(from, to, &request, now),
            Ok(Message::Reply(reply)) => self.handle_reply(from, to, &reply),
            Err(fault) => tracing::debug!(%from, "a management datagram was dropped: {fault}"),
        }
    }

    /// Returns a port without a listener for UD QPs.
    fn free_port(&mut self) -> Option<u16> {
        for _ in FIRST_PORT..=LAST_PORT {
            let last = self.sidr.last_port;
            let next = if last == LAST_PORT { FIRST_PORT } else { last + 1 };
            self.sidr.last_port = next;
            if self.sidr.listeners_at(next).next().is_none() {
                return Some(next);
            }
        }
        None
    }

    /// Withdraws an undecided request that a client of this daemon sent.
    fn withdraw_local(&mut self, from: IpAddr, exchange: Exchange, why: &str) {
        if let Some(key) = self.sidr.undecided.get(&(from, exchange)).copied() {
            self.withdraw_sidr_request(key, why);
        }
    }

    /// Ends an undecided request without a reply.
    pub(super) fn withdraw_sidr_request(&mut self, key: usize, why: &str) {
        if let Some(Slot::SidrRequest(asked)) = self.remove(key) {
            self.withdraw(asked.listener, asked.request, why);
        }
    }
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Range of ports that the daemon chooses: the dynamic ports of IANA.
const FIRST_PORT: u16 = 49_152;
const LAST_PORT: u16 = u16::MAX;
