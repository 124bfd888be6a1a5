//! Requests of the peer that await a response of this side, at most IRD of them (RFC 5040 section
//! 6.1, RFC 7306 section 5.1; siw's IRQ).
//!
//! An atomic operation is executed when its response is due, after all earlier Reads.

use super::inbound_request::{AtomicError, Executing, InboundRequest};
use super::message::{HeaderMessage, HeaderTemplate, Message, MessageSource, take};
use super::{RequestError, Requester};
use crate::ddp::qn;
use crate::device::copier::{CopyResult, Direction};
use crate::device::memory::{MemoryFault, Unreachable};
use crate::engine::copies::PendingCopies;
use crate::engine::numbers::count;
use crate::engine::order::EarlyBytes;
use crate::engine::qp_core::QpCore;
use crate::engine::state::EngineState;
use crate::rdmap::{ATOMIC_RESPONSE_LEN, AtomicResponse, Opcode};
use crate::stream::{InboundAtomic, InboundRead};
use rnic_abi::shm::attached::CopyEnd;
use rnic_abi::types::{ATOMIC_LEN, Access, Stag};

impl Requester {
    /// Returns true if IRD permits another request of the peer.
    pub(in crate::engine) fn ird_available(&self) -> bool {
        let answering = self.message.as_ref().is_some_and(Message::is_response);
        let executing = self.executing.is_some();
        //= RDMAP-5.2.2-2, 7306-5.2-2, 7306-5.2.2-8
        self.inbound.len() + usize::from(answering) + usize::from(executing) < usize::from(self.ird)
    }

    /// Returns true if the peer awaits a response that has not been sent in full.
    pub(in crate::engine) fn owes_response(&self) -> bool {
        let responding = self.message.as_ref().is_some_and(Message::is_response);
        responding || self.executing.is_some() || !self.inbound.is_empty()
    }

    /// Queues a request of the peer, to be answered in order.
    pub(in crate::engine) fn take_on(&mut self, request: InboundRequest) {
        let owes = self.owes_response();
        if let Some(acks) = &mut self.acks {
            acks.request_received(owes);
        }
        //= RDMAP-5.2.1-2, 7306-5.2.1-14
        self.inbound.push_back(request);
    }

    /// Delays the responses that have not begun. `early` are bytes read early for one of these
    /// responses.
    pub(in crate::engine) fn hold_responses(&mut self, early: Option<EarlyBytes>) {
        self.responses_held = true;
        self.early = early.map(Box::new);
    }

    /// Ends the delay of responses.
    pub(in crate::engine) fn release_responses(&mut self) {
        self.responses_held = false;
    }

    /// Drops bytes that were read early, because the stream ends.
    pub(in crate::engine) fn drop_early(&mut self) {
        self.early = None;
    }

    /// Begins the response to the oldest request. Returns false if no response can begin now.
    pub(super) fn begin_response(
        &mut self,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<bool, RequestError> {
        if self.responses_held {
            return Ok(false);
        }
        //= 7306-7-10
        if let Some(Executing { atomic, original, .. }) = self.executing {
            let Some(original) = original else { return Ok(false) };
            self.executing = None;
            self.answer(&atomic, original);
            return Ok(true);
        }
        //= RDMAP-5.2.1-8, RDMAP-5.2.2-6, RDMAP-5.5-20
        //= 7306-5.2.1-20, 7306-5.2.2-12, 7306-5.4-9, 7306-5.4-10, 7306-7-9, 7306-7-13
        match self.inbound.pop_front() {
            None => Ok(false),
            Some(InboundRequest::Read(read)) => {
                //= RDMAP-5.2-1, RDMAP-5.2.1-11
                self.message = Some(response_to(read));
                Ok(true)
            }
            Some(InboundRequest::Atomic(atomic)) => self
                .carry_out(&atomic, core, engine)
                .map_err(|error| RequestError::Atomic(atomic, error)),
        }
    }

    /// Executes an atomic operation and begins its response. Returns false if a copier must execute
    /// it.
    fn carry_out(
        &mut self,
        atomic: &InboundAtomic,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<bool, AtomicError> {
        if core.order.is_some()
            && let Some(owner) = core.begin_atomic(atomic, engine)?
        {
            let job = PendingCopies::NONE;
            self.executing = Some(Executing { job, owner, atomic: *atomic, original: None });
            return Ok(false);
        }
        let stag = atomic.request.stag;
        let to = atomic.request.to.0;
        let len = ATOMIC_LEN.into();
        let right = Access::REMOTE_ATOMIC;
        let target =
            core.remote(&engine.stags, stag, to, len, right).map_err(AtomicError::Revoked)?;
        let operation = atomic.request.operation;
        let Some((copier, address)) = target.copier() else {
            //= 7306-5-6
            let original = target.update(operation).map_err(AtomicError::Memory)?;
            //= 7306-5.2.1-21
            self.answer(atomic, original);
            return Ok(true);
        };
        let copier = copier.clone();
        let pieces = [(address, ATOMIC_LEN)].into_iter().collect();
        let job = engine.begin_copy(core.id, &copier, pieces, Direction::Update(operation));
        let owner = copier.session();
        let atomic = *atomic;
        self.executing = Some(Executing { job, owner, atomic, original: None });
        Ok(false)
    }

    /// Begins the response to an atomic operation that has been executed.
    fn answer(&mut self, atomic: &InboundAtomic, original: u64) {
        //= 7306-5.2.1-5, 7306-5.2.2-2, 7306-5.2.2-3
        let response = AtomicResponse { id: atomic.request.id, original };
        //= 7306-5-8, 7306-5.2.2-6
        let head = HeaderTemplate::Untagged {
            opcode: Opcode::AtomicResponse,
            //= 7306-4.1-3
            invalidate: Stag(0),
            //= 7306-5.2-3, 7306-5.2.2-7
            qn: qn::ATOMIC_RESPONSE,
            msn: take(&mut self.response_msn),
        };
        let source = MessageSource::Header(HeaderMessage::AtomicResponse(response));
        let total = count(ATOMIC_RESPONSE_LEN);
        //= 7306-5.2.2-4
        self.message = Some(Message { head, source, total, sent: 0, seq: None });
    }

    /// Sets the original value of the atomic operation that has begun.
    pub(in crate::engine) fn finish_atomic(&mut self, original: u64) {
        if let Some(executing) = &mut self.executing {
            executing.original = Some(original);
        }
    }

    /// Returns true if this copy is an atomic operation of the peer.
    pub(in crate::engine) fn is_executing(&self, job: u64) -> bool {
        self.executing.is_some_and(|executing| executing.job == job)
    }

    /// Handles the result of an atomic operation by a copier.
    pub(in crate::engine) fn executed(&mut self, result: CopyResult) -> Result<(), RequestError> {
        let Some(executing) = &mut self.executing else { return Ok(()) };
        let word = result.and_then(|bytes| {
            bytes[..].try_into().map(u64::from_ne_bytes).map_err(|_| Unreachable::Unmapped)
        });
        match word {
            Ok(original) => {
                executing.original = Some(original);
                Ok(())
            }
            Err(cause) => {
                let Executing { owner, atomic, .. } = *executing;
                self.executing = None;
                let fault = MemoryFault { owner, cause, end: CopyEnd::Sink };
                Err(RequestError::Atomic(atomic, AtomicError::Memory(fault)))
            }
        }
    }
}

fn response_to(read: InboundRead) -> Message {
    let r = read.request;
    //= RDMAP-4.1-3, RDMAP-4.1-5, RDMAP-4.4-2, RDMAP-4.4-3, RDMAP-5.2.2-1
    let head =
        HeaderTemplate::Tagged { opcode: Opcode::ReadResponse, stag: r.sink_stag, to: r.sink_to.0 };
    let source = match r.size {
        //= RDMAP-5.2.1-15
        0 => MessageSource::Empty,
        _ => MessageSource::ReadResponse(read),
    };
    //= RDMAP-3.2-7
    Message { head, source, total: r.size, sent: 0, seq: None }
}
