//! Litmus tests of memory order: which outcomes each model reaches, and which it never does.

use std::collections::BTreeSet;
use std::time::Duration;

use super::rc;
use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, Wiring, World};
use crate::engine::EngineCommand;
use rnic_abi::abi::queue::SendFlags;
use rnic_abi::faults::FaultName;
use rnic_abi::faults::order::OrderModel::{self, Iwarp, Rc, RcRelaxed};
use rnic_abi::faults::order::{Order, OrderRule};

pub(super) const HOLD: Duration = Duration::from_micros(800);

/// Returns a rule for all messages.
pub(super) fn rule(order: Order, model: OrderModel) -> OrderRule {
    OrderRule { fault: FaultName::parse("litmus").unwrap(), order, model, inversions: None }
}

pub(super) fn worst(model: OrderModel) -> OrderRule {
    rule(Order::Worst { hold: HOLD }, model)
}

/// Sets or removes the rule of a QP.
pub(super) fn set_order(w: &mut World, qp: usize, rule: Option<OrderRule>) {
    w.command(qp, |id| EngineCommand::SetOrder(id, rule.map(Box::new)));
    w.settle();
}

/// Connects two QPs of the device to which a model belongs.
pub(super) fn connected(wiring: Wiring, model: OrderModel) -> World {
    match model {
        Iwarp => World::connected(wiring),
        Rc | RcRelaxed => rc::linked(wiring),
    }
}

/// Two ends, and memory of 128 bytes at each.
struct Stage {
    w: World,
    near: Mr,
    far: Mr,
}

impl Stage {
    fn new(wiring: Wiring, model: OrderModel, kind: MemoryKind) -> Self {
        let mut w = connected(wiring, model);
        w.kind = kind;
        let near = w.any_mr(A, 128);
        let far = w.any_mr(B, 128);
        Stage { w, near, far }
    }

    /// Writes a word of B.
    fn write(&self, at: usize, value: u8) -> Wr {
        Wr::write(1, &[], &self.far, at as u64).inline(&[value; 8])
    }

    /// Reads all memory of B.
    fn read(&self) -> Wr {
        Wr::read(2, self.near.all(), &self.far, 0)
    }

    fn add(&self, value: u64) -> Wr {
        Wr::fetch_add(3, value, self.near.sge(0..8), &self.far, 0)
    }

    /// Returns the first byte of the words at these offsets of B.
    fn far(&self, at: [usize; 2]) -> String {
        let bytes = self.far.bytes();
        format!("{} {}", bytes[at[0]], bytes[at[1]])
    }

    /// Posts requests of A, and calls `observe` at once and at each eighth of the hold time.
    fn post(&mut self, requests: &[Wr], mut observe: impl FnMut(&mut Stage)) {
        self.w.post(A, requests);
        for _ in 0..9 {
            observe(self);
            self.w.advance(HOLD / 8);
        }
        // An atomic operation and a Read may each have been held.
        self.w.advance(HOLD * 2);
        observe(self);
    }
}

/// Outcomes of a program.
type Outcomes = BTreeSet<String>;

/// A program with one outcome of interest.
struct Litmus {
    name: &'static str,
    run: fn(&mut Stage, &mut Outcomes),
    outcome: &'static str,
    /// The models that permit the outcome.
    permitted: &'static [OrderModel],
    /// Kinds of memory.
    kinds: &'static [MemoryKind],
}

impl Litmus {
    const fn new(
        name: &'static str,
        run: fn(&mut Stage, &mut Outcomes),
        outcome: &'static str,
        permitted: &'static [OrderModel],
    ) -> Self {
        let kinds = &[MemoryKind::Shared, MemoryKind::Attached];
        Litmus { name, run, outcome, permitted, kinds }
    }
}

const ALL: &[OrderModel] = &OrderModel::ALL;
const FREE: &[OrderModel] = &[Iwarp, RcRelaxed];

const PROGRAMS: &[Litmus] = &[
    Litmus::new("a flag in a second Write", flag, "0 1", FREE),
    Litmus::new("the last word of a Write", last_word, "0 1", FREE),
    Litmus::new("two Writes of one word", same_word, "first", FREE),
    Litmus::new("a completed Write", completed, "0", ALL),
    Litmus::new("a Write, then a Send", sent, "0", &[]),
    Litmus::new("a Write with data", immediate, "0", &[]),
    Litmus::new("a Write read back", read_back, "0", &[]),
    Litmus::new("a Read, then a Write", overtaken, "1", ALL),
    Litmus::new("a fenced Write", fenced, "1", &[]),
    Litmus::new("a Read during stores", torn, "1 0", ALL),
    Litmus {
        // Operations in mapped memory are atomic for the processor, too.
        kinds: &[MemoryKind::Attached],
        ..Litmus::new("an atomic and a store", store, "6", ALL)
    },
    Litmus::new("a Write, then an atomic", added, "0", &[]),
    Litmus::new("an atomic, then a Read", seen, "0", &[]),
    Litmus::new("two atomics", twice, "1", &[]),
];

fn flag(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.write(0, 1), s.write(64, 1)];
    s.post(&requests, |s| {
        found.insert(s.far([0, 64]));
    });
}

fn last_word(s: &mut Stage, found: &mut Outcomes) {
    s.near.fill(1);
    let requests = [Wr::write(1, &[s.near.sge(0..64)], &s.far, 0)];
    s.post(&requests, |s| {
        found.insert(s.far([0, 56]));
    });
}

fn same_word(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.write(0, 1), s.write(0, 2), Wr::send(9, &[])];
    s.w.recv(B, 7, &[]);
    s.post(&requests, |_| {});
    let last = s.far.bytes()[0];
    found.insert(if last == 1 { "first" } else { "second" }.to_owned());
}

fn completed(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.write(0, 1)];
    let mut done = false;
    s.post(&requests, |s| {
        done |= !s.w.completions(A).is_empty();
        if done {
            found.insert(s.far.bytes()[0].to_string());
        }
    });
    assert!(done);
}

/// Posts a request that completes a receive, and records what is visible then.
fn received(s: &mut Stage, found: &mut Outcomes, requests: &[Wr]) {
    s.w.recv(B, 7, &[]);
    let mut done = false;
    s.post(requests, |s| {
        if !s.w.completions(B).is_empty() {
            done = true;
            let bytes = s.far.bytes();
            found.insert(bytes[0].min(bytes[56]).to_string());
        }
    });
    assert!(done);
}

fn sent(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.write(0, 1), s.write(56, 1), Wr::send(9, &[])];
    received(s, found, &requests);
}

fn immediate(s: &mut Stage, found: &mut Outcomes) {
    s.near.fill(1);
    let requests = [Wr::write(1, &[s.near.sge(0..64)], &s.far, 0).immediate(5)];
    received(s, found, &requests);
}

fn read_back(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.write(0, 1), s.write(64, 1), s.read()];
    s.post(&requests, |_| {});
    let bytes = s.near.bytes();
    found.insert(bytes[0].min(bytes[64]).to_string());
}

fn overtaken(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.read(), s.write(0, 1)];
    s.post(&requests, |_| {});
    found.insert(s.near.bytes()[0].to_string());
}

fn fenced(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.read(), s.write(0, 1).with(SendFlags::FENCE)];
    s.post(&requests, |_| {});
    found.insert(s.near.bytes()[0].to_string());
}

fn torn(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.read()];
    let mut stored = false;
    s.post(&requests, |s| {
        if !std::mem::replace(&mut stored, true) {
            s.far.fill(1);
        }
    });
    let bytes = s.near.bytes();
    found.insert(format!("{} {}", bytes[0], bytes[127]));
}

fn store(s: &mut Stage, found: &mut Outcomes) {
    s.far.set(&5u64.to_ne_bytes());
    let requests = [s.add(1)];
    let mut stored = false;
    s.post(&requests, |s| {
        if !std::mem::replace(&mut stored, true) {
            s.far.set(&100u64.to_ne_bytes());
        }
    });
    assert_eq!(s.near.bytes()[..8], 5u64.to_ne_bytes());
    found.insert(s.far.bytes()[0].to_string());
}

fn added(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.write(0, 1), s.add(1)];
    s.post(&requests, |_| {});
    found.insert(s.near.bytes()[0].to_string());
}

/// The word is among the bytes that a delayed Read reads early.
fn seen(s: &mut Stage, found: &mut Outcomes) {
    let add = Wr::fetch_add(3, 1, s.near.sge(0..8), &s.far, 120);
    let requests = [add, s.read()];
    s.post(&requests, |_| {});
    found.insert(s.near.bytes()[120].to_string());
}

fn twice(s: &mut Stage, found: &mut Outcomes) {
    let requests = [s.add(1), s.add(1), s.read()];
    s.post(&requests, |_| {});
    found.insert(s.near.bytes()[0].to_string());
}

/// Runs a program once.
fn run(litmus: &Litmus, stage: &mut Stage, rule: OrderRule) -> Outcomes {
    set_order(&mut stage.w, B, Some(rule));
    stage.far.fill(0);
    stage.near.fill(0);
    let mut found = Outcomes::new();
    (litmus.run)(stage, &mut found);
    stage.w.advance(HOLD * 2);
    stage.w.completions(A);
    stage.w.completions(B);
    found
}

/// Calls `check` for each program, model, path and kind of memory.
fn each(check: impl Fn(&Litmus, OrderModel, &mut Stage)) {
    for litmus in PROGRAMS {
        for model in OrderModel::ALL {
            for wiring in Wiring::both() {
                for kind in litmus.kinds {
                    check(litmus, model, &mut Stage::new(wiring, model, *kind));
                }
            }
        }
    }
}

#[test]
fn worst_reaches_what_is_permitted_at_once() {
    each(|litmus, model, stage| {
        if litmus.permitted.contains(&model) {
            let found = run(litmus, stage, worst(model));
            assert!(found.contains(litmus.outcome), "{}, {model:?}: {found:?}", litmus.name);
        }
    });
}

#[test]
fn ten_seeds_reach_what_is_permitted() {
    each(|litmus, model, stage| {
        if litmus.permitted.contains(&model) {
            let reaches = (0..10).any(|seed| {
                let random = rule(Order::Random { seed, hold: HOLD }, model);
                run(litmus, stage, random).contains(litmus.outcome)
            });
            assert!(reaches, "{}, {model:?}", litmus.name);
        }
    });
}

#[test]
fn forbidden_outcomes_never_occur() {
    let long = std::env::var_os("RNIC_TEST_LONG").is_some();
    // A million runs of programs with a forbidden outcome, or a hundred thousand.
    let seeds = if long { 12_000 } else { 1_200 };
    each(|litmus, model, stage| {
        if litmus.permitted.contains(&model) {
            return;
        }
        let random = |seed| Order::Random { seed, hold: HOLD };
        for order in (0..seeds).map(random).chain([Order::Worst { hold: HOLD }]) {
            let found = run(litmus, stage, rule(order, model));
            let what = litmus.name;
            assert!(!found.contains(litmus.outcome), "{what}, {model:?}, {order:?}: {found:?}");
        }
    });
}

#[test]
fn without_a_rule_the_order_is_strict() {
    let strict = ["0 1", "first", "1 0"];
    each(|litmus, model, stage| {
        set_order(&mut stage.w, B, Some(worst(model)));
        set_order(&mut stage.w, B, None);
        let mut found = Outcomes::new();
        (litmus.run)(stage, &mut found);
        for outcome in strict {
            assert!(!found.contains(outcome), "{}: {found:?}", litmus.name);
        }
    });
}

/// Returns the outcomes of the flag program for each of these messages alone.
fn flags_inverted(model: OrderModel, only: std::ops::Range<u64>) -> Outcomes {
    let mut stage = Stage::new(Wiring::direct(), model, MemoryKind::Shared);
    let mut found = Outcomes::new();
    let rule = OrderRule { inversions: Some(only), ..worst(model) };
    set_order(&mut stage.w, B, Some(rule));
    for _ in 0..3 {
        stage.far.fill(0);
        flag(&mut stage, &mut found);
        stage.w.completions(A);
    }
    found
}

#[test]
fn inversions_are_selected_by_number() {
    // Messages 0, 2 and 4 are data, the others flags.
    for message in 0..6 {
        let found = flags_inverted(Iwarp, message..message + 1);
        assert_eq!(found.contains("0 1"), message % 2 == 0, "message {message}: {found:?}");
    }
    assert!(!flags_inverted(Iwarp, 6..100).contains("0 1"));
}

#[test]
fn a_late_write_is_named_too() {
    for model in OrderModel::ALL {
        let mut stage = Stage::new(Wiring::direct(), model, MemoryKind::Shared);
        set_order(&mut stage.w, B, Some(worst(model)));
        completed(&mut stage, &mut Outcomes::new());
        let text = stage.w.diagnosis(B).text;
        assert!(text.starts_with("RDMA Write 0 (8 bytes"), "{text}");
        assert!(text.contains("became visible after it had been acknowledged"), "{text}");
    }
}

#[test]
fn an_inversion_names_both_requests() {
    let mut stage = Stage::new(Wiring::direct(), Iwarp, MemoryKind::Shared);
    set_order(&mut stage.w, B, Some(worst(Iwarp)));
    let mut found = Outcomes::new();
    flag(&mut stage, &mut found);
    let record = stage.w.diagnosis(B);
    let stag = stage.far.stag;
    let iova = stage.far.iova;
    assert_eq!(record.stag, Some(stag));
    assert_eq!((record.offset, record.length), (Some(iova), Some(8)));
    assert_eq!(record.rule, "injected by fault litmus");
    let text = format!(
        "RDMA Write 1 (8 bytes of STag {stag} at {:#x}) was placed before RDMA Write 0 (8 bytes of \
         STag {stag} at {iova:#x}) (RFC 5040 section 5.5: nothing orders the placement of two \
         messages)",
        iova + 64
    );
    assert_eq!(record.text, text);
}
