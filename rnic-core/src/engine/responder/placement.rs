//! Placement of a segment's bytes in memory, directly, or by a copier if only it has access.

use std::sync::Arc;

use crate::device::Copier;
use crate::device::copier::{Direction, Pieces};
use crate::device::memory::{MemoryFault, Payload, Target};
use crate::device::stag::StagTable;
use crate::engine::incoming::{Enclosure, Incoming};
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::Reason;
use crate::engine::requester::message::Gather;
use crate::engine::state::{EngineState, PeerSignal};
use rnic_abi::abi::queue::Sge;

/// Result of a placement.
pub(in crate::engine) enum Placed {
    /// All payload bytes have been placed.
    Done,
    /// The order rule of the QP determines when the bytes are placed.
    InOrder,
    /// A copier must write the rest.
    Pending(Box<PendingWrite>),
}

/// Bytes for a copier to write.
pub(in crate::engine) struct PendingWrite {
    copier: Arc<Copier>,
    pieces: Pieces,
    bytes: Vec<u8>,
    tail_last: bool,
}

/// A segment that a copier is writing.
pub(in crate::engine) struct PendingPlacement {
    /// Number of the copy.
    pub job: u64,
    pub copier: Arc<Copier>,
    /// The segment to complete when it is placed.
    pub segment: Incoming,
    /// Payload bytes, which count as received when they are placed.
    pub len: usize,
    pub enclosure: Enclosure,
    /// Later signals of the other end of a direct connection.
    pub deferred: Vec<PeerSignal>,
}

impl PendingWrite {
    /// Adds `len` bytes of `payload` from offset `from`, for a target that only a copier can
    /// access.
    fn add(
        writing: Option<Box<PendingWrite>>,
        copier: &Arc<Copier>,
        address: u64,
        payload: &Payload<'_>,
        from: usize,
        len: usize,
        tail_last: bool,
    ) -> Result<Box<PendingWrite>, MemoryFault> {
        let mut writing = writing.unwrap_or_else(|| {
            Box::new(PendingWrite {
                copier: copier.clone(),
                pieces: Pieces::new(),
                bytes: Vec::with_capacity(payload.len()),
                tail_last,
            })
        });
        let at = writing.bytes.len();
        writing.bytes.resize(at + len, 0);
        payload.read(from, &mut writing.bytes[at..])?;
        // A segment has at most as many pieces as a list has SGEs, all of one address space.
        writing.pieces.push((address, count(len)));
        Ok(writing)
    }

    /// Returns the copier that performs this copy.
    pub(in crate::engine) fn copier(&self) -> &Copier {
        &self.copier
    }

    /// Hands the copy of a segment to its copier.
    pub(in crate::engine) fn begin(
        self,
        core: &QpCore,
        engine: &mut EngineState,
        segment: Incoming,
        len: usize,
        enclosure: Enclosure,
    ) -> PendingPlacement {
        let (job, copier) = self.hand_over(core, engine);
        PendingPlacement { job, copier, segment, len, enclosure, deferred: Vec::new() }
    }

    /// Hands the copy to its copier. Returns the number of the copy.
    pub(in crate::engine) fn hand_over(
        self,
        core: &QpCore,
        engine: &mut EngineState,
    ) -> (u64, Arc<Copier>) {
        let PendingWrite { copier, pieces, bytes, tail_last } = self;
        let job = engine.begin_copy(core.id, &copier, pieces, Direction::In { bytes, tail_last });
        (job, copier)
    }
}

/// Places a payload in one piece of memory, or returns the write for a copier. If `last`, the last
/// bytes become visible last.
#[inline]
pub(in crate::engine) fn place(
    payload: &Payload<'_>,
    target: Target<'_>,
    last: bool,
) -> Result<Placed, MemoryFault> {
    match target.copier() {
        None => payload.place(0, target, last).map(|()| Placed::Done),
        Some((copier, address)) => {
            PendingWrite::add(None, copier, address, payload, 0, target.len(), last)
                .map(Placed::Pending)
        }
    }
}

/// Error of placing a payload in a list of SGEs.
pub(in crate::engine) enum ScatterFault {
    /// An SGE may not be written.
    Element(Reason),
    /// The bytes could not be copied.
    Memory(MemoryFault),
}

/// Places a payload in the memory of a list, starting at its byte `skip`, or returns the write for
/// a copier. All SGEs are checked before the first byte is placed.
#[inline]
pub(in crate::engine) fn scatter(
    payload: &Payload<'_>,
    list: &[Sge],
    mut skip: u32,
    core: &QpCore,
    stags: &StagTable,
) -> Result<Placed, ScatterFault> {
    let principal = core.principal();
    let len = payload.len();
    let mut targets = Gather::new();
    let mut from = 0;
    for sge in list {
        if from == len {
            break;
        }
        if skip >= sge.length {
            skip -= sge.length;
            continue;
        }
        // At most `sge.length`, hence a u32.
        let n = ((sge.length - skip) as usize).min(len - from);
        let addr = sge.addr.wrapping_add(u64::from(skip));
        let lkey = sge.lkey;
        let len = count(n);
        let target = stags.local(principal, lkey, addr, len, true).map_err(|fault| {
            ScatterFault::Element(Reason::LocalKey { fault, lkey, addr, len, write: true })
        })?;
        targets.push(target);
        from += n;
        skip = 0;
    }
    let mut from = 0;
    let mut pending = None;
    for target in targets {
        let placed = match target.copier() {
            None => payload.place(from, target, false).map(|()| pending),
            Some((copier, address)) => {
                PendingWrite::add(pending, copier, address, payload, from, target.len(), false)
                    .map(Some)
            }
        };
        pending = placed.map_err(ScatterFault::Memory)?;
        from += target.len();
    }
    Ok(pending.map_or(Placed::Done, Placed::Pending))
}
