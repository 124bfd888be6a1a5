//! Copies payload that only a copier can read to private memory.

use super::Requester;
use super::message::Gather;
use super::staging::{StageError, StagingBuffer};
use crate::device::copier::{CopyResult, Direction, MAX_COPY, Pieces};
use crate::device::memory::{MemoryFault, Unreachable};
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use rnic_abi::shm::attached::CopyEnd;

impl Requester {
    /// Starts a copy of the next bytes of the message in progress.
    pub(in crate::engine) fn stage(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> Result<(), StageError> {
        let Some(message) = &self.message else { return Ok(()) };
        if self.staging.job.is_some() {
            return Ok(());
        }
        let from = message.sent;
        let len = (message.total - message.sent).min(count(MAX_COPY));
        let mut memory = Gather::new();
        self.gather_unstaged(len, core, &engine.stags, &mut memory).map_err(StageError::Gather)?;
        let mut bytes = vec![0; len as usize];
        let mut holes = Vec::new();
        let mut pieces = Pieces::new();
        let mut found = None;
        let mut at = 0;
        for target in &memory {
            let end = at + target.len();
            match target.copier() {
                Some((copier, address)) => {
                    found = Some(copier.clone());
                    pieces.push((address, count(target.len())));
                    holes.push((at, end));
                }
                None => target.read(0, &mut bytes[at..end]).map_err(StageError::Memory)?,
            }
            at = end;
        }
        drop(memory);
        let Some(copier) = found else { return Ok(()) };
        let job = engine.begin_copy(core.id, &copier, pieces, Direction::Out);
        let owner = Some(copier.session());
        self.staging = StagingBuffer { job: Some(job), owner, from, bytes, holes };
        Ok(())
    }

    /// Returns true if a copier reads the next bytes of the message in progress.
    pub(in crate::engine) fn is_fetching(&self) -> bool {
        self.staging.job.is_some()
    }

    /// Returns true if this copy reads bytes of the message in progress.
    pub(in crate::engine) fn is_staging(&self, job: u64) -> bool {
        self.staging.job == Some(job)
    }

    /// Handles the result of the copy. Returns the fault if a message still needs the bytes.
    pub(in crate::engine) fn staged(
        &mut self,
        core: &QpCore,
        result: CopyResult,
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

    /// Drops bytes that a copier has read, or may yet read, through an STag that the peer has
    /// invalidated, so that they are not sent. Copies that write have ended, since their segments
    /// preceded the invalidation.
    pub(in crate::engine) fn unstage(&mut self) {
        self.staging = StagingBuffer::default();
    }
}
