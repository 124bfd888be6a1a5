//! Fault rules for completion events: delayed, lost and spurious events.

use std::time::Duration;

use super::super::requests::Wr;
use super::super::world::{A, B, World};
use super::{assert_injected, counts, pairs, set, set_one};
use rnic_abi::abi::queue::ARM_NEXT;

const HOLD: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn arm(w: &mut World) {
    let end = &w.qps[A];
    let (app, cq) = (end.app, end.send_cq);
    w.apps[app].cqs[cq].consumer.arm(ARM_NEXT);
}

/// Returns the number of events of the first QP's CQ since the last call.
fn events(w: &mut World) -> usize {
    let app = w.qps[A].app;
    std::mem::take(&mut w.apps[app].notified).len()
}

/// Completes a Send of A.
fn send(w: &mut World, n: u64) {
    w.recv(B, n, &[]);
    w.post(A, &[Wr::send(n, &[])]);
    assert_eq!(w.completions(A), [format!("{n} Send")]);
}

#[test]
fn a_held_event_serves_later_completions() {
    for (mut w, which) in pairs() {
        let rule = set_one(&mut w, A, "do=hold-event by=1s");
        arm(&mut w);
        send(&mut w, 1);
        arm(&mut w);
        send(&mut w, 2);
        w.advance(HOLD - MS);
        assert_eq!(events(&mut w), 0, "{which}");
        w.advance(MS);
        assert_eq!(events(&mut w), 1, "{which}");
        assert_eq!(counts(&rule), (1, 1), "{which}");
        assert_injected(&w, A, "hold-event");
        w.advance(HOLD);
        assert_eq!(events(&mut w), 0, "{which}");
    }
}

#[test]
fn clearing_a_rule_sends_held_events() {
    for (mut w, which) in pairs() {
        for left in ["", "do=corrupt-crc nth=1000000"] {
            set(&mut w, A, "do=hold-event by=1h");
            arm(&mut w);
            send(&mut w, 1);
            assert_eq!(events(&mut w), 0, "{which}");
            set(&mut w, A, left);
            assert_eq!(events(&mut w), 1, "{which} {left:?}");
        }
        set(&mut w, A, "do=hold-event by=1h");
        arm(&mut w);
        send(&mut w, 2);
        w.destroy(A);
        assert_eq!(events(&mut w), 1, "{which}: the QP was destroyed");
        assert!(w.next_timeout().is_none_or(|at| at.since(w.now) < HOLD * 3000), "{which}");
    }
}

#[test]
fn an_event_is_lost_and_another_added() {
    for (mut w, which) in pairs() {
        let lost = set_one(&mut w, A, "do=lose-event nth=1");
        for expected in [0, 1] {
            arm(&mut w);
            send(&mut w, 1);
            assert_eq!(events(&mut w), expected, "{which}");
        }
        assert_eq!(counts(&lost), (2, 1), "{which}");
        let added = set_one(&mut w, A, "do=extra-event nth=2");
        for expected in [0, 1, 0] {
            send(&mut w, 1);
            assert_eq!(events(&mut w), expected, "{which}");
        }
        arm(&mut w);
        send(&mut w, 1);
        assert_eq!(events(&mut w), 1, "{which}: its own");
        assert_eq!(counts(&added), (3, 1), "{which}");
    }
}

/// An event of a held completion is sent when the completion is published.
#[test]
fn a_held_completion_has_its_event() {
    for (mut w, which) in pairs() {
        set(&mut w, A, "do=hold-completion by=1s");
        arm(&mut w);
        w.recv(B, 1, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(events(&mut w), 0, "{which}");
        w.advance(HOLD);
        assert_eq!(events(&mut w), 1, "{which}");
    }
}
