//! Fault rules for completions: delay, loss, order and CQ slots.

use std::time::Duration;

use super::super::requests::Wr;
use super::super::world::{A, B, World};
use super::{counts, pairs, set, set_one};
use crate::engine::EngineCommand;
use rnic_abi::types::QpState;

const HOLD: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// Returns the numbers of unread and reserved entries of a QP's CQ.
fn usage(w: &World, qp: usize) -> (u32, u32) {
    let end = &w.qps[qp];
    let (unread, reserved, _) = w.apps[end.app].cqs[end.send_cq].cq.usage();
    (unread, reserved)
}

fn send(w: &mut World, n: u64) {
    w.recv(B, n, &[]);
    w.post(A, &[Wr::send(n, &[])]);
}

#[test]
fn held_completions_keep_their_order() {
    for (mut w, which) in pairs() {
        let rule = set_one(&mut w, A, "do=hold-completion by=1s nth=2");
        for n in 1..=3 {
            send(&mut w, n);
        }
        assert_eq!(w.completions(A), ["1 Send"], "{which}");
        assert_eq!(w.completions(B).len(), 3, "{which}: the messages arrive");
        w.advance(HOLD - MS);
        assert_eq!(w.completions(A), [""; 0], "{which}");
        w.advance(MS);
        assert_eq!(w.completions(A), ["2 Send", "3 Send"], "{which}");
        send(&mut w, 4);
        assert_eq!(w.completions(A), ["4 Send"], "{which}");
        assert_eq!(counts(&rule), (4, 1), "{which}");
        assert!(w.next_timeout().is_none(), "{which}");
        assert_eq!(usage(&w, A).1, 0, "{which}");
    }
}

/// A later, shorter hold does not overtake.
#[test]
fn each_held_completion_has_its_time() {
    for (mut w, which) in pairs() {
        set(
            &mut w,
            A,
            "do=hold-completion by=1s nth=1; do=hold-completion by=10ms nth=1; \
             do=hold-completion by=3s nth=1",
        );
        for n in 1..=4 {
            send(&mut w, n);
        }
        w.advance(HOLD);
        assert_eq!(w.completions(A), ["1 Send", "2 Send"], "{which}");
        w.advance(HOLD * 2);
        assert_eq!(w.completions(A), ["3 Send", "4 Send"], "{which}");
    }
}

#[test]
fn a_full_batch_is_published_at_once() {
    for (mut w, which) in pairs() {
        set(&mut w, A, "do=hold-completion by=1s batch=3");
        for n in 1..=2 {
            send(&mut w, n);
        }
        assert_eq!(w.completions(A), [""; 0], "{which}");
        send(&mut w, 3);
        assert_eq!(w.completions(A), ["1 Send", "2 Send", "3 Send"], "{which}");
        send(&mut w, 4);
        w.advance(HOLD - MS);
        assert_eq!(w.completions(A), [""; 0], "{which}");
        w.advance(MS);
        assert_eq!(w.completions(A), ["4 Send"], "{which}: the time has passed");
        assert_eq!(usage(&w, A), (0, 0), "{which}");
    }
}

#[test]
fn held_completions_come_one_at_a_time() {
    for (mut w, which) in pairs() {
        set(&mut w, A, "do=hold-completion gap=1s");
        for n in 1..=3 {
            send(&mut w, n);
        }
        for n in 1..=3 {
            w.advance(HOLD - MS);
            assert_eq!(w.completions(A), [""; 0], "{which}");
            w.advance(MS);
            assert_eq!(w.completions(A), [format!("{n} Send")], "{which}");
        }
    }
}

#[test]
fn only_flushed_requests_are_held() {
    for (mut w, which) in pairs() {
        set(&mut w, A, "do=hold-completion by=1s flushed=true");
        w.recv(A, 20, &[]);
        send(&mut w, 1);
        assert_eq!(w.completions(A), ["1 Send"], "{which}");
        w.abort(A);
        w.post(A, &[Wr::send(2, &[])]);
        assert_eq!(w.completions(A), [""; 0], "{which}");
        w.advance(HOLD);
        assert_eq!(w.completions(A).len(), 2, "{which}");
        assert_eq!(usage(&w, A), (0, 0), "{which}");
    }
}

#[test]
fn a_lost_flush_returns_its_slot() {
    for (mut w, which) in pairs() {
        let rule = set_one(&mut w, A, "do=lose-completion flushed=true");
        for n in 20..23 {
            w.recv(A, n, &[]);
        }
        w.abort(A);
        w.post(A, &[Wr::send(2, &[])]);
        assert_eq!(w.completions(A), [""; 0], "{which}");
        assert_eq!(usage(&w, A), (0, 0), "{which}");
        assert_eq!(counts(&rule), (4, 4), "{which}");
    }
}

#[test]
fn receives_are_held_too() {
    for (mut w, which) in pairs() {
        set(&mut w, B, "do=hold-completion by=1s opcode=recv nth=1");
        let a = w.any_mr(A, 8);
        w.recv(B, 1, &[]);
        w.recv(B, 2, &[]);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        // A send of B completes after the receives.
        w.post(B, &[Wr::write(3, &[], &a, 0)]);
        assert_eq!(w.completions(B), [""; 0], "{which}");
        assert_eq!(w.completions(A), ["1 Send", "2 Send"], "{which}");
        w.advance(HOLD);
        assert_eq!(w.completions(B), ["1 Receive", "2 Receive", "3 RdmaWrite"], "{which}");
        assert_eq!(usage(&w, B), (0, 0), "{which}");
    }
}

/// Completions precede the flush of later requests, as ever.
#[test]
fn a_flush_publishes_held_completions_first() {
    for (mut w, which) in pairs() {
        set(&mut w, A, "do=hold-completion by=1s opcode=send nth=1");
        w.recv(A, 20, &[]);
        send(&mut w, 1);
        w.abort(A);
        w.post(A, &[Wr::send(2, &[])]);
        w.advance(HOLD);
        assert_eq!(w.state(A), QpState::Error, "{which}");
        let done = w.completions(A);
        assert_eq!(done[0], "1 Send", "{which}: {done:?}");
        assert_eq!(done.len(), 3, "{which}: {done:?}");
        assert_eq!(usage(&w, A), (0, 0), "{which}");
    }
}

#[test]
fn clearing_a_rule_publishes_held_completions() {
    for (mut w, which) in pairs() {
        let left = ["", "do=corrupt-crc nth=1000000", "do=hold-completion by=1h opcode=read"];
        for left in left {
            set(&mut w, A, "do=hold-completion by=1h");
            send(&mut w, 1);
            assert_eq!(w.completions(A), [""; 0], "{which}");
            set(&mut w, A, left);
            assert_eq!(w.completions(A), ["1 Send"], "{which} {left:?}");
            send(&mut w, 2);
            assert_eq!(w.completions(A), ["2 Send"], "{which} {left:?}");
        }
        assert!(w.next_timeout().is_none_or(|at| at.since(w.now) < HOLD * 3000), "{which}");
    }
}

#[test]
fn destroying_a_qp_returns_held_slots() {
    for (mut w, which) in pairs() {
        set(&mut w, A, "do=hold-completion by=1h");
        for n in 1..=3 {
            send(&mut w, n);
        }
        assert_eq!(usage(&w, A), (0, 3), "{which}");
        w.destroy(A);
        assert_eq!(usage(&w, A), (0, 0), "{which}");
        w.advance(HOLD * 3600);
        assert_eq!(w.completions(A), [""; 0], "{which}");
        assert!(w.failed_cqs.is_empty(), "{which}");
    }
}

/// The slots of held completions are those of requests in progress: a full CQ delays requests and
/// does not overflow.
#[test]
fn held_sends_do_not_overflow_their_cq() {
    for wiring in super::Wiring::both() {
        let mut w = World::pair_with(wiring, super::QpShape::default(), 4);
        w.events(A);
        set(&mut w, A, "do=hold-completion by=1s");
        for n in 0..8 {
            w.recv(B, n, &[]);
        }
        let sends: Vec<Wr> = (0..8).map(|n| Wr::send(n, &[])).collect();
        w.post(A, &sends);
        let mut done = Vec::new();
        for _ in 0..8 {
            w.completions(B);
            w.advance(HOLD);
            done.extend(w.completions(A));
            w.settle();
        }
        let expected: Vec<_> = (0..8).map(|n| format!("{n} Send")).collect();
        assert_eq!(done, expected, "{wiring:?}");
        assert!(w.failed_cqs.is_empty());
    }
}

/// A held receive completion occupies a CQ slot, so one more completion is an overflow, as without
/// the rule.
#[test]
fn held_receives_count_in_their_cq() {
    for wiring in super::Wiring::both() {
        let mut w = World::pair_with(wiring, super::QpShape::default(), 4);
        set(&mut w, B, "do=hold-completion by=1s");
        for n in 0..5 {
            w.recv(B, n, &[]);
        }
        for n in 0..4 {
            w.post(A, &[Wr::send(n, &[])]);
            w.completions(A);
        }
        assert!(w.failed_cqs.is_empty(), "{wiring:?}");
        w.post(A, &[Wr::send(4, &[])]);
        assert_eq!(w.failed_cqs.len(), 1, "{wiring:?}");
        assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
        w.advance(HOLD);
        w.destroy(B);
    }
}

#[test]
fn a_cq_with_held_completions_may_die() {
    for (mut w, which) in pairs() {
        set(&mut w, A, "do=hold-completion by=1s");
        send(&mut w, 1);
        let end = &w.qps[A];
        let cq = w.apps[end.app].cqs[end.send_cq].cq.clone();
        assert!(cq.kill(), "{which}");
        w.advance(HOLD);
        w.destroy(A);
        assert_eq!(usage(&w, A).1, 0, "{which}");
    }
}

#[test]
fn a_lost_completion_returns_its_slot() {
    for wiring in super::Wiring::both() {
        let mut w = World::pair_with(wiring, super::QpShape::default(), 4);
        w.events(A);
        let lost = set_one(&mut w, A, "do=lose-completion opcode=send");
        let all = set_one(&mut w, B, "do=lose-completion opcode=recv every=2");
        for n in 0..20 {
            send(&mut w, n);
            assert_eq!(w.completions(A), [""; 0], "{wiring:?}");
            assert_eq!(w.completions(B).len(), usize::from(n % 2 == 0), "{wiring:?} {n}");
            assert_eq!([usage(&w, A).0, usage(&w, B).0], [0, 0]);
        }
        assert_eq!((counts(&lost), counts(&all)), ((20, 20), (20, 10)), "{wiring:?}");
        assert_eq!(w.qps[A].shared.counters().sends_completed, 20);
        // Their places in the send queue are free again, too.
        w.command(A, |id| EngineCommand::SetFaults(id, Vec::new()));
        send(&mut w, 20);
        assert_eq!(w.completions(A), ["20 Send"], "{wiring:?}");
        let lost: Vec<_> = w.diagnoses(A).into_iter().filter(|d| d.text.contains("lost")).collect();
        assert_eq!(lost.len(), 20, "{wiring:?}");
        assert!(lost.iter().all(|d| d.rule == "injected by fault lose-completion"), "{lost:?}");
    }
}
