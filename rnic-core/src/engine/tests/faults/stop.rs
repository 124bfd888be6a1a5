//! QPs that a rule has stopped, and their peers.

use std::time::Duration;

use super::super::datagrams::{KEY, both, to};
use super::super::rc::{LIMITS, kept, linked, ms, unlinked_of, wire};
use super::super::requests::Wr;
use super::super::world::{A, B, QpShape, Wiring, World};
use super::{SENDING, go_on, pairs, stop};
use crate::engine::{EngineCommand, Work};
use rnic_abi::abi::control;
use rnic_abi::types::QpState;

/// 4.096 us * 2^10, twice.
const TIMEOUT: Duration = Duration::from_nanos(4096 << 11);

/// Returns RC pairs without a timeout, and iWARP pairs.
fn patient_pairs() -> Vec<(World, String)> {
    let mut all = pairs();
    for (w, which) in &mut all {
        if which.starts_with("RC") {
            for end in [A, B] {
                w.move_to_rts(end, control::Sending { timeout: 0, ..SENDING });
            }
        }
    }
    all
}

#[test]
fn a_stopped_qp_neither_sends_nor_receives() {
    for end in [A, B] {
        for (mut w, which) in patient_pairs() {
            let a = w.any_mr(A, 100_000);
            let b = w.any_mr(B, 100_000);
            let bytes = a.pattern(1);
            stop(&mut w, end);
            w.recv(B, 10, &[b.all()]);
            w.recv(A, 11, &[]);
            w.post(A, &[Wr::send(1, &[a.all()])]);
            w.post(B, &[Wr::send(2, &[])]);
            w.post(A, &[Wr::read(3, a.all(), &b, 0)]);
            // iWARP sends a stopped peer as much as TCP takes.
            w.advance(Duration::from_secs(20));
            let received = |found: Vec<String>| found.iter().any(|c| c.contains("Receive"));
            assert!(!received(w.completions(A)), "{which} {end}");
            assert_eq!(b.bytes(), [0; 100_000], "{which} {end}");
            assert!(!received(w.completions(B)), "{which} {end}");
            go_on(&mut w, end);
            let done = [w.completions(A), w.completions(B)].concat();
            assert!(done.contains(&"10 Receive 100000".to_owned()), "{which} {end}: {done:?}");
            assert!(done.contains(&"11 Receive".to_owned()), "{which} {end}: {done:?}");
            assert!(done.contains(&"3 RdmaRead 100000".to_owned()), "{which} {end}: {done:?}");
            assert_eq!(b.bytes(), bytes, "{which} {end}");
            assert_eq!([w.state(A), w.state(B)], [QpState::Rts; 2], "{which} {end}");
        }
    }
}

/// A stop inside a message and inside an FPDU loses no byte, and is no stall.
#[test]
fn a_stop_inside_a_message_loses_nothing() {
    for end in [A, B] {
        for (mut w, which) in patient_pairs() {
            let a = w.any_mr(A, 300_000);
            let b = w.any_mr(B, 300_000);
            let bytes = a.pattern(1);
            w.one_segment_at_a_time();
            if let Some(link) = w.links.first_mut() {
                link.pipes[0].window = 700;
            }
            w.recv(B, 10, &[b.all()]);
            w.push(A, &[Wr::send(1, &[a.all()])]);
            for _ in 0..7 {
                w.round();
            }
            stop(&mut w, end);
            // Exceed the stall deadline, unless the other end waits for the rest of an FPDU.
            w.advance(Duration::from_secs(if end == B { 300 } else { 60 }));
            if let Some(link) = w.links.first_mut() {
                link.pipes[0].window = 1 << 20;
            }
            go_on(&mut w, end);
            w.advance(Duration::from_secs(1));
            assert_eq!(w.completions(B), ["10 Receive 300000"], "{which} {end}");
            assert_eq!(b.bytes(), bytes, "{which} {end}");
            assert_eq!(w.completions(A), ["1 Send"], "{which} {end}");
        }
    }
}

#[test]
fn a_stopped_rc_requester_times_out() {
    for wiring in Wiring::both() {
        let mut w = linked(wiring);
        stop(&mut w, A);
        w.recv(B, 10, &[]);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        w.advance(TIMEOUT - Duration::from_micros(1));
        assert_eq!(w.completions(A), [""; 0], "{wiring:?}");
        w.advance(Duration::from_micros(1));
        let expected = ["1 Send TransportRetryExceeded", "2 Send WrFlush"];
        assert_eq!(w.completions(A), expected, "{wiring:?}");
        let why = w.diagnosis(A);
        assert!(why.text.contains("injected by fault stop"), "{why:?}");
        w.post(A, &[Wr::send(3, &[])]);
        assert_eq!(w.completions(A), ["3 Send WrFlush"], "{wiring:?}");
    }
}

/// The peer is on the direct path, where its state is known.
#[test]
fn the_requester_of_a_stopped_peer_times_out() {
    for before in [true, false] {
        let mut w = linked(Wiring::direct());
        let a = w.any_mr(A, 8);
        let b = w.any_mr(B, 8);
        if before {
            stop(&mut w, B);
            w.post(A, &[Wr::read(1, a.all(), &b, 0)]);
        } else {
            // The request has arrived and is not answered yet.
            w.push(A, &[Wr::read(1, a.all(), &b, 0)]);
            let engine = &mut w.engines[0];
            engine.poll_doorbells(w.now);
            engine.poll_work(w.now);
            stop(&mut w, B);
        }
        w.advance(TIMEOUT - Duration::from_micros(1));
        assert_eq!(w.completions(A), [""; 0], "{before}");
        w.advance(Duration::from_micros(1));
        assert_eq!(w.completions(A), ["1 RdmaRead TransportRetryExceeded"], "{before}");
        let why = w.diagnosis(A);
        assert!(why.text.contains("injected by fault stop"), "{why:?}");
    }
}

/// UC has no acknowledgements: its requests complete, and their messages are lost.
#[test]
fn requests_of_a_stopped_uc_qp_complete() {
    for (wiring, end) in [(Wiring::direct(), A), (Wiring::tcp(), A), (Wiring::direct(), B)] {
        let mut w = unlinked_of(wiring, QpShape { unreliable: true, ..QpShape::default() }, 128);
        w.link([A, B], wiring, LIMITS);
        stop(&mut w, end);
        w.recv(B, 10, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        w.advance(ms(1));
        assert_eq!(w.completions(A), ["1 Send"], "{wiring:?}");
        assert_eq!(w.completions(B), [""; 0], "{wiring:?}");
        go_on(&mut w, end);
        w.post(A, &[Wr::send(2, &[])]);
        assert_eq!(w.completions(B), ["10 Receive"], "{wiring:?}");
        assert_eq!(w.completions(A), ["2 Send"], "{wiring:?}");
    }
}

/// No deadline of a stopped QP stays due, which would make the worker spin.
#[test]
fn a_uc_qp_stops_inside_a_message() {
    for (wiring, end) in [(Wiring::direct(), A), (Wiring::tcp(), A), (Wiring::direct(), B)] {
        let mut w = unlinked_of(wiring, QpShape { unreliable: true, ..QpShape::default() }, 128);
        w.link([A, B], wiring, LIMITS);
        w.one_segment_at_a_time();
        let a = w.any_mr(A, 400_000);
        let b = w.any_mr(B, 400_000);
        w.recv(B, 10, &[b.all()]);
        w.push(A, &[Wr::send(1, &[a.all()]), Wr::send(2, &[])]);
        w.engines[0].poll_doorbells(w.now);
        w.round();
        stop(&mut w, end);
        for _ in 0..3 {
            w.now = w.now.after(ms(1));
            w.engines.iter_mut().for_each(|engine| engine.handle_timeout(w.now));
            w.settle();
        }
        assert!(w.next_timeout().is_none_or(|at| at > w.now), "{wiring:?} {end}");
        if !wiring.direct {
            // The rest is read from its memory later.
            assert_eq!(w.completions(A), [""; 0]);
        }
        go_on(&mut w, end);
        w.advance(ms(1));
        assert_eq!(w.completions(A).len(), 2, "{wiring:?} {end}");
        assert_eq!(w.state(A), QpState::Rts, "{wiring:?} {end}");
    }
}

#[test]
fn a_stopped_qp_in_error_flushes() {
    for (mut w, which) in patient_pairs() {
        stop(&mut w, A);
        w.recv(A, 10, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(w.completions(A), [""; 0], "{which}");
        w.abort(A);
        assert_eq!(w.completions(A), ["1 Send WrFlush", "10 Receive WrFlush"], "{which}");
        w.post(A, &[Wr::send(2, &[])]);
        assert_eq!(w.completions(A), ["2 Send WrFlush"], "{which}");
    }
}

#[test]
fn a_stopped_qp_is_destroyed() {
    for (mut w, which) in patient_pairs() {
        stop(&mut w, A);
        w.recv(B, 10, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        w.destroy(A);
        w.advance(Duration::from_secs(60));
        assert_eq!(w.completions(A), [""; 0], "{which}");
        let received = w.completions(B);
        assert!(!received.contains(&"10 Receive".to_owned()), "{which}: {received:?}");
        w.destroy(B);
        assert!(w.next_timeout().is_none(), "{which}");
    }
}

/// A stopped peer that is destroyed or has another link is no longer considered.
#[test]
fn a_stopped_peer_is_forgotten_with_its_stream() {
    let mut w = linked(Wiring::direct());
    stop(&mut w, B);
    let requests = [Wr::send(1, &[])];
    w.move_to_rts(A, control::Sending { timeout: 0, ..SENDING });
    w.post(A, &requests);
    w.destroy(B);
    w.move_to_rts(A, SENDING);
    w.advance(TIMEOUT * 2);
    // The time limit of a lost stream applies.
    assert_eq!(w.completions(A), [""; 0]);
    w.advance(ms(1000));
    assert_eq!(w.completions(A), ["1 Send TransportRetryExceeded"]);
    let why = w.diagnosis(A);
    assert!(!why.text.contains("injected"), "{why:?}");
}

#[test]
fn a_new_stream_of_a_stopped_peer_works() {
    let mut w = linked(Wiring::direct());
    stop(&mut w, B);
    w.move_to_rts(A, control::Sending { timeout: 0, ..SENDING });
    w.post(A, &[Wr::send(1, &[])]);
    w.unlink(A);
    let app = w.app(0);
    let cq = w.cq(app, 16);
    let c = w.qp(app, cq, cq, kept(QpShape::default()));
    wire(&mut w, c);
    w.link([A, c], Wiring::direct(), LIMITS);
    w.recv(c, 10, &[]);
    w.settle();
    assert_eq!(w.completions(c), ["10 Receive"]);
    assert_eq!(w.completions(A), ["1 Send"]);
}

/// The kernel reports a readable socket once.
#[test]
fn a_socket_stays_readable_during_a_stop() {
    for rc in [false, true] {
        let mut w = if rc { linked(Wiring::tcp()) } else { super::iwarp(Wiring::tcp()) };
        let id = w.qps[B].id;
        stop(&mut w, B);
        w.engines[1].handle_readable(id);
        w.engines[1].poll_doorbells(w.now);
        assert!(w.engines[1].poll_work(w.now).is_none(), "RC {rc}");
        w.command(B, |id| EngineCommand::SetStopped(id, None));
        w.engines[1].poll_doorbells(w.now);
        let mut found = Vec::new();
        while let Some(work) = w.engines[1].poll_work(w.now) {
            found.push(work);
        }
        assert!(found.contains(&Work::Receive(id)), "RC {rc}: {found:?}");
    }
}

#[test]
fn a_stopped_ud_qp_drops_datagrams() {
    for mut w in both() {
        let b = w.any_mr(B, 64);
        w.recv(B, 10, &[b.all()]);
        stop(&mut w, B);
        let request = to(&w, Wr::send(1, &[]), B, KEY);
        w.post(A, &[request]);
        assert_eq!(w.completions(A), ["1 Send"]);
        assert_eq!(w.qps[B].shared.counters().dropped, 1);
        go_on(&mut w, B);
        assert_eq!(w.completions(B), [""; 0]);
        let request = to(&w, Wr::send(2, &[]), B, KEY);
        w.post(A, &[request]);
        assert_eq!(w.completions(B).len(), 1);
        stop(&mut w, A);
        let request = to(&w, Wr::send(3, &[]), B, KEY);
        w.post(A, &[request]);
        assert_eq!(w.completions(A), ["2 Send"], "a stopped QP sends no datagram");
    }
}
