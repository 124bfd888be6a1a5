//! Emulated links: delay, jitter, rate and stalls on both paths, and losses of UC and UD.

use std::time::Duration;

use super::datagrams::{KEY, pair as datagram_pair, to};
use super::rc::{LIMITS, unlinked_of};
use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, QpShape, Wiring, World, options};
use crate::engine::charge::ChargeLimits;
use crate::engine::link::emulation::delay_line::WINDOW;
use crate::engine::{Engine, EngineOptions};
use rnic_abi::faults::link::LinkShape;
use rnic_abi::roce::grh;
use rnic_abi::types::{QpState, Time};

const US: Duration = Duration::from_micros(1);
const MS: Duration = Duration::from_millis(1);
const GIGABIT: u64 = 1_000_000_000;

fn delayed(delay: Duration) -> LinkShape {
    LinkShape { delay, ..LinkShape::default() }
}

/// Returns two iWARP QPs with links of this shape.
fn iwarp(wiring: Wiring, shape: &LinkShape) -> World {
    let qp = QpShape { rnr_timeout: Some(Duration::from_secs(3600)), ..QpShape::default() };
    let mut w = World::pair_with(wiring, qp, 128);
    assert_eq!((w.events(A), w.events(B)), (established(), established()));
    for end in [A, B] {
        w.set_link(end, *shape);
    }
    w
}

fn established() -> Vec<String> {
    vec!["established 4/4".to_owned()]
}

/// Returns two RC or UC QPs with links of this shape.
fn roce(wiring: Wiring, shape: &LinkShape, unreliable: bool) -> World {
    let mut w = unlinked_of(wiring, QpShape { unreliable, ..QpShape::default() }, 128);
    // The QP keeps its emulated link when it gets its stream.
    for end in [A, B] {
        w.set_link(end, *shape);
    }
    w.link([A, B], wiring, LIMITS);
    w
}

/// Runs until the QP has completions. Returns them and the time since `from`.
fn wait(w: &mut World, qp: usize, from: Time) -> (Vec<String>, Duration) {
    for _ in 0..100_000 {
        let found = w.completions(qp);
        if !found.is_empty() {
            return (found, w.now.since(from));
        }
        let Some(at) = w.next_timeout() else { break };
        w.advance(at.since(w.now));
    }
    panic!("QP {qp} completes nothing");
}

/// Checks that no memory is charged and no link has a deadline.
fn assert_nothing_held(w: &World) {
    for engine in &w.engines {
        assert!(engine.state.unsent.is_unused() && engine.state.held.is_unused());
        assert_eq!(engine.poll_precise_timeout(), None);
    }
}

fn charged(w: &World) -> usize {
    let of = |engine: &Engine| engine.state.unsent.used() + engine.state.held.used();
    w.engines.iter().map(of).sum()
}

// --- Delay -----------------------------------------------------------------------------------

#[test]
fn a_read_takes_two_delays() {
    for wiring in Wiring::all() {
        let mut w = iwarp(wiring, &delayed(50 * US));
        let a = w.any_mr(A, 300_000);
        let b = w.any_mr(B, 300_000);
        let bytes = b.pattern(1);
        let begun = w.now;
        w.post(A, &[Wr::read(1, a.all(), &b, 0)]);
        assert_eq!(wait(&mut w, A, begun), (vec!["1 RdmaRead 300000".to_owned()], 100 * US));
        assert_eq!(a.bytes(), bytes);
        assert_nothing_held(&w);
    }
}

#[test]
fn a_send_takes_one_delay() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &delayed(50 * US));
        let a = w.any_mr(A, 8);
        let b = w.any_mr(B, 8);
        w.recv(B, 1, &[b.all()]);
        w.post(A, &[Wr::send(2, &[a.all()])]);
        // As over TCP, the request is done when its bytes are accepted.
        assert_eq!(w.completions(A), ["2 Send"]);
        w.advance(50 * US - Duration::from_nanos(1));
        assert!(w.completions(B).is_empty(), "{wiring:?}");
        w.advance(Duration::from_nanos(1));
        assert_eq!(w.completions(B), ["1 Receive 8"], "{wiring:?}");
    }
}

#[test]
fn rc_acknowledgements_are_delayed_too() {
    for wiring in Wiring::both() {
        for ends in [&[A][..], &[B], &[A, B]] {
            let mut w = roce(wiring, &LinkShape::default(), false);
            for end in ends {
                w.set_link(*end, delayed(30 * US));
            }
            let a = w.any_mr(A, 100_000);
            let b = w.any_mr(B, 100_000);
            let bytes = a.pattern(2);
            let begun = w.now;
            w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
            let took = 30 * US * ends.len() as u32;
            assert_eq!(wait(&mut w, A, begun), (vec!["1 RdmaWrite".to_owned()], took), "{ends:?}");
            assert_eq!(b.bytes(), bytes);
        }
    }
}

#[test]
fn delayed_immediate_data_needs_no_buffer() {
    for wiring in Wiring::both() {
        let mut w = roce(wiring, &delayed(US), false);
        let b = w.any_mr(B, 8);
        w.recv(B, 1, &[]);
        w.post(A, &[Wr::write(2, &[], &b, 0).immediate(7)]);
        w.advance(2 * US);
        assert_eq!(w.completions(B), ["1 Receive immediate 0x7"], "{wiring:?}");
        assert_eq!(w.completions(A), ["2 RdmaWrite"], "{wiring:?}");
    }
}

#[test]
fn loopback_is_delayed() {
    let mut w = unlinked_of(Wiring::direct(), QpShape::default(), 128);
    w.link([A, A], Wiring::direct(), LIMITS);
    w.set_link(A, delayed(20 * US));
    let from = w.any_mr(A, 5000);
    let to = w.any_mr(A, 5000);
    let bytes = from.pattern(3);
    let begun = w.now;
    w.post(A, &[Wr::write(1, &[from.all()], &to, 0)]);
    assert_eq!(wait(&mut w, A, begun), (vec!["1 RdmaWrite".to_owned()], 40 * US));
    assert_eq!(to.bytes(), bytes);
    assert_nothing_held(&w);
}

#[test]
fn messages_follow_each_other_within_a_delay() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &delayed(MS));
        let begun = w.now;
        for n in 0..20 {
            w.recv(B, n, &[]);
            w.post(A, &[Wr::send(100 + n, &[])]);
            w.advance(US);
        }
        let (found, took) = wait(&mut w, B, begun);
        assert_eq!((found, took), (vec!["0 Receive".to_owned()], MS), "{wiring:?}");
        w.advance(19 * US);
        assert_eq!(w.completions(B).len(), 19);
    }
}

#[test]
fn jitter_keeps_the_order() {
    for wiring in Wiring::both() {
        let shape = LinkShape { delay: 100 * US, jitter: 50 * US, ..LinkShape::default() };
        let mut w = iwarp(wiring, &shape);
        let mut arrived = Vec::new();
        for n in 0..30 {
            w.recv(B, n, &[]);
        }
        let begun = w.now;
        for n in 0..30 {
            w.post(A, &[Wr::send(n, &[])]);
            w.advance(US);
        }
        while arrived.len() < 30 {
            let (found, took) = wait(&mut w, B, begun);
            arrived.extend(found.into_iter().map(|completion| (completion, took)));
        }
        for (n, (completion, took)) in (0..).zip(&arrived) {
            assert_eq!(completion, &format!("{n} Receive"));
            let posted = US * n;
            let bounds = posted + 100 * US..=posted + 150 * US;
            assert!(bounds.contains(took), "{wiring:?}: {n} took {took:?}");
        }
        let times: Vec<_> = arrived.iter().map(|(_, took)| *took).collect();
        assert!(times.windows(2).any(|pair| pair[1] - pair[0] > 2 * US), "{times:?}");
    }
}

// --- Rate ------------------------------------------------------------------------------------

#[test]
fn the_rate_is_exact() {
    for wiring in Wiring::both() {
        let shape = LinkShape { rate: Some(GIGABIT), delay: 50 * US, ..LinkShape::default() };
        let mut w = iwarp(wiring, &LinkShape::default());
        w.set_link(A, shape);
        let a = w.any_mr(A, 1 << 20);
        let b = w.any_mr(B, 1 << 20);
        let bytes = a.pattern(4);
        w.recv(B, 1, &[]);
        let before = w.links.first().map_or(0, |link| link.pipes[0].sent);
        let begun = w.now;
        w.post(A, &[Wr::write(2, &[a.all()], &b, 0), Wr::send(3, &[])]);
        let (found, took) = wait(&mut w, B, begun);
        assert_eq!(found, ["1 Receive"]);
        assert_eq!(b.bytes(), bytes);
        // A byte takes 8 ns.
        let sent = match w.links.first() {
            Some(link) => link.pipes[0].sent - before,
            // The headers of 18 segments of a Write, and of the Send.
            None => (1 << 20) + 18 * 14 + 18,
        };
        assert_eq!(took, 50 * US + Duration::from_nanos(8 * sent), "{wiring:?}");
    }
}

#[test]
fn a_late_worker_does_not_lower_the_rate() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &LinkShape::default());
        w.set_link(A, LinkShape { rate: Some(GIGABIT), ..LinkShape::default() });
        let a = w.any_mr(A, 1 << 20);
        let b = w.any_mr(B, 1 << 20);
        w.recv(B, 1, &[]);
        let begun = w.now;
        w.post(A, &[Wr::write(2, &[a.all()], &b, 0), Wr::send(3, &[])]);
        let mut found = Vec::new();
        while found.is_empty() {
            // The worker is always late.
            let at = w.next_timeout().expect("the link is busy");
            w.now = at.after(2 * MS);
            for engine in &mut w.engines {
                engine.handle_timeout(w.now);
            }
            w.settle();
            found = w.completions(B);
        }
        let took = w.now.since(begun);
        let exact = Duration::from_nanos(8 << 20);
        assert!(took > exact && took < exact + 3 * MS, "{wiring:?}: {took:?}");
    }
}

#[test]
fn an_idle_link_saves_nothing_up() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &LinkShape::default());
        w.set_link(A, LinkShape { rate: Some(GIGABIT), ..LinkShape::default() });
        let a = w.any_mr(A, 50_000);
        let b = w.any_mr(B, 50_000);
        let send = |w: &mut World| {
            w.recv(B, 1, &[b.all()]);
            let begun = w.now;
            w.post(A, &[Wr::send(2, &[a.all()])]);
            let (found, took) = wait(w, B, begun);
            assert_eq!(found, ["1 Receive 50000"]);
            took
        };
        let first = send(&mut w);
        assert!(first > 400 * US && first < 410 * US, "{wiring:?}: {first:?}");
        w.advance(2 * MS);
        assert_eq!(send(&mut w), first, "{wiring:?}");
    }
}

#[test]
fn qps_share_the_rate_of_a_link() {
    let mut w = World::pair(Wiring::direct());
    let (c, d) = (w.qp(0, 0, 0, QpShape::default()), w.qp(1, 0, 0, QpShape::default()));
    w.connect(c, d, Wiring::direct());
    w.settle();
    let link = w.set_link(A, LinkShape { rate: Some(GIGABIT), ..LinkShape::default() });
    w.command(c, |id| crate::engine::EngineCommand::SetLink(id, Some(link.clone())));
    let a = w.any_mr(A, 500_000);
    let b = w.any_mr(B, 500_000);
    let begun = w.now;
    for (qp, peer) in [(A, B), (c, d)] {
        w.recv(peer, 1, &[]);
        w.push(qp, &[Wr::write(2, &[a.all()], &b, 0), Wr::send(3, &[])]);
    }
    w.settle();
    let receives = |w: &World| {
        [B, d].iter().map(|qp| w.qps[*qp].shared.counters().receives_completed).sum::<u64>()
    };
    while receives(&w) < 2 {
        let at = w.next_timeout().expect("the link is busy");
        w.advance(at.since(w.now));
    }
    let took = w.now.since(begun);
    assert!(took > MS * 8 && took < 8 * MS + 10 * US, "{took:?}");
}

// --- Stalls ----------------------------------------------------------------------------------

#[test]
fn a_stalled_link_resumes() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &delayed(10 * US));
        w.recv(B, 1, &[]);
        w.recv(B, 2, &[]);
        w.post(A, &[Wr::send(3, &[])]);
        w.set_link(A, LinkShape { stall: true, ..LinkShape::default() });
        w.post(A, &[Wr::send(4, &[])]);
        // Data in flight arrive.
        w.advance(Duration::from_secs(100));
        assert_eq!(w.completions(B), ["1 Receive"], "{wiring:?}");
        assert_eq!(w.completions(A), ["3 Send"]);
        w.disconnect(A);
        assert!(w.events(B).is_empty(), "the FIN is stalled too");
        w.unset_link(A);
        assert_eq!(w.completions(B), ["2 Receive"], "{wiring:?}");
        assert_eq!(w.completions(A), ["4 Send"]);
        assert_eq!(w.events(B), ["peer closed"]);
    }
}

#[test]
fn rc_retries_end_on_a_stalled_link() {
    for wiring in Wiring::both() {
        for end in [A, B] {
            let mut w = roce(wiring, &LinkShape::default(), false);
            w.set_link(end, LinkShape { stall: true, ..LinkShape::default() });
            let a = w.any_mr(A, 8);
            let b = w.any_mr(B, 8);
            let begun = w.now;
            w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
            let (found, took) = wait(&mut w, A, begun);
            assert_eq!(found, ["1 RdmaWrite TransportRetryExceeded"], "{wiring:?} {end}");
            // Two times 4.096 us times 2^10. Over TCP, a silent peer has at least 30 s.
            let patient = !wiring.direct && end == B;
            assert_eq!(took, if patient { took } else { 8388608 * Duration::from_nanos(1) });
            assert_eq!(w.state(A), QpState::Error);
            let why = w.diagnoses(A).remove(0).text;
            assert!(patient || why.contains("injected by fault test"), "{why}");
        }
    }
}

// --- Bounds ----------------------------------------------------------------------------------

#[test]
fn bytes_in_flight_are_bounded() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &delayed(MS));
        let a = w.any_mr(A, 500_000);
        let b = w.any_mr(B, 500_000);
        w.post(A, &(0..20).map(|n| Wr::write(n, &[a.all()], &b, 0)).collect::<Vec<_>>());
        let mut found = w.completions(A).len();
        // A unit may exceed the window. TCP also moves due bytes to a separate buffer.
        let most = WINDOW + 256 * 1024;
        assert!((WINDOW..most).contains(&charged(&w)), "{wiring:?}: {}", charged(&w));
        assert_eq!(found, 2, "{wiring:?}");
        let begun = w.now;
        while found < 20 {
            found += wait(&mut w, A, begun).0.len();
            assert!(charged(&w) < 2 * most, "{wiring:?}: {}", charged(&w));
        }
        // 10 MB need 8 to 10 windows.
        let took = w.now.since(begun);
        assert!(took > 7 * MS && took < 11 * MS, "{wiring:?}: {took:?}");
        w.advance(2 * MS);
        assert_nothing_held(&w);
    }
}

#[test]
fn a_session_at_its_limit_waits() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &delayed(MS));
        for engine in &mut w.engines {
            let unsent = ChargeLimits { device: 1 << 30, session: 100_000 };
            set_options(engine, EngineOptions { unsent, ..options(0) });
        }
        let a = w.any_mr(A, 500_000);
        let b = w.any_mr(B, 500_000);
        let bytes = a.pattern(5);
        w.recv(B, 1, &[]);
        let begun = w.now;
        w.post(A, &[Wr::write(2, &[a.all()], &b, 0), Wr::send(3, &[])]);
        assert!(charged(&w) < 300_000, "{wiring:?}: {}", charged(&w));
        let (found, took) = wait(&mut w, B, begun);
        assert_eq!((found, b.bytes() == bytes), (vec!["1 Receive".to_owned()], true));
        assert!(took >= 3 * MS, "{wiring:?}: {took:?}");
        assert!(w.events(A).is_empty() && w.events(B).is_empty(), "no stream ends");
    }
}

fn set_options(engine: &mut Engine, options: EngineOptions) {
    engine.handle_command(crate::engine::EngineCommand::SetOptions(options), Time(0));
}

// --- Revocation and ends ---------------------------------------------------------------------

#[test]
fn memory_deregistered_in_flight_is_not_used() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &delayed(MS));
        let a = w.any_mr(A, 50_000);
        let b = w.any_mr(B, 50_000);
        let bytes = a.pattern(6);
        w.recv(B, 1, &[b.all()]);
        w.post(A, &[Wr::send(2, &[a.all()])]);
        w.dereg(A, &a).unwrap();
        a.fill(0xEE);
        w.advance(MS);
        assert_eq!(w.completions(B), ["1 Receive 50000"], "{wiring:?}");
        assert_eq!(b.bytes(), bytes, "the bytes were read before");
        let c = w.any_mr(A, 50_000);
        w.post(A, &[Wr::write(3, &[c.all()], &b, 0)]);
        w.dereg(B, &b).unwrap();
        w.advance(5 * MS);
        assert_eq!(b.bytes(), bytes, "{wiring:?}");
        assert!(w.events(B)[0].starts_with("terminated 1/1/00"), "{wiring:?}");
        assert!(w.events(A)[0].starts_with("terminated by peer 1/1/00"), "{wiring:?}");
    }
}

#[test]
fn a_destroyed_sender_leaves_its_messages() {
    for wiring in Wiring::both() {
        for unreliable in [None, Some(false), Some(true)] {
            let shape = delayed(MS);
            let mut w = match unreliable {
                None => iwarp(wiring, &shape),
                Some(unreliable) => roce(wiring, &shape, unreliable),
            };
            let a = w.any_mr(A, 100_000);
            let b = w.any_mr(B, 100_000);
            let bytes = a.pattern(7);
            w.recv(B, 1, &[b.all()]);
            w.post(A, &[Wr::send(2, &[a.all()])]);
            w.destroy(A);
            w.advance(2 * MS);
            assert_eq!(w.completions(B)[0], "1 Receive 100000", "{wiring:?} {unreliable:?}");
            assert_eq!(b.bytes(), bytes);
            assert_nothing_held(&w);
        }
    }
}

#[test]
fn a_destroyed_receiver_leaves_nothing() {
    for wiring in Wiring::both() {
        for end in [A, B] {
            let mut w = iwarp(wiring, &LinkShape { jitter: MS, ..delayed(MS) });
            let a = w.any_mr(A, 100_000);
            let b = w.any_mr(B, 100_000);
            let writes: Vec<_> = (0..9).map(|n| Wr::write(n, &[a.all()], &b, 0)).collect();
            let reads: Vec<_> = (0..4).map(|n| Wr::read(n, b.all(), &a, 0)).collect();
            w.push(A, &writes);
            w.push(B, &reads);
            w.advance(MS);
            let session = w.apps[w.qps[end].app].session;
            let engine = w.qps[end].engine;
            w.engines[engine].detach_session(session, w.now);
            w.settle();
            w.advance(Duration::from_secs(60));
            assert_nothing_held(&w);
        }
    }
}

#[test]
fn a_graceful_disconnect_waits_for_the_line() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &delayed(MS));
        w.recv(B, 1, &[]);
        w.post(A, &[Wr::send(2, &[])]);
        w.disconnect(A);
        w.advance(MS);
        assert_eq!(w.completions(B), ["1 Receive"], "{wiring:?}");
        w.disconnect(B);
        w.advance(2 * MS);
        assert_eq!((w.events(A).pop(), w.events(B).pop()), (disconnected(), disconnected()));
        assert_nothing_held(&w);
    }
}

fn disconnected() -> Option<String> {
    Some("disconnected".to_owned())
}

#[test]
fn a_removed_link_keeps_the_order() {
    for wiring in Wiring::both() {
        let mut w = iwarp(wiring, &delayed(MS));
        for n in 0..4 {
            w.recv(B, n, &[]);
        }
        w.post(A, &[Wr::send(10, &[]), Wr::send(11, &[])]);
        w.unset_link(A);
        w.unset_link(B);
        w.post(A, &[Wr::send(12, &[])]);
        assert!(w.completions(B).is_empty(), "{wiring:?}");
        w.advance(MS);
        assert_eq!(w.completions(B), ["0 Receive", "1 Receive", "2 Receive"], "{wiring:?}");
        w.post(A, &[Wr::send(13, &[])]);
        assert_eq!(w.completions(B), ["3 Receive"]);
        for engine in &mut w.engines {
            assert!(engine.qps.iter().flatten().all(|qp| qp.emulation.is_none()), "{wiring:?}");
        }
    }
}

#[test]
fn a_delayed_send_waits_for_a_receive() {
    for wiring in Wiring::both() {
        let mut w = roce(wiring, &delayed(MS), false);
        let a = w.any_mr(A, 100);
        let b = w.any_mr(B, 100);
        let bytes = b.pattern(8);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        w.push(B, &[Wr::read(3, b.sge(0..9), &a, 0)]);
        w.settle();
        w.advance(9 * MS);
        // The response to B's Read passes the Sends of A.
        assert_eq!(w.completions(B), ["3 RdmaRead 9"], "{wiring:?}");
        assert!(w.completions(A).is_empty());
        for (receive, send) in [(4, 1), (5, 2)] {
            w.recv(B, receive, &[]);
            w.settle();
            w.advance(MS);
            assert_eq!(w.completions(B), [format!("{receive} Receive")], "{wiring:?}");
            w.advance(4 * MS);
            assert_eq!(w.completions(A), [format!("{send} Send")], "{wiring:?}");
        }
        assert_eq!(b.bytes()[9..], bytes[9..]);
    }
}

#[test]
fn a_refused_request_ends_the_delayed_stream() {
    for wiring in Wiring::both() {
        for kind in [MemoryKind::Shared, MemoryKind::ThroughCopier] {
            let mut w = roce(wiring, &delayed(MS), false);
            w.kind = kind;
            let a = w.any_mr(A, 100);
            let b = w.any_mr(B, 100);
            let bad = Mr { stag: rnic_abi::types::Stag(0xBAD), ..b.clone() };
            let good = |wr_id| Wr::write(wr_id, &[a.all()], &b, 0);
            w.post(A, &[good(1), Wr::write(2, &[a.all()], &bad, 0), good(3)]);
            w.advance(5 * MS);
            assert_eq!(
                w.completions(A),
                ["1 RdmaWrite", "2 RdmaWrite RemoteAccess 1/1/00", "3 RdmaWrite WrFlush"],
                "{wiring:?} {kind:?}"
            );
            assert_nothing_held(&w);
        }
    }
}

// --- Losses ----------------------------------------------------------------------------------

/// Sends 200 datagrams over a link with this shape. Returns the numbers of those that arrive.
fn datagrams(apart: bool, shape: LinkShape) -> Vec<u8> {
    let mut w = datagram_pair(apart);
    w.set_link(0, shape);
    let a = w.any_mr(0, 256);
    a.set(&(0..=255).collect::<Vec<_>>());
    let b = w.any_mr(1, 41 * 400);
    for n in 0..400 {
        w.recv(1, n as u64, &[b.sge(41 * n..41 * n + 41)]);
    }
    for n in 0..200 {
        let wr = to(&w, Wr::send(n as u64, &[a.sge(n..n + 1)]), 1, KEY);
        w.post(0, &[wr]);
    }
    assert_eq!(w.completions(0).len(), 200, "every datagram is sent");
    w.advance(Duration::from_secs(1));
    assert_nothing_held(&w);
    let arrived = w.completions(1).len();
    let bytes = b.bytes();
    (0..arrived).map(|n| bytes[41 * n + grh::LEN]).collect()
}

#[test]
fn lost_datagrams_repeat_with_the_seed() {
    for apart in [false, true] {
        let all: Vec<u8> = (0..200).collect();
        assert_eq!(datagrams(apart, delayed(US)), all);
        let lossy = LinkShape { loss: 250_000, seed: 1, ..LinkShape::default() };
        let arrived = datagrams(apart, lossy);
        assert!((120..180).contains(&arrived.len()), "{}", arrived.len());
        assert!(arrived.is_sorted());
        // Neither a delay nor a second run changes the choice.
        assert_eq!(datagrams(apart, LinkShape { delay: MS, ..lossy }), arrived);
        assert_ne!(datagrams(apart, LinkShape { seed: 2, ..lossy }), arrived);
        let cut = LinkShape { truncate: LinkShape::WHOLE, ..LinkShape::default() };
        assert!(datagrams(apart, cut).is_empty());
    }
}

#[test]
fn duplicated_and_reordered_datagrams() {
    for apart in [false, true] {
        let twice = LinkShape { duplicate: LinkShape::WHOLE, ..LinkShape::default() };
        let doubled: Vec<u8> = (0..200).flat_map(|n| [n, n]).collect();
        assert_eq!(datagrams(apart, twice), doubled);
        // Of two reordered datagrams, the second overtakes the first.
        let swapped: Vec<u8> = (0..100).flat_map(|n| [2 * n + 1, 2 * n]).collect();
        let reorder = LinkShape { reorder: LinkShape::WHOLE, ..LinkShape::default() };
        assert_eq!(datagrams(apart, reorder), swapped);
        assert_eq!(datagrams(apart, LinkShape { delay: MS, ..reorder }), swapped);
    }
}

#[test]
fn a_last_reordered_datagram_arrives() {
    let mut w = datagram_pair(false);
    w.set_link(0, LinkShape { reorder: LinkShape::WHOLE, ..LinkShape::default() });
    let b = w.any_mr(1, 64);
    w.recv(1, 1, &[b.all()]);
    let begun = w.now;
    let wr = to(&w, Wr::send(2, &[]), 1, KEY);
    w.post(0, &[wr]);
    assert_eq!(wait(&mut w, 1, begun).1, 10 * MS);
}

#[test]
fn a_destroyed_ud_qp_leaves_its_datagrams() {
    for apart in [false, true] {
        let mut w = datagram_pair(apart);
        w.set_link(0, LinkShape { reorder: LinkShape::WHOLE, ..delayed(MS) });
        let b = w.any_mr(1, 200);
        for n in 0..3 {
            w.recv(1, n, &[b.all()]);
            let wr = to(&w, Wr::send(n, &[]), 1, KEY);
            w.push(0, &[wr]);
        }
        w.destroy(0);
        assert_eq!(w.completions(1).len(), 3);
        assert_nothing_held(&w);
    }
}

#[test]
fn a_lost_uc_message_leaves_no_trace() {
    // The fate depends on the QP's number, which is the same on both paths.
    let fates = Wiring::both().map(|wiring| {
        let shape = LinkShape { loss: 300_000, delay: US, seed: 3, ..LinkShape::default() };
        let mut w = roce(wiring, &LinkShape::default(), true);
        w.set_link(A, shape);
        let a = w.any_mr(A, 200_000);
        let b = w.any_mr(B, 200_000);
        let bytes = a.pattern(9);
        let mut arrived = Vec::new();
        for n in 0..20 {
            w.recv(B, n, &[b.all()]);
        }
        for n in 0..20u64 {
            let wr = match n % 3 {
                0 => Wr::send(n, &[a.all()]),
                1 => Wr::write(n, &[a.all()], &b, 0).immediate(n),
                _ => Wr::send(n, &[a.sge(0..1 + n as usize)]),
            };
            w.post(A, &[wr]);
            w.advance(MS);
            assert_eq!(w.completions(A).len(), 1, "{wiring:?}: every message is sent");
            arrived.push(w.completions(B).len());
        }
        let why = &w.diagnoses(A)[0];
        assert_eq!(why.rule, "injected by fault test");
        assert_eq!(why.text, format!("packet {} of the QP was lost", first_lost(&arrived)));
        let lost = arrived.iter().filter(|n| **n == 0).count() as u64;
        assert!((3..10).contains(&lost), "{lost}");
        assert_eq!((w.state(A), w.state(B)), (QpState::Rts, QpState::Rts));
        assert_eq!(b.bytes(), bytes);
        arrived
    });
    assert_eq!(fates[0], fates[1]);
}

/// UC accepts a packet once, whole and in its order.
#[test]
fn other_losses_of_uc_messages() {
    let none = LinkShape::default();
    for (shape, arrive) in [
        (LinkShape { truncate: LinkShape::WHOLE, ..none }, 0),
        (LinkShape { reorder: LinkShape::WHOLE, ..none }, 0),
        (LinkShape { duplicate: LinkShape::WHOLE, ..none }, 5),
    ] {
        for wiring in Wiring::both() {
            let mut w = roce(wiring, &none, true);
            w.set_link(A, shape);
            for n in 0..10 {
                w.recv(B, n, &[]);
            }
            for n in 0..5 {
                w.post(A, &[Wr::send(n, &[])]);
            }
            w.advance(MS);
            assert_eq!(w.completions(A).len(), 5, "{wiring:?}: every message is sent");
            assert_eq!(w.completions(B).len(), arrive, "{wiring:?}, {shape:?}");
        }
    }
}

fn first_lost(arrived: &[usize]) -> usize {
    arrived.iter().position(|n| *n == 0).unwrap()
}

#[test]
fn reliable_qps_lose_nothing() {
    for wiring in Wiring::both() {
        let shape = LinkShape { loss: LinkShape::WHOLE, ..LinkShape::default() };
        for mut w in [iwarp(wiring, &shape), roce(wiring, &shape, false)] {
            w.recv(B, 1, &[]);
            w.post(A, &[Wr::send(2, &[])]);
            assert_eq!(w.completions(B), ["1 Receive"], "{wiring:?}");
            assert_eq!(w.completions(A), ["2 Send"]);
        }
    }
}
