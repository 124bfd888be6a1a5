//! RC and UC QPs: the layer above RDMAP that gives an iWARP stream the behaviour of a RoCE adapter.
//!
//! Such a QP has no stream before its peer connects and after its peer has left ([`streams`];
//! [`StreamPhase::Unlinked`](super::phase::StreamPhase::Unlinked)). The requests of an RC QP
//! complete when the peer has acknowledged them ([`acknowledge`](super::requester::acknowledge)). A
//! Terminate that blames a request determines the status of that request ([`terminate_blame`]). The
//! refusal of a request waits for the responses to earlier ones ([`refusal`]). Each end notifies
//! the other when a receive is missing ([`rnr`]). Time limits ([`clock`]) end the wait for a peer
//! that is absent, silent, or has no receive.

mod clock;
mod refusal;
mod rnr;
mod streams;
mod terminate_blame;
mod wait;

use std::net::IpAddr;

pub(super) use refusal::Refusal;
use wait::Wait;

use rnic_abi::abi::control::{Sending, Wiring};
use rnic_abi::types::{Access, Msn, QpState, Time};

/// Attributes and state of an RC or UC QP.
pub(super) struct RcState {
    /// Address of its peer.
    pub remote: IpAddr,
    /// Maximum number of the peer's requests that may await a response.
    ird: u16,
    min_rnr_timer: u8,
    /// Set from RTS on.
    sending: Option<Sending>,
    /// In SQD.
    drains: bool,
    /// The program was notified that the send queue has drained.
    drain_reported: bool,
    /// The peer has sent a message.
    has_received: bool,
    /// Limits of the peer, from the set-up of the stream; `None` before the first stream.
    peer: Option<PeerLimits>,
    /// The Send that the peer last reported as waiting for a receive.
    waited: Option<Msn>,
    /// A Send of this side waits for a receive at the other end.
    peer_waits: bool,
    /// The running time limit: its purpose and its end.
    clock: Option<(Wait, Time)>,
    /// In `Refusing`: ends the stream once the responses to earlier requests are sent.
    refusal: Option<Box<Refusal>>,
    /// Reason why there is no stream, for error texts.
    why: String,
}

/// Limits of the peer of an RC or UC QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerLimits {
    /// Maximum number of requests that may await its response.
    pub ird: u16,
    /// RNR NAK timer code: how long to wait for a receive of the peer before the next retry.
    pub min_rnr_timer: u8,
}

impl RcState {
    pub(super) fn new(wiring: &Wiring) -> Self {
        RcState {
            remote: wiring.remote.address(),
            ird: wiring.ird,
            min_rnr_timer: wiring.min_rnr_timer,
            sending: None,
            drains: false,
            drain_reported: false,
            has_received: false,
            peer: None,
            waited: None,
            peer_waits: false,
            clock: None,
            refusal: None,
            why: "its peer is not in RTR yet".to_owned(),
        }
    }

    /// Returns the QP state that applications see while the QP works.
    pub(super) fn state(&self) -> QpState {
        match (self.sending, self.drains) {
            (None, _) => QpState::Rtr,
            (Some(_), true) => QpState::Sqd,
            (Some(_), false) => QpState::Rts,
        }
    }

    /// Returns true if the QP has had a stream.
    pub(super) fn has_had_stream(&self) -> bool {
        self.peer.is_some()
    }

    /// Returns true if the QP may begin posted requests.
    pub(super) fn begins(&self) -> bool {
        self.state() == QpState::Rts
    }

    /// Returns the maximum number of requests that await a response: the minimum of the program's
    /// and the peer's limit. A peer limit of 0 counts as 1, so that the peer gets a request and
    /// refuses it.
    pub(super) fn ord(&self) -> u16 {
        let wanted = self.sending.map_or(0, |sending| sending.ord);
        self.peer.map_or(wanted, |peer| wanted.min(peer.ird.max(1)))
    }

    /// Returns true if the peer may have no Read or atomic operation outstanding.
    pub(super) fn takes_no_requests(&self) -> bool {
        self.ird == 0
    }
}

/// Rights of the peer of an iWARP or UD QP, which the QP does not limit.
pub(super) const ALL_RIGHTS: Access =
    Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);
