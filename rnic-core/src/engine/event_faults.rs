//! Effects of fault rules on completion events: events that are sent late, never, or in addition.

use std::sync::Arc;

use super::deadlines::Due;
use super::faults::record;
use super::qp_core::QpCore;
use super::state::EngineState;
use crate::device::cq::Published;
use rnic_abi::abi::queue::Cqe;
use rnic_abi::faults::{Action, Point};

impl QpCore {
    /// Sends the event of a published completion, if it has one. Fault rules may delay or drop the
    /// event, or add a spurious event.
    pub(super) fn notify_by_rules(
        &mut self,
        published: Published,
        cqe: &Cqe,
        of_send: bool,
        engine: &mut EngineState,
    ) {
        let cq = if of_send { &self.send_cq } else { &self.recv_cq }.clone();
        let side = usize::from(of_send && !Arc::ptr_eq(&self.send_cq, &self.recv_cq));
        let Some(faults) = &mut self.faults else { return engine.notify(published, &cq) };
        let point = match published {
            // The event that is held back serves this completion as well.
            Published::Notify if faults.events[side].is_some() => return,
            Published::Notify => Point::CompletionEvent,
            Published::Quiet => Point::QuietCompletion,
        };
        let struck = faults.strikes_completion(point, cqe, engine.now);
        let Some((rule, action)) = struck else { return engine.notify(published, &cq) };
        let recorded = rule.is_recorded.then_some(rule.name);
        let effect = match action {
            Action::HoldEvent { by } => {
                let at = engine.now.after(by);
                faults.events[side] = Some(at);
                engine.deadlines.set(at, Due::CompletionEvent(self.key));
                "held back"
            }
            Action::LoseEvent => "lost",
            _ => {
                engine.notify(Published::Notify, &cq);
                "sent without need"
            }
        };
        if let Some(name) = recorded {
            let text = format!("an event of completion queue {} was {effect}", cq.id());
            record(self, engine, name, text);
        }
    }

    /// Sends the completion events that are due, or all that are held back.
    pub(super) fn send_held_events(&mut self, all: bool, engine: &mut EngineState) {
        let Some(faults) = &mut self.faults else { return };
        for (held, cq) in faults.events.iter_mut().zip([&self.recv_cq, &self.send_cq]) {
            if let Some(at) = held.take_if(|at| all || *at <= engine.now) {
                engine.deadlines.clear(at, Due::CompletionEvent(self.key));
                engine.notify(Published::Notify, cq);
            }
        }
    }
}
