//! Reasons why an access to checked memory failed.

use rnic_abi::shm::CopyFault;
use rnic_abi::shm::attached::{AttachedFault, CopyEnd};
use rnic_abi::types::SessionId;

/// A failed access to checked memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFault {
    /// Session that owns the memory and is at fault.
    pub owner: SessionId,
    /// Reason why the memory is not accessible.
    pub cause: Unreachable,
    /// The failed end of the copy.
    pub end: CopyEnd,
}

/// Reason why memory is not accessible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreachable {
    /// Pages of a shared buffer were missing during a copy, which only a client that violates the
    /// contract can cause.
    #[error("shared memory was truncated during a copy")]
    Truncated,
    /// The attached address space has ended.
    #[error("the attached address space is gone")]
    Detached,
    /// The range is not mapped in the attached address space.
    #[error("an address of attached memory is not mapped")]
    Unmapped,
}

impl From<CopyFault> for Unreachable {
    /// The range has been checked, so a missing page is the only possible cause.
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
