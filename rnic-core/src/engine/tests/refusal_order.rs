//! Requests before a refused request of an RC QP complete with their own status, regardless of
//! their kind and of the reason for the refusal.

use std::time::Duration;

use super::rc::{LIMITS, kept, linked, ms, unlinked_of};
use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use rnic_abi::types::{Access, QpState};

/// Regions of a test: `here` at A, `there` and `closed` at B, the last without remote rights.
struct Regions {
    here: Mr,
    there: Mr,
    closed: Mr,
}

impl Regions {
    fn new(w: &mut World, kind: MemoryKind, len: usize) -> Self {
        let here = w.any_mr(A, len);
        w.kind = kind;
        let there = w.any_mr(B, len);
        let closed = w.mr(B, 64, Access::LOCAL_WRITE);
        w.kind = MemoryKind::Shared;
        Regions { here, there, closed }
    }

    /// Returns three Reads of `len` bytes each.
    fn reads(&self, len: usize) -> Vec<Wr> {
        (0..3).map(|n| Wr::read(n, self.here.sge(0..len), &self.there, 0)).collect()
    }

    fn atomics(&self) -> Vec<Wr> {
        (0..3).map(|n| Wr::fetch_add(n, 1, self.here.sge(0..8), &self.there, 0)).collect()
    }
}

type Make = fn(&Regions) -> Wr;

/// Requests that B refuses, with the status at A.
const REFUSED: [(Make, &str); 6] = [
    (|r| Wr::write(3, &[r.here.sge(0..8)], &r.closed, 0), "RdmaWrite RemoteAccess"),
    (|r| Wr::write(3, &[r.here.all()], &r.there, 8), "RdmaWrite RemoteAccess"),
    (|r| Wr::read(3, r.here.sge(0..8), &r.closed, 0), "RdmaRead RemoteAccess"),
    (|r| Wr::fetch_add(3, 1, r.here.sge(0..8), &r.closed, 0), "FetchAdd RemoteAccess"),
    (|r| Wr::fetch_add(3, 1, r.here.sge(0..8), &r.there, 4), "FetchAdd RemoteInvalidRequest"),
    (|r| Wr::send(3, &[r.here.all()]), "Send RemoteInvalidRequest"),
];

fn assert_in_order(done: &[String], refused: &str, what: &str) {
    assert_eq!(done.len(), 5, "{what}: {done:?}");
    for (n, before) in done[..3].iter().enumerate() {
        let words: Vec<&str> = before.split(' ').collect();
        let succeeded = words.len() == 3 && words[2].parse::<u32>().is_ok();
        assert!(succeeded && words[0] == n.to_string(), "{what}: {done:?}");
        assert!(["RdmaRead", "FetchAdd"].contains(&words[1]), "{what}: {done:?}");
    }
    assert!(done[3].starts_with(&format!("3 {refused}")), "{what}: {done:?}");
    assert!(done[4].starts_with("4 RdmaRead WrFlush"), "{what}: {done:?}");
}

#[test]
fn reads_before_a_refused_request_succeed() {
    for wiring in Wiring::both() {
        for (kind, len) in [
            (MemoryKind::Shared, 64),
            (MemoryKind::Shared, 1000),
            (MemoryKind::Shared, 1 << 20),
            (MemoryKind::ThroughCopier, 200_000),
        ] {
            for (make, status) in REFUSED {
                for atomic in [false, true] {
                    let mut w = linked(wiring);
                    let r = Regions::new(&mut w, kind, len);
                    let bytes = r.there.pattern(3);
                    w.recv(B, 7, &[r.there.sge(0..4)]);
                    w.responder_errors(B);
                    let mut requests = if atomic { r.atomics() } else { r.reads(len) };
                    requests.push(make(&r));
                    requests.push(Wr::read(4, r.here.sge(0..8), &r.there, 0));
                    w.post(A, &requests);
                    let what = format!("{wiring:?} {kind:?} {len} {status} {atomic}");
                    assert_in_order(&w.completions(A), status, &what);
                    // A refused Write may change the memory beyond the first bytes.
                    let intact = !atomic && status.starts_with("RdmaRead");
                    assert!(!intact || r.here.bytes()[8..] == bytes[8..], "{what}");
                    assert_eq!(w.state(B), QpState::Error, "{what}");
                    let events = w.responder_errors(B);
                    assert_eq!(events.len(), 1, "{what}: {events:?}");
                    assert_eq!(w.completions(B).len(), 1, "{what}: the receive completes");
                }
            }
        }
    }
}

#[test]
fn a_refusing_qp_answers_earlier_requests() {
    for (make, status) in REFUSED {
        let mut w = unlinked_of(Wiring::direct(), kept(QpShape::default()), 128);
        w.link([A, A], Wiring::direct(), LIMITS);
        let here = w.any_mr(A, 200_000);
        let there = w.any_mr(A, 200_000);
        let closed = w.mr(A, 64, Access::LOCAL_WRITE);
        let r = Regions { here, there, closed };
        w.recv(A, 7, &[r.there.sge(0..4)]);
        let mut requests = r.reads(200_000);
        requests.push(make(&r));
        requests.push(Wr::read(4, r.here.sge(0..8), &r.there, 0));
        w.post(A, &requests);
        let mut done = w.completions(A);
        done.retain(|done| !done.starts_with('7'));
        assert_in_order(&done, status, status);
    }
}

/// Each end sends its responses although both are refusing a request. If their Terminates cross,
/// each has flushed its own request before the Terminate of the other blames it.
#[test]
fn two_refusing_ends_do_not_deadlock() {
    for wiring in Wiring::both() {
        for window in [4096, usize::MAX] {
            let mut w = linked(wiring);
            for pipe in w.links.iter_mut().flat_map(|link| &mut link.pipes) {
                pipe.window = window;
            }
            let regions = [w.any_mr(A, 1 << 20), w.any_mr(B, 1 << 20)];
            let closed = [A, B].map(|end| w.mr(end, 64, Access::LOCAL_WRITE));
            for end in [A, B] {
                let here = &regions[end];
                let there = &regions[1 - end];
                let mut requests: Vec<Wr> =
                    (0..3).map(|n| Wr::read(n, here.all(), there, 0)).collect();
                requests.push(Wr::write(3, &[here.all()], &closed[1 - end], 0));
                w.push(end, &requests);
            }
            w.settle();
            let mut most = 0;
            for end in [A, B] {
                let done = w.completions(end);
                assert_eq!(done.len(), 4, "{wiring:?} {window}: {done:?}");
                let failed = done.iter().position(|done| !done.ends_with("1048576")).unwrap();
                most = most.max(failed);
                let rest = &done[failed..];
                let flushed = rest.iter().filter(|done| done.contains("WrFlush")).count();
                assert!(flushed >= rest.len() - 1, "{wiring:?} {window}: {done:?}");
                assert_eq!(w.state(end), QpState::Error);
            }
            // With unlimited windows both ends have failed before either reads.
            let reads = wiring.direct || window == 4096;
            assert!(!reads || most >= 2, "{wiring:?} {window}: {most}");
        }
    }
}

/// Returns a world in which A has three Reads and a refused Write outstanding, and the responses
/// cannot be delivered: over TCP because A does not read, over the direct path because the copier
/// of B does not answer.
fn stuck(wiring: Wiring) -> World {
    stuck_by(wiring, |r| Wr::write(3, &[r.here.sge(0..8)], &r.closed, 0))
}

fn stuck_by(wiring: Wiring, refused: Make) -> World {
    let mut w = linked(wiring);
    let kind = if wiring.direct { MemoryKind::ThroughCopier } else { MemoryKind::Shared };
    w.answer_copies = false;
    if let Some(link) = w.links.first_mut() {
        link.pipes[1].window = 0;
    }
    let r = Regions::new(&mut w, kind, 1 << 20);
    w.recv(B, 7, &[]);
    w.responder_errors(B);
    let mut requests = r.reads(1 << 20);
    requests.push(refused(&r));
    w.post(A, &requests);
    w.post(B, &[Wr::send(8, &[])]);
    assert_eq!(
        (w.state(B), w.completions(B).len(), w.responder_errors(B).len()),
        (QpState::Rts, 0, 0)
    );
    w
}

#[test]
fn a_blocked_refusal_ends_at_the_deadline() {
    for wiring in Wiring::both() {
        let mut w = stuck(wiring);
        w.advance(Duration::from_millis(4990));
        if !wiring.direct {
            assert_eq!((w.state(B), w.completions(B).len()), (QpState::Rts, 0), "{wiring:?}");
        }
        w.advance(ms(20));
        assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
        assert_eq!(w.completions(B).len(), 2, "{wiring:?}: both are flushed");
        let events = w.responder_errors(B);
        assert!(events.iter().any(|event| event.starts_with("AccessError")), "{events:?}");
        w.advance(Duration::from_secs(6));
        assert!(
            w.engines.iter().all(|e| e.kept_bytes() == 0 && e.state.deadlines.next().is_none())
        );
    }
}

/// The receive completes after the responses as well.
#[test]
fn a_refused_send_fails_its_receive() {
    for wiring in Wiring::both() {
        for aborts in [false, true] {
            let mut w = stuck_by(wiring, |r| Wr::send(3, &[r.here.sge(0..8)]));
            if aborts {
                w.abort(B);
            } else {
                w.advance(Duration::from_secs(6));
            }
            let expected = if aborts { "7 Receive WrFlush" } else { "7 Receive LocalLength" };
            let done = w.completions(B);
            let receive = done.iter().find(|done| done.starts_with('7')).unwrap();
            assert!(done.len() == 2 && receive.starts_with(expected), "{wiring:?}: {done:?}");
        }
    }
}

#[test]
fn a_refusing_qp_can_end() {
    type End = fn(&mut World);
    let ends: [(End, bool); 5] = [
        (|w| w.abort(B), true),
        (|w| w.admin_disconnect(B), true),
        (|w| w.destroy(B), false),
        (|w| w.abort(A), true),
        (|w| w.destroy(A), true),
    ];
    for (wiring, (n, (end, lives))) in
        Wiring::both().into_iter().flat_map(|w| ends.into_iter().enumerate().map(move |e| (w, e)))
    {
        let mut w = stuck(wiring);
        // The copier's late results arrive after the end of the stream.
        end(&mut w);
        w.answer_copies = true;
        w.settle();
        if lives {
            assert_eq!(w.state(B), QpState::Error, "{wiring:?} {n}");
            assert_eq!(w.completions(B).len(), 2, "{wiring:?} {n}");
        }
        w.advance(Duration::from_secs(12));
        assert!(w.engines.iter().all(|e| e.kept_bytes() == 0), "{wiring:?} {n}");
    }
}

#[test]
fn a_session_may_end_while_its_qp_is_refusing() {
    for wiring in Wiring::both() {
        for end in [A, B] {
            let mut w = stuck(wiring);
            let session = w.apps[w.qps[end].app].session;
            let engine = w.qps[end].engine;
            w.engines[engine].detach_session(session, w.now);
            w.answer_copies = true;
            w.settle();
            w.advance(Duration::from_secs(12));
            assert!(w.engines.iter().all(|e| e.kept_bytes() == 0), "{wiring:?}");
            if end == A {
                assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
            }
        }
    }
}

/// Writes before the refused Write have the same header as the Terminate encloses.
#[test]
fn only_the_refused_of_equal_writes_fails() {
    for wiring in Wiring::both() {
        // The refused Write exceeds its region.
        let mut w = linked(wiring);
        let a = w.any_mr(A, 100_000);
        let b = w.any_mr(B, 65_536);
        w.post(
            A,
            &[
                Wr::write(0, &[a.sge(0..65_536)], &b, 0),
                Wr::write(1, &[a.sge(0..70_000)], &b, 0),
                Wr::write(2, &[a.sge(0..8)], &b, 0),
            ],
        );
        let done = w.completions(A);
        assert_eq!(done[0], "0 RdmaWrite", "{wiring:?} {done:?}");
        assert!(done[1].starts_with("1 RdmaWrite RemoteAccess"), "{wiring:?} {done:?}");
        assert!(done[2].starts_with("2 RdmaWrite WrFlush"), "{wiring:?} {done:?}");

        // Equal Writes. Some follow the invalidation of their region.
        for before in [0, 1, 5, 24] {
            for immediate in [false, true] {
                let mut w = linked(wiring);
                let a = w.any_mr(A, 8);
                let b = w.own_mr(B, 8, Access::REMOTE_WRITE | Access::LOCAL_WRITE);
                for n in 0..30 {
                    w.recv(B, 100 + n, &[]);
                }
                let write = |n| {
                    let write = Wr::write(n, &[a.all()], &b, 0);
                    if immediate { write.immediate(n) } else { write }
                };
                w.post(A, &[write(900)]);
                assert_eq!(w.completions(A), ["900 RdmaWrite"], "{wiring:?}");
                w.completions(B);
                let mut requests: Vec<Wr> = (0..before).map(write).collect();
                requests.push(Wr::send_invalidate(before, &[], b.stag));
                requests.push(write(before + 1));
                requests.push(write(before + 2));
                w.post(A, &requests);
                let done = w.completions(A);
                let what = format!("{wiring:?} {before} {immediate}: {done:?}");
                let (done, failed) = done.split_at(before as usize + 1);
                assert!(done.iter().all(|done| !done.contains("WrFlush")), "{what}");
                let refused = before + 1;
                let flushed = before + 2;
                assert!(failed[0].starts_with(&format!("{refused} RdmaWrite RemoteAcc")), "{what}");
                assert!(failed[1].starts_with(&format!("{flushed} RdmaWrite WrFlush")), "{what}");
            }
        }
    }
}

/// An adapter checks the length of a Write with its first packet. Over TCP no segment contains the
/// length.
#[test]
fn a_write_beyond_its_region_places_nothing() {
    for (kind, unreliable) in [
        (MemoryKind::Shared, false),
        (MemoryKind::ThroughCopier, false),
        (MemoryKind::Shared, true),
    ] {
        for itself in [false, true] {
            let shape = QpShape { unreliable, ..kept(QpShape::default()) };
            let mut w = unlinked_of(Wiring::direct(), shape, 128);
            let peer = if itself { A } else { B };
            w.link([A, peer], Wiring::direct(), LIMITS);
            let a = w.any_mr(A, 200_000);
            a.fill(1);
            w.kind = kind;
            let b = w.any_mr(peer, 199_999);
            w.post(A, &[Wr::write(0, &[a.all()], &b, 0)]);
            let done = w.completions(A);
            let expected = if unreliable { "0 RdmaWrite" } else { "0 RdmaWrite RemoteAccess" };
            let what = format!("{kind:?} {unreliable} {itself}: {done:?}");
            assert!(done.len() == 1 && done[0].starts_with(expected), "{what}");
            assert!(b.bytes().iter().all(|byte| *byte == 0), "{what}");
        }
    }
}
