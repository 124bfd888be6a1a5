//! Layout of arenas: doorbell pages and the send, receive and completion queues.
//!
//! All shared memory except bulk payload is read and written as whole little-endian `u64` words. An
//! entry is an array of words, which its codec shifts and masks. A hostile writer can produce wrong
//! numbers but no invalid Rust value. Entries are copied, and only the copy is decoded and used.
//! Reserved bits must be zero; the daemon refuses an entry in which one is set.

use crate::types::{AtomicOperation, CompletionOpcode, CompletionStatus, Gid, numbered};

/// Size of a queue header in bytes: five cache lines.
pub const QUEUE_HEADER_LEN: usize = 320;
/// Size of a cache line in bytes. The words of the daemon and of the client are on different lines.
pub const CACHE_LINE: usize = 64;
/// First word of every queue header: "RNICQUE1" read as a little-endian number.
pub const QUEUE_MAGIC: u64 = u64::from_le_bytes(*b"RNICQUE1");
/// First word of every session's first arena: "RNICARE1" read as a little-endian number.
pub const ARENA_MAGIC: u64 = u64::from_le_bytes(*b"RNICARE1");

/// Byte offsets in a queue header. The entries follow at [`QUEUE_HEADER_LEN`].
pub mod queue_header {
    /// Daemon, once: [`super::QUEUE_MAGIC`].
    pub const MAGIC: usize = 0;
    /// Daemon, once: ABI version (bits 0 to 15), queue kind (16 to 23), log2 of the capacity (24
    /// to 31), bytes per entry (32 to 63).
    pub const SHAPE: usize = 8;
    /// Daemon, once: handle of the CQ, SRQ or QP, or worker number of a copy queue (bits 0 to 31),
    /// doorbell index (32 to 63).
    pub const OWNER: usize = 16;
    /// Daemon, when a QP is bound to a worker: `u32`, the worker to ring. [`super::WORKER_NONE`]
    /// before that: posting then rings no doorbell. A shared receive queue belongs to no worker;
    /// its workers to ring are in [`ENGINE_WAITS`].
    pub const WORKER: usize = 24;
    /// Producer's line: `u32` free-running count of published entries. Written by the client in an
    /// SQ, RQ or SRQ, by the daemon in a copy queue and in a CQ, where it is a hint: the sequence
    /// word of an entry decides.
    pub const PRODUCER: usize = 64;
    /// Consumer's line: `u32` free-running count of consumed entries, whose slots the producer may
    /// reuse. Written by the daemon in an SQ, RQ or SRQ, by the client in a CQ or copy queue.
    pub const CONSUMER: usize = 128;
    /// Client's flag line: `u32`. In a CQ the arm state, one of the `ARM_*` values. In a copy queue
    /// 1 while the library's thread sleeps on it. In both the daemon also writes it, to disarm the
    /// CQ or to wake the thread.
    pub const ARM: usize = 192;
    /// Client's flag line, CQ only: `u32`, 1 while the client polls this CQ without sleeping.
    pub const CLIENT_SPINS: usize = 200;
    /// Daemon's flag line: `u64`, a set of workers, bit `n` for worker `n`. In a CQ: workers with a
    /// QP that waits for a slot. In a receive queue, shared or not: workers that hold a message
    /// until a receive is posted.
    pub const ENGINE_WAITS: usize = 256;
}

/// [`queue_header::WORKER`] of an SRQ, and of a QP that is not bound to a worker.
pub const WORKER_NONE: u32 = u32::MAX;

/// Not armed: the daemon sends no event.
pub const ARM_NONE: u32 = 0;
/// Armed for the next completion that is solicited or not successful.
pub const ARM_SOLICITED: u32 = 1;
/// Armed for the next completion of any kind.
pub const ARM_NEXT: u32 = 2;

/// Kind of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QueueKind {
    /// Send queue of a QP.
    Send = 1,
    /// Receive queue of a QP.
    Receive = 2,
    /// Completion queue (CQ). QPs of different workers may share it.
    Completion = 3,
    /// Shared receive queue (SRQ), from which several QPs take receives.
    SharedReceive = 4,
    /// Copy queue of one worker ([`super::copies`]).
    Copies = 5,
}

/// Shape of a queue. Only a move changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct QueueShape {
    /// Number of entries; a power of two, at most 2^24.
    pub capacity: u32,
    /// Bytes per entry, a multiple of 16.
    pub stride: u32,
}

impl QueueShape {
    /// Returns the shape of a send queue for `depth` requests with at most `sges` SGEs or `inline`
    /// bytes each.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a stride is below 2^17: a header, and 255 SGEs or 64 Ki of inline data"
    )]
    pub fn send(depth: u32, sges: u8, inline: u16) -> Self {
        let body = (usize::from(sges) * SGE_LEN).max(usize::from(inline));
        let stride = (SEND_HEADER_LEN + body).next_multiple_of(64);
        QueueShape { capacity: depth.max(1).next_power_of_two(), stride: stride as u32 }
    }

    /// Returns the shape of a receive queue for `depth` requests with at most `sges` SGEs each.
    #[expect(clippy::cast_possible_truncation, reason = "a header and 255 SGEs: 4096")]
    pub fn receive(depth: u32, sges: u8) -> Self {
        let stride = RECEIVE_HEADER_LEN + usize::from(sges.max(1)) * SGE_LEN;
        QueueShape {
            capacity: depth.max(1).next_power_of_two(),
            stride: stride.next_power_of_two() as u32,
        }
    }

    /// Returns the shape of a completion queue for `entries` completions.
    #[expect(clippy::cast_possible_truncation, reason = "it is 64")]
    pub fn completion(entries: u32) -> Self {
        QueueShape { capacity: entries.max(1).next_power_of_two(), stride: COMPLETION_LEN as u32 }
    }

    /// Returns the size of the queue in bytes, including its header.
    pub fn bytes(self) -> usize {
        QUEUE_HEADER_LEN + self.capacity as usize * self.stride as usize
    }
}

// ---------------------------------------------------------------------------------------------
// Arena and doorbells

/// Size of the arena header and of a doorbell page in bytes: one page each.
pub const PAGE: usize = 4096;
/// Returns the offset of a worker's doorbell page in the session's first arena.
pub const fn doorbell_offset(worker: u32) -> usize {
    PAGE * (1 + worker as usize)
}

/// Byte offsets in an arena's first page.
pub mod arena_header {
    /// [`super::ARENA_MAGIC`].
    pub const MAGIC: usize = 0;
    /// ABI version (bits 0 to 15), number of doorbell pages that follow (16 to 31), session ID (32
    /// to 63).
    pub const SHAPE: usize = 8;
    /// Engine generation: a random number, drawn at each start of the daemon.
    pub const GENERATION: usize = 16;
    /// Feature bits, see [`super::super::control::Features`].
    pub const FEATURES: usize = 24;
    /// Daemon: `u64`, a set of [`LibraryCall`](super::super::control::LibraryCall)s. Fault rules
    /// for these calls are in force.
    pub const RULED_CALLS: usize = 32;
}

/// Byte offsets in a doorbell page. Each (client, worker) pair has its own page.
pub mod doorbell {
    /// Daemon's line: `u32`, 1 while the worker does not scan this page and needs the eventfd. The
    /// client that writes the eventfd clears it.
    pub const ENGINE_SLEEPS: usize = 0;
    /// Client's line: `u64`; bit `i` is set if any bit of leaf line `i` is set. The client sets
    /// bits here and in the leaf lines, and the worker clears them.
    pub const SUMMARY: usize = 64;
    /// Client's leaf lines of 512 bits each. Their bits are numbered consecutively; bit `n` is for
    /// doorbell index `n`.
    pub const LEAVES: usize = 128;
    /// Number of leaf lines.
    pub const LEAF_LINES: usize = 62;
    /// Number of doorbell indices, an upper bound on the QPs, CQs, SRQs and copy queues of a
    /// session.
    #[expect(clippy::cast_possible_truncation, reason = "it is 31,744")]
    pub const INDICES: u32 = (LEAF_LINES * 512) as u32;
}

// ---------------------------------------------------------------------------------------------
// Scatter/gather elements (SGEs)

/// Size of an SGE in bytes.
pub const SGE_LEN: usize = 16;

/// Scatter/gather element (SGE).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sge {
    /// First address, in the region's address range, which starts at its `iova`.
    pub addr: u64,
    /// Length in bytes; may be 0.
    pub length: u32,
    /// Local key: the region's STag.
    pub lkey: u32,
}

impl Sge {
    /// Encodes the SGE.
    pub fn to_words(self) -> [u64; 2] {
        [self.addr, u64::from(self.length) | u64::from(self.lkey) << 32]
    }

    /// Decodes an SGE. Every value is valid.
    #[expect(clippy::cast_possible_truncation, reason = "each field is the low bits")]
    pub fn from_words(w: [u64; 2]) -> Self {
        Sge { addr: w[0], length: w[1] as u32, lkey: (w[1] >> 32) as u32 }
    }
}

// ---------------------------------------------------------------------------------------------
// Send queue entries

/// Size of the header of a send queue entry in bytes. SGEs or inline data follow.
pub const SEND_HEADER_LEN: usize = 64;
/// Number of words in [`SEND_HEADER_LEN`] bytes.
pub const SEND_HEADER_WORDS: usize = SEND_HEADER_LEN / 8;

numbered! {
    /// Operation of a send request. Numbers up to 9 equal `ibv_wr_opcode`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    //= RDMAP-3.2-1
    pub enum SendOpcode: u8, from_u8 {
        /// RDMA Write: `IBV_WR_RDMA_WRITE`.
        Write = 0,
        /// RDMA Write, then Immediate Data: `IBV_WR_RDMA_WRITE_WITH_IMM`. The first parameter holds
        /// 8 bytes of data as a big-endian number; verbs use the first four.
        WriteImmediate = 1,
        /// Send, untagged: `IBV_WR_SEND`.
        Send = 2,
        /// Send with immediate data: `IBV_WR_SEND_WITH_IMM`, on QPs of the RoCE device. The first
        /// parameter holds 8 bytes of data as a big-endian number; only the first four are sent.
        SendImmediate = 3,
        /// RDMA Read into the request's SGEs: `IBV_WR_RDMA_READ`.
        Read = 4,
        /// Atomic CmpSwap: `IBV_WR_ATOMIC_CMP_AND_SWP`. Parameters: compare, swap, compare mask,
        /// swap mask; verbs set all mask bits. The request has one SGE of 8 bytes, which receives
        /// the original value.
        CompareSwap = 5,
        /// Atomic FetchAdd: `IBV_WR_ATOMIC_FETCH_AND_ADD`. Parameters: addend, field boundaries;
        /// verbs set no boundary. The SGE is as for `CompareSwap`.
        FetchAdd = 6,
        /// Invalidates a local STag: `IBV_WR_LOCAL_INV`.
        LocalInvalidate = 7,
        /// Binds a memory window: `IBV_WR_BIND_MW`; see [`WindowParams`].
        BindWindow = 8,
        /// Send with Invalidate of a remote STag: `IBV_WR_SEND_WITH_INV`.
        SendInvalidate = 9,
        /// RDMA Read, then invalidation of the local sink STag (iWARP only).
        ReadInvalidate = 32,
    }
}

impl SendOpcode {
    /// Returns true if the request waits for a response from the peer and counts towards ORD.
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

    /// Returns true if UC QPs do not support the operation.
    pub fn needs_reliability(self) -> bool {
        self.awaits_response() || self == SendOpcode::SendInvalidate
    }

    /// Returns true for operations of RFC 7306.
    pub fn is_extension(self) -> bool {
        matches!(self, SendOpcode::WriteImmediate | SendOpcode::CompareSwap | SendOpcode::FetchAdd)
    }

    /// Returns the number of [`SendHeader::params`] in use. The others are zero.
    pub fn parameters(self) -> usize {
        match self {
            SendOpcode::WriteImmediate | SendOpcode::SendImmediate => 1,
            SendOpcode::FetchAdd => 2,
            SendOpcode::BindWindow => 3,
            SendOpcode::CompareSwap => 4,
            _ => 0,
        }
    }

    /// Returns the atomic operation with these parameters; `None` for other opcodes.
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

    /// Returns an atomic operation's opcode and parameters.
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

    /// Returns the opcode of the request's completion.
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
    /// Flags of a send request, with the values of `ibv_send_flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct SendFlags: u16 {
        /// Starts only after all earlier Reads and atomic operations of this QP have completed.
        const FENCE = 1;
        /// Requests a completion even on success.
        const SIGNALED = 2;
        /// Requests a solicited event at the peer.
        const SOLICITED = 4;
        /// The data are in the entry itself; there are no SGEs.
        const INLINE = 8;
    }
}

/// Decoded header of a send queue entry. Fields in order, with their sizes in bytes: opcode 1,
/// num_sge 1, flags 2, inline_len 2, reserved 2, wr_id 8, remote_addr 8, rkey 4, inv_rkey 4,
/// params 4 x 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
//= RDMAP-3.2-2, RDMAP-3.2-5
pub struct SendHeader {
    /// A [`SendOpcode`]. Unknown numbers decode and fail the request.
    pub opcode: u8,
    /// Number of SGEs that follow; 0 with inline data.
    pub num_sge: u8,
    /// A [`SendFlags`], not validated.
    pub flags: u16,
    /// Number of bytes of inline data that follow; 0 without [`SendFlags::INLINE`].
    pub inline_len: u16,
    /// Work request ID chosen by the application.
    pub wr_id: u64,
    /// Remote tagged offset of a Write, Read or atomic operation.
    //= DDP-5.2-7
    pub remote_addr: u64,
    /// Remote STag of a Write, Read or atomic operation; current STag of a window; destination QP
    /// of a datagram.
    //= DDP-5.2-7, RDMAP-5.1-8, RDMAP-5.2.1-9
    pub rkey: u32,
    /// STag to invalidate; new STag of a window; Q_Key of a datagram.
    pub inv_rkey: u32,
    /// Immediate Data, operands of an atomic operation, [`WindowParams`] or [`DatagramParams`],
    /// depending on the opcode; zero where unused.
    pub params: [u64; 4],
    /// True if all reserved bits are zero.
    pub reserved_is_zero: bool,
}

impl SendHeader {
    /// Encodes the header.
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

    /// Decodes a header. Every value is decodable; the caller checks the fields.
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
            reserved_is_zero: w[0] >> 48 == 0,
        }
    }
}

/// Parameters of [`SendOpcode::BindWindow`], with their sizes in bytes: address 8, length 8, lkey
/// 4, access 4.
///
/// The entry has no SGEs and no remote address. `rkey` is the window's current STag, `inv_rkey` its
/// new one. The two differ in the low 8 bits only. For a type 1 window they must differ, and the
/// library increments the key (`ibv_inc_rkey(3)`). For type 2 the application chooses the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WindowParams {
    /// First address, in the region's address range, which starts at its `iova`.
    pub address: u64,
    /// Length in bytes; 0 unbinds a type 1 window, and the other parameters are then ignored.
    pub length: u64,
    /// The region's STag.
    pub lkey: u32,
    /// Rights as [`Access`](crate::types::Access) bits; only `REMOTE_READ`, `REMOTE_WRITE`,
    /// `REMOTE_ATOMIC` and `ZERO_BASED` are allowed.
    pub access: u32,
}

impl WindowParams {
    /// Encodes the parameters for [`SendHeader::params`].
    pub fn to_params(self) -> [u64; 4] {
        [self.address, self.length, u64::from(self.lkey) | u64::from(self.access) << 32, 0]
    }

    /// Decodes the parameters of [`SendHeader::params`]. Every value is decodable.
    #[expect(clippy::cast_possible_truncation, reason = "each field is the low bits")]
    pub fn from_params([address, length, key, _]: [u64; 4]) -> Self {
        WindowParams { address, length, lkey: key as u32, access: (key >> 32) as u32 }
    }
}

/// Parameters of a datagram: a [`SendOpcode::Send`] or [`SendOpcode::SendImmediate`] on a UD QP.
///
/// The first parameter is the immediate data, the second and third are the 16 bytes of the
/// destination GID, and the fourth is the index of the source GID. `rkey` is the destination QP.
/// `inv_rkey` is its Q_Key; any number with the high bit set selects the sender's own Q_Key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramParams {
    /// Destination GID.
    pub gid: Gid,
    /// Index of the source GID in the device's GID table.
    pub source: u16,
}

impl DatagramParams {
    /// Encodes the parameters for [`SendHeader::params`]. `first` becomes the first parameter.
    pub fn to_params(self, first: u64) -> [u64; 4] {
        let half = |at: usize| {
            let bytes: [u8; 8] = self.gid.0[at..at + 8].try_into().unwrap_or_default();
            u64::from_le_bytes(bytes)
        };
        [first, half(0), half(8), self.source.into()]
    }

    /// Decodes the parameters of [`SendHeader::params`]. Returns `None` if reserved bits are set.
    pub fn from_params([_, low, high, source]: [u64; 4]) -> Option<Self> {
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&low.to_le_bytes());
        gid[8..].copy_from_slice(&high.to_le_bytes());
        Some(DatagramParams { gid: Gid(gid), source: source.try_into().ok()? })
    }
}

/// Q_Key bit that selects the sender's own Q_Key (IBTA specification, volume 1, section 10.2.5).
pub const OWN_Q_KEY: u32 = 1 << 31;

// ---------------------------------------------------------------------------------------------
// Receive queue entries

/// Size of the header of a receive queue entry in bytes. SGEs follow.
pub const RECEIVE_HEADER_LEN: usize = 16;
/// Number of words in [`RECEIVE_HEADER_LEN`] bytes.
pub const RECEIVE_HEADER_WORDS: usize = RECEIVE_HEADER_LEN / 8;

/// Decoded header of a receive queue entry. Fields in order, with their sizes in bytes: num_sge 1,
/// reserved 7, wr_id 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveHeader {
    /// Number of SGEs that follow.
    pub num_sge: u8,
    /// Work request ID chosen by the application.
    pub wr_id: u64,
    /// True if all reserved bits are zero.
    pub reserved_is_zero: bool,
}

impl ReceiveHeader {
    /// Encodes the header.
    pub fn to_words(&self) -> [u64; RECEIVE_HEADER_WORDS] {
        [u64::from(self.num_sge), self.wr_id]
    }

    /// Decodes a header. Every value is decodable; the caller checks the fields.
    #[expect(clippy::cast_possible_truncation, reason = "each field is the low bits")]
    pub fn from_words(w: [u64; RECEIVE_HEADER_WORDS]) -> Self {
        ReceiveHeader { num_sge: w[0] as u8, wr_id: w[1], reserved_is_zero: w[0] >> 8 == 0 }
    }
}

// ---------------------------------------------------------------------------------------------
// Completion queue entries

/// Size of a completion queue entry in bytes.
pub const COMPLETION_LEN: usize = 64;
/// Number of words in [`COMPLETION_LEN`] bytes.
pub const COMPLETION_WORDS: usize = COMPLETION_LEN / 8;

bitflags::bitflags! {
    /// Flags of a completion.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct CompletionFlags: u16 {
        /// The peer requested a solicited event.
        const SOLICITED = 1;
        /// `imm_or_inv` holds immediate data.
        const WITH_IMM = 2;
        /// `imm_or_inv` holds the STag that the message invalidated.
        const WITH_INV = 4;
        /// The immediate data came with a Send, not with an RDMA Write.
        const IMM_WITH_SEND = 8;
        /// A 40-byte GRH precedes the data of the datagram.
        const GRH = 16;
        /// The GRH holds an IPv4 header, otherwise an IPv6 header.
        const IPV4 = 32;
    }
}

/// A completion queue entry without its sequence word. Fields in order, with their sizes in bytes:
/// wr_id 8, byte_len 4, qp 4, status 1, opcode 1, flags 2, detail 4, imm_or_inv 8, src_qp 4, srq 4,
/// timestamp_ns 8, diagnosis_id 8, reserved 4, sequence 4. The sequence of entry `n` (from 0) is
/// `n + 1` modulo 2^32. The last word, which contains it, is stored last, with release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
//= RDMAP-3.2-3
pub struct Cqe {
    /// Work request ID chosen by the application.
    pub wr_id: u64,
    /// Number of bytes received or read, 8 for an atomic operation. With Immediate Data of an RDMA
    /// Write, the length of that Write. 0 otherwise.
    pub byte_len: u32,
    /// QP of the request.
    pub qp: u32,
    /// A [`CompletionStatus`].
    pub status: u8,
    /// A [`CompletionOpcode`].
    pub opcode: u8,
    /// [`CompletionFlags`].
    pub flags: u16,
    /// Terminate code of the failure: layer << 16 | type << 8 | code; 0 if there was none.
    pub detail: u32,
    /// Immediate Data as a big-endian number of 8 bytes, or the invalidated STag, depending on
    /// `flags`.
    pub imm_or_inv: u64,
    /// Source QP of a datagram; 0 otherwise.
    pub src_qp: u32,
    /// Shared receive queue of the receive; 0 for none.
    pub srq: u32,
    /// Reserved for a timestamp in monotonic nanoseconds; always 0.
    pub timestamp_ns: u64,
    /// Diagnosis that explains the failure; 0 for none.
    pub diagnosis_id: u64,
}

impl Cqe {
    /// Creates a completion. All fields except the parameters are zero.
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

    /// Encodes the entry with the given sequence number.
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

    /// Decodes an entry. The caller must have checked its sequence number.
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

    /// Returns the sequence number in an entry's last word.
    pub fn sequence(last_word: u64) -> u32 {
        (last_word >> 32) as u32
    }
}

// ---------------------------------------------------------------------------------------------
// Completion channel records

/// Size of a record on a completion channel in bytes.
pub const CHANNEL_RECORD_LEN: usize = 16;

/// Completion event. Fields in order, with their sizes in bytes: CQ 4, kind 4 (1 for a completion
/// event), sequence 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelRecord {
    /// The CQ that raised the event.
    pub cq: u32,
    /// Event number of this CQ, from 1.
    pub sequence: u64,
}

impl ChannelRecord {
    /// Encodes the record.
    pub fn to_bytes(self) -> [u8; CHANNEL_RECORD_LEN] {
        let mut b = [0; CHANNEL_RECORD_LEN];
        b[..4].copy_from_slice(&self.cq.to_le_bytes());
        b[4..8].copy_from_slice(&1u32.to_le_bytes());
        b[8..].copy_from_slice(&self.sequence.to_le_bytes());
        b
    }

    /// Decodes a record. Returns `None` if its length or kind is wrong.
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
    fn send_header_layout() {
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
            reserved_is_zero: true,
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
        assert!(!SendHeader::from_words(spare).reserved_is_zero);
    }

    #[test]
    fn atomic_operation_parameters() {
        for (operation, opcode, params) in [
            (AtomicOperation::FetchAdd { add: 1, boundaries: 2 }, 6, [1, 2, 0, 0]),
            (
                AtomicOperation::CompareSwap { swap: 3, swap_mask: 4, compare: 5, compare_mask: 6 },
                5,
                [5, 3, 6, 4],
            ),
        ] {
            let expected = (SendOpcode::from_u8(opcode).expect("an opcode"), params);
            assert_eq!(SendOpcode::of_operation(operation), expected);
            assert_eq!(expected.0.operation(params), Some(operation));
            let used = params.iter().rposition(|p| *p != 0).map_or(0, |at| at + 1);
            assert_eq!(expected.0.parameters(), used);
        }
        assert_eq!(SendOpcode::Read.operation([0; 4]), None);
    }

    #[test]
    fn window_parameter_layout() {
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
    fn datagram_parameter_layout() {
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
    fn channel_record_round_trip() {
        let r = ChannelRecord { cq: 3, sequence: 1 << 40 };
        assert_eq!(ChannelRecord::from_bytes(&r.to_bytes()), Some(r));
        let mut other = r.to_bytes();
        other[4] = 2;
        assert_eq!(ChannelRecord::from_bytes(&other), None);
        assert_eq!(ChannelRecord::from_bytes(&other[..15]), None);
    }
}
