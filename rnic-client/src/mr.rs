//! Memory regions, and what a peer must know to reach one.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rnic_core::abi::control::{MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_core::abi::queue::Sge;
use rnic_core::shm::{CopyFault, Mapping, RawBytes};
use rnic_core::types::{Access, MrId, Scope, Stag};
use serde::{Deserialize, Serialize};

use crate::error::{Error, copy_error};
use crate::pd::PdInner;
use crate::session::unexpected;
use crate::shared_buffer::{SharedBuffer, SharedBufferInner, resolve};

/// How to register a region.
#[derive(Clone, Copy, Debug)]
pub struct MrOptions {
    /// Rights; default [`Access::LOCAL_WRITE`]. Reading locally is always allowed.
    pub access: Access,
    /// Address from which local elements and remote offsets count. `None` (the default): the
    /// range's address in this process, or 0 with [`Access::ZERO_BASED`].
    pub iova: Option<u64>,
    /// Who may use its STag from the wire; default every QP of the domain. Only the STag of a
    /// region for one QP can be invalidated by that QP's peer (RFC 5040 section 8.1.1).
    pub scope: Scope,
}

impl Default for MrOptions {
    fn default() -> Self {
        MrOptions { access: Access::LOCAL_WRITE, iova: None, scope: Scope::Pd }
    }
}

/// A memory region: a range of a shared buffer or of attached memory, with rights and an STag
/// (`ibv_reg_mr(3)`).
///
/// With remote rights a peer may change it at any time, so there are no slices of it: bytes are
/// copied in and out, and 8-byte words can be accessed atomically. A copy that runs while a peer
/// writes sees any mixture of old and new bytes. Dropping it deregisters it, or has the last
/// [`MemoryWindow`](crate::MemoryWindow) bound to it do so.
pub struct Mr {
    stag: Stag,
    /// Bytes from the mapping's start.
    offset: u64,
    len: u64,
    iova: u64,
    registration: Arc<Registration>,
}

/// A region in the daemon, which stays while windows are bound to it.
pub(crate) struct Registration {
    pub(crate) pd: Arc<PdInner>,
    /// They outlive their regions.
    mapping: Arc<Mapping>,
    buffer: Option<Arc<SharedBufferInner>>,
    id: MrId,
    /// Whether it has been deregistered.
    gone: AtomicBool,
}

impl Registration {
    /// Deregisters it, which the daemon refuses while windows are bound to it.
    pub(crate) fn end(&self) -> Result<(), Error> {
        if self.gone.load(Ordering::Acquire) {
            return Ok(());
        }
        self.pd.session.command(RequestBody::DeregMr { mr: self.id })?;
        self.gone.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.end().is_err() && self.buffer.is_none() {
            // Nobody says that a peer writes there no more: bytes on the heap must not become
            // anything else. Shared buffers go with the session.
            std::mem::forget(self.mapping.clone());
        }
    }
}

impl Mr {
    pub(crate) fn register(
        pd: &Arc<PdInner>,
        buffer: &SharedBuffer,
        range: impl std::ops::RangeBounds<u64>,
        options: &MrOptions,
    ) -> Result<Mr, Error> {
        if !Arc::ptr_eq(&pd.session, &buffer.inner.session) {
            return Err(Error::ForeignObject { what: "the shared buffer" });
        }
        let (offset, length) = resolve(range, buffer.len())?;
        let source = MrSource::Shared { buffer: buffer.inner.id, offset };
        let mapping = buffer.inner.mapping.clone();
        let owner = Some(buffer.inner.clone());
        Mr::register_range(pd, mapping, owner, (offset, length), source, options)
    }

    /// Registers `length` bytes from `offset` on of a mapping, which `source` names. `buffer` is
    /// the one that the mapping is of; none in attached memory.
    pub(crate) fn register_range(
        pd: &Arc<PdInner>,
        mapping: Arc<Mapping>,
        buffer: Option<Arc<SharedBufferInner>>,
        (offset, length): (u64, u64),
        source: MrSource,
        options: &MrOptions,
    ) -> Result<Mr, Error> {
        let iova = match options.iova {
            Some(iova) => iova,
            None if options.access.contains(Access::ZERO_BASED) => 0,
            // Inside of the mapping, so it cannot overflow.
            None => mapping.address() + offset,
        };
        let body = RequestBody::RegMr(MrRequest {
            pd: pd.id,
            source,
            length,
            iova,
            access: options.access,
            scope: options.scope,
        });
        match pd.session.request(body)? {
            ReplyBody::Mr { mr: id, stag } => Ok(Mr {
                stag,
                offset,
                len: length,
                iova,
                registration: Arc::new(Registration {
                    pd: pd.clone(),
                    mapping,
                    buffer,
                    id,
                    gone: AtomicBool::new(false),
                }),
            }),
            other => Err(unexpected(&other)),
        }
    }

    /// Its handle in the daemon.
    pub fn id(&self) -> MrId {
        self.registration.id
    }

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.registration
    }

    /// Its STag as local elements name it.
    pub fn lkey(&self) -> Stag {
        self.stag
    }

    /// Its STag as a peer names it; the same number over iWARP.
    pub fn rkey(&self) -> Stag {
        self.stag
    }

    /// Address of its first byte in elements and remote offsets.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Bytes of the region, at least 1.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The element for `length` bytes from `offset` on, for a work request. The daemon checks the
    /// range when it carries the request out: one outside of the region completes as
    /// `LocalProtection`.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.iova.wrapping_add(offset), length, lkey: self.stag.0 }
    }

    /// What a peer must know to read or write this region.
    pub fn remote(&self) -> RemoteMr {
        RemoteMr { addr: self.iova, len: self.len, rkey: self.stag }
    }

    /// Copies bytes from `offset` on out of the region.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let at = self.at(offset, bytes.len())?;
        self.registration.mapping.read(at, bytes).map_err(|e| self.fault(e, offset, bytes.len()))
    }

    /// Copies bytes into the region from `offset` on.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let at = self.at(offset, bytes.len())?;
        self.registration.mapping.write(at, bytes).map_err(|e| self.fault(e, offset, bytes.len()))
    }

    /// Sets `length` bytes from `offset` on to `byte`.
    pub fn fill(&self, offset: u64, length: usize, byte: u8) -> Result<(), Error> {
        let at = self.at(offset, length)?;
        self.registration.mapping.fill(at, length, byte).map_err(|e| self.fault(e, offset, length))
    }

    /// Copies `length` bytes from `offset` on into another region, from `to_offset` on, with one
    /// pass over them. The regions may overlap, or be the same: what arrives is what was there
    /// before.
    pub fn copy_to(
        &self,
        offset: u64,
        to: &Mr,
        to_offset: u64,
        length: usize,
    ) -> Result<(), Error> {
        let from = self.at(offset, length)?;
        let at = to.at(to_offset, length)?;
        let target = &to.registration.mapping;
        let done = self.registration.mapping.copy_to(from, target, at, length, false);
        done.map_err(|e| self.fault(e, offset, length))
    }

    /// `length` bytes from `offset` on as they lie in memory, for programs that read or write in
    /// place: a pointer, and slices by `unsafe` calls that say what the caller has to see to. What
    /// a peer can reach, or a posted request names, must not be a slice meanwhile; memory of a
    /// [`LocalMr`](crate::LocalMr) is lent as slices without `unsafe`.
    pub fn raw(&self, offset: u64, length: usize) -> Result<RawBytes<'_>, Error> {
        let at = self.at(offset, length)?;
        let bytes = RawBytes::new(&self.registration.mapping, at, length);
        bytes.ok_or_else(|| self.fault(CopyFault::OutOfRange, offset, length))
    }

    /// Loads the native-endian word at `offset` with acquire: bytes that a peer placed before it
    /// are visible after it. The word must be aligned to 8 bytes in memory.
    pub fn load_u64(&self, offset: u64) -> Result<u64, Error> {
        let at = self.word_at(offset)?;
        self.registration.mapping.load_u64(at).map_err(|e| self.fault(e, offset, 8))
    }

    /// Stores the native-endian word at `offset` with release: bytes written before it are visible
    /// to whoever sees it. The word must be aligned to 8 bytes in memory.
    pub fn store_u64(&self, offset: u64, word: u64) -> Result<(), Error> {
        let at = self.word_at(offset)?;
        self.registration.mapping.store_u64(at, word).map_err(|e| self.fault(e, offset, 8))
    }

    /// Adds to the word at `offset` in one step and returns what it was. Atomic among the threads
    /// of this process and against atomic operations of peers, not against RDMA Writes.
    pub fn fetch_add_u64(&self, offset: u64, add: u64) -> Result<u64, Error> {
        let at = self.word_at(offset)?;
        self.registration.mapping.fetch_add_u64(at, add).map_err(|e| self.fault(e, offset, 8))
    }

    /// Deregisters it (`ibv_dereg_mr(3)`). When this returns, not one more byte will be read from
    /// or written to it from the wire.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] while windows are bound to it, with their number. It is then deregistered
    /// when the last [`MemoryWindow`](crate::MemoryWindow) that this library has bound
    /// to it is dropped.
    pub fn deregister(self) -> Result<(), Error> {
        self.registration.end()
    }

    /// Bytes from the mapping's start, if the whole access lies inside of the region.
    fn at(&self, offset: u64, length: usize) -> Result<usize, Error> {
        match offset.checked_add(length as u64) {
            // The region lies inside of the mapping, whose length is a usize.
            Some(end) if end <= self.len => Ok((self.offset + offset) as usize),
            _ => Err(self.fault(CopyFault::OutOfRange, offset, length)),
        }
    }

    fn word_at(&self, offset: u64) -> Result<usize, Error> {
        match self.at(offset, 8)? {
            at if (self.registration.mapping.address() as usize + at).is_multiple_of(8) => Ok(at),
            at => Err(Error::Misaligned { offset: at as u64 }),
        }
    }

    fn fault(&self, e: CopyFault, offset: u64, length: usize) -> Error {
        copy_error(e, offset, length, self.len)
    }
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mr")
            .field("id", &self.id())
            .field("stag", &self.stag)
            .field("iova", &self.iova)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// What a peer must know to read or write a region: usually sent as private data or in a message.
///
/// [`RemoteMr::to_bytes`] is the form to send: 20 bytes, little-endian, address 8, length 8,
/// STag 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteMr {
    /// Tagged offset of its first byte.
    pub addr: u64,
    /// Bytes of the region from `addr` on.
    pub len: u64,
    /// STag by which the peer is to name the region.
    pub rkey: Stag,
}

/// A place in a peer's memory: target of a Write, source of a Read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteAddr {
    /// Tagged offset (RFC 5041 section 4.2).
    pub addr: u64,
    /// STag of the region or window at the peer.
    pub rkey: Stag,
}

impl RemoteMr {
    /// Bytes of the form to send.
    pub const LEN: usize = 20;

    /// The place `offset` bytes from the region's start. The peer's RNIC checks it.
    pub fn at(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.addr.wrapping_add(offset), rkey: self.rkey }
    }

    /// The form to send.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[..8].copy_from_slice(&self.addr.to_le_bytes());
        b[8..16].copy_from_slice(&self.len.to_le_bytes());
        b[16..].copy_from_slice(&self.rkey.0.to_le_bytes());
        b
    }

    /// Reads the sent form from the start of `bytes`; `None` if there are too few.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (addr, rest) = bytes.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (rkey, _) = rest.split_first_chunk()?;
        Some(RemoteMr {
            addr: u64::from_le_bytes(*addr),
            len: u64::from_le_bytes(*len),
            rkey: Stag(u32::from_le_bytes(*rkey)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_region_bytes_stand_where_the_docs_say() {
        let r = RemoteMr { addr: 0x0102, len: 1 << 40, rkey: Stag(0xAABB_CCDD) };
        let b = r.to_bytes();
        assert_eq!(b, [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0xDD, 0xCC, 0xBB, 0xAA]);
        assert_eq!(RemoteMr::from_bytes(&b), Some(r));
        for n in 0..RemoteMr::LEN {
            assert_eq!(RemoteMr::from_bytes(&b[..n]), None);
        }
        assert_eq!(r.at(2), RemoteAddr { addr: 0x0104, rkey: r.rkey });
    }
}
