//! Requests of this side that await a response of the peer, at most ORD of them (RFC 5040 section
//! 6.1; siw's ORQ).

use super::in_flight::{OutboundRequest, Progress, ResponseKind};
use super::message::take;
use super::{RequestError, Requester};
use crate::ddp;
use crate::engine::life::LifeCycle;
use crate::engine::numbers::count;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::Reason;
use crate::engine::state::EngineState;
use crate::rdmap::{Layout, ReadRequest, Terminate, codes};
use rnic_abi::types::{CompletionStatus, Msn, Stag};

impl Requester {
    /// Returns the oldest request if it is an atomic operation (`atomic`) or a Read (not `atomic`).
    pub(in crate::engine) fn awaited(&self, atomic: bool) -> Option<&OutboundRequest> {
        //= 7306-5-9
        self.outbound.front().filter(|request| (request.kind == ResponseKind::Atomic) == atomic)
    }

    /// Returns true if the application awaits a response.
    pub(in crate::engine) fn awaits_response(&self) -> bool {
        self.outbound.iter().any(|request| request.seq.is_some())
    }

    /// Returns the MSN of the Send that serves as the first FPDU of a peer-to-peer stream.
    pub(in crate::engine) fn number_rtr_send(&mut self) -> Msn {
        take(&mut self.send_msn)
    }

    /// Returns the MSN of the Read that serves as the first FPDU of a peer-to-peer stream, and
    /// awaits its response.
    pub(in crate::engine) fn number_rtr_read(&mut self) -> Msn {
        self.outbound.push_back(OutboundRequest {
            seq: None,
            sink: Stag(0),
            to: 0,
            size: 0,
            elements: None,
            received: 0,
            kind: ResponseKind::Read,
        });
        take(&mut self.request_msn)
    }

    /// Accounts for a placed segment of a Read Response. Fails if the response ends and does not
    /// have the requested length.
    pub(in crate::engine) fn response_placed(
        &mut self,
        len: usize,
        last: bool,
        core: &QpCore,
    ) -> Result<(), Reason> {
        let Some(read) = self.outbound.front_mut() else { return Ok(()) };
        // A peer that repeats bytes exceeds the size, possibly beyond 32 bits, and is caught at the
        // end.
        read.received = read.received.saturating_add(len as u64);
        if last && read.received != u64::from(read.size) {
            let reason = Reason::ResponseLength { received: read.received, size: read.size };
            self.refuse_response(core, reason);
            return Err(reason);
        }
        Ok(())
    }

    /// Fails the oldest request, because of an invalid response.
    pub(in crate::engine) fn refuse_response(&mut self, core: &QpCore, reason: Reason) {
        let status = core.transport.invalid_response(reason);
        if let Some(seq) = self.outbound.front().and_then(|request| request.seq) {
            self.blame(seq, status, reason.fault().code);
        }
    }

    /// Fails the oldest request, because its response could not be written to memory.
    pub(in crate::engine) fn response_placement_failed(&mut self) {
        if let Some(seq) = self.outbound.front().and_then(|request| request.seq) {
            self.blame(seq, CompletionStatus::LocalAccess, codes::DDP_LOCAL_CATASTROPHIC);
        }
    }

    /// Completes the oldest request after the last segment of its response has been placed.
    pub(in crate::engine) fn finish_request(
        &mut self,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<(), RequestError> {
        //= 7306-5.2.2-5
        let Some(answered) = self.outbound.pop_front() else { return Ok(()) };
        let Some(seq) = answered.seq else {
            if answered.kind == ResponseKind::Acknowledgement {
                self.ack_response_received();
            }
            return Ok(());
        };
        self.acknowledge_before(seq);
        if let Some(request) = self.in_flight.get_mut(seq) {
            request.byte_len = answered.size;
            //= RDMAP-5.2.2-3, RDMAP-5.5-20b, 7306-5.2.2-10
            request.progress = Progress::Done(CompletionStatus::Success);
        }
        if answered.kind == ResponseKind::ReadInvalidate {
            self.invalidate_locally(answered.sink, seq, core, engine)
                .map_err(|reason| RequestError::Failed { seq, reason })?;
        }
        Ok(())
    }

    /// Returns the request that a Terminate blames, which its headers identify. For an Atomic
    /// Request the Terminate encloses only the DDP header (RFC 7306 section 8).
    pub(in crate::engine) fn blamed(&self, t: &Terminate<'_>) -> Option<&OutboundRequest> {
        let read = t.read_request.map(ReadRequest::parse);
        if let (Some(read), Layout::Siw) = (read, t.layout) {
            // siw returns the request as it was, but with its size written over the MSN. The end of
            // the sink does not depend on how much of the request was answered.
            let covered = (read.sink_stag, read.sink_to.0.wrapping_add(read.size.into()));
            let of = |r: &&OutboundRequest| (r.sink, r.to.wrapping_add(r.size.into())) == covered;
            return self.outbound.iter().find(of);
        }
        let Some(header) = t.ddp_header else {
            return self.outbound.front().filter(|_| read.is_some());
        };
        match ddp::Header::parse(header) {
            Ok((ddp::Header::Untagged(h), _)) if h.qn == ddp::qn::READ_REQUEST => {
                // MSN of the oldest outstanding request; all of them were numbered in sequence.
                let oldest = self.request_msn.0.wrapping_sub(count(self.outbound.len()));
                self.outbound.get(h.msn.0.wrapping_sub(oldest) as usize)
            }
            _ => None,
        }
    }

    /// Fails all requests that await a response, since none can arrive. Later requests continue.
    pub(in crate::engine) fn fail_awaiting(
        &mut self,
        core: &QpCore,
        life: &LifeCycle,
        engine: &EngineState,
    ) {
        for seq in std::mem::take(&mut self.outbound).into_iter().filter_map(|r| r.seq) {
            self.request_unanswered(seq, core, life, engine);
        }
    }

    /// Fails a request because the peer has finished sending. The stream continues without it.
    pub(super) fn request_unanswered(
        &mut self,
        seq: u64,
        core: &QpCore,
        life: &LifeCycle,
        engine: &EngineState,
    ) {
        let reason = Reason::PeerFinished;
        self.blame(seq, reason.status(), codes::LLP_CLOSED);
        let Some(wr_id) = self.wr_id(seq) else { return };
        let diagnosis = life.record_request_failure(core, engine, wr_id, reason);
        if let Some(request) = self.in_flight.get_mut(seq) {
            request.diagnosis = diagnosis;
        }
    }
}
