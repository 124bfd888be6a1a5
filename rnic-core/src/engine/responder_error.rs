//! The asynchronous event of a responder that refuses a request of its peer.

use std::sync::atomic::Ordering::Relaxed;

use super::qp::Qp;
use super::reason::{Reason, ResponderError};
use super::state::EngineState;
use rnic_abi::abi::control::Event;

impl Qp {
    /// Raises the event of an iWARP or RC responder if the stream ends because it refuses a request
    /// of the peer. A refused Write, Read or atomic operation completes nothing on this side, so
    /// the program would not learn of it otherwise. UC and UD drop such a request.
    pub(super) fn emit_responder_error(&self, engine: &mut EngineState, reason: Reason) {
        let Some(error) = reason.responder_error() else { return };
        if self.is_unreliable() {
            return;
        }
        // An invalid segment need not belong to a request.
        if !self.is_rc_or_uc() && matches!(reason, Reason::Segment) {
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
