//! What the peer asks for, and how far it is.

use crate::device::memory::MemoryFault;
use crate::device::stag::RemoteFault;
use crate::stream::{InboundAtomic, InboundRead};
use crate::types::SessionId;

/// A request of the peer's.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum InboundRequest {
    Read(InboundRead),
    Atomic(InboundAtomic),
}

/// An atomic operation that a copier carries out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Executing {
    /// Number of the copy.
    pub job: u64,
    /// Whose memory it is done to.
    pub owner: SessionId,
    pub atomic: InboundAtomic,
    /// What was there before, when it is done.
    pub original: Option<u64>,
}

/// Why an atomic operation was not carried out.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum AtomicError {
    /// Its region is not what it was when it arrived.
    Revoked(RemoteFault),
    /// Its memory could not be reached.
    Memory(MemoryFault),
}
