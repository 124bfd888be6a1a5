//! Messages that are held until a receive is posted.

use std::time::Duration;

use super::link::Cuts;
use super::requests::{Wr, pattern};
use super::world::{A, B, QpShape, Wiring, World};
use rnic_abi::types::QpState;

const DEADLINE: Duration = Duration::from_secs(10);

/// Connects a pair that holds messages on both ends.
fn pair(wiring: Wiring) -> World {
    let shape = QpShape { rnr_timeout: Some(DEADLINE), ..QpShape::default() };
    let mut w = World::pair_with(wiring, shape, 128);
    w.events(A);
    w.events(B);
    w
}

//= DDP-7.1-4
#[test]
fn a_posted_receive_delivers_a_held_message() {
    for wiring in Wiring::all() {
        let mut w = pair(wiring);
        let into = w.any_mr(B, 64);
        w.post(A, &[Wr::send(1, &[]).inline(b"waits"), Wr::send(2, &[])]);
        assert_eq!((w.completions(B), w.state(B)), (vec![], QpState::Rts));
        w.advance(DEADLINE - Duration::from_millis(1));
        w.recv(B, 10, &[into.all()]);
        w.settle();
        assert_eq!(w.completions(B), ["10 Receive 5"]);
        assert_eq!(into.bytes()[..5], *b"waits");
        // The next message has its own deadline.
        w.advance(DEADLINE - Duration::from_millis(1));
        w.recv(B, 11, &[]);
        w.settle();
        assert_eq!(w.completions(B), ["11 Receive"]);
        assert_eq!(w.completions(A), ["1 Send", "2 Send"]);
        assert_eq!((w.events(A), w.events(B)), (vec![], vec![]));
        assert!(w.next_timeout().is_none());
    }
}

#[test]
fn the_hold_deadline_ends_the_stream() {
    for wiring in Wiring::all() {
        let mut held = pair(wiring);
        let mut plain = World::connected(wiring);
        for w in [&mut held, &mut plain] {
            w.post(A, &[Wr::send(1, &[]).inline(b"nobody")]);
        }
        assert_eq!(held.events(B), [""; 0]);
        held.advance(DEADLINE);
        for end in [A, B] {
            assert_eq!(held.events(end), plain.events(end), "{wiring:?}");
            assert_eq!(held.completions(end), plain.completions(end), "{wiring:?}");
            assert_eq!(held.state(end), QpState::Error);
        }
    }
}

/// The first FPDU that a responder receives may be a Send.
#[test]
fn the_first_message_of_a_stream_may_be_held() {
    let shape = QpShape { rnr_timeout: Some(DEADLINE), ..QpShape::default() };
    let mut w = World::pair_with(Wiring::tcp().with(|o| o.peer_to_peer = false), shape, 128);
    w.post(A, &[Wr::send(1, &[])]);
    assert_eq!((w.events(B), w.completions(B)), (vec!["established 4/4".to_owned()], vec![]));
    w.recv(B, 10, &[]);
    w.settle();
    assert_eq!(w.completions(B), ["10 Receive"]);
}

#[test]
fn a_held_message_blocks_one_direction() {
    for wiring in Wiring::both() {
        let mut w = pair(wiring);
        let to_a = w.any_mr(A, 8);
        let to_b = w.any_mr(B, 8);
        w.post(A, &[Wr::send(1, &[]), Wr::write(2, &[], &to_b, 0).inline(b"after")]);
        assert_eq!(to_b.bytes()[..5], [0; 5]);
        w.post(B, &[Wr::write(3, &[], &to_a, 0).inline(b"other")]);
        assert_eq!(to_a.bytes()[..5], *b"other");
        assert_eq!(w.completions(B), ["3 RdmaWrite"]);
        w.recv(B, 10, &[]);
        w.settle();
        assert_eq!(to_b.bytes()[..5], *b"after");
        assert_eq!(w.completions(B), ["10 Receive"]);
    }
}

#[test]
fn both_directions_may_be_held_at_once() {
    for wiring in Wiring::both() {
        let mut w = pair(wiring);
        w.post(A, &[Wr::send(1, &[])]);
        w.post(B, &[Wr::send(2, &[])]);
        w.recv(A, 10, &[]);
        w.recv(B, 11, &[]);
        w.settle();
        let sorted = |mut found: Vec<String>| {
            found.sort();
            found
        };
        assert_eq!(sorted(w.completions(A)), ["1 Send", "10 Receive"]);
        assert_eq!(sorted(w.completions(B)), ["11 Receive", "2 Send"]);
    }
}

/// Messages of many sizes with random cuts of the stream, and receives one at a time: all arrive
/// complete and in order.
#[test]
fn held_streams_resume_without_loss() {
    for wiring in Wiring::all() {
        for seed in 0..4 {
            let mut w = pair(wiring);
            if !wiring.direct {
                w.links[0].pipes[0].cuts = Cuts::Random(seed * 7 + 1);
            }
            let sizes = [0, 1, 1431, 5000, 70_000, 3, 200_000];
            let from = w.any_mr(A, 200_000);
            let bytes = from.pattern(9);
            let into = w.any_mr(B, 200_000);
            let requests: Vec<Wr> =
                (0..).zip(sizes).map(|(n, len)| Wr::send(n, &[from.sge(0..len)])).collect();
            w.post(A, &requests);
            for (n, len) in (0..).zip(sizes) {
                into.fill(0);
                w.recv(B, n, &[into.sge(0..len)]);
                w.settle();
                let size = if len == 0 { String::new() } else { format!(" {len}") };
                assert_eq!(w.completions(B), [format!("{n} Receive{size}")]);
                assert_eq!(into.bytes()[..len], bytes[..len]);
            }
            assert_eq!(w.completions(A).len(), sizes.len());
        }
    }
}

/// Otherwise peers could fill the daemon's memory.
#[test]
fn at_most_one_segment_is_kept() {
    let mut w = pair(Wiring::tcp());
    let requests: Vec<Wr> =
        (0..30).map(|n| Wr::send(n, &[]).inline(&pattern(64, n as u8))).collect();
    w.links[0].pipes[0].takes = Cuts::None;
    w.post(A, &requests);
    let from = w.any_mr(A, 1 << 20);
    w.post(A, &[Wr::send(40, &[from.all()])]);
    let kept = w.engines[1].kept_bytes();
    assert!(kept > 0 && kept <= crate::mpa::MAX_FPDU, "{kept}");
    assert!(w.links[0].pipes[0].has_unread(), "the rest stays in the socket");
}

#[test]
fn a_connection_end_during_a_hold() {
    // TCP reports a reset even if there are unread bytes.
    for wiring in Wiring::both() {
        let mut w = pair(wiring);
        w.post(A, &[Wr::send(1, &[])]);
        w.abort(A);
        assert_eq!(w.state(B), QpState::Error);
        assert!(w.events(B)[0].starts_with("lost: "));
        assert!(w.next_timeout().is_none());
        w.recv(B, 10, &[]);
    }
    // The peer's program has ended.
    for wiring in Wiring::both() {
        let mut w = pair(wiring);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        w.destroy(A);
        w.advance(DEADLINE);
        assert_eq!(w.state(B), QpState::Error);
    }
}

#[test]
fn a_fin_waits_for_the_held_message() {
    let mut w = pair(Wiring::tcp());
    w.post(A, &[Wr::send(1, &[])]);
    w.disconnect(A);
    assert_eq!(w.events(B), [""; 0]);
    // The owner of B is notified once, and need not react.
    for told in [&["peer closing"][..], &[]] {
        w.peer_closing(B);
        assert_eq!(w.events(B), told);
    }
    w.recv(B, 10, &[]);
    w.recv(B, 11, &[]);
    w.settle();
    assert_eq!(w.completions(B), ["10 Receive", "11 Receive WrFlush"]);
    assert_eq!(w.events(B), ["peer closed"]);
    w.disconnect(B);
    assert_eq!(
        (w.events(A), w.events(B)),
        (vec!["disconnected".into()], vec!["disconnected".into()])
    );
}

#[test]
fn a_local_disconnect_waits_for_a_receive() {
    for wiring in Wiring::both() {
        let mut w = pair(wiring);
        w.post(A, &[Wr::send(1, &[])]);
        w.disconnect(B);
        w.disconnect(A);
        w.recv(B, 10, &[]);
        w.settle();
        assert_eq!(w.completions(B), ["10 Receive"]);
        assert_eq!(w.events(B).last().unwrap(), "disconnected", "{wiring:?}");
        let mut w = pair(wiring);
        w.post(A, &[Wr::send(1, &[])]);
        w.disconnect(B);
        w.advance(DEADLINE);
        assert_eq!([w.state(A), w.state(B)], [QpState::Error, QpState::Error], "{wiring:?}");
    }
}

/// Both programs have finished and post no more receives.
#[test]
fn a_limited_disconnect_during_a_hold() {
    let limit = Duration::from_millis(500);
    for wiring in Wiring::both() {
        let mut w = pair(wiring);
        w.post(A, &[Wr::send(1, &[])]);
        w.post(B, &[Wr::send(2, &[])]);
        w.disconnect_within(B, limit);
        w.advance(limit - Duration::from_millis(1));
        assert_eq!([w.state(A), w.state(B)], [QpState::Rts, QpState::Closing], "{wiring:?}");
        w.advance(Duration::from_millis(1));
        assert_eq!([w.state(A), w.state(B)], [QpState::Error, QpState::Error], "{wiring:?}");
    }
}

#[test]
fn an_abort_releases_held_messages() {
    for wiring in Wiring::both() {
        for destroy in [false, true] {
            let mut w = pair(wiring);
            w.post(A, &[Wr::send(1, &[])]);
            if destroy {
                w.destroy(B)
            } else {
                w.abort(B)
            }
            assert!(w.next_timeout().is_none_or(|at| at < w.now.after(DEADLINE)), "{wiring:?}");
            w.advance(DEADLINE * 2);
            assert_eq!(w.state(A), QpState::Error);
            assert_eq!(w.engines[usize::from(!wiring.direct)].kept_bytes(), 0);
            if !destroy {
                assert_eq!(w.events(B), ["aborted"]);
            }
        }
    }
}

/// On the direct path the peer does not retry until a receive is posted.
#[test]
fn no_engine_spins_during_a_hold() {
    for wiring in Wiring::both() {
        let mut w = pair(wiring);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        for engine in &mut w.engines {
            assert!(!engine.has_work());
            assert!(engine.prepare_sleep());
        }
    }
}

#[test]
fn one_warning_for_a_read_during_a_hold() {
    for wiring in Wiring::both() {
        let mut w = pair(wiring);
        let from = w.any_mr(A, 8);
        let sink = w.any_mr(B, 8);
        w.post(A, &[Wr::send(0, &[])]);
        assert_eq!(w.warnings.len(), 0);
        w.post(B, &[Wr::read(10, sink.all(), &from, 0)]);
        w.advance(DEADLINE);
        assert_eq!(w.warnings.len(), 1, "{wiring:?}");
        assert!(w.warnings[0].contains("Read"), "{:?}", w.warnings);
        assert_eq!(w.completions(B), ["10 RdmaRead WrFlush"]);
    }
    // The Read first. Its response arrives between two messages.
    let mut w = pair(Wiring::tcp());
    let from = w.any_mr(A, 8);
    let sink = w.any_mr(B, 8);
    w.push(B, &[Wr::read(1, sink.all(), &from, 0)]);
    w.round();
    w.push(A, &[Wr::send(2, &[]), Wr::send(3, &[])]);
    w.settle();
    assert_eq!(w.warnings.len(), 1, "{:?}", w.warnings);
    for id in [4, 5] {
        w.recv(B, id, &[]);
        w.settle();
    }
    assert_eq!(w.completions(B), ["4 Receive", "1 RdmaRead 8", "5 Receive"]);
    assert_eq!(w.warnings.len(), 1);
}

#[test]
fn a_resumed_message_has_the_usual_faults() {
    for wiring in Wiring::both() {
        let mut held = pair(wiring);
        let mut plain = World::connected(wiring);
        plain.recv(B, 10, &[]);
        for w in [&mut held, &mut plain] {
            w.post(A, &[Wr::send(1, &[]).inline(b"too long for nothing")]);
        }
        held.recv(B, 10, &[]);
        held.settle();
        for end in [A, B] {
            assert_eq!(held.events(end), plain.events(end), "{wiring:?}");
            assert_eq!(held.completions(end), plain.completions(end), "{wiring:?}");
        }
    }
}

/// For any order of operations, the direct path ends as TCP does when messages are held.
mod differential {
    use proptest::prelude::*;

    use super::*;

    /// Returns the observations of both ends. Sends and receives are separate, because they
    /// complete independently.
    fn run(wiring: Wiring, ops: &[(usize, bool, u8)]) -> Vec<Vec<String>> {
        let mut w = pair(wiring);
        let mut id = 0;
        let mut seen = Vec::new();
        for (end, receive, n) in ops {
            for _ in 0..*n {
                id += 1;
                if *receive {
                    w.recv(*end, id, &[]);
                } else {
                    w.push(*end, &[Wr::send(id, &[])]);
                }
            }
            w.settle();
        }
        // All messages that are still held are released.
        let waiting = |w: &World| w.engines.iter().any(|e| e.poll_timeout().is_some());
        for _ in 0..200 {
            if !waiting(&w) {
                break;
            }
            for end in [A, B] {
                w.recv(end, 1000, &[]);
            }
            w.settle();
            seen.extend([A, B].map(|end| w.completions(end)));
        }
        assert!(!waiting(&w));
        seen.extend([A, B].map(|end| w.completions(end)));
        let all: [Vec<String>; 2] =
            [0, 1].map(|end| seen.iter().skip(end).step_by(2).flatten().cloned().collect());
        let mut found = Vec::new();
        for all in all {
            for receives in [true, false] {
                found.push(
                    all.iter().filter(|c| c.contains("Receive") == receives).cloned().collect(),
                );
            }
        }
        found.push(w.events(A));
        found.push(w.events(B));
        found
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn both_paths_hold_alike(
            ops in proptest::collection::vec((0usize..2, any::<bool>(), 1u8..4), 1..12),
            framing in 1usize..6,
        ) {
            let direct = run(Wiring::direct(), &ops);
            prop_assert_eq!(direct, run(Wiring::all()[framing], &ops));
        }
    }
}
