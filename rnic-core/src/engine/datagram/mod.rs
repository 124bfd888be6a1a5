//! UD QPs (`IBV_QPT_UD`; IBTA specification, volume 1, section 9.8.3). They have no stream, peer or
//! acknowledgements. Each request is a single packet to the QP that it addresses.
//!
//! As for streams, the [`requester`](super::requester) takes and reads the requests ([`send`]), and
//! the [`responder`](super::responder) places received datagrams ([`receive`]). A datagram to a
//! port of this daemon is delivered at once, because one engine owns all UD QPs. Other datagrams
//! are sent as RoCE v2 packets ([`roce`](rnic_abi::roce)).

mod arrivals;
mod delayed;
pub(super) mod in_flight;
mod receive;
mod send;
mod states;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;

use arrivals::{Drops, PendingDatagram};

use rnic_abi::roce::p_key::DEFAULT_P_KEY;
use rnic_abi::types::{Gid, QpState};

/// Configuration of a UD QP.
pub struct DatagramConfig {
    /// Q_Key that a received datagram must carry.
    pub q_key: u32,
    /// The device's ports.
    pub port: Arc<DatagramPort>,
    /// Rules for the addresses that the owner may exchange datagrams with.
    pub rules: Box<dyn DatagramRules>,
}

/// The ports of a device, as UD QPs see them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatagramPort {
    /// GID table.
    pub gids: Vec<Gid>,
    /// Bytes of data in a packet, at most [`MAX_DATA`](rnic_abi::roce::MAX_DATA).
    pub mtu: u32,
    /// UDP port, the same at all daemons.
    pub udp: u16,
    /// Deliver datagrams to a port of the device without a packet.
    pub direct: bool,
    /// GIDs of the table without a socket, which no packet can reach. Datagrams to them are always
    /// delivered so.
    pub internal: Vec<Gid>,
    /// Changes by fault rules.
    pub changes: PortChanges,
}

/// Changes of the ports of a device by fault rules, for one UD QP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortChanges {
    /// GIDs that no longer exist. Datagrams from and to them are lost.
    pub lost: Vec<Gid>,
    /// P_Key of the QP.
    pub p_key: u16,
}

impl Default for PortChanges {
    fn default() -> Self {
        PortChanges { lost: Vec::new(), p_key: DEFAULT_P_KEY }
    }
}

impl DatagramPort {
    /// Returns true if datagrams to this GID, and from it, need no packet.
    pub fn needs_no_packet(&self, gid: Gid) -> bool {
        self.gids.contains(&gid) && (self.direct || self.internal.contains(&gid))
    }
}

/// The administrator's datagram rules for one user.
pub trait DatagramRules: Send {
    /// Returns true if the user may send datagrams from address `from` of the device to `to`.
    fn may_send(&self, from: IpAddr, to: IpAddr) -> bool;
    /// Returns true if the user may receive datagrams at address `at` of the device.
    fn may_receive(&self, at: IpAddr) -> bool;
}

/// The part of a UD QP that other QPs do not have.
pub(super) struct Datagrams {
    q_key: u32,
    port: Arc<DatagramPort>,
    rules: Box<dyn DatagramRules>,
    /// PSN of the next packet; set from RTS on.
    psn: Option<u32>,
    /// In SQD.
    drains: bool,
    /// The program was notified that the send queue has drained.
    drain_reported: bool,
    /// Source and destination of the last datagram, which the rules allow.
    allowed: Option<(IpAddr, IpAddr)>,
    /// Datagrams that wait for a copier, oldest first.
    placing: VecDeque<PendingDatagram>,
    /// Reasons of lost datagrams already reported to the owner.
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
            drain_reported: false,
            allowed: None,
            placing: VecDeque::new(),
            drops: Drops::empty(),
        }
    }

    /// Returns the QP state that applications see while the QP works.
    pub(super) fn state(&self) -> QpState {
        match (self.psn, self.drains) {
            (None, _) => QpState::Rtr,
            (Some(_), true) => QpState::Sqd,
            (Some(_), false) => QpState::Rts,
        }
    }
}
