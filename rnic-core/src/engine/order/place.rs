//! Places the pieces of messages in memory: when they arrive, at barriers, at their deadline, and
//! before their STag is revoked.

use super::model::{Barrier, is_barrier};
use super::pending::{Arrival, Kind, Pending, Piece};
use super::report;
use super::set::PendingSet;
use crate::device::memory::{MemoryFault, Payload, Target};
use crate::device::stag::StagTable;
use crate::engine::Engine;
use crate::engine::charge::Owner;
use crate::engine::deadlines::Due;
use crate::engine::qp::Qp;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::{PlacementError, Reason};
use crate::engine::state::EngineState;
use crate::rdmap::codes;
use rnic_abi::faults::order::OrderRule;
use rnic_abi::types::{Access, Stag, Time};

impl Qp {
    /// Places incoming data by this rule from now on, or in strict order. Data held by an earlier
    /// rule is placed. Has no effect on a UD QP.
    pub(in crate::engine) fn set_order(
        &mut self,
        engine: &mut EngineState,
        rule: Option<Box<OrderRule>>,
    ) {
        self.end_order(engine);
        if let Some(order) = self.core.order.take() {
            engine.ordered.remove(&self.core.key);
            debug_assert!(order.due.is_none());
        }
        let Some(rule) = rule.filter(|_| self.datagrams.is_none()) else { return };
        engine.ordered.insert(self.core.key);
        self.core.order = Some(Box::new(PendingSet::new(*rule, self.core.id)));
    }

    /// Makes all earlier data visible if `barrier` requires that.
    #[inline]
    pub(in crate::engine) fn order_barrier(
        &mut self,
        engine: &mut EngineState,
        barrier: Barrier,
    ) -> Result<(), PlacementError> {
        match &self.core.order {
            None => Ok(()),
            Some(order) if !is_barrier(order.pending.rule.model, barrier) => Ok(()),
            Some(_) => {
                self.core.place_pending(engine);
                self.order_fault().map_or(Ok(()), |fault| Err(PlacementError::Memory(fault)))
            }
        }
    }

    /// Accounts for a segment that was taken in by [`QpCore::arrive`].
    pub(in crate::engine) fn settle_order(
        &mut self,
        engine: &mut EngineState,
    ) -> Result<(), PlacementError> {
        self.core.settle_order(engine);
        self.order_fault().map_or(Ok(()), |fault| Err(PlacementError::Memory(fault)))
    }

    /// Handles the deadline of held data.
    pub(in crate::engine) fn order_due(&mut self, engine: &mut EngineState) {
        let now = engine.now;
        let Some(order) = &mut self.core.order else { return };
        order.due = None;
        if order.read.as_ref().is_some_and(|read| read.until <= now) {
            self.release_read(engine);
        }
        self.finish_atomic(engine, now);
        self.core.write(&engine.stags, |pending, place| pending.release_due(now, place));
        self.core.settle_order(engine);
        if let Some(fault) = self.order_fault() {
            engine.memory_unreachable(fault);
            if !self.end_if_detached(engine, fault) {
                let code = codes::DDP_LOCAL_CATASTROPHIC;
                self.terminate(engine, code, None, Reason::Memory(fault));
            }
        }
    }

    /// Places all data that is held when the stream ends. A fault has no effect on a stream that
    /// is ending.
    pub(in crate::engine) fn end_order(&mut self, engine: &mut EngineState) {
        if self.core.order.is_none() {
            return;
        }
        self.release_read(engine);
        self.requester.drop_early();
        self.core.place_pending(engine);
        self.finish_atomic(engine, Time(u64::MAX));
        if let Some(order) = &mut self.core.order {
            order.atomics.clear();
            order.fault = None;
            order.pending.end_message(Kind::Write);
            order.pending.end_message(Kind::Response);
        }
    }

    fn order_fault(&mut self) -> Option<MemoryFault> {
        self.core.order.as_mut()?.fault.take()
    }
}

impl QpCore {
    /// Accepts the payload of a segment: places some pieces and holds the others.
    pub(in crate::engine) fn arrive(
        &mut self,
        stags: &StagTable,
        now: Time,
        arrival: Arrival,
        payload: &Payload<'_>,
    ) -> Result<(), MemoryFault> {
        let mut taken = Ok(());
        self.write(stags, |pending, place| taken = pending.arrive(arrival, payload, now, place));
        taken
    }

    /// Prepares for a segment that is placed at once. The caller must pass
    /// [`Qp::order_barrier`] when the message is complete.
    #[inline]
    pub(in crate::engine) fn keep_order(&mut self, stags: &StagTable) {
        if let Some(order) = &self.order
            && is_barrier(order.pending.rule.model, Barrier::OtherBytes)
        {
            self.write(stags, |pending, place| pending.release_all(place));
        }
    }

    /// Ends a message that has no further payload.
    pub(in crate::engine) fn end_message(&mut self, kind: Kind) {
        if let Some(order) = &mut self.order {
            order.pending.end_message(kind);
        }
    }

    /// Places all data that is held.
    pub(in crate::engine) fn place_pending(&mut self, engine: &mut EngineState) {
        if self.order.is_some() {
            self.write_atomic(&engine.stags);
            self.write(&engine.stags, |pending, place| pending.release_all(place));
            self.settle_order(engine);
        }
    }

    /// Runs `release`, and writes the pieces that it releases.
    fn write(
        &mut self,
        stags: &StagTable,
        release: impl FnOnce(&mut Pending, &mut dyn FnMut(&Piece)),
    ) {
        let Some(mut order) = self.order.take() else { return };
        let fault = &mut order.fault;
        release(&mut order.pending, &mut |piece| {
            // The STag was valid when the piece arrived, and its revocation is a barrier.
            if let Some(target) = self.sink(stags, piece)
                && let Err(error) = Payload::Bytes(&piece.bytes).place(0, target, false)
            {
                fault.get_or_insert(error);
            }
        });
        self.order = Some(order);
    }

    /// Resolves the memory of a piece.
    fn sink<'t>(&self, stags: &'t StagTable, piece: &Piece) -> Option<Target<'t>> {
        let part = piece.part;
        let len = piece.bytes.len();
        match part.kind {
            Kind::Write => {
                let right = Access::REMOTE_WRITE;
                self.remote(stags, part.stag, part.to, len as u64, right).ok()
            }
            Kind::Response => {
                let len = u32::try_from(len).ok()?;
                stags.local(self.principal(), part.stag.0, part.to, len, true).ok()
            }
        }
    }

    /// Charges the session for the bytes that are held, sets the deadline, and records inversions.
    pub(super) fn settle_order(&mut self, engine: &mut EngineState) {
        let Some(order) = &self.order else { return };
        if !engine.held.may_hold(&order.charge, self.session, order.pending.bytes()) {
            self.write(&engine.stags, |pending, place| pending.release_all(place));
        }
        let Some(mut order) = self.order.take() else { return };
        let owner = Owner { key: self.key, session: self.session };
        // Exceeds no limit, because there is room.
        engine.held.set(&mut order.charge, owner, order.pending.bytes());
        let read = order.read.as_ref().map(|read| read.until);
        let atomic = order.atomic.as_ref().map(|atomic| atomic.until);
        let due = [order.pending.due(), read, atomic].into_iter().flatten().min();
        if due != order.due {
            let kind = Due::Order(self.key);
            if let Some(old) = order.due {
                engine.deadlines.clear(old, kind);
            }
            if let Some(new) = due {
                engine.deadlines.set(new, kind);
            }
            order.due = due;
        }
        report::record(&mut order, self, engine);
        self.order = Some(order);
    }
}

impl Engine {
    /// Places all data that QPs hold for this STag, or for any STag, before it is revoked.
    pub(in crate::engine) fn place_held(&mut self, stag: Option<Stag>) {
        for key in self.state.ordered.clone() {
            self.with_key(key, |qp, engine| {
                let holds = |order: &PendingSet| stag.is_none_or(|stag| order.holds(stag));
                if qp.core.order.as_deref().is_some_and(holds) {
                    qp.core.place_pending(engine);
                }
            });
        }
    }
}
