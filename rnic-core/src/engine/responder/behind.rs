//! What came behind a Send that waits for a receive, at a queue pair that is wired by hand.
//!
//! An adapter answers such a Send with an RNR NAK and carries out nothing that comes behind it; but
//! acknowledgements and responses of the peer's are about the other direction, and pass. So do they
//! here: what does not is kept, up to [`ROOM`], and only then is the stream read no further.

use std::collections::VecDeque;

use crate::ddp::{Header, qn};
use crate::engine::notice::Notice;
use crate::rdmap::{Control, Opcode};

/// Bytes of ULPDUs that are kept before the stream stands still; the last may reach beyond.
const ROOM: usize = 32 * 1024;
/// Bytes that a ULPDU counts for at least, for its place in the list.
const LEAST: usize = 64;

/// ULPDUs that came behind a Send that waits, or has waited, oldest first.
#[derive(Default)]
pub(super) struct Behind {
    kept: VecDeque<Box<[u8]>>,
    bytes: usize,
}

impl Behind {
    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Whether one more may be kept.
    pub(super) fn has_room(&self) -> bool {
        self.bytes < ROOM
    }

    pub(super) fn keep(&mut self, ulpdu: &[u8]) {
        self.bytes += ulpdu.len().max(LEAST);
        self.kept.push_back(ulpdu.into());
    }

    /// The oldest, which is not kept any more.
    pub(super) fn next(&mut self) -> Option<Box<[u8]>> {
        let ulpdu = self.kept.pop_front()?;
        self.bytes -= ulpdu.len().max(LEAST);
        Some(ulpdu)
    }

    pub(super) fn clear(&mut self) {
        *self = Behind::default();
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.kept.iter().map(|ulpdu| ulpdu.len()).sum()
    }
}

/// Whether a ULPDU is about what this side has sent, so that it does not wait for what the peer
/// has. One that is malformed waits, and is refused in its place.
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
