//! Messages between the two ends of an RC stream that the iWARP protocols lack: missing receives,
//! which a RoCE adapter reports with an RNR NAK (IBTA specification, volume 1, section 9.7.5.2.8),
//! the number of a refused Write, which on an adapter is the PSN of the NAK, and the ACK that
//! precedes an answer or the end of a stream.
//!
//! A notice is a zero-length RDMA Write. Its receiver ignores STag and tagged offset (RFC 5041
//! section 5.2), so the offset is free to carry a number. Only daemons that have found each other
//! at the rendezvous send and understand notices. To any other peer a notice is an empty Write.

use super::numbers::low_half;
use rnic_abi::types::{Msn, Stag, TaggedOffset};

/// Content of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// The Send with this MSN has found no receive. All earlier requests are done.
    Waits(Msn),
    /// The Send that waited has found a receive.
    Resumed,
    /// The Terminate that follows refuses the Write with this number. Writes of a stream are
    /// numbered from 0.
    RefusesWrite(u32),
    /// All requests up to the Send with this MSN are done. A request of the sender, or the end of
    /// the stream, follows.
    Done(Msn),
}

impl Notice {
    /// Returns the target of the Write that carries this notice.
    pub(super) fn target(self) -> (Stag, TaggedOffset) {
        let to = match self {
            Notice::Waits(msn) => MARK | WAITS | u64::from(msn.0),
            Notice::Resumed => MARK,
            Notice::RefusesWrite(number) => MARK | REFUSES_WRITE | u64::from(number),
            Notice::Done(msn) => MARK | DONE | u64::from(msn.0),
        };
        (STAG, TaggedOffset(to))
    }

    /// Returns the notice that an incoming Write carries, or `None` if it is an ordinary Write.
    pub(super) fn find(stag: Stag, to: TaggedOffset, payload: &[u8]) -> Option<Notice> {
        if stag != STAG || !payload.is_empty() {
            return None;
        }
        let number = low_half(to.0);
        match to.0 & !u64::from(u32::MAX) {
            MARK if number == 0 => Some(Notice::Resumed),
            high if high == MARK | WAITS => Some(Notice::Waits(Msn(number))),
            high if high == MARK | REFUSES_WRITE => Some(Notice::RefusesWrite(number)),
            high if high == MARK | DONE => Some(Notice::Done(Msn(number))),
            _ => None,
        }
    }
}

/// The STag of a notice, which no region has.
const STAG: Stag = Stag(0);
/// High half of the offset: "RNR", then the kind of notice.
const MARK: u64 = 0x524e_5200 << 32;
const WAITS: u64 = 1 << 32;
const REFUSES_WRITE: u64 = 2 << 32;
const DONE: u64 = 3 << 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_round_trip() {
        for notice in [
            Notice::Waits(Msn(1)),
            Notice::Waits(Msn(u32::MAX)),
            Notice::Resumed,
            Notice::RefusesWrite(0),
            Notice::RefusesWrite(u32::MAX),
            Notice::Done(Msn(1)),
            Notice::Done(Msn(u32::MAX)),
        ] {
            let (stag, to) = notice.target();
            assert_eq!(Notice::find(stag, to, &[]), Some(notice));
            assert_eq!(Notice::find(stag, to, &[0]), None, "a Write with payload");
            assert_eq!(Notice::find(Stag(0x100), to, &[]), None, "a Write of an application");
            assert_eq!(Notice::find(stag, TaggedOffset(to.0 ^ 1 << 40), &[]), None);
        }
        assert_eq!(Notice::find(Stag(0), TaggedOffset(MARK + 1), &[]), None);
        assert_eq!(Notice::find(Stag(0), TaggedOffset(0), &[]), None);
    }
}
