//! One queue pair as its worker owns it: queues, both directions of the stream, and its phase.
//!
//! The methods live beside the hop they belong to: `post` takes requests, `tx` and `direct` send,
//! `rx` and `place` receive, `receives` and `hold` find a buffer or wait for one, `moving` waits for
//! movers, `complete` retires and flushes, `teardown` ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::hold::Pause;
use super::ledger::Ledger;
use super::message::Message;
use super::moving::Stage;
use super::receives::Receives;
use super::schedule::{Key, Seat};
use super::tcp::TcpLink;
use crate::device::stag::Principal;
use crate::device::{Cq, QpShared, StagChange};
use crate::shm::queue::{ReceiveEntry, SendConsumer, SendEntry, SgeList};
use crate::stream::ReadArrival;
use crate::types::{AddressPair, Msn, PdId, QpId, QpState, SessionId, Stag, Time};

/// A queue pair as the resource manager made it, before a worker owns it.
pub struct QpConfig {
    /// Its number.
    pub qp: QpId,
    /// Its owner.
    pub session: SessionId,
    /// Its domain.
    pub pd: PdId,
    /// Its index in the owner's doorbell pages.
    pub doorbell: u32,
    /// Engine end of the send queue.
    pub sq: SendConsumer,
    /// Where its receives come from.
    pub rq: Receives,
    /// Where send completions go.
    pub send_cq: Arc<Cq>,
    /// Where receive completions go.
    pub recv_cq: Arc<Cq>,
    /// Signal every send request.
    pub signal_all: bool,
    /// How long a message that finds no receive is held; `None` if it ends the stream at once.
    pub hold: Option<Duration>,
    /// State and counters.
    pub shared: Arc<QpShared>,
}

/// Where a stream is. What may be sent and what becomes of arriving bytes follows from it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Responder before its first valid FPDU: receives, sends nothing (RFC 5044 section 7.1.2).
    Quiet,
    /// Both directions run.
    Open,
    /// The peer has finished; this side may go on sending.
    HalfClosed,
    /// The application disconnects: what was posted before runs out, then FIN.
    Closing,
    /// FIN sent after everything else; the peer's is awaited.
    FinSent,
    /// A Terminate is to be sent; nothing is received any more.
    Terminating,
    /// Everything sent; the peer's FIN is awaited and its bytes are dropped, so that closing does not
    /// reset the connection under our Terminate.
    Draining,
    /// No stream.
    Dead,
}

impl Phase {
    /// Whether requests and responses may be sent.
    pub(super) fn sends(self) -> bool {
        matches!(self, Phase::Open | Phase::HalfClosed | Phase::Closing)
    }

    /// Whether arriving segments are carried out.
    pub(super) fn receives(self) -> bool {
        matches!(self, Phase::Quiet | Phase::Open | Phase::Closing | Phase::FinSent)
    }

    /// Whether new requests are flushed instead of carried out.
    pub(super) fn flushes(self) -> bool {
        matches!(self, Phase::Terminating | Phase::Draining | Phase::Dead)
    }

    pub(super) fn state(self) -> QpState {
        match self {
            Phase::Quiet | Phase::Open => QpState::Rts,
            Phase::HalfClosed | Phase::Closing | Phase::FinSent => QpState::Closing,
            Phase::Terminating | Phase::Draining => QpState::Terminate,
            Phase::Dead => QpState::Error,
        }
    }
}

/// What a QP is connected by.
pub(super) enum Link {
    /// Nothing.
    None,
    /// A TCP connection.
    Tcp(Box<TcpLink>),
    /// Another QP of this engine.
    Direct(Key),
}

/// A read of ours that the peer has not answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutstandingRead {
    /// Its request; none for a Read that was only the first FPDU of a peer-to-peer stream.
    pub seq: Option<u64>,
    pub sink: Stag,
    pub to: u64,
    pub size: u32,
    pub received: u64,
    /// Invalidate the sink when it is done.
    pub invalidate: bool,
}

/// A receive that a message is being placed into.
pub(super) struct Receiving {
    pub entry: ReceiveEntry,
    /// Bytes of all its elements.
    pub capacity: u64,
}

/// A queue pair.
pub(super) struct Qp {
    pub key: Key,
    pub id: QpId,
    pub session: SessionId,
    /// Where its session stands in the schedule.
    pub seat: Seat,
    pub pd: PdId,
    pub doorbell: u32,
    pub signal_all: bool,
    pub shared: Arc<QpShared>,
    pub addresses: Option<AddressPair>,
    /// MPA revision of start-up.
    pub revision: u8,

    pub sq: SendConsumer,
    pub rq: Receives,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,

    /// A request taken from the queue that waits for a fence or for a read slot.
    pub held: Option<SendEntry>,
    pub ledger: Ledger,
    /// CQ slots reserved and not yet held by an entry of the ledger.
    pub slots: u32,
    pub message: Option<Message>,
    /// Elements of the request taken last: of the one that is held, or of that message if it has
    /// several.
    pub elements: SgeList,
    /// Reads of the peer's that we owe responses to.
    pub owed: VecDeque<ReadArrival>,
    pub reads: VecDeque<OutstandingRead>,
    /// Whether a response goes before the next request: they alternate.
    pub response_next: bool,
    pub ird: u16,
    pub ord: u16,
    /// While disconnecting: requests still to be taken.
    pub take_limit: Option<u32>,
    /// Requests that hold all later ones up until every worker has changed its STag table. The first
    /// has been asked for.
    pub changing: VecDeque<(u64, StagChange)>,
    /// Number of the next Send, and of the next Read Request, on their untagged queues.
    pub send_msn: Msn,
    pub read_msn: Msn,

    pub receiving: Option<Receiving>,
    /// How long a message that finds no receive is held.
    pub hold: Option<Duration>,
    /// The incoming direction stands still.
    pub pause: Option<Box<Pause>>,
    /// The owner was warned that a Read of its own is behind what it holds.
    pub warned_of_read: bool,
    /// The owner was told that no more receives are taken.
    pub last_receive_told: bool,

    /// What a mover brings, or has brought, of the message in progress.
    pub stage: Stage,
    /// A mover has written for it: from then on little is received at a time.
    pub paced: bool,

    pub phase: Phase,
    pub link: Link,
    /// The peer's FIN has been seen.
    pub peer_fin: bool,
    /// The application was told that the connection stands, and must be told how it ends.
    pub announced: bool,
    /// Reason for the end, once known: the first one counts.
    pub end: Option<crate::abi::control::DisconnectReason>,
    /// The record that says why the stream ends by a fault; 0 while it does not.
    pub why: u64,
    /// The record for requests that are flushed otherwise, once there is one.
    pub flush_why: u64,
    /// Entries remain in the queues that could not be flushed for lack of CQ slots, or because of a
    /// mover that is writing.
    pub flush_pending: bool,

    /// It stands in the schedule: for a turn, to be read, or both.
    pub scheduled: bool,
    pub wants_turn: bool,
    pub readable: bool,
    /// What is left of its turn; what it owes, if negative.
    pub deficit: i64,
    pub deadline: Option<Time>,
}

impl Qp {
    pub(super) fn new(key: Key, seat: Seat, config: QpConfig) -> Self {
        Qp {
            key,
            id: config.qp,
            session: config.session,
            seat,
            pd: config.pd,
            doorbell: config.doorbell,
            signal_all: config.signal_all,
            shared: config.shared,
            addresses: None,
            revision: 0,
            sq: config.sq,
            rq: config.rq,
            send_cq: config.send_cq,
            recv_cq: config.recv_cq,
            held: None,
            ledger: Ledger::default(),
            slots: 0,
            message: None,
            elements: SgeList::new(),
            owed: VecDeque::new(),
            reads: VecDeque::new(),
            response_next: false,
            ird: 0,
            ord: 0,
            take_limit: None,
            changing: VecDeque::new(),
            send_msn: Msn::FIRST,
            read_msn: Msn::FIRST,
            receiving: None,
            hold: config.hold,
            pause: None,
            warned_of_read: false,
            last_receive_told: false,
            stage: Stage::default(),
            paced: false,
            phase: Phase::Dead,
            link: Link::None,
            peer_fin: false,
            announced: false,
            end: None,
            why: 0,
            flush_why: 0,
            flush_pending: false,
            scheduled: false,
            wants_turn: false,
            readable: false,
            deficit: 0,
            deadline: None,
        }
    }

    /// The identity under which it uses memory.
    pub(super) fn principal(&self) -> Principal {
        Principal { session: self.session, pd: self.pd, qp: self.id }
    }

    /// Bytes TCP has accepted; without TCP everything counts as accepted.
    pub(super) fn accepted(&self) -> u64 {
        match &self.link {
            Link::Tcp(tcp) => tcp.accepted,
            Link::None | Link::Direct(_) => u64::MAX,
        }
    }

    pub(super) fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        if let Link::Tcp(tcp) = &mut self.link
            && !phase.receives()
        {
            tcp.unread = None;
        }
        self.shared.set_state(phase.state());
    }

    /// Nothing that was posted before the disconnect is left to be sent or answered.
    pub(super) fn has_run_dry(&self) -> bool {
        self.take_limit == Some(0)
            && self.held.is_none()
            && self.message.is_none()
            && self.ledger.is_empty()
            && self.reads.is_empty()
            && self.owed.is_empty()
    }
}
