//! Life cycle of a QP's stream: its phase, the reason for its end, and the events and records of
//! both.
//!
//! The first fault of a stream is the reason for all later flushes. This module holds the number of
//! its record. Records of other events go to a separate part of the log, so that they evict no
//! fault.

use std::sync::atomic::Ordering::Relaxed;

use super::deadlines::Due;
use super::explanation::{DATAGRAMS, Explanation, FLUSHED, LOST, RETRIES_EXCEEDED, about, rule_of};
use super::interface::Notification;
use super::phase::{StreamEvent, StreamPhase};
use super::qp_core::QpCore;
use super::reason::Reason;
use super::state::EngineState;
use crate::rdmap::{Layout, Terminate, codes};
use rnic_abi::abi::control::{Diagnosis, DiagnosisKind, DisconnectReason, Event};
use rnic_abi::types::{AddressPair, CompletionStatus, TerminateCode, TerminateOrigin, Time};

/// `ECONNRESET` of `errno(3)`.
const CONNECTION_RESET: u16 = 104;

/// Phase of a QP's stream, and how the stream got there.
pub(super) struct LifeCycle {
    phase: StreamPhase,
    /// Deadline of the phase.
    deadline: Option<Time>,
    addresses: Option<AddressPair>,
    /// MPA revision agreed at start-up.
    revision: u8,
    /// The peer's FIN has been seen.
    peer_fin: bool,
    /// The application was notified that the peer's FIN follows messages that wait for receives.
    closing_reported: bool,
    /// A disconnect with a time limit is under way. Past the limit, this side no longer waits for
    /// the peer's FIN.
    leaves: bool,
    /// The application was notified of the connection, and must be notified of its end.
    announced: bool,
    /// Reason for the end, once known. Later reasons are ignored.
    end: Option<DisconnectReason>,
    /// Record of the fault that ends the stream, or 0.
    diagnosis: u64,
    /// Record of the request that stopped the send queue (SQE), or 0 while the queue works.
    send_error: u64,
    /// Record for requests flushed without a fault, or 0 if there is none yet.
    flush_diagnosis: u64,
    /// The queues hold entries that could not be flushed, because CQ slots are missing or a copier
    /// is writing.
    flush_pending: bool,
}

impl LifeCycle {
    pub(super) fn new() -> Self {
        LifeCycle {
            phase: StreamPhase::Ended,
            deadline: None,
            addresses: None,
            revision: 0,
            peer_fin: false,
            closing_reported: false,
            leaves: false,
            announced: false,
            end: None,
            diagnosis: 0,
            send_error: 0,
            flush_diagnosis: 0,
            flush_pending: false,
        }
    }

    // --- Phases ------------------------------------------------------------------------------

    /// Sets the addresses and MPA revision of a connection that has completed start-up.
    pub(super) fn connected(&mut self, addresses: AddressPair, revision: u8) {
        self.addresses = Some(addresses);
        self.revision = revision;
    }

    /// Makes the deadline of the disconnect end the wait for the peer's FIN.
    pub(super) fn leave_at_deadline(&mut self) {
        self.leaves = true;
    }

    /// Returns true if this side stops waiting for the peer's FIN at the deadline.
    pub(super) fn leaves_at_deadline(&self) -> bool {
        self.leaves
    }

    pub(super) fn phase(&self) -> StreamPhase {
        self.phase
    }

    /// Returns the phase that an event leads to, or `None` if it changes nothing.
    pub(super) fn after(&self, event: StreamEvent) -> Option<StreamPhase> {
        self.phase.after(event)
    }

    pub(super) fn enter(&mut self, phase: StreamPhase) {
        self.phase = phase;
    }

    pub(super) fn set_deadline(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        deadline: Option<Time>,
    ) {
        let due = Due::Phase(core.key);
        if let Some(old) = self.deadline {
            engine.deadlines.clear(old, due);
        }
        self.deadline = deadline;
        if let Some(new) = deadline {
            engine.deadlines.set(new, due);
        }
    }

    /// Returns the deadline of the phase.
    pub(super) fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// Clears the deadline, which has passed and is no longer in `Deadlines`.
    pub(super) fn deadline_passed(&mut self) {
        self.deadline = None;
    }

    /// Records the peer's FIN. Returns true if it is the first.
    pub(super) fn see_peer_fin(&mut self) -> bool {
        !std::mem::replace(&mut self.peer_fin, true)
    }

    /// Records that the peer's FIN follows waiting messages. Returns true the first time.
    pub(super) fn see_peer_closing(&mut self) -> bool {
        !std::mem::replace(&mut self.closing_reported, true)
    }

    pub(super) fn peer_fin(&self) -> bool {
        self.peer_fin
    }

    pub(super) fn addresses(&self) -> Option<AddressPair> {
        self.addresses
    }

    /// Sets the reason for the end of the stream, unless there is one already.
    pub(super) fn set_end_reason(&mut self, reason: DisconnectReason) {
        self.end.get_or_insert(reason);
    }

    /// Records that entries remain to be flushed.
    pub(super) fn flush_later(&mut self) {
        self.flush_pending = true;
    }

    /// Returns true if entries remain to be flushed, and clears the flag.
    pub(super) fn take_flush_pending(&mut self) -> bool {
        std::mem::take(&mut self.flush_pending)
    }

    pub(super) fn is_flush_pending(&self) -> bool {
        self.flush_pending
    }

    // --- Events for the owner ----------------------------------------------------------------

    /// Notifies the application of the connection. Must precede the first completion.
    pub(super) fn emit_established(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        ird: u16,
        ord: u16,
        private_data: Vec<u8>,
    ) {
        let Some(addresses) = self.addresses else { return };
        self.announced = true;
        let event = Event::Established {
            qp: core.id,
            context: core.shared.context.load(Relaxed),
            addresses,
            ird,
            ord,
            private_data,
            revision: self.revision,
        };
        engine.emit(core.session, event);
    }

    /// Notifies the owner of a QP in Error, once, of how its stream ended.
    pub(super) fn emit_disconnected(&mut self, core: &QpCore, engine: &mut EngineState) {
        self.set_deadline(core, engine, None);
        let context = core.shared.context.load(Relaxed);
        if std::mem::take(&mut self.announced) {
            let reason = self.end.clone().unwrap_or(DisconnectReason::Orderly);
            //= RDMAP-7.1-1
            engine.emit(core.session, Event::Disconnected { qp: core.id, context, reason });
        } else if let Some(end) = &self.end
            && self.addresses.is_some()
        {
            // The connection was accepted, but the first FPDU never arrived.
            let reason = match end {
                DisconnectReason::Lost { why } => why.clone(),
                DisconnectReason::Terminate { code, .. } => format!("terminated: {code}"),
                DisconnectReason::Aborted => "ended by this side".to_owned(),
                DisconnectReason::Orderly => "closed".to_owned(),
            };
            let errno = CONNECTION_RESET;
            let event = Event::Unreachable { qp: core.id, context, errno, reason };
            engine.emit(core.session, event);
        }
        self.addresses = None;
    }

    // --- Records -----------------------------------------------------------------------------

    /// Sets the record of the fault that put the QP in Error before this worker took it over.
    pub(super) fn ended_before(&mut self, diagnosis: u64) {
        self.diagnosis = diagnosis;
    }

    /// Records the failure of a request or receive that ends the stream. Returns the record's
    /// number for the completion.
    pub(super) fn record_failure(
        &mut self,
        core: &QpCore,
        engine: &EngineState,
        wr_id: u64,
        reason: Reason,
    ) -> u64 {
        let id = self.record_request_failure(core, engine, wr_id, reason);
        self.keep_first(id)
    }

    /// Records the failure of a request that does not end the stream. Returns the record's number
    /// for the completion.
    pub(super) fn record_request_failure(
        &self,
        core: &QpCore,
        engine: &EngineState,
        wr_id: u64,
        reason: Reason,
    ) -> u64 {
        let what = DiagnosisKind::Completion { wr_id, status: reason.status() };
        let words = reason.explain(&core.principal(), &engine.stags);
        self.record(core, engine, what, words)
    }

    /// Records the failure of a request that stops the send queue. Returns the record's number for
    /// its completion and for the completions of requests flushed because of it.
    pub(super) fn record_send_error(
        &mut self,
        core: &QpCore,
        engine: &EngineState,
        wr_id: u64,
        reason: Reason,
    ) -> u64 {
        self.send_error = self.record_request_failure(core, engine, wr_id, reason);
        self.send_error
    }

    /// Ends the error state of the send queue.
    pub(super) fn end_send_error(&mut self) {
        self.send_error = 0;
    }

    /// Records that the stream ends with a Terminate of this side. `payload` is its RDMAP header.
    pub(super) fn record_terminate(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        code: TerminateCode,
        payload: &[u8],
        reason: Reason,
    ) {
        if self.diagnosis == 0 {
            let what = DiagnosisKind::Terminate { origin: TerminateOrigin::Local, code };
            let mut words = reason.explain(&core.principal(), &engine.stags);
            if matches!(reason, Reason::Segment) {
                words.rule = rule_of(code);
            }
            if words.stag.is_none()
                && words.length.is_none()
                && let Ok(t) = Terminate::parse(payload)
            {
                words = about(&t, words);
            }
            self.diagnosis = self.record(core, engine, what, words);
        }
        self.note(core, engine, "qp_terminated", &format!("sent Terminate {code}"));
    }

    /// Records that the stream ends with a Terminate of the peer. `request` is the `wr_id` that it
    /// blames, if any.
    pub(super) fn record_peer_terminate(
        &mut self,
        core: &QpCore,
        engine: &mut EngineState,
        t: &Terminate<'_>,
        request: Option<u64>,
    ) {
        let code = t.code;
        let mut text = format!("the peer ended the stream with Terminate {code}");
        if let Some(wr_id) = request {
            text += &format!(", for this side's request {wr_id}");
        }
        if t.layout == Layout::Siw {
            text += ", written as Linux siw does";
        }
        let what = DiagnosisKind::Terminate { origin: TerminateOrigin::Peer, code };
        let words = about(t, Explanation::new(rule_of(code), text));
        let id = self.record(core, engine, what, words);
        self.keep_first(id);
        self.note(core, engine, "qp_terminated", &format!("received Terminate {code}"));
    }

    /// Records that a request was not acknowledged. Returns the record's number for the completion.
    pub(super) fn record_retry_exceeded(
        &mut self,
        core: &QpCore,
        engine: &EngineState,
        wr_id: u64,
        why: &str,
    ) -> u64 {
        let status = CompletionStatus::TransportRetryExceeded;
        let what = DiagnosisKind::Completion { wr_id, status };
        let words =
            Explanation::new(RETRIES_EXCEEDED, format!("the request was not acknowledged: {why}"));
        let id = self.record(core, engine, what, words);
        self.keep_first(id)
    }

    /// Records the loss of the connection.
    pub(super) fn record_loss(&mut self, core: &QpCore, engine: &mut EngineState, why: &str) {
        if self.diagnosis == 0 {
            self.diagnosis =
                self.record(core, engine, DiagnosisKind::Lost, Explanation::new(LOST, why));
            self.note(core, engine, "connection_lost", why);
        }
    }

    /// Returns the number of the record for a flushed request: of the fault that ended the stream,
    /// or of another cause.
    pub(super) fn flush_record(&mut self, core: &QpCore, engine: &EngineState, wr_id: u64) -> u64 {
        if self.diagnosis != 0 {
            return self.diagnosis;
        }
        if self.send_error != 0 && !self.phase.flushes() {
            return self.send_error;
        }
        if self.flush_diagnosis == 0 {
            let text = match (&self.end, self.phase) {
                _ if core.has_dead_cq() => "a completion queue of the queue pair is dead",
                (Some(DisconnectReason::Aborted), _) => {
                    "this side aborted the connection, or moved the queue pair to Error"
                }
                (Some(_), StreamPhase::Ended) => "the connection was closed gracefully",
                (None, StreamPhase::Ended) => "the queue pair is in Error and not connected",
                _ if self.peer_fin => "the peer has finished sending (FIN): no Send will arrive",
                _ => "the connection is being closed",
            };
            let status = CompletionStatus::WrFlush;
            let what = DiagnosisKind::Completion { wr_id, status };
            self.flush_diagnosis = self.record_routine(core, engine, what, FLUSHED, text);
        }
        self.flush_diagnosis
    }

    /// Records that the QP is destroyed while connected, with a Terminate to its peer.
    pub(super) fn record_destruction(&self, core: &QpCore, engine: &EngineState) {
        let code = codes::RDMA_LOCAL_CATASTROPHIC;
        let what = DiagnosisKind::Terminate { origin: TerminateOrigin::Local, code };
        let text = "the queue pair was destroyed, or its session ended, while it was connected";
        self.record_routine(core, engine, what, &rule_of(code), text);
    }

    /// Records the first datagram that is lost for a reason. Returns the number of the record.
    pub(super) fn record_lost_datagram(
        &self,
        core: &QpCore,
        engine: &EngineState,
        text: &str,
    ) -> u64 {
        self.record_routine(core, engine, DiagnosisKind::Dropped, DATAGRAMS, text)
    }

    /// Keeps the first record of a QP as the reason for its end.
    fn keep_first(&mut self, id: u64) -> u64 {
        if self.diagnosis == 0 {
            self.diagnosis = id;
        }
        id
    }

    /// Adds a record to the log and returns its number.
    fn record(
        &self,
        core: &QpCore,
        engine: &EngineState,
        what: DiagnosisKind,
        explanation: Explanation,
    ) -> u64 {
        let Explanation { rule, text, stag, offset, length } = explanation;
        let why = Diagnosis {
            qp: Some(core.id),
            pd: Some(core.pd),
            stag,
            offset,
            length,
            addresses: self.addresses,
            ..Diagnosis::new(core.session, what, rule, text)
        };
        engine.options.diagnoses.record(engine.now, why)
    }

    /// Adds a record of an event other than a fault to a separate part of the log, where it
    /// displaces no fault.
    fn record_routine(
        &self,
        core: &QpCore,
        engine: &EngineState,
        what: DiagnosisKind,
        rule: &str,
        text: &str,
    ) -> u64 {
        let why = Diagnosis {
            qp: Some(core.id),
            pd: Some(core.pd),
            addresses: self.addresses,
            ..Diagnosis::new(core.session, what, rule, text)
        };
        engine.options.diagnoses.record_routine(engine.now, why)
    }

    /// Sends a note for monitoring.
    fn note(&self, core: &QpCore, engine: &mut EngineState, kind: &'static str, text: &str) {
        let text = format!("QP {}: {text} (why {})", core.id, self.diagnosis);
        engine.report(Notification::Note { session: core.session, kind, text });
    }
}
