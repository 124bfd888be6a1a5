//! Undecided requests, resolutions, and the device's ports.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::roce::sidr::{self, Exchange, ServiceId};
use rnic_abi::types::{AddressPair, Gid, ListenerId, QpId, RequestId, SessionId, Time};
use rnic_core::engine::DatagramPort;

use crate::rate::Buckets;

/// State shared by all resolutions.
#[derive(Debug)]
pub(in crate::cm) struct Sidr {
    /// The device's ports.
    pub(super) port: Arc<DatagramPort>,
    /// Addresses of 127.0.0.0/8 without a port of their own are aliases of 127.0.0.1.
    pub(super) has_loopback: bool,
    /// Key of the transaction IDs. They are unpredictable, so only a host that sees a request can
    /// answer it.
    secret: RandomState,
    transactions: u64,
    /// The port chosen last for a bind or resolution without a port.
    pub(super) last_port: u16,
    /// Slots of undecided requests by source address and exchange.
    pub(super) undecided: HashMap<(IpAddr, Exchange), usize>,
    /// Listeners by port.
    pub(in crate::cm) listeners: BTreeSet<(u16, ListenerId)>,
    /// Rate of replies to other daemons without a program's decision.
    pub(super) refusals: Buckets<()>,
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
    pub(super) fn stays_local(&self, from: IpAddr, to: IpAddr) -> bool {
        self.is_local(to) || self.is_alias(from)
    }

    /// Returns true if only this daemon sends messages from this address.
    pub(super) fn is_local(&self, ip: IpAddr) -> bool {
        self.is_alias(ip) || self.port.direct && self.index_of(ip).is_some()
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

    pub(super) fn listeners_at(&self, port: u16) -> impl Iterator<Item = ListenerId> {
        let all = (port, ListenerId(0))..=(port, ListenerId(u32::MAX));
        self.listeners.range(all).map(|(_, id)| *id)
    }

    pub(super) fn new_transaction(&mut self) -> u64 {
        self.transactions += 1;
        self.secret.hash_one(self.transactions)
    }

    /// Forgets a request that is decided or withdrawn.
    pub(in crate::cm) fn forget(&mut self, from: IpAddr, exchange: Exchange) {
        self.undecided.remove(&(from, exchange));
    }
}

/// A resolution that waits for its reply.
#[derive(Debug)]
pub struct SidrResolution {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) qp: QpId,
    pub(super) exchange: Exchange,
    pub(super) addresses: AddressPair,
    /// Index of the source GID in the device's table.
    pub(super) source: u16,
    pub(super) request: Box<sidr::Bytes>,
    /// Pause after the next transmission.
    pub(super) pause: Duration,
    pub(super) until: Time,
}

/// A SIDR request that the program has not decided.
#[derive(Debug)]
pub struct SidrRequest {
    pub(in crate::cm) session: SessionId,
    pub(in crate::cm) listener: ListenerId,
    pub(in crate::cm) request: RequestId,
    pub(in crate::cm) from: IpAddr,
    pub(super) to: IpAddr,
    pub(in crate::cm) exchange: Exchange,
    pub(super) service: ServiceId,
}

/// Recent replies of a listener, for requesters whose reply was lost.
#[derive(Debug, Default)]
pub struct RecentReplies(VecDeque<Answer>);

#[derive(Debug)]
struct Answer {
    to: IpAddr,
    exchange: Exchange,
    reply: Box<sidr::Bytes>,
}

impl RecentReplies {
    pub(super) fn keep(&mut self, to: IpAddr, exchange: Exchange, reply: &sidr::Bytes) {
        if self.0.len() >= MAX_REPLIES {
            self.0.pop_front();
        }
        self.0.push_back(Answer { to, exchange, reply: Box::new(*reply) });
    }

    pub(super) fn find(&self, to: IpAddr, exchange: Exchange) -> Option<sidr::Bytes> {
        let answer = self.0.iter().find(|a| (a.to, a.exchange) == (to, exchange));
        answer.map(|answer| *answer.reply)
    }
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Range of ports that the daemon chooses from: IANA's dynamic ports.
pub(super) const FIRST_PORT: u16 = 49_152;
pub(super) const LAST_PORT: u16 = u16::MAX;
/// Maximum replies that a listener keeps.
const MAX_REPLIES: usize = 64;
