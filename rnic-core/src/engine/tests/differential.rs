//! Random requests, compared with the model, and the direct path compared with TCP.

use proptest::prelude::*;

use super::link::Cuts;
use super::model::{Model, OWN, Op, REGION_LEN, REGIONS, REVOKED, WINDOW, any_op, rights, safe_op};
use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use crate::device::window::BindRequest;
use rnic_abi::abi::control::Diagnosis;
use rnic_abi::abi::queue::SendFlags;
use rnic_abi::faults::link::LinkShape;
use rnic_abi::types::{Access, Scope, Stag, WindowKind};

/// A pair with the model's regions, and after them the window as its peer sees it.
struct Bench {
    w: World,
    regions: [Vec<Mr>; 2],
}

impl Bench {
    /// `kinds` has two bits for each region: its kind of memory.
    fn new(wiring: Wiring, kinds: u64) -> Self {
        let shape = QpShape { sq: 64, rq: 64, inline: 128, ..QpShape::default() };
        let mut w = World::pair_with(wiring, shape, 256);
        let mut regions = [Vec::new(), Vec::new()];
        for end in [A, B] {
            for n in 0..REGIONS {
                let scope = if n == OWN { Scope::Qp(w.qps[end].id) } else { Scope::Pd };
                let iova = 0x1_0000 * (n as u64 + 1);
                w.kind = match kinds >> (2 * (end * REGIONS + n)) & 3 {
                    0 | 1 => MemoryKind::Shared,
                    2 => MemoryKind::Attached,
                    _ => MemoryKind::ThroughCopier,
                };
                let mr = w.mr_at(end, REGION_LEN, rights(n), scope, iova);
                mr.pattern((end * REGIONS + n) as u8);
                regions[end].push(mr);
            }
            w.revoke(end, regions[end][REVOKED].stag);
            let (stag, _) = w.window(end, WindowKind::Type2).view();
            let window = Mr { stag, ..regions[end][0].clone() };
            regions[end].push(window);
        }
        w.events(A);
        w.events(B);
        Bench { w, regions }
    }

    fn memory(&self) -> [[Vec<u8>; REGIONS]; 2] {
        [A, B].map(|end| std::array::from_fn(|n| self.regions[end][n].bytes()))
    }

    /// Returns the request of an op, or posts a receive and returns `None`.
    fn request(&mut self, me: usize, id: u64, op: &Op, model: &Model) -> Option<Wr> {
        if let Op::Bind { at, len } = op {
            return Some(self.bind(me, id, *at, *len));
        }
        let mine = &self.regions[me];
        let theirs = &self.regions[1 - me];
        let sge = |p: &super::model::Place, len: usize| mine[p.region].sge(p.at..p.at + len);
        Some(match op {
            Op::Receive { at, len } => {
                let sge = mine[0].sge(*at..at + len);
                self.w.recv(me, id, &[sge]);
                return None;
            }
            Op::Write { from, to, len, inline, immediate } => {
                let wr = Wr::write(id, &[sge(from, *len)], &theirs[to.region], to.at as u64);
                let wr = immediate.iter().fold(wr, |wr, data| wr.immediate(*data));
                if *inline { wr.inline(&model.bytes(me, *from, *len)) } else { wr }
            }
            Op::Send { from, len, inline, solicited, invalidate } => {
                let list = [sge(from, *len)];
                let wr = match invalidate {
                    None => Wr::send(id, &list),
                    Some(region) => Wr::send_invalidate(id, &list, theirs[*region].stag),
                };
                let wr = if *solicited { wr.with(SendFlags::SOLICITED) } else { wr };
                if *inline { wr.inline(&model.bytes(me, *from, *len)) } else { wr }
            }
            Op::Read { sink, from, len, invalidate } => {
                let sink = sge(sink, *len);
                let at = from.at as u64;
                if *invalidate {
                    Wr::read_invalidate(id, sink, &theirs[from.region], at)
                } else {
                    Wr::read(id, sink, &theirs[from.region], at)
                }
            }
            Op::Atomic { operation, sink, to } => {
                Wr::atomic(id, *operation, sge(sink, 8), &theirs[to.region], to.at as u64)
            }
            Op::LocalInvalidate { region } => Wr::local_invalidate(id, mine[*region].stag),
            Op::Bind { .. } => return None,
        })
    }

    /// Returns a request that binds an end's window to a part of its region 0, with the next key.
    fn bind(&mut self, me: usize, id: u64, at: usize, len: usize) -> Wr {
        let region = self.regions[me][0].clone();
        let window = &mut self.regions[me][WINDOW];
        let new = Stag(window.stag.0 & !0xFF | window.stag.0.wrapping_add(1) & 0xFF);
        let bind = BindRequest {
            window: window.stag,
            new,
            address: region.iova + at as u64,
            length: len as u64,
            lkey: region.stag.0,
            access: rights(WINDOW).bits(),
        };
        *window = Mr { stag: new, iova: bind.address, ..region };
        Wr::bind(id, &bind)
    }

    /// Returns the completions of both ends, with STags named as in the model.
    fn completions(&mut self) -> [Vec<String>; 2] {
        [A, B].map(|end| {
            let own = format!("invalidated {:#x}", self.regions[end][OWN].stag.0);
            let window = format!("invalidated {:#x}", self.regions[end][WINDOW].stag.0);
            let found = self.w.completions(end).into_iter();
            let named = |c: String| {
                c.replace(&own, "invalidated OWN").replace(&window, "invalidated WINDOW")
            };
            found.map(named).collect()
        })
    }
}

/// Runs ops one by one against the model. Returns the observations of each step.
fn run(
    ops: &[(usize, Op)],
    wiring: Wiring,
    kinds: u64,
    cuts: Option<u64>,
) -> Result<Vec<String>, TestCaseError> {
    run_on(ops, Bench::new(wiring, kinds), wiring, cuts)
}

/// Like [`run`], with emulated links that have no delay at these ends.
fn run_emulated(
    ops: &[(usize, Op)],
    wiring: Wiring,
    kinds: u64,
    ends: &[usize],
) -> Result<Vec<String>, TestCaseError> {
    let mut bench = Bench::new(wiring, kinds);
    for end in ends {
        bench.w.set_link(*end, LinkShape::default());
    }
    run_on(ops, bench, wiring, None)
}

fn run_on(
    ops: &[(usize, Op)],
    mut bench: Bench,
    wiring: Wiring,
    cuts: Option<u64>,
) -> Result<Vec<String>, TestCaseError> {
    if let Some(seed) = cuts {
        for (n, pipe) in bench.w.links[0].pipes.iter_mut().enumerate() {
            pipe.cuts = Cuts::Random(seed + n as u64);
            pipe.takes = Cuts::Random(seed + 7 + n as u64);
        }
    }
    let mut model = Model::new(bench.memory());
    let mut seen = Vec::new();
    for (id, (me, op)) in (0u64..).zip(ops) {
        if model.ended.is_some() && matches!(op, Op::Receive { .. }) {
            continue;
        }
        if let Some(wr) = bench.request(*me, id, op, &model) {
            // TCP must take both messages, or the peer might refuse the first before the second.
            let whole = cuts.is_some() && matches!(op, Op::Write { immediate: Some(_), .. });
            let cut =
                |w: &mut World, takes| std::mem::replace(&mut w.links[0].pipes[*me].takes, takes);
            let takes = whole.then(|| cut(&mut bench.w, Cuts::None));
            bench.w.post(*me, &[wr]);
            if let Some(takes) = takes {
                cut(&mut bench.w, takes);
            }
        }
        let before = model.ended;
        model.apply(*me, id, op);
        let found = bench.completions();
        let expected = std::mem::take(&mut model.completions);
        prop_assert_eq!(&found, &expected, "after {} {:?} over {:?}", id, op, wiring);
        seen.extend(found.into_iter().flatten());
        let events = [A, B].map(|end| bench.w.events(end));
        if let (None, Some((by, code))) = (before, model.ended) {
            let ours = format!("terminated {code}");
            let theirs = format!("terminated by peer {code}");
            prop_assert!(events[by][0].starts_with(&ours), "{:?}", events);
            prop_assert!(events[1 - by][0].starts_with(&theirs), "{:?}", events);
            prop_assert_eq!(
                events[by][0].replace(&ours, ""),
                events[1 - by][0].replace(&theirs, "")
            );
        } else {
            prop_assert!(events[A].is_empty() && events[B].is_empty(), "{:?}", events);
        }
        seen.extend(events.into_iter().flatten());
    }
    prop_assert_eq!(&bench.memory(), &model.memory);
    for app in &bench.w.apps {
        prop_assert_eq!(app.cqs[0].cq.usage().1, 0, "no slot is reserved when all is done");
    }
    for why in [A, B].into_iter().flat_map(|end| bench.w.diagnoses(end)) {
        let Diagnosis { what, rule, text, qp, pd, stag, offset, length, .. } = why;
        seen.push(format!("{what:?} {rule} {text} {qp:?} {pd:?} {stag:?} {offset:?} {length:?}"));
    }
    let counters = [A, B].map(|end| bench.w.qps[end].shared.counters());
    seen.push(format!(
        "{:?}",
        counters.map(|c| (
            c.sends_completed,
            c.receives_completed,
            c.bytes_sent,
            c.bytes_received,
            c.reads_answered,
            c.errors
        ))
    ));
    Ok(seen)
}

/// Runs the same ops in one batch per end.
fn run_batch(
    ops: &[(usize, Op)],
    flags: u64,
    kinds: u64,
    wiring: Wiring,
) -> Result<(), TestCaseError> {
    let mut bench = Bench::new(wiring, kinds);
    let mut model = Model::new(bench.memory());
    let mut batches = [Vec::new(), Vec::new()];
    // A receive for every Send, in the order of the Sends.
    for end in [A, B] {
        let sends = ops.iter().filter(|(me, op)| *me != end && matches!(op, Op::Send { .. }));
        for n in 0..sends.count() as u64 {
            let receive = Op::Receive { at: n as usize % 90, len: 100 };
            bench.request(end, 1000 + n, &receive, &model);
            model.apply(end, 1000 + n, &receive);
        }
    }
    for (id, (me, op)) in (0u64..).zip(ops) {
        let Some(mut wr) = bench.request(*me, id, op, &model) else { continue };
        if flags >> (id % 61) & 1 == 1 {
            wr = wr.with(SendFlags::FENCE);
        }
        model.apply(*me, id, op);
        if flags >> (id % 37) & 1 == 1 {
            wr = wr.unsignaled();
            model.completions[*me].pop();
        }
        batches[*me].push(wr);
    }
    bench.w.push(A, &batches[A]);
    bench.w.push(B, &batches[B]);
    bench.w.settle();
    let found = bench.completions();
    for (found, expected) in found.iter().zip(&model.completions) {
        // Receives and sends complete independently of each other.
        for receives in [true, false] {
            let of = |l: &[String]| -> Vec<String> {
                l.iter().filter(|c| c.contains("Receive") == receives).cloned().collect()
            };
            prop_assert_eq!(of(found), of(expected), "{:?}", wiring);
        }
    }
    prop_assert_eq!(&bench.memory(), &model.memory);
    for app in &bench.w.apps {
        prop_assert_eq!(app.cqs[0].cq.usage().1, 0);
    }
    Ok(())
}

/// Kinds of memory of the regions. In half of the cases all are shared.
fn memory_kinds() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), any::<u64>()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    //= RDMAP-5.1-5
    //= RDMAP-5.3-2
    //= RDMAP-5.3-3
    //= RDMAP-3.1-7
    //= RDMAP-3.2-3
    //= 7306-6.1-6
    #[test]
    fn both_paths_match_the_model(
        ops in proptest::collection::vec(any_op(), 1..40),
        seed in any::<u64>(),
        framing in 1usize..6,
        kinds in memory_kinds(),
    ) {
        let direct = run(&ops, Wiring::direct(), kinds, None)?;
        let tcp = run(&ops, Wiring::all()[framing], kinds, Some(seed >> 1))?;
        prop_assert_eq!(direct, tcp);
    }

    #[test]
    fn emulated_links_match_the_model(
        ops in proptest::collection::vec(any_op(), 1..40),
        framing in 0usize..6,
        kinds in memory_kinds(),
        ends in 0usize..3,
    ) {
        let plain = run(&ops, Wiring::direct(), kinds, None)?;
        let ends = [&[A][..], &[B], &[A, B]][ends];
        let emulated = run_emulated(&ops, Wiring::all()[framing], kinds, ends)?;
        prop_assert_eq!(plain, emulated);
    }

    //= RDMAP-5.3-5
    #[test]
    fn batches_end_as_if_posted_one_by_one(
        ops in proptest::collection::vec(safe_op(), 1..60),
        flags in any::<u64>(),
        framing in 0usize..6,
        kinds in memory_kinds(),
    ) {
        run_batch(&ops, flags, kinds, Wiring::all()[framing])?;
    }

    /// Two QPs share a CQ smaller than their queues, polled now and then: published - consumed +
    /// reserved never exceeds its capacity, no completion is lost, and it never overflows.
    #[test]
    fn a_small_cq_never_overflows(
        steps in proptest::collection::vec((0usize..4, 0u64..7), 1..60),
        size in 1u32..8,
        silent in any::<u64>(),
        direct in any::<bool>(),
    ) {
        let mut w = World::new(if direct { &[1] } else { &[2, 1] });
        let a = w.app(0);
        let b = w.app(usize::from(!direct));
        let cq = w.cq(a, size);
        let cq_b = w.cq(b, 64);
        for n in 0..2 {
            w.qp(a, cq, cq, QpShape::default());
            w.qp(b, cq_b, cq_b, QpShape::default());
            let wiring = if direct { Wiring::direct() } else { Wiring::tcp() };
            w.connect_on(2 * n, if direct { 0 } else { n }, 2 * n + 1, 0, wiring);
        }
        w.settle();
        let from = w.mr(1, 8, Access::all());
        let sink = w.mr(0, 8, Access::all());
        let mut wanted = [Vec::new(), Vec::new()];
        let mut found = Vec::new();
        let mut id = 0;
        let check = |w: &World| {
            let cq = &w.apps[a].cqs[cq].cq;
            let (unread, reserved, _) = cq.usage();
            prop_assert!(unread + reserved <= cq.capacity());
            Ok(())
        };
        for (what, n) in steps {
            match what {
                0 | 1 => {
                    let mut batch = Vec::new();
                    for _ in 0..n.min(u64::from(w.qps[2 * what].sq.free())) {
                        id += 1;
                        let wr = match id % 3 {
                            0 => Wr::read(id, sink.all(), &from, 0),
                            _ => Wr::write(id, &[], &from, 0),
                        };
                        let quiet = silent >> (id % 64) & 1 == 1;
                        if !quiet {
                            wanted[what].push(id);
                        }
                        batch.push(if quiet { wr.unsignaled() } else { wr });
                    }
                    // The second pair uses the first pair's regions: the apps are the same.
                    w.push(2 * what, &batch);
                }
                2 => found.extend(w.poll_cq(a, cq, n as usize)),
                _ => {
                    for _ in 0..n {
                        w.round();
                        check(&w)?;
                    }
                }
            }
            check(&w)?;
        }
        for _ in 0..200 {
            w.settle();
            found.extend(w.poll_cq(a, cq, 99));
        }
        prop_assert_eq!(w.apps[a].cqs[cq].cq.usage().1, 0);
        prop_assert!(w.failed_cqs.is_empty());
        for ids in wanted {
            let of: Vec<u64> = found
                .iter()
                .filter_map(|c| c.split(' ').next()?.parse().ok())
                .filter(|id| ids.contains(id))
                .collect();
            prop_assert_eq!(of, ids, "each once and in order");
        }
    }
}
