//! What a program, or the administrator, tells a queue pair of datagrams.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{DatagramPort, DatagramRules};
use crate::abi::control::{Event, QpChange};
use crate::engine::qp::Qp;
use crate::engine::send_queue::SendQueue;
use crate::engine::state::EngineState;

impl Qp {
    /// Carries out a change that the program wants.
    pub(in crate::engine) fn change_datagrams(
        &mut self,
        engine: &mut EngineState,
        change: &QpChange,
    ) {
        if self.life.phase().flushes() {
            return;
        }
        let Some(datagrams) = &mut self.datagrams else { return };
        match *change {
            QpChange::ReadyToSend(sending) => {
                datagrams.psn.get_or_insert(sending.sq_psn);
                datagrams.drains = false;
            }
            QpChange::DrainSendQueue => (datagrams.drains, datagrams.told_of_drain) = (true, false),
            QpChange::QKey(q_key) => datagrams.q_key = q_key,
            // The resource manager makes another queue pair of it, or a first one; the rest is of
            // queue pairs with a peer.
            QpChange::ReceiveDatagrams { .. }
            | QpChange::Reset
            | QpChange::ReadyToReceive(_)
            | QpChange::Rights(_)
            | QpChange::MinRnrTimer(_) => {}
        }
        if let QpChange::ReadyToSend(_) = change {
            self.leave_send_error();
        }
        self.set_pace();
        // What applications see of the phase is the state.
        self.enter(self.life.phase());
        engine.wake(&mut self.core);
    }

    /// Keeps to other rules from now on.
    pub(in crate::engine) fn set_datagram_rules(&mut self, rules: Box<dyn DatagramRules>) {
        if let Some(datagrams) = &mut self.datagrams {
            (datagrams.rules, datagrams.allowed) = (rules, None);
        }
    }

    /// Uses these ports of the device from now on.
    pub(in crate::engine) fn set_datagram_port(&mut self, port: Arc<DatagramPort>) {
        if let Some(datagrams) = &mut self.datagrams {
            (datagrams.port, datagrams.allowed) = (port, None);
        }
    }

    /// Says, once, that what had begun before Sqd is done.
    pub(super) fn tell_of_drained_datagrams(&mut self, engine: &mut EngineState) {
        let Some(datagrams) = &mut self.datagrams else { return };
        if datagrams.drains
            && !datagrams.told_of_drain
            && self.send_queue == SendQueue::Works
            && !self.requester.is_under_way()
        {
            datagrams.told_of_drain = true;
            let context = self.core.shared.context.load(Relaxed);
            let event = Event::SendQueueDrained { qp: self.core.id, context };
            engine.emit(self.core.session, event);
        }
    }
}
