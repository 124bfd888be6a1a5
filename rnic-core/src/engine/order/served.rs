//! Requests of the peer that this side answers late.
//!
//! The last bytes of a Read's source are read when the request arrives, and the others when the
//! response is generated. In between, stores of this host and later Writes of the peer may change
//! the source. The result of an atomic operation on attached memory is written some time after the
//! word was read, so stores of this host in between are lost. Other atomic operations on memory of
//! the same address space write this result first
//! ([`AddressSpace::begin_update`](rnic_abi::shm::AddressSpace::begin_update)).

use super::chooser::delays;
use super::early::EarlyBytes;
use super::model::Barrier;
use super::pending::{DelayedRead, LateAtomic};
use super::set::{AtomicChoice, HeldAtomic, HeldRead};
use crate::device::memory::Target;
use crate::device::stag::{RemoteFault, StagTable};
use crate::engine::qp::Qp;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::PlacementError;
use crate::engine::requester::inbound_request::{AtomicError, InboundRequest};
use crate::engine::state::EngineState;
use crate::rdmap::{AtomicRequest, ReadRequest};
use crate::stream::{InboundAtomic, InboundRead};
use rnic_abi::types::{ATOMIC_LEN, Access, SessionId, Time};

impl Qp {
    /// Makes earlier data visible to a request of the peer, and delays its response if the rule
    /// chooses so.
    pub(in crate::engine) fn request_arrived(
        &mut self,
        engine: &mut EngineState,
        request: &InboundRequest,
    ) -> Result<(), PlacementError> {
        let read = match request {
            // Not a request of the program.
            InboundRequest::Read(InboundRead { request, .. })
                if self.core.transport.acknowledges()
                    && *request == ReadRequest::ACKNOWLEDGEMENT =>
            {
                return Ok(());
            }
            InboundRequest::Read(read) if read.request.size == 0 => {
                return self.order_barrier(engine, Barrier::EmptyRead);
            }
            InboundRequest::Read(read) => Some(read),
            InboundRequest::Atomic(_) => None,
        };
        self.order_barrier(engine, Barrier::Request)?;
        let Some(order) = &mut self.core.order else { return Ok(()) };
        let (id, active) = order.pending.number_message();
        let chosen = active && delays(&order.pending.rule.order, id);
        if read.is_none() {
            // There are at most IRD atomic operations.
            order.atomics.push_back(AtomicChoice { message: id.message, delays: chosen });
        }
        // At most one Read at a time, which also holds back the responses after it.
        if let Some(read) = read.filter(|_| chosen && order.read.is_none()) {
            order.pending.latest = None;
            // The Read must see the results of earlier atomic operations.
            let early = order.atomics.is_empty() && order.atomic.is_none();
            let early = early.then(|| self.read_early(engine, read)).flatten();
            let Some(order) = &mut self.core.order else { return Ok(()) };
            let until = engine.now.after(order.pending.rule.order.hold());
            let early_len = early.as_ref().map_or(0, |early| early.bytes.len());
            let read = DelayedRead { message: id.message, request: read.request, early_len };
            order.read = Some(HeldRead { until, read });
            self.requester.hold_responses(early);
            self.core.settle_order(engine);
        }
        Ok(())
    }

    /// Reads the last bytes of the source of a Read. Returns `None` if it is short or not
    /// accessible to this thread; then nothing is read early.
    fn read_early(&self, engine: &EngineState, read: &InboundRead) -> Option<EarlyBytes> {
        let size = read.request.size as usize;
        let len = EARLY.min(size / 2);
        let from = size - len;
        let to = read.request.src_to.0.wrapping_add(from as u64);
        let stag = read.request.src_stag;
        let right = Access::REMOTE_READ;
        let source = self.core.remote(&engine.stags, stag, to, len as u64, right).ok()?;
        let mut bytes = vec![0; len];
        if len == 0 || source.copier().is_some() {
            return None;
        }
        source.read(0, &mut bytes).ok()?;
        Some(EarlyBytes { read: *read, owner: source.owner(), from, bytes })
    }

    /// Generates the delayed response, after all data that has arrived by now.
    pub(super) fn release_read(&mut self, engine: &mut EngineState) {
        let Some(order) = &mut self.core.order else { return };
        let Some(held) = order.read.take() else { return };
        order.pending.delayed = Some((held.read, order.pending.latest));
        self.core.place_pending(engine);
        self.requester.release_responses();
        engine.wake(&mut self.core);
    }

    /// Writes the result of an atomic operation that is due by `now`, and responds.
    pub(super) fn finish_atomic(&mut self, engine: &mut EngineState, now: Time) {
        let Some(order) = &self.core.order else { return };
        if order.atomic.as_ref().is_none_or(|atomic| atomic.until > now) {
            return;
        }
        self.core.write_atomic(&engine.stags);
        let Some(order) = &mut self.core.order else { return };
        if let Some(HeldAtomic { message, request, original, .. }) = order.atomic.take() {
            order.pending.atomic = Some(LateAtomic { message, request: request.request });
            self.requester.finish_atomic(original);
            self.core.settle_order(engine);
            engine.wake(&mut self.core);
        }
    }
}

impl QpCore {
    /// Begins an atomic operation if its result is to be written late. Returns the owner of the
    /// memory, or `None` if the operation is to be carried out at once.
    pub(in crate::engine) fn begin_atomic(
        &mut self,
        request: &InboundAtomic,
        engine: &mut EngineState,
    ) -> Result<Option<SessionId>, AtomicError> {
        let Some(order) = &mut self.order else { return Ok(None) };
        let Some(AtomicChoice { message, delays: true }) = order.atomics.pop_front() else {
            return Ok(None);
        };
        let until = engine.now.after(order.pending.rule.order.hold());
        let operation = request.request.operation;
        let target = self.word(&engine.stags, request).map_err(AtomicError::Revoked)?;
        let owner = target.owner();
        let Some(original) = target.begin_update(operation) else { return Ok(None) };
        let original = original.map_err(AtomicError::Memory)?;
        if let Some(order) = &mut self.order {
            order.atomic = Some(HeldAtomic { until, request: *request, message, original });
        }
        self.settle_order(engine);
        Ok(Some(owner))
    }

    /// Writes the result of the atomic operation under way. The response is still due later.
    pub(super) fn write_atomic(&self, stags: &StagTable) {
        if let Some(held) = self.order.as_ref().and_then(|order| order.atomic.as_ref())
            && let Ok(target) = self.word(stags, &held.request)
        {
            target.finish_update();
        }
    }

    fn word<'t>(
        &self,
        stags: &'t StagTable,
        atomic: &InboundAtomic,
    ) -> Result<Target<'t>, RemoteFault> {
        let AtomicRequest { stag, to, .. } = atomic.request;
        self.remote(stags, stag, to.0, ATOMIC_LEN.into(), Access::REMOTE_ATOMIC)
    }
}

/// Maximum number of bytes that are read early.
const EARLY: usize = 64;
