//! Fault rules of QPs: requests and messages that fail, completions that are held or lost, and QPs
//! that stop.

mod completions;
mod cut;
mod events;
mod messages;
mod ports;
mod requests;
mod rnr;
mod stop;

use std::sync::Arc;

use super::rc::{SENDING, linked};
use super::world::{A, B, QpShape, Wiring, World};
use crate::device::ArmedFault;
use crate::engine::EngineCommand;
use rnic_abi::faults::{FaultName, FaultRule};
use rnic_abi::types::Time;

/// Returns the rules of a text, numbered from 1. A rule without a name is called after its action.
fn armed(text: &str, set_at: Time) -> Vec<Arc<ArmedFault>> {
    let rules = FaultRule::parse_all(text).unwrap().into_iter();
    let name = |rule: &FaultRule| rule.name.or(FaultName::parse(rule.action_name).ok()).unwrap();
    (1..)
        .zip(rules)
        .map(|(number, rule)| {
            let name = name(&rule);
            Arc::new(ArmedFault::new(name, number, rule, set_at))
        })
        .collect()
}

/// Replaces the rules of a QP and returns them.
fn set(w: &mut World, qp: usize, text: &str) -> Vec<Arc<ArmedFault>> {
    let rules = armed(text, w.now);
    w.command(qp, |id| EngineCommand::SetFaults(id, rules.clone()));
    w.settle();
    rules
}

/// Replaces the rules of a QP by one, and returns it.
fn set_one(w: &mut World, qp: usize, text: &str) -> Arc<ArmedFault> {
    set(w, qp, text).remove(0)
}

/// Returns the numbers of occasions and of faults.
fn counts(rule: &ArmedFault) -> (u64, u64) {
    (rule.counter.seen(), rule.counter.injected())
}

fn stop(w: &mut World, qp: usize) {
    let by = FaultName::parse("stop").unwrap();
    w.command(qp, |id| EngineCommand::SetStopped(id, Some(by)));
    w.settle();
}

fn go_on(w: &mut World, qp: usize) {
    w.command(qp, |id| EngineCommand::SetStopped(id, None));
    w.settle();
}

/// Returns pairs of iWARP and RC QPs on both paths, each with a text for messages.
fn pairs() -> Vec<(World, String)> {
    let iwarp =
        Wiring::all().into_iter().map(|wiring| (iwarp(wiring), format!("iWARP {wiring:?}")));
    let rc = Wiring::both().into_iter().map(|wiring| (linked(wiring), format!("RC {wiring:?}")));
    iwarp.chain(rc).collect()
}

/// Returns an iWARP pair whose Sends wait for their receives.
fn iwarp(wiring: Wiring) -> World {
    let mut w = World::pair_with(wiring, super::rc::kept(QpShape::default()), 128);
    w.events(A);
    w.events(B);
    w
}

/// Checks that a QP has exactly one diagnosis, which names this fault.
fn assert_injected(w: &World, qp: usize, fault: &str) {
    let why = w.diagnosis(qp);
    assert_eq!(why.rule, format!("injected by fault {fault}"), "{why:?}");
}

fn has_rules(w: &World, qp: usize) -> bool {
    let engine = &w.engines[w.qps[qp].engine];
    let key = engine.by_id[&w.qps[qp].id];
    engine.qps[key as usize].as_ref().unwrap().core.faults.is_some()
}

/// Otherwise each request, message and completion would look for rules.
#[test]
fn a_qp_without_rules_has_no_fault_state() {
    for (mut w, which) in pairs() {
        assert!(!has_rules(&w, A), "{which}");
        set(&mut w, A, "do=complete status=fatal-err");
        assert!(has_rules(&w, A), "{which}");
        assert!(!has_rules(&w, B), "{which}");
        w.command(A, |id| EngineCommand::SetFaults(id, Vec::new()));
        assert!(!has_rules(&w, A), "{which}");
    }
}
