//! A QP, owned by its worker: its own requests, incoming messages, the life of its stream, and its
//! link.
//!
//! Each part keeps its own state. Code that involves several parts has a module per task:
//! [`link`](super::link) sends and receives, [`arrival`](super::arrival) processes incoming
//! segments, [`resume`](super::resume) continues after a wait, [`flush`](super::flush) completes
//! and flushes, and [`teardown`](super::teardown) ends streams.

use std::sync::Arc;
use std::time::Duration;

use super::datagram::{DatagramConfig, Datagrams};
use super::fault_rules::Faults;
use super::interface::Notification;
use super::life::LifeCycle;
use super::link::Link;
use super::link::emulation::state::Emulation;
use super::phase::StreamPhase;
use super::qp_core::{QpCore, SchedulingState};
use super::rc::{ALL_RIGHTS, RcState};
use super::reason::{Reason, revoked};
use super::requester::inbound_request::AtomicError;
use super::requester::message::{GatherFault, Message, MessageSource, Segment};
use super::requester::{RequestError, Requester};
use super::responder::Responder;
use super::responder::receives::Receives;
use super::schedule::{Key, REQUEST_COST, SessionSlot};
use super::send_queue::SendQueue;
use super::state::EngineState;
use super::transport::Transport;
use crate::device::memory::{MemoryFault, Unreachable};
use crate::device::stag::RemoteFault;
use crate::device::{ArmedFault, Cq, QpShared};
use crate::rdmap::codes;
use crate::stream::{InboundAtomic, terminate};
use rnic_abi::abi::control::{DisconnectMode, Wiring};
use rnic_abi::faults::FaultName;
use rnic_abi::shm::queue::{QueueFault, SendConsumer};
use rnic_abi::types::{PdId, QpId, QpState, SessionId};

/// Configuration of a QP, which the resource manager passes to a worker.
pub struct QpConfig {
    /// QP number, which is also its handle.
    pub qp: QpId,
    /// Session that created it. Its events and records go to this session.
    pub session: SessionId,
    /// Protection domain. Its requests and its peers reach only regions of this domain.
    pub pd: PdId,
    /// Doorbell index in the session's doorbell pages.
    pub doorbell: u32,
    /// Engine end of the send queue.
    pub sq: SendConsumer,
    /// Source of its receives.
    pub rq: Receives,
    /// CQ of send completions.
    pub send_cq: Arc<Cq>,
    /// CQ of receive completions.
    pub recv_cq: Arc<Cq>,
    /// Signal every send request (`sq_sig_all`).
    pub signal_all: bool,
    /// Maximum wait of an iWARP message for a receive. `None` ends the stream at once.
    pub rnr_timeout: Option<Duration>,
    /// Attributes of an RC or UC QP.
    pub wiring: Option<Wiring>,
    /// UC instead of RC; ignored without `wiring`.
    pub unreliable: bool,
    /// Configuration of a UD QP.
    pub datagrams: Option<DatagramConfig>,
    /// State and counters, written by the worker and read by the control thread.
    pub shared: Arc<QpShared>,
    /// Fault rules.
    pub faults: Vec<Arc<ArmedFault>>,
    /// The fault rule that stops the QP.
    pub stopped: Option<FaultName>,
}

impl QpConfig {
    /// Returns the transport: iWARP also for a RoCE QP that never reached RTR.
    fn transport(&self) -> Transport {
        match (&self.datagrams, &self.wiring) {
            (Some(_), _) => Transport::Ud,
            (None, Some(_)) if self.unreliable => Transport::Uc,
            (None, Some(_)) => Transport::Rc,
            (None, None) => Transport::Iwarp,
        }
    }
}

pub(super) struct Qp {
    pub core: QpCore,
    pub requester: Requester,
    pub responder: Responder,
    pub life: LifeCycle,
    pub link: Link,
    /// Present while the link of this QP, or of its peer on the direct path, is emulated.
    pub emulation: Option<Box<Emulation>>,
    pub send_queue: SendQueue,
    /// Present on RC and UC QPs.
    pub rc: Option<Box<RcState>>,
    /// Present on UD QPs.
    pub datagrams: Option<Box<Datagrams>>,
}

/// An outgoing FPDU, or on the direct path the segment that it would carry.
pub(super) enum OutgoingFpdu {
    /// The next segment of the message in progress.
    Segment(Segment),
    /// On the direct path, `segments` segments sent at once as `run`.
    Run { run: Segment, segments: u32 },
    /// On the direct path, messages of one segment each that were never in progress.
    Writes { segments: u32, bytes: u64 },
    /// The first FPDU of a peer-to-peer stream, which is not a message of the application.
    Rtr,
    /// The Terminate of this side.
    Terminate,
}

/// An incoming FPDU, or on the direct path the segment that it would carry.
pub(super) enum IncomingFpdu {
    /// An FPDU whose CRC and Markers, if used, are valid. Over TCP this includes a Terminate.
    Segment,
    /// On the direct path, several segments at once.
    Run { segments: u32 },
    /// The peer's Terminate on the direct path.
    Terminate,
}

impl Qp {
    pub(super) fn new(key: Key, slot: SessionSlot, config: QpConfig, link: Link) -> Self {
        let core = QpCore {
            key,
            id: config.qp,
            session: config.session,
            slot,
            pd: config.pd,
            transport: config.transport(),
            rights: config.wiring.map_or(ALL_RIGHTS, |wiring| wiring.rights),
            doorbell: config.doorbell,
            shared: config.shared,
            send_cq: config.send_cq,
            recv_cq: config.recv_cq,
            turn: SchedulingState::default(),
            faults: Faults::new(config.faults),
            stopped: config.stopped,
            peer_stopped: None,
            moves_to_error: None,
            order: None,
        };
        let missing = core.transport.missing_receive(config.rnr_timeout);
        Qp {
            core,
            requester: Requester::new(config.sq, config.signal_all),
            responder: Responder::new(config.rq, missing),
            life: LifeCycle::new(),
            link,
            emulation: None,
            send_queue: SendQueue::default(),
            rc: config.wiring.map(|wiring| Box::new(RcState::new(&wiring))),
            datagrams: config.datagrams.map(|config| Box::new(Datagrams::new(config))),
        }
    }

    /// Returns a RoCE QP's state, errors aside, or `None` on iWARP.
    pub(super) fn roce_state(&self) -> Option<QpState> {
        let rc_or_uc = self.rc.as_ref().map(|rc| rc.state());
        rc_or_uc.or(self.datagrams.as_ref().map(|datagrams| datagrams.state()))
    }

    /// Returns true if the end of the stream would not end the QP; see [`Qp::unlink`].
    pub(super) fn can_unlink(&self) -> bool {
        self.core.transport.outlives_stream() && self.life.phase().is_linked()
    }

    pub(super) fn enter(&mut self, phase: StreamPhase) {
        self.life.enter(phase);
        let fails = (self.send_queue == SendQueue::Failed).then_some(QpState::Sqe);
        let state = match fails.or(self.roce_state()) {
            // A RoCE QP outlives its streams and has no state for a pending Terminate.
            Some(state) if !phase.flushes() => state,
            Some(_) => QpState::Error,
            None => phase.state(),
        };
        self.core.shared.set_state(state);
        //= DDP-7.1-18
        if !phase.receives() {
            self.link.drop_unread();
            self.responder.drop_unread();
        }
    }

    /// Notifies the application of the connection. Must precede the first completion.
    pub(super) fn emit_established(&mut self, engine: &mut EngineState, private_data: Vec<u8>) {
        let (ird, ord) = self.requester.depths();
        self.life.emit_established(&self.core, engine, ird, ord, private_data);
    }

    // --- Sending -----------------------------------------------------------------------------

    /// Makes a message ready to be segmented. Returns false if no message can be sent now.
    #[inline]
    pub(super) fn next_message(&mut self, engine: &mut EngineState) -> bool {
        loop {
            match self.requester.next_message(&mut self.core, &self.life, engine) {
                Ok(true) if self.emulation.is_some() && self.loses_message(engine) => {
                    self.core.turn.charge(REQUEST_COST);
                }
                Ok(found) => return found,
                Err(error) => {
                    self.request_error(engine, error);
                    return false;
                }
            }
        }
    }

    /// Accounts for one or more outgoing FPDUs. Each FPDU of either path comes here once. Over TCP
    /// the FPDU is framed, and `queued` is the stream offset of its end in bytes. Bytes that TCP
    /// has not accepted when the connection ends are never sent.
    #[inline]
    pub(super) fn fpdu_sent(&mut self, fpdu: &OutgoingFpdu, queued: Option<u64>) {
        let counters = &self.core.shared;
        let (segment, segments) = match fpdu {
            OutgoingFpdu::Segment(segment) => (segment, 1),
            OutgoingFpdu::Run { run, segments } => (run, *segments),
            OutgoingFpdu::Writes { segments, bytes } => {
                counters.segments_sent.add(u64::from(*segments));
                counters.bytes_sent.add(*bytes);
                return;
            }
            // These belong to the stream and are not counted.
            OutgoingFpdu::Rtr | OutgoingFpdu::Terminate => return,
        };
        counters.segments_sent.add(u64::from(segments));
        let data = self.requester.message().map_or(0, |m| m.data_in(segment));
        counters.bytes_sent.add(u64::from(data));
        self.requester.segment_sent(&self.core, segment.len, queued);
    }

    /// Accounts for one or more incoming FPDUs. Each FPDU of either path comes here once: over TCP
    /// before its headers are parsed, on the direct path after the receiver has handled it.
    #[inline]
    pub(super) fn fpdu_received(&mut self, fpdu: IncomingFpdu) {
        match fpdu {
            IncomingFpdu::Segment => self.core.shared.segments_received.add(1),
            IncomingFpdu::Run { segments } => {
                self.core.shared.segments_received.add(u64::from(segments));
            }
            IncomingFpdu::Terminate => {}
        }
    }

    /// Ends an RC or UC QP without a Terminate if its own address space is gone, because its
    /// program was killed. On a RoCE adapter, the QP of a killed program no longer answers the peer
    /// and blames no request. Returns true if the QP has ended.
    pub(super) fn end_if_detached(&mut self, engine: &mut EngineState, fault: MemoryFault) -> bool {
        let own = fault.owner == self.core.session && fault.cause == Unreachable::Detached;
        let ends = own && self.core.transport.outlives_stream();
        if ends {
            self.disconnect(engine, DisconnectMode::Abort);
        }
        ends
    }

    /// Handles memory of the message in progress that could not be read.
    pub(super) fn memory_failed(&mut self, engine: &mut EngineState, fault: MemoryFault) {
        engine.memory_unreachable(fault);
        if self.end_if_detached(engine, fault) {
            return;
        }
        let reason = Reason::Memory(fault);
        match fault.cause {
            Unreachable::Truncated => {
                self.requester.drop_message();
                self.fail_locally(engine, reason);
            }
            Unreachable::Unmapped => self.gather_failed(engine, GatherFault::Local(reason)),
            // Regions of a detached address space count as revoked.
            Unreachable::Detached => {
                let response = self.requester.message().is_some_and(Message::is_response);
                let as_if =
                    if response { GatherFault::Revoked } else { GatherFault::Local(reason) };
                self.gather_failed(engine, as_if);
            }
        }
    }

    /// Handles memory of the message in progress that is not accessible.
    pub(super) fn gather_failed(&mut self, engine: &mut EngineState, fault: GatherFault) {
        let Some(message) = self.requester.take_message() else { return };
        match (fault, &message.source, message.seq) {
            (GatherFault::Local(reason), _, Some(seq)) if message.sent == 0 => {
                self.requester.unsend(&message);
                if let Err(error) = self.requester.refuse(seq, reason) {
                    self.request_error(engine, error);
                }
            }
            (GatherFault::Local(reason), _, Some(seq)) => {
                self.request_error(engine, RequestError::Failed { seq, reason });
                if self.core.transport.stops_send_queue() && self.life.phase().is_linked() {
                    // The peer must not take a later message for the rest of this one.
                    self.unlink(engine, false, "a request failed mid-message");
                    engine.wake(&mut self.core);
                }
            }
            (GatherFault::Revoked, MessageSource::ReadResponse(read), _) => {
                // Revoked while the response was being sent: the Terminate encloses the Read
                // Request, advanced by the bytes sent.
                let reason = revoked(read, message.sent);
                let fault = reason.fault();
                let payload = terminate::build_from_bytes(
                    fault,
                    read.segment_len,
                    &read.header,
                    Some(&read.request.advanced(message.sent)),
                );
                self.terminate(engine, fault.code, Some(payload), reason);
            }
            // `Local` occurs only with requests, `Revoked` only with Read Responses.
            _ => {
                let code = codes::RDMA_LOCAL_CATASTROPHIC;
                self.terminate(engine, code, None, Reason::Segment);
            }
        }
    }

    /// Handles an atomic operation of the peer that failed when it was executed.
    fn atomic_failed(
        &mut self,
        engine: &mut EngineState,
        atomic: &InboundAtomic,
        error: AtomicError,
    ) {
        let stag = atomic.request.stag;
        let to = atomic.request.to.0;
        let reason = match error {
            AtomicError::Revoked(fault) => Reason::Atomic { fault, stag, to },
            AtomicError::Memory(fault) => {
                engine.memory_unreachable(fault);
                if self.end_if_detached(engine, fault) {
                    return;
                }
                match fault.cause {
                    Unreachable::Truncated => {
                        return self.fail_locally(engine, Reason::Memory(fault));
                    }
                    Unreachable::Unmapped => Reason::Memory(fault),
                    // Regions of a detached address space count as revoked.
                    Unreachable::Detached => {
                        Reason::Atomic { fault: RemoteFault::InvalidStag, stag, to }
                    }
                }
            }
        };
        let fault = reason.fault();
        let payload = terminate::build_from_bytes(fault, atomic.segment_len, &atomic.header, None);
        self.terminate(engine, fault.code, Some(payload), reason);
    }

    // --- Errors of this side -----------------------------------------------------------------

    /// Handles an error of a request.
    pub(super) fn request_error(&mut self, engine: &mut EngineState, error: RequestError) {
        match error {
            RequestError::Failed { seq, reason } => self.request_failed(engine, seq, reason),
            RequestError::Queue(fault) => self.queue_fault(engine, "send queue", fault),
            RequestError::Cq(fault) => {
                let cq = self.core.send_cq.clone();
                self.cq_failed(engine, &cq, fault);
            }
            RequestError::Atomic(atomic, error) => self.atomic_failed(engine, &atomic, error),
        }
    }

    /// Fails a request of this QP. It completes with the status of `reason`, and the stream ends
    /// (RFC 5040 section 7.1 rule 1: a Terminate without headers instead of the request). On UC and
    /// UD the send queue stops instead.
    fn request_failed(&mut self, engine: &mut EngineState, seq: u64, reason: Reason) {
        if self.core.transport.stops_send_queue() && !self.life.phase().flushes() {
            return self.fail_send_queue(engine, seq, reason);
        }
        let wr_id = self.requester.wr_id(seq).unwrap_or_default();
        let why = self.life.record_failure(&self.core, engine, wr_id, reason);
        self.requester.failed(seq, reason.status(), why);
        self.terminate(engine, codes::RDMA_LOCAL_CATASTROPHIC, None, reason);
        // If the stream was already ending, only the request completes.
        self.retire(engine);
    }

    /// Ends the session of a client that wrote an impossible index into one of its queues.
    pub(super) fn queue_fault(
        &mut self,
        engine: &mut EngineState,
        queue: &'static str,
        fault: QueueFault,
    ) {
        let why = format!("{queue} of QP {}: {fault}", self.core.id);
        engine.report(Notification::Misbehaved { session: self.core.session, why });
        self.fail_locally(engine, Reason::Queue(queue, fault));
    }
}
