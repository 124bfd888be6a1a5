//! The texts of diagnoses: the rule, and the exact fault. [`World::poll_cq`] checks in all tests
//! that every failed completion has a diagnosis.

use super::raw::Raw;
use super::requests::Wr;
use super::world::{A, B, QpShape, Wiring, World};
use crate::rdmap::{Opcode, ReadRequest};
use rnic_abi::abi::control::{Diagnosis, DiagnosisKind};
use rnic_abi::abi::queue::Sge;
use rnic_abi::types::{
    Access, CompletionStatus, Stag, TaggedOffset, TerminateCode, TerminateOrigin,
};

fn about(record: &Diagnosis) -> (Option<Stag>, Option<u64>, Option<u64>) {
    (record.stag, record.offset, record.length)
}

fn code(text: &str) -> TerminateCode {
    let parts: Vec<u8> = text.split('/').map(|p| u8::from_str_radix(p, 16).unwrap()).collect();
    TerminateCode { layer: parts[0], etype: parts[1], code: parts[2] }
}

fn sent(text: &str) -> DiagnosisKind {
    DiagnosisKind::Terminate { origin: TerminateOrigin::Local, code: code(text) }
}

fn received(text: &str) -> DiagnosisKind {
    DiagnosisKind::Terminate { origin: TerminateOrigin::Peer, code: code(text) }
}

#[test]
fn a_local_key_diagnosis_names_its_rights() {
    for wiring in Wiring::both() {
        for (what, words) in [
            ("unknown", "has no such region"),
            ("range", "it covers 100 bytes from"),
            ("read-only", "it grants remote-read only"),
            ("other domain", "its region is in PD"),
            ("other QP", "it is limited to a queue pair other"),
        ] {
            let mut w = World::connected(wiring);
            let b = w.any_mr(B, 100);
            let app = w.qps[A].app;
            let cq = w.cq(app, 8);
            let sibling = w.qp(app, cq, cq, QpShape::default());
            let a = match what {
                "read-only" => w.mr(A, 100, Access::REMOTE_READ),
                "other QP" => w.own_mr(sibling, 100, Access::LOCAL_WRITE),
                "other domain" => {
                    let pd = w.apps[app].pd;
                    w.apps[app].pd.0 += 1000;
                    let mr = w.any_mr(A, 100);
                    w.apps[app].pd = pd;
                    mr
                }
                _ => w.any_mr(A, 100),
            };
            let mut sge = a.sge(10..50);
            match what {
                "unknown" => sge.lkey ^= 0x0F0F_0000,
                "range" => sge.addr += 70,
                _ => {}
            }
            let wr = match what {
                "read-only" => Wr::read(7, sge, &b, 0),
                _ => Wr::write(7, &[sge], &b, 0),
            };
            w.post(A, &[wr]);
            w.completions(A);
            let why = w.diagnosis(A);
            let status = CompletionStatus::LocalProtection;
            assert_eq!(why.what, DiagnosisKind::Completion { wr_id: 7, status }, "{what}");
            assert!(why.rule.starts_with("local contract: a local key names"), "{why:?}");
            assert!(why.text.contains(words), "{why:?}");
            assert_eq!(about(&why), (Some(Stag(sge.lkey)), Some(sge.addr), Some(40)), "{what}");
            assert_eq!(why.pd, Some(w.apps[app].pd));
            assert!(why.addresses.is_some());
            assert_eq!(w.diagnosis(B).what, received("0/0/00"), "the other end has one too");
        }
    }
}

#[test]
fn a_strangers_region_is_not_described() {
    let mut w = World::connected(Wiring::direct());
    // The region belongs to another session on the same host.
    let theirs = w.mr(B, 100, Access::LOCAL_WRITE);
    let b = w.any_mr(B, 100);
    w.post(A, &[Wr::write(1, &[theirs.all()], &b, 0)]);
    let why = w.diagnosis(A);
    assert!(why.text.ends_with("has no such region"), "{why:?}");

    let mut w = World::connected(Wiring::direct());
    let mine = w.mr(A, 100, Access::REMOTE_WRITE);
    let local = w.any_mr(A, 1);
    w.post(A, &[Wr::write(1, &[local.all()], &mine, 0)]);
    let why = w.diagnosis(B);
    assert_eq!(why.what, sent("1/1/02"));
    assert!(why.text.contains("is not associated with this stream"), "{why:?}");
}

#[test]
fn malformed_requests_are_explained() {
    let cases: &[(&str, &str, &str)] = &[
        ("flags", "local contract: entries", "flags 0x102 or parameters"),
        ("opcode", "local contract: entries", "number 99"),
        ("two sinks", "RFC 5040 section 4.4", "2 SGEs were given"),
        ("long", "RFC 5041 section 5.2", "2^32 bytes or more"),
        ("not mine", "local contract: a queue pair invalidates", "may invalidate"),
    ];
    for (what, rule, words) in cases {
        let mut w = World::connected(Wiring::tcp());
        let a = w.any_mr(A, 10);
        let b = w.any_mr(B, 10);
        let mut wr = Wr::write(7, &[a.all()], &b, 0);
        match *what {
            "flags" => wr.header.flags |= 0x100,
            "opcode" => wr.header.opcode = 99,
            "long" => {
                let huge = Sge { length: u32::MAX, ..a.all() };
                wr = Wr::send(7, &[huge, huge]);
            }
            "not mine" => wr = Wr::local_invalidate(7, Stag(5)),
            _ => {
                wr = Wr::read(7, a.sge(0..4), &b, 0);
                wr.sges.push(a.sge(4..8));
            }
        }
        w.post(A, &[wr]);
        let why = w.diagnosis(A);
        assert!(matches!(why.what, DiagnosisKind::Completion { wr_id: 7, .. }), "{what}: {why:?}");
        assert!(why.rule.starts_with(rule), "{what}: {why:?}");
        assert!(why.text.contains(words), "{what}: {why:?}");
    }
}

#[test]
fn a_failed_write_is_explained_at_both_ends() {
    let all = Access::REMOTE_READ | Access::LOCAL_WRITE;
    for (what, told, words) in [
        ("unknown", "1/1/00", "no region has STag"),
        ("rights", "1/1/00", "grants local-write, remote-read only; an RDMA Write of 40 bytes at"),
        ("bounds", "1/1/01", "covers 100 bytes from"),
        ("wrap", "1/1/03", "reach 2^64"),
        ("domain", "1/1/02", "is in PD"),
        ("QP", "1/1/02", "is limited to QP"),
    ] {
        let mut records = Vec::new();
        for wiring in Wiring::both() {
            let mut w = World::connected(wiring);
            let local = w.any_mr(A, 100);
            let app = w.qps[B].app;
            let cq = w.cq(app, 8);
            let sibling = w.qp(app, cq, cq, QpShape::default());
            let to = match what {
                "rights" => w.mr(B, 100, all),
                "QP" => w.own_mr(sibling, 100, Access::REMOTE_WRITE),
                "domain" => {
                    let pd = w.apps[app].pd;
                    w.apps[app].pd.0 += 1000;
                    let mr = w.any_mr(B, 100);
                    w.apps[app].pd = pd;
                    mr
                }
                _ => w.any_mr(B, 100),
            };
            let mut stag = to.stag;
            let mut at = to.iova + 10;
            match what {
                "unknown" => stag.0 ^= 0x0F0F_0000,
                "bounds" => at = to.iova + 61,
                "wrap" => at = u64::MAX - 39,
                _ => {}
            }
            w.recv(A, 3, &[]);
            w.recv(B, 4, &[]);
            w.post(A, &[Wr::write(7, &[local.sge(0..40)], &to, 0).remote(stag, at)]);
            assert_eq!(w.completions(B), ["4 Receive WrFlush"]);
            assert_eq!(w.completions(A), ["7 RdmaWrite", "3 Receive WrFlush"]);
            let target = w.diagnosis(B);
            let requester = w.diagnosis(A);
            assert_eq!(target.what, sent(told), "{what}");
            assert!(
                target.rule.starts_with(&format!("RFC 5041 section 7.1, {told}")),
                "{target:?}"
            );
            assert!(target.text.contains(words), "{what}: {target:?}");
            assert_eq!(about(&target), (Some(stag), Some(at), Some(40)), "{what}");
            assert_eq!(requester.what, received(told));
            assert!(target.rule.starts_with(&requester.rule), "{requester:?}");
            assert_eq!(about(&requester), (Some(stag), Some(at), Some(40)), "{what}");
            assert_eq!(w.notes.iter().filter(|(_, kind)| *kind == "qp_terminated").count(), 2);
            records.push([target, requester].map(|r| (r.rule, r.text)));
        }
        assert_eq!(records[0], records[1], "{what}");
    }
}

#[test]
fn a_refused_read_is_explained_at_both_ends() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let sink = w.any_mr(A, 100);
        let good = w.any_mr(B, 100);
        let bad = w.mr(B, 100, Access::REMOTE_WRITE);
        w.post(
            A,
            &[Wr::read(6, sink.sge(0..10), &good, 0), Wr::read(7, sink.sge(10..50), &bad, 5)],
        );
        let target = w.diagnosis(B);
        assert_eq!(target.what, sent("0/1/02"));
        assert!(target.text.contains("grants remote-write only; an RDMA Read of 40 bytes"));
        let requester = w.diagnosis(A);
        assert_eq!(requester.what, received("0/1/02"));
        assert!(requester.text.contains("for this side's request 7"), "{requester:?}");
        let expected = (Some(bad.stag), Some(bad.iova + 5), Some(40));
        assert_eq!((about(&target), about(&requester)), (expected, expected));
        assert!(w.completions(A).contains(&"7 RdmaRead RemoteAccess 0/1/02".to_owned()));
    }
}

#[test]
fn sends_without_room_are_explained() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.post(A, &[Wr::send(1, &[]).inline(b"x")]);
        let why = w.diagnosis(B);
        assert_eq!(why.what, sent("1/2/02"));
        assert!(why.text.contains("no receive was posted"), "{why:?}");

        let mut w = World::connected(wiring);
        let to = w.any_mr(B, 8);
        w.recv(B, 7, &[to.all()]);
        w.post(A, &[Wr::send(1, &[]).inline(b"123456789")]);
        let why = w.diagnosis(B);
        let status = CompletionStatus::LocalLength;
        assert_eq!(why.what, DiagnosisKind::Completion { wr_id: 7, status });
        assert!(why.rule.starts_with("RFC 5041 section 7.1, 1/2/05"), "{why:?}");
        assert!(why.text.contains("9 bytes long, but its receive has 8"), "{why:?}");
        assert_eq!(why.length, Some(9));
        w.completions(B);
    }
}

#[test]
fn invalid_receives_and_invalidations() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let read_only = w.mr(B, 10, Access::REMOTE_READ);
        w.recv(B, 7, &[read_only.all()]);
        w.post(A, &[Wr::send(1, &[]).inline(b"0123456789")]);
        let why = w.diagnosis(B);
        let status = CompletionStatus::LocalProtection;
        assert_eq!(why.what, DiagnosisKind::Completion { wr_id: 7, status });
        assert!(why.text.contains("cannot write through local key"), "{why:?}");
        assert_eq!(about(&why), (Some(read_only.stag), Some(read_only.iova), Some(10)));
        w.completions(B);

        for (what, told, words) in
            [("domain", "0/2/09", "shared by all"), ("none", "0/1/09", "no region has it")]
        {
            let mut w = World::connected(wiring);
            let mr = w.any_mr(B, 10);
            let stag = if what == "none" { Stag(5) } else { mr.stag };
            w.recv(B, 1, &[]);
            w.post(A, &[Wr::send_invalidate(9, &[], stag)]);
            w.completions(B);
            let why = w.diagnosis(B);
            let status = CompletionStatus::RemoteInvalidRequest;
            assert_eq!(why.what, DiagnosisKind::Completion { wr_id: 1, status });
            assert!(why.rule.starts_with(&format!("RFC 5040 section 7.2, {told}")), "{why:?}");
            assert!(why.text.contains(words), "{why:?}");
            assert_eq!(why.stag, Some(stag));
            assert_eq!(w.diagnosis(A).what, received(told));
        }
    }
}

//= MPA-8-2
#[test]
fn faults_of_a_scripted_peer() {
    let response = |w: &mut World, raw: &mut Raw, at: i64, len: usize| {
        let sink = w.any_mr(A, 30);
        let source = w.any_mr(A, 1);
        w.post(A, &[Wr::read(1, sink.sge(10..20), &source, 0)]);
        let to = (sink.iova + 10).wrapping_add_signed(at);
        raw.response(w, sink.stag, to, &vec![0; len], true);
        w.completions(A);
    };
    type Play = fn(&mut World, &mut Raw);
    let crc: Play = |w, raw| {
        let header = raw.untagged(Opcode::Send, 0, 1, 0, true);
        let mut bytes = raw.fpdu(&super::raw::ulpdu(&header, b"x"));
        bytes[5] ^= 1;
        raw.bytes(w, &bytes);
    };
    let short: Play = |w, raw| raw.ulpdu(w, &[0x41; 5]);
    let opcode: Play = |w, raw| {
        raw.segment(w, raw.untagged(Opcode::from_bits(15), 0, 1, 0, true), b"");
    };
    let unasked: Play = |w, raw| raw.response(w, Stag(1), 0, b"", true);
    let msn: Play = |w, raw| raw.send(w, 9, b"");
    for (play, told, rule, words) in [
        (crc, "2/0/02", "RFC 5044 section 8, 2/0/02: CRC mismatch", "segment is invalid"),
        (short, "0/2/ff", "RFC 5040 section 7.2, 0/2/ff", "segment is invalid"),
        (opcode, "0/2/06", "RFC 5040 section 7.2, 0/2/06", "offset 0 of message 1 on queue 0"),
        (
            unasked,
            "0/2/06",
            "RFC 5040 section 7.2, 0/2/06",
            "a Read Response arrived that answers no",
        ),
        (msn, "1/2/03", "RFC 5041 section 7.1, 1/2/03", "of message 9 on queue 0"),
    ] {
        let (mut w, mut raw) = World::raw();
        play(&mut w, &mut raw);
        let why = w.diagnosis(A);
        assert_eq!(why.what, sent(told), "{why:?}");
        assert!(why.rule.starts_with(rule), "{why:?}");
        assert!(why.text.contains(words), "{why:?}");
    }
    for (at, len, words) in [(-1, 10, "outside the 10 bytes"), (0, 9, "10 bytes with 9 bytes")] {
        let (mut w, mut raw) = World::raw();
        response(&mut w, &mut raw, at, len);
        let why = w.diagnosis(A);
        assert_eq!(why.what, sent("1/1/01"));
        assert!(why.text.contains(words), "{why:?}");
    }
    let (mut w, mut raw) = World::raw();
    let from = w.mr(A, 100, Access::REMOTE_READ);
    w.links[0].pipes[0].window = 0;
    let request = ReadRequest {
        sink_stag: Stag(1),
        sink_to: TaggedOffset(0),
        size: 100,
        src_stag: from.stag,
        src_to: TaggedOffset(from.iova),
    };
    for msn in 1..8 {
        raw.read(&mut w, msn, &request);
    }
    let why = w.diagnosis(A);
    assert_eq!(why.what, sent("1/2/02"));
    assert!(why.text.contains("the negotiated IRD of 4"), "{why:?}");
}

#[test]
fn losses_are_explained() {
    type Play = fn(&mut World, &mut Raw);
    let reset: Play = |w, raw| raw.reset(w);
    let cut: Play = |w, raw| {
        raw.bytes(w, &[0, 100, 1]);
        raw.finish(w);
    };
    let terminate: Play = |w, raw| raw.terminate(w, &[1]);
    for (play, what, words) in [
        (reset, DiagnosisKind::Lost, "failed"),
        (cut, sent("2/0/01"), "inside an FPDU"),
        (terminate, DiagnosisKind::Lost, "malformed Terminate"),
    ] {
        let (mut w, mut raw) = World::raw();
        w.recv(A, 1, &[]);
        play(&mut w, &mut raw);
        assert_eq!(w.completions(A), ["1 Receive WrFlush"]);
        let why = w.diagnosis(A);
        assert_eq!(why.what, what, "{why:?}");
        assert!(why.text.contains(words), "{why:?}");
    }
    // A QP that is destroyed at a message boundary sends a Terminate.
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        w.destroy(B);
        assert_eq!(w.diagnosis(A).what, received("0/0/00"));
        assert_eq!(w.diagnosis(B).what, sent("0/0/00"));
        assert!(w.diagnosis(B).text.contains("was destroyed"));
    }
}

#[test]
fn a_read_revoked_at_its_source_and_at_its_sink() {
    let (mut w, mut raw) = World::raw();
    let sink = w.any_mr(A, 30);
    let source = w.any_mr(A, 1);
    w.post(A, &[Wr::read(1, sink.sge(10..20), &source, 0)]);
    w.revoke(A, sink.stag);
    raw.response(&mut w, sink.stag, sink.iova + 10, &[1; 10], true);
    assert_eq!(w.completions(A), ["1 RdmaRead LocalAccess 1/1/00"]);
    let why = w.diagnosis(A);
    assert!(why.text.contains("the buffer of a request, was deregistered"), "{why:?}");
    assert_eq!(about(&why), (Some(sink.stag), Some(sink.iova + 10), Some(10)));
}

#[test]
fn flushes_without_a_fault_are_explained_once() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        for n in 0..5 {
            w.recv(A, n, &[]);
        }
        w.disconnect(B);
        assert_eq!(w.completions(A).len(), 5);
        let why = w.diagnosis(A);
        assert!(why.text.contains("the peer has finished sending"), "{why:?}");
        assert!(why.rule.starts_with("local contract: a posted request"), "{why:?}");
        w.abort(A);
        w.post(A, &[Wr::send(9, &[])]);
        assert_eq!(w.completions(A), ["9 Send WrFlush"]);

        let mut w = World::connected(wiring);
        let mr = w.any_mr(A, 8);
        let peer = w.any_mr(B, 8);
        w.disconnect(B);
        w.post(A, &[Wr::read(3, mr.all(), &peer, 0), Wr::write(4, &[], &peer, 0)]);
        assert_eq!(w.completions(A), ["3 RdmaRead RemoteAborted 2/0/01", "4 RdmaWrite"]);
        let why = w.diagnosis(A);
        assert!(why.text.contains("cannot be answered"), "{why:?}");
    }
}

#[test]
fn an_overflowing_cq_is_named() {
    for wiring in Wiring::both() {
        let mut w = World::pair_with(wiring, QpShape::default(), 2);
        for n in 0..4 {
            w.recv(B, n, &[]);
        }
        for n in 0..4 {
            w.post(A, &[Wr::send(n, &[])]);
            w.completions(A);
        }
        let why = w.diagnosis(B);
        assert_eq!(why.what, sent("0/0/00"));
        assert!(why.rule.starts_with("RFC 5042 section 6.4.3.2"), "{why:?}");
        assert!(why.text.contains("had no free entry"), "{why:?}");
    }
}

#[test]
fn success_leaves_no_diagnosis() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        let a = w.any_mr(A, 5000);
        let b = w.own_mr(B, 5000, Access::all() - Access::REMOTE_ATOMIC);
        w.recv(B, 1, &[b.all()]);
        w.post(
            A,
            &[
                Wr::write(1, &[a.all()], &b, 0),
                Wr::read(2, a.all(), &b, 0),
                Wr::send(3, &[a.sge(0..100)]),
            ],
        );
        assert_eq!((w.completions(A).len(), w.completions(B).len()), (3, 1));
        w.disconnect(A);
        w.disconnect(B);
        assert!(w.engines.iter().all(|e| e.state.options.diagnoses.made() == 0), "{wiring:?}");
        assert!(w.notes.is_empty());
    }
}
