//! Received datagrams. A datagram that a QP does not accept is dropped and counted. The first for
//! each reason is recorded as a diagnosis and reported to the owner, so that a sender cannot flood
//! the owner with reports.

use std::sync::atomic::Ordering::Relaxed;

use super::PortChanges;
use super::arrivals::{Drops, PendingDatagram};
use crate::device::copier::CopyResult;
use crate::device::memory::{MemoryFault, Payload};
use crate::engine::link::Link;
use crate::engine::numbers::count;
use crate::engine::qp::{IncomingFpdu, Qp};
use crate::engine::reason::{PlacementError, Reason};
use crate::engine::responder::placement::Placed;
use crate::engine::schedule::QUANTUM;
use crate::engine::state::EngineState;
use rnic_abi::abi::control::Event;
use rnic_abi::abi::queue::{CompletionFlags, Cqe};
use rnic_abi::roce::p_key::p_keys_match;
use rnic_abi::roce::{Datagram, grh};
use rnic_abi::shm::attached::CopyEnd;
use rnic_abi::types::CompletionStatus;

impl Qp {
    /// Returns true if the QP accepts a packet from another daemon. Drops packets with a source
    /// address of this daemon if its own datagrams need no packet, and packets to a QP with a large
    /// debt.
    pub(super) fn takes_packet(&mut self, datagram: &Datagram) -> bool {
        let Some(datagrams) = &self.datagrams else { return false };
        let port = &datagrams.port;
        let forged = port.needs_no_packet(datagram.from);
        if !forged && self.core.turn.deficit < -QUANTUM {
            self.core.shared.dropped.add(1);
            return false;
        }
        !forged
    }

    /// Returns true if this is a UD QP in a state that accepts datagrams.
    pub(super) fn receives_datagrams(&self) -> bool {
        self.life.phase().receives() && matches!(self.link, Link::Datagrams)
    }

    /// Handles a received datagram. `bytes` holds the GRH, then the data.
    pub(in crate::engine) fn datagram_arrived(
        &mut self,
        engine: &mut EngineState,
        datagram: &Datagram,
        bytes: &[u8],
    ) {
        if !self.receives_datagrams() {
            return;
        }
        if self.is_stopped() {
            self.core.shared.dropped.add(1);
            return;
        }
        let Some(datagrams) = &self.datagrams else { return };
        let PortChanges { lost, p_key } = &datagrams.port.changes;
        if lost.contains(&datagram.to) || !p_keys_match(*p_key, datagram.p_key) {
            self.core.shared.dropped.add(1);
            return;
        }
        self.fpdu_received(IncomingFpdu::Segment);
        let Some(datagrams) = &self.datagrams else { return };
        let dropped = if datagram.q_key != datagrams.q_key {
            Some(Drops::Q_KEY)
        } else if !datagrams.rules.may_receive(datagram.to.address()) {
            Some(Drops::FORBIDDEN)
        } else {
            None
        };
        match dropped {
            Some(why) => self.datagram_dropped(engine, datagram, bytes, why),
            None => match self.receive_datagram(engine, datagram, bytes) {
                Ok(None) => {}
                Ok(Some(why)) => self.datagram_dropped(engine, datagram, bytes, why),
                Err(error) => self.segment_failed(engine, error, |_| Vec::new()),
            },
        }
    }

    /// Places a datagram in a receive. Returns the reason if it drops the datagram instead.
    fn receive_datagram(
        &mut self,
        engine: &mut EngineState,
        datagram: &Datagram,
        bytes: &[u8],
    ) -> Result<Option<Drops>, PlacementError> {
        match self.responder.take_receive(&self.core, engine.now, &mut engine.outputs) {
            Ok(_) => {}
            Err(PlacementError::Fault(_, Reason::NoReceive { .. })) => {
                return Ok(Some(Drops::NO_RECEIVE));
            }
            Err(error) => return Err(error),
        }
        let payload = Payload::Bytes(bytes);
        let placed = match self.responder.place_send(&self.core, &engine.stags, 0, payload) {
            // The receive stays in use for the next datagram.
            Err(PlacementError::Fault(_, Reason::TooLong { .. })) => {
                return Ok(Some(Drops::TOO_LONG));
            }
            other => other?,
        };
        // As above, the receive stays in use for the next datagram.
        if let Placed::Pending(write) = &placed
            && write.copier().under_way(engine.worker) >= MOST_PLACING
        {
            return Ok(Some(Drops::COPIER));
        }
        let Some(wr_id) = self.responder.take_receiving() else { return Ok(None) };
        let mut cqe = self.responder.cqe(&self.core, wr_id, CompletionStatus::Success);
        let mut flags = CompletionFlags::GRH;
        flags.set(CompletionFlags::SOLICITED, datagram.solicited);
        flags.set(CompletionFlags::IPV4, datagram.to.address().is_ipv4());
        if let Some(data) = datagram.immediate {
            flags |= CompletionFlags::WITH_IMM | CompletionFlags::IMM_WITH_SEND;
            cqe.imm_or_inv = u64::from(data) << 32;
        }
        cqe.flags = flags.bits();
        cqe.src_qp = datagram.source.0;
        cqe.byte_len = count(bytes.len());
        let len = bytes.len() - grh::LEN;
        match placed {
            Placed::Done if !self.is_placing_datagrams() => self.datagram_done(engine, &cqe, len),
            Placed::Done | Placed::InOrder => {
                let written = Some(Ok(Vec::new()));
                let owner = self.core.session;
                self.queue_placement(PendingDatagram { job: None, owner, written, cqe, len });
            }
            Placed::Pending(write) => {
                let (job, copier) = write.hand_over(&self.core, engine);
                let owner = copier.session();
                self.queue_placement(PendingDatagram {
                    job: Some(job),
                    owner,
                    written: None,
                    cqe,
                    len,
                });
            }
        }
        Ok(None)
    }

    fn queue_placement(&mut self, placing: PendingDatagram) {
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.placing.push_back(placing);
        }
    }

    /// Completes the receive of a datagram.
    fn datagram_done(&mut self, engine: &mut EngineState, cqe: &Cqe, len: usize) {
        self.core.shared.bytes_received.add(len as u64);
        self.publish_receive(engine, cqe);
    }

    fn datagram_dropped(
        &mut self,
        engine: &mut EngineState,
        datagram: &Datagram,
        bytes: &[u8],
        why: Drops,
    ) {
        self.core.shared.dropped.add(1);
        if !self.is_first_loss(why) {
            return;
        }
        let from = datagram.from.address();
        let source = datagram.source;
        let what = match why {
            Drops::Q_KEY => "its Q_Key is not that of the queue pair".to_owned(),
            Drops::NO_RECEIVE => "no receive is posted".to_owned(),
            Drops::TOO_LONG => {
                format!("with its GRH it has {} bytes, more than the receive", bytes.len())
            }
            Drops::FORBIDDEN => {
                let at = datagram.to.address();
                format!("the rules of [[listen]] do not let this user receive at {at}")
            }
            _ => format!(
                "{MOST_PLACING} copies to memory of the receive's session are already under way"
            ),
        };
        let text = format!("dropped a datagram from queue pair {source} at {from}: {what}");
        self.report_loss(engine, text);
    }

    /// Handles a datagram of this QP to a QP that this daemon does not have, or that cannot receive
    /// it. The sender's request succeeds, as on an adapter.
    pub(super) fn datagram_without_receiver(
        &mut self,
        engine: &mut EngineState,
        datagram: &Datagram,
    ) {
        if !self.is_first_loss(Drops::NO_QP) {
            return;
        }
        let to = datagram.to.address();
        let qp = datagram.qp;
        let text = format!(
            "lost a datagram to queue pair {qp} at {to}: the daemon has no UD queue pair {qp} that \
             receives"
        );
        self.report_loss(engine, text);
    }

    /// Returns true for the first datagram that is lost for this reason.
    fn is_first_loss(&mut self, why: Drops) -> bool {
        let Some(datagrams) = &mut self.datagrams else { return false };
        let first = !datagrams.drops.contains(why);
        datagrams.drops |= why;
        first
    }

    /// Records a lost datagram and reports it to the owner.
    fn report_loss(&self, engine: &mut EngineState, text: String) {
        let why = self.life.record_lost_datagram(&self.core, engine, &text);
        let qp = self.core.id;
        let context = self.core.shared.context.load(Relaxed);
        let reason = format!("{text}; later ones are not reported (rnicctl why {why})");
        engine.emit(self.core.session, Event::DatagramLost { qp, context, reason });
    }

    // --- Copiers -----------------------------------------------------------------------------

    /// Returns true if a copier is writing datagrams.
    pub(in crate::engine) fn is_placing_datagrams(&self) -> bool {
        self.datagrams.as_ref().is_some_and(|datagrams| !datagrams.placing.is_empty())
    }

    /// Handles the result of a copy. Completes the datagrams that are in place, in the order in
    /// which they arrived.
    pub(in crate::engine) fn datagram_placed(
        &mut self,
        engine: &mut EngineState,
        job: u64,
        result: CopyResult,
    ) {
        let Some(datagrams) = &mut self.datagrams else { return };
        let Some(of) = datagrams.placing.iter_mut().find(|p| p.job == Some(job)) else { return };
        of.written = Some(result);
        while let Some(placing) = self.next_placed() {
            let PendingDatagram { owner, written, cqe, len, .. } = placing;
            match written {
                Some(Err(cause)) => {
                    let fault = MemoryFault { owner, cause, end: CopyEnd::Sink };
                    self.datagram_write_failed(engine, fault, cqe.wr_id);
                }
                _ => self.datagram_done(engine, &cqe, len),
            }
        }
        if self.life.phase().flushes() && !self.is_placing_datagrams() {
            self.flush(engine);
        }
        engine.wake(&mut self.core);
    }

    fn next_placed(&mut self) -> Option<PendingDatagram> {
        let placing = &mut self.datagrams.as_mut()?.placing;
        placing.front()?.written.as_ref()?;
        placing.pop_front()
    }
}

/// Maximum number of copies under way to memory of one session before another datagram for it is
/// dropped. The data of these copies occupy memory, and a UD QP cannot make its peers wait.
const MOST_PLACING: u64 = 256;
