//! Work requests.

use rnic_core::abi::queue::{SendFlags, SendHeader, SendOpcode, Sge, WindowParams};
use rnic_core::types::{Access, AtomicOperation, Stag};

use crate::mr::RemoteAddr;
use crate::window::Bind;

/// One request for the send queue (`struct ibv_send_wr` of `ibv_post_send(3)`).
///
/// Requests start in the order posted. Unless the QP signals all, only those marked
/// [`signaled`](Self::signaled) and those that fail write a completion. The memory that elements
/// name belongs to the request until its completion, or that of a later request, has been polled.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest<'a> {
    pub(crate) header: SendHeader,
    pub(crate) data: Data<'a>,
}

/// Where a request's bytes come from or go to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Data<'a> {
    Elements(&'a [Sge]),
    Element(Sge),
    Inline(&'a [u8]),
}

impl<'a> SendRequest<'a> {
    /// Sends the elements' bytes as one message to the peer's next receive (RFC 5040
    /// section 5.3).
    pub fn send(wr_id: u64, elements: &'a [Sge]) -> Self {
        Self::new(SendOpcode::Send, wr_id, Data::Elements(elements))
    }

    /// Sends bytes that are copied into the queue now, at most the QP's `max_inline`: they need no
    /// region and may be reused as soon as the request is posted.
    pub fn send_inline(wr_id: u64, bytes: &'a [u8]) -> Self {
        Self::new(SendOpcode::Send, wr_id, Data::Inline(bytes))
    }

    /// Like [`send`](Self::send), with four bytes beside the message, which its completion has at
    /// the receiver. Only queue pairs that are [wired by hand](crate::QpType::Wired) have it.
    pub fn send_with_imm(wr_id: u64, elements: &'a [Sge], immediate: [u8; 4]) -> Self {
        Self::send(wr_id, elements).beside(immediate)
    }

    /// Like [`send_inline`](Self::send_inline), with four bytes beside the message.
    pub fn send_inline_with_imm(wr_id: u64, bytes: &'a [u8], immediate: [u8; 4]) -> Self {
        Self::send_inline(wr_id, bytes).beside(immediate)
    }

    /// Like [`send`](Self::send), and revokes the peer's region `invalidate`, which must be
    /// registered for the peer's end of this connection (Send with Invalidate, RFC 5040
    /// section 5.3).
    pub fn send_invalidate(wr_id: u64, elements: &'a [Sge], invalidate: Stag) -> Self {
        let mut request = Self::new(SendOpcode::SendInvalidate, wr_id, Data::Elements(elements));
        request.header.inv_rkey = invalidate.0;
        request
    }

    /// Like [`send_inline`](Self::send_inline), and revokes the peer's region `invalidate`.
    pub fn send_invalidate_inline(wr_id: u64, bytes: &'a [u8], invalidate: Stag) -> Self {
        let mut request = Self::new(SendOpcode::SendInvalidate, wr_id, Data::Inline(bytes));
        request.header.inv_rkey = invalidate.0;
        request
    }

    /// Writes the elements' bytes into the peer's memory (RDMA Write, RFC 5040 section 5.1).
    /// Completes when the bytes may be reused; that they have arrived is known only from a later
    /// message of the peer.
    pub fn write(wr_id: u64, elements: &'a [Sge], to: RemoteAddr) -> Self {
        Self::new(SendOpcode::Write, wr_id, Data::Elements(elements)).remote(to)
    }

    /// Writes bytes that are copied into the queue now, at most the QP's `max_inline`.
    pub fn write_inline(wr_id: u64, bytes: &'a [u8], to: RemoteAddr) -> Self {
        Self::new(SendOpcode::Write, wr_id, Data::Inline(bytes)).remote(to)
    }

    /// Like [`write`](Self::write), with Immediate Data behind it (RFC 7306 section 6): they take
    /// the peer's next receive, whose completion has them, and how many bytes were written. A peer
    /// that has no Immediate Data ends the connection.
    pub fn write_with_imm(
        wr_id: u64,
        elements: &'a [Sge],
        to: RemoteAddr,
        immediate: [u8; 8],
    ) -> Self {
        Self::write(wr_id, elements, to).immediate(immediate)
    }

    /// Like [`write_inline`](Self::write_inline), with Immediate Data behind it.
    pub fn write_inline_with_imm(
        wr_id: u64,
        bytes: &'a [u8],
        to: RemoteAddr,
        immediate: [u8; 8],
    ) -> Self {
        Self::write_inline(wr_id, bytes, to).immediate(immediate)
    }

    /// Adds to a word of the peer's memory, and brings what was there before (Atomic FetchAdd, RFC
    /// 7306 section 5). Words have 8 bytes, in the order of the host that has them, and begin at
    /// multiples of 8; the peer's region needs `REMOTE_ATOMIC`. `into` has 8 bytes, too, and its
    /// region needs local write access. A peer that has no atomic operations ends the connection:
    /// adding 0 is a way to ask.
    ///
    /// In shared buffers operations are atomic whoever does them, the peer's program included; in
    /// its other memory they are among those of all connections of its session.
    pub fn fetch_add(wr_id: u64, into: Sge, at: RemoteAddr, add: u64) -> Self {
        Self::atomic(wr_id, into, at, AtomicOperation::FetchAdd { add, boundaries: 0 })
    }

    /// Replaces a word of the peer's memory by `swap` if it is `compare`, and brings what was there
    /// before (Atomic CmpSwap, RFC 7306 section 5). As [`fetch_add`](Self::fetch_add) otherwise.
    pub fn compare_swap(wr_id: u64, into: Sge, at: RemoteAddr, compare: u64, swap: u64) -> Self {
        let (compare_mask, swap_mask) = (u64::MAX, u64::MAX);
        let operation = AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask };
        Self::atomic(wr_id, into, at, operation)
    }

    /// An atomic operation of any kind, also on parts of a word. As
    /// [`fetch_add`](Self::fetch_add) otherwise.
    pub fn atomic(wr_id: u64, into: Sge, at: RemoteAddr, operation: AtomicOperation) -> Self {
        let (opcode, params) = SendOpcode::of_operation(operation);
        let mut request = Self::new(opcode, wr_id, Data::Element(into)).remote(at);
        request.header.params = params;
        request
    }

    /// Reads from the peer's memory into one element, which iWARP allows no more of (RDMA Read,
    /// RFC 5040 section 5.2). The element's region needs local write access.
    pub fn read(wr_id: u64, into: Sge, from: RemoteAddr) -> Self {
        Self::new(SendOpcode::Read, wr_id, Data::Element(into)).remote(from)
    }

    /// Like [`read`](Self::read), into one element after the other. Only queue pairs that are
    /// [wired by hand](crate::QpType::Wired) have it.
    pub fn read_scattered(wr_id: u64, into: &'a [Sge], from: RemoteAddr) -> Self {
        Self::new(SendOpcode::Read, wr_id, Data::Elements(into)).remote(from)
    }

    /// Like [`read`](Self::read), and revokes the element's own region when the bytes have
    /// arrived (RDMA Read with local invalidate).
    pub fn read_invalidate(wr_id: u64, into: Sge, from: RemoteAddr) -> Self {
        let mut request =
            Self::new(SendOpcode::ReadInvalidate, wr_id, Data::Element(into)).remote(from);
        request.header.inv_rkey = into.lkey;
        request
    }

    /// Binds a window whose STag is `present`, which has the STag `new` from then on: the same but
    /// for the low 8 bits. When the completion is there the peer may use the new one, and nothing
    /// is placed through the one before. [`MemoryWindow`](crate::MemoryWindow) has this with the
    /// STags kept in order.
    pub fn bind(wr_id: u64, present: Stag, new: Stag, bind: &Bind<'_>) -> Self {
        let (region, length) =
            bind.region.map_or((Stag(0), 0), |region| (region.lkey(), bind.length));
        Self::bind_range(wr_id, present, new, region, (bind.address, length), bind.access)
    }

    /// Like [`bind`](Self::bind), to `range` (first address, bytes) of the region whose STag is
    /// `region`; to no bytes of no region (0), which unbinds it.
    pub fn bind_range(
        wr_id: u64,
        present: Stag,
        new: Stag,
        region: Stag,
        range: (u64, u64),
        access: Access,
    ) -> Self {
        let mut request = Self::new(SendOpcode::BindWindow, wr_id, Data::Elements(&[]));
        let header = &mut request.header;
        (header.rkey, header.inv_rkey) = (present.0, new.0);
        let (address, length) = range;
        let (lkey, access) = (region.0, access.bits());
        header.params = WindowParams { address, length, lkey, access }.to_params();
        request
    }

    /// Revokes one of our own regions, or unbinds a window of type 2, when the requests before it
    /// have been sent; as with [`Mr::deregister`](crate::Mr::deregister), nothing is placed in it
    /// after the completion.
    pub fn local_invalidate(wr_id: u64, region: Stag) -> Self {
        let mut request = Self::new(SendOpcode::LocalInvalidate, wr_id, Data::Elements(&[]));
        request.header.inv_rkey = region.0;
        request
    }

    /// Writes a completion also on success.
    #[must_use]
    pub fn signaled(self) -> Self {
        self.flag(SendFlags::SIGNALED)
    }

    /// Asks for the peer's solicited event; has a meaning for what takes a receive (RFC 5040
    /// section 5.3).
    #[must_use]
    pub fn solicited(self) -> Self {
        self.flag(SendFlags::SOLICITED)
    }

    /// Starts only when all earlier reads and atomic operations of this QP are done.
    #[must_use]
    pub fn fence(self) -> Self {
        self.flag(SendFlags::FENCE)
    }

    /// The application's name for the request.
    pub fn wr_id(&self) -> u64 {
        self.header.wr_id
    }

    /// The memory that it names.
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
            spare_is_zero: true,
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

    fn beside(mut self, data: [u8; 4]) -> Self {
        self.header.opcode = SendOpcode::SendImmediate as u8;
        self.header.params[0] = u64::from(u32::from_be_bytes(data)) << 32;
        self
    }

    fn flag(mut self, flag: SendFlags) -> Self {
        self.header.flags |= flag.bits();
        self
    }
}

/// One request for the receive queue (`ibv_post_recv(3)`).
///
/// A message fills the elements in order; one that is longer than all of them together ends the
/// connection (RFC 5041 section 5.1). The memory belongs to the request until its completion has
/// been polled, and the regions need local write access.
#[derive(Clone, Copy, Debug)]
pub struct RecvRequest<'a> {
    /// The application's name for the request.
    pub wr_id: u64,
    /// Where the message goes; may be empty for messages of no bytes.
    pub sges: &'a [Sge],
}

impl<'a> RecvRequest<'a> {
    /// A receive into these elements.
    pub fn new(wr_id: u64, sges: &'a [Sge]) -> Self {
        RecvRequest { wr_id, sges }
    }
}
