//! ULPDUs that arrived after a Send that waits for a receive, on an RC QP.
//!
//! A RoCE adapter answers such a Send with an RNR NAK and executes no later request, but still
//! handles acknowledgements and responses of the peer, which concern the other direction. Here,
//! too, they pass the waiting Send. Other ULPDUs are kept, up to [`ROOM`], after which the stream
//! is not read.

use std::collections::VecDeque;

use crate::ddp::{Header, qn};
use crate::engine::rnr_notice::Notice;
use crate::rdmap::{Control, Opcode};

/// Bytes of ULPDUs that are kept before the stream is blocked. The last ULPDU may exceed the limit.
const ROOM: usize = 32 * 1024;
/// Minimum number of bytes that a ULPDU counts for, because its list entry takes memory too.
const MIN_COST: usize = 64;

/// ULPDUs that arrived after a Send that waits, or has waited, oldest first.
#[derive(Default)]
pub(super) struct RnrBacklog {
    kept: VecDeque<Box<[u8]>>,
    bytes: usize,
}

impl RnrBacklog {
    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Returns true if there is room for another ULPDU.
    pub(super) fn has_room(&self) -> bool {
        self.bytes < ROOM
    }

    pub(super) fn keep(&mut self, ulpdu: &[u8]) {
        self.bytes += ulpdu.len().max(MIN_COST);
        self.kept.push_back(ulpdu.into());
    }

    /// Takes the oldest ULPDU.
    pub(super) fn next(&mut self) -> Option<Box<[u8]>> {
        let ulpdu = self.kept.pop_front()?;
        self.bytes -= ulpdu.len().max(MIN_COST);
        Some(ulpdu)
    }

    pub(super) fn clear(&mut self) {
        *self = RnrBacklog::default();
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.kept.iter().map(|ulpdu| ulpdu.len()).sum()
    }
}

/// Returns true if a ULPDU concerns requests of this side, so that it passes a waiting Send. A
/// malformed ULPDU waits and is refused in order.
pub(in crate::engine) fn passes(ulpdu: &[u8]) -> bool {
    match Header::parse(ulpdu) {
        Ok((Header::Tagged(header), payload)) => {
            let opcode = Control::parse(header.rsvd_ulp).opcode;
            let notice = || Notice::find(header.stag, header.to, payload);
            opcode == Opcode::ReadResponse || opcode == Opcode::Write && notice().is_some()
        }
        Ok((Header::Untagged(header), _)) => {
            matches!(header.qn, qn::ATOMIC_RESPONSE | qn::TERMINATE)
        }
        Err(_) => false,
    }
}
