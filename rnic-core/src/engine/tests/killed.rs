//! Programs that are killed during traffic: their RC QPs stop answering, and requests of the peer
//! do not fail with an access error.

use super::attached::gone;
use super::rc::{linked, ms};
use super::requests::{Mr, Wr};
use super::world::{A, B, MemoryKind, Wiring, World};
use crate::device::memory::Unreachable;
use rnic_abi::types::QpState;

/// Returns requests of several kinds that access this region.
fn reaching(own: &Mr, region: &Mr) -> Vec<Wr> {
    vec![
        Wr::write(1, &[own.sge(0..8)], region, 0),
        Wr::write(1, &[own.sge(0..4096)], region, 0),
        Wr::read(1, own.sge(0..8), region, 0),
        Wr::fetch_add(1, 1, own.sge(0..8), region, 0),
    ]
}

/// Checks that A's requests fail as if the peer no longer answered.
fn fails_without_blame(w: &mut World, what: &str) {
    assert_eq!(w.completions(A), [""; 0], "{what}: completed before retries were exhausted");
    w.advance(ms(1500));
    let done = w.completions(A);
    let first = done.first().map_or("", String::as_str);
    assert!(first.ends_with("TransportRetryExceeded"), "{what}: {done:?}");
}

#[test]
fn missing_memory_blames_no_request() {
    for wiring in Wiring::both() {
        for n in 0..4 {
            let mut w = linked(wiring);
            let own = w.any_mr(A, 4096);
            let lost = gone(&mut w, B);
            w.post(A, &[reaching(&own, &lost).swap_remove(n)]);
            assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
            fails_without_blame(&mut w, &format!("{wiring:?}, request {n}"));
        }
    }
}

#[test]
fn a_missing_receive_buffer_blames_no_send() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let own = w.any_mr(A, 4096);
        let lost = gone(&mut w, B);
        w.recv(B, 9, &[lost.sge(0..5000)]);
        w.post(A, &[Wr::send(1, &[own.all()])]);
        assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
        fails_without_blame(&mut w, &format!("{wiring:?}"));
    }
}

#[test]
fn a_copier_that_ends_blames_no_request() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let own = w.any_mr(A, 4096);
        w.kind = MemoryKind::ThroughCopier;
        let lost = w.any_mr(B, 4096);
        w.answer_copies = false;
        w.post(A, &[Wr::write(1, &[own.all()], &lost, 0)]);
        let (engine, job) = w.copy_jobs.pop_front().expect("a pending copy");
        let now = w.now;
        w.engines[engine].handle_copied(&job.copier, job.id, Err(Unreachable::Detached), now);
        w.settle();
        assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
        fails_without_blame(&mut w, &format!("{wiring:?}"));
    }
}

#[test]
fn a_closed_session_answers_nothing() {
    for wiring in Wiring::both() {
        for n in 0..4 {
            let mut w = linked(wiring);
            let own = w.any_mr(A, 4096);
            let theirs = w.any_mr(B, 4096);
            let engine = w.qps[B].engine;
            let app = w.qps[B].app;
            let session = w.apps[app].session;
            let now = w.now;
            w.engines[engine].close_session(session, now);
            w.push(A, &[reaching(&own, &theirs).swap_remove(n)]);
            for _ in 0..50 {
                w.round();
            }
            assert_eq!(w.completions(A), [""; 0], "{wiring:?}: request {n} was answered");
            while w.engines[engine].is_ending() {
                w.engines[engine].poll_session_end(now);
            }
            w.settle();
            fails_without_blame(&mut w, &format!("{wiring:?}, request {n}"));
        }
    }
}

/// A Write may be acknowledged before the response to an earlier Read arrives.
#[test]
fn a_write_after_a_lost_read_is_flushed() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let own = w.any_mr(A, 4096);
        let sink = w.any_mr(B, 4096);
        w.kind = MemoryKind::ThroughCopier;
        let source = w.any_mr(B, 4096);
        w.answer_copies = false;
        let write = |wr_id| Wr::write(wr_id, &[own.sge(0..8)], &sink, 0);
        w.post(A, &[Wr::read(1, own.all(), &source, 0), write(2), write(3).unsignaled()]);
        let (engine, job) = w.copy_jobs.pop_front().expect("a pending copy");
        let now = w.now;
        w.engines[engine].handle_copied(&job.copier, job.id, Err(Unreachable::Detached), now);
        w.settle();
        assert_eq!(w.completions(A), [""; 0], "{wiring:?}");
        w.advance(ms(1500));
        let expected =
            ["1 RdmaRead TransportRetryExceeded", "2 RdmaWrite WrFlush", "3 RdmaWrite WrFlush"];
        assert_eq!(w.completions(A), expected, "{wiring:?}");
    }
}

/// The last acknowledgement is not sent if the batch with the end of a response is discarded.
#[test]
fn no_acknowledgement_inside_a_response() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        let own = w.any_mr(A, 400_000);
        let source = w.any_mr(B, 400_000);
        let lost = gone(&mut w, B);
        w.recv(B, 9, &[source.sge(0..8)]);
        let long = Wr::read(2, own.all(), &source, 0);
        w.post(A, &[Wr::send(1, &[own.sge(0..8)]), long, Wr::read(3, own.sge(0..8), &lost, 0)]);
        assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
        w.advance(ms(1500));
        let done = w.completions(A);
        let succeeded = |text: &&String| ["1 Send", "2 RdmaRead 400000"].contains(&text.as_str());
        let failed = done.iter().find(|text| !succeeded(text)).map_or("", String::as_str);
        assert!(failed.ends_with("TransportRetryExceeded"), "{wiring:?}: {done:?}");
    }
}
