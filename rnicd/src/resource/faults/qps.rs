//! The rules of each QP.

use std::sync::{Arc, Weak};

use rnic_abi::faults::link::LinkShape;
use rnic_abi::faults::order::{OrderModel, OrderRule};
use rnic_abi::faults::{Action, FaultName, Selector};
use rnic_abi::types::*;
use rnic_core::device::ArmedFault;
use rnic_core::engine::{EmulatedLink, EngineCommand};

use super::told::{LinkKey, QpFaults};
use super::{FaultRules, Lasting, Rule};
use crate::clock;
use crate::resource::Manager;
use crate::resource::qp::{Qp, QpPhase};
use crate::resource::session::Session;

impl FaultRules {
    /// Returns the link with this key.
    fn link(
        &mut self,
        key: LinkKey,
        fault: Arc<ArmedFault>,
        shape: LinkShape,
    ) -> Arc<EmulatedLink> {
        let known = self.links.get(&key).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            // Links without QPs are dropped, so there are as many as QPs at most.
            self.links.retain(|_, link| link.strong_count() > 0);
            let link = Arc::new(EmulatedLink::new(fault, shape));
            self.links.insert(key, Arc::downgrade(&link));
            link
        })
    }
}

impl Manager {
    /// Gives each QP its rules.
    pub(in crate::resource) fn refresh_faults(&mut self) {
        let qps = self.sessions.values().flat_map(|session| session.qps.keys().copied());
        for qp in qps.collect::<Vec<_>>() {
            self.refresh_faults_of(qp);
        }
    }

    /// Gives a QP its rules. Called when it is created, and when its peer or device is known.
    pub(in crate::resource) fn refresh_faults_of(&mut self, qp: QpId) {
        let Some(owner) = self.handles.qps.owner(qp.0) else { return };
        let Some(session) = self.sessions.get(&owner) else { return };
        let Some(object) = session.qps.get(&qp) else { return };
        let bound = matches!(object.phase, QpPhase::Bound(_));
        let (rules, stopped) = self.faults_of(session, qp, object);
        let order = self.order_of(session, qp, object).filter(|_| bound);
        let link = self.link_of(session, qp, object).filter(|_| bound);
        let told = QpFaults {
            rules: rules.iter().map(|rule| rule.number).collect(),
            stopped,
            order: order.as_ref().map(|(number, _)| *number),
            link: link.as_ref().map(|(key, ..)| *key),
        };
        let link = link.map(|(key, fault, shape)| (key, self.faults.link(key, fault, shape)));
        let Some((_, object)) = self.qp_of(qp) else { return };
        if object.faults == told {
            return;
        }
        let last = std::mem::replace(&mut object.faults, told);
        match &mut object.phase {
            QpPhase::Idle(config) | QpPhase::Connecting(config) | QpPhase::Accepting(config) => {
                config.faults = rules;
                config.stopped = stopped;
            }
            QpPhase::Bound(worker) => {
                let worker = *worker;
                if last.stopped != stopped {
                    self.workers.one(worker, EngineCommand::SetStopped(qp, stopped));
                }
                if last.order != order.as_ref().map(|(number, _)| *number) {
                    let rule = order.map(|(_, rule)| Box::new(rule));
                    self.workers.one(worker, EngineCommand::SetOrder(qp, rule));
                }
                self.workers.one(worker, EngineCommand::SetFaults(qp, rules));
                if last.link != link.as_ref().map(|(key, _)| *key) {
                    let link = link.map(|(_, link)| link);
                    if let Some(link) = &link {
                        let text = format!("the link is emulated ({})", link.fault().rule.text);
                        self.record_fault(owner, link.fault().name, Some(qp), &text, clock::now());
                    }
                    self.workers.one(worker, EngineCommand::SetLink(qp, link));
                }
            }
            QpPhase::Leaving => {}
        }
    }

    fn faults_of(
        &self,
        session: &Session,
        id: QpId,
        qp: &Qp,
    ) -> (Vec<Arc<ArmedFault>>, Option<FaultName>) {
        let rules = self.faults.rules.values();
        let selected = rules.filter(|rule| self.selects_qp(rule, session, id, qp));
        let mut of_engine = Vec::new();
        let mut stopped = None;
        for rule in selected {
            let stops = match (rule.armed.rule.action, rule.lasts) {
                (Action::PortDown { .. }, lasts) => lasts.is_some(),
                (Action::Stop { .. }, Some(Lasting::All)) => true,
                (Action::Stop { .. }, Some(Lasting::Qp(only))) => only == id,
                _ => false,
            };
            if stops {
                stopped = Some(rule.name());
            }
            if rule.armed.rule.point.is_of_engine() {
                of_engine.push(rule.armed.clone());
            }
        }
        (of_engine, stopped)
    }

    /// Returns the rule of memory order of a QP, with its number: the first that selects it.
    fn order_of(&self, session: &Session, id: QpId, qp: &Qp) -> Option<(u64, OrderRule)> {
        let now = clock::now();
        self.faults.rules.iter().find_map(|(number, rule)| {
            let Action::Order { order, model, inversions } = rule.armed.rule.action else {
                return None;
            };
            let in_force = rule.armed.is_in_force(now) && self.selects_qp(rule, session, id, qp);
            let own = if qp.kind.is_roce() { OrderModel::Rc } else { OrderModel::Iwarp };
            let order = OrderRule {
                fault: rule.name(),
                order,
                model: model.unwrap_or(own),
                inversions: inversions.map(|(from, to)| from..to),
            };
            in_force.then_some((*number, order))
        })
    }

    /// Returns the rule of the link of a QP: the first that selects it.
    fn link_of(
        &self,
        session: &Session,
        id: QpId,
        qp: &Qp,
    ) -> Option<(LinkKey, Arc<ArmedFault>, LinkShape)> {
        let now = clock::now();
        self.faults.rules.iter().find_map(|(number, rule)| {
            let Action::Link(shape) = rule.armed.rule.action else { return None };
            let in_force = rule.armed.is_in_force(now) && self.selects_qp(rule, session, id, qp);
            in_force.then(|| ((*number, qp.addresses()), rule.armed.clone(), shape))
        })
    }

    /// Returns true if a rule concerns a QP.
    pub(super) fn selects_qp(&self, rule: &Rule, session: &Session, id: QpId, qp: &Qp) -> bool {
        let Selector { device, pd, qp: only, cq, peer, .. } = &rule.armed.rule.select;
        let is = |wanted: &Option<u32>, number: u32| wanted.is_none_or(|wanted| wanted == number);
        rule.selects(session)
            && is(only, id.0)
            && is(pd, qp.pd.0)
            && (is(cq, qp.send_cq.0) || is(cq, qp.recv_cq.0))
            && peer.is_none_or(|peer| qp.peer() == Some(peer))
            && device.as_ref().is_none_or(|device| self.is_on(qp, device))
    }

    /// Returns true if a QP belongs to a device. A QP of a RoCE device that has no GID yet may
    /// belong to any of them.
    fn is_on(&self, qp: &Qp, device: &str) -> bool {
        if !qp.kind.is_roce() {
            return self.config.device.name == device;
        }
        match &qp.rc {
            Some(rc) => self.gids_of(device).iter().any(|row| row.gid == rc.wiring.local),
            None => self.config.device.name != device,
        }
    }
}
