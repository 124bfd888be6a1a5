//! The asynchronous event of a responder that refuses a request of its peer.

use std::sync::atomic::Ordering::Relaxed;

use super::qp::Qp;
use super::reason::{Reason, ResponderError};
use super::state::EngineState;
use rnic_abi::abi::control::Event;

impl Qp {
    /// Raises the event of a responder if the stream ends because it refuses a request of the peer.
    pub(super) fn emit_responder_error(&self, engine: &mut EngineState, reason: Reason) {
        let Some(error) = reason.responder_error() else { return };
        if !self.core.transport.reports_refusal(reason) {
            return;
        }
        let qp = self.core.id;
        let context = self.core.shared.context.load(Relaxed);
        let event = match error {
            ResponderError::Access => Event::AccessError { qp, context },
            ResponderError::Request => Event::RequestError { qp, context },
        };
        engine.emit(self.core.session, event);
    }
}
