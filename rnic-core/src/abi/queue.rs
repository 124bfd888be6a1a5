//! Layout of arenas: doorbell pages and the send, receive and completion queues.
//!
//! Everything in shared memory is read and written as whole little-endian `u64` words (bulk payload
//! apart), so an entry is an array of words and its codec shifts and masks: a hostile writer can
//! make the numbers wrong but never make a Rust value invalid. Entries are copied out, decoded,
//! and only the copy is used. Spare bits must be zero and are refused by name.

use crate::types::{AtomicOperation, CompletionOpcode, CompletionStatus, Gid, numbered};

/// Bytes of a queue header: five cache lines, one writer each.
pub const QUEUE_HEADER_LEN: usize = 320;
/// Bytes of a cache line, the unit that separates writers.
pub const CACHE_LINE: usize = 64;
/// First word of every queue header: "RNICQUE1" read as a little-endian number.
pub const QUEUE_MAGIC: u64 = u64::from_le_bytes(*b"RNICQUE1");
/// First word of every arena: "RNICARE1".
pub const ARENA_MAGIC: u64 = u64::from_le_bytes(*b"RNICARE1");

/// Byte offsets in a queue header. The entries follow at [`QUEUE_HEADER_LEN`].
pub mod queue_header {
    /// Daemon, once: [`super::QUEUE_MAGIC`].
    pub const MAGIC: usize = 0;
    /// Daemon, once: ABI version (bits 0..16), queue kind (16..24), log2 of the capacity (24..32),
    /// bytes per entry (32..64).
    pub const SHAPE: usize = 8;
    /// Daemon, once: handle of the CQ, SRQ or QP (0..32), doorbell index (32..64).
    pub const OWNER: usize = 16;
    /// Daemon, when a QP is bound: `u32`, [`super::WORKER_NONE`] before, else the worker whose
    /// doorbell page is to be rung. Posting before that rings nothing. A shared receive queue
    /// belongs to no worker: who is to be rung stands in [`ENGINE_WAITS`].
    pub const WORKER: usize = 24;
    /// Producer's line: `u32` free-running count of entries published. Written by the client in
    /// SQ and RQ, by the daemon in a CQ (there only a hint: the sequence word decides).
    pub const PRODUCER: usize = 64;
    /// Consumer's line: `u32` free-running count of entries given back. Written by the daemon in SQ
    /// and RQ (the slots before it may be reused), by the client in a CQ.
    pub const CONSUMER: usize = 128;
    /// Client's flag line (CQ): `u32` arm state, one of the `ARM_*` values.
    pub const ARM: usize = 192;
    /// Client's flag line (CQ): `u32`, 1 while the client polls this CQ without sleeping.
    pub const CLIENT_SPINS: usize = 200;
    /// Daemon's flag line: `u64`, a set of workers, bit `n` for worker `n`. In a CQ those with a QP
    /// that waits for a slot; in a receive queue, shared or not, those with a message that waits
    /// for a receive.
    pub const ENGINE_WAITS: usize = 256;
}

/// [`queue_header::WORKER`] of a QP that no worker owns yet.
pub const WORKER_NONE: u32 = u32::MAX;

/// Not armed: no event is wanted.
pub const ARM_NONE: u32 = 0;
/// Armed for the next completion that is solicited or not successful.
pub const ARM_SOLICITED: u32 = 1;
/// Armed for the next completion of any kind.
pub const ARM_NEXT: u32 = 2;

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QueueKind {
    /// Send queue of a QP.
    Send = 1,
    /// Receive queue of a QP.
    Receive = 2,
    /// Completion queue (CQ), which QPs of several workers may share.
    Completion = 3,
    /// Shared receive queue (SRQ), from which several QPs take receives.
    SharedReceive = 4,
    /// Copy jobs of one worker for the client's library ([`super::copies`]).
    Copies = 5,
}

/// Shape of one queue, fixed when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct QueueShape {
    /// Entries; a power of two, at most 2^24.
    pub capacity: u32,
    /// Bytes per entry, a multiple of 16.
    pub stride: u32,
}

impl QueueShape {
    /// Shape of a send queue for `depth` requests of at most `sges` elements and `inline` bytes.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a stride is below 2^17: a header, and 255 elements or 64 Ki inline"
    )]
    pub fn send(depth: u32, sges: u8, inline: u16) -> Self {
        let body = (usize::from(sges) * SGE_LEN).max(usize::from(inline));
        let stride = (SEND_HEADER_LEN + body).next_multiple_of(64);
        QueueShape { capacity: depth.max(1).next_power_of_two(), stride: stride as u32 }
    }

    /// Shape of a receive queue for `depth` requests of at most `sges` elements.
    #[expect(clippy::cast_possible_truncation, reason = "a header and 255 elements: 4096")]
    pub fn receive(depth: u32, sges: u8) -> Self {
        let stride = RECEIVE_HEADER_LEN + usize::from(sges.max(1)) * SGE_LEN;
        QueueShape {
            capacity: depth.max(1).next_power_of_two(),
            stride: stride.next_power_of_two() as u32,
        }
    }

    /// Shape of a completion queue for `entries` completions.
    #[expect(clippy::cast_possible_truncation, reason = "it is 64")]
    pub fn completion(entries: u32) -> Self {
        QueueShape { capacity: entries.max(1).next_power_of_two(), stride: COMPLETION_LEN as u32 }
    }

    /// Bytes of the whole queue, header included.
    pub fn bytes(self) -> usize {
        QUEUE_HEADER_LEN + self.capacity as usize * self.stride as usize
    }
}

// ---------------------------------------------------------------------------------------------
// Arena and doorbells

/// Bytes of a doorbell page and of the arena header: one page each.
pub const PAGE: usize = 4096;
/// Offset in the session's first arena of worker `w`'s doorbell page.
pub const fn doorbell_offset(worker: u32) -> usize {
    PAGE * (1 + worker as usize)
}

/// Byte offsets in an arena's first page.
pub mod arena_header {
    /// [`super::ARENA_MAGIC`].
    pub const MAGIC: usize = 0;
    /// ABI version (0..16), number of doorbell pages that follow (16..32), session id (32..64).
    pub const SHAPE: usize = 8;
    /// Engine generation: a random number per start of the daemon.
    pub const GENERATION: usize = 16;
    /// Feature bits, see [`super::super::control::Features`].
    pub const FEATURES: usize = 24;
}

/// Byte offsets in a doorbell page: one page per (client, worker), shared with nobody else.
pub mod doorbell {
    /// Daemon's line: `u32`, 1 while the worker no longer polls this page and wants the eventfd.
    pub const ENGINE_SLEEPS: usize = 0;
    /// Client's line: `u64`, bit `i` says that leaf line `i` has a bit set.
    pub const SUMMARY: usize = 64;
    /// Client's leaf lines: 512 bits each, bit `n` of the whole for doorbell index `n`.
    pub const LEAVES: usize = 128;
    /// Number of leaf lines.
    pub const LEAF_LINES: usize = 62;
    /// Number of doorbell indices: the bound on QPs, CQs and SRQs of one session.
    #[expect(clippy::cast_possible_truncation, reason = "it is 31,744")]
    pub const INDICES: u32 = (LEAF_LINES * 512) as u32;
}

// ---------------------------------------------------------------------------------------------
// Scatter/gather elements

/// Bytes of one element.
pub const SGE_LEN: usize = 16;

/// One scatter/gather element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address in the region's own terms (`iova`).
    pub addr: u64,
    /// Bytes from `addr` on; may be 0.
    pub length: u32,
    /// Local key: the region's STag.
    pub lkey: u32,
}

impl Sge {
    /// The element as it stands in a queue.
    pub fn to_words(self) -> [u64; 2] {
        [self.addr, u64::from(self.length) | u64::from(self.lkey) << 32]
    }

    /// Reads an element from the two words of a queue entry. Any words decode.
    #[expect(clippy::cast_possible_truncation, reason = "each field is the low bits")]
    pub fn from_words(w: [u64; 2]) -> Self {
        Sge { addr: w[0], length: w[1] as u32, lkey: (w[1] >> 32) as u32 }
    }
}

// ---------------------------------------------------------------------------------------------
// Send queue entries

/// Bytes before the elements or inline data of a send queue entry.
pub const SEND_HEADER_LEN: usize = 64;
/// [`SEND_HEADER_LEN`] in words.
pub const SEND_HEADER_WORDS: usize = SEND_HEADER_LEN / 8;

numbered! {
    /// Operation of a send request; numbers below 7 are those of `ibv_wr_opcode`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    //= RDMAP-3.2-1
    pub enum SendOpcode: u8, from_u8 {
        /// RDMA Write: `IBV_WR_RDMA_WRITE`.
        Write = 0,
        /// RDMA Write, then Immediate Data: `IBV_WR_RDMA_WRITE_WITH_IMM`. The first
        /// parameter is its 8 bytes as a big-endian number, of which verbs use the first four.
        WriteImmediate = 1,
        /// Send, untagged: `IBV_WR_SEND`.
        Send = 2,
        /// Send with immediate data: `IBV_WR_SEND_WITH_IMM`, of queue pairs that are wired by hand.
        /// The first parameter is its 8 bytes as a big-endian number, of which the first four
        /// count.
        SendImmediate = 3,
        /// RDMA Read into the local elements: `IBV_WR_RDMA_READ`.
        Read = 4,
        /// Atomic CmpSwap: `IBV_WR_ATOMIC_CMP_AND_SWP`. Parameters: compare, swap, and the mask of
        /// either, which verbs have all ones. The one element has 8 bytes and receives what was
        /// there before.
        CompareSwap = 5,
        /// Atomic FetchAdd: `IBV_WR_ATOMIC_FETCH_AND_ADD`. Parameters: add, and the boundaries of
        /// fields, which verbs have 0. The element as for `CompareSwap`.
        FetchAdd = 6,
        /// Invalidate a local STag.
        LocalInvalidate = 7,
        /// Bind a memory window; see [`WindowParams`].
        BindWindow = 8,
        /// Send with Invalidate of a remote STag: `IBV_WR_SEND_WITH_INV`.
        SendInvalidate = 9,
        /// RDMA Read, then invalidate the local sink STag (iWARP).
        ReadInvalidate = 32,
    }
}

impl SendOpcode {
    /// Whether it waits for a response of the peer's, and counts to ORD.
    pub fn awaits_response(self) -> bool {
        match self {
            SendOpcode::Read
            | SendOpcode::ReadInvalidate
            | SendOpcode::CompareSwap
            | SendOpcode::FetchAdd => true,
            SendOpcode::Write
            | SendOpcode::WriteImmediate
            | SendOpcode::Send
            | SendOpcode::SendImmediate
            | SendOpcode::SendInvalidate
            | SendOpcode::LocalInvalidate
            | SendOpcode::BindWindow => false,
        }
    }

    /// Whether a queue pair without acknowledgements lacks it.
    pub fn needs_reliability(self) -> bool {
        self.awaits_response() || self == SendOpcode::SendInvalidate
    }

    /// Whether RFC 7306 has added it.
    pub fn is_extension(self) -> bool {
        matches!(self, SendOpcode::WriteImmediate | SendOpcode::CompareSwap | SendOpcode::FetchAdd)
    }

    /// How many words of [`SendHeader::params`] it has, from the first on; the others are zero.
    pub fn parameters(self) -> usize {
        match self {
            SendOpcode::WriteImmediate | SendOpcode::SendImmediate => 1,
            SendOpcode::FetchAdd => 2,
            SendOpcode::BindWindow => 3,
            SendOpcode::CompareSwap => 4,
            _ => 0,
        }
    }

    /// The atomic operation that it is under these parameters, if it is one.
    pub fn operation(self, params: [u64; 4]) -> Option<AtomicOperation> {
        match (self, params) {
            (SendOpcode::FetchAdd, [add, boundaries, ..]) => {
                Some(AtomicOperation::FetchAdd { add, boundaries })
            }
            (SendOpcode::CompareSwap, [compare, swap, compare_mask, swap_mask]) => {
                Some(AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask })
            }
            _ => None,
        }
    }

    /// The opcode and the parameters of an atomic operation.
    pub fn of_operation(operation: AtomicOperation) -> (SendOpcode, [u64; 4]) {
        match operation {
            AtomicOperation::FetchAdd { add, boundaries } => {
                (SendOpcode::FetchAdd, [add, boundaries, 0, 0])
            }
            AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask } => {
                (SendOpcode::CompareSwap, [compare, swap, compare_mask, swap_mask])
            }
        }
    }

    /// What its completion is called.
    pub fn completion(self) -> CompletionOpcode {
        match self {
            SendOpcode::Write | SendOpcode::WriteImmediate => CompletionOpcode::RdmaWrite,
            SendOpcode::Send | SendOpcode::SendImmediate | SendOpcode::SendInvalidate => {
                CompletionOpcode::Send
            }
            SendOpcode::Read | SendOpcode::ReadInvalidate => CompletionOpcode::RdmaRead,
            SendOpcode::LocalInvalidate => CompletionOpcode::LocalInvalidate,
            SendOpcode::CompareSwap => CompletionOpcode::CompareSwap,
            SendOpcode::FetchAdd => CompletionOpcode::FetchAdd,
            SendOpcode::BindWindow => CompletionOpcode::BindMw,
        }
    }
}

bitflags::bitflags! {
    /// Flags of a send request, with the numbers of `ibv_send_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct SendFlags: u16 {
        /// Wait for all earlier reads of this QP.
        const FENCE = 1;
        /// Write a completion also on success.
        const SIGNALED = 2;
        /// Ask for the peer's solicited event.
        const SOLICITED = 4;
        /// The data stand in the entry itself.
        const INLINE = 8;
    }
}

/// Header of a send queue entry, decoded. Bytes in order: opcode 1, num_sge 1, flags 2,
/// inline_len 2, spare 2, wr_id 8, remote_addr 8, rkey 4, inv_rkey 4, params 4 x 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
//= RDMAP-3.2-2, RDMAP-3.2-5
pub struct SendHeader {
    /// Operation; unknown numbers stay representable and fail the request by name.
    pub opcode: u8,
    /// Elements that follow; 0 with inline data.
    pub num_sge: u8,
    /// Request flags as written.
    pub flags: u16,
    /// Bytes of inline data that follow; 0 without [`SendFlags::INLINE`].
    pub inline_len: u16,
    /// The application's name for the request.
    pub wr_id: u64,
    /// Remote tagged offset of Write, Read and atomics.
    //= DDP-5.2-7
    pub remote_addr: u64,
    /// Remote STag of Write, Read and atomics; a window's present STag; the queue pair that a
    /// datagram goes to.
    //= DDP-5.2-7, RDMAP-5.1-8, RDMAP-5.2.1-9
    pub rkey: u32,
    /// STag to invalidate; the STag that a window is to have; the Q_Key of a datagram.
    pub inv_rkey: u32,
    /// Immediate Data, operands of atomics, [`WindowParams`] or [`DatagramParams`], by opcode; zero
    /// where unused.
    pub params: [u64; 4],
    /// Whether every spare bit was zero.
    pub spare_is_zero: bool,
}

impl SendHeader {
    /// The header as it stands in a queue.
    pub fn to_words(&self) -> [u64; SEND_HEADER_WORDS] {
        [
            u64::from(self.opcode)
                | u64::from(self.num_sge) << 8
                | u64::from(self.flags) << 16
                | u64::from(self.inline_len) << 32,
            self.wr_id,
            self.remote_addr,
            u64::from(self.rkey) | u64::from(self.inv_rkey) << 32,
            self.params[0],
            self.params[1],
            self.params[2],
            self.params[3],
        ]
    }

    /// Reads the header from the words of a queue entry. Any words decode.
    #[expect(clippy::cast_possible_truncation, reason = "each field is the low bits")]
    pub fn from_words(w: [u64; SEND_HEADER_WORDS]) -> Self {
        SendHeader {
            opcode: w[0] as u8,
            num_sge: (w[0] >> 8) as u8,
            flags: (w[0] >> 16) as u16,
            inline_len: (w[0] >> 32) as u16,
            wr_id: w[1],
            remote_addr: w[2],
            rkey: w[3] as u32,
            inv_rkey: (w[3] >> 32) as u32,
            params: [w[4], w[5], w[6], w[7]],
            spare_is_zero: w[0] >> 48 == 0,
        }
    }
}

/// Parameters of [`SendOpcode::BindWindow`]: address 8, length 8, lkey 4, access 4.
///
/// The entry has no elements and no remote address. `rkey` is the window's present STag, `inv_rkey`
/// the one it is to have, which differs in the low 8 bits only: for a window of type 1 it must
/// differ, and the library advances it by one (`ibv_inc_rkey(3)`); for type 2 the application
/// chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WindowParams {
    /// First address, in the region's own terms (`iova`).
    pub address: u64,
    /// Bytes; 0 unbinds a window of type 1, and the other parameters are of no account then.
    pub length: u64,
    /// The region's STag.
    pub lkey: u32,
    /// Rights: [`Access`](crate::types::Access) as numbers, `REMOTE_READ`, `REMOTE_WRITE` and
    /// `ZERO_BASED` only.
    pub access: u32,
}

impl WindowParams {
    /// The parameters as they stand in [`SendHeader::params`].
    pub fn to_params(self) -> [u64; 4] {
        [self.address, self.length, u64::from(self.lkey) | u64::from(self.access) << 32, 0]
    }

    /// Reads the parameters from [`SendHeader::params`]. Any words decode.
    #[expect(clippy::cast_possible_truncation, reason = "each field is the low bits")]
    pub fn from_params([address, length, key, _]: [u64; 4]) -> Self {
        WindowParams { address, length, lkey: key as u32, access: (key >> 32) as u32 }
    }
}

/// Parameters of a [`SendOpcode::Send`] or [`SendOpcode::SendImmediate`] of a queue pair of
/// datagrams, behind the first, which is the latter's: GID of the port that it goes to, 16 bytes in
/// their order, and 8 bytes for the index of the port that it comes from. `rkey` is the queue pair
/// that it goes to, `inv_rkey` its Q_Key, or a number with the high bit set for the sender's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramParams {
    /// Where it goes.
    pub gid: Gid,
    /// Index of the sender's port in the device's table of GIDs.
    pub source: u16,
}

impl DatagramParams {
    /// The parameters as they stand in [`SendHeader::params`], with this first one.
    pub fn to_params(self, first: u64) -> [u64; 4] {
        let half = |at: usize| {
            let bytes: [u8; 8] = self.gid.0[at..at + 8].try_into().unwrap_or_default();
            u64::from_le_bytes(bytes)
        };
        [first, half(0), half(8), self.source.into()]
    }

    /// Reads the parameters from [`SendHeader::params`]; none if spare bits are set.
    pub fn from_params([_, low, high, source]: [u64; 4]) -> Option<Self> {
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&low.to_le_bytes());
        gid[8..].copy_from_slice(&high.to_le_bytes());
        Some(DatagramParams { gid: Gid(gid), source: source.try_into().ok()? })
    }
}

/// The bit of a datagram's Q_Key that asks for the sender's own (IBTA specification, volume 1,
/// section 10.2.5).
pub const OWN_Q_KEY: u32 = 1 << 31;

// ---------------------------------------------------------------------------------------------
// Receive queue entries

/// Bytes before the elements of a receive queue entry.
pub const RECEIVE_HEADER_LEN: usize = 16;
/// [`RECEIVE_HEADER_LEN`] in words.
pub const RECEIVE_HEADER_WORDS: usize = RECEIVE_HEADER_LEN / 8;

/// Header of a receive queue entry, decoded. Bytes in order: num_sge 1, spare 7, wr_id 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveHeader {
    /// Scatter elements that follow the header.
    pub num_sge: u8,
    /// The application's name for the request.
    pub wr_id: u64,
    /// Whether every spare bit was zero.
    pub spare_is_zero: bool,
}

impl ReceiveHeader {
    /// The header as it stands in a queue.
    pub fn to_words(&self) -> [u64; RECEIVE_HEADER_WORDS] {
        [u64::from(self.num_sge), self.wr_id]
    }

    /// Reads the header from the words of a queue entry. Any words decode.
    #[expect(clippy::cast_possible_truncation, reason = "each field is the low bits")]
    pub fn from_words(w: [u64; RECEIVE_HEADER_WORDS]) -> Self {
        ReceiveHeader { num_sge: w[0] as u8, wr_id: w[1], spare_is_zero: w[0] >> 8 == 0 }
    }
}

// ---------------------------------------------------------------------------------------------
// Completion queue entries

/// Bytes of a completion queue entry.
pub const COMPLETION_LEN: usize = 64;
/// [`COMPLETION_LEN`] in words.
pub const COMPLETION_WORDS: usize = COMPLETION_LEN / 8;

bitflags::bitflags! {
    /// Flags of a completion.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct CompletionFlags: u16 {
        /// The peer's message asked for a solicited event.
        const SOLICITED = 1;
        /// `imm_or_inv` holds immediate data.
        const WITH_IMM = 2;
        /// `imm_or_inv` holds the STag that the message invalidated.
        const WITH_INV = 4;
        /// The immediate data came beside a Send, not behind an RDMA Write.
        const BESIDE = 8;
        /// The header of a datagram stands before its data.
        const GRH = 16;
        /// That header is of IPv4, else of IPv6.
        const IPV4 = 32;
    }
}

/// A completion queue entry without its sequence word. Bytes in order: wr_id 8, byte_len 4, qp 4,
/// status 1, opcode 1, flags 2, detail 4, imm_or_inv 8, src_qp 4, srq 4, timestamp_ns 8,
/// diagnosis_id 8, spare 4, sequence 4. The sequence of entry `n` (counted from 0) is `n + 1`
/// modulo 2^32; its word is stored last, with release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
//= RDMAP-3.2-3
pub struct Cqe {
    /// The application's name for the request.
    pub wr_id: u64,
    /// Bytes received or read, 8 of an atomic operation; with Immediate Data, those of the RDMA
    /// Write before it; 0 otherwise.
    pub byte_len: u32,
    /// QP the request was posted to.
    pub qp: u32,
    /// A [`CompletionStatus`].
    pub status: u8,
    /// A [`CompletionOpcode`].
    pub opcode: u8,
    /// [`CompletionFlags`].
    pub flags: u16,
    /// Terminate code of the failure: layer << 16 | etype << 8 | code; 0 if there is none.
    pub detail: u32,
    /// Immediate Data, its 8 bytes as a big-endian number, or the invalidated STag, as the flags
    /// say.
    pub imm_or_inv: u64,
    /// Sending QP of a datagram; 0 of everything else.
    pub src_qp: u32,
    /// Shared receive queue the receive came from; 0 if none.
    pub srq: u32,
    /// When it was written, monotonic nanoseconds; 0 unless the device says it stamps.
    pub timestamp_ns: u64,
    /// The diagnosis that explains a failure; 0 if there is none.
    pub diagnosis_id: u64,
}

impl Cqe {
    /// A completion with status and opcode and everything else zero.
    pub fn new(qp: u32, wr_id: u64, opcode: CompletionOpcode, status: CompletionStatus) -> Self {
        Cqe {
            wr_id,
            byte_len: 0,
            qp,
            status: status as u8,
            opcode: opcode as u8,
            flags: 0,
            detail: 0,
            imm_or_inv: 0,
            src_qp: 0,
            srq: 0,
            timestamp_ns: 0,
            diagnosis_id: 0,
        }
    }

    /// The entry as it stands in a queue under this sequence number.
    pub fn to_words(&self, sequence: u32) -> [u64; COMPLETION_WORDS] {
        [
            self.wr_id,
            u64::from(self.byte_len) | u64::from(self.qp) << 32,
            u64::from(self.status)
                | u64::from(self.opcode) << 8
                | u64::from(self.flags) << 16
                | u64::from(self.detail) << 32,
            self.imm_or_inv,
            u64::from(self.src_qp) | u64::from(self.srq) << 32,
            self.timestamp_ns,
            self.diagnosis_id,
            u64::from(sequence) << 32,
        ]
    }

    /// Reads an entry whose sequence has been checked.
    #[expect(clippy::cast_possible_truncation, reason = "each field is the low bits")]
    pub fn from_words(w: [u64; COMPLETION_WORDS]) -> Self {
        Cqe {
            wr_id: w[0],
            byte_len: w[1] as u32,
            qp: (w[1] >> 32) as u32,
            status: w[2] as u8,
            opcode: (w[2] >> 8) as u8,
            flags: (w[2] >> 16) as u16,
            detail: (w[2] >> 32) as u32,
            imm_or_inv: w[3],
            src_qp: w[4] as u32,
            srq: (w[4] >> 32) as u32,
            timestamp_ns: w[5],
            diagnosis_id: w[6],
        }
    }

    /// The sequence in an entry's last word.
    pub fn sequence(last_word: u64) -> u32 {
        (last_word >> 32) as u32
    }
}

// ---------------------------------------------------------------------------------------------
// Completion channel records

/// Bytes of a record on a completion channel.
pub const CHANNEL_RECORD_LEN: usize = 16;

/// One completion event: handle 4, kind 4 (1 = completion), sequence 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelRecord {
    /// The CQ that fired.
    pub cq: u32,
    /// Counts this CQ's events from 1.
    pub sequence: u64,
}

impl ChannelRecord {
    /// The record as it is sent.
    pub fn to_bytes(self) -> [u8; CHANNEL_RECORD_LEN] {
        let mut b = [0; CHANNEL_RECORD_LEN];
        b[..4].copy_from_slice(&self.cq.to_le_bytes());
        b[4..8].copy_from_slice(&1u32.to_le_bytes());
        b[8..].copy_from_slice(&self.sequence.to_le_bytes());
        b
    }

    /// Reads a record; `None` if its length or kind is not ours.
    pub fn from_bytes(b: &[u8]) -> Option<Self> {
        let b: &[u8; CHANNEL_RECORD_LEN] = b.try_into().ok()?;
        let word =
            |r: std::ops::Range<usize>| u32::from_le_bytes(b[r].try_into().unwrap_or([0; 4]));
        (word(4..8) == 1).then(|| ChannelRecord {
            cq: word(0..4),
            sequence: u64::from(word(8..12)) | u64::from(word(12..16)) << 32,
        })
    }
}

const _: () = assert!(QUEUE_HEADER_LEN.is_multiple_of(CACHE_LINE));
const _: () = assert!(doorbell::LEAVES + doorbell::LEAF_LINES * CACHE_LINE == PAGE);
const _: () = assert!(SEND_HEADER_WORDS * 8 == SEND_HEADER_LEN);
const _: () = assert!(COMPLETION_WORDS * 8 == COMPLETION_LEN);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_send_queue_stride_is_128() {
        assert_eq!(QueueShape::send(16, 4, 64), QueueShape { capacity: 16, stride: 128 });
        assert_eq!(QueueShape::send(17, 4, 65).stride, 192);
        assert_eq!(QueueShape::send(17, 4, 65).capacity, 32);
    }

    #[test]
    fn send_header_bytes_stand_where_the_abi_says() {
        let h = SendHeader {
            opcode: SendOpcode::Write as u8,
            num_sge: 3,
            flags: 0x0102,
            inline_len: 0x0405,
            wr_id: 0x1122_3344_5566_7788,
            remote_addr: 9,
            rkey: 0xAABB_CCDD,
            inv_rkey: 0x0102_0304,
            params: [1, 2, 3, 4],
            spare_is_zero: true,
        };
        let bytes: Vec<u8> = h.to_words().iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(bytes[..8], [0, 3, 0x02, 0x01, 0x05, 0x04, 0, 0]);
        assert_eq!(bytes[8..16], 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!(bytes[24..28], 0xAABB_CCDDu32.to_le_bytes());
        assert_eq!(bytes[28..32], 0x0102_0304u32.to_le_bytes());
        assert_eq!(bytes[32..], [1u64, 2, 3, 4].map(u64::to_le_bytes).concat());
        assert_eq!(SendHeader::from_words(h.to_words()), h);
        let mut spare = h.to_words();
        spare[0] |= 1 << 48;
        assert!(!SendHeader::from_words(spare).spare_is_zero);
    }

    #[test]
    fn operations_have_their_opcodes_and_parameters() {
        for (operation, opcode, params) in [
            (AtomicOperation::FetchAdd { add: 1, boundaries: 2 }, 6, [1, 2, 0, 0]),
            (
                AtomicOperation::CompareSwap { swap: 3, swap_mask: 4, compare: 5, compare_mask: 6 },
                5,
                [5, 3, 6, 4],
            ),
        ] {
            let expected = (SendOpcode::from_u8(opcode).expect("it is one"), params);
            assert_eq!(SendOpcode::of_operation(operation), expected);
            assert_eq!(expected.0.operation(params), Some(operation));
            let used = params.iter().rposition(|p| *p != 0).map_or(0, |at| at + 1);
            assert_eq!(expected.0.parameters(), used);
        }
        assert_eq!(SendOpcode::Read.operation([0; 4]), None);
    }

    #[test]
    fn window_parameters_stand_where_the_abi_says() {
        let p = WindowParams {
            address: 0x1122_3344_5566_7788,
            length: 9,
            lkey: 0xAABB_CCDD,
            access: 6,
        };
        assert_eq!(p.to_params(), [0x1122_3344_5566_7788, 9, 0x0000_0006_AABB_CCDD, 0]);
        assert_eq!(WindowParams::from_params(p.to_params()), p);
    }

    #[test]
    fn datagram_parameters_stand_where_the_abi_says() {
        let gid = Gid(std::array::from_fn(|n| n as u8));
        let p = DatagramParams { gid, source: 0x0102 };
        let words = p.to_params(9);
        assert_eq!(words, [9, 0x0706_0504_0302_0100, 0x0F0E_0D0C_0B0A_0908, 0x0102]);
        assert_eq!(DatagramParams::from_params(words), Some(p));
        assert_eq!(DatagramParams::from_params([0, 0, 0, 1 << 16]), None);
    }

    #[test]
    fn completion_sequence_is_the_last_word() {
        let c = Cqe {
            byte_len: 7,
            ..Cqe::new(5, 6, CompletionOpcode::Receive, CompletionStatus::Success)
        };
        let w = c.to_words(0xDEAD_BEEF);
        assert_eq!(Cqe::sequence(w[7]), 0xDEAD_BEEF);
        assert_eq!(Cqe::from_words(w), c);
    }

    #[test]
    fn channel_record_round_trips_and_refuses_other_kinds() {
        let r = ChannelRecord { cq: 3, sequence: 1 << 40 };
        assert_eq!(ChannelRecord::from_bytes(&r.to_bytes()), Some(r));
        let mut other = r.to_bytes();
        other[4] = 2;
        assert_eq!(ChannelRecord::from_bytes(&other), None);
        assert_eq!(ChannelRecord::from_bytes(&other[..15]), None);
    }
}
