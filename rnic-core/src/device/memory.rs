//! The memory to which an STag refers, and checked ranges of it.
//!
//! A [`Memory`] is the location of a region's bytes, without access rights. A [`Target`] is a
//! checked range of it. Only a `Target` can be read or written.

use std::sync::Arc;

use super::copier::Copier;
pub use super::fault::{MemoryFault, Unreachable};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::attached::{AddressSpace, AttachedFault, CopyEnd};
use rnic_abi::types::{ATOMIC_LEN, AtomicOperation, SessionId};

/// Location of the bytes of a region. Clones refer to the same bytes.
#[derive(Clone, Debug)]
pub enum Memory {
    /// In a shared buffer.
    Shared {
        /// Mapping of the shared buffer in the daemon.
        mapping: Arc<Mapping>,
        /// Offset in the mapping, in bytes. `offset` plus the region's length is within the
        /// mapping.
        offset: usize,
    },
    /// In the owner's address space. A copy is a system call, and may block on the owner's pages.
    Attached {
        /// The attached address space of the owner.
        space: Arc<AddressSpace>,
        /// Start address. The region ends at or below
        /// [`USER_END`](rnic_abi::shm::attached::USER_END).
        address: u64,
    },
    /// In the owner's address space, which only a copier can access. The QP waits for the copier's
    /// job to complete.
    ThroughCopier {
        /// The copier of the owner's session.
        copier: Arc<Copier>,
        /// Start address, as for `Attached`.
        address: u64,
    },
}

impl Memory {
    /// Returns the memory from offset `skip`, for a window on a part of the region. `skip` must be
    /// within the region.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset within a mapping, whose length is a usize"
    )]
    pub fn at(&self, skip: u64) -> Memory {
        match self {
            Memory::Shared { mapping, offset } => Memory::Shared {
                mapping: mapping.clone(),
                // Within the region, hence within the mapping, so it fits a usize.
                offset: offset.wrapping_add(skip as usize),
            },
            Memory::Attached { space, address } => {
                Memory::Attached { space: space.clone(), address: address.wrapping_add(skip) }
            }
            Memory::ThroughCopier { copier, address } => Memory::ThroughCopier {
                copier: copier.clone(),
                address: address.wrapping_add(skip),
            },
        }
    }

    /// Returns the checked range of `len` bytes at offset `from`. The caller has checked that it is
    /// within the region.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset within a mapping, whose length is a usize"
    )]
    pub(super) fn target(&self, from: u64, len: usize, owner: SessionId) -> Target<'_> {
        let place = match self {
            Memory::Shared { mapping, offset } => {
                // Within the region, so the sum is within the mapping and fits a usize.
                Location::Shared { mapping, offset: offset + from as usize }
            }
            // Within the region, too, hence below 2^64.
            Memory::Attached { space, address } => {
                Location::Attached { space, address: address + from }
            }
            Memory::ThroughCopier { copier, address } => {
                Location::ThroughCopier { copier, address: address + from }
            }
        };
        Target { place, len, owner, past_caches: false }
    }
}

/// A checked range of memory, which it borrows.
#[derive(Clone, Copy)]
pub struct Target<'t> {
    place: Location<'t>,
    len: usize,
    owner: SessionId,
    /// True if copies to it bypass the caches.
    past_caches: bool,
}

#[derive(Clone, Copy)]
enum Location<'t> {
    Shared {
        mapping: &'t Mapping,
        offset: usize,
    },
    Attached {
        space: &'t AddressSpace,
        address: u64,
    },
    ThroughCopier {
        copier: &'t Arc<Copier>,
        address: u64,
    },
    /// The daemon's own memory: bytes that a copier has read.
    Private(&'t [u8]),
}

impl<'t> Target<'t> {
    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns `len` bytes at offset `from`, or `None` if they are not within the target.
    pub fn part(&self, from: u64, len: usize) -> Option<Target<'t>> {
        let from = usize::try_from(from).ok()?;
        (len <= self.len.checked_sub(from)?).then(|| self.range(from, len))
    }

    /// Returns `len` bytes at offset `from`. The caller has checked that they are within the
    /// target.
    #[inline]
    fn range(&self, from: usize, len: usize) -> Target<'t> {
        let place = match self.place {
            Location::Shared { mapping, offset } => {
                Location::Shared { mapping, offset: offset + from }
            }
            Location::Attached { space, address } => {
                Location::Attached { space, address: address + from as u64 }
            }
            Location::ThroughCopier { copier, address } => {
                Location::ThroughCopier { copier, address: address + from as u64 }
            }
            Location::Private(bytes) => Location::Private(&bytes[from..from + len]),
        };
        Target { place, len, ..*self }
    }

    /// Reads `dst.len()` bytes at offset `from`, which must be within the target.
    #[inline]
    pub fn read(&self, from: usize, dst: &mut [u8]) -> Result<(), MemoryFault> {
        debug_assert!(from + dst.len() <= self.len);
        match self.place {
            Location::Shared { mapping, offset } => {
                mapping.read(offset + from, dst).map_err(|e| self.source_fault(e))
            }
            Location::Attached { space, address } => {
                space.read(address + from as u64, dst).map_err(|e| self.source_fault(e))
            }
            Location::Private(bytes) => {
                dst.copy_from_slice(&bytes[from..from + dst.len()]);
                Ok(())
            }
            // Not reached: a copier has already read it into `Private`.
            Location::ThroughCopier { .. } => Err(self.source_fault(Unreachable::Unmapped)),
        }
    }

    /// Writes the whole target. With `tail_last` the last bytes become visible last.
    #[inline]
    fn write(&self, bytes: &[u8], tail_last: bool) -> Result<(), MemoryFault> {
        match self.place {
            Location::Shared { mapping, offset } => {
                let written = if tail_last {
                    mapping.write_tail_last(offset, bytes)
                } else {
                    mapping.write(offset, bytes)
                };
                written.map_err(|e| self.sink_fault(e))
            }
            Location::Attached { space, address } => {
                space.write(address, bytes, tail_last).map_err(|e| self.sink_fault(e))
            }
            // Not reached: writes to such memory are jobs of the copier.
            Location::ThroughCopier { .. } | Location::Private(_) => {
                Err(self.sink_fault(Unreachable::Unmapped))
            }
        }
    }

    /// Copies the whole target to a target of the same length. Copies between two address spaces in
    /// two passes, otherwise in one.
    #[inline]
    pub(crate) fn copy_to(&self, to: &Target<'_>, tail_last: bool) -> Result<(), MemoryFault> {
        match (self.place, to.place) {
            (
                Location::Shared { mapping, offset },
                Location::Shared { mapping: to_mapping, offset: to_offset },
            ) => {
                let len = self.len;
                let copied = if to.past_caches {
                    mapping.copy_past_caches_to(offset, to_mapping, to_offset, len, tail_last)
                } else {
                    mapping.copy_to(offset, to_mapping, to_offset, len, tail_last)
                };
                copied.map_err(|e| {
                    if mapping.is_poisoned() { self.source_fault(e) } else { to.sink_fault(e) }
                })
            }
            (Location::Private(bytes), _) => to.write(bytes, tail_last),
            (Location::Shared { mapping, offset }, Location::Attached { space, address }) => {
                let written = space.write_from(address, mapping, offset, self.len, tail_last);
                written.map_err(|e| match e {
                    AttachedFault::Poisoned => self.source_fault(e),
                    AttachedFault::Gone | AttachedFault::Unmapped => to.sink_fault(e),
                })
            }
            (Location::Attached { space, address }, Location::Shared { mapping, offset }) => {
                let read = space.read_into(address, mapping, offset, self.len, tail_last);
                read.map_err(|e| match e {
                    AttachedFault::Poisoned => to.sink_fault(e),
                    AttachedFault::Gone | AttachedFault::Unmapped => self.source_fault(e),
                })
            }
            (
                Location::Attached { space, address },
                Location::Attached { space: to_space, address: to_address },
            ) => {
                let copied = space.copy_to(address, to_space, to_address, self.len, tail_last);
                copied.map_err(|(end, e)| match end {
                    CopyEnd::Source => self.source_fault(e),
                    CopyEnd::Sink => to.sink_fault(e),
                })
            }
            // As in `read` and `write`.
            (Location::ThroughCopier { .. }, _) => Err(self.source_fault(Unreachable::Unmapped)),
            (_, Location::ThroughCopier { .. } | Location::Private(_)) => {
                Err(to.sink_fault(Unreachable::Unmapped))
            }
        }
    }

    /// Returns true if it starts at a multiple of 8 bytes, as atomic operations require.
    pub fn is_aligned(&self) -> bool {
        let start = match self.place {
            // Mappings start at a page boundary.
            Location::Shared { offset, .. } => offset as u64,
            Location::Attached { address, .. } | Location::ThroughCopier { address, .. } => address,
            Location::Private(_) => 0,
        };
        start.is_multiple_of(u64::from(ATOMIC_LEN))
    }

    /// Applies an atomic operation to the target, which must be an aligned word. Returns the old
    /// value. In shared memory the operation is atomic also with respect to the client's CPUs. In
    /// attached memory it is atomic only with respect to operations through the same session.
    pub(crate) fn update(&self, operation: AtomicOperation) -> Result<u64, MemoryFault> {
        debug_assert!(self.len == ATOMIC_LEN as usize && self.is_aligned());
        let change = |old| operation.applied_to(old);
        match self.place {
            Location::Shared { mapping, offset } => {
                mapping.update_u64(offset, change).map_err(|e| self.sink_fault(e))
            }
            Location::Attached { space, address } => {
                space.update_u64(address, change).map_err(|e| self.sink_fault(e))
            }
            // Not reached: a copier does these as jobs.
            Location::ThroughCopier { .. } | Location::Private(_) => {
                Err(self.sink_fault(Unreachable::Unmapped))
            }
        }
    }

    /// Begins an atomic operation on a word of attached memory.
    /// [`finish_update`](Self::finish_update) writes its result. Returns the old value, or `None`
    /// for shared memory, which needs no second step.
    pub(crate) fn begin_update(
        &self,
        operation: AtomicOperation,
    ) -> Option<Result<u64, MemoryFault>> {
        match self.place {
            Location::Attached { space, address } => {
                let old = space.begin_update(address, |old| operation.applied_to(old));
                Some(old.map_err(|e| self.sink_fault(e)))
            }
            Location::Shared { .. } | Location::ThroughCopier { .. } | Location::Private(_) => None,
        }
    }

    /// Writes the result of an atomic operation that has begun.
    pub(crate) fn finish_update(&self) {
        if let Location::Attached { space, .. } = self.place {
            space.finish_update();
        }
    }

    /// Returns the copier and the address, if only a copier can access the memory.
    pub fn copier(&self) -> Option<(&'t Arc<Copier>, u64)> {
        match self.place {
            Location::ThroughCopier { copier, address } => Some((copier, address)),
            Location::Shared { .. } | Location::Attached { .. } | Location::Private(_) => None,
        }
    }

    /// Returns the mapping, offset and length, for gather I/O. `None` for other memory.
    pub fn shared(&self) -> Option<(&'t Mapping, usize, usize)> {
        match self.place {
            Location::Shared { mapping, offset } => Some((mapping, offset, self.len)),
            Location::Attached { .. } | Location::ThroughCopier { .. } | Location::Private(_) => {
                None
            }
        }
    }

    /// Sets whether copies to it bypass the caches, for data that would be evicted before their
    /// next use. Has an effect only on copies within shared memory.
    pub(crate) fn past_caches(self, past_caches: bool) -> Self {
        Target { past_caches, ..self }
    }

    /// Returns true if it is shared memory. A copy of shared memory cannot block.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.place, Location::Shared { .. })
    }

    /// Returns a target for bytes that a copier has read from memory of `owner`.
    pub(crate) fn private(owner: SessionId, bytes: &'t [u8]) -> Target<'t> {
        Target { place: Location::Private(bytes), len: bytes.len(), owner, past_caches: false }
    }

    /// Returns a target for the inline data of a send queue entry: bytes of the client's arena that
    /// [`take`](rnic_abi::shm::queue::SendConsumer::take) or
    /// [`look`](rnic_abi::shm::queue::SendConsumer::look) of the queue has checked.
    pub(crate) fn inline(
        owner: SessionId,
        mapping: &'t Mapping,
        offset: usize,
        len: usize,
    ) -> Target<'t> {
        Target { place: Location::Shared { mapping, offset }, len, owner, past_caches: false }
    }

    /// Returns the session that owns the memory and is at fault if the memory is missing.
    pub fn owner(&self) -> SessionId {
        self.owner
    }

    /// Returns the fault of a failed read from the target.
    pub(crate) fn source_fault(&self, cause: impl Into<Unreachable>) -> MemoryFault {
        MemoryFault { owner: self.owner, cause: cause.into(), end: CopyEnd::Source }
    }

    fn sink_fault(&self, cause: impl Into<Unreachable>) -> MemoryFault {
        MemoryFault { owner: self.owner, cause: cause.into(), end: CopyEnd::Sink }
    }
}

/// Source of a payload: private bytes, or checked memory.
#[derive(Clone, Copy)]
pub enum Payload<'a> {
    /// Bytes in the daemon's own memory.
    Bytes(&'a [u8]),
    /// Checked ranges, in order.
    Gather(&'a [Target<'a>]),
}

impl Payload<'_> {
    /// Returns the number of bytes; for a gather, the total of its ranges.
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Bytes(b) => b.len(),
            Payload::Gather(targets) => targets.iter().map(Target::len).sum(),
        }
    }

    /// Copies `dst.len()` bytes of this payload, starting at offset `from`.
    pub fn read(&self, from: usize, dst: &mut [u8]) -> Result<(), MemoryFault> {
        match self {
            Payload::Bytes(b) => dst.copy_from_slice(&b[from..from + dst.len()]),
            Payload::Gather(sources) => {
                let mut skip = from;
                let mut done = 0;
                for s in *sources {
                    let n = s.len.saturating_sub(skip).min(dst.len() - done);
                    if n > 0 {
                        s.read(skip, &mut dst[done..done + n])?;
                    }
                    done += n;
                    skip = skip.saturating_sub(s.len);
                }
            }
        }
        Ok(())
    }

    /// Copies the bytes `from..from + target.len()` of this payload to a target. With `tail_last`
    /// the last bytes become visible last, for programs that poll them.
    pub fn place(
        &self,
        from: usize,
        target: Target<'_>,
        tail_last: bool,
    ) -> Result<(), MemoryFault> {
        match self {
            Payload::Bytes(b) => target.write(&b[from..from + target.len], tail_last),
            Payload::Gather(sources) => {
                let mut skip = from;
                let mut done = 0;
                for s in *sources {
                    if done == target.len {
                        break;
                    }
                    if skip >= s.len {
                        skip -= s.len;
                        continue;
                    }
                    let n = (s.len - skip).min(target.len - done);
                    let last = tail_last && done + n == target.len;
                    s.range(skip, n).copy_to(&target.range(done, n), last)?;
                    done += n;
                    skip = 0;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: SessionId = SessionId(1);

    #[test]
    fn any_range_of_a_gather_is_placed() {
        let (mapping, _fd) = Mapping::create_arena("test", 4096).expect("memory for the arena");
        let sources = [&b"abcde"[..], b"", b"fghijkl", b"mnop"].map(|o| Target::private(OWNER, o));
        let payload = Payload::Gather(&sources);
        let whole = b"abcdefghijklmnop";
        assert_eq!(payload.len(), whole.len());
        for from in 0..whole.len() {
            for len in 0..=whole.len() - from {
                let clean = [b'.'; 32];
                let to = |offset, len| Target::inline(OWNER, &mapping, offset, len);
                to(0, 32).write(&clean, false).expect("mapped");
                payload.place(from, to(8, len), len % 2 == 0).expect("mapped");
                let mut found = [0; 32];
                to(0, 32).read(0, &mut found).expect("mapped");
                let mut expected = clean;
                expected[8..8 + len].copy_from_slice(&whole[from..from + len]);
                assert_eq!(found, expected, "{len} bytes from {from}");
                let mut read = vec![0; len];
                payload.read(from, &mut read).expect("mapped");
                assert_eq!(read, &whole[from..from + len], "{len} bytes from {from}");
            }
        }
    }
}
