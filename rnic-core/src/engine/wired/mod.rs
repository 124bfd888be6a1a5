//! Queue pairs that are wired by hand: the layer above RDMAP that makes of an iWARP stream what
//! programs of a RoCE adapter expect.
//!
//! Such a queue pair lives without a stream, before its peer is there and after it has gone
//! ([`streams`]; [`StreamPhase::Unlinked`](super::phase::StreamPhase::Unlinked)). Its requests are
//! done when the peer has acknowledged them ([`acknowledge`](super::requester::acknowledge)); what
//! a Terminate says about one of them is its status ([`verdict`]); a refused request waits for the
//! responses to those before it ([`refusal`]); the ends tell each other when a
//! receive is missing ([`missing`]); and clocks ([`clock`]) end the wait for a peer that is not
//! there, has no receive or is silent. Everything else of the engine knows nothing of it.

mod clock;
mod missing;
mod refusal;
mod streams;
mod verdict;
mod wait;

use std::net::IpAddr;

pub(super) use refusal::Refusal;
use wait::Wait;

use crate::abi::control::{Sending, Wiring};
use crate::types::{Access, Msn, QpState, Time};

/// What a queue pair that is wired by hand has been told, and where it stands.
pub(super) struct Wired {
    /// Where its peer is.
    pub remote: IpAddr,
    /// There are no acknowledgements: what cannot be sent or taken in is lost.
    unreliable: bool,
    /// Requests of the peer's that may await a response.
    ird: u16,
    min_rnr_timer: u8,
    /// Known from Rts on.
    sending: Option<Sending>,
    /// In Sqd.
    drains: bool,
    /// The program was told that the send queue has drained.
    told_of_drain: bool,
    /// The program was told that the first message has come, or knows because it sends.
    communicates: bool,
    /// What the peer said when the stream came about; none before the first.
    peer: Option<PeerLimits>,
    /// The Send of which the peer has said last that it waits for a receive.
    waited: Option<Msn>,
    /// A Send of this side waits for a receive at the other end.
    peer_waits: bool,
    /// What a clock runs for, and when it runs out.
    clock: Option<(Wait, Time)>,
    /// In Refusing: what ends the stream once the responses to earlier requests are sent.
    refusal: Option<Box<Refusal>>,
    /// Why there is no stream, as a sentence for people.
    why: String,
}

/// What the peer of a queue pair that is wired by hand has said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerLimits {
    /// Requests that it may be sent without an answer.
    pub ird: u16,
    /// Code of the time to wait for a receive of its before one more try.
    pub min_rnr_timer: u8,
}

impl Wired {
    pub(super) fn new(wiring: &Wiring, unreliable: bool) -> Self {
        Wired {
            remote: wiring.remote.address(),
            unreliable,
            ird: wiring.ird,
            min_rnr_timer: wiring.min_rnr_timer,
            sending: None,
            drains: false,
            told_of_drain: false,
            communicates: false,
            peer: None,
            waited: None,
            peer_waits: false,
            clock: None,
            refusal: None,
            why: "its peer has not been wired to it".to_owned(),
        }
    }

    /// The state that applications see while it works.
    pub(super) fn state(&self) -> QpState {
        match (self.sending, self.drains) {
            (None, _) => QpState::Rtr,
            (Some(_), true) => QpState::Sqd,
            (Some(_), false) => QpState::Rts,
        }
    }

    /// Returns true for UC.
    pub(super) fn is_unreliable(&self) -> bool {
        self.unreliable
    }

    /// Whether requests that are posted are begun.
    pub(super) fn begins(&self) -> bool {
        self.state() == QpState::Rts
    }

    /// Requests that may await a response: as many as the program wants and the peer takes. A peer
    /// that takes none is sent one, and refuses it.
    pub(super) fn ord(&self) -> u16 {
        let wanted = self.sending.map_or(0, |sending| sending.ord);
        self.peer.map_or(wanted, |peer| wanted.min(peer.ird.max(1)))
    }

    /// Returns true if the peer may have no Read and no atomic operation outstanding.
    pub(super) fn takes_no_requests(&self) -> bool {
        self.ird == 0
    }
}

/// Rights of a peer that is not limited by its queue pair.
pub(super) const ALL_RIGHTS: Access =
    Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);
