//! UD QPs: state transitions, attribute changes and their checks.

use rnic_abi::abi::control::QpChange;
use rnic_abi::types::*;
use rnic_core::engine::{DatagramConfig, EngineCommand};

use super::rc::{MOST_24, TWENTY_FOUR_BITS, state_name};
use super::{QpPhase, UdAttr, wrong_state};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::{Manager, find, refuse};

impl Manager {
    pub(super) fn modify_datagrams(
        &mut self,
        id: SessionId,
        qp: QpId,
        change: &QpChange,
        now: Time,
    ) -> Answer {
        match change {
            QpChange::ReceiveDatagrams { q_key } => self.receive_datagrams(id, qp, *q_key, now),
            QpChange::Reset => self.reset_qp(id, qp),
            QpChange::ReadyToSend(sending) => {
                let psn = sending.sq_psn.into();
                refuse::at_most("sq_psn", psn, TWENTY_FOUR_BITS, MOST_24.into())?;
                self.change_datagrams(id, qp, change, Some(QpState::Rts))
            }
            QpChange::DrainSendQueue => {
                let object = find(&mut self.sessions, id)?.qp(qp)?;
                if object.state() != QpState::Rts {
                    return Err(wrong_state(qp, state_name(object), "Rts"));
                }
                self.change_datagrams(id, qp, change, Some(QpState::Sqd))
            }
            QpChange::QKey(_) => self.change_datagrams(id, qp, change, None),
            QpChange::ReadyToReceive(_) | QpChange::Rights(_) | QpChange::MinRnrTimer(_) => {
                Err(wrong_state(qp, "a UD QP", "an RC or UC QP"))
            }
        }
    }

    fn receive_datagrams(&mut self, id: SessionId, qp: QpId, q_key: u32, now: Time) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        if !matches!(object.phase, QpPhase::Idle(_)) {
            return Err(wrong_state(qp, state_name(object), "Idle"));
        }
        self.take_rate(id, now)?;
        let session = find(&mut self.sessions, id)?;
        let rules = self.policy.of_datagrams(&session.client.identity, self.config.wired.port);
        let object = session.qp(qp)?;
        let phase = std::mem::replace(&mut object.phase, QpPhase::Leaving);
        let QpPhase::Idle(mut config) = phase else { return Outcome::done() };
        let port = self.datagram_port.clone();
        config.datagrams = Some(DatagramConfig { q_key, port, rules: Box::new(rules) });
        object.phase = QpPhase::Bound(DATAGRAM_WORKER);
        object.datagrams = Some(UdAttr { state: QpState::Rtr, q_key });
        // Valid until the worker sets the state itself.
        object.shared.set_state(QpState::Rtr);
        // Another program may send as soon as the owner has the answer, so the worker must have the
        // QP by then.
        let attach = EngineCommand::AttachRoce(config);
        let ticket = self.workers.one_ticketed(DATAGRAM_WORKER, attach);
        self.refresh_faults_of(qp);
        self.answer_when_modified(id, ticket)
    }

    /// Forwards a change to the worker, and records the new state.
    fn change_datagrams(
        &mut self,
        id: SessionId,
        qp: QpId,
        change: &QpChange,
        state: Option<QpState>,
    ) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let (&QpPhase::Bound(worker), true) = (&object.phase, object.works()) else {
            return Err(wrong_state(qp, state_name(object), "Rtr, Rts, Sqd or Sqe"));
        };
        if let Some(attr) = &mut object.datagrams {
            attr.state = state.unwrap_or(attr.state);
            if let QpChange::QKey(q_key) = *change {
                attr.q_key = q_key;
            }
        }
        let ticket = self.workers.one_ticketed(worker, EngineCommand::Change(qp, *change));
        self.answer_when_modified(id, ticket)
    }

    /// Sends the current rules to all UD QPs of a session.
    pub(in crate::resource) fn renew_datagram_rules(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get(&id) else { return };
        let mut rules = None;
        for (&qp, object) in session.qps.iter().filter(|(_, object)| object.datagrams.is_some()) {
            let QpPhase::Bound(worker) = object.phase else { continue };
            let of_session =
                || self.policy.of_datagrams(&session.client.identity, self.config.wired.port);
            let rules = Box::new(rules.get_or_insert_with(of_session).clone());
            self.workers.one(worker, EngineCommand::SetDatagramRules(qp, rules));
        }
    }
}

/// The worker of all UD QPs, so that they reach each other.
pub(super) const DATAGRAM_WORKER: u32 = 0;
