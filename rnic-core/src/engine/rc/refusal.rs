//! The refusal of a request by an RC responder that owes responses to earlier requests.
//!
//! A RoCE adapter executes requests in order: a NAK follows the responses to all requests before
//! the refused request and acknowledges them (IBTA specification, volume 1, section 9.7.5.1). Here
//! Reads and atomic operations wait in the requester while later segments are received, so the
//! Terminate of a refused request waits in [`StreamPhase::Refusing`] until their responses are
//! sent. During this wait, responses of the peer are still handled, because the peer may refuse a
//! request of this side at the same time and must first send its own responses. Requests of the
//! peer are dropped, and this side begins no requests. `engine.terminate_deadline` limits the wait.
//!
//! A QP of the iWARP device sends its Terminate at the earliest opportunity, as RFC 5040 section
//! 7.1 requires.

use crate::engine::phase::{StreamEvent, StreamPhase};
use crate::engine::qp::Qp;
use crate::engine::reason::Reason;
use crate::engine::responder::is_about_own_requests;
use crate::engine::state::EngineState;
use crate::rdmap::Terminate;
use rnic_abi::types::TerminateCode;

/// A refused segment of the peer.
pub(in crate::engine) struct Refusal {
    /// Error code of the Terminate.
    pub code: TerminateCode,
    /// RDMAP header of the Terminate, which encloses the header of the segment.
    pub payload: Vec<u8>,
    pub reason: Reason,
    /// Detail of the completion if the receive in use fails as well.
    pub receive: Option<u32>,
}

impl Qp {
    /// Ends the stream for a segment of the peer. An RC QP first sends the responses that it owes
    /// to requests before that segment.
    pub(in crate::engine) fn refuse(&mut self, engine: &mut EngineState, refusal: Refusal) {
        let responds = self.core.transport.responds_before_refusal();
        let next = self.life.after(StreamEvent::Refusal);
        let next = next.filter(|_| responds && self.requester.owes_response());
        let next = next.filter(|_| is_about_request(&refusal.payload));
        let (Some(next), Some(rc)) = (next, &mut self.rc) else {
            let Refusal { code, payload, reason, receive } = refusal;
            if let Some(detail) = receive {
                self.current_receive_failed(engine, reason, detail);
            }
            return self.terminate(engine, code, Some(payload), reason);
        };
        let reason = refusal.reason;
        rc.refusal = Some(Box::new(refusal));
        // Report at once: the peer could end the stream before the Terminate is due.
        self.report_guess(engine, reason);
        self.enter(next);
        self.stop_clock(engine);
        let deadline = engine.now.after(engine.options.terminate_deadline);
        self.life.set_deadline(&self.core, engine, Some(deadline));
        engine.wake(&mut self.core);
    }

    /// Ends the stream for the request that is being refused, if any, because all responses are
    /// sent or no more can be sent.
    pub(in crate::engine) fn complete_refusal(&mut self, engine: &mut EngineState) {
        if !self.is_refusing() {
            // The stream ended for another reason.
            return self.drop_refusal();
        }
        let Some(rc) = &mut self.rc else { return };
        let Some(refusal) = rc.refusal.take() else { return };
        let Refusal { code, payload, reason, receive } = *refusal;
        if let Some(detail) = receive {
            self.current_receive_failed(engine, reason, detail);
        }
        self.end_by_terminate(engine, code, Some(payload), reason);
    }

    /// Drops the refusal, because the stream ends for another reason.
    pub(in crate::engine) fn drop_refusal(&mut self) {
        if let Some(rc) = &mut self.rc {
            rc.refusal = None;
        }
    }

    /// Returns true if this QP has refused a request and still sends responses.
    pub(in crate::engine) fn is_refusing(&self) -> bool {
        self.life.phase() == StreamPhase::Refusing
    }
}

/// Returns true if a Terminate encloses the header of a request, not of a response.
fn is_about_request(payload: &[u8]) -> bool {
    let header = Terminate::parse(payload).ok().and_then(|t| t.ddp_header.map(<[u8]>::to_vec));
    header.is_some_and(|header| !is_about_own_requests(&header))
}
