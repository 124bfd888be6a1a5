//! Queue pairs of datagrams (`IBV_QPT_UD` of a RoCE adapter; IBTA specification, volume 1, section
//! 9.8.3): no stream, no peer, no acknowledgement. Each request is one packet to the queue pair
//! that it names.
//!
//! Requests are taken and read by the same [`requester`](super::requester) as those of streams
//! ([`send`]), and what comes is placed by the same [`responder`](super::responder) ([`receive`]).
//! A datagram to a port of this daemon is handed over at once, because one engine has all queue
//! pairs of datagrams; any other leaves as a packet of RoCE v2 ([`roce`](crate::roce)).

mod arrivals;
mod receive;
mod send;
mod states;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use arrivals::{Drops, Placing};

use crate::types::{Gid, QpState};

/// What a queue pair of datagrams has to know.
pub struct DatagramConfig {
    /// What datagrams for it must have.
    pub q_key: u32,
    /// The device's ports.
    pub port: Arc<DatagramPort>,
    /// Who its owner may exchange datagrams with.
    pub rules: Box<dyn DatagramRules>,
}

/// The ports of a device, as far as datagrams are concerned.
#[derive(Clone, Debug)]
pub struct DatagramPort {
    /// The table of GIDs.
    pub gids: Vec<Gid>,
    /// Bytes of data in a packet, at most [`MAX_DATA`](crate::roce::MAX_DATA).
    pub mtu: u32,
    /// Port of UDP, here and at other daemons.
    pub udp: u16,
    /// Datagrams to a port of the device are handed over without a packet.
    pub direct: bool,
}

/// What the administrator's rules say of one user.
pub trait DatagramRules: Send {
    /// Whether datagrams may be sent from one address, which is the device's, to another.
    fn may_send(&self, from: IpAddr, to: IpAddr) -> bool;
    /// Whether they may be received at an address.
    fn may_receive(&self, at: IpAddr) -> bool;
}

/// A queue pair of datagrams, besides what every queue pair has.
pub(super) struct Datagrams {
    q_key: u32,
    port: Arc<DatagramPort>,
    rules: Box<dyn DatagramRules>,
    /// Number of the next packet; known from Rts on.
    psn: Option<u32>,
    /// In Sqd.
    drains: bool,
    /// The program was told that the send queue has drained.
    told_of_drain: bool,
    /// Where the last datagram went, which the rules allow.
    allowed: Option<(IpAddr, IpAddr)>,
    /// Datagrams that a copier is writing, oldest first.
    placing: VecDeque<Placing>,
    /// What the owner has been told of that was dropped.
    drops: Drops,
}

impl Datagrams {
    pub(super) fn new(config: DatagramConfig) -> Self {
        let DatagramConfig { q_key, port, rules } = config;
        Datagrams {
            q_key,
            port,
            rules,
            psn: None,
            drains: false,
            told_of_drain: false,
            allowed: None,
            placing: VecDeque::new(),
            drops: Drops::empty(),
        }
    }

    /// The state that applications see while it works.
    pub(super) fn state(&self) -> QpState {
        match (self.psn, self.drains) {
            (None, _) => QpState::Rtr,
            (Some(_), true) => QpState::Sqd,
            (Some(_), false) => QpState::Rts,
        }
    }
}
