//! Service ID resolution ("SIDR"): which queue pair of datagrams serves a port of `RDMA_PS_UDP`.
//!
//! That port space is the daemon's own: its addresses are those of the device's ports, and no
//! socket of the kernel is bound to them. Who asks ([`asking`]) sends a message until there is a
//! reply or its time is over; who is asked ([`asked`]) remembers what it has answered, so that the
//! message that comes once more finds the same answer. Between two ends of this daemon the same
//! messages are handed over in memory; others leave as [`CmEvent::Management`] and come by
//! [`handle_management`](ConnectionManager::handle_management).

pub(super) mod asked;
pub(super) mod asking;

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use rnic_core::engine::DatagramPort;
use rnic_core::roce::sidr::{self, Exchange, Message};
use rnic_core::types::{Gid, ListenerId, Time};

use super::{CmEvent, ConnectionManager, Slot};
use crate::rate::Buckets;

/// What resolutions have in common.
#[derive(Debug)]
pub(super) struct Sidr {
    /// The device's ports.
    port: Arc<DatagramPort>,
    /// Addresses of 127.0.0.0/8 that are no port's are aliases of 127.0.0.1.
    has_loopback: bool,
    /// With it the numbers of transactions are drawn: nobody who does not see a request can answer
    /// it.
    secret: RandomState,
    drawn: u64,
    /// The port that was chosen last for who named none.
    last_port: u16,
    /// Slots of the requests that are not decided, by who sent them.
    undecided: HashMap<(IpAddr, Exchange), usize>,
    /// Listeners by port.
    pub(in crate::cm) listeners: BTreeSet<(u16, ListenerId)>,
    /// How often others are told no without anybody having been asked.
    unheard: Buckets<()>,
}

impl Default for Sidr {
    fn default() -> Self {
        let port = DatagramPort { gids: Vec::new(), mtu: 0, udp: 0, direct: false };
        Sidr {
            port: Arc::new(port),
            has_loopback: false,
            secret: RandomState::new(),
            drawn: 0,
            last_port: LAST_PORT,
            undecided: HashMap::new(),
            listeners: BTreeSet::new(),
            unheard: Buckets::new(1, Duration::from_secs(1)),
        }
    }
}

impl Sidr {
    /// Returns true if messages between these addresses stay in this daemon. No packet has the
    /// address of an alias.
    fn stay_here(&self, from: IpAddr, to: IpAddr) -> bool {
        self.is_near(to) || self.is_alias(from)
    }

    /// Returns true if messages of this address come from this daemon alone.
    fn is_near(&self, ip: IpAddr) -> bool {
        self.is_alias(ip) || self.port.direct && self.index_of(ip).is_some()
    }

    /// The index of the device's GID of this address.
    fn index_of(&self, ip: IpAddr) -> Option<u16> {
        self.exact_index(self.port_of(ip))
    }

    /// The address of the port that has this address: another one for an alias.
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

    /// The device's first address of a family.
    fn first_like(&self, ip: IpAddr) -> Option<IpAddr> {
        let taken = self.port.gids.iter().filter(|gid| !gid.is_zero());
        let mut all = taken.map(|gid| gid.address());
        all.find(|own| own.is_ipv4() == ip.is_ipv4())
    }

    fn listeners_at(&self, port: u16) -> impl Iterator<Item = ListenerId> {
        let all = (port, ListenerId(0))..=(port, ListenerId(u32::MAX));
        self.listeners.range(all).map(|(_, id)| *id)
    }

    fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.secret.hash_one(self.drawn)
    }

    /// A request is decided, or gone.
    pub(super) fn forget(&mut self, from: IpAddr, exchange: Exchange) {
        self.undecided.remove(&(from, exchange));
    }
}

impl ConnectionManager {
    /// Resolves service IDs at these ports from now on. With `has_loopback` the port of 127.0.0.1
    /// has all of 127.0.0.0/8; without, other daemons of this host may have the rest.
    pub fn set_datagram_port(&mut self, port: &Arc<DatagramPort>, has_loopback: bool) {
        self.sidr.port = port.clone();
        self.sidr.has_loopback = has_loopback;
    }

    /// A management datagram has come from another daemon. What is no message of this kind, and
    /// what claims to be of this daemon, is nobody's.
    pub fn handle_management(&mut self, from: IpAddr, to: IpAddr, mad: &sidr::Bytes, now: Time) {
        if !self.sidr.is_near(from) {
            self.message_arrived(from, to, mad, now);
        }
    }

    /// Takes a message to where it goes.
    fn send_message(&mut self, from: IpAddr, to: IpAddr, message: sidr::Bytes, now: Time) {
        match self.sidr.stay_here(from, to) {
            true => self.message_arrived(from, to, &message, now),
            false => {
                let mad = Box::new(message);
                self.events.push_back(CmEvent::Management { from, to, mad });
            }
        }
    }

    fn message_arrived(&mut self, from: IpAddr, to: IpAddr, message: &sidr::Bytes, now: Time) {
        match sidr::parse(message) {
            Ok(Message::Request(request)) => self.was_asked(from, to, &request, now),
            Ok(Message::Reply(reply)) => self.was_answered(from, to, &reply),
            Err(fault) => tracing::debug!(%from, "a management datagram was dropped: {fault}"),
        }
    }

    /// A port that no listener of datagrams has.
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

    /// Ends what an undecided request of this daemon's own is about, if it is undecided still.
    fn withdraw_near(&mut self, from: IpAddr, exchange: Exchange, why: &str) {
        if let Some(key) = self.sidr.undecided.get(&(from, exchange)).copied() {
            self.withdraw_asked(key, why);
        }
    }

    /// Ends an undecided request without an answer.
    pub(super) fn withdraw_asked(&mut self, key: usize, why: &str) {
        if let Some(Slot::Asked(asked)) = self.remove(key) {
            self.withdraw(asked.listener, asked.request, why);
        }
    }
}

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Ports for who names none: those that IANA gives to nobody.
const FIRST_PORT: u16 = 49_152;
const LAST_PORT: u16 = u16::MAX;
