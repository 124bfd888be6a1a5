//! Effects of rules on CQs and SRQs.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::Event;
use rnic_abi::faults::Selector;
use rnic_abi::types::*;

use super::effects::Subject;
use crate::resource::Manager;
use crate::resource::qp::Qp;
use crate::resource::session::Session;

impl Manager {
    /// Returns the CQs that a rule selects: those of the selected QPs, or all if it selects no QPs.
    pub(super) fn cqs_of(&self, number: u64, subject: Subject) -> BTreeSet<(SessionId, CqId)> {
        let Some(rule) = self.faults.rules.get(&number) else { return BTreeSet::new() };
        let Selector { cq: only, .. } = rule.armed.rule.select;
        let of_session = |session: &Session| session.cqs.keys().copied().collect();
        let of_qp = |qp: &Qp| vec![qp.send_cq, qp.recv_cq];
        let by_qps = rule.armed.rule.select.selects_qps();
        let mut found = self.queues_of(number, subject, by_qps, of_session, of_qp);
        found.retain(|(_, cq)| only.is_none_or(|only| only == cq.0));
        found
    }

    /// Returns the SRQs that a rule selects: those of the selected QPs, or all if it selects no
    /// QPs.
    pub(super) fn srqs_of(&self, number: u64, subject: Subject) -> BTreeSet<(SessionId, SrqId)> {
        let Some(rule) = self.faults.rules.get(&number) else { return BTreeSet::new() };
        let by_qps = rule.armed.rule.select.selects_qps() || rule.armed.rule.select.cq.is_some();
        let of_session = |session: &Session| session.srqs.keys().copied().collect();
        self.queues_of(number, subject, by_qps, of_session, |qp| qp.srq.into_iter().collect())
    }

    /// Returns the queues of the selected sessions, or those of the selected QPs.
    fn queues_of<Q: Ord>(
        &self,
        number: u64,
        subject: Subject,
        by_qps: bool,
        of_session: impl Fn(&Session) -> Vec<Q>,
        of_qp: impl Fn(&Qp) -> Vec<Q>,
    ) -> BTreeSet<(SessionId, Q)> {
        let mut found = BTreeSet::new();
        if !by_qps && subject.is_none_or(|(_, qp)| qp.is_none()) {
            for (_, session) in self.selected(number, subject) {
                found.extend(of_session(session).into_iter().map(|queue| (session.id, queue)));
            }
            return found;
        }
        for (id, qp) in self.qps_of(number, subject) {
            if let Some(qp) = self.sessions.get(&id).and_then(|session| session.qps.get(&qp)) {
                found.extend(of_qp(qp).into_iter().map(|queue| (id, queue)));
            }
        }
        found
    }

    /// Fails the CQs that a rule selects, as a worker fails a CQ that overruns.
    pub(super) fn fail_cqs(&mut self, number: u64, subject: Subject, now: Time) {
        let Some(name) = self.faults.rules.get(&number).map(super::Rule::name) else { return };
        for (id, cq) in self.cqs_of(number, subject) {
            let Some(object) = self.sessions.get(&id).and_then(|session| session.cqs.get(&cq))
            else {
                continue;
            };
            if object.cq.kill() {
                let context = object.cq.context.load(Relaxed);
                self.tell(id, &Event::CqError { cq, context });
                let text = format!("completion queue {cq} has failed");
                self.record_fault(id, name, None, &text, now);
                self.cq_failed(cq);
            }
        }
    }

    /// Fails the SRQs that a rule selects, as a worker fails an SRQ whose ring is corrupt.
    pub(super) fn fail_srqs(&mut self, number: u64, subject: Subject, now: Time) {
        let Some(name) = self.faults.rules.get(&number).map(super::Rule::name) else { return };
        for (id, srq) in self.srqs_of(number, subject) {
            let Some(object) = self.sessions.get(&id).and_then(|session| session.srqs.get(&srq))
            else {
                continue;
            };
            if object.srq.kill() {
                let context = object.srq.context.load(Relaxed);
                self.tell(id, &Event::SrqError { srq, context });
                let text = format!("shared receive queue {srq} has failed");
                self.record_fault(id, name, None, &text, now);
                self.srq_failed(srq);
            }
        }
    }
}
