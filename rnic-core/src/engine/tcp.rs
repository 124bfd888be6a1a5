//! What a QP keeps per TCP connection.
//!
//! One slab each for sending and receiving serve all QPs; a QP owns memory only for bytes that the
//! kernel has not taken yet and for an FPDU that has not arrived in full. An idle connection owns none.

use super::charge::Held;
use super::partial::Partial;
use super::unread::Unread;
use crate::mpa::{Deframer, Framer, MAX_FPDU, mulpdu};
use crate::shm::io::Piece;
use crate::stream::inbound::Inbound;
use crate::stream::startup::{Negotiated, Role, Rtr, RtrKinds};

/// Bytes of the transmit slab: the most that one call hands to TCP.
pub(super) const TX_SLAB: usize = BATCH + MAX_FPDU;
/// Bytes of a receive slab: as many as one call takes in.
pub(super) const RX_SLAB: usize = 128 * 1024;
/// Bytes after which a call is made. With more, both ends wait for each other in larger steps: of 64,
/// 128 and 256 KiB the smallest was the fastest between two daemons on two CPUs.
const BATCH: usize = 64 * 1024;

/// State of one connection.
pub(super) struct TcpLink {
    pub framer: Framer,
    pub deframer: Deframer,
    pub inbound: Inbound,
    /// DDP and RDMAP version agreed.
    pub dv: u8,
    markers_out: bool,
    emss: usize,
    pub mulpdu: usize,
    /// Bytes of FPDUs produced, and of those accepted by TCP.
    pub framed: u64,
    pub accepted: u64,
    /// Bytes that TCP did not take, from `tail_at` on.
    tail: Vec<u8>,
    tail_at: usize,
    /// What the session is charged for them.
    pub held: Held,
    /// Bytes after which a call is made; tests make one per FPDU.
    pub batch: usize,
    /// TCP refused bytes; nothing is tried until it is writable.
    pub blocked: bool,
    /// First FPDU to send in the peer-to-peer model.
    pub rtr: Option<Rtr>,
    /// Kinds of first FPDU that the peer may send which are not messages.
    pub await_rtr: Option<RtrKinds>,
    /// Terminate header to be sent.
    pub terminate: Option<Vec<u8>>,
    pub fin_sent: bool,
    /// Why the socket takes nothing any more, while what came before that is still read.
    pub broken: Option<String>,
    /// The FPDU that has not arrived in full.
    pub partial: Partial,
    /// What was read behind it and not looked at.
    pub unread: Option<Unread>,
}

/// Why `mulpdu` is what it is: the formula of RFC 5044 section 4.5, or all that DDP allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MulpduPolicy {
    /// From the connection's effective MSS.
    Emss,
    /// The largest, for peers known to cope; outside the RFC.
    Max,
}

impl TcpLink {
    pub(super) fn new(n: &Negotiated) -> Self {
        let (rtr, await_rtr) = match &n.role {
            Role::Initiator { rtr } => (*rtr, None),
            Role::Responder { await_rtr } => (None, *await_rtr),
        };
        TcpLink {
            framer: Framer::new(n.tx_markers, n.crc),
            deframer: Deframer::new(n.rx_markers, n.crc),
            inbound: Inbound::new(n.version),
            dv: n.version,
            markers_out: n.tx_markers,
            emss: 0,
            mulpdu: usize::from(mulpdu(0, n.tx_markers)),
            framed: 0,
            accepted: 0,
            tail: Vec::new(),
            tail_at: 0,
            held: Held::default(),
            batch: BATCH,
            blocked: false,
            rtr,
            await_rtr,
            terminate: None,
            fin_sent: false,
            broken: None,
            partial: Partial::default(),
            unread: None,
        }
    }

    /// Takes over the connection's effective MSS (RFC 5044 section 4.5). What has been framed stays
    /// as it is; the rest of a message under way is cut to the new size.
    pub(super) fn set_emss(&mut self, emss: usize, policy: MulpduPolicy) {
        if emss != self.emss {
            self.emss = emss;
            let emss = match policy {
                MulpduPolicy::Emss => emss,
                MulpduPolicy::Max => usize::from(u16::MAX),
            };
            self.mulpdu = usize::from(mulpdu(emss, self.markers_out));
        }
    }

    pub(super) fn has_unsent(&self) -> bool {
        self.framed != self.accepted
    }

    /// Memory that is kept for bytes that TCP did not take.
    pub(super) fn tail_room(&self) -> usize {
        self.tail.capacity()
    }

    pub(super) fn tail(&self) -> &[u8] {
        &self.tail[self.tail_at..]
    }

    /// Notes that TCP took `sent` bytes of those at hand; `rest` are kept.
    pub(super) fn took(&mut self, sent: usize, rest: &[u8]) {
        self.accepted += sent as u64;
        self.blocked = !rest.is_empty();
        if !rest.is_empty() {
            self.tail.clear();
            self.tail.extend_from_slice(rest);
            self.tail_at = 0;
        }
    }

    /// Notes that TCP took all that was begun and no more.
    pub(super) fn refused(&mut self) {
        self.blocked = true;
    }

    /// Notes that TCP took `sent` bytes of the tail.
    pub(super) fn took_of_tail(&mut self, sent: usize) {
        self.accepted += sent as u64;
        self.tail_at += sent;
        self.blocked = self.tail_at < self.tail.len();
        if !self.blocked {
            // An idle connection holds no buffer.
            self.tail = Vec::new();
            self.tail_at = 0;
        }
    }

    /// Whether nothing is kept, as while the connection is idle.
    #[cfg(test)]
    pub(super) fn holds_no_buffer(&self) -> bool {
        self.tail.capacity() == 0 && self.partial.holds_nothing()
    }

    /// Gives up what TCP has not taken.
    pub(super) fn drop_unsent(&mut self) {
        self.tail = Vec::new();
        self.tail_at = 0;
        self.framed = self.accepted;
        self.blocked = false;
    }
}

/// What one call hands to TCP.
pub struct TxBatch<'a> {
    pieces: &'a [Piece<'a>],
}

impl<'a> TxBatch<'a> {
    pub(super) fn new(pieces: &'a [Piece<'a>]) -> Self {
        TxBatch { pieces }
    }

    /// The pieces, in order, for [`send_pieces`](crate::shm::io::send_pieces).
    pub fn pieces(&self) -> &[Piece<'a>] {
        self.pieces
    }
}
