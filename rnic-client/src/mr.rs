//! Memory regions and their descriptions for peers.

use std::fmt;
use std::ops::RangeBounds;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rnic_abi::abi::control::{MrRequest, MrSource, ReplyBody, RequestBody};
use rnic_abi::abi::queue::Sge;
use rnic_abi::shm::{CopyFault, Mapping, RawBytes};
use rnic_abi::types::{Access, MrId, Scope, Stag};
use serde::{Deserialize, Serialize};

use crate::error::{Error, copy_error};
use crate::pd::{Pd, PdInner};
use crate::session::unexpected;
use crate::shared_buffer::{SharedBuffer, SharedBufferInner, resolve};

/// Options for registering a region.
#[derive(Clone, Copy, Debug)]
pub struct MrOptions {
    /// Access rights; default [`Access::LOCAL_WRITE`]. Local read is always allowed.
    pub access: Access,
    /// Address of the first byte in SGEs and for remote access. `None` (the default): the range's
    /// address in this process, or 0 with [`Access::ZERO_BASED`].
    pub iova: Option<u64>,
    /// QPs that may use the STag, locally or remotely; default all of the domain. A peer can
    /// invalidate the STag only if the region is for the QP it is connected to (RFC 5040 section
    /// 8.1.1).
    pub scope: Scope,
}

impl Default for MrOptions {
    fn default() -> Self {
        MrOptions { access: Access::LOCAL_WRITE, iova: None, scope: Scope::Pd }
    }
}

/// A memory region: a range of a shared buffer, with rights and an STag (`ibv_reg_mr(3)`).
///
/// With remote rights a peer may change the bytes at any time, so the library gives no slices of
/// them: it copies bytes in and out, and accesses 8-byte words atomically. A copy that runs while a
/// peer writes may return any mixture of old and new bytes. Dropping the `Mr` deregisters the
/// region. If [`MemoryWindow`](crate::MemoryWindow)s are bound to it, it is deregistered when the
/// last of them is dropped.
pub struct Mr {
    stag: Stag,
    /// Offset from the shared buffer's start, in bytes.
    offset: u64,
    len: u64,
    iova: u64,
    registration: Arc<Registration>,
}

/// A region in the daemon, which remains registered while windows are bound to it.
pub(crate) struct Registration {
    pub(crate) pd: Arc<PdInner>,
    /// Must outlive the region.
    buffer: Arc<SharedBufferInner>,
    id: MrId,
    /// Set once the region is deregistered.
    gone: AtomicBool,
}

impl Registration {
    /// Deregisters the region. The daemon refuses while windows are bound to it.
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
        // Fails if the session has ended, or if windows are bound. In the latter case the region
        // and its buffer remain until the session ends.
        let _ = self.end();
    }
}

impl Pd {
    /// Registers a range of a shared buffer, in bytes from its start (`ibv_reg_mr(3)`). SGEs and
    /// remote accesses use the range's addresses in this process, or offsets from 0 with
    /// [`Access::ZERO_BASED`].
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if the range is outside the shared buffer; [`Error::Refused`] with the
    /// limit, or with the right that is not allowed (`REMOTE_WRITE` or `REMOTE_ATOMIC` without
    /// `LOCAL_WRITE`).
    ///
    /// # Examples
    ///
    /// A region for the peer to write to, and the message with its address:
    ///
    /// ```no_run
    /// # use rnic_client::*;
    /// # fn offer(context: &Context, pd: &Pd, qp: &Qp) -> Result<(), Box<dyn std::error::Error>> {
    /// let buffer = context.create_shared_buffer(1 << 20)?;
    /// // Peers may write to the second half. They have no access to the first half.
    /// let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    /// let inbox = pd.reg_mr(&buffer, 512 * 1024.., rights)?;
    /// qp.post_send(&[SendRequest::send_inline(1, &inbox.remote().to_bytes())])?;
    /// // The peer decodes `RemoteMr::from_bytes(..)`, posts `SendRequest::write(2, &sges,
    /// // remote.at(0))` and then sends a message. After that message has arrived:
    /// let mut header = [0; 64];
    /// inbox.read_at(0, &mut header)?;
    /// // After this returns, the peer can no longer write.
    /// inbox.deregister()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn reg_mr(
        &self,
        buffer: &SharedBuffer,
        range: impl RangeBounds<u64>,
        access: Access,
    ) -> Result<Mr, Error> {
        self.reg_mr_with(buffer, range, &MrOptions { access, ..MrOptions::default() })
    }

    /// Registers a range of a shared buffer with options, such as an address or a single QP.
    ///
    /// # Errors
    ///
    /// Same as [`Pd::reg_mr`]; also [`Error::Refused`] if the addresses from
    /// [`iova`](MrOptions::iova) would exceed 64 bits, or if the QP does not belong to this domain.
    pub fn reg_mr_with(
        &self,
        buffer: &SharedBuffer,
        range: impl RangeBounds<u64>,
        options: &MrOptions,
    ) -> Result<Mr, Error> {
        if !Arc::ptr_eq(&self.inner.session, &buffer.inner.session) {
            return Err(Error::ForeignObject { what: "the shared buffer" });
        }
        let (offset, length) = resolve(range, buffer.len())?;
        let iova = match options.iova {
            Some(iova) => iova,
            None if options.access.contains(Access::ZERO_BASED) => 0,
            // The range lies inside the mapping, so the sum cannot overflow.
            None => buffer.inner.mapping.address() + offset,
        };
        let body = RequestBody::RegMr(MrRequest {
            pd: self.inner.id,
            source: MrSource::Shared { buffer: buffer.inner.id, offset },
            length,
            iova,
            access: options.access,
            scope: options.scope,
        });
        match self.inner.session.request(body)? {
            ReplyBody::Mr { mr: id, stag } => Ok(Mr {
                stag,
                offset,
                len: length,
                iova,
                registration: Arc::new(Registration {
                    pd: self.inner.clone(),
                    buffer: buffer.inner.clone(),
                    id,
                    gone: AtomicBool::new(false),
                }),
            }),
            other => Err(unexpected(&other)),
        }
    }
}

impl Mr {
    /// Returns the region's handle in the daemon.
    pub fn id(&self) -> MrId {
        self.registration.id
    }

    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.registration
    }

    /// Returns the STag for local SGEs (lkey).
    pub fn lkey(&self) -> Stag {
        self.stag
    }

    /// Returns the STag for the peer (rkey). It is the same number as [`lkey`](Self::lkey).
    pub fn rkey(&self) -> Stag {
        self.stag
    }

    /// Returns the address of the first byte in SGEs and for remote access.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Returns the length of the region in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the SGE for `length` bytes from `offset`, for a work request. The daemon checks the
    /// range when it executes the request: a request with a range outside the region completes with
    /// `LocalProtection`.
    pub fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.iova.wrapping_add(offset), length, lkey: self.stag.0 }
    }

    /// Returns the description that a peer needs to read or write this region.
    pub fn remote(&self) -> RemoteMr {
        RemoteMr { addr: self.iova, len: self.len, rkey: self.stag }
    }

    /// Copies bytes from the region, starting at `offset`.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let at = self.at(offset, bytes.len())?;
        self.mapping().read(at, bytes).map_err(|e| self.fault(e, offset, bytes.len()))
    }

    /// Copies bytes to the region, starting at `offset`.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let at = self.at(offset, bytes.len())?;
        self.mapping().write(at, bytes).map_err(|e| self.fault(e, offset, bytes.len()))
    }

    /// Sets `length` bytes from `offset` to `byte`.
    pub fn fill(&self, offset: u64, length: usize, byte: u8) -> Result<(), Error> {
        let at = self.at(offset, length)?;
        self.mapping().fill(at, length, byte).map_err(|e| self.fault(e, offset, length))
    }

    /// Copies `length` bytes from `offset` to `to_offset` of another region. Ranges of the same
    /// buffer may overlap: the destination receives the original bytes.
    pub fn copy_to(
        &self,
        offset: u64,
        to: &Mr,
        to_offset: u64,
        length: usize,
    ) -> Result<(), Error> {
        let from = self.at(offset, length)?;
        let at = to.at(to_offset, length)?;
        let target = to.mapping();
        let done = self.mapping().copy_to(from, target, at, length, false);
        done.map_err(|e| self.fault(e, offset, length))
    }

    /// Returns `length` bytes from `offset` in place: as a pointer, and as slices by `unsafe` calls
    /// that document the caller's obligations. A slice must not exist while a peer may access its
    /// bytes or a posted request uses them. A [`LocalMr`](crate::LocalMr) has safe slices.
    pub fn raw(&self, offset: u64, length: usize) -> Result<RawBytes<'_>, Error> {
        let at = self.at(offset, length)?;
        let bytes = RawBytes::new(self.mapping(), at, length);
        bytes.ok_or_else(|| self.fault(CopyFault::OutOfRange, offset, length))
    }

    /// Loads the native-endian word at `offset` with acquire ordering: bytes that a peer wrote
    /// before the word are visible after the load. The word must be 8-byte aligned in memory.
    pub fn load_u64(&self, offset: u64) -> Result<u64, Error> {
        let at = self.word_at(offset)?;
        self.mapping().load_u64(at).map_err(|e| self.fault(e, offset, 8))
    }

    /// Stores the native-endian word at `offset` with release ordering: earlier writes are visible
    /// to a reader that sees the word. The word must be 8-byte aligned in memory.
    pub fn store_u64(&self, offset: u64, word: u64) -> Result<(), Error> {
        let at = self.word_at(offset)?;
        self.mapping().store_u64(at, word).map_err(|e| self.fault(e, offset, 8))
    }

    /// Atomically adds to the word at `offset` and returns its previous value. The operation is
    /// atomic with respect to other threads of this process and to atomic operations of peers, but
    /// not to RDMA Writes.
    pub fn fetch_add_u64(&self, offset: u64, add: u64) -> Result<u64, Error> {
        let at = self.word_at(offset)?;
        self.mapping().fetch_add_u64(at, add).map_err(|e| self.fault(e, offset, 8))
    }

    /// Deregisters the region (`ibv_dereg_mr(3)`). After this returns, peers cannot read or write
    /// it.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] with the number of bound windows while windows are bound to the region.
    /// The region is then deregistered when the last [`MemoryWindow`](crate::MemoryWindow) that
    /// this library has bound to it is dropped.
    pub fn deregister(self) -> Result<(), Error> {
        self.registration.end()
    }

    fn mapping(&self) -> &Mapping {
        &self.registration.buffer.mapping
    }

    /// Returns the offset in the mapping. Fails if the access is not fully inside the region.
    fn at(&self, offset: u64, length: usize) -> Result<usize, Error> {
        match offset.checked_add(length as u64) {
            // The region lies inside the mapping, and the length of a mapping is a usize.
            Some(end) if end <= self.len => Ok((self.offset + offset) as usize),
            _ => Err(self.fault(CopyFault::OutOfRange, offset, length)),
        }
    }

    fn word_at(&self, offset: u64) -> Result<usize, Error> {
        match self.at(offset, 8)? {
            at if (self.mapping().address() as usize + at).is_multiple_of(8) => Ok(at),
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

/// Description of a region for a peer, usually sent as private data or in a message.
///
/// [`RemoteMr::to_bytes`] encodes it in 20 bytes, little-endian: address (8 bytes), length (8) and
/// STag (4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RemoteMr {
    /// Tagged offset of the first byte.
    pub addr: u64,
    /// Length of the region from `addr`, in bytes.
    pub len: u64,
    /// STag of the region for the peer.
    pub rkey: Stag,
}

/// A location in a peer's memory: target of an RDMA Write or source of an RDMA Read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteAddr {
    /// Tagged offset (RFC 5041 section 4.2).
    pub addr: u64,
    /// STag of the region or window at the peer.
    pub rkey: Stag,
}

impl RemoteMr {
    /// Length of the encoding, in bytes.
    pub const LEN: usize = 20;

    /// Returns the location `offset` bytes from the region's start. The peer's RNIC checks it.
    pub fn at(&self, offset: u64) -> RemoteAddr {
        RemoteAddr { addr: self.addr.wrapping_add(offset), rkey: self.rkey }
    }

    /// Encodes the description.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[..8].copy_from_slice(&self.addr.to_le_bytes());
        b[8..16].copy_from_slice(&self.len.to_le_bytes());
        b[16..].copy_from_slice(&self.rkey.0.to_le_bytes());
        b
    }

    /// Decodes a description from the start of `bytes`; `None` if they are too short.
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
    fn remote_mr_encoding_matches_docs() {
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
