//! UC QPs: which messages are lost, and which are not.

use super::rc::{LIMITS, SENDING, ms, unlinked_of};
use super::requests::Wr;
use super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use rnic_abi::abi::queue::Sge;
use rnic_abi::types::{QpState, Stag};

fn apart(wiring: Wiring) -> World {
    unlinked_of(wiring, QpShape { unreliable: true, ..QpShape::default() }, 128)
}

fn together(wiring: Wiring) -> World {
    let mut w = apart(wiring);
    w.link([A, B], wiring, LIMITS);
    w
}

/// Checks that the QP still works: the next Send arrives.
fn assert_works(w: &mut World) {
    w.recv(B, 100, &[]);
    w.post(A, &[Wr::send(101, &[])]);
    assert_eq!(w.completions(A), ["101 Send"]);
    assert_eq!(w.completions(B), ["100 Receive"]);
    assert_eq!((w.state(A), w.state(B)), (QpState::Rts, QpState::Rts));
}

#[test]
fn only_the_message_without_a_receive_is_lost() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let a = w.any_mr(A, 300_000);
        let b = w.any_mr(B, 300_000);
        let bytes = a.pattern(3);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[a.all()]), Wr::send(3, &[a.sge(0..9)])]);
        assert_eq!(w.completions(A), ["1 Send", "2 Send", "3 Send"], "{wiring:?}");
        w.recv(B, 4, &[b.all()]);
        w.post(A, &[Wr::send(5, &[a.all()])]);
        assert_eq!(w.completions(A), ["5 Send"]);
        assert_eq!(w.completions(B), ["4 Receive 300000"], "{wiring:?}");
        assert_eq!(b.bytes(), bytes);
        assert_works(&mut w);
    }
}

/// The new receive is used for the next message, from its first byte on.
#[test]
fn a_late_receive_gets_the_next_message() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let a = w.any_mr(A, 400_000);
        let b = w.any_mr(B, 400_000);
        w.one_segment_at_a_time();
        w.settle();
        let came = |w: &World| w.qps[B].shared.counters().segments_received;
        let before = came(&w);
        w.push(A, &[Wr::send(1, &[a.all()])]);
        while came(&w) == before {
            w.round();
        }
        assert!(w.completions(A).is_empty(), "{wiring:?}: not all of it was sent yet");
        w.recv(B, 2, &[b.all()]);
        w.settle();
        assert_eq!(w.completions(A), ["1 Send"], "{wiring:?}");
        assert!(w.completions(B).is_empty(), "{wiring:?}");
        let bytes = a.pattern(8);
        w.post(A, &[Wr::send(3, &[a.sge(0..1000)])]);
        assert_eq!(w.completions(B), ["2 Receive 1000"], "{wiring:?}");
        assert_eq!(b.bytes()[..1000], bytes[..1000]);
        assert_eq!(w.completions(A), ["3 Send"]);
        assert_works(&mut w);
    }
}

#[test]
fn a_too_long_message_keeps_its_receive() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let a = w.any_mr(A, 200_000);
        let b = w.any_mr(B, 199_999);
        let bytes = a.pattern(4);
        w.recv(B, 1, &[b.all()]);
        w.post(A, &[Wr::send(2, &[a.all()])]);
        assert_eq!(w.completions(A), ["2 Send"], "{wiring:?}");
        assert!(w.completions(B).is_empty());
        w.post(A, &[Wr::send(3, &[a.sge(1..200_000)])]);
        assert_eq!(w.completions(B), ["1 Receive 199999"], "{wiring:?}");
        assert_eq!((b.bytes(), w.completions(A).len()), (bytes[1..].to_vec(), 1));
        assert_works(&mut w);
    }
}

#[test]
fn a_refused_uc_write_loses_its_immediate_data() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let a = w.any_mr(A, 64);
        let b = w.any_mr(B, 64);
        let bytes = a.pattern(5);
        w.recv(B, 1, &[]);
        let astray = |wr_id| Wr::write(wr_id, &[a.all()], &b, 0).remote(Stag(0xBAD), 0);
        w.post(A, &[astray(2), astray(3).immediate(7)]);
        assert_eq!(w.completions(A), ["2 RdmaWrite", "3 RdmaWrite"], "{wiring:?}");
        assert!(w.completions(B).is_empty(), "{wiring:?}");
        w.post(A, &[Wr::write(4, &[a.sge(0..8)], &b, 0).immediate(9)]);
        assert_eq!(w.completions(B), ["1 Receive 8 immediate 0x9"], "{wiring:?}");
        assert_eq!(b.bytes()[..8], bytes[..8]);
        // Without a receive the data arrive, but no completion appears.
        w.post(A, &[Wr::write(5, &[a.all()], &b, 0).immediate(9)]);
        assert_eq!(w.completions(A), ["4 RdmaWrite", "5 RdmaWrite"]);
        assert_eq!(b.bytes(), bytes);
        assert_works(&mut w);
    }
}

#[test]
fn uc_waits_only_briefly_for_a_stream() {
    for wiring in Wiring::both() {
        let mut w = apart(wiring);
        let posted: Vec<Wr> = (0..10).map(|n| Wr::send(n, &[])).collect();
        w.post(A, &posted);
        w.advance(ms(900));
        assert!(w.completions(A).is_empty(), "{wiring:?}");
        w.advance(ms(200));
        assert_eq!(w.completions(A).len(), 10, "{wiring:?}");
        w.link([A, B], wiring, LIMITS);
        assert_works(&mut w);
    }
}

#[test]
fn requests_continue_on_a_new_stream() {
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
fn uc_refuses_requests_with_responses() {
    for wiring in Wiring::both() {
        for n in 0..3 {
            let mut w = together(wiring);
            let a = w.any_mr(A, 64);
            let b = w.any_mr(B, 64);
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

/// State SQE (IBTA specification, volume 1, section 10.3.1.6).
#[test]
fn a_failed_request_stops_sending_alone() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let a = w.any_mr(A, 64);
        let b = w.any_mr(B, 64);
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
        // Its peer sends on the same stream.
        w.recv(A, 7, &[a.all()]);
        w.post(B, &[Wr::send(8, &[b.all()])]);
        assert_eq!(w.completions(A), ["7 Receive 64"], "{wiring:?}");
        assert_eq!((a.bytes(), w.completions(B).len()), (bytes, 1), "{wiring:?}");
        assert!(w.unlinked.is_empty(), "{wiring:?}");
        w.move_to_rts(A, SENDING);
        assert_works(&mut w);
        // Once more, and then to Error.
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

/// Even if the completion queue has few free slots.
#[test]
fn requests_posted_in_sqe_are_flushed() {
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

/// Requests before the failed one wait for the socket until the stream is lost.
#[test]
fn a_stream_loss_flushes_waiting_requests() {
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

/// A later message never continues a truncated one.
#[test]
fn a_message_cut_short_ends_its_stream() {
    for wiring in Wiring::both() {
        let mut w = together(wiring);
        let a = w.any_mr(A, 400_000);
        let b = w.any_mr(B, 400_000);
        let next = w.any_mr(A, 1000);
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
        assert_works(&mut w);
    }
}

#[test]
fn a_copier_writes_a_uc_message() {
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
        assert_works(&mut w);
    }
}
