//! One queue pair as its worker owns it: what it requests, what it responds, the life of its
//! stream, and its link.
//!
//! The parts keep their own state. What concerns several of them stands beside the hop it belongs
//! to: [`link`](super::link) sends and receives, [`arrival`](super::arrival) carries out what
//! arrived, [`resume`](super::resume) goes on when what was awaited has come,
//! [`flush`](super::flush) completes and flushes, [`teardown`](super::teardown) ends.

use std::sync::Arc;
use std::time::Duration;

use super::datagram::{DatagramConfig, Datagrams};
use super::interface::Notification;
use super::life::LifeCycle;
use super::link::Link;
use super::phase::StreamPhase;
use super::qp_core::{QpCore, SchedulingState};
use super::reason::{Reason, revoked};
use super::requester::inbound_request::AtomicError;
use super::requester::message::{GatherFault, Message, MessageSource, Segment};
use super::requester::{RequestError, Requester};
use super::responder::receives::Receives;
use super::responder::{MissingReceive, Responder};
use super::schedule::{Key, SessionSlot};
use super::send_queue::SendQueue;
use super::state::EngineState;
use super::wired::{ALL_RIGHTS, Wired};
use crate::abi::control::{DisconnectMode, Wiring};
use crate::device::memory::{MemoryFault, Unreachable};
use crate::device::stag::RemoteFault;
use crate::device::{Cq, QpShared};
use crate::rdmap::codes;
use crate::shm::queue::{QueueFault, SendConsumer};
use crate::stream::{InboundAtomic, terminate};
use crate::types::{PdId, QpId, QpState, SessionId};

/// A queue pair as the resource manager made it, before a worker owns it.
pub struct QpConfig {
    /// Number of the QP, which is its handle too.
    pub qp: QpId,
    /// Session that made it, and whose events and records name it.
    pub session: SessionId,
    /// Protection domain: its requests and its peers reach only regions of this domain.
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
    /// How long a message that finds no receive waits for one; `None` if it ends the stream at
    /// once.
    pub rnr_timeout: Option<Duration>,
    /// Who its peer is, if it is wired by hand.
    pub wiring: Option<Wiring>,
    /// It has no acknowledgements, if it is wired by hand.
    pub unreliable: bool,
    /// What it has to know, if it is one of datagrams.
    pub datagrams: Option<DatagramConfig>,
    /// State and counters, written by the worker and read by the control thread.
    pub shared: Arc<QpShared>,
}

pub(super) struct Qp {
    pub core: QpCore,
    pub requester: Requester,
    pub responder: Responder,
    pub life: LifeCycle,
    pub link: Link,
    pub send_queue: SendQueue,
    /// There if it is wired to a peer by hand.
    pub wired: Option<Box<Wired>>,
    /// There if it is one of datagrams.
    pub datagrams: Option<Box<Datagrams>>,
}

/// An FPDU that leaves, or by the direct path the segment that would stand in it.
pub(super) enum OutgoingFpdu {
    /// The next segment of the message in progress.
    Segment(Segment),
    /// By the direct path, several of them at once: as one, and how many they are.
    Run { run: Segment, segments: u32 },
    /// By the direct path, messages of a segment each that were never in progress.
    Writes { segments: u32, bytes: u64 },
    /// The first FPDU of a peer-to-peer stream, no message of the application's.
    Rtr,
    /// The Terminate of this side.
    Terminate,
}

/// An FPDU that arrives, or by the direct path the segment that would stand in it.
pub(super) enum IncomingFpdu {
    /// With a valid CRC, and Markers where they belong; over TCP a Terminate as well.
    Segment,
    /// By the direct path, several of them at once.
    Run { segments: u32 },
    /// The peer's Terminate by the direct path.
    Terminate,
}

impl Qp {
    pub(super) fn new(key: Key, seat: SessionSlot, config: QpConfig, link: Link) -> Self {
        let core = QpCore {
            key,
            id: config.qp,
            session: config.session,
            seat,
            pd: config.pd,
            rights: config.wiring.map_or(ALL_RIGHTS, |wiring| wiring.rights),
            doorbell: config.doorbell,
            shared: config.shared,
            send_cq: config.send_cq,
            recv_cq: config.recv_cq,
            turn: SchedulingState::default(),
        };
        let missing = match (config.wiring, config.rnr_timeout) {
            (Some(_), _) if config.unreliable => MissingReceive::Loses,
            _ if config.datagrams.is_some() => MissingReceive::Loses,
            // The peer says how long it waits for a receive, not this side.
            (Some(_), _) => MissingReceive::Waits { time: Duration::MAX, passes: true },
            (None, Some(time)) => MissingReceive::Waits { time, passes: false },
            (None, None) => MissingReceive::Ends,
        };
        Qp {
            core,
            requester: Requester::new(config.sq, config.signal_all),
            responder: Responder::new(config.rq, missing),
            life: LifeCycle::new(),
            link,
            send_queue: SendQueue::default(),
            wired: config.wiring.map(|wiring| Box::new(Wired::new(&wiring, config.unreliable))),
            datagrams: config.datagrams.map(|config| Box::new(Datagrams::new(config))),
        }
    }

    /// Returns true for a UC or UD QP.
    pub(super) fn is_unreliable(&self) -> bool {
        self.datagrams.is_some() || self.wired.as_ref().is_some_and(|wired| wired.is_unreliable())
    }

    pub(super) fn enter(&mut self, phase: StreamPhase) {
        self.life.enter(phase);
        let by_hand = self.wired.as_ref().map(|wired| wired.state());
        let works = by_hand.or(self.datagrams.as_ref().map(|of| of.state()));
        let fails = (self.send_queue == SendQueue::Failed).then_some(QpState::Sqe);
        let state = match fails.or(works) {
            // Streams come and go; an adapter knows no state in which a Terminate is on its way.
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

    /// Tells the application that the connection stands, before any completion can.
    pub(super) fn emit_established(&mut self, engine: &mut EngineState, private_data: Vec<u8>) {
        let depths = self.requester.depths();
        self.life.emit_established(&self.core, engine, depths, private_data);
    }

    // --- What is sent ------------------------------------------------------------------------

    /// Makes sure that a message is ready to be segmented; false if there is none to send now.
    #[inline]
    pub(super) fn next_message(&mut self, engine: &mut EngineState) -> bool {
        match self.requester.next_message(&mut self.core, &self.life, engine) {
            Ok(found) => found,
            Err(error) => {
                self.request_error(engine, error);
                false
            }
        }
    }

    /// An FPDU is sent, or several: every one passes here once, by either path. Over TCP it is
    /// framed, and `queued` is the number of bytes of the stream up to its end; what TCP has not
    /// taken when the connection ends never leaves.
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
            // These are the stream's own, and counted nowhere.
            OutgoingFpdu::Rtr | OutgoingFpdu::Terminate => return,
        };
        counters.segments_sent.add(u64::from(segments));
        let data = self.requester.message().map_or(0, |m| m.data_in(segment));
        counters.bytes_sent.add(u64::from(data));
        self.requester.segment_sent(&self.core, segment.len, queued);
    }

    /// An FPDU has arrived, or several: every one passes here once, by either path, before its
    /// headers are looked at over TCP, and when the sender is rid of it by the direct path.
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

    /// Ends an RC or UC QP without a Terminate if its own address space is gone: its program has
    /// been killed, and the peer of an adapter whose program is gone sees a QP that no longer
    /// answers, not one that blames a request. Returns true if it has.
    pub(super) fn ended_with_memory(
        &mut self,
        engine: &mut EngineState,
        fault: MemoryFault,
    ) -> bool {
        let own = fault.owner == self.core.session && fault.cause == Unreachable::Detached;
        if own && self.is_wired() {
            self.disconnect(engine, DisconnectMode::Abort);
        }
        own && self.is_wired()
    }

    /// The memory of the message in progress could not be read.
    pub(super) fn memory_failed(&mut self, engine: &mut EngineState, fault: MemoryFault) {
        engine.memory_unreachable(fault);
        if self.ended_with_memory(engine, fault) {
            return;
        }
        let reason = Reason::Memory(fault);
        match fault.cause {
            Unreachable::Truncated => {
                self.requester.drop_message();
                self.fail_locally(engine, reason);
            }
            Unreachable::Unmapped => self.gather_failed(engine, GatherFault::Local(reason)),
            // Its regions are as good as revoked.
            Unreachable::Detached => {
                let response = self.requester.message().is_some_and(Message::is_response);
                let as_if =
                    if response { GatherFault::Revoked } else { GatherFault::Local(reason) };
                self.gather_failed(engine, as_if);
            }
        }
    }

    /// The memory of the message in progress cannot be had.
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
                if self.is_unreliable() && self.life.phase().is_linked() {
                    // The peer must not take a later message for the rest of this one.
                    self.unlink(engine, false, "a request failed inside its message");
                    engine.wake(&mut self.core);
                }
            }
            (GatherFault::Revoked, MessageSource::ReadResponse(read), _) => {
                // Revoked while the response was being sent: the header of the Read
                // goes back, advanced by what was sent.
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
            // Requests alone have elements, responses alone regions.
            _ => {
                let code = codes::RDMA_LOCAL_CATASTROPHIC;
                self.terminate(engine, code, None, Reason::Segment);
            }
        }
    }

    /// An atomic operation of the peer's that was to be carried out cannot be.
    fn atomic_failed(
        &mut self,
        engine: &mut EngineState,
        atomic: &InboundAtomic,
        error: AtomicError,
    ) {
        let (stag, to) = (atomic.request.stag, atomic.request.to.0);
        let reason = match error {
            AtomicError::Revoked(fault) => Reason::Atomic { fault, stag, to },
            AtomicError::Memory(fault) => {
                engine.memory_unreachable(fault);
                if self.ended_with_memory(engine, fault) {
                    return;
                }
                match fault.cause {
                    Unreachable::Truncated => {
                        return self.fail_locally(engine, Reason::Memory(fault));
                    }
                    Unreachable::Unmapped => Reason::Memory(fault),
                    // Its regions are as good as revoked.
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

    // --- What fails on this side -------------------------------------------------------------

    /// The next request did not become a message.
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

    /// One of our own requests cannot be carried out: it completes with the reason's status, and
    /// the stream ends (RFC 5040 section 7.1 rule 1: Terminate instead of the request, without
    /// headers). On UC and UD the send queue stops instead.
    fn request_failed(&mut self, engine: &mut EngineState, seq: u64, reason: Reason) {
        if self.is_unreliable() && !self.life.phase().flushes() {
            return self.fail_send_queue(engine, seq, reason);
        }
        let wr_id = self.requester.wr_id(seq).unwrap_or_default();
        let why = self.life.record_failure(&self.core, engine, wr_id, reason);
        self.requester.failed(seq, reason.status(), why);
        self.terminate(engine, codes::RDMA_LOCAL_CATASTROPHIC, None, reason);
        // If the stream was ending already, the request completes all the same.
        self.retire(engine);
    }

    /// The client wrote an impossible index into one of its queues: that ends its session.
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
