//! RoCE QPs that their program moves to Error directly after it has posted requests.

use super::rc::{LIMITS, kept, linked, ms, unlinked_of};
use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use rnic_abi::types::QpState;

fn unlinked(unreliable: bool) -> World {
    unlinked_of(Wiring::tcp(), kept(QpShape { unreliable, ..QpShape::default() }), 128)
}

/// Posts receives at B, and Sends at A whose doorbell the engine has not seen.
fn post(w: &mut World, count: u64, len: usize) {
    let a = w.any_mr(A, len);
    let b = w.any_mr(B, len);
    receive(w, count, &b);
    let sends: Vec<_> = (0..count).map(|n| Wr::send(n, &[a.all()])).collect();
    w.push(A, &sends);
}

fn receive(w: &mut World, count: u64, into: &Mr) {
    for n in 0..count {
        w.recv(B, n, &[into.all()]);
    }
}

/// Asserts that A is in Error, that its program has been told so once, that its requests are
/// completed, and that B has received this number of messages.
fn ends(w: &mut World, received: usize, posted: usize) {
    assert_eq!(w.state(A), QpState::Error);
    let id = w.qps[A].id;
    assert_eq!(std::mem::take(&mut w.in_error), [id]);
    let sent = w.completions(A);
    assert_eq!(sent.len(), posted, "{sent:?}");
    let done = w.completions(B);
    assert_eq!(done.len(), received, "{sent:?} {done:?}");
}

fn still_works(w: &World) {
    assert_eq!((w.state(A), w.in_error.len()), (QpState::Rts, 0));
}

#[test]
fn posted_sends_arrive_before_error() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        post(&mut w, 3, 64);
        w.move_to_error(A, false);
        ends(&mut w, 3, 3);
    }
}

#[test]
fn sends_of_several_turns_arrive_before_error() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        post(&mut w, 12, 60_000);
        w.move_to_error(A, false);
        ends(&mut w, 12, 12);
    }
}

#[test]
fn posted_sends_wait_for_a_stream() {
    for unreliable in [false, true] {
        for order in [[A, B], [B, A]] {
            let mut w = unlinked(unreliable);
            post(&mut w, 3, 64);
            w.move_to_error(A, true);
            w.advance(ms(400));
            still_works(&w);
            w.link(order, Wiring::tcp(), LIMITS);
            ends(&mut w, 3, 3);
        }
    }
}

#[test]
fn wait_for_a_stream_is_limited() {
    let mut w = unlinked(false);
    post(&mut w, 3, 64);
    w.move_to_error(A, true);
    w.advance(ms(499));
    still_works(&w);
    w.advance(ms(1));
    ends(&mut w, 0, 3);
}

#[test]
fn error_waits_for_no_unexpected_stream() {
    for (expects_stream, posted) in [(false, 3), (true, 0)] {
        let mut w = unlinked(false);
        post(&mut w, posted, 64);
        w.move_to_error(A, expects_stream);
        ends(&mut w, 0, posted as usize);
    }
}

#[test]
fn error_waits_for_no_room_in_the_socket() {
    let mut w = linked(Wiring::tcp());
    w.links[0].pipes[0].window = 0;
    post(&mut w, 3, 64);
    w.move_to_error(A, false);
    ends(&mut w, 0, 3);
}

#[test]
fn error_waits_for_no_receive() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        w.push(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        w.move_to_error(A, false);
        ends(&mut w, 0, 2);
    }
}

#[test]
fn error_waits_for_the_copier() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        w.kind = MemoryKind::ThroughCopier;
        let a = w.any_mr(A, 64);
        w.kind = MemoryKind::Shared;
        let b = w.any_mr(B, 64);
        receive(&mut w, 1, &b);
        w.answer_copies = false;
        w.push(A, &[Wr::send(1, &[a.all()])]);
        w.move_to_error(A, false);
        still_works(&w);
        assert!(w.run_copy_job());
        w.settle();
        ends(&mut w, 1, 1);
    }
}

/// A message of the peer does not extend the time.
#[test]
fn wait_for_the_copier_is_limited() {
    let mut w = linked(Wiring::tcp());
    w.kind = MemoryKind::ThroughCopier;
    let a = w.any_mr(A, 64);
    w.answer_copies = false;
    // The first Send finds no receive.
    w.push(A, &[Wr::send(1, &[]), Wr::send(2, &[a.all()])]);
    w.move_to_error(A, false);
    w.advance(ms(400));
    still_works(&w);
    w.recv(B, 1, &[]);
    w.settle();
    still_works(&w);
    w.advance(ms(100));
    assert_eq!(w.in_error, [w.qps[A].id]);
}

#[test]
fn destruction_ends_the_wait() {
    let mut w = unlinked(false);
    post(&mut w, 1, 64);
    w.move_to_error(A, true);
    still_works(&w);
    w.destroy(A);
    assert_eq!(w.in_error, [w.qps[A].id]);
    // Without a QP, or in Error, there is nothing to wait for.
    w.move_to_error(A, true);
    assert_eq!(w.in_error.len(), 2);
}
