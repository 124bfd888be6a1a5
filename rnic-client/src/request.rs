//! Work requests.

use std::ops::RangeBounds;

use rnic_abi::abi::queue::{SendFlags, SendHeader, SendOpcode, Sge, WindowParams};
use rnic_abi::types::{Access, AtomicOperation, Stag};

use crate::mr::{Mr, RemoteAddr, RemoteMr};
use crate::shared_buffer::ends;

/// A request for the send queue (`struct ibv_send_wr` of `ibv_post_send(3)`).
///
/// Requests start in the order posted. Unless the QP signals all requests, only
/// [`signaled`](Self::signaled) requests and failed ones write a completion. The memory of the SGEs
/// belongs to the request until its completion, or that of a later request, is polled.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    pub(crate) header: SendHeader,
    pub(crate) data: Data<'a>,
}

/// Source or destination of a request's bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Data<'a> {
    Elements(&'a [Sge]),
    Element(Sge),
    Inline(&'a [u8]),
}

impl<'a> SendRequest<'a> {
    /// Sends the bytes of the SGEs as one message, which consumes the peer's next receive (RFC 5040
    /// section 5.3).
    pub fn send(wr_id: u64, elements: &'a [Sge]) -> Self {
        Self::new(SendOpcode::Send, wr_id, Data::Elements(elements))
    }

    /// Like [`send`](Self::send), with data copied into the queue, at most the QP's `max_inline`
    /// bytes. The data needs no region, and `bytes` may be reused once the request is posted.
    pub fn send_inline(wr_id: u64, bytes: &'a [u8]) -> Self {
        Self::new(SendOpcode::Send, wr_id, Data::Inline(bytes))
    }

    /// Like [`send`](Self::send), with four bytes of immediate data for the receiver's completion.
    /// RC, UC and UD QPs only.
    pub fn send_with_imm(wr_id: u64, elements: &'a [Sge], immediate: [u8; 4]) -> Self {
        Self::send(wr_id, elements).with_immediate(immediate)
    }

    /// Like [`send_inline`](Self::send_inline), with four bytes of immediate data.
    pub fn send_inline_with_imm(wr_id: u64, bytes: &'a [u8], immediate: [u8; 4]) -> Self {
        Self::send_inline(wr_id, bytes).with_immediate(immediate)
    }

    /// Like [`send`](Self::send), and invalidates the peer's region with STag `invalidate`, which
    /// must be registered for the peer's QP of this connection (Send with Invalidate, RFC 5040
    /// section 5.3).
    pub fn send_invalidate(wr_id: u64, elements: &'a [Sge], invalidate: Stag) -> Self {
        Self::send(wr_id, elements).invalidating(invalidate)
    }

    /// Like [`send_inline`](Self::send_inline), and invalidates the peer's region with STag
    /// `invalidate`.
    pub fn send_invalidate_inline(wr_id: u64, bytes: &'a [u8], invalidate: Stag) -> Self {
        Self::send_inline(wr_id, bytes).invalidating(invalidate)
    }

    /// Writes the bytes of the SGEs to the peer's memory (RDMA Write, RFC 5040 section 5.1). After
    /// the completion the source bytes may be reused. Only a later message from the peer proves
    /// that the data have arrived.
    pub fn write(wr_id: u64, elements: &'a [Sge], to: RemoteAddr) -> Self {
        Self::new(SendOpcode::Write, wr_id, Data::Elements(elements)).remote(to)
    }

    /// Like [`write`](Self::write), with data copied into the queue, at most the QP's `max_inline`
    /// bytes.
    pub fn write_inline(wr_id: u64, bytes: &'a [u8], to: RemoteAddr) -> Self {
        Self::new(SendOpcode::Write, wr_id, Data::Inline(bytes)).remote(to)
    }

    /// Like [`write`](Self::write), followed by Immediate Data (RFC 7306 section 6). The Immediate
    /// Data consume the peer's next receive. Its completion contains them and the number of bytes
    /// written. A peer that does not support Immediate Data ends the connection.
    pub fn write_with_imm(
        wr_id: u64,
        elements: &'a [Sge],
        to: RemoteAddr,
        immediate: [u8; 8],
    ) -> Self {
        Self::write(wr_id, elements, to).immediate(immediate)
    }

    /// Like [`write_inline`](Self::write_inline), followed by Immediate Data.
    pub fn write_inline_with_imm(
        wr_id: u64,
        bytes: &'a [u8],
        to: RemoteAddr,
        immediate: [u8; 8],
    ) -> Self {
        Self::write_inline(wr_id, bytes, to).immediate(immediate)
    }

    /// Atomically adds to a word of the peer's memory and returns its previous value in `into`
    /// (Atomic FetchAdd, RFC 7306 section 5). A word has 8 bytes in the byte order of its host, and
    /// its address must be a multiple of 8. The peer's region needs `REMOTE_ATOMIC`. `into` must
    /// have 8 bytes, in a region with local write access. A peer that does not support atomic
    /// operations ends the connection; adding 0 is a way to test for support.
    ///
    /// If the word is in a shared buffer, the operation is atomic with respect to all accesses,
    /// including those of the peer's program. In other memory of the peer it is atomic only with
    /// respect to atomic operations of connections of the same session.
    pub fn fetch_add(wr_id: u64, into: Sge, at: RemoteAddr, add: u64) -> Self {
        Self::atomic(wr_id, into, at, AtomicOperation::FetchAdd { add, boundaries: 0 })
    }

    /// Replaces a word of the peer's memory with `swap` if it equals `compare`, and returns its
    /// previous value in `into` (Atomic CmpSwap, RFC 7306 section 5). Otherwise as
    /// [`fetch_add`](Self::fetch_add).
    pub fn compare_swap(wr_id: u64, into: Sge, at: RemoteAddr, compare: u64, swap: u64) -> Self {
        let compare_mask = u64::MAX;
        let swap_mask = u64::MAX;
        let operation = AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask };
        Self::atomic(wr_id, into, at, operation)
    }

    /// Performs any atomic operation, including those on parts of a word. Otherwise as
    /// [`fetch_add`](Self::fetch_add).
    pub fn atomic(wr_id: u64, into: Sge, at: RemoteAddr, operation: AtomicOperation) -> Self {
        let (opcode, params) = SendOpcode::of_operation(operation);
        let mut request = Self::new(opcode, wr_id, Data::Element(into)).remote(at);
        request.header.params = params;
        request
    }

    /// Reads from the peer's memory into one SGE, the maximum for iWARP (RDMA Read, RFC 5040
    /// section 5.2). The SGE's region needs local write access.
    pub fn read(wr_id: u64, into: Sge, from: RemoteAddr) -> Self {
        Self::new(SendOpcode::Read, wr_id, Data::Element(into)).remote(from)
    }

    /// Like [`read`](Self::read), into several SGEs in order. RC QPs only.
    pub fn read_scattered(wr_id: u64, into: &'a [Sge], from: RemoteAddr) -> Self {
        Self::new(SendOpcode::Read, wr_id, Data::Elements(into)).remote(from)
    }

    /// Like [`read`](Self::read), and invalidates the SGE's own region after the bytes have arrived
    /// (RDMA Read with local invalidate).
    pub fn read_invalidate(wr_id: u64, into: Sge, from: RemoteAddr) -> Self {
        let mut request =
            Self::new(SendOpcode::ReadInvalidate, wr_id, Data::Element(into)).remote(from);
        request.header.inv_rkey = into.lkey;
        request
    }

    /// Binds the window with STag `present` and changes its STag to `new`, which may differ only in
    /// the low 8 bits. After the completion, the peer can use the new STag, and no access through
    /// the old STag is possible. [`MemoryWindow`](crate::MemoryWindow) does the same and keeps
    /// track of the STag.
    pub fn bind(wr_id: u64, present: Stag, new: Stag, bind: &Bind<'_>) -> Self {
        let (region, length) =
            bind.region.map_or((Stag(0), 0), |region| (region.lkey(), bind.length));
        Self::bind_range(wr_id, present, new, region, bind.address, length, bind.access)
    }

    /// Like [`bind`](Self::bind), to `length` bytes from `address` of the region with STag
    /// `region`. A `region` of 0 and a length of 0 unbind the window.
    pub fn bind_range(
        wr_id: u64,
        present: Stag,
        new: Stag,
        region: Stag,
        address: u64,
        length: u64,
        access: Access,
    ) -> Self {
        let mut request = Self::new(SendOpcode::BindWindow, wr_id, Data::Elements(&[]));
        let header = &mut request.header;
        header.rkey = present.0;
        header.inv_rkey = new.0;
        let lkey = region.0;
        let access = access.bits();
        header.params = WindowParams { address, length, lkey, access }.to_params();
        request
    }

    /// Invalidates a region of this program, or unbinds a window of type 2, after the requests
    /// before it have been sent. After the completion the peer has no access through it, as after
    /// [`Mr::deregister`](crate::Mr::deregister).
    pub fn local_invalidate(wr_id: u64, region: Stag) -> Self {
        let mut request = Self::new(SendOpcode::LocalInvalidate, wr_id, Data::Elements(&[]));
        request.header.inv_rkey = region.0;
        request
    }

    /// Requests a completion even if the request succeeds.
    #[must_use]
    pub fn signaled(self) -> Self {
        self.flag(SendFlags::SIGNALED)
    }

    /// Requests a solicited event at the peer. Only meaningful for requests that consume a receive
    /// (RFC 5040 section 5.3).
    #[must_use]
    pub fn solicited(self) -> Self {
        self.flag(SendFlags::SOLICITED)
    }

    /// Delays the request until all earlier reads and atomic operations of this QP have completed.
    #[must_use]
    pub fn fence(self) -> Self {
        self.flag(SendFlags::FENCE)
    }

    /// Returns the request's `wr_id`.
    pub fn wr_id(&self) -> u64 {
        self.header.wr_id
    }

    /// Returns the request's SGEs; none for inline data.
    pub(crate) fn elements(&self) -> &[Sge] {
        match &self.data {
            Data::Elements(elements) => elements,
            Data::Element(element) => std::slice::from_ref(element),
            Data::Inline(_) => &[],
        }
    }

    fn new(opcode: SendOpcode, wr_id: u64, data: Data<'a>) -> Self {
        let flags = match data {
            Data::Inline(_) => SendFlags::INLINE,
            Data::Elements(_) | Data::Element(_) => SendFlags::empty(),
        };
        let header = SendHeader {
            opcode: opcode as u8,
            // The ring sets both lengths from the data when the request is posted.
            num_sge: 0,
            flags: flags.bits(),
            inline_len: 0,
            wr_id,
            remote_addr: 0,
            rkey: 0,
            inv_rkey: 0,
            params: [0; 4],
            reserved_is_zero: true,
        };
        SendRequest { header, data }
    }

    fn remote(mut self, at: RemoteAddr) -> Self {
        self.header.remote_addr = at.addr;
        self.header.rkey = at.rkey.0;
        self
    }

    fn immediate(mut self, data: [u8; 8]) -> Self {
        self.header.opcode = SendOpcode::WriteImmediate as u8;
        self.header.params[0] = u64::from_be_bytes(data);
        self
    }

    fn with_immediate(mut self, data: [u8; 4]) -> Self {
        self.header.opcode = SendOpcode::SendImmediate as u8;
        self.header.params[0] = u64::from(u32::from_be_bytes(data)) << 32;
        self
    }

    fn invalidating(mut self, stag: Stag) -> Self {
        self.header.opcode = SendOpcode::SendInvalidate as u8;
        self.header.inv_rkey = stag.0;
        self
    }

    fn flag(mut self, flag: SendFlags) -> Self {
        self.header.flags |= flag.bits();
        self
    }
}

/// Binding of a window (`struct ibv_mw_bind_info` of `ibv_bind_mw(3)`).
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// The region; `None` unbinds a window of type 1.
    pub region: Option<&'a Mr>,
    /// First address, in the region's address space for SGEs ([`Mr::iova`]).
    pub address: u64,
    /// Length in bytes, at least 1.
    pub length: u64,
    /// Any of `REMOTE_READ`, `REMOTE_WRITE` (which requires a region with `LOCAL_WRITE`) and
    /// `ZERO_BASED`.
    pub access: Access,
}

impl<'a> Bind<'a> {
    /// Returns a binding to a range of a region, in bytes from its start. The region needs
    /// [`Access::MW_BIND`]. The daemon checks the binding when it executes the request: an invalid
    /// one completes with `MwBind` and ends the connection.
    pub fn new(region: &'a Mr, range: impl RangeBounds<u64>, access: Access) -> Self {
        let (start, end) = ends(range, region.len());
        Bind {
            region: Some(region),
            address: region.iova().wrapping_add(start),
            length: end.saturating_sub(start),
            access,
        }
    }

    /// Returns a binding to no region, which unbinds a window of type 1.
    pub fn nothing() -> Self {
        Bind { region: None, address: 0, length: 0, access: Access::empty() }
    }

    /// Returns the description for the peer of a window with this binding and this STag.
    pub fn remote(&self, rkey: Stag) -> RemoteMr {
        let zero_based = self.access.contains(Access::ZERO_BASED);
        let addr = if zero_based { 0 } else { self.address };
        RemoteMr { addr, len: self.length, rkey }
    }
}

/// A request for the receive queue (`ibv_post_recv(3)`).
///
/// A message fills the SGEs in order. A message longer than all SGEs together ends the connection
/// (RFC 5041 section 5.1). The memory belongs to the request until its completion is polled, and
/// the regions need local write access.
#[derive(Clone, Copy, Debug)]
pub struct RecvRequest<'a> {
    /// Identifies the request in its completion.
    pub wr_id: u64,
    /// Destination of the message; may be empty for messages without data.
    pub sges: &'a [Sge],
}

impl<'a> RecvRequest<'a> {
    /// Returns a receive into these SGEs.
    pub fn new(wr_id: u64, sges: &'a [Sge]) -> Self {
        RecvRequest { wr_id, sges }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zero_based_window_is_addressed_from_zero() {
        let mut bind =
            Bind { region: None, address: 0x7000, length: 9, access: Access::REMOTE_READ };
        assert_eq!(bind.remote(Stag(5)), RemoteMr { addr: 0x7000, len: 9, rkey: Stag(5) });
        bind.access |= Access::ZERO_BASED;
        assert_eq!(bind.remote(Stag(5)).addr, 0);
    }
}
