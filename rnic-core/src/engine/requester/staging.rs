//! Payload that only a mover reaches: it is brought to private memory first, and sent from there. A QP
//! has at most one such copy under way.

use super::Requester;
use super::message::{Gather, GatherFault, Message};
use crate::device::memory::{MemoryFault, Target, Unreachable};
use crate::device::mover::{MAX_MOVE, Moved, Pieces, Way};
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use crate::shm::attached::CopyEnd;
use crate::types::SessionId;

/// Bytes of the message in progress that are at hand, or on their way.
#[derive(Default)]
pub(super) struct StagingBuffer {
    /// The copy that brings them.
    job: Option<u64>,
    /// Whose memory they are of.
    owner: Option<SessionId>,
    /// Where in the message they begin.
    from: u32,
    bytes: Vec<u8>,
    /// Where among them those of the mover go.
    holes: Vec<(usize, usize)>,
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
    /// Puts the bytes at hand in place of memory that only a mover reaches.
    pub(super) fn fill_in<'t>(
        &'t self,
        message: &Message,
        len: u32,
        memory: &mut Gather<'t>,
    ) -> Result<(), GatherFault> {
        let Some(moved) = memory.iter().find(|target| target.mover().is_some()) else {
            return Ok(());
        };
        let owner = moved.owner();
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

impl Requester {
    /// Has a mover bring the next bytes of the message in progress.
    pub(in crate::engine) fn stage(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> Result<(), StageError> {
        let Some(message) = &self.message else { return Ok(()) };
        if self.staging.job.is_some() {
            return Ok(());
        }
        let (from, len) = (message.sent, (message.total - message.sent).min(MAX_MOVE as u32));
        let mut memory = Gather::new();
        self.gather_unstaged(len, core, &engine.stags, &mut memory).map_err(StageError::Gather)?;
        let (mut bytes, mut holes) = (vec![0; len as usize], Vec::new());
        let (mut pieces, mut who) = (Pieces::new(), None);
        let mut at = 0;
        for target in &memory {
            let end = at + target.len();
            match target.mover() {
                Some((mover, address)) => {
                    who = Some(mover.clone());
                    pieces.push((address, target.len() as u32));
                    holes.push((at, end));
                }
                None => target.read(0, &mut bytes[at..end]).map_err(StageError::Memory)?,
            }
            at = end;
        }
        drop(memory);
        let Some(mover) = who else { return Ok(()) };
        let job = engine.begin_copy(core.id, &mover, pieces, Way::Out);
        let owner = Some(mover.session());
        self.staging = StagingBuffer { job: Some(job), owner, from, bytes, holes };
        Ok(())
    }

    /// Whether this copy brings bytes of the message in progress.
    pub(in crate::engine) fn is_staging(&self, job: u64) -> bool {
        self.staging.job == Some(job)
    }

    /// The mover has answered. The fault, if there is a message that still wants the bytes.
    pub(in crate::engine) fn staged(
        &mut self,
        core: &QpCore,
        result: Moved,
    ) -> Result<(), MemoryFault> {
        let mut staging = std::mem::take(&mut self.staging);
        let owner = staging.owner.unwrap_or(core.session);
        let wanted: usize = staging.holes.iter().map(|(from, to)| to - from).sum();
        let cause = match result {
            Ok(bytes) if bytes.len() == wanted => {
                let mut rest = &bytes[..];
                for (from, to) in staging.holes.drain(..) {
                    let (now, later) = rest.split_at(to - from);
                    staging.bytes[from..to].copy_from_slice(now);
                    rest = later;
                }
                staging.job = None;
                self.staging = staging;
                return Ok(());
            }
            Ok(_) => Unreachable::Unmapped,
            Err(cause) => cause,
        };
        match self.message {
            Some(_) => Err(MemoryFault { owner, cause, end: CopyEnd::Source }),
            None => Ok(()),
        }
    }

    /// The peer has invalidated an STag: nothing is sent any more that a mover has read, or may yet
    /// read, by way of it. (What it writes is over: it stood before this in the stream.)
    pub(in crate::engine) fn unstage(&mut self) {
        self.staging = StagingBuffer::default();
    }
}
