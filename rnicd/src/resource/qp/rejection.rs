//! Why a queue pair that is wired by hand, or its daemon, does not take up with who asks for it.

use rnic_core::types::{Gid, QpId};

/// Why a request is rejected, in a byte of Private Data and what that needs behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    Malformed,
    NoQueuePair,
    OtherPeer,
    OtherGid,
    InError,
    /// The one that is asked for does not send from the PSN that the one that asks awaits. The
    /// rejection repeats only the number that the latter has said.
    Psn {
        awaited: u32,
    },
    /// The one that asks does not send from the PSN that the one that is asked for awaits,
    /// likewise.
    OwnPsn {
        sends: u32,
    },
    Busy,
    Crowded,
    Guesser,
    OtherType,
    /// The daemon at the GID of the asker has not confirmed the request.
    NotConfirmed,
    /// The request is meant for another daemon of this host.
    OtherDaemon,
    Draining,
    /// The numbers stay with the end that rejects.
    PathMtu,
    /// The rules of the daemon that is asked do not allow this connection any more.
    Forbidden,
}

impl Rejection {
    pub(super) fn private_data(self) -> Vec<u8> {
        let code = match self {
            Rejection::Malformed => 1,
            Rejection::NoQueuePair => 2,
            Rejection::OtherPeer => 3,
            Rejection::OtherGid => 4,
            Rejection::InError => 5,
            Rejection::Psn { awaited } => return with_number(PSN, awaited),
            Rejection::OwnPsn { sends } => return with_number(OWN_PSN, sends),
            Rejection::Busy => 7,
            Rejection::Crowded => 8,
            Rejection::Guesser => 9,
            Rejection::OtherType => 10,
            Rejection::NotConfirmed => 12,
            Rejection::OtherDaemon => 13,
            Rejection::Draining => 14,
            Rejection::PathMtu => 15,
            Rejection::Forbidden => 16,
        };
        [MAGIC, &[code]].concat()
    }

    /// From Private Data; what follows them is of later versions. None if they are none of it.
    fn parse(private_data: &[u8]) -> Option<Self> {
        let (code, rest) = private_data.strip_prefix(MAGIC)?.split_first()?;
        Some(match code {
            1 => Rejection::Malformed,
            2 => Rejection::NoQueuePair,
            3 => Rejection::OtherPeer,
            4 => Rejection::OtherGid,
            5 => Rejection::InError,
            &PSN => Rejection::Psn { awaited: number(rest)? },
            &OWN_PSN => Rejection::OwnPsn { sends: number(rest)? },
            7 => Rejection::Busy,
            8 => Rejection::Crowded,
            9 => Rejection::Guesser,
            10 => Rejection::OtherType,
            12 => Rejection::NotConfirmed,
            13 => Rejection::OtherDaemon,
            14 => Rejection::Draining,
            15 => Rejection::PathMtu,
            16 => Rejection::Forbidden,
            _ => return None,
        })
    }

    /// What a rejection of the peer's daemon means for the one that dialled.
    pub(super) fn explain(private_data: &[u8], peer: QpId, gid: Gid) -> String {
        match Rejection::parse(private_data) {
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
            Rejection::Psn { awaited } => {
                return format!(
                    "PSNs differ: this side awaits {awaited} (rq_psn), queue pair {peer} would send \
                     from another one on (sq_psn)"
                );
            }
            Rejection::OwnPsn { sends } => {
                return format!(
                    "PSNs differ: this side would send from {sends} on (sq_psn), queue pair {peer} \
                     awaits another one (rq_psn)"
                );
            }
            Rejection::Busy => "it has not left its last stream yet",
            Rejection::Crowded => "too many others wait for it to be wired (RTR)",
            Rejection::OtherType => {
                "it is of another type: one is reliable (RC), the other not (UC)"
            }
            Rejection::PathMtu => "its path MTU differs from this side's (path_mtu; wired.compare)",
            Rejection::NotConfirmed => {
                "the daemon there has asked the daemon at wired.port of this end's address whether \
                 it began this request, and got no confirmation: is that port this daemon's, and \
                 can that host reach it?"
            }
            Rejection::OtherDaemon => {
                "another daemon of this host has wired.port, so this daemon cannot reach its own \
                 queue pairs by TCP"
            }
            Rejection::Forbidden => {
                "the rules of the daemon there do not allow the connection ([[listen]], [[connect]], \
                 user.host_loopback)"
            }
            Rejection::Draining => "the daemon there is draining",
            Rejection::Guesser => {
                "too many wrong STags were named between the two hosts in this minute \
                 (limits.peer.stag_guesses_per_minute)"
            }
        };
        format!("queue pair {peer} at {gid}: {what}")
    }
}

/// That one end would send from another PSN than the other one awaits.
pub(super) fn psns_differ(from: &str, sends: u32, to: &str, awaited: u32) -> String {
    format!(
        "PSNs differ: {from} would send from {sends} on (sq_psn), {to} awaits {awaited} (rq_psn)"
    )
}

/// The two ends have different path MTUs.
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

/// What Private Data of a rejection begin with.
const MAGIC: &[u8] = b"RNWD\x02";
// Those with a number behind them.
const PSN: u8 = 6;
const OWN_PSN: u8 = 11;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_read_as_it_was_written_and_numbers_are_said() {
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
        // The asker has said this number; the other one stays with the end that rejects.
        assert_eq!(Rejection::Psn { awaited: 9 }.private_data(), b"RNWD\x02\x06\0\0\0\x09");
        assert_eq!(Rejection::OwnPsn { sends: 8 }.private_data(), b"RNWD\x02\x0B\0\0\0\x08");
        let text = Rejection::Psn { awaited: 9 }.of(QpId(5), Gid([0; 16]));
        assert!(text.contains("this side awaits 9 (rq_psn), queue pair 5"), "{text}");
        let text = Rejection::OwnPsn { sends: 8 }.of(QpId(5), Gid([0; 16]));
        assert!(text.contains("this side would send from 8 on (sq_psn), queue pair 5"), "{text}");
    }
}
