//! Messages between the two ends of a stream of RC QPs for which the protocols of iWARP have none:
//! about receives that are missing, as the RNR NAK of an adapter (IBTA specification, volume 1,
//! section 9.7.5.2.8), and the number of a refused Write, for which an adapter has the PSN of the
//! NAK.
//!
//! A notice is an RDMA Write of no bytes, of which a receiver looks at neither STag nor tagged
//! offset (RFC 5041 section 5.2): the offset is free to carry a number. Only daemons that have
//! found each other at the rendezvous send and understand it; to everybody else it is a Write of
//! nothing.

use super::numbers::low_half;
use crate::types::{Msn, Stag, TaggedOffset};

/// What a notice says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// The Send with this number has found no receive; all before it is done.
    Waits(Msn),
    /// The Send that waited has found one.
    GoesOn,
    /// The Terminate that follows refuses the Write with this number; the first of a stream has 0.
    RefusesWrite(u32),
}

impl Notice {
    /// Where a Write goes that is this notice.
    pub(super) fn target(self) -> (Stag, TaggedOffset) {
        let to = match self {
            Notice::Waits(msn) => MARK | WAITS | u64::from(msn.0),
            Notice::GoesOn => MARK,
            Notice::RefusesWrite(number) => MARK | REFUSES_WRITE | u64::from(number),
        };
        (STAG, TaggedOffset(to))
    }

    /// The notice that a Write of this payload is, if it is one.
    pub(super) fn find(stag: Stag, to: TaggedOffset, payload: &[u8]) -> Option<Notice> {
        if stag != STAG || !payload.is_empty() {
            return None;
        }
        let number = low_half(to.0);
        match to.0 & !u64::from(u32::MAX) {
            MARK if number == 0 => Some(Notice::GoesOn),
            high if high == MARK | WAITS => Some(Notice::Waits(Msn(number))),
            high if high == MARK | REFUSES_WRITE => Some(Notice::RefusesWrite(number)),
            _ => None,
        }
    }
}

/// No region has it.
const STAG: Stag = Stag(0);
/// High half of the offset: "RNR" and what is said.
const MARK: u64 = 0x524e_5200 << 32;
const WAITS: u64 = 1 << 32;
const REFUSES_WRITE: u64 = 2 << 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_found_as_it_was_said() {
        for notice in [
            Notice::Waits(Msn(1)),
            Notice::Waits(Msn(u32::MAX)),
            Notice::GoesOn,
            Notice::RefusesWrite(0),
            Notice::RefusesWrite(u32::MAX),
        ] {
            let (stag, to) = notice.target();
            assert_eq!(Notice::find(stag, to, &[]), Some(notice));
            assert_eq!(Notice::find(stag, to, &[0]), None, "a Write of something");
            assert_eq!(Notice::find(Stag(0x100), to, &[]), None, "a Write of an application's");
            assert_eq!(Notice::find(stag, TaggedOffset(to.0 ^ 1 << 40), &[]), None);
        }
        assert_eq!(Notice::find(Stag(0), TaggedOffset(MARK + 1), &[]), None);
        assert_eq!(Notice::find(Stag(0), TaggedOffset(0), &[]), None);
    }
}
