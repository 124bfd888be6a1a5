//! Queue pairs that are wired by hand and have no acknowledgements: what is lost, and that nothing
//! else is.

use super::requests::Wr;
use super::wired::{LIMITS, SENDING, ms, unlinked_of};
use super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use crate::abi::queue::Sge;
use crate::types::{QpState, Stag};

fn apart(wiring: Wiring) -> World {
    unlinked_of(wiring, QpShape { unreliable: true, ..QpShape::default() }, 128)
}

fn together(wiring: Wiring) -> World {
    let mut w = apart(wiring);
    w.link([A, B], wiring, LIMITS);
    w
}

/// That it still works: the next Send arrives.
fn goes_on(w: &mut World) {
    w.recv(B, 100, &[]);
    w.post(A, &[Wr::send(101, &[])]);
    assert_eq!(w.completions(A), ["101 Send"]);
    assert_eq!(w.completions(B), ["100 Receive"]);
    assert_eq!((w.state(A), w.state(B)), (QpState::Rts, QpState::Rts));
}

#[test]
fn a_message_without_a_receive_is_lost_and_the_next_is_not() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let (a, b) = (w.any_mr(A, 300_000), w.any_mr(B, 300_000));
        let bytes = a.pattern(3);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[a.all()]), Wr::send(3, &[a.sge(0..9)])]);
        assert_eq!(w.completions(A), ["1 Send", "2 Send", "3 Send"], "{wiring:?}");
        w.recv(B, 4, &[b.all()]);
        w.post(A, &[Wr::send(5, &[a.all()])]);
        assert_eq!(w.completions(A), ["5 Send"]);
        assert_eq!(w.completions(B), ["4 Receive 300000"], "{wiring:?}");
        assert_eq!(b.bytes(), bytes);
        goes_on(&mut w);
    }
}

/// Its receive is for the next message, from that one's first byte on.
#[test]
fn a_receive_that_comes_in_the_middle_of_a_lost_message_gets_none_of_it() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let (a, b) = (w.any_mr(A, 400_000), w.any_mr(B, 400_000));
        w.one_segment_at_a_time();
        w.settle();
        let came = |w: &World| w.qps[B].shared.counters().segments_received;
        let before = came(&w);
        w.push(A, &[Wr::send(1, &[a.all()])]);
        while came(&w) == before {
            w.round();
        }
        assert!(w.completions(A).is_empty(), "{wiring:?}: all of it has gone");
        w.recv(B, 2, &[b.all()]);
        w.settle();
        assert_eq!(w.completions(A), ["1 Send"], "{wiring:?}");
        assert!(w.completions(B).is_empty(), "{wiring:?}");
        let bytes = a.pattern(8);
        w.post(A, &[Wr::send(3, &[a.sge(0..1000)])]);
        assert_eq!(w.completions(B), ["2 Receive 1000"], "{wiring:?}");
        assert_eq!(b.bytes()[..1000], bytes[..1000]);
        assert_eq!(w.completions(A), ["3 Send"]);
        goes_on(&mut w);
    }
}

#[test]
fn one_that_is_too_long_is_lost_and_its_receive_is_for_the_next() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let (a, b) = (w.any_mr(A, 200_000), w.any_mr(B, 199_999));
        let bytes = a.pattern(4);
        w.recv(B, 1, &[b.all()]);
        w.post(A, &[Wr::send(2, &[a.all()])]);
        assert_eq!(w.completions(A), ["2 Send"], "{wiring:?}");
        assert!(w.completions(B).is_empty());
        w.post(A, &[Wr::send(3, &[a.sge(1..200_000)])]);
        assert_eq!(w.completions(B), ["1 Receive 199999"], "{wiring:?}");
        assert_eq!((b.bytes(), w.completions(A).len()), (bytes[1..].to_vec(), 1));
        goes_on(&mut w);
    }
}

#[test]
fn a_write_to_what_is_not_its_own_is_lost_with_its_immediate_data() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let (a, b) = (w.any_mr(A, 64), w.any_mr(B, 64));
        let bytes = a.pattern(5);
        w.recv(B, 1, &[]);
        let astray = |wr_id| Wr::write(wr_id, &[a.all()], &b, 0).remote(Stag(0xBAD), 0);
        w.post(A, &[astray(2), astray(3).immediate(7)]);
        assert_eq!(w.completions(A), ["2 RdmaWrite", "3 RdmaWrite"], "{wiring:?}");
        assert!(w.completions(B).is_empty(), "{wiring:?}");
        w.post(A, &[Wr::write(4, &[a.sge(0..8)], &b, 0).immediate(9)]);
        assert_eq!(w.completions(B), ["1 Receive 8 immediate 0x9"], "{wiring:?}");
        assert_eq!(b.bytes()[..8], bytes[..8]);
        // Without a receive the data arrive, and nothing says so.
        w.post(A, &[Wr::write(5, &[a.all()], &b, 0).immediate(9)]);
        assert_eq!(w.completions(A), ["4 RdmaWrite", "5 RdmaWrite"]);
        assert_eq!(b.bytes(), bytes);
        goes_on(&mut w);
    }
}

#[test]
fn nobody_is_waited_for_longer_than_a_moment() {
    for wiring in Wiring::both() {
        let mut w = apart(wiring);
        let posted: Vec<Wr> = (0..10).map(|n| Wr::send(n, &[])).collect();
        w.post(A, &posted);
        w.advance(ms(900));
        assert!(w.completions(A).is_empty(), "{wiring:?}");
        w.advance(ms(200));
        assert_eq!(w.completions(A).len(), 10, "{wiring:?}");
        w.link([A, B], wiring, LIMITS);
        goes_on(&mut w);
    }
}

#[test]
fn what_was_under_way_when_a_stream_ended_is_done_and_the_rest_comes_by_another() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let a = w.any_mr(A, 500_000);
        w.one_segment_at_a_time();
        w.push(A, &[Wr::send(1, &[a.all()]), Wr::send(2, &[])]);
        while w.qps[A].shared.counters().segments_sent == 0 {
            w.round();
        }
        w.unlink(A);
        assert_eq!(w.completions(A), ["1 Send"], "{wiring:?}");
        w.recv(B, 3, &[]);
        w.link([A, B], wiring, LIMITS);
        w.settle();
        assert_eq!(w.completions(A), ["2 Send"], "{wiring:?}");
        assert_eq!(w.completions(B), ["3 Receive"], "{wiring:?}");
    }
}

#[test]
fn what_needs_an_answer_is_refused() {
    for wiring in Wiring::both() {
        for n in 0..3 {
            let mut w = together(wiring);
            let (a, b) = (w.any_mr(A, 64), w.any_mr(B, 64));
            w.recv(B, 1, &[]);
            w.post(
                A,
                &[match n {
                    0 => Wr::read(1, a.all(), &b, 0),
                    1 => Wr::fetch_add(1, 1, a.sge(0..8), &b, 0),
                    _ => Wr::send_invalidate(1, &[], b.stag),
                }],
            );
            let done = w.completions(A);
            assert!(done[0].ends_with("LocalQpOperation"), "{wiring:?} {n}: {done:?}");
            assert_eq!((w.state(A), w.state(B)), (QpState::Sqe, QpState::Rts), "{wiring:?}");
        }
    }
}

/// SQE (IBTA specification, volume 1, section 10.3.1.6).
#[test]
fn a_failed_request_stops_sending_alone() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let (a, b) = (w.any_mr(A, 64), w.any_mr(B, 64));
        let bytes = b.pattern(7);
        w.recv(B, 1, &[]);
        let foreign = Sge { lkey: a.stag.0 ^ 0x100, ..a.all() };
        w.post(A, &[Wr::send(2, &[]), Wr::send(3, &[foreign]), Wr::send(4, &[])]);
        let done = w.completions(A);
        assert_eq!(done, ["2 Send", "3 Send LocalProtection", "4 Send WrFlush"], "{wiring:?}");
        assert_eq!(w.completions(B), ["1 Receive"], "{wiring:?}");
        assert_eq!((w.state(A), w.state(B)), (QpState::Sqe, QpState::Rts), "{wiring:?}");
        w.post(A, &[Wr::send(5, &[]), Wr::write(6, &[a.all()], &b, 0)]);
        assert_eq!(w.completions(A), ["5 Send WrFlush", "6 RdmaWrite WrFlush"], "{wiring:?}");
        // Its peer sends by the same stream.
        w.recv(A, 7, &[a.all()]);
        w.post(B, &[Wr::send(8, &[b.all()])]);
        assert_eq!(w.completions(A), ["7 Receive 64"], "{wiring:?}");
        assert_eq!((a.bytes(), w.completions(B).len()), (bytes, 1), "{wiring:?}");
        assert!(w.unlinked.is_empty(), "{wiring:?}");
        w.move_to_rts(A, SENDING);
        goes_on(&mut w);
        // Once more, and to Error.
        w.recv(A, 9, &[]);
        w.post(A, &[Wr::send(10, &[foreign])]);
        assert_eq!(w.completions(A), ["10 Send LocalProtection"], "{wiring:?}");
        w.abort(A);
        w.settle();
        w.post(A, &[Wr::send(11, &[])]);
        assert_eq!(w.completions(A), ["9 Receive WrFlush", "11 Send WrFlush"], "{wiring:?}");
        assert_eq!((w.state(A), w.state(B)), (QpState::Error, QpState::Rts), "{wiring:?}");
    }
}

/// However little room the completion queue has.
#[test]
fn requests_posted_before_the_step_to_rts_are_flushed() {
    for wiring in Wiring::both() {
        let shape = QpShape { unreliable: true, ..QpShape::default() };
        let mut w = unlinked_of(wiring, shape, 4);
        w.link([A, B], wiring, LIMITS);
        let foreign = Sge { lkey: 0, ..w.any_mr(A, 64).all() };
        w.recv(B, 50, &[]);
        w.post(A, &[Wr::send(0, &[foreign])]);
        let posted: Vec<Wr> = (1..20).map(|n| Wr::send(n, &[])).collect();
        w.post(A, &posted);
        w.move_to_rts(A, SENDING);
        w.post(A, &[Wr::send(20, &[])]);
        assert_eq!(w.state(A), QpState::Rts, "{wiring:?}");
        let mut expected = vec!["0 Send LocalProtection".to_owned()];
        expected.extend((1..20).map(|n| format!("{n} Send WrFlush")));
        expected.push("20 Send".to_owned());
        let mut done = Vec::new();
        while done.len() < expected.len() {
            let some = w.completions(A);
            assert!(!some.is_empty(), "{wiring:?}: {done:?}");
            done.extend(some);
            w.settle();
        }
        assert_eq!(done, expected, "{wiring:?}");
        assert_eq!(w.completions(B), ["50 Receive"], "{wiring:?}");
    }
}

/// Requests before the one that failed wait for the socket until the stream is lost.
#[test]
fn the_loss_of_the_stream_flushes_what_waits_for_it() {
    for wiring in Wiring::both().into_iter().filter(|wiring| !wiring.direct) {
        let mut w = together(wiring);
        let a = w.any_mr(A, 64);
        let foreign = Sge { lkey: a.stag.0 ^ 0x100, ..a.all() };
        w.links[0].pipes[0].window = 0;
        w.post(A, &[Wr::send(1, &[a.all()]), Wr::send(2, &[foreign]), Wr::send(3, &[])]);
        assert_eq!((w.state(A), w.completions(A)), (QpState::Sqe, vec![]));
        w.links[0].pipes[1].reset();
        w.settle();
        assert_eq!(w.completions(A), ["1 Send", "2 Send LocalProtection", "3 Send WrFlush"]);
        assert_eq!(w.state(A), QpState::Sqe);
    }
}

/// A later message never continues one that was cut short.
#[test]
fn a_message_cut_short_ends_its_stream() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let (a, b, next) = (w.any_mr(A, 400_000), w.any_mr(B, 400_000), w.any_mr(A, 1000));
        let bytes = next.pattern(5);
        w.recv(B, 1, &[b.all()]);
        w.one_segment_at_a_time();
        w.settle();
        let came = |w: &World| w.qps[B].shared.counters().segments_received;
        let before = came(&w);
        w.push(A, &[Wr::send(2, &[a.all()]), Wr::send(3, &[])]);
        while came(&w) == before {
            w.round();
        }
        w.revoke(A, a.stag);
        w.settle();
        let done = w.completions(A);
        assert_eq!(done, ["2 Send LocalProtection", "3 Send WrFlush"], "{wiring:?}");
        assert_eq!((w.state(A), w.state(B)), (QpState::Sqe, QpState::Rts), "{wiring:?}");
        assert_eq!(w.unlinked.len(), 2, "{wiring:?}");
        w.move_to_rts(A, SENDING);
        w.link([A, B], wiring, LIMITS);
        w.post(A, &[Wr::send(4, &[next.all()])]);
        assert_eq!(w.completions(B), ["1 Receive 1000"], "{wiring:?}");
        assert_eq!((b.bytes()[..1000].to_vec(), w.completions(A).len()), (bytes, 1));
        goes_on(&mut w);
    }
}

#[test]
fn a_copier_writes_what_is_not_lost() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let a = w.any_mr(A, 100_000);
        w.kind = MemoryKind::ThroughCopier;
        let b = w.any_mr(B, 100_000);
        let bytes = a.pattern(6);
        w.post(A, &[Wr::send(1, &[a.all()])]);
        w.recv(B, 2, &[b.all()]);
        w.post(A, &[Wr::send(3, &[a.all()])]);
        assert_eq!(w.completions(A), ["1 Send", "3 Send"], "{wiring:?}");
        assert_eq!(w.completions(B), ["2 Receive 100000"], "{wiring:?}");
        assert_eq!(b.bytes(), bytes);
        goes_on(&mut w);
    }
}
