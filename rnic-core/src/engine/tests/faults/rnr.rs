//! Fault rules that delay a Send although a receive is posted (RNR NAK).

use std::time::Duration;

use super::super::rc::{LIMITS, kept, linked, ms, unlinked_of};
use super::super::requests::Wr;
use super::super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use super::{SENDING, counts, set, set_one};
use rnic_abi::abi::control;

/// RNR timer of code 0.
const TIMER: Duration = Duration::from_micros(655_360);

/// The Send arrives half a timer before the peer's last retry, which is after `times` timers.
#[test]
fn a_send_arrives_after_its_rnr_naks() {
    for wiring in Wiring::both() {
        for times in [1, 3] {
            let mut w = linked(wiring);
            let rule = set_one(&mut w, B, &format!("do=rnr times={times} nth=1"));
            let b = w.any_mr(B, 8);
            for n in 10..13 {
                w.recv(B, n, &[b.all()]);
            }
            let inline = |n, text: &[u8]| Wr::send(n, &[]).inline(text);
            w.post(A, &[inline(1, b"held"), inline(2, b"after")]);
            let half = TIMER / 2;
            w.advance(TIMER * times - half - ms(1));
            assert_eq!((w.completions(B), w.completions(A)), (vec![], vec![]), "{wiring:?}");
            w.advance(ms(1));
            assert_eq!(w.completions(B), ["10 Receive 4", "11 Receive 5"], "{wiring:?} {times}");
            assert_eq!(w.completions(A), ["1 Send", "2 Send"], "{wiring:?} {times}");
            // The next Send is not held back.
            w.post(A, &[Wr::send(3, &[])]);
            assert_eq!(w.completions(B), ["12 Receive"], "{wiring:?}");
            assert_eq!(counts(&rule), (3, 1), "{wiring:?}");
            assert_eq!(w.diagnosis(B).rule, "injected by fault rnr");
        }
    }
}

#[test]
fn each_selected_send_is_held_once() {
    for kind in [MemoryKind::Shared, MemoryKind::ThroughCopier] {
        for wiring in Wiring::both() {
            let mut w = linked(wiring);
            w.kind = kind;
            let a = w.any_mr(A, 200_000);
            let b = w.any_mr(B, 200_000);
            let bytes = a.pattern(4);
            let rule = set_one(&mut w, B, "do=rnr");
            for n in 0..3 {
                w.recv(B, n, &[b.all()]);
                w.post(A, &[Wr::send(n, &[a.all()])]);
                assert_eq!(w.completions(B), [""; 0], "{wiring:?} {kind:?}");
                w.advance(TIMER);
                assert_eq!(w.completions(B), [format!("{n} Receive 200000")], "{kind:?}");
                assert_eq!(w.completions(A), [format!("{n} Send")], "{wiring:?} {kind:?}");
                assert_eq!(counts(&rule), (n + 1, n + 1), "{wiring:?} {kind:?}");
            }
            assert_eq!(b.bytes(), bytes);
        }
    }
}

/// The Send that a rule has released still waits like any other.
#[test]
fn a_released_send_may_lack_a_receive() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let rule = set_one(&mut w, B, "do=rnr");
        w.post(A, &[Wr::send(1, &[])]);
        w.advance(TIMER * 2);
        w.recv(B, 10, &[]);
        w.settle();
        assert_eq!(w.completions(B), ["10 Receive"], "{wiring:?}");
        assert_eq!(w.completions(A), ["1 Send"], "{wiring:?}");
        assert_eq!(counts(&rule), (1, 1), "{wiring:?}");
    }
}

#[test]
fn too_few_rnr_retries_fail_the_send() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        w.move_to_rts(A, control::Sending { rnr_retry: 2, ..SENDING });
        set(&mut w, B, "do=rnr times=3");
        w.recv(B, 10, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        w.advance(TIMER * 2 - ms(1));
        assert_eq!(w.completions(A), [""; 0], "{wiring:?}");
        w.advance(ms(2));
        assert_eq!(w.completions(A), ["1 Send ReceiverNotReady"], "{wiring:?}");
        w.advance(TIMER * 2);
        assert!(!w.completions(B).contains(&"10 Receive".to_owned()), "{wiring:?}");
    }
}

#[test]
fn a_send_to_an_srq_is_held_back() {
    for wiring in Wiring::both() {
        let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
        let a = w.app(0);
        let b = w.app(usize::from(!wiring.direct));
        let srq = w.srq(b, 8, 0);
        let shape = kept(QpShape::default());
        let cqs = [w.cq(a, 16), w.cq(b, 16)];
        w.qp(a, cqs[0], cqs[0], shape);
        w.qp(b, cqs[1], cqs[1], QpShape { srq: Some(srq), ..shape });
        super::super::rc::wire(&mut w, A);
        super::super::rc::wire(&mut w, B);
        w.link([A, B], wiring, LIMITS);
        w.srq_recv(b, srq, 10..12);
        set(&mut w, B, "do=rnr nth=1");
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        assert_eq!(w.completions(B), [""; 0], "{wiring:?}");
        w.advance(TIMER);
        assert_eq!(w.completions(B), ["10 Receive", "11 Receive"], "{wiring:?}");
        assert_eq!(w.completions(A), ["1 Send", "2 Send"], "{wiring:?}");
    }
}

/// A QP without RNR NAKs: iWARP and UC.
#[test]
fn other_qps_have_no_rnr_naks() {
    for wiring in Wiring::both() {
        let iwarp = super::iwarp(wiring);
        let mut uc = unlinked_of(wiring, QpShape { unreliable: true, ..QpShape::default() }, 16);
        uc.link([A, B], wiring, LIMITS);
        for mut w in [iwarp, uc] {
            let rule = set_one(&mut w, B, "do=rnr");
            w.recv(B, 10, &[]);
            w.post(A, &[Wr::send(1, &[])]);
            assert_eq!(w.completions(B), ["10 Receive"], "{wiring:?}");
            assert_eq!(counts(&rule), (0, 0), "{wiring:?}");
        }
    }
}

#[test]
fn a_stream_may_end_while_a_send_is_held_back() {
    for wiring in Wiring::both() {
        for end in [A, B] {
            let mut w = linked(wiring);
            set(&mut w, B, "do=rnr nth=1");
            w.recv(B, 10, &[]);
            w.post(A, &[Wr::send(1, &[])]);
            w.unlink(end);
            w.advance(TIMER * 2);
            assert_eq!(w.completions(A), ["1 Send TransportRetryExceeded"], "{wiring:?}");
            assert_eq!(w.completions(B), [""; 0], "{wiring:?}");
            w.destroy(B);
        }
    }
}

/// The delayed Send ended with its stream. The first Send of the next stream counts.
#[test]
fn a_new_stream_has_no_released_send() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let rule = set_one(&mut w, B, "do=rnr");
        w.post(A, &[Wr::send(1, &[])]);
        w.advance(TIMER);
        assert_eq!(counts(&rule), (1, 1), "{wiring:?}");
        // The released Send still lacks a receive when the program of A ends.
        w.destroy(A);
        let end = &w.qps[A];
        let (app, send_cq, recv_cq) = (end.app, end.send_cq, end.recv_cq);
        let c = w.qp(app, send_cq, recv_cq, kept(QpShape::default()));
        super::super::rc::wire(&mut w, c);
        w.link([c, B], wiring, LIMITS);
        w.recv(B, 10, &[]);
        w.post(c, &[Wr::send(2, &[])]);
        assert_eq!(w.completions(B), [""; 0], "{wiring:?}");
        w.advance(TIMER);
        assert_eq!(w.completions(B), ["10 Receive"], "{wiring:?}");
        assert_eq!(counts(&rule), (2, 2), "{wiring:?}");
    }
}
