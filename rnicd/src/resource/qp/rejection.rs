//! Why a queue pair that is wired by hand, or its daemon, does not take up with who asks for it.

use rnic_core::types::{Gid, QpId};

/// Why a request is rejected, in one byte of Private Data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    Malformed = 1,
    NoQueuePair = 2,
    OtherPeer = 3,
    OtherGid = 4,
    InError = 5,
    Psn = 6,
    Busy = 7,
    Crowded = 8,
    Guesser = 9,
    OtherType = 10,
}

impl Rejection {
    const ALL: [Rejection; 10] = [
        Rejection::Malformed,
        Rejection::NoQueuePair,
        Rejection::OtherPeer,
        Rejection::OtherGid,
        Rejection::InError,
        Rejection::Psn,
        Rejection::Busy,
        Rejection::Crowded,
        Rejection::Guesser,
        Rejection::OtherType,
    ];

    pub(super) fn private_data(self) -> Vec<u8> {
        [MAGIC, &[self as u8]].concat()
    }

    /// What a rejection of the peer's daemon means for the one that dialled.
    pub(super) fn explain(private_data: &[u8], peer: QpId, gid: Gid) -> String {
        let code = private_data.strip_prefix(MAGIC).and_then(|rest| rest.first());
        let found = Rejection::ALL.into_iter().find(|r| Some(&(*r as u8)) == code);
        match found {
            Some(rejection) => rejection.of(peer, gid),
            None => {
                format!("queue pair {peer} at {gid}: the daemon there rejects it without a reason")
            }
        }
    }

    /// What it means for the one that wants to reach this queue pair.
    pub(super) fn of(self, peer: QpId, gid: Gid) -> String {
        let what = match self {
            Rejection::Malformed => "the daemon there does not understand the request",
            Rejection::NoQueuePair => "there is no such queue pair that is wired by hand",
            Rejection::OtherPeer => "it is wired to another one, not to this one",
            Rejection::OtherGid => {
                "it is reached by another GID, or this side claims a GID from which it does not come"
            }
            Rejection::InError => "it is in Error",
            Rejection::Psn => {
                "PSNs differ: it sends from another (sq_psn) than this side awaits (rq_psn), or the \
                 other way round"
            }
            Rejection::Busy => "it has not left its last stream yet",
            Rejection::Crowded => "too many others wait for it to be wired (RTR)",
            Rejection::OtherType => {
                "it is of another type: one is reliable (RC), the other not (UC)"
            }
            Rejection::Guesser => {
                "too many wrong STags were named between the two hosts in this minute \
                 (limits.peer.stag_guesses_per_minute)"
            }
        };
        format!("queue pair {peer} at {gid}: {what}")
    }
}

/// What Private Data of a rejection begin with.
const MAGIC: &[u8] = b"RNWD\x01";
