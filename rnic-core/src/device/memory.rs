//! What an STag names, and checked ranges of it.
//!
//! A [`Memory`] is where a region's bytes are, whatever its rights. A [`Target`] is a range of one
//! that has been checked by the [`StagTable`](super::StagTable); only it can be read or written.

use std::sync::Arc;

use super::copier::Copier;
pub use super::fault::{MemoryFault, Unreachable};
use crate::shm::Mapping;
use crate::shm::attached::{AddressSpace, AttachedFault, CopyEnd};
use crate::types::{ATOMIC_LEN, AtomicOperation, SessionId};

/// Where the bytes of a region are. Clones name the same bytes.
#[derive(Clone, Debug)]
pub enum Memory {
    /// In a shared buffer.
    Shared {
        /// Mapping of the shared buffer in the daemon.
        mapping: Arc<Mapping>,
        /// Bytes from its start. With the region's length it stays within the mapping.
        offset: usize,
    },
    /// In its owner's own address space. A copy is a system call, and waits for the owner's pages.
    Attached {
        /// The owner's address space, as it was attached.
        space: Arc<AddressSpace>,
        /// Where in it. With the region's length it stays below
        /// [`USER_END`](crate::shm::attached::USER_END).
        address: u64,
    },
    /// In its owner's own address space, which only a copier may touch: a copy is a job for it, and
    /// the QP waits.
    ThroughCopier {
        /// The copier of the owner's session.
        copier: Arc<Copier>,
        /// Where in it, as for `Attached`.
        address: u64,
    },
}

impl Memory {
    /// The memory `skip` bytes further on, as a window on a part of the region names it. The caller
    /// keeps `skip` within the region.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset within a mapping, whose length is a usize"
    )]
    pub fn at(&self, skip: u64) -> Memory {
        match self {
            Memory::Shared { mapping, offset } => Memory::Shared {
                mapping: mapping.clone(),
                // Within the region, hence within the mapping, whose length is a usize.
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

    /// The checked range of `len` bytes from `from` on, which the caller has bounded.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset within a mapping, whose length is a usize"
    )]
    pub(super) fn target(&self, from: u64, len: usize, owner: SessionId) -> Target<'_> {
        let place = match self {
            Memory::Shared { mapping, offset } => {
                // Bounded by the region, so the sum lies within the mapping, hence within usize.
                Location::Shared { mapping, offset: offset + from as usize }
            }
            // Bounded by the region as well, hence below 2^64.
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

/// Memory that has been checked. It borrows the table it was checked against.
#[derive(Clone, Copy)]
pub struct Target<'t> {
    place: Location<'t>,
    len: usize,
    owner: SessionId,
    /// What is copied to it goes past the caches.
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
    /// The daemon's own: what a copier has brought.
    Private(&'t [u8]),
}

impl<'t> Target<'t> {
    /// Bytes from its start to its end.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// `len` bytes of it from `from` on, if they are inside.
    pub fn part(&self, from: u64, len: usize) -> Option<Target<'t>> {
        let from = usize::try_from(from).ok()?;
        (len <= self.len.checked_sub(from)?).then(|| self.range(from, len))
    }

    /// `len` bytes from `from` on, which the caller has bounded.
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

    /// Reads `dst.len()` bytes from `from` on; the range must be inside.
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
            // Nothing comes here that a copier has not brought before.
            Location::ThroughCopier { .. } => Err(self.source_fault(Unreachable::Unmapped)),
        }
    }

    /// Writes all of it. With `tail_last` the final bytes become visible last.
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
            // What a copier is to write goes to it as a job.
            Location::ThroughCopier { .. } | Location::Private(_) => {
                Err(self.sink_fault(Unreachable::Unmapped))
            }
        }
    }

    /// Copies all of it to a target of the same length: in one pass, but between two address
    /// spaces, which takes two.
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

    /// Whether it begins where a word may.
    pub fn is_aligned(&self) -> bool {
        let start = match self.place {
            // Mappings begin with a page.
            Location::Shared { offset, .. } => offset as u64,
            Location::Attached { address, .. } | Location::ThroughCopier { address, .. } => address,
            Location::Private(_) => 0,
        };
        start.is_multiple_of(u64::from(ATOMIC_LEN))
    }

    /// Carries out an atomic operation on the word that it is; what was there before. In shared
    /// memory the processor does it in one piece, also for the client; in attached memory only for
    /// others who do it by way of the same session.
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
            // What a copier is to do goes to it as a job.
            Location::ThroughCopier { .. } | Location::Private(_) => {
                Err(self.sink_fault(Unreachable::Unmapped))
            }
        }
    }

    /// The copier that alone reaches it, and its address there.
    pub fn copier(&self) -> Option<(&'t Arc<Copier>, u64)> {
        match self.place {
            Location::ThroughCopier { copier, address } => Some((copier, address)),
            Location::Shared { .. } | Location::Attached { .. } | Location::Private(_) => None,
        }
    }

    /// The mapping and the range in it, for gathering system calls; none for other memory.
    pub fn shared(&self) -> Option<(&'t Mapping, usize, usize)> {
        match self.place {
            Location::Shared { mapping, offset } => Some((mapping, offset, self.len)),
            Location::Attached { .. } | Location::ThroughCopier { .. } | Location::Private(_) => {
                None
            }
        }
    }

    /// With a wish for where copies to it go: past the caches, if they would hold none of it when
    /// somebody comes back. From shared memory to shared memory, that is.
    pub(crate) fn past_caches(self, past_caches: bool) -> Self {
        Target { past_caches, ..self }
    }

    /// Whether it is shared memory, of which a copy cannot wait for anybody.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.place, Location::Shared { .. })
    }

    /// Bytes that a copier has brought from memory of `owner`.
    pub(crate) fn private(owner: SessionId, bytes: &'t [u8]) -> Target<'t> {
        Target { place: Location::Private(bytes), len: bytes.len(), owner, past_caches: false }
    }

    /// Inline data of a send queue entry: bytes of the client's own arena that
    /// [`take`](crate::shm::queue::SendConsumer::take) or
    /// [`look`](crate::shm::queue::SendConsumer::look) of the queue has bounded.
    pub(crate) fn inline(
        owner: SessionId,
        mapping: &'t Mapping,
        offset: usize,
        len: usize,
    ) -> Target<'t> {
        Target { place: Location::Shared { mapping, offset }, len, owner, past_caches: false }
    }

    /// The session whose memory this is: the one to blame when the memory turns out to be gone.
    pub fn owner(&self) -> SessionId {
        self.owner
    }

    /// It could not be read.
    pub(crate) fn source_fault(&self, cause: impl Into<Unreachable>) -> MemoryFault {
        MemoryFault { owner: self.owner, cause: cause.into(), end: CopyEnd::Source }
    }

    fn sink_fault(&self, cause: impl Into<Unreachable>) -> MemoryFault {
        MemoryFault { owner: self.owner, cause: cause.into(), end: CopyEnd::Sink }
    }
}

/// Where a payload comes from: private bytes, or checked memory.
#[derive(Clone, Copy)]
pub enum Payload<'a> {
    /// Bytes in the daemon's own memory.
    Bytes(&'a [u8]),
    /// Checked ranges, in order.
    Gather(&'a [Target<'a>]),
}

impl Payload<'_> {
    /// Bytes of the payload; of a gather, the sum of its ranges.
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Bytes(b) => b.len(),
            Payload::Gather(targets) => targets.iter().map(Target::len).sum(),
        }
    }

    /// Copies the bytes from `from` on out of this payload.
    pub fn read(&self, from: usize, dst: &mut [u8]) -> Result<(), MemoryFault> {
        match self {
            Payload::Bytes(b) => dst.copy_from_slice(&b[from..from + dst.len()]),
            Payload::Gather(sources) => {
                let (mut skip, mut done) = (from, 0);
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

    /// Copies the bytes `from..from + target.len()` of this payload to a target.
    ///
    /// With `tail_last` the final bytes become visible last: programs poll on them.
    pub fn place(
        &self,
        from: usize,
        target: Target<'_>,
        tail_last: bool,
    ) -> Result<(), MemoryFault> {
        match self {
            Payload::Bytes(b) => target.write(&b[from..from + target.len], tail_last),
            Payload::Gather(sources) => {
                let (mut skip, mut done) = (from, 0);
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
    fn a_gathered_payload_is_placed_from_and_up_to_anywhere() {
        let (mapping, _fd) = Mapping::create_arena("test", 4096).expect("a little memory");
        let sources = [&b"abcde"[..], b"", b"fghijkl", b"mnop"].map(|o| Target::private(OWNER, o));
        let payload = Payload::Gather(&sources);
        let whole = b"abcdefghijklmnop";
        assert_eq!(payload.len(), whole.len());
        for from in 0..whole.len() {
            for len in 0..=whole.len() - from {
                let clean = [b'.'; 32];
                let to = |offset, len| Target::inline(OWNER, &mapping, offset, len);
                to(0, 32).write(&clean, false).expect("it is there");
                payload.place(from, to(8, len), len % 2 == 0).expect("it is there");
                let mut found = [0; 32];
                to(0, 32).read(0, &mut found).expect("it is there");
                let mut expected = clean;
                expected[8..8 + len].copy_from_slice(&whole[from..from + len]);
                assert_eq!(found, expected, "{len} bytes from {from}");
                let mut read = vec![0; len];
                payload.read(from, &mut read).expect("it is there");
                assert_eq!(read, &whole[from..from + len], "{len} bytes from {from}");
            }
        }
    }
}
