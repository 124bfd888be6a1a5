//! Why memory that was checked could not be reached after all.

use crate::shm::CopyFault;
use crate::shm::attached::{AttachedFault, CopyEnd};
use crate::types::SessionId;

/// Memory that was checked could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFault {
    /// Whose memory it is: the one to blame.
    pub owner: SessionId,
    /// What is the matter with it.
    pub cause: Unreachable,
    /// Which end of the copy it was.
    pub end: CopyEnd,
}

/// Why memory could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreachable {
    /// Pages of a shared buffer were taken away under a copy, which only a client that breaks the
    /// contract can do.
    #[error("shared memory was truncated under a copy")]
    Truncated,
    /// The attached address space has ended.
    #[error("the attached address space is gone")]
    Detached,
    /// The range is not mapped in the attached address space.
    #[error("an address of attached memory is not mapped")]
    Unmapped,
}

impl From<CopyFault> for Unreachable {
    /// Ranges have been checked, so pages that are gone are all that can be the matter.
    fn from(_: CopyFault) -> Self {
        Unreachable::Truncated
    }
}

impl From<AttachedFault> for Unreachable {
    fn from(fault: AttachedFault) -> Self {
        match fault {
            AttachedFault::Gone => Unreachable::Detached,
            AttachedFault::Unmapped => Unreachable::Unmapped,
            AttachedFault::Poisoned => Unreachable::Truncated,
        }
    }
}
