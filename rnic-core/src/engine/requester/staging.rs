//! Payload that only a copier can read. It is copied to private memory first and sent from there. A
//! QP has at most one such copy in progress.

use super::message::{Gather, GatherFault, Message};
use crate::device::memory::{MemoryFault, Target};
use rnic_abi::types::SessionId;

/// Bytes of the message in progress that have been copied, or are being copied.
#[derive(Default)]
pub(super) struct StagingBuffer {
    /// The copy in progress, if any.
    pub job: Option<u64>,
    /// Session that owns the memory.
    pub owner: Option<SessionId>,
    /// Offset of the bytes in the message.
    pub from: u32,
    pub bytes: Vec<u8>,
    /// Ranges of `bytes` that the copier fills.
    pub holes: Vec<(usize, usize)>,
}

/// Error of staging.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum StageError {
    /// The memory is not accessible.
    Gather(GatherFault),
    /// The memory could not be read.
    Memory(MemoryFault),
}

impl StagingBuffer {
    /// Replaces memory that only a copier can read with the copied bytes.
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
