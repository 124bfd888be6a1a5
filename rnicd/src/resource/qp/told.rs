//! What queue pairs that are wired by hand have been told, by their programs and by peers.

use rnic_core::abi::control::{Sending, Wiring};
use rnic_core::stream::introduction::Introduction;
use rnic_core::types::*;

use super::rejection::{path_mtus_differ, psns_differ};

/// What a queue pair that is wired by hand has been told.
pub struct Wired {
    pub wiring: Wiring,
    /// It has no acknowledgements.
    pub unreliable: bool,
    /// Known from Rts on.
    pub sending: Option<Sending>,
    /// It begins no request (Sqd).
    pub drains: bool,
    /// Its stream, if it has one or is about to.
    pub stream: Option<WiredStream>,
    /// How often it has dialled for it, and in vain before.
    pub tries: u32,
    /// What its peer at another daemon has said.
    pub peer: Option<Introduction>,
    /// The diagnosis has named a request in the peer's name that was not confirmed, since the last
    /// stream.
    pub has_unconfirmed: bool,
}

impl Wired {
    /// What it was told to be.
    pub fn state(&self) -> QpState {
        match (self.sending, self.drains) {
            (None, _) => QpState::Rtr,
            (Some(_), true) => QpState::Sqd,
            (Some(_), false) => QpState::Rts,
        }
    }
}

/// What a queue pair of datagrams has been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToldDatagrams {
    pub state: QpState,
    pub q_key: u32,
}

/// The stream of a queue pair that is wired by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WiredStream {
    /// The direct path to a queue pair of this daemon.
    Direct,
    /// It dials another daemon, with this number until that daemon has asked for it.
    Dialling { number: Option<u64> },
    /// It has accepted a request of another daemon.
    Accepting,
    /// TCP to another daemon.
    Tcp,
}

impl Wired {
    /// Compares path MTU and PSNs, as far as they are known, with those of a peer at another
    /// daemon; an error is the reason why the two do not match.
    pub(super) fn compare_far(&self) -> Result<(), String> {
        let Some(peer) = self.peer else { return Ok(()) };
        let other = format!("queue pair {}", peer.qp);
        let awaited = self.wiring.rq_psn;
        match (self.sending, peer.sq_psn) {
            _ if peer.path_mtu != self.wiring.path_mtu => {
                Err(path_mtus_differ(self.wiring.path_mtu, peer.qp, peer.path_mtu))
            }
            (Some(own), _) if own.sq_psn != peer.rq_psn => {
                Err(psns_differ("this side", own.sq_psn, &other, peer.rq_psn))
            }
            (_, Some(sends)) if sends != awaited => {
                Err(psns_differ(&other, sends, "this side", awaited))
            }
            _ => Ok(()),
        }
    }
}
