//! How streams end: faults, Terminates, disconnects, FIN, loss.
//!
//! The first fault wins: once a QP has left the phases in which it works, later faults are dropped.
//! [`Qp::terminate`] is the one place where a fault of ours becomes a Terminate, completions and a
//! state; [`Qp::finish`] the one place where a stream is gone.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;

use super::ledger::Progress;
use super::message::Head;
use super::partial::Owner;
use super::qp::{Link, OutstandingRead, Phase, Qp};
use super::reason::Reason;
use super::schedule::{END_COST, Key};
use super::{Delivery, Output, Shard};
use crate::abi::control::{DisconnectReason, Event};
use crate::ddp;
use crate::rdmap::{Layout, ReadRequest, Terminate, codes};
use crate::shm::queue::QueueFault;
use crate::stream::{Fault, terminate};
use crate::types::{AddressPair, CompletionStatus, TerminateCode, TerminateOrigin, Time};

/// Deadlines of all QPs of an engine.
#[derive(Default)]
pub(super) struct Timers(BTreeSet<(Time, Key)>);

impl Timers {
    pub(super) fn set(&mut self, qp: &mut Qp, deadline: Option<Time>) {
        if let Some(old) = qp.deadline {
            self.0.remove(&(old, qp.key));
        }
        qp.deadline = deadline;
        if let Some(new) = deadline {
            self.0.insert((new, qp.key));
        }
    }

    pub(super) fn next(&self) -> Option<Time> {
        self.0.first().map(|(t, _)| *t)
    }

    pub(super) fn pop_due(&mut self, now: Time) -> Option<Key> {
        let (t, key) = *self.0.first()?;
        (t <= now).then(|| {
            self.0.pop_first();
            key
        })
    }
}

impl Qp {
    /// One of our own requests cannot be carried out: it completes with the reason's status, the
    /// stream ends (RFC 5040 section 7.1 rule 1: Terminate instead of the request, without headers).
    pub(super) fn request_failed(&mut self, seq: u64, reason: Reason, shard: &mut Shard) {
        let wr_id = self.ledger.get_mut(seq).map_or(0, |e| e.wr_id);
        let why = self.failed(shard, wr_id, reason);
        if let Some(e) = self.ledger.get_mut(seq) {
            e.progress = Progress::Done(reason.status());
            e.why = why;
        }
        self.message = None;
        self.terminate(shard, codes::RDMA_LOCAL_CATASTROPHIC, None, reason);
        // If the stream was ending already, the request completes all the same.
        self.retire(shard);
    }

    /// Something of this side, not the peer's doing, makes the QP useless.
    pub(super) fn fail_locally(&mut self, shard: &mut Shard, why: &str, reason: Reason) {
        if self.phase.flushes() {
            return;
        }
        let event = Event::QpFatal {
            qp: self.id,
            context: self.shared.context.load(Relaxed),
            reason: why.to_owned(),
        };
        shard.outputs.push_back(Output::Event { session: self.session, event });
        self.terminate(shard, codes::RDMA_LOCAL_CATASTROPHIC, None, reason);
    }

    /// The client wrote an impossible index into one of its queues: that ends its session.
    pub(super) fn queue_fault(
        &mut self,
        shard: &mut Shard,
        queue: &'static str,
        fault: QueueFault,
    ) {
        let why = format!("{queue} of QP {}: {fault}", self.id);
        shard.outputs.push_back(Output::Misbehaved { session: self.session, why });
        let reason = Reason::Queue(queue, fault);
        self.fail_locally(shard, "a queue index is impossible", reason);
    }

    /// Ends the stream with a Terminate of ours. `payload` is its RDMAP header; none for a Terminate
    /// that encloses nothing. `reason` is put on record unless the fault is already.
    pub(super) fn terminate(
        &mut self,
        shard: &mut Shard,
        code: TerminateCode,
        payload: Option<Vec<u8>>,
        reason: Reason,
    ) {
        if self.phase.flushes() {
            return;
        }
        if let (true, Link::Tcp(_), Some(AddressPair { peer, .. })) =
            (reason.is_guess(), &self.link, self.addresses)
        {
            let (session, at) = (self.session, shard.now);
            shard.outputs.push_back(Output::StagGuessed { session, peer: peer.ip(), at });
        }
        self.deficit -= END_COST;
        let payload = payload.unwrap_or_else(|| terminate::build(Fault::local(code), &[], None));
        self.terminated_by_us(shard, code, &payload, reason);
        let headers = payload.get(4..).unwrap_or_default().to_vec();
        self.shared.set_terminate(TerminateOrigin::Local, code);
        self.end.get_or_insert(DisconnectReason::Terminate {
            origin: TerminateOrigin::Local,
            code,
            headers,
        });
        // Before its first valid FPDU a responder may send nothing, not even this (RFC 5044 7.1.2).
        let mute = self.phase == Phase::Quiet;
        let mut next = Phase::Dead;
        match &mut self.link {
            Link::None => {}
            Link::Direct(peer) => shard.deliver(*peer, Delivery::Terminate(payload)),
            Link::Tcp(tcp) if !mute && !tcp.fin_sent && tcp.broken.is_none() => {
                tcp.terminate = Some(payload);
                next = Phase::Terminating;
                // A tagged message is cut here; an untagged one is finished first, since some peers
                // do not expect a Terminate inside one.
                if !matches!(&self.message, Some(m) if matches!(m.head, Head::Untagged { .. })) {
                    self.message = None;
                }
            }
            Link::Tcp(_) => {}
        }
        if next == Phase::Dead {
            self.finish(shard, mute);
            return;
        }
        self.enter(next);
        let deadline = shard.now.after(shard.options.drain_deadline);
        shard.timers.set(self, Some(deadline));
        self.flush(shard);
        shard.wake(self);
    }

    /// A Terminate arrived. It is reported, never answered (RFC 5040 section 7.1).
    pub(super) fn terminate_received(&mut self, shard: &mut Shard, t: &Terminate<'_>) {
        if self.phase.flushes() {
            return;
        }
        self.shared.set_terminate(TerminateOrigin::Peer, t.code);
        self.end.get_or_insert(DisconnectReason::Terminate {
            origin: TerminateOrigin::Peer,
            code: t.code,
            headers: t.to_vec().split_off(4),
        });
        // If it blames a read of ours, that request carries the blame; the rest is flushed.
        let blamed = self.blamed_read(t).and_then(|read| read.seq);
        let request = blamed.and_then(|seq| self.ledger.get_mut(seq)).map(|e| e.wr_id);
        self.terminated_by_peer(shard, t, request);
        if let Some(seq) = blamed {
            let status = match (t.code.layer, t.code.etype) {
                (0, 1) => CompletionStatus::RemoteAccess,
                _ => CompletionStatus::RemoteOperation,
            };
            self.ledger.fail(seq, status, Some(t.code));
        }
        self.message = None;
        match &mut self.link {
            Link::None | Link::Direct(_) => self.finish(shard, false),
            Link::Tcp(tcp) => {
                tcp.drop_unsent();
                shard.unsent.release(&mut tcp.held, self.session);
                if !std::mem::replace(&mut tcp.fin_sent, true) {
                    shard.outputs.push_back(Output::ShutdownWrite(self.id));
                }
                self.enter(Phase::Draining);
                let deadline = shard.now.after(shard.options.drain_deadline);
                shard.timers.set(self, Some(deadline));
                self.flush(shard);
            }
        }
    }

    /// The read that a Terminate is about: it says by its headers which of several.
    fn blamed_read(&self, t: &Terminate<'_>) -> Option<OutstandingRead> {
        let request = ReadRequest::parse(t.read_request?);
        if t.layout == Layout::Siw {
            // siw returns the request as it was but has written its size over the MSN. Where it
            // ends does not depend on how much of it was answered.
            let asked = (request.sink_stag, request.sink_to.0.wrapping_add(request.size.into()));
            let of = |r: &&OutstandingRead| (r.sink, r.to.wrapping_add(r.size.into())) == asked;
            return self.reads.iter().find(of).copied();
        }
        let Some(header) = t.ddp_header else { return self.reads.front().copied() };
        match ddp::Header::parse(header) {
            Ok((ddp::Header::Untagged(h), _)) if h.qn == ddp::qn::READ_REQUEST => {
                // The oldest read outstanding; as many as there are have been numbered since.
                let oldest = self.read_msn.0.wrapping_sub(self.reads.len() as u32);
                self.reads.get(h.msn.0.wrapping_sub(oldest) as usize).copied()
            }
            _ => None,
        }
    }

    /// An administrator ends the connection.
    pub(super) fn expel(&mut self, shard: &mut Shard) {
        // Behind our FIN nothing can be sent, so no Terminate either.
        match self.phase {
            Phase::FinSent => self.disconnect(shard, true),
            _ => {
                let code = codes::RDMA_LOCAL_CATASTROPHIC;
                self.terminate(shard, code, None, Reason::Expelled);
            }
        }
    }

    /// The application ends the connection.
    pub(super) fn disconnect(&mut self, shard: &mut Shard, abort: bool) {
        match self.phase {
            Phase::Dead | Phase::Terminating | Phase::Draining => {}
            _ if abort => {
                self.end.get_or_insert(DisconnectReason::Aborted);
                self.finish(shard, true);
            }
            Phase::Closing | Phase::FinSent => {}
            Phase::Quiet | Phase::Open | Phase::HalfClosed => {
                // What is in the queue now is sent; what is posted later is flushed.
                self.take_limit = Some(self.sq.look().unwrap_or(0));
                if self.phase == Phase::Quiet {
                    // Nothing may be sent yet, so nothing can run dry in order.
                    self.end.get_or_insert(DisconnectReason::Aborted);
                    self.finish(shard, true);
                    return;
                }
                self.enter(Phase::Closing);
                let deadline = shard.now.after(shard.options.close_deadline);
                shard.timers.set(self, Some(deadline));
                shard.wake(self);
            }
        }
    }

    /// While disconnecting: sends the FIN once everything has run dry. Called after each turn.
    pub(super) fn close_if_dry(&mut self, shard: &mut Shard) {
        if self.phase != Phase::Closing || !self.has_run_dry() {
            return;
        }
        match &mut self.link {
            Link::None => self.finish(shard, false),
            Link::Direct(peer) => {
                shard.deliver(*peer, Delivery::Fin);
                self.fin_sent(shard);
            }
            Link::Tcp(tcp) => {
                if tcp.has_unsent() {
                    return;
                }
                tcp.fin_sent = true;
                shard.outputs.push_back(Output::ShutdownWrite(self.id));
                self.fin_sent(shard);
            }
        }
    }

    fn fin_sent(&mut self, shard: &mut Shard) {
        if self.peer_fin {
            self.end.get_or_insert(DisconnectReason::Orderly);
            self.finish(shard, false);
        } else {
            self.enter(Phase::FinSent);
        }
    }

    /// The peer's FIN arrived between two FPDUs.
    pub(super) fn fin_received(&mut self, shard: &mut Shard) {
        if std::mem::replace(&mut self.peer_fin, true) {
            return;
        }
        match self.phase {
            Phase::Dead | Phase::HalfClosed => {}
            Phase::Quiet => self.lost(shard, "the peer closed before its first FPDU"),
            Phase::Open | Phase::Closing => {
                self.fail_reads(shard);
                self.retire(shard);
                self.flush_receives(shard);
                if self.phase == Phase::Open {
                    self.enter(Phase::HalfClosed);
                    let context = self.shared.context.load(Relaxed);
                    let event = Event::PeerClosed { qp: self.id, context };
                    shard.outputs.push_back(Output::Event { session: self.session, event });
                }
                // Requests that waited for a read may go on.
                shard.wake(self);
            }
            Phase::FinSent => {
                self.end.get_or_insert(DisconnectReason::Orderly);
                self.finish(shard, false);
            }
            // With our Terminate still unsent the outgoing half goes on until it is.
            Phase::Terminating => {}
            Phase::Draining => self.finish(shard, false),
        }
    }

    /// No response can come any more: the reads fail, later requests go on.
    fn fail_reads(&mut self, shard: &Shard) {
        for seq in std::mem::take(&mut self.reads).into_iter().filter_map(|read| read.seq) {
            self.read_unanswered(seq, shard);
        }
    }

    /// A read fails because the peer has finished sending; the stream goes on without it.
    pub(super) fn read_unanswered(&mut self, seq: u64, shard: &Shard) {
        let reason = Reason::PeerFinished;
        self.ledger.fail(seq, reason.status(), Some(codes::LLP_CLOSED));
        let Some(wr_id) = self.ledger.get_mut(seq).map(|e| e.wr_id) else { return };
        let why = self.failed_alone(shard, wr_id, reason);
        if let Some(e) = self.ledger.get_mut(seq) {
            e.why = why;
        }
    }

    /// The connection is gone: RST, timeout, or a peer that closed inside a message.
    pub(super) fn lost(&mut self, shard: &mut Shard, why: &str) {
        if self.phase == Phase::Dead {
            return;
        }
        self.connection_lost(shard, why);
        self.end.get_or_insert(DisconnectReason::Lost { why: why.to_owned() });
        self.finish(shard, true);
    }

    /// The deadline of the phase has passed.
    pub(super) fn deadline_passed(&mut self, shard: &mut Shard) {
        self.deadline = None;
        match self.phase {
            Phase::Quiet => self.lost(shard, "the peer sent no FPDU before the deadline"),
            Phase::Closing | Phase::FinSent => {
                self.lost(shard, "the peer did not close before the deadline");
            }
            Phase::Terminating | Phase::Draining => self.finish(shard, true),
            // The last completions have found no room; their owner is told all the same.
            Phase::Dead => self.say_how_it_ended(shard),
            Phase::Open | Phase::HalfClosed => {}
        }
    }

    /// The stream is gone: flush, close the socket, and say how it ended when all is flushed.
    pub(super) fn finish(&mut self, shard: &mut Shard, reset: bool) {
        if self.phase == Phase::Dead {
            return;
        }
        self.message = None;
        self.deficit -= END_COST;
        self.enter(Phase::Dead);
        shard.timers.set(self, None);
        self.flush(shard);
        match &mut self.link {
            Link::None => {}
            Link::Direct(peer) if reset => shard.deliver(*peer, Delivery::Reset),
            Link::Direct(_) => {}
            Link::Tcp(tcp) => {
                let owner = Owner { key: self.key, session: self.session };
                shard.buffers.give(&mut tcp.partial, owner);
                shard.unsent.release(&mut tcp.held, self.session);
                shard.outputs.push_back(Output::Close { qp: self.id, reset });
            }
        }
        self.link = Link::None;
        if self.flush_pending {
            let deadline = shard.now.after(shard.options.close_deadline);
            shard.timers.set(self, Some(deadline));
        }
    }

    /// Tells the owner of a dead QP how its stream ended, once.
    pub(super) fn say_how_it_ended(&mut self, shard: &mut Shard) {
        shard.timers.set(self, None);
        if std::mem::take(&mut self.announced) {
            let event = Event::Disconnected {
                qp: self.id,
                context: self.shared.context.load(Relaxed),
                reason: self.end.clone().unwrap_or(DisconnectReason::Orderly),
            };
            shard.outputs.push_back(Output::Event { session: self.session, event });
        } else if let Some(end) = &self.end
            && self.addresses.is_some()
        {
            // Accepted, but the first FPDU never came.
            let reason = match end {
                DisconnectReason::Lost { why } => why.clone(),
                DisconnectReason::Terminate { code, .. } => format!("terminated: {code}"),
                DisconnectReason::Aborted => "ended by this side".to_owned(),
                DisconnectReason::Orderly => "closed".to_owned(),
            };
            let context = self.shared.context.load(Relaxed);
            let event = Event::Unreachable { qp: self.id, context, reason };
            shard.outputs.push_back(Output::Event { session: self.session, event });
        }
        self.addresses = None;
    }
}
