//! Requests of the peer and their progress.

use crate::device::memory::MemoryFault;
use crate::device::stag::RemoteFault;
use crate::stream::{InboundAtomic, InboundRead};
use rnic_abi::types::SessionId;

/// A request of the peer.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum InboundRequest {
    Read(InboundRead),
    Atomic(InboundAtomic),
}

/// An atomic operation that a copier executes, or whose result is written later.
#[derive(Clone, Copy, Debug)]
pub(super) struct Executing {
    /// Number of the copy job, if any.
    pub job: u64,
    /// Session that owns the memory.
    pub owner: SessionId,
    pub atomic: InboundAtomic,
    /// The original value, once the operation is done.
    pub original: Option<u64>,
}

/// Error of an atomic operation.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum AtomicError {
    /// The region was revoked or changed after the request arrived.
    Revoked(RemoteFault),
    /// The memory could not be reached.
    Memory(MemoryFault),
}
