//! Changes of a UD QP by the program or the administrator.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::{DatagramPort, DatagramRules};
use crate::engine::qp::Qp;
use crate::engine::send_queue::SendQueue;
use crate::engine::state::EngineState;
use rnic_abi::abi::control::{Event, QpChange};

impl Qp {
    /// Carries out a state change or another change that the program requests.
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
            QpChange::DrainSendQueue => {
                datagrams.drains = true;
                datagrams.drain_reported = false;
            }
            QpChange::QKey(q_key) => datagrams.q_key = q_key,
            // For `ReceiveDatagrams` and `Reset` the resource manager creates a new QP. The other
            // changes apply to QPs with a peer.
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
        // Publishes the new QP state.
        self.enter(self.life.phase());
        engine.wake(&mut self.core);
    }

    /// Replaces the rules.
    pub(in crate::engine) fn set_datagram_rules(&mut self, rules: Box<dyn DatagramRules>) {
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.rules = rules;
            datagrams.allowed = None;
        }
    }

    /// Replaces the ports of the device.
    pub(in crate::engine) fn set_datagram_port(&mut self, port: Arc<DatagramPort>) {
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.port = port;
            datagrams.allowed = None;
        }
    }

    /// Reports, once, that the requests begun before SQD are done.
    pub(super) fn emit_datagrams_drained(&mut self, engine: &mut EngineState) {
        let Some(datagrams) = &mut self.datagrams else { return };
        if datagrams.drains
            && !datagrams.drain_reported
            && self.send_queue == SendQueue::Works
            && !self.requester.is_under_way()
        {
            datagrams.drain_reported = true;
            let context = self.core.shared.context.load(Relaxed);
            let event = Event::SendQueueDrained { qp: self.core.id, context };
            engine.emit(self.core.session, event);
        }
    }
}
