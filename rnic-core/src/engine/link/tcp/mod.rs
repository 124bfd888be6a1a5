//! A TCP connection: the state that a QP keeps for it. Segments become FPDUs in [`transmit`], or in
//! [`zero_copy`] without a copy, and bytes become segments in [`receive`].
//!
//! All QPs of a worker share its slabs. A QP owns memory only for bytes that TCP has not accepted
//! yet and for an FPDU that has not arrived in full ([`partial`]). An idle connection owns none.

mod delayed;
pub(in crate::engine) mod failure;
pub(in crate::engine) mod partial;
mod receive;
pub(in crate::engine) mod slabs;
pub(in crate::engine) mod transmit;
mod unread;
mod zero_copy;

use partial::Partial;
use slabs::Unread;

use crate::engine::charge::{Owner, StreamCharge};
use crate::engine::fault_rules::StreamCut;
use crate::engine::interface::MulpduPolicy;
use crate::engine::link::emulation::delay_line::DelayLine;
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use crate::mpa::{Deframer, Framer, MAX_FPDU, mulpdu};
use crate::stream::Fault;
use crate::stream::inbound::Inbound;
use crate::stream::startup::{Negotiated, Role, Rtr, RtrKinds};
use rnic_abi::shm::io::Piece;
use rnic_abi::types::Msn;

/// Bytes of the transmit slab, the maximum that one call hands to TCP.
pub(in crate::engine) const TX_SLAB: usize = BATCH + MAX_FPDU;
/// Bytes to frame before a call. With larger batches the two ends overlap less: of 64, 128 and 256
/// KiB the smallest was the fastest between two daemons on two CPUs.
const BATCH: usize = 64 * 1024;

/// State of one connection.
pub(in crate::engine) struct TcpLink {
    framer: Framer,
    deframer: Deframer,
    inbound: Inbound,
    /// DDP and RDMAP version agreed.
    dv: u8,
    markers_out: bool,
    emss: usize,
    mulpdu: usize,
    /// Number of framed bytes, and of bytes accepted by TCP.
    framed: u64,
    accepted: u64,
    /// Number of bytes in the batch that is being framed, which `framed` does not include.
    in_batch: usize,
    /// Bytes that TCP did not accept, from `tail_at` on.
    tail: Vec<u8>,
    tail_at: usize,
    /// Bytes in flight on an emulated link, after the tail.
    line: DelayLine<Box<[u8]>>,
    /// Value of `framed` when bytes last entered the line.
    entered: u64,
    /// Charge of the session for the tail.
    charge: StreamCharge,
    /// Bytes to frame before a call. Tests set 1 for a call per FPDU.
    batch: usize,
    /// TCP refused bytes. Nothing is sent until the socket is writable.
    blocked: bool,
    /// First FPDU to send in the peer-to-peer model.
    rtr: Option<Rtr>,
    /// Kinds of first FPDU that the peer may send as RTR, which are not messages.
    await_rtr: Option<RtrKinds>,
    /// RDMAP header of the Terminate to be sent.
    terminate: Option<Vec<u8>>,
    fin_sent: bool,
    /// A rule ends the stream inside the last FPDU framed. No further FPDU is framed.
    cut: Option<Box<StreamCut>>,
    /// Error of a socket that no longer accepts bytes, while earlier received bytes are still read.
    broken: Option<String>,
    /// The FPDU that has not arrived in full.
    partial: Partial,
    /// Bytes read after it and not yet parsed.
    unread: Option<Unread>,
}

impl TcpLink {
    /// Accepts Sends with Immediate Data, to which both ends have agreed.
    pub(in crate::engine) fn allow_immediate_sends(&mut self) {
        self.inbound.allow_immediate_sends();
    }

    /// Accepts responses that pass a waiting Send while a Write is in progress, and vice versa.
    pub(in crate::engine) fn allow_passing_responses(&mut self) {
        self.inbound.allow_passing_responses();
    }

    pub(in crate::engine) fn new(n: &Negotiated) -> Self {
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
            in_batch: 0,
            tail: Vec::new(),
            tail_at: 0,
            line: DelayLine::default(),
            entered: 0,
            charge: StreamCharge::default(),
            batch: BATCH,
            blocked: false,
            rtr,
            await_rtr,
            terminate: None,
            fin_sent: false,
            cut: None,
            broken: None,
            partial: Partial::default(),
            unread: None,
        }
    }

    /// Sets the connection's effective MSS (RFC 5044 section 4.5). FPDUs already framed keep their
    /// size; the rest of a message in progress is segmented with the new MSS.
    fn set_emss(&mut self, emss: usize, policy: MulpduPolicy) {
        if emss != self.emss {
            self.emss = emss;
            let emss = match policy {
                MulpduPolicy::Emss => emss,
                MulpduPolicy::Max => usize::from(u16::MAX),
            };
            //= DDP-3-1
            self.mulpdu = usize::from(mulpdu(emss, self.markers_out));
        }
    }

    // --- Used by `Link` ----------------------------------------------------------------------

    /// Returns the number of bytes that TCP or an emulated link has accepted.
    pub(in crate::engine) fn accepted(&self) -> u64 {
        self.accepted.max(self.entered)
    }

    /// Returns true if TCP has yet to accept bytes.
    pub(in crate::engine) fn has_unsent(&self) -> bool {
        self.framed != self.accepted
    }

    /// Returns true if nothing can be sent now: a blocked connection waits until its socket is
    /// writable, a broken connection until all received bytes are read.
    pub(in crate::engine) fn awaits_socket(&self) -> bool {
        self.blocked || self.broken.is_some()
    }

    /// Handles a writable socket. Returns true if it was blocked.
    pub(in crate::engine) fn handle_writable(&mut self) -> bool {
        std::mem::take(&mut self.blocked)
    }

    /// Records a placed Send segment; see [`Inbound::sent_placed`].
    #[inline]
    pub(in crate::engine) fn send_placed(
        &mut self,
        mo: u32,
        len: usize,
        last: bool,
    ) -> Result<Option<u32>, Fault> {
        self.inbound.sent_placed(mo, len, last)
    }

    /// Returns the MSN of the last Send that is done; see [`Inbound::last_send`].
    #[inline]
    pub(in crate::engine) fn last_send(&self) -> Option<Msn> {
        self.inbound.last_send()
    }

    /// Returns true if a Terminate can still be sent within the stream.
    pub(in crate::engine) fn can_send_terminate(&self) -> bool {
        !self.fin_sent && self.broken.is_none()
    }

    /// Queues a Terminate to be sent.
    pub(in crate::engine) fn queue_terminate(&mut self, payload: Vec<u8>) {
        self.terminate = Some(payload);
    }

    /// Returns true if TCP has accepted the queued Terminate.
    pub(in crate::engine) fn has_terminated(&self) -> bool {
        self.terminate.is_none() && !self.has_unsent()
    }

    /// Takes the cut of the stream if TCP has accepted all bytes before it.
    pub(in crate::engine) fn take_cut(&mut self) -> Option<Box<StreamCut>> {
        if self.has_unsent() { None } else { self.cut.take() }
    }

    /// Ends the outgoing direction. Returns true if it had not ended before.
    pub(in crate::engine) fn finish(&mut self) -> bool {
        !std::mem::replace(&mut self.fin_sent, true)
    }

    /// Drops the bytes that TCP has not accepted.
    pub(in crate::engine) fn drop_unsent(&mut self, core: &QpCore, engine: &mut EngineState) {
        self.tail = Vec::new();
        self.tail_at = 0;
        self.line = DelayLine::default();
        self.framed = self.accepted;
        self.blocked = false;
        engine.unsent.release(&mut self.charge, core.session);
    }

    /// Drops the bytes that were read and not yet parsed.
    pub(in crate::engine) fn drop_unread(&mut self) {
        self.unread = None;
    }

    /// Releases the memory that the connection is charged for.
    pub(in crate::engine) fn release(&mut self, owner: Owner, engine: &mut EngineState) {
        self.drop_partial(owner, engine);
        engine.unsent.release(&mut self.charge, owner.session);
    }

    fn drop_partial(&mut self, owner: Owner, engine: &mut EngineState) {
        engine.partials.give(&mut self.partial, owner, &mut engine.deadlines);
    }

    // --- Bytes that TCP accepts --------------------------------------------------------------

    /// Returns the capacity of the tail, which the session is charged for.
    fn tail_room(&self) -> usize {
        self.tail.capacity()
    }

    fn tail(&self) -> &[u8] {
        &self.tail[self.tail_at..]
    }

    /// Records that TCP accepted `sent` new bytes, and keeps `rest` as the tail.
    fn on_accepted(&mut self, sent: usize, rest: &[u8]) {
        self.accepted += sent as u64;
        self.blocked = !rest.is_empty();
        if !rest.is_empty() {
            self.tail.clear();
            //= DDP-3-3
            self.tail.extend_from_slice(rest);
            self.tail_at = 0;
        }
    }

    /// Records that TCP accepted fewer bytes than offered, but split no FPDU.
    fn on_refused(&mut self) {
        self.blocked = true;
    }

    /// Records that TCP accepted `sent` bytes of the tail.
    fn on_tail_accepted(&mut self, sent: usize) {
        self.accepted += sent as u64;
        self.tail_at += sent;
        self.blocked = self.tail_at < self.tail.len();
        if !self.blocked {
            // An idle connection holds no buffer.
            self.tail = Vec::new();
            self.tail_at = 0;
        }
    }
}

#[cfg(test)]
impl TcpLink {
    /// Returns true if no buffer is kept, as while the connection is idle.
    pub(in crate::engine) fn holds_no_buffer(&self) -> bool {
        self.tail.capacity() == 0 && self.line.is_empty() && self.partial.holds_nothing()
    }

    /// Makes a call to the socket for every FPDU.
    pub(in crate::engine) fn send_one_by_one(&mut self) {
        self.batch = 1;
    }

    /// Limits segments to `mulpdu` bytes, which need not correspond to any EMSS.
    pub(in crate::engine) fn set_mulpdu(&mut self, mulpdu: usize) {
        self.mulpdu = mulpdu;
    }

    /// Sets the MSN of the peer's next Send and next Read Request.
    pub(in crate::engine) fn number_inbound_from(&mut self, msn: rnic_abi::types::Msn) {
        self.inbound.set_next_msn(msn);
    }
}

/// Bytes that one call hands to TCP.
pub struct TxBatch<'a> {
    pieces: &'a [Piece<'a>],
}

impl<'a> TxBatch<'a> {
    pub(in crate::engine) fn new(pieces: &'a [Piece<'a>]) -> Self {
        TxBatch { pieces }
    }

    /// Returns the pieces in order, for [`send_pieces`](rnic_abi::shm::io::send_pieces).
    pub fn pieces(&self) -> &[Piece<'a>] {
        self.pieces
    }
}
