//! Missing receives at RC QPs: the sender that waits, the requests that continue, and the request
//! that fails.

use std::time::Duration;

use super::link::Cuts;
use super::rc::{SENDING, linked, ms};
use super::requests::Wr;
use super::world::{A, B, MemoryKind, Wiring};
use rnic_abi::abi::control;
use rnic_abi::types::Stag;

/// Maximum number of bytes kept after a waiting Send, plus the last segment.
const KEPT: usize = 32 * 1024 + 65_536;

/// Returns the engine of B.
fn at_b(wiring: Wiring) -> usize {
    usize::from(!wiring.direct)
}

#[test]
fn only_the_send_without_a_receive_fails() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let a = w.any_mr(A, 64);
        let b = w.any_mr(B, 64);
        let bytes = a.pattern(3);
        w.recv(B, 1, &[]);
        w.post(
            A,
            &[
                Wr::send(1, &[]),
                Wr::write(2, &[a.all()], &b, 0),
                Wr::send(3, &[]),
                Wr::send(4, &[]),
            ],
        );
        assert_eq!(w.completions(A), ["1 Send", "2 RdmaWrite"], "{wiring:?}");
        assert_eq!(b.bytes(), bytes);
        w.advance(ms(3900));
        assert!(w.completions(A).is_empty(), "{wiring:?}");
        w.advance(ms(100));
        assert_eq!(w.completions(A), ["3 Send ReceiverNotReady", "4 Send WrFlush"], "{wiring:?}");
    }
}

#[test]
fn each_waiting_send_has_its_own_timeout() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        w.advance(ms(3000));
        w.recv(B, 1, &[]);
        w.settle();
        assert_eq!(w.completions(A), ["1 Send"], "{wiring:?}");
        w.advance(ms(3000));
        assert!(w.completions(A).is_empty(), "{wiring:?}");
        w.advance(ms(1000));
        assert_eq!(w.completions(A), ["2 Send ReceiverNotReady"], "{wiring:?}");
    }
}

#[test]
fn responses_pass_waiting_sends() {
    for wiring in Wiring::both() {
        for kind in [MemoryKind::Shared, MemoryKind::ThroughCopier] {
            let mut w = linked(wiring);
            let here = w.any_mr(B, 200_000);
            let there = w.any_mr(B, 8);
            w.kind = kind;
            let sink = w.any_mr(A, 200_000);
            let word = w.any_mr(A, 8);
            let bytes = here.pattern(5);
            w.recv(B, 1, &[]);
            // A has no receive before its own requests are complete.
            w.post(B, &[Wr::send(2, &[here.sge(0..100)]), Wr::send(3, &[])]);
            w.post(
                A,
                &[
                    Wr::send(4, &[]),
                    Wr::read(5, sink.all(), &here, 0),
                    Wr::fetch_add(6, 7, word.all(), &there, 0),
                ],
            );
            let done = w.completions(A);
            assert_eq!(done, ["4 Send", "5 RdmaRead 200000", "6 FetchAdd 8"], "{wiring:?}");
            assert_eq!(sink.bytes(), bytes);
            assert_eq!(w.completions(B), ["1 Receive"], "{wiring:?}");
            w.recv(A, 7, &[sink.sge(0..100)]);
            w.recv(A, 8, &[]);
            w.settle();
            assert_eq!(w.completions(A), ["7 Receive 100", "8 Receive"], "{wiring:?}");
            assert_eq!(w.completions(B), ["2 Send", "3 Send"], "{wiring:?}");
        }
    }
}

/// A response may pass in part before the receive is posted. The Writes kept until then are carried
/// out in the middle of it.
#[test]
fn kept_writes_precede_the_rest_of_a_response() {
    for kind in [MemoryKind::Shared, MemoryKind::ThroughCopier] {
        let mut w = linked(Wiring::tcp());
        let here = w.any_mr(B, 200_000);
        let bytes = here.pattern(5);
        w.kind = kind;
        let sink = w.any_mr(A, 200_000);
        let target = w.any_mr(A, 10_000);
        let from = here.sge(0..10_000);
        w.post(B, &[Wr::send(1, &[]), Wr::write(2, &[from], &target, 0)]);
        w.links[0].pipes[1].cuts = Cuts::Every(1000);
        w.push(A, &[Wr::read(3, sink.all(), &here, 0)]);
        while sink.bytes()[..1000] != bytes[..1000] {
            assert!(w.round());
        }
        assert_ne!(sink.bytes(), bytes, "the response is in progress");
        w.recv(A, 4, &[]);
        w.settle();
        assert_eq!(w.completions(A), ["4 Receive", "3 RdmaRead 200000"]);
        assert_eq!(w.completions(B), ["1 Send", "2 RdmaWrite"]);
        assert_eq!(sink.bytes(), bytes);
        assert_eq!(target.bytes(), bytes[..10_000]);
    }
}

#[test]
fn requests_after_a_waiting_send_stay_in_order() {
    for wiring in Wiring::both() {
        for kind in [MemoryKind::Shared, MemoryKind::ThroughCopier] {
            let mut w = linked(wiring);
            let a = w.any_mr(A, 64);
            w.kind = kind;
            let b = w.any_mr(B, 64);
            let bytes = a.pattern(9);
            // Post all requests in one call, before the peer learns that a Send waits.
            w.post(
                A,
                &[
                    Wr::send(1, &[a.sge(0..1)]),
                    Wr::write(2, &[a.all()], &b, 0),
                    Wr::read(3, a.sge(0..32), &b, 32),
                    Wr::send(4, &[a.sge(0..2)]),
                    Wr::send(5, &[]),
                ],
            );
            assert!(w.completions(A).is_empty(), "{wiring:?}");
            assert_ne!(b.bytes(), bytes, "a Write waits as well");
            w.recv(B, 1, &[b.sge(60..64)]);
            w.settle();
            assert_eq!(w.completions(B), ["1 Receive 1"]);
            assert_eq!(b.bytes(), bytes);
            assert_eq!(w.completions(A), ["1 Send", "2 RdmaWrite", "3 RdmaRead 32"], "{wiring:?}");
            w.recv(B, 2, &[b.sge(0..2)]);
            w.recv(B, 3, &[]);
            w.settle();
            assert_eq!(w.completions(B), ["2 Receive 2", "3 Receive"], "{wiring:?}");
            assert_eq!(w.completions(A), ["4 Send", "5 Send"], "{wiring:?}");
        }
    }
}

/// The bytes in flight when the peer is notified are kept. Then the stream stops.
#[test]
fn the_rnr_backlog_is_bounded() {
    let mut w = linked(Wiring::tcp());
    // The notification reaches the peer late.
    w.links[0].pipes[1].latency = 1_000_000;
    let from = w.any_mr(A, 1 << 20);
    let mut requests: Vec<Wr> = (0..10).map(|n| Wr::send(n, &[from.sge(0..10_000)])).collect();
    requests.push(Wr::send(10, &[from.all()]));
    w.links[0].pipes[0].takes = Cuts::None;
    w.push(A, &requests);
    while w.round() {}
    let kept = w.engines[1].kept_bytes();
    assert!((32 * 1024..=KEPT).contains(&kept), "{kept}");
    assert!(w.links[0].pipes[0].has_unread(), "the rest stays in the socket");
    let into = w.any_mr(B, 1 << 20);
    for n in 0..11 {
        w.recv(B, n, &[into.all()]);
    }
    w.advance(ms(100));
    let received = w.completions(B);
    assert_eq!((received.len(), &*received[0]), (11, "0 Receive 10000"));
    assert_eq!(received[10], "10 Receive 1048576");
    assert_eq!(w.completions(A).len(), 11);
    assert_eq!(w.engines[1].kept_bytes(), 0);
}

#[test]
fn a_waiting_send_ends_with_its_qp() {
    for wiring in Wiring::both() {
        for destroys in [false, true] {
            let mut w = linked(wiring);
            let many: Vec<Wr> = (0..5).map(|n| Wr::send(n, &[])).collect();
            w.post(A, &many);
            if destroys {
                w.destroy(A);
            } else {
                w.unlink(A);
            }
            assert_eq!(w.engines[at_b(wiring)].kept_bytes(), 0, "{wiring:?}");
            w.recv(B, 1, &[]);
            w.settle();
            assert!(w.completions(B).is_empty(), "{wiring:?}: the receive is for another stream");
        }
    }
}

/// With unlimited RNR retries, only the silence of the peer ends the wait.
#[test]
fn a_silent_peer_exhausts_the_retries() {
    let mut w = linked(Wiring::tcp());
    w.move_to_rts(A, control::Sending { rnr_retry: 7, ..SENDING });
    w.recv(B, 1, &[]);
    w.links[0].pipes[1].window = 0;
    w.post(A, &[Wr::send(1, &[])]);
    w.advance(Duration::from_secs(29));
    assert_eq!(w.completions(A), [""; 0]);
    w.advance(Duration::from_secs(2));
    assert_eq!(w.completions(A), ["1 Send TransportRetryExceeded"]);
}

#[test]
fn an_rnr_peer_is_not_silent() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        w.move_to_rts(A, control::Sending { rnr_retry: 7, ..SENDING });
        w.move_to_rts(B, control::Sending { rnr_retry: 7, ..SENDING });
        w.post(A, &[Wr::send(1, &[])]);
        w.post(B, &[Wr::send(1, &[])]);
        w.advance(Duration::from_secs(3600));
        for end in [A, B] {
            assert!(w.completions(end).is_empty(), "{wiring:?}");
            w.recv(end, 2, &[]);
        }
        w.settle();
        for end in [A, B] {
            let mut done = w.completions(end);
            done.sort();
            assert_eq!(done, ["1 Send", "2 Receive"], "{wiring:?}");
        }
    }
}

/// An application's empty Write to this address looks like a notice.
#[test]
fn an_rnr_notice_without_a_send_is_ignored() {
    let mut w = linked(Wiring::tcp());
    let to = 0x524e_5201_0000_0000 | 99;
    let a = w.any_mr(A, 8);
    w.post(B, &[Wr::write(1, &[], &a, 0).remote(Stag(0), to)]);
    w.recv(B, 2, &[]);
    w.post(A, &[Wr::send(3, &[])]);
    assert_eq!(w.completions(A), ["3 Send"]);
    assert_eq!(w.completions(B), ["1 RdmaWrite", "2 Receive"]);
}
