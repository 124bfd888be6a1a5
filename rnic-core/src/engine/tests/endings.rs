//! How connections begin and end.

use std::time::Duration;

use super::raw::{Raw, Segment, ulpdu};
use super::requests::Wr;
use super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use crate::ddp::{Header, qn};
use crate::engine::EngineCommand;
use crate::rdmap::{Opcode, ReadRequest};
use crate::stream::startup::{Options, RtrKinds};
use rnic_abi::abi::control::{DisconnectMode, Event};
use rnic_abi::types::{Access, QpState, Stag, TaggedOffset};

fn plain() -> Options {
    Wiring::tcp().with(|o| o.peer_to_peer = false).a
}

fn responder() -> (World, Raw) {
    World::against_raw(false, plain(), plain())
}

// --- The first FPDU ------------------------------------------------------------------------------

//= MPA-7.1.2-2g
//= MPA-7.1.2-4
#[test]
fn a_responder_is_silent_until_the_first_fpdu() {
    // RFC 5044 section 7.1.2.
    let (mut w, mut raw) = responder();
    let any = w.any_mr(A, 1);
    // As many requests as the queue holds.
    let posted: Vec<Wr> = (0..QpShape::default().sq.into())
        .map(|n| if n % 2 == 0 { Wr::send(n, &[]) } else { Wr::write(n, &[], &any, 0) })
        .collect();
    w.post(A, &posted);
    w.advance(Duration::from_secs(1));
    assert_eq!(raw.segments(&mut w), []);
    assert_eq!(w.events(A), [""; 0], "nothing is established yet");
    raw.write(&mut w, Stag(0), 0, b"");
    let sent: Vec<Opcode> = raw.segments(&mut w).iter().map(Segment::opcode).collect();
    assert_eq!(sent, [Opcode::Send, Opcode::Write].repeat(posted.len() / 2));
    assert_eq!(w.events(A), ["established 4/4"]);
    assert_eq!(w.completions(A).len(), posted.len());
    w.advance(Duration::from_secs(60));
    assert_eq!(w.state(A), QpState::Rts, "the deadline is cleared");
}

//= MPA-7.1.2-4
#[test]
fn a_broken_first_fpdu_causes_no_terminate() {
    let (mut w, mut raw) = responder();
    w.recv(A, 1, &[]);
    let mut bytes = raw.fpdu(&ulpdu(&raw.tagged(Opcode::Write, Stag(0), 0, true), b""));
    bytes[5] ^= 1;
    raw.bytes(&mut w, &bytes);
    raw.collect(&mut w);
    assert!(raw.reset && raw.segments(&mut w).is_empty());
    assert_eq!(w.completions(A), ["1 Receive WrFlush"]);
    let event = &w.events(A)[0];
    assert!(event.starts_with("unreachable: the first FPDU failed: 2/0/02"), "{event}");

    // The FPDU is valid for MPA but not for RDMAP: a Terminate may report that.
    let (mut w, mut raw) = responder();
    raw.write(&mut w, Stag(5), 0, b"x");
    assert_eq!(raw.expect_terminate(&mut w).0, "1/1/00");
    assert!(w.events(A)[0].starts_with("established"));
}

//= MPA-7.1.2-10a
#[test]
fn a_responder_does_not_wait_forever() {
    let (mut w, mut raw) = responder();
    w.advance(Duration::from_millis(2999));
    assert_eq!(w.state(A), QpState::Rts);
    w.advance(Duration::from_millis(2));
    assert_eq!(w.state(A), QpState::Error);
    raw.collect(&mut w);
    assert!(raw.reset);
    let expected = "unreachable: the peer sent no FPDU before the deadline";
    assert_eq!(w.events(A), [expected]);
}

#[test]
fn ending_a_responder_before_its_first_fpdu() {
    for how in ["disconnect", "abort", "fin", "reset", "cq"] {
        let (mut w, mut raw) = responder();
        w.post(A, &[Wr::send(1, &[])]);
        match how {
            "disconnect" => w.disconnect(A),
            "abort" => w.abort(A),
            "fin" => raw.finish(&mut w),
            "reset" => raw.reset(&mut w),
            _ => {
                w.apps[0].cqs[0].cq.kill();
                w.post(A, &[Wr::send(2, &[])]);
                continue;
            }
        }
        assert_eq!(w.completions(A), ["1 Send WrFlush"], "{how}");
        assert_eq!(w.state(A), QpState::Error);
        assert!(raw.segments(&mut w).is_empty());
        assert!(w.events(A)[0].starts_with("unreachable"), "{how}");
    }
}

#[test]
fn every_rtr_kind() {
    for (kind, opcode) in [
        (RtrKinds::WRITE, Opcode::Write),
        (RtrKinds::READ, Opcode::ReadRequest),
        (RtrKinds::SEND, Opcode::Send),
    ] {
        // Between two engines: no receive is consumed, no completion appears, and the MSN advances.
        let wiring = Wiring::tcp().with(|o| o.rtr = kind);
        let mut w = World::connected(wiring);
        let a = w.any_mr(A, 4);
        let b = w.any_mr(B, 4);
        b.set(b"data");
        w.recv(B, 1, &[]);
        w.recv(B, 2, &[]);
        w.post(B, &[Wr::write(9, &[], &a, 0).inline(b"b")]);
        w.post(A, &[Wr::send(3, &[]), Wr::read(4, a.all(), &b, 0), Wr::send(5, &[])]);
        assert_eq!(w.completions(A), ["3 Send", "4 RdmaRead 4", "5 Send"], "{kind:?}");
        assert_eq!(w.completions(B), ["9 RdmaWrite", "1 Receive", "2 Receive"]);

        // As initiator, the QP sends the RTR before any posted request.
        let options = Wiring::tcp().with(|o| o.rtr = kind).a;
        let mut w = World::new(&[1]);
        let app = w.app(0);
        let cq = w.cq(app, 64);
        let qp = w.qp(app, cq, cq, Default::default());
        w.push(qp, &[Wr::send(1, &[])]);
        let mut raw = w.connect_raw(qp, true, options, options);
        let sent = raw.segments(&mut w);
        assert_eq!([sent[0].opcode(), sent[1].opcode()], [opcode, Opcode::Send]);
        let Header::Untagged(send) = sent[1].header else { panic!("{sent:?}") };
        assert_eq!(send.msn.0, if kind == RtrKinds::SEND { 2 } else { 1 });
        assert_eq!(w.completions(qp), ["1 Send"]);
        if kind == RtrKinds::READ {
            // The RTR's response is awaited like any other, and causes no completion.
            raw.response(&mut w, Stag(0), 0, b"", true);
            assert_eq!(w.completions(qp), [""; 0]);
        }
        assert_eq!(w.state(qp), QpState::Rts);
    }
}

#[test]
fn a_send_is_absorbed_only_as_the_rtr() {
    let p2p = |rtr| Wiring::tcp().with(|o| o.rtr = rtr).a;
    // The negotiated RTR Send comes first and needs no receive. The next Send needs a receive.
    let (mut w, mut raw) = World::against_raw(false, p2p(RtrKinds::SEND), p2p(RtrKinds::SEND));
    raw.send(&mut w, 1, b"");
    assert_eq!(w.events(A), ["established 4/4"]);
    raw.send(&mut w, 2, b"");
    assert_eq!(raw.expect_terminate(&mut w).0, "1/2/02");
    // Not negotiated, not empty, or not a plain Send: needs a receive.
    let cases: [(RtrKinds, Opcode, &[u8]); 3] = [
        (RtrKinds::WRITE, Opcode::Send, b""),
        (RtrKinds::SEND, Opcode::Send, b"x"),
        (RtrKinds::SEND, Opcode::SendSolicited, b""),
    ];
    for (rtr, opcode, payload) in cases {
        let (mut w, mut raw) = World::against_raw(false, p2p(rtr), p2p(rtr));
        let to = w.any_mr(A, 1);
        w.recv(A, 1, &[to.all()]);
        raw.segment(&mut w, raw.untagged(opcode, qn::SEND, 1, 0, true), payload);
        assert_eq!(w.completions(A).len(), 1, "{rtr:?} {opcode:?}");
    }
}

//= DDP-6.1-1
//= MPA-7.1-5
//= MPA-7.1.2-3c
#[test]
fn bytes_after_the_reply_are_fpdus() {
    let options = plain();
    let mut w = World::new(&[1]);
    let app = w.app(0);
    let cq = w.cq(app, 64);
    let qp = w.qp(app, cq, cq, Default::default());
    w.recv(qp, 1, &[]);
    w.recv(qp, 2, &[]);
    let mut early = Raw::new(0, &Wiring { a: options, b: options, ..Wiring::tcp() }.negotiate().1);
    let mut bytes = early.fpdu(&ulpdu(&early.untagged(Opcode::Send, 0, 1, 0, true), b""));
    bytes.extend(early.fpdu(&ulpdu(&early.untagged(Opcode::Send, 0, 2, 0, true), b"")));
    let later = bytes.split_off(30);
    w.leftover = bytes;
    let mut raw = w.connect_raw(qp, true, options, options);
    raw.bytes(&mut w, &later);
    assert_eq!(w.completions(qp), ["1 Receive", "2 Receive"]);
}

// --- Graceful closes -----------------------------------------------------------------------------

//= RDMAP-6.2-1
//= RDMAP-7-4
//= DDP-3-9
//= DDP-3-9a
//= DDP-6.2.1-1
//= DDP-6.2.1-2
//= DDP-6.2.1-3
//= DDP-6.2.1-5
//= DDP-6.2.1-7
//= MPA-7.2-1
#[test]
fn a_disconnect_finishes_posted_requests() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        let a = w.any_mr(A, 3000);
        let b = w.any_mr(B, 3000);
        let bytes = a.pattern(5);
        w.recv(B, 7, &[]);
        w.recv(B, 8, &[]);
        w.recv(A, 9, &[]);
        w.push(A, &[Wr::write(1, &[a.all()], &b, 0), Wr::read(2, a.sge(0..10), &b, 0)]);
        w.push(A, &[Wr::send(3, &[])]);
        w.disconnect(A);
        assert_eq!(w.completions(A), ["1 RdmaWrite", "2 RdmaRead 10", "3 Send"], "{wiring:?}");
        assert_eq!(w.completions(B), ["7 Receive", "8 Receive WrFlush"]);
        assert_eq!(b.bytes(), bytes);
        assert_eq!(w.events(A), [""; 0]);
        assert_eq!(w.events(B), ["peer closed"]);
        assert_eq!([w.state(A), w.state(B)], [QpState::Closing, QpState::Closing]);
        // A new request is flushed at A, and still sent at B.
        w.post(A, &[Wr::send(4, &[])]);
        w.post(B, &[Wr::write(5, &[b.sge(0..1)], &a, 0), Wr::send(6, &[])]);
        assert_eq!(w.completions(B), ["5 RdmaWrite", "6 Send"]);
        assert_eq!(w.completions(A), ["9 Receive"]);
        w.disconnect(B);
        assert_eq!(w.completions(A), ["4 Send WrFlush"]);
        assert_eq!(w.events(A), ["disconnected"], "{wiring:?}");
        assert_eq!(w.events(B), ["disconnected"]);
        assert_eq!([w.state(A), w.state(B)], [QpState::Error, QpState::Error]);
    }
}

//= DDP-6.2.1-2
#[test]
fn a_disconnect_sends_unseen_requests() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        for n in 0..8 {
            w.recv(B, n, &[]);
        }
        w.push(A, &[Wr::send(0, &[])]);
        w.settle();
        // The engine sees the first requests before the rest.
        for n in 1..4 {
            w.push(A, &[Wr::send(n, &[])]);
        }
        w.round();
        for n in 4..8 {
            w.push(A, &[Wr::send(n, &[])]);
        }
        w.disconnect(A);
        let sent: Vec<_> = (0..8).map(|n| format!("{n} Send")).collect();
        assert_eq!(w.completions(A), sent, "{wiring:?}");
    }
}

//= RDMAP-6.2-1
#[test]
fn both_disconnect_at_once() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        let a = w.any_mr(A, 100);
        let b = w.any_mr(B, 100);
        w.recv(A, 1, &[]);
        w.recv(B, 1, &[]);
        w.push(A, &[Wr::send(2, &[]), Wr::read(3, a.all(), &b, 0)]);
        w.push(B, &[Wr::send(2, &[])]);
        for qp in [A, B] {
            w.command(qp, |id| EngineCommand::Disconnect(id, DisconnectMode::Orderly));
        }
        w.settle();
        assert_eq!(w.events(A), ["disconnected"], "{wiring:?}");
        assert_eq!(w.events(B), ["disconnected"]);
        let log = w.completions(A);
        assert_eq!(log.len(), 3, "{log:?}");
        assert!(log.contains(&"2 Send".to_owned()));
        assert_eq!(w.completions(B).len(), 2);
    }
}

/// A disconnect with a time limit ends even if the peer does not close. The peer can still read
/// everything that was sent before.
#[test]
fn a_limited_disconnect_leaves_the_peer() {
    let limit = Duration::from_millis(500);
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.recv(B, 7, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        w.disconnect_within(A, limit);
        w.advance(limit - Duration::from_millis(1));
        assert_eq!(w.events(A), [""; 0]);
        w.advance(Duration::from_millis(1));
        assert_eq!((w.events(A), w.state(A)), (vec!["disconnected".into()], QpState::Error));
        assert_eq!(
            (w.completions(A), w.completions(B)),
            (vec!["1 Send".into()], vec!["7 Receive".into()])
        );
        assert_eq!((w.events(B), w.state(B)), (vec!["peer closed".into()], QpState::Closing));
        // The peer can no longer send, which it notices when it tries.
        w.post(B, &[Wr::send(8, &[]), Wr::send(9, &[])]);
        w.disconnect(B);
        w.advance(Duration::from_secs(11));
        assert_eq!((w.events(B).len(), w.state(B)), (1, QpState::Error), "{wiring:?}");
    }
}

/// Connects QPs of two other programs by the direct path. They get the slots of destroyed QPs.
fn strangers(w: &mut World) -> (usize, usize) {
    let [c, d] = [0, 1].map(|_| {
        let app = w.app(0);
        let cq = w.cq(app, 64);
        w.qp(app, cq, cq, QpShape::default())
    });
    w.connect(c, d, Wiring::direct());
    w.settle();
    assert_eq!((w.events(c).len(), w.events(d).len()), (1, 1));
    (c, d)
}

/// The peer of a destroyed QP does not reach the QP that reuses its slot.
#[test]
fn the_peer_of_a_gone_qp_reaches_no_other() {
    type Deed = fn(&mut World);
    let deeds: [(&str, Deed); 5] = [
        ("sends", |w| w.post(B, &[Wr::send(8, &[]), Wr::send(9, &[])])),
        ("aborts", |w| w.abort(B)),
        ("disconnects", |w| w.disconnect(B)),
        ("is destroyed", |w| w.destroy(B)),
        ("sends and disconnects", |w| {
            w.post(B, &[Wr::send(8, &[])]);
            w.disconnect(B);
        }),
    ];
    for (what, deed) in deeds {
        let mut w = World::connected(Wiring::direct());
        w.disconnect_within(A, Duration::from_millis(1));
        w.advance(Duration::from_millis(1));
        assert_eq!(w.state(A), QpState::Error);
        w.destroy(A);
        let (c, d) = strangers(&mut w);
        w.recv(c, 77, &[]);
        deed(&mut w);
        w.advance(Duration::from_secs(11));
        assert_eq!(
            (w.completions(c), w.events(c), w.events(d)),
            (vec![], vec![], vec![]),
            "{what}"
        );
        assert_eq!((w.state(c), w.state(d)), (QpState::Rts, QpState::Rts), "{what}");
        if what != "is destroyed" {
            assert_eq!(w.state(B), QpState::Error, "{what}");
        }
        // The new QPs are connected to each other.
        w.post(d, &[Wr::send(1, &[])]);
        assert_eq!(w.completions(c), ["77 Receive"], "{what}");
    }
}

/// The QP that sent a FIN may be destroyed before the FIN, which waits for a copy, is processed.
#[test]
fn a_late_fin_reaches_no_other_qp() {
    for answered in [false, true] {
        let mut w = World::connected(Wiring::direct());
        w.kind = MemoryKind::ThroughCopier;
        let into = w.any_mr(B, 100);
        w.kind = MemoryKind::Shared;
        w.answer_copies = false;
        w.recv(B, 7, &[into.all()]);
        w.post(A, &[Wr::send(1, &[]).inline(b"the last one")]);
        w.disconnect(A);
        w.disconnect(B);
        assert_eq!((w.events(A), w.state(A)), (vec!["disconnected".into()], QpState::Error));
        w.destroy(A);
        let (c, d) = strangers(&mut w);
        if answered {
            w.answer_copies = true;
            w.settle();
            assert_eq!(w.completions(B), ["7 Receive 12"]);
            assert_eq!(w.events(B), ["disconnected"]);
        }
        w.destroy(B);
        assert_eq!((w.events(c), w.events(d)), (vec![], vec![]));
        assert_eq!((w.state(c), w.state(d)), (QpState::Rts, QpState::Rts));
    }
}

/// A Send to a QP that a limited disconnect has ended does not wait forever.
#[test]
fn a_send_to_a_gone_qp_fails() {
    let mut w = World::connected(Wiring::direct());
    w.disconnect_within(A, Duration::from_millis(1));
    w.advance(Duration::from_millis(1));
    assert_eq!((w.events(B), w.state(B)), (vec!["peer closed".into()], QpState::Closing));
    w.post(B, &[Wr::send(8, &[]), Wr::send(9, &[])]);
    assert_eq!(w.completions(B), ["8 Send WrFlush", "9 Send WrFlush"]);
    assert!(w.events(B)[0].starts_with("lost: the peer has closed"));
    assert_eq!(w.state(B), QpState::Error);
}

/// A later call can set a limit for a disconnect in progress.
#[test]
fn a_pending_disconnect_gets_a_limit() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.disconnect(A);
        w.advance(Duration::from_secs(1));
        w.disconnect_within(A, Duration::from_millis(500));
        w.advance(Duration::from_millis(499));
        assert_eq!(w.state(A), QpState::Closing, "{wiring:?}");
        w.advance(Duration::from_millis(1));
        assert_eq!((w.events(A), w.state(A)), (vec!["disconnected".into()], QpState::Error));
    }
}

/// After the limit, requests that could not be sent are flushed.
#[test]
fn a_limited_disconnect_flushes_unsent_requests() {
    let limit = Duration::from_millis(500);
    let mut w = World::connected(Wiring::tcp());
    w.links[0].pipes[0].window = 0;
    w.post(A, &[Wr::send(1, &[])]);
    w.disconnect_within(A, limit);
    w.advance(limit - Duration::from_millis(1));
    assert_eq!([w.state(A), w.state(B)], [QpState::Closing, QpState::Rts]);
    w.advance(Duration::from_millis(1));
    assert_eq!([w.state(A), w.state(B)], [QpState::Error, QpState::Error]);
    assert!(w.events(A)[0].starts_with("lost: "));
}

#[test]
fn a_close_has_a_deadline() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.disconnect(A);
        w.advance(Duration::from_secs(11));
        assert_eq!(w.events(A), ["lost: the peer did not close before the deadline"]);
        assert_eq!(w.events(B)[0], "peer closed");
        assert_eq!(w.state(B), QpState::Error, "{wiring:?}");
    }
}

//= DDP-3-10
//= DDP-6.2-2
//= DDP-6.2.1-5
//= DDP-6.2.1-6
//= MPA-7.2-2
#[test]
fn a_fin_fails_outstanding_reads() {
    let (mut w, mut raw) = World::raw();
    let sink = w.any_mr(A, 10);
    let source = w.any_mr(A, 1);
    w.recv(A, 8, &[]);
    let batch = [Wr::read(1, sink.all(), &source, 0), Wr::send(2, &[])];
    w.post(A, &batch);
    raw.finish(&mut w);
    let failed = "RdmaRead RemoteAborted 2/0/01";
    assert_eq!(
        w.completions(A),
        [format!("1 {failed}"), "2 Send".into(), "8 Receive WrFlush".into()]
    );
    assert_eq!(w.events(A), ["peer closed"]);
    let batch = [Wr::read(3, sink.all(), &source, 0), Wr::send(4, &[])];
    w.post(A, &batch);
    assert_eq!(w.completions(A), [format!("3 {failed}"), "4 Send".into()]);
    w.disconnect(A);
    assert_eq!(w.events(A), ["disconnected"]);
    assert!(raw.is_closed(&w));
}

//= DDP-6.2.2-1
//= DDP-6.2.2-2
//= DDP-7-1
//= MPA-6-5
//= MPA-8-1
//= MPA-8-3
#[test]
fn a_fin_inside_an_fpdu_is_a_loss() {
    // At every byte of an FPDU.
    let (w, mut raw) = World::raw();
    let bytes = raw.fpdu(&ulpdu(&raw.untagged(Opcode::Send, 0, 1, 0, true), b"abc"));
    drop(w);
    for cut in 1..bytes.len() {
        let (mut w, mut raw) = World::raw();
        let to = w.any_mr(A, 8);
        let sink = w.any_mr(A, 8);
        w.recv(A, 1, &[to.all()]);
        w.post(A, &[Wr::read(2, sink.all(), &sink, 0)]);
        assert_eq!(raw.segments(&mut w).len(), 1);
        raw.bytes(&mut w, &bytes[..cut]);
        raw.finish(&mut w);
        assert_eq!(raw.expect_terminate(&mut w), ("2/0/01".to_owned(), vec![]));
        assert_eq!(w.completions(A), ["2 RdmaRead WrFlush", "1 Receive WrFlush"]);
        assert_eq!(to.bytes(), [0; 8]);
        assert_eq!(w.events(A), ["lost: the peer closed inside a message"]);
        assert_eq!(w.state(A), QpState::Error);
        assert!(raw.is_closed(&w));
    }
}

// --- Terminates ----------------------------------------------------------------------------------

//= RDMAP-5.4-8
//= RDMAP-5.4-9
//= RDMAP-6.2.1-4
//= RDMAP-7-1
//= DDP-3-8
//= DDP-6.2.2-2
#[test]
fn one_terminate_then_fin_then_nothing() {
    // With unsent requests, and much unread data from the peer.
    let (mut w, mut raw) = World::raw();
    let any = w.any_mr(A, 40_000);
    let sink = w.any_mr(A, 10);
    w.links[0].pipes[0].window = 3000;
    let mut batch = vec![Wr::write(1, &[any.all()], &any, 0)];
    batch.extend((2..20).map(|n| Wr::send(n, &[any.sge(0..500)])));
    batch.push(Wr::read(20, sink.all(), &any, 0));
    w.post(A, &batch);
    // Two faults, and much more data after them.
    let mut bytes = Vec::new();
    let header = raw.tagged(Opcode::Write, Stag(99), 0, true);
    for _ in 0..1000 {
        bytes.extend(raw.fpdu(&ulpdu(&header, &[7; 900])));
    }
    raw.bytes(&mut w, &bytes);
    w.links[0].pipes[0].window = 1 << 20;
    w.settle();
    let segments = raw.segments(&mut w);
    let terminates = segments.iter().filter(|s| s.opcode() == Opcode::Terminate).count();
    assert_eq!(terminates, 1);
    assert_eq!(segments.last().unwrap().opcode(), Opcode::Terminate);
    assert!(raw.fin && !raw.reset);
    let log = w.completions(A);
    assert_eq!(log.len(), 20);
    assert!(log.iter().all(|c| c.ends_with("WrFlush")), "{log:?}");
    assert_eq!(w.state(A), QpState::Terminate);
    assert_eq!(w.events(A), [""; 0]);
    raw.finish(&mut w);
    assert!(w.events(A)[0].starts_with("terminated 1/1/00"));
    assert!(raw.is_closed(&w));
}

#[test]
fn terminates_that_cross() {
    let mut w = World::connected(Wiring::tcp());
    for pipe in &mut w.links[0].pipes {
        pipe.latency = 1_000_000;
    }
    let a = w.any_mr(A, 1);
    let b = w.any_mr(B, 1);
    w.revoke(A, a.stag);
    w.revoke(B, b.stag);
    w.recv(A, 7, &[]);
    w.recv(B, 7, &[]);
    w.push(A, &[Wr::write(1, &[], &b, 0).inline(b"x")]);
    w.push(B, &[Wr::write(1, &[], &a, 0).inline(b"x")]);
    w.settle();
    for end in [A, B] {
        assert_eq!(w.completions(end), ["1 RdmaWrite", "7 Receive WrFlush"]);
        let events = w.events(end);
        assert_eq!(events.len(), 1);
        assert!(events[0].starts_with("terminated 1/1/00"), "{events:?}");
        assert_eq!(w.state(end), QpState::Error);
    }
}

//= RDMAP-7-4
//= DDP-3-10
//= DDP-6.2-2
#[test]
fn a_terminated_peer_has_a_close_deadline() {
    let (mut w, mut raw) = World::raw();
    raw.write(&mut w, Stag(1), 0, b"x");
    raw.expect_terminate(&mut w);
    w.advance(Duration::from_secs(4));
    assert!(!raw.is_closed(&w));
    w.advance(Duration::from_secs(2));
    assert!(raw.is_closed(&w));
    assert_eq!(w.state(A), QpState::Error);
    // A peer that reads nothing does not delay the end forever either.
    let (mut w, mut raw) = World::raw();
    w.links[0].pipes[0].window = 0;
    raw.write(&mut w, Stag(1), 0, b"x");
    w.advance(Duration::from_secs(6));
    assert!(raw.is_closed(&w));
    assert!(w.events(A)[0].starts_with("terminated 1/1/00"));
}

#[test]
fn a_terminate_blames_the_read_it_names() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let sink = w.any_mr(A, 30);
        let good = w.any_mr(B, 10);
        let bad = w.mr(B, 10, Access::empty());
        w.post(A, &[Wr::read(1, sink.sge(0..10), &bad, 0)]);
        assert_eq!(w.completions(A), ["1 RdmaRead RemoteAccess 0/1/02"], "{wiring:?}");
        let mut w = World::connected(wiring);
        let sink2 = w.any_mr(A, 30);
        let good2 = w.any_mr(B, 10);
        let bad2 = w.mr(B, 10, Access::empty());
        drop((sink, good));
        w.push(
            A,
            &[
                Wr::read(1, sink2.sge(0..10), &good2, 0),
                Wr::read(2, sink2.sge(10..20), &bad2, 0),
                Wr::read(3, sink2.sge(20..30), &good2, 0),
            ],
        );
        w.settle();
        let log = w.completions(A);
        assert_eq!(log[1], "2 RdmaRead RemoteAccess 0/1/02", "{log:?}");
        assert_eq!(log[2], "3 RdmaRead WrFlush");
    }
}

#[test]
fn a_terminate_cuts_only_tagged_messages() {
    for untagged in [false, true] {
        let (mut w, mut raw) = World::raw();
        let any = w.any_mr(A, 60_000);
        w.links[0].pipes[0].window = 4000;
        // More than one batch, so that the message is in progress when the fault occurs.
        w.one_segment_at_a_time();
        let wr =
            if untagged { Wr::send(1, &[any.all()]) } else { Wr::write(1, &[any.all()], &any, 0) };
        w.post(A, &[wr]);
        raw.write(&mut w, Stag(1), 0, b"x");
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        let segments = raw.segments(&mut w);
        let (terminate, rest) = segments.split_last().unwrap();
        assert_eq!(terminate.opcode(), Opcode::Terminate);
        let bytes: usize = rest.iter().map(|s| s.payload.len()).sum();
        assert_eq!(bytes == 60_000, untagged, "{bytes}");
        assert_eq!(w.completions(A).len(), 1);
    }
}

// --- Aborts and destruction ----------------------------------------------------------------------

#[test]
fn abort_flushes_here_and_is_a_loss_there() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        w.recv(A, 1, &[]);
        w.recv(B, 2, &[]);
        w.push(A, &[Wr::send(3, &[])]);
        w.abort(A);
        assert_eq!(w.completions(A), ["3 Send WrFlush", "1 Receive WrFlush"]);
        assert_eq!(w.completions(B), ["2 Receive WrFlush"]);
        assert_eq!(w.events(A), ["aborted"]);
        assert!(w.events(B)[0].starts_with("lost: "), "{wiring:?}");
        // Later requests are flushed as they are posted.
        w.post(A, &[Wr::send(4, &[]).unsignaled(), Wr::send(5, &[])]);
        assert_eq!(w.completions(A), ["4 Send WrFlush", "5 Send WrFlush"]);
        // Further calls cause no event.
        w.abort(A);
        w.disconnect(B);
        assert_eq!(w.events(A), [""; 0]);
        assert_eq!(w.events(B), [""; 0]);
    }
}

#[test]
fn destroy_frees_slots_without_completions() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        if !wiring.direct {
            w.links[0].pipes[0].window = 0;
        }
        let sink = w.any_mr(A, 10);
        let from = w.any_mr(B, 10);
        let reads: Vec<Wr> = (0..9).map(|n| Wr::read(n, sink.all(), &from, 0)).collect();
        w.recv(A, 1, &[]);
        w.push(A, &reads);
        w.round();
        w.completions(A);
        w.destroy(A);
        assert_eq!(w.completions(A).len(), 0);
        assert_eq!(w.apps[0].cqs[0].cq.usage().1, 0, "no slot stays reserved");
        assert_eq!(w.events(A), [""; 0]);
        // B gets a Terminate if it can be sent. Over TCP it cannot: the window is 0.
        let end = if wiring.direct { "terminated by peer 0/0/00" } else { "lost: " };
        assert!(w.events(B)[0].starts_with(end), "{wiring:?}");
        assert_eq!(w.engines[0].qp_count(), usize::from(wiring.direct));
        // The client may still ring its doorbell.
        let app = w.qps[A].app;
        let bell = w.qps[A].doorbell;
        w.ring(app, 0, bell);
        w.settle();
    }
}

// A program that does not wait for its last request relies on a fast adapter.
#[test]
fn posted_requests_are_sent_before_destroy() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        let from = w.any_mr(A, 100);
        let to = w.any_mr(B, 100);
        w.recv(B, 1, &[to.all()]);
        w.push(A, &[Wr::send(2, &[from.all()]).unsignaled()]);
        w.destroy(A);
        assert_eq!(w.completions(B), ["1 Receive 100"], "{wiring:?}");
        assert_eq!(to.bytes(), from.bytes());
        assert_eq!(w.events(B), ["terminated by peer 0/0/00"], "{wiring:?}");
    }
}

/// Data sent before a graceful disconnect or a Terminate are delivered even if the program then
/// destroys the QP immediately.
//= RDMAP-6.2.1-4
#[test]
fn destroy_keeps_sent_data() {
    for terminated in [false, true] {
        let mut w = World::connected(Wiring::tcp());
        let b = w.any_mr(B, 10);
        w.recv(A, 1, &[]);
        w.recv(B, 1, &[]);
        w.links[0].pipes[0].latency = 1_000_000;
        w.push(A, &[Wr::send(2, &[])]);
        while w.round() {}
        if terminated {
            w.push(B, &[Wr::send(2, &[b.all()])]);
        } else {
            w.command(A, |id| EngineCommand::Disconnect(id, DisconnectMode::Orderly));
        }
        while w.round() {}
        w.destroy(A);
        assert!(w.completions(B).contains(&"1 Receive".to_owned()));
        let ends = if terminated { "terminated by peer 1/2/05" } else { "peer closed" };
        let events = w.events(B);
        assert!(events.len() == 1 && events[0].starts_with(ends), "{events:?}");
    }
}

#[test]
fn detaching_a_session_removes_its_objects() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        let a = w.any_mr(A, 10);
        let b = w.any_mr(B, 10);
        w.recv(B, 1, &[]);
        w.push(A, &[Wr::write(1, &[a.all()], &b, 0)]);
        let session = w.apps[0].session;
        let engine = w.qps[A].engine;
        let now = w.now;
        w.engines[engine].detach_session(session, now);
        w.settle();
        assert_eq!(w.events(B), ["terminated by peer 0/0/00"], "{wiring:?}");
        assert_eq!(w.completions(B), ["1 Receive WrFlush"]);
        let stags = &w.engines[engine].state.stags;
        assert_eq!(
            stags.len(),
            usize::from(wiring.direct),
            "only the other session's region is left"
        );
    }
}

//= DDP-3-3
//= DDP-6.2.2-1
//= DDP-7-1
//= MPA-8-3
#[test]
fn a_reset_or_a_failing_socket_is_a_loss() {
    let (mut w, mut raw) = World::raw();
    w.recv(A, 1, &[]);
    raw.reset(&mut w);
    assert_eq!(w.completions(A), ["1 Receive WrFlush"]);
    assert!(w.events(A)[0].starts_with("lost: receiving failed"));
    assert_eq!(w.next_timeout(), None);

    let (mut w, raw) = World::raw();
    w.links[raw.link].pipes[0].finish(rnic_abi::types::Time(0));
    w.post(A, &[Wr::send(1, &[])]);
    assert_eq!(w.completions(A), ["1 Send WrFlush"]);
    assert!(w.events(A)[0].starts_with("lost: sending failed"));
}

#[test]
fn an_unconnected_qp_in_error_is_flushed() {
    let mut w = World::new(&[1]);
    let app = w.app(0);
    let cq = w.cq(app, 16);
    let qp = w.qp(app, cq, cq, Default::default());
    w.recv(qp, 1, &[]);
    w.push(qp, &[Wr::send(2, &[])]);
    w.attach_in_error(qp);
    assert_eq!(w.completions(qp), ["2 Send WrFlush", "1 Receive WrFlush"]);
    w.post(qp, &[Wr::send(3, &[])]);
    assert_eq!(w.completions(qp), ["3 Send WrFlush"]);
    assert_eq!(w.events(qp), [""; 0]);
}

#[test]
fn receives_posted_in_error_are_flushed() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        w.recv(A, 1, &[]);
        w.abort(A);
        assert_eq!(w.completions(A), ["1 Receive WrFlush"], "{wiring:?}");
        for n in 2..5 {
            w.recv(A, n, &[]);
            w.settle();
            assert_eq!(w.completions(A), [format!("{n} Receive WrFlush")], "{wiring:?}");
        }
    }
}

/// The client posts after the flush has read its queue, and before the flush is complete.
#[test]
fn a_receive_posted_during_a_flush_is_flushed() {
    let mut w = World::connected(Wiring::tcp());
    w.command(A, |id| EngineCommand::Disconnect(id, DisconnectMode::Abort));
    w.recv(A, 1, &[]);
    w.settle();
    assert_eq!(w.completions(A), ["1 Receive WrFlush"]);
}

#[test]
fn order_of_events_and_completions() {
    for wiring in Wiring::all() {
        let mut w = World::pair(wiring);
        assert!(matches!(w.apps[0].events[0], Event::Established { .. }));
        w.recv(B, 1, &[]);
        w.abort(A);
        let is_end = |e: &Event| matches!(e, Event::Disconnected { .. });
        assert!(w.apps[1].events.iter().any(is_end));
        assert_eq!(w.completions(B), ["1 Receive WrFlush"]);
    }
}

/// Much more data than a turn allows arrives at once, with a message at its end, and then the
/// connection ends. All data are processed before the end, even if a call to send detects it first.
#[test]
fn data_before_the_end_are_processed() {
    for (sending, fin) in [(false, true), (true, false), (true, true)] {
        let (mut w, mut raw) = World::raw();
        let inbox = w.any_mr(A, 4);
        w.recv(A, 7, &[inbox.all()]);
        w.recv(A, 8, &[]);
        let write = ulpdu(&raw.tagged(Opcode::Write, Stag(0), 0, true), b"");
        let mut bytes: Vec<u8> = (0..1000).flat_map(|_| raw.fpdu(&write)).collect();
        let send = ulpdu(&raw.untagged(Opcode::Send, qn::SEND, 1, 0, true), b"last");
        bytes.extend(raw.fpdu(&send));
        let now = w.now;
        let [out, inbound] = &mut w.links[raw.link].pipes;
        assert_eq!(inbound.send(&bytes, now).unwrap(), bytes.len());
        if fin {
            inbound.finish(now);
        }
        if sending {
            // The next send fails with `EPIPE`.
            out.finish(now);
            w.push(A, &[Wr::send(1, &[])]);
        }
        w.settle();
        let mut done = w.completions(A);
        let mut events = w.events(A);
        assert_eq!(inbox.bytes(), b"last", "{sending} {fin}");
        assert_eq!(done.remove(0), "7 Receive 4");
        assert_eq!(done.pop().unwrap(), "8 Receive WrFlush");
        let event = events.remove(0);
        if sending {
            assert_eq!(done, ["1 Send WrFlush"]);
            assert!(event.starts_with("lost: sending failed"), "{event}");
            assert!(raw.is_closed(&w) && events.is_empty());
        } else {
            assert!(done.is_empty() && event == "peer closed", "{event}");
        }
    }
}

/// Like the previous test, with a fault in the data. No Terminate can be sent.
#[test]
fn a_fault_before_a_broken_connection() {
    let (mut w, mut raw) = World::raw();
    let now = w.now;
    let fault = ulpdu(&raw.tagged(Opcode::Write, Stag(5), 0, true), b"x");
    let fault = raw.fpdu(&fault);
    let [out, inbound] = &mut w.links[raw.link].pipes;
    inbound.send(&fault, now).unwrap();
    out.finish(now);
    w.post(A, &[Wr::send(1, &[])]);
    assert_eq!(w.completions(A), ["1 Send WrFlush"]);
    assert!(w.events(A)[0].starts_with("terminated 1/1/00"));
    assert!(raw.is_closed(&w));
}

#[test]
fn a_short_read_means_an_empty_socket() {
    use crate::engine::Receive;
    let (mut w, _raw) = World::raw();
    let engine = w.qps[A].engine;
    let id = w.qps[A].id;
    let now = w.now;
    let mut room = 0;
    let mut read = |short: usize| {
        w.engines[engine].receive(id, now, |buffers| {
            room = buffers.iter().map(|b| b.len()).sum();
            // An FPDU of length 0 is invalid, so the zeros end the stream. The rest is read anyway.
            Ok(room - short)
        })
    };
    assert_eq!([read(1), read(0)], [Receive::Emptied, Receive::Progress]);
    assert!(room > 0);
}

#[test]
fn an_interrupted_call_is_retried() {
    let (mut w, mut raw) = World::raw();
    w.push(A, &[Wr::send(1, &[])]);
    let engine = w.qps[A].engine;
    let id = w.qps[A].id;
    let now = w.now;
    w.engines[engine].poll_doorbells(now);
    assert!(w.engines[engine].poll_work(now).is_some());
    let interrupted = || Err(std::io::ErrorKind::Interrupted.into());
    let sent = w.engines[engine].transmit(id, now, 1460, |_| interrupted());
    assert_eq!(sent, crate::engine::Transmit::More);
    let received = w.engines[engine].receive(id, now, |_| interrupted());
    assert_eq!(received, crate::engine::Receive::Progress);
    w.settle();
    assert_eq!(raw.segments(&mut w).len(), 1);
    assert_eq!(w.completions(A), ["1 Send"]);
}

#[test]
fn a_responder_answers_an_early_read() {
    let options = Wiring::tcp().with(|o| o.rtr = RtrKinds::READ).a;
    let (mut w, mut raw) = World::against_raw(false, options, options);
    let nothing = ReadRequest {
        sink_stag: Stag(3),
        sink_to: TaggedOffset(4),
        size: 0,
        src_stag: Stag(0),
        src_to: TaggedOffset(0),
    };
    raw.read(&mut w, 1, &nothing);
    let sent = raw.segments(&mut w);
    assert_eq!(sent[0].header, raw.tagged(Opcode::ReadResponse, Stag(3), 4, true));
}

#[test]
fn a_session_that_is_ending_ends_once() {
    let mut w = World::connected(Wiring::direct());
    let session = w.apps[w.qps[A].app].session;
    let engine = w.qps[A].engine;
    w.engines[engine].close_session(session, w.now);
    w.engines[engine].detach_session(session, w.now);
    assert!(!w.engines[engine].is_ending());
    assert_eq!(w.engines[engine].users(), 1);
}
