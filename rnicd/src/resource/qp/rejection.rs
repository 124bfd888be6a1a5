//! Reasons why an RC or UC QP, or its daemon, rejects a request.

use rnic_abi::types::{Gid, QpId};

/// Reason for a rejection, sent in the Private Data as a code byte, for some reasons with a PSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    Malformed,
    NoQueuePair,
    OtherPeer,
    OtherGid,
    InError,
    /// The `sq_psn` of the requested QP differs from the sender's `rq_psn`, which the rejection
    /// returns. It does not disclose the QP's own value.
    Psn {
        awaited: u32,
    },
    /// The `rq_psn` of the requested QP differs from the sender's `sq_psn`, which the rejection
    /// returns. It does not disclose the QP's own value.
    OwnPsn {
        sends: u32,
    },
    Busy,
    TooManyHeld,
    StagGuesses,
    OtherType,
    /// The daemon at the sender's GID has not confirmed the request.
    NotConfirmed,
    /// The request is for another daemon on this host.
    OtherDaemon,
    Draining,
    /// The path MTUs of the two ends differ. The rejection contains neither.
    PathMtu,
    /// The rules of the rejecting daemon no longer allow this connection.
    Forbidden,
}

impl Rejection {
    pub(super) fn private_data(self) -> Vec<u8> {
        match self {
            Rejection::Psn { awaited } => with_number(PSN, awaited),
            Rejection::OwnPsn { sends } => with_number(OWN_PSN, sends),
            _ => {
                let code = CODES.iter().find(|(_, rejection)| *rejection == self);
                [MAGIC, &[code.map_or(0, |(code, _)| *code)]].concat()
            }
        }
    }

    /// Parses Private Data and ignores trailing bytes, which later versions may add.
    fn parse(private_data: &[u8]) -> Option<Self> {
        let (&code, rest) = private_data.strip_prefix(MAGIC)?.split_first()?;
        match code {
            PSN => Some(Rejection::Psn { awaited: number(rest)? }),
            OWN_PSN => Some(Rejection::OwnPsn { sends: number(rest)? }),
            _ => CODES.iter().find(|(known, _)| *known == code).map(|(_, rejection)| *rejection),
        }
    }

    /// Describes a rejection by the peer's daemon, for the diagnosis of the QP that connected.
    pub(super) fn explain(private_data: &[u8], peer: QpId, gid: Gid) -> String {
        match Rejection::parse(private_data) {
            Some(rejection) => rejection.of(peer, gid),
            None => {
                format!("queue pair {peer} at {gid}: rejected by the daemon there, reason unknown")
            }
        }
    }

    /// Describes the reason, for the diagnosis of the QP that wants to reach `peer`.
    pub(super) fn of(self, peer: QpId, gid: Gid) -> String {
        let what = match self {
            Rejection::Malformed => "the daemon there does not understand the request",
            Rejection::NoQueuePair => "there is no RC/UC QP with this number",
            Rejection::OtherPeer => "it has another peer",
            Rejection::OtherGid => {
                "its GID differs, or this request does not come from the GID that it claims"
            }
            Rejection::InError => "it is in Error",
            Rejection::Psn { awaited } => {
                return format!(
                    "PSNs differ: this side expects {awaited} (rq_psn), but queue pair {peer} \
                     starts with a different PSN (sq_psn)"
                );
            }
            Rejection::OwnPsn { sends } => {
                return format!(
                    "PSNs differ: this side starts with {sends} (sq_psn), but queue pair {peer} \
                     expects a different PSN (rq_psn)"
                );
            }
            Rejection::Busy => "its previous stream has not ended yet",
            Rejection::TooManyHeld => "too many requests wait for it to be in RTR",
            Rejection::OtherType => "its type differs: one end is RC, the other UC",
            Rejection::PathMtu => "its path MTU differs from this side's (path_mtu; wired.compare)",
            Rejection::NotConfirmed => {
                "the daemon there tried to verify this request at wired.port of this host, but got \
                 no confirmation: this daemon must be bound to that port, and that host must be \
                 able to reach it"
            }
            Rejection::OtherDaemon => {
                "another daemon on this host has wired.port, so this daemon cannot reach its own \
                 queue pairs by TCP"
            }
            Rejection::Forbidden => {
                "the rules of the daemon there do not allow the connection ([[listen]], [[connect]], \
                 user.host_loopback)"
            }
            Rejection::Draining => "the daemon there is draining",
            Rejection::StagGuesses => {
                "too many invalid STags between the two hosts within a minute \
                 (limits.peer.stag_guesses_per_minute)"
            }
        };
        format!("queue pair {peer} at {gid}: {what}")
    }
}

/// Describes a mismatch between the `sq_psn` of one end and the `rq_psn` of the other.
pub(super) fn psns_differ(from: &str, sends: u32, to: &str, awaited: u32) -> String {
    format!("PSNs differ: {from} starts with {sends} (sq_psn), but {to} expects {awaited} (rq_psn)")
}

/// Describes a mismatch of the path MTUs of the two ends.
pub(super) fn path_mtus_differ(own: u16, peer: QpId, theirs: u16) -> String {
    format!(
        "path MTUs differ: this side has {own} bytes (path_mtu), queue pair {peer} has {theirs} \
         (wired.compare)"
    )
}

fn with_number(code: u8, number: u32) -> Vec<u8> {
    [MAGIC, &[code], &number.to_be_bytes()].concat()
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().copied().map(u32::from_be_bytes)
}

/// Prefix of a rejection's Private Data.
const MAGIC: &[u8] = b"RNWD\x02";
/// Codes of reasons without a number.
const CODES: [(u8, Rejection); 14] = [
    (1, Rejection::Malformed),
    (2, Rejection::NoQueuePair),
    (3, Rejection::OtherPeer),
    (4, Rejection::OtherGid),
    (5, Rejection::InError),
    (7, Rejection::Busy),
    (8, Rejection::TooManyHeld),
    (9, Rejection::StagGuesses),
    (10, Rejection::OtherType),
    (12, Rejection::NotConfirmed),
    (13, Rejection::OtherDaemon),
    (14, Rejection::Draining),
    (15, Rejection::PathMtu),
    (16, Rejection::Forbidden),
];
// Codes followed by a PSN.
const PSN: u8 = 6;
const OWN_PSN: u8 = 11;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejections_round_trip() {
        for code in 1..=16 {
            let data = [MAGIC, &[code], &8_u32.to_be_bytes()].concat();
            let found = Rejection::parse(&data).unwrap();
            let written = found.private_data();
            assert_eq!(written[..], data[..written.len()]);
            assert_eq!(Rejection::parse(&written), Some(found));
            for short in 0..written.len() {
                assert_eq!(Rejection::parse(&written[..short]), None, "{found:?}");
            }
        }
        // The sender knows this number. The rejecting end's own number is not disclosed.
        assert_eq!(Rejection::Psn { awaited: 9 }.private_data(), b"RNWD\x02\x06\0\0\0\x09");
        assert_eq!(Rejection::OwnPsn { sends: 8 }.private_data(), b"RNWD\x02\x0B\0\0\0\x08");
        let text = Rejection::Psn { awaited: 9 }.of(QpId(5), Gid([0; 16]));
        assert!(text.contains("this side expects 9 (rq_psn), but queue pair 5"), "{text}");
        let text = Rejection::OwnPsn { sends: 8 }.of(QpId(5), Gid([0; 16]));
        assert!(text.contains("this side starts with 8 (sq_psn), but queue pair 5"), "{text}");
    }
}
