//! The asynchronous event of an RC responder that refuses a request of its peer.

use std::sync::atomic::Ordering::Relaxed;

use crate::abi::control::Event;
use crate::engine::qp::Qp;
use crate::engine::reason::{Reason, ResponderError};
use crate::engine::state::EngineState;

impl Qp {
    /// Raises the event if this is why the stream ends. No completion of the responder need tell of
    /// a refused Write, Read or atomic operation.
    pub(in crate::engine) fn emit_responder_error(&self, engine: &mut EngineState, reason: Reason) {
        let Some(error) = reason.responder_error() else { return };
        if self.wired.as_ref().is_none_or(|wired| wired.unreliable) {
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
