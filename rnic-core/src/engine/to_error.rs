//! Moves RoCE QPs to Error at the request of their program (`ibv_modify_qp(3)`, and with it
//! `rdma_disconnect(3)`).
//!
//! An adapter has usually sent the requests that were posted before, although the standard leaves
//! it open, and programs rely on it: they send a last message and disconnect. So a QP first takes a
//! turn, and moves to Error after it has sent the posted requests. It waits neither for a receive
//! of the peer nor for room in the socket, and at most
//! [`EngineOptions::error_deadline`](super::EngineOptions).

use super::Engine;
use super::interface::Output;
use super::phase::StreamPhase;
use super::qp::Qp;
use super::send_queue::SendQueue;
use super::state::EngineState;
use rnic_abi::abi::control::DisconnectMode;
use rnic_abi::types::{QpId, Time};

impl Engine {
    /// Moves a QP that has just [taken a turn](Self::take_turn_now) to Error, and flushes
    /// everything posted, now or after later turns that send the rest. [`Output::InError`] follows.
    /// Posted requests without a stream wait for one if the QP `expects_stream`.
    pub fn move_to_error(&mut self, id: QpId, expects_stream: bool, now: Time) {
        self.state.now = now;
        let begun = self.with(id, |qp, engine| qp.move_to_error(engine, expects_stream));
        if begun != Some(true) {
            self.state.outputs.push_back(Output::InError(id));
        }
    }
}

impl Qp {
    /// Returns false if the QP is in Error already.
    fn move_to_error(&mut self, engine: &mut EngineState, expects_stream: bool) -> bool {
        if self.life.phase().flushes() {
            return false;
        }
        self.core.moves_to_error = Some(engine.now.after(engine.options.error_deadline));
        if self.sends_soon(expects_stream) {
            self.restart_clock(engine);
        } else {
            self.disconnect(engine, DisconnectMode::Abort);
        }
        true
    }

    /// Returns true if the QP sends posted requests in one of its next turns.
    fn sends_soon(&mut self, expects_stream: bool) -> bool {
        let works = self.send_queue == SendQueue::Works && !self.is_stopped();
        let Some(rc) = self.rc.as_ref().filter(|rc| works && rc.begins()) else { return false };
        // A peer that had a stream may have gone.
        let is_first = !rc.has_had_stream();
        match self.life.phase() {
            // Requests of an earlier stream fail when the next one begins.
            StreamPhase::Unlinked => {
                let is_idle = !self.requester.is_under_way();
                expects_stream && is_first && is_idle && self.requester.has_posted()
            }
            StreamPhase::AwaitFirstFpdu => self.requester.has_posted(),
            _ => self.is_sending(),
        }
    }

    /// Returns true if the QP has more to send than its last turn allowed, or waits for a copier.
    fn is_sending(&self) -> bool {
        self.life.phase().sends() && (self.core.turn.wanted || self.requester.is_fetching())
    }

    /// Moves the QP to Error after a turn if it has nothing more to send.
    #[cold]
    pub(super) fn end_if_sent(&mut self, engine: &mut EngineState) {
        if self.life.phase().sends() && !self.is_sending() {
            self.disconnect(engine, DisconnectMode::Abort);
        }
    }

    /// Reports that the QP is in Error or gone, if its program waits for that.
    pub(super) fn report_error_state(&mut self, engine: &mut EngineState) {
        if self.core.moves_to_error.take().is_some() {
            engine.outputs.push_back(Output::InError(self.core.id));
        }
    }
}
