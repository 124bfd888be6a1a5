//! Attributes of RC, UC and UD QPs, set by the program or received from the peer.

use rnic_abi::abi::control::{Sending, Wiring};
use rnic_abi::types::*;
use rnic_core::stream::introduction::Introduction;

use super::rejection::{path_mtus_differ, psns_differ};

/// Attributes and stream of an RC or UC QP in Rtr or later.
pub struct RcAttr {
    pub wiring: Wiring,
    /// True for a UC QP.
    pub unreliable: bool,
    /// `None` until Rts.
    pub sending: Option<Sending>,
    /// The QP starts no new requests (Sqd).
    pub drains: bool,
    /// Current or pending stream.
    pub stream: Option<RcStream>,
    /// Number of attempts to connect since the last stream was established, including the attempt
    /// that established it.
    pub tries: u32,
    /// Introduction that the peer sent. `None` if the peer is at this daemon.
    pub peer: Option<Introduction>,
    /// The diagnosis has reported an unconfirmed request in the peer's name since the last stream
    /// was established.
    pub unconfirmed_reported: bool,
}

impl RcAttr {
    /// Returns the attributes of a QP that enters Rtr.
    pub(super) fn new(wiring: Wiring, unreliable: bool) -> Self {
        RcAttr {
            wiring,
            unreliable,
            sending: None,
            drains: false,
            stream: None,
            tries: 0,
            peer: None,
            unconfirmed_reported: false,
        }
    }

    /// Returns the requested state.
    pub fn state(&self) -> QpState {
        match (self.sending, self.drains) {
            (None, _) => QpState::Rtr,
            (Some(_), true) => QpState::Sqd,
            (Some(_), false) => QpState::Rts,
        }
    }
}

/// Requested state and Q_Key of a UD QP in Rtr or later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdAttr {
    pub state: QpState,
    pub q_key: u32,
}

/// Stream of an RC or UC QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RcStream {
    /// Direct path to a QP of this daemon.
    Direct,
    /// Connecting to another daemon. `number` identifies the attempt until that daemon has verified
    /// it.
    Connecting { number: Option<u64> },
    /// Accepting a request from another daemon.
    Accepting,
    /// TCP connection to another daemon.
    Tcp,
}

impl RcAttr {
    /// Returns true if the QP has a stream, and this QP is its peer.
    pub(super) fn is_linked_with(&self, remote: Gid, remote_qp: QpId) -> bool {
        let is_peer = (self.wiring.remote, self.wiring.remote_qp) == (remote, remote_qp);
        is_peer && matches!(self.stream, Some(RcStream::Direct | RcStream::Tcp))
    }

    /// Compares path MTU and PSNs, as far as known, with those of a peer at another daemon. The
    /// error is the reason why they do not match.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_links_a_qp_with_its_peer_only() {
        let remote = Gid([7; 16]);
        let wiring = Wiring {
            local: Gid([6; 16]),
            remote,
            remote_qp: QpId(5),
            rq_psn: 0,
            path_mtu: 1024,
            min_rnr_timer: 0,
            ird: 0,
            rights: Access::REMOTE_WRITE,
        };
        let mut rc = RcAttr::new(wiring, false);
        for (stream, linked) in [
            (None, false),
            (Some(RcStream::Connecting { number: None }), false),
            (Some(RcStream::Accepting), false),
            (Some(RcStream::Direct), true),
            (Some(RcStream::Tcp), true),
        ] {
            rc.stream = stream;
            assert_eq!(rc.is_linked_with(remote, QpId(5)), linked, "{stream:?}");
            assert!(!rc.is_linked_with(remote, QpId(4)));
            assert!(!rc.is_linked_with(Gid([6; 16]), QpId(5)));
        }
    }
}
