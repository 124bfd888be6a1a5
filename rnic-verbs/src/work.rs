//! Work requests as the program posted them, copied out of its structures.

use arrayvec::ArrayVec;
use rnic_client::{AtomicOperation, DatagramAddress, Sge};

use crate::c;
use crate::errno::Errno;
use crate::mw::WindowKey;

/// Most elements of a request.
pub(crate) const MAX_SGE: usize = 16;
/// Most bytes that are copied into a request.
pub(crate) const MAX_INLINE: usize = 1024;

/// The number of elements per request of a queue, at least 1.
///
/// # Errors
///
/// `EINVAL` if it is above `most`.
pub(crate) fn elements(name: &str, asked: u32, most: u8) -> Result<u8, Errno> {
    u8::try_from(asked.max(1))
        .ok()
        .filter(|&n| n <= most)
        .ok_or_else(|| Errno::invalid(format_args!("{name} {asked} is above {most} (max_sge)")))
}

/// Memory of the program that a request names, element by element.
///
/// Whoever made it promised that the program lets the elements that are its own be read, or
/// written, until the request completes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Elements(ArrayVec<Sge, MAX_SGE>);

impl Elements {
    /// Copies the elements of a request.
    ///
    /// # Safety
    ///
    /// `list` points to `count` elements. Those that turn out to be readable (or writable) by this
    /// program stay so until the request has completed, as `ibv_post_send(3)` demands.
    pub(crate) unsafe fn copied(list: *const c::ibv_sge, count: i32) -> Result<Self, Errno> {
        let count =
            usize::try_from(count).ok().filter(|count| *count <= MAX_SGE).ok_or_else(|| {
                Errno::invalid(format_args!("num_sge {count} is not in 0 to {MAX_SGE}"))
            })?;
        let mut elements = ArrayVec::new();
        for n in 0..count {
            // SAFETY: the caller says that there are so many.
            let c::ibv_sge { addr, length, lkey } = unsafe { *list.add(n) };
            elements.push(Sge { addr, length, lkey });
        }
        Ok(Elements(elements))
    }

    /// One element of no region, which is to be copied when it is posted.
    ///
    /// # Safety
    ///
    /// As of [`copied`](Self::copied).
    pub(crate) unsafe fn push(&mut self, element: Sge) -> Result<(), Errno> {
        self.0
            .try_push(element)
            .map_err(|_| Errno::invalid(format_args!("a request has more than {MAX_SGE} elements")))
    }

    pub(crate) fn list(&self) -> &[Sge] {
        &self.0
    }

    /// Bytes of all elements.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|element| u64::from(element.length)).sum()
    }

    /// Copies the bytes at the elements' own addresses (`IBV_SEND_INLINE`). Returns `None` if there
    /// are more than a request holds.
    pub(crate) fn gather(&self) -> Option<ArrayVec<u8, MAX_INLINE>> {
        let mut bytes = ArrayVec::new();
        for element in self.0.iter().filter(|element| element.length > 0) {
            let length = element.length as usize;
            if length > bytes.remaining_capacity() {
                return None;
            }
            // SAFETY: the program posts the element inline, so it can be read until the call
            // returns (`copied`).
            let from = unsafe { std::slice::from_raw_parts(element.addr as *const u8, length) };
            bytes.try_extend_from_slice(from).ok()?;
        }
        Some(bytes)
    }

    /// Copies the bytes of elements that lie in regions, at the addresses that `locate` returns.
    ///
    /// The program may have unmapped or protected a page since it registered the region, so the
    /// kernel copies them. Returns `None` if it refuses, if `locate` does, or if there are more
    /// than a request holds.
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
        // SAFETY: `to` is room for `length` bytes, at most the capacity of `bytes`. `from` has as
        // many pieces as stated; the kernel checks their addresses.
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
    pub(crate) elements: Elements,
    /// Where it goes, if it is a datagram.
    pub(crate) to: Option<DatagramAddress>,
    /// Bytes that were copied already, in place of elements.
    pub(crate) copied: Option<Vec<u8>>,
    /// That of the window, if it is a bind.
    pub(crate) window: Option<WindowKey>,
}

impl SendWork {
    /// Whether its data are copied when it is posted, at the program's wish.
    pub(crate) fn is_inline(&self) -> bool {
        self.copied.is_some() || self.flags & c::IBV_SEND_INLINE != 0
    }

    /// Bytes of its data.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.copied {
            Some(bytes) => bytes.len() as u64,
            None => self.elements.bytes(),
        }
    }

    /// Copies data that the program may change from now on.
    ///
    /// # Safety
    ///
    /// Each piece can be read, as many bytes as it says.
    pub(crate) unsafe fn set_inline(
        &mut self,
        pieces: &[(*const libc::c_void, usize)],
    ) -> Result<(), Errno> {
        let mut bytes = Vec::new();
        for &(from, length) in pieces {
            if length > MAX_INLINE - bytes.len() {
                let reason = format_args!("a request has more than {MAX_INLINE} inline bytes");
                return Err(Errno::invalid(reason));
            }
            if length > 0 {
                // SAFETY: the caller says so.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(from.cast(), length) });
            }
        }
        self.copied = Some(bytes);
        Ok(())
    }
}

/// What is to be done, with the parameters of each.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SendKind {
    Send,
    /// With four bytes beside the message, in network byte order.
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
    /// Nothing that this device does.
    Unsupported,
}

impl SendKind {
    /// Whether a queue pair needs responses for it, or has to know that it arrived.
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
    /// The key that the program asks for.
    pub(crate) wanted: u32,
    /// The region; 0 with no bytes unbinds.
    pub(crate) lkey: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
}

/// A request for a receive queue.
#[derive(Clone, Debug)]
pub(crate) struct ReceiveWork {
    pub(crate) wr_id: u64,
    pub(crate) elements: Elements,
}
