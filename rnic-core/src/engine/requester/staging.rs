//! Payload that only a copier reaches: it is brought to private memory first, and sent from there.
//! A QP has at most one such copy under way.

use super::message::{Gather, GatherFault, Message};
use crate::device::memory::{MemoryFault, Target};
use crate::types::SessionId;

/// Bytes of the message in progress that are at hand, or on their way.
#[derive(Default)]
pub(super) struct StagingBuffer {
    /// The copy that brings them.
    pub job: Option<u64>,
    /// Whose memory they are of.
    pub owner: Option<SessionId>,
    /// Where in the message they begin.
    pub from: u32,
    pub bytes: Vec<u8>,
    /// Where among them those of the copier go.
    pub holes: Vec<(usize, usize)>,
}

/// Why nothing is staged.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum StageError {
    /// The memory cannot be had.
    Gather(GatherFault),
    /// It could not be read.
    Memory(MemoryFault),
}

impl StagingBuffer {
    /// Puts the bytes at hand in place of memory that only a copier reaches.
    pub(super) fn fill_in<'t>(
        &'t self,
        message: &Message,
        len: u32,
        memory: &mut Gather<'t>,
    ) -> Result<(), GatherFault> {
        let Some(copied) = memory.iter().find(|target| target.copier().is_some()) else {
            return Ok(());
        };
        let owner = copied.owner();
        let at_hand = message.sent.checked_sub(self.from).and_then(|from| {
            let from = from as usize;
            self.bytes.get(from..from + len as usize).filter(|_| self.job.is_none())
        });
        let bytes = at_hand.ok_or(GatherFault::Unstaged)?;
        memory.clear();
        memory.push(Target::private(owner, bytes));
        Ok(())
    }
}
