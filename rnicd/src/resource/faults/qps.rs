//! The rules of each QP.

use std::sync::{Arc, Weak};

use rnic_abi::abi::control::DeviceKind;
use rnic_abi::faults::link::LinkShape;
use rnic_abi::faults::order::{OrderModel, OrderRule};
use rnic_abi::faults::{Action, Selector};
use rnic_abi::types::*;
use rnic_core::device::ArmedFault;
use rnic_core::engine::{EmulatedLink, EngineCommand};

use super::qp_faults::{LinkKey, QpFaults};
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
            // Removes entries of links without QPs, so that the map has at most one entry per QP.
            self.links.retain(|_, link| link.strong_count() > 0);
            let link = Arc::new(EmulatedLink::new(fault, shape));
            self.links.insert(key, Arc::downgrade(&link));
            link
        })
    }
}

/// A rule that selects a session.
struct SessionRule {
    number: u64,
    armed: Arc<ArmedFault>,
    lasts: Option<Lasting>,
    of_profile: Option<DeviceKind>,
}

/// Returns true if any of these rules was set by a user, and is not part of the profile.
fn has_users_rules(rules: &[SessionRule]) -> bool {
    rules.iter().any(|rule| rule.of_profile.is_none())
}

/// The rules of a QP.
#[derive(Default)]
struct RulesOfQp {
    given: QpFaults,
    engine: Vec<Arc<ArmedFault>>,
    order: Option<OrderRule>,
    link: Option<(Arc<ArmedFault>, LinkShape)>,
}

impl Manager {
    /// Gives each QP its rules if the rules have changed. Visits only QPs of sessions that users'
    /// rules select now or selected before, so that the rules of one user cost other users nothing.
    /// Rules of the profile do not change.
    pub(in crate::resource) fn refresh_stale_faults(&mut self) {
        if !std::mem::take(&mut self.faults.are_stale) {
            return self.release_requests();
        }
        self.cm.report_messages(self.faults.rules.values().any(Rule::concerns_messages));
        let ids: Vec<SessionId> = self.sessions.keys().copied().collect();
        for id in ids {
            let rules = self.rules_of(id);
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            let has_rules = has_users_rules(&rules);
            let had_rules = std::mem::replace(&mut session.has_faults, has_rules);
            if !had_rules && !has_rules {
                continue;
            }
            self.publish_ruled_calls(id);
            let Some(session) = self.sessions.get(&id) else { continue };
            for qp in session.qps.keys().copied().collect::<Vec<_>>() {
                self.give_rules(id, qp, &rules);
            }
        }
        // Must follow the commands above, so that the requests start under the new rules.
        self.release_requests();
    }

    /// Gives a QP its rules. Called when the QP is created, and when its peer or device is known.
    pub(in crate::resource) fn refresh_faults_of(&mut self, qp: QpId) {
        if self.faults.rules.is_empty() {
            return;
        }
        let Some(id) = self.handles.qps.owner(qp.0) else { return };
        let rules = self.rules_of(id);
        if let Some(session) = self.sessions.get_mut(&id) {
            session.has_faults |= has_users_rules(&rules);
        }
        self.give_rules(id, qp, &rules);
    }

    fn rules_of(&self, id: SessionId) -> Vec<SessionRule> {
        let Some(session) = self.sessions.get(&id) else { return Vec::new() };
        let selected = self.faults.rules.iter().filter(|(_, rule)| rule.selects(session));
        let rule = |(number, rule): (&u64, &Rule)| SessionRule {
            number: *number,
            armed: rule.armed.clone(),
            lasts: rule.lasts,
            of_profile: rule.of_profile,
        };
        let mut rules: Vec<_> = selected.map(rule).collect();
        // The first rule that strikes acts, so users' rules must precede the rules of the profile.
        rules.sort_by_key(|rule| rule.of_profile.is_some());
        rules
    }

    fn give_rules(&mut self, id: SessionId, qp: QpId, rules: &[SessionRule]) {
        let Some(session) = self.sessions.get(&id) else { return };
        let Some(object) = session.qps.get(&qp) else { return };
        let RulesOfQp { given, engine, order, link } =
            self.select_rules(session, qp, object, rules);
        if object.faults == given {
            return;
        }
        let link = link.zip(given.link);
        let link = link.map(|((fault, shape), key)| self.faults.link(key, fault, shape));
        let Some((_, object)) = self.qp_of(qp) else { return };
        let last = std::mem::replace(&mut object.faults, given);
        let QpFaults { stopped, order: order_number, link: link_key, .. } = object.faults;
        let port = (last.port != object.faults.port).then(|| object.faults.port.clone());
        match &mut object.phase {
            QpPhase::Idle(config) | QpPhase::Connecting(config) | QpPhase::Accepting(config) => {
                config.faults = engine;
                config.stopped = stopped;
            }
            QpPhase::Bound(worker) => {
                let worker = *worker;
                if let Some(changes) = port {
                    let port = self.datagram_port_with(&changes);
                    self.workers.one(worker, EngineCommand::SetDatagramPort(qp, port));
                }
                if last.stopped != stopped {
                    self.workers.one(worker, EngineCommand::SetStopped(qp, stopped));
                }
                if last.order != order_number {
                    self.workers.one(worker, EngineCommand::SetOrder(qp, order.map(Box::new)));
                }
                self.workers.one(worker, EngineCommand::SetFaults(qp, engine));
                if last.link != link_key {
                    if let Some(link) = &link {
                        let text = format!("the link is emulated ({})", link.fault().rule.text);
                        self.record_fault(id, link.fault().name, Some(qp), &text, clock::now());
                    }
                    self.workers.one(worker, EngineCommand::SetLink(qp, link));
                }
            }
            QpPhase::Leaving => {}
        }
    }

    /// Returns the rules that select a QP of a session. At most one rule of memory order and one
    /// rule of a link apply, the first of each kind, and only once a worker holds the QP.
    fn select_rules(
        &self,
        session: &Session,
        id: QpId,
        qp: &Qp,
        rules: &[SessionRule],
    ) -> RulesOfQp {
        let now = clock::now();
        let mut found = RulesOfQp::default();
        if qp.datagrams.is_some() {
            found.given.port = self.port_changes(session, qp);
        }
        let bound = matches!(qp.phase, QpPhase::Bound(_));
        let mut differ = None;
        let kind = if qp.kind.is_roce() { DeviceKind::Roce } else { DeviceKind::Iwarp };
        for SessionRule { number, armed, lasts, of_profile } in rules {
            if of_profile.is_some_and(|of_profile| of_profile != kind) {
                continue;
            }
            let rule = &armed.rule;
            let keys_differ = || *differ.get_or_insert_with(|| self.keys_differ(session, qp));
            if lasts.is_some() && self.change_stops(rule, qp, keys_differ) {
                found.given.stopped = Some(armed.name);
            }
            if !self.selects_qp(&rule.concerned(), id, qp) {
                continue;
            }
            let in_force = bound && armed.is_in_force(now);
            match rule.action {
                Action::PortDown { .. } if lasts.is_some() => {
                    found.given.stopped = Some(armed.name);
                }
                Action::Stop { .. }
                    if matches!(lasts, Some(Lasting::All)) || *lasts == Some(Lasting::Qp(id)) =>
                {
                    found.given.stopped = Some(armed.name);
                }
                Action::Order { order, model, inversions } if in_force && found.order.is_none() => {
                    let own = if qp.kind.is_roce() { OrderModel::Rc } else { OrderModel::Iwarp };
                    found.given.order = Some(*number);
                    found.order = Some(OrderRule {
                        fault: armed.name,
                        order,
                        model: model.unwrap_or(own),
                        inversions: inversions.map(|(from, to)| from..to),
                    });
                }
                Action::Link(shape) if in_force && found.link.is_none() => {
                    found.given.link = Some((*number, qp.addresses()));
                    found.link = Some((armed.clone(), shape));
                }
                _ => {}
            }
            if rule.point.is_of_engine() {
                found.given.rules.push(*number);
                found.engine.push(armed.clone());
            }
        }
        found
    }

    /// Returns true if a rule that selects the session of a QP selects the QP.
    pub(super) fn selects_qp(&self, select: &Selector, id: QpId, qp: &Qp) -> bool {
        let Selector { device, pd, qp: only, cq, peer, .. } = select;
        let is = |wanted: &Option<u32>, number: u32| wanted.is_none_or(|wanted| wanted == number);
        is(only, id.0)
            && is(pd, qp.pd.0)
            && (is(cq, qp.send_cq.0) || is(cq, qp.recv_cq.0))
            && peer.is_none_or(|peer| qp.peer() == Some(peer))
            && device.as_ref().is_none_or(|device| self.is_on(qp, device))
    }

    /// Returns true if a QP belongs to a device. If the program has not named the device, an RC or
    /// UC QP belongs to each RoCE device that has its GID. A QP without a GID belongs to all RoCE
    /// devices.
    pub(super) fn is_on(&self, qp: &Qp, device: &str) -> bool {
        if !qp.device.is_empty() {
            return qp.device == device;
        }
        if !qp.kind.is_roce() {
            return self.config.device.name == device;
        }
        match &qp.rc {
            Some(rc) => self.gids_of(device).iter().any(|row| row.gid == rc.wiring.local),
            None => self.config.device.name != device,
        }
    }
}
