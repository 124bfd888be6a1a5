//! Work requests, copied from the program's structures.

use arrayvec::ArrayVec;
use rnic_client::{AtomicOperation, DatagramAddress, SendOpcode, Sge};

use crate::c;
use crate::errno::Errno;
use crate::verbs::mw::WindowKey;

/// Maximum number of SGEs in a request.
pub(crate) const MAX_SGE: usize = 16;
/// Maximum number of inline bytes in a request.
pub(crate) const MAX_INLINE: usize = 1024;

/// Converts the maximum number of SGEs for the requests of a queue. Returns at least 1, and 255 for
/// any larger number.
pub(crate) fn elements(asked: u32) -> u8 {
    u8::try_from(asked.max(1)).unwrap_or(u8::MAX)
}

/// The SGEs of a request, which refer to memory of the program.
///
/// [`copied`](Self::copied) and [`push`](Self::push) require that this memory stays readable, or
/// writable, until the request completes.
#[derive(Clone, Debug, Default)]
pub(crate) struct SgeList(ArrayVec<Sge, MAX_SGE>);

impl SgeList {
    /// Copies the SGEs of a request.
    ///
    /// # Safety
    ///
    /// `list` points to `count` SGEs. Memory of an SGE that is readable (or writable) by this
    /// program stays so until the request has completed, as `ibv_post_send(3)` requires.
    pub(crate) unsafe fn copied(list: *const c::ibv_sge, count: i32) -> Result<Self, Errno> {
        let count = usize::try_from(count)
            .ok()
            .filter(|count| *count <= MAX_SGE)
            .ok_or_else(|| invalid!("num_sge {count}: must be 0 to {MAX_SGE}"))?;
        let mut elements = ArrayVec::new();
        for n in 0..count {
            // SAFETY: the caller guarantees that there are `count` SGEs. They need not be aligned:
            // libiscsi has them in a packed structure.
            let element = unsafe { list.add(n).read_unaligned() };
            let c::ibv_sge { addr, length, lkey } = element;
            elements.push(Sge { addr, length, lkey });
        }
        Ok(SgeList(elements))
    }

    /// Adds an SGE.
    ///
    /// # Safety
    ///
    /// The same as for [`copied`](Self::copied).
    pub(crate) unsafe fn push(&mut self, element: Sge) -> Result<(), Errno> {
        self.0.try_push(element).map_err(|_| invalid!("a request has more than {MAX_SGE} SGEs"))
    }

    pub(crate) fn list(&self) -> &[Sge] {
        &self.0
    }

    /// Returns the total length of all SGEs in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|element| u64::from(element.length)).sum()
    }

    /// Copies the bytes at the addresses of the SGEs (`IBV_SEND_INLINE`). Returns `None` if there
    /// are more than [`MAX_INLINE`] bytes.
    pub(crate) fn gather(&self) -> Option<ArrayVec<u8, MAX_INLINE>> {
        let mut bytes: ArrayVec<u8, MAX_INLINE> = ArrayVec::new();
        for element in self.0.iter().filter(|element| element.length > 0) {
            let length = element.length as usize;
            if length > bytes.remaining_capacity() {
                return None;
            }
            let end = bytes.len() + length;
            // SAFETY: the program posts the SGE inline, so its memory stays readable until the call
            // returns (`copied`), though a peer may write it. The capacity was checked.
            unsafe {
                let to = bytes.as_mut_ptr().add(bytes.len());
                std::ptr::copy_nonoverlapping(element.addr as *const u8, to, length);
                bytes.set_len(end);
            }
        }
        Some(bytes)
    }

    /// Copies the bytes of SGEs in memory regions, from the addresses that `locate` returns.
    ///
    /// The kernel performs the copy, because the program may have unmapped or protected a page
    /// after registration. Returns `None` if the kernel or `locate` fails, or if there are more
    /// than [`MAX_INLINE`] bytes.
    pub(crate) fn fetch(
        &self,
        locate: impl Fn(&Sge) -> Option<u64>,
    ) -> Option<ArrayVec<u8, MAX_INLINE>> {
        let length = usize::try_from(self.bytes()).ok().filter(|length| *length <= MAX_INLINE)?;
        let mut pieces: ArrayVec<libc::iovec, MAX_SGE> = ArrayVec::new();
        for element in self.0.iter().filter(|element| element.length > 0) {
            let start = locate(element)? as *mut libc::c_void;
            pieces.push(libc::iovec { iov_base: start, iov_len: element.length as usize });
        }
        let mut bytes = ArrayVec::<u8, MAX_INLINE>::new();
        let to = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: length };
        let own = std::process::id().cast_signed();
        let from = pieces.as_ptr();
        // SAFETY: `to` has room for `length` bytes, at most the capacity of `bytes`. `from` has
        // `pieces.len()` entries, and the kernel checks their addresses.
        let copied =
            unsafe { libc::process_vm_readv(own, &raw const to, 1, from, pieces.len() as u64, 0) };
        if copied != length.cast_signed() {
            return None;
        }
        // SAFETY: the kernel has written the first `length` bytes.
        unsafe { bytes.set_len(length) };
        Some(bytes)
    }
}

/// A request for a send queue.
#[derive(Clone, Debug)]
pub(crate) struct SendWork {
    pub(crate) wr_id: u64,
    pub(crate) kind: SendKind,
    /// `IBV_SEND_...`.
    pub(crate) flags: u32,
    pub(crate) elements: SgeList,
    /// Destination of a datagram.
    pub(crate) to: Option<DatagramAddress>,
    /// Inline data that has already been copied, in place of SGEs.
    pub(crate) copied: Option<Vec<u8>>,
    /// Key state of the window for a bind.
    pub(crate) window: Option<WindowKey>,
}

impl SendWork {
    /// Returns true if the program requested inline data.
    pub(crate) fn is_inline(&self) -> bool {
        self.copied.is_some() || self.flags & c::IBV_SEND_INLINE != 0
    }

    /// Returns the length of the data in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.copied {
            Some(bytes) => bytes.len() as u64,
            None => self.elements.bytes(),
        }
    }

    /// Copies inline data. The program may change the data afterwards.
    ///
    /// # Safety
    ///
    /// Each piece is readable for its length.
    pub(crate) unsafe fn set_inline(
        &mut self,
        pieces: &[(*const libc::c_void, usize)],
    ) -> Result<(), Errno> {
        let mut bytes: Vec<u8> = Vec::new();
        for &(from, length) in pieces {
            if length > MAX_INLINE - bytes.len() {
                return Err(invalid!("a request has more than {MAX_INLINE} inline bytes"));
            }
            if length > 0 {
                bytes.reserve(length);
                let end = bytes.len() + length;
                // SAFETY: the caller guarantees that the piece is readable, though a peer may write
                // it. There is room for it.
                unsafe {
                    let to = bytes.as_mut_ptr().add(bytes.len());
                    std::ptr::copy_nonoverlapping(from.cast(), to, length);
                    bytes.set_len(end);
                }
            }
        }
        self.copied = Some(bytes);
        Ok(())
    }
}

/// Operation of a send request, with its parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SendKind {
    Send,
    /// With four bytes of immediate data, in network byte order.
    SendImmediate {
        data: u32,
    },
    SendInvalidate {
        rkey: u32,
    },
    Write {
        remote: u64,
        rkey: u32,
        /// In network byte order.
        immediate: Option<u32>,
    },
    Atomic {
        remote: u64,
        rkey: u32,
        operation: AtomicOperation,
    },
    Read {
        remote: u64,
        rkey: u32,
    },
    LocalInvalidate {
        rkey: u32,
    },
    BindWindow(BindWork),
    /// An operation that the device does not support, or without an opcode a request that an
    /// earlier call has failed to describe.
    Unsupported(Option<u32>),
}

impl SendKind {
    /// Returns the opcode of the request; `None` if the device does not support it.
    pub(crate) fn opcode(&self) -> Option<SendOpcode> {
        Some(match self {
            SendKind::Send => SendOpcode::Send,
            SendKind::SendImmediate { .. } => SendOpcode::SendImmediate,
            SendKind::SendInvalidate { .. } => SendOpcode::SendInvalidate,
            SendKind::Write { immediate: None, .. } => SendOpcode::Write,
            SendKind::Write { immediate: Some(_), .. } => SendOpcode::WriteImmediate,
            SendKind::Atomic { operation, .. } => SendOpcode::of_operation(*operation).0,
            SendKind::Read { .. } => SendOpcode::Read,
            SendKind::LocalInvalidate { .. } => SendOpcode::LocalInvalidate,
            SendKind::BindWindow(_) => SendOpcode::BindWindow,
            SendKind::Unsupported(_) => return None,
        })
    }

    /// Returns true if the request requires responses or guaranteed delivery.
    pub(crate) fn needs_reliability(&self) -> bool {
        matches!(
            self,
            SendKind::SendInvalidate { .. } | SendKind::Atomic { .. } | SendKind::Read { .. }
        )
    }
}

/// Parameters of a bind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BindWork {
    /// The requested key, of which only the low 8 bits are used.
    pub(crate) wanted: u32,
    /// L_Key of the region. 0 with length 0 unbinds the window.
    pub(crate) lkey: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
}

/// A request for a receive queue.
#[derive(Clone, Debug)]
pub(crate) struct ReceiveWork {
    pub(crate) wr_id: u64,
    pub(crate) elements: SgeList,
}
