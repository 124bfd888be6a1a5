//! Data that an order rule holds, and all events that make it visible.

use super::order_litmus::{HOLD, connected, rule, set_order, worst};
use super::rc;
use super::requests::{Mr, Wr};
use super::windows::to;
use super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use crate::engine::{ChargeLimits, EngineCommand, EngineOptions};
use crate::rdmap::Opcode;
use rnic_abi::abi::control::QpChange;
use rnic_abi::faults::order::OrderModel::{self, Iwarp, Rc, RcRelaxed};
use rnic_abi::faults::order::{MAX_HOLD, Order, OrderRule};
use rnic_abi::types::{Access, WindowKind};

/// Connects two QPs. B holds a Write of A to `region`.
fn holding(wiring: Wiring, model: OrderModel, region: impl Fn(&mut World) -> Mr) -> (World, Mr) {
    let mut w = connected(wiring, model);
    let region = region(&mut w);
    set_order(&mut w, B, Some(worst(model)));
    w.post(A, &[Wr::write(1, &[], &region, 0).inline(&[7; 8])]);
    assert_eq!(w.completions(A), ["1 RdmaWrite"]);
    assert_eq!(region.bytes()[..8], [0; 8], "{model:?}");
    (w, region)
}

fn any(w: &mut World) -> Mr {
    w.any_mr(B, 64)
}

/// Checks that the Write is visible, and that nothing is written from now on.
fn is_placed(w: &mut World, region: &Mr, what: &str) {
    assert_eq!(region.bytes()[..8], [7; 8], "{what}");
    region.fill(0);
    w.advance(HOLD * 3);
    assert_eq!(region.bytes(), vec![0; region.len], "{what}");
}

#[test]
fn held_data_is_placed_in_time() {
    for wiring in Wiring::both() {
        for model in OrderModel::ALL {
            let (mut w, region) = holding(wiring, model, any);
            w.advance(HOLD - std::time::Duration::from_nanos(1));
            assert_eq!(region.bytes()[..8], [0; 8], "{model:?}");
            w.advance(std::time::Duration::from_nanos(1));
            is_placed(&mut w, &region, "hold time");
            assert!(w.engines[w.qps[B].engine].state.held.is_unused());
        }
    }
}

#[test]
fn hold_time_is_limited() {
    let mut w = World::connected(Wiring::direct());
    let region = any(&mut w);
    let order = Order::Worst { hold: MAX_HOLD * 1000 };
    set_order(&mut w, B, Some(rule(order, Iwarp)));
    w.post(A, &[Wr::write(1, &[], &region, 0).inline(&[7; 8])]);
    w.advance(MAX_HOLD);
    is_placed(&mut w, &region, "limit");
}

#[test]
fn a_region_is_deregistered_after_its_data() {
    for wiring in Wiring::both() {
        for model in OrderModel::ALL {
            let (mut w, region) = holding(wiring, model, any);
            let other = any(&mut w);
            w.dereg(B, &other).unwrap();
            assert_eq!(region.bytes()[..8], [0; 8], "another region");
            w.dereg(B, &region).unwrap();
            is_placed(&mut w, &region, "deregistration");
        }
    }
}

#[test]
fn a_local_invalidate_follows_held_data() {
    for wiring in Wiring::both() {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let own = |w: &mut World| w.own_mr(B, 64, access);
        for region in [&own as &dyn Fn(&mut World) -> Mr, &any] {
            let (mut w, region) = holding(wiring, Iwarp, region);
            w.post(B, &[Wr::local_invalidate(2, region.stag)]);
            assert_eq!(w.completions(B), ["2 LocalInvalidate"]);
            is_placed(&mut w, &region, "invalidation");
        }
    }
}

#[test]
fn a_send_with_invalidate_follows_held_data() {
    for wiring in Wiring::both() {
        for model in OrderModel::ALL {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let (mut w, region) = holding(wiring, model, |w| w.own_mr(B, 64, access));
            w.recv(B, 9, &[]);
            w.post(A, &[Wr::send_invalidate(3, &[], region.stag)]);
            assert_eq!(w.completions(B).len(), 1);
            is_placed(&mut w, &region, "Send with Invalidate");
        }
    }
}

#[test]
fn a_window_is_unbound_after_its_data() {
    for wiring in Wiring::both() {
        for kind in [WindowKind::Type1, WindowKind::Type2] {
            for removes in [false, true] {
                let mut w = World::connected(wiring);
                let access = Access::LOCAL_WRITE | Access::MW_BIND;
                let region = w.mr(B, 64, access);
                let window = w.window(B, kind);
                let bind = to(&window, &region, 0..64, Access::REMOTE_WRITE);
                w.post(B, &[Wr::bind(2, &bind)]);
                assert_eq!(w.completions(B), ["2 BindMw"]);
                set_order(&mut w, B, Some(worst(Iwarp)));
                let write = Wr::write(1, &[], &region, 0).inline(&[7; 8]);
                w.post(A, &[write.remote(bind.new, region.iova)]);
                assert_eq!(region.bytes(), [0; 64]);
                if removes {
                    w.remove_window(B, &window);
                } else if kind == WindowKind::Type1 {
                    let nothing = to(&window, &region, 0..0, Access::empty());
                    w.post(B, &[Wr::bind(3, &nothing)]);
                } else {
                    w.post(B, &[Wr::local_invalidate(3, bind.new)]);
                }
                is_placed(&mut w, &region, "window");
            }
        }
    }
}

#[test]
fn a_qp_ends_after_its_data() {
    type End = fn(&mut World);
    let ends: [(&str, End); 6] = [
        ("destroyed", |w| w.destroy(B)),
        ("aborted", |w| w.abort(B)),
        ("peer destroyed", |w| w.destroy(A)),
        ("disconnected", |w| w.disconnect(A)),
        ("rule removed", |w| set_order(w, B, None)),
        ("session ended", |w| {
            let engine = w.qps[B].engine;
            let session = w.apps[w.qps[B].app].session;
            let now = w.now;
            w.engines[engine].detach_session(session, now);
        }),
    ];
    for wiring in Wiring::both() {
        for (what, end) in ends {
            for model in [Iwarp, Rc] {
                if what == "disconnected" && model == Rc {
                    continue;
                }
                let (mut w, region) = holding(wiring, model, any);
                end(&mut w);
                is_placed(&mut w, &region, what);
                let state = &w.engines[w.qps[B].engine].state;
                assert!(state.held.is_unused(), "{what}");
                let has_rule = ["aborted", "peer destroyed", "disconnected"].contains(&what);
                assert_eq!(state.ordered.is_empty(), !has_rule, "{what}");
            }
        }
    }
}

#[test]
fn rights_end_after_held_data() {
    for wiring in Wiring::both() {
        for model in [Rc, RcRelaxed] {
            let (mut w, region) = holding(wiring, model, any);
            w.change(B, QpChange::Rights(Access::REMOTE_READ));
            is_placed(&mut w, &region, "rights");
            let (mut w, region) = holding(wiring, model, any);
            w.unlink(B);
            is_placed(&mut w, &region, "stream");
        }
    }
}

#[test]
fn an_empty_read_is_a_barrier_on_iwarp() {
    for wiring in Wiring::both() {
        for model in OrderModel::ALL {
            let (mut w, region) = holding(wiring, model, any);
            w.post(A, &[Wr::read(2, region.sge(0..0), &region, 0)]);
            assert_eq!(w.completions(A), ["2 RdmaRead"]);
            assert_eq!(region.bytes()[0] == 7, model == Iwarp, "{model:?}");
        }
    }
}

#[test]
fn acknowledgements_make_nothing_visible() {
    for wiring in Wiring::both() {
        let mut w = rc::linked(wiring);
        let region = any(&mut w);
        set_order(&mut w, B, Some(worst(Iwarp)));
        w.post(A, &[Wr::write(1, &[], &region, 0).inline(&[7; 8])]);
        assert_eq!(w.completions(A), ["1 RdmaWrite"]);
        assert_eq!(region.bytes(), [0; 64], "{wiring:?}");
    }
}

#[test]
fn an_unfinished_response_is_out_of_order() {
    for model in OrderModel::ALL {
        let (mut w, mut raw) = World::raw();
        let sink = w.any_mr(A, 64);
        let source = w.any_mr(A, 64);
        set_order(&mut w, A, Some(worst(model)));
        w.post(A, &[Wr::read(1, sink.all(), &source, 0)]);
        raw.segments(&mut w);
        raw.response(&mut w, sink.stag, sink.iova, &[7; 32], false);
        assert_eq!(sink.bytes(), [0; 64], "{model:?}");
        w.advance(HOLD / 2);
        let found = sink.bytes();
        match model {
            Rc => assert_eq!(found, [0; 64]),
            Iwarp | RcRelaxed => assert_eq!((found[0], found[24]), (0, 7)),
        }
        assert_eq!(w.completions(A), [""; 0]);
        raw.response(&mut w, sink.stag, sink.iova + 32, &[7; 32], true);
        assert_eq!(w.completions(A), ["1 RdmaRead 64"]);
        assert_eq!(sink.bytes(), [7; 64], "{model:?}");
    }
}

/// Bytes of a Send are placed when they arrive, in some models before an earlier Write.
#[test]
fn bytes_of_a_send_follow_a_held_write() {
    for model in OrderModel::ALL {
        let (mut w, mut raw) = World::raw();
        let region = w.any_mr(A, 64);
        let sink = w.any_mr(A, 64);
        w.recv(A, 1, &[sink.all()]);
        set_order(&mut w, A, Some(worst(model)));
        raw.write(&mut w, region.stag, region.iova, &[7; 8]);
        assert_eq!(region.bytes()[..8], [0; 8], "{model:?}");
        let send = raw.untagged(Opcode::Send, 0, 1, 0, false);
        raw.segment(&mut w, send, &[5; 32]);
        let placed = if model == Rc { [7; 8] } else { [0; 8] };
        assert_eq!(region.bytes()[..8], placed, "{model:?}");
        assert_eq!(sink.bytes()[..32], [5; 32], "{model:?}");
        let end = raw.untagged(Opcode::Send, 0, 1, 32, true);
        raw.segment(&mut w, end, &[5; 32]);
        assert_eq!(w.completions(A), ["1 Receive 64"]);
        assert_eq!(region.bytes()[..8], [7; 8], "{model:?}");
    }
}

#[test]
fn a_session_holds_a_limited_amount() {
    let mut w = World::connected(Wiring::tcp());
    let limits = ChargeLimits { device: 1 << 20, session: 100 };
    let options = EngineOptions { unsent: limits, ..super::world::options(0) };
    w.command(B, |_| EngineCommand::SetOptions(options));
    let region = w.any_mr(B, 512);
    let source = w.any_mr(A, 512);
    source.fill(7);
    set_order(&mut w, B, Some(worst(Rc)));
    w.post(A, &[Wr::write(1, &[source.sge(0..96)], &region, 0)]);
    assert_eq!(region.bytes(), [0; 512]);
    assert_eq!(w.engines[w.qps[B].engine].state.held.used(), 96);
    w.post(A, &[Wr::write(2, &[source.sge(0..96)], &region, 96)]);
    assert_eq!(region.bytes()[..192], [7; 192], "all is placed instead");
    assert!(w.engines[w.qps[B].engine].state.held.is_unused());
    assert_eq!(w.events(B), [""; 0], "no stream ends");
}

#[test]
fn long_messages_arrive_whole_under_any_rule() {
    for wiring in Wiring::both() {
        for model in OrderModel::ALL {
            for kind in [MemoryKind::Shared, MemoryKind::Attached, MemoryKind::ThroughCopier] {
                let mut w = connected(wiring, model);
                let source = w.any_mr(A, 300_000);
                w.kind = kind;
                let sink = w.any_mr(B, 300_000);
                let bytes = source.pattern(3);
                for seed in 0..4 {
                    let order = Order::Random { seed, hold: HOLD };
                    set_order(&mut w, B, Some(rule(order, model)));
                    sink.fill(0);
                    w.recv(B, 7, &[]);
                    let write = Wr::write(1, &[source.sge(0..299_999)], &sink, 1);
                    w.post(A, &[write.immediate(1)]);
                    assert_eq!(w.completions(B).len(), 1);
                    assert_eq!(sink.bytes()[1..], bytes[..299_999], "{wiring:?}, {model:?}");
                    w.completions(A);
                }
            }
        }
    }
}

#[test]
fn reads_are_exact_if_nothing_changes() {
    for wiring in Wiring::both() {
        for model in OrderModel::ALL {
            let mut w = connected(wiring, model);
            let sink = w.any_mr(A, 100_000);
            let source = w.any_mr(B, 100_000);
            let bytes = source.pattern(5);
            for end in [&A, &B] {
                set_order(&mut w, *end, Some(worst(model)));
            }
            for len in [1, 7, 64, 129, 5000, 100_000] {
                sink.fill(0);
                let reads = [
                    Wr::read(1, sink.sge(0..len), &source, 0),
                    Wr::read(2, sink.sge(0..len), &source, 0),
                ];
                w.post(A, &reads);
                w.advance(HOLD * 2);
                assert_eq!(w.completions(A).len(), 2, "{wiring:?}, {model:?}, {len}");
                assert_eq!(sink.bytes()[..len], bytes[..len], "{wiring:?}, {model:?}, {len}");
            }
        }
    }
}

/// Connects two QPs of one app with two of another on the same host.
fn two_pairs() -> (World, [[usize; 2]; 2]) {
    let mut w = World::new(&[1]);
    let apps = [w.app(0), w.app(0)];
    let pairs = [(); 2].map(|()| {
        let pair = apps.map(|app| {
            let cq = w.cq(app, 64);
            w.qp(app, cq, cq, QpShape::default())
        });
        w.connect(pair[0], pair[1], Wiring::direct());
        pair
    });
    w.settle();
    (w, pairs)
}

#[test]
fn another_qp_invalidates_after_held_data() {
    let (mut w, [[near, far], [_, other]]) = two_pairs();
    let region = w.any_mr(far, 64);
    set_order(&mut w, far, Some(worst(Iwarp)));
    w.post(near, &[Wr::write(1, &[], &region, 0).inline(&[7; 8])]);
    assert_eq!(region.bytes(), [0; 64]);
    w.post(other, &[Wr::local_invalidate(2, region.stag)]);
    is_placed(&mut w, &region, "invalidation");
}

#[test]
fn early_bytes_end_with_their_stream() {
    let mut w = rc::linked(Wiring::direct());
    let source = w.any_mr(B, 128);
    // Only the Read of the first stream is delayed.
    set_order(&mut w, B, Some(OrderRule { inversions: Some(0..1), ..worst(Rc) }));
    let app = w.qps[A].app;
    let cq = w.cq(app, 64);
    let next = w.qp(app, cq, cq, rc::kept(QpShape::default()));
    rc::wire(&mut w, next);
    let sink = w.any_mr(A, 128);
    w.post(A, &[Wr::read(1, sink.all(), &source, 0)]);
    w.unlink(A);
    w.link([next, B], Wiring::direct(), rc::LIMITS);
    source.fill(7);
    w.post(next, &[Wr::read(1, sink.all(), &source, 0)]);
    assert_eq!(sink.bytes(), [7; 128]);
}

#[test]
fn atomics_of_two_qps_are_never_lost() {
    for model in [Iwarp, Rc] {
        let (mut w, ends) = two_pairs();
        w.kind = MemoryKind::Attached;
        let word = w.any_mr(ends[0][1], 8);
        let result = w.any_mr(ends[0][0], 8);
        for [_, far] in &ends {
            set_order(&mut w, *far, Some(worst(model)));
        }
        for _ in 0..5 {
            for [near, _] in &ends {
                w.post(*near, &[Wr::fetch_add(1, 1, result.all(), &word, 0)]);
            }
            w.advance(HOLD * 2);
        }
        assert_eq!(word.bytes(), 10u64.to_ne_bytes(), "{model:?}");
    }
}
