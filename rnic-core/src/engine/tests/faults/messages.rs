//! Fault rules for messages: refusals, Terminates and wrong CRCs.

use super::super::rc::LIMITS;
use super::super::requests::{Mr, Wr};
use super::super::world::{A, B, MemoryKind, Wiring, World};
use super::{armed, assert_injected, counts, iwarp, linked, pairs, set, set_one};
use crate::engine::EngineCommand;
use crate::engine::fault_rules::QpFault;
use rnic_abi::faults::FaultName;
use rnic_abi::types::QpState;

type Make = fn(&Mr, &Mr) -> Wr;

const REQUESTS: [(&str, &str, Make); 4] = [
    ("send", "Send", |a, _| Wr::send(2, &[a.sge(0..8)])),
    ("write", "RdmaWrite", |a, b| Wr::write(2, &[a.sge(0..8)], b, 0)),
    ("read", "RdmaRead", |a, b| Wr::read(2, a.sge(0..8), b, 0)),
    ("atomic", "FetchAdd", |a, b| Wr::fetch_add(2, 1, a.sge(0..8), b, 0)),
];

/// As on an adapter: the requester gets the status of the refusal, the responder the event.
#[test]
fn an_rc_message_is_refused_as_asked() {
    for (name, status, event) in [
        ("access-error", "RemoteAccess", "AccessError"),
        ("invalid-request", "RemoteInvalidRequest", "RequestError"),
        ("operation-error", "RemoteOperation", ""),
    ] {
        for wiring in Wiring::both() {
            for (opcode, completion, make) in REQUESTS {
                let mut w = linked(wiring);
                let a = w.any_mr(A, 8);
                let b = w.any_mr(B, 16);
                a.pattern(1);
                let text = format!("do=refuse as={name} opcode={opcode} name=no");
                let rule = set_one(&mut w, B, &text);
                w.recv(B, 10, &[b.all()]);
                w.recv(B, 11, &[b.all()]);
                let imm = Wr::write(1, &[], &b, 0);
                w.post(A, &[if opcode == "write" { Wr::send(1, &[]) } else { imm }]);
                w.post(A, &[make(&a, &b), Wr::send(3, &[])]);
                let what = format!("{name} {opcode} {wiring:?}");
                let done = w.completions(A);
                let expected = format!("2 {completion} {status}");
                assert!(done[1].starts_with(&expected), "{what}: {done:?}");
                assert!(done[2].starts_with("3 Send WrFlush"), "{what}: {done:?}");
                assert_eq!(done.len(), 3, "{what}");
                let events = w.responder_errors(B);
                assert_eq!(events.len(), usize::from(!event.is_empty()), "{what}: {events:?}");
                assert!(events.iter().all(|e| e.starts_with(event)), "{what}: {events:?}");
                assert_eq!([w.state(A), w.state(B)], [QpState::Error; 2], "{what}");
                assert_eq!(counts(&rule), (1, 1), "{what}");
                assert_eq!(b.bytes()[..8], [0; 8], "{what}");
                assert_injected(&w, B, "no");
            }
        }
    }
}

/// Both ends report the Terminate that an RNIC sends for the error.
#[test]
fn an_iwarp_message_is_refused_as_asked() {
    for wiring in Wiring::all() {
        for (opcode, _, make) in REQUESTS {
            let names_target = ["read", "atomic"].contains(&opcode);
            for (name, code) in [
                ("access-error", if names_target { "0/1/02" } else { "1/1/00" }),
                ("invalid-request", "0/2/06"),
                ("operation-error", "1/0/00"),
            ] {
                let mut w = iwarp(wiring);
                let a = w.any_mr(A, 8);
                let b = w.any_mr(B, 16);
                let text = format!("do=refuse as={name} opcode={opcode} name=no");
                let rule = set_one(&mut w, B, &text);
                w.recv(B, 10, &[b.all()]);
                w.post(A, &[make(&a, &b)]);
                let what = format!("{name} {opcode} {wiring:?}");
                let here = w.events(B);
                let there = w.events(A);
                assert!(here[0].starts_with(&format!("terminated {code}")), "{what}: {here:?}");
                let expected = format!("terminated by peer {code}");
                assert!(there[0].starts_with(&expected), "{what}: {there:?}");
                assert_eq!([w.state(A), w.state(B)], [QpState::Error; 2], "{what}");
                assert_eq!(counts(&rule), (1, 1), "{what}");
                assert_injected(&w, B, "no");
            }
        }
    }
}

#[test]
fn a_terminate_has_the_chosen_code() {
    for (mut w, which) in pairs() {
        set(&mut w, B, "do=terminate code=1/2/03 opcode=send nth=2 name=end");
        w.recv(B, 10, &[]);
        w.recv(B, 11, &[]);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        assert_eq!(w.completions(B)[0], "10 Receive", "{which}");
        assert_eq!([w.state(A), w.state(B)], [QpState::Error; 2], "{which}");
        assert_injected(&w, B, "end");
        if which.starts_with("iWARP") {
            assert!(w.events(A)[0].starts_with("terminated by peer 1/2/03"), "{which}");
            assert!(w.events(B)[0].starts_with("terminated 1/2/03"), "{which}");
        }
    }
}

/// A message counts once, even if the sender tries to hand it over several times: because of a
/// copy, a missing receive, or a segment that fails.
#[test]
fn each_message_is_counted_once() {
    for kind in [MemoryKind::Shared, MemoryKind::ThroughCopier] {
        for (mut w, which) in pairs() {
            w.kind = kind;
            let a = w.any_mr(A, 300_000);
            let b = w.any_mr(B, 300_000);
            let messages = set_one(&mut w, B, "do=refuse as=access-error nth=1000");
            w.post(A, &[Wr::send(1, &[a.all()])]);
            w.recv(B, 10, &[b.all()]);
            w.settle();
            assert_eq!(w.completions(B), ["10 Receive 300000"], "{which} {kind:?}");
            assert_eq!(counts(&messages), (1, 0), "{which} {kind:?}");
            w.post(A, &[Wr::write(2, &[a.all()], &b, 0)]);
            w.post(A, &[Wr::write(3, &[a.sge(0..9)], &b, 0)]);
            w.post(A, &[Wr::read(4, a.all(), &b, 0)]);
            w.post(A, &[Wr::fetch_add(5, 1, a.sge(0..8), &b, 0)]);
            assert_eq!(w.completions(A).len(), 5, "{which} {kind:?}");
            assert_eq!(counts(&messages), (5, 0), "{which} {kind:?}");
        }
    }
}

/// A Send accesses no region by its key.
#[test]
fn messages_are_refused_for_one_region() {
    for (mut w, which) in pairs() {
        let a = w.any_mr(A, 8);
        let b = [w.any_mr(B, 8), w.any_mr(B, 8)];
        let text = format!("do=refuse as=access-error mr={:#x}", b[1].stag.0);
        let rule = set_one(&mut w, B, &text);
        w.recv(B, 10, &[]);
        w.post(A, &[Wr::send(1, &[]), Wr::write(2, &[a.all()], &b[0], 0)]);
        w.post(A, &[Wr::read(3, a.all(), &b[0], 0), Wr::fetch_add(4, 1, a.all(), &b[0], 0)]);
        assert_eq!((w.completions(A).len(), counts(&rule)), (4, (0, 0)), "{which}");
        w.post(A, &[Wr::write(5, &[a.all()], &b[1], 0)]);
        assert_eq!((w.state(B), counts(&rule)), (QpState::Error, (1, 1)), "{which}");
    }
}

/// The only busy user gets turns that are long enough for runs of segments.
#[test]
fn the_last_segment_of_a_run_is_refused() {
    let mut w = World::pair_alone(Default::default(), 128);
    let a = w.any_mr(A, 300_000);
    let b = w.any_mr(B, 300_000);
    let bytes = a.pattern(1);
    let rule = set_one(&mut w, B, "do=refuse as=access-error opcode=write nth=2");
    w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    assert_eq!((counts(&rule), w.state(B)), ((1, 0), QpState::Rts));
    assert_eq!(b.bytes(), bytes);
    w.post(A, &[Wr::write(2, &[a.all()], &b, 0)]);
    assert_eq!((counts(&rule), w.state(B)), ((2, 1), QpState::Error));
}

#[test]
fn a_corrupt_crc_ends_the_stream() {
    for wiring in Wiring::all() {
        let mut w = iwarp(wiring);
        let rule = set_one(&mut w, A, "do=corrupt-crc nth=2 name=crc");
        let a = w.any_mr(A, 5000);
        for n in 1..=2 {
            w.recv(B, n, &[]);
        }
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(w.completions(B), ["1 Receive"], "{wiring:?}");
        w.post(A, &[Wr::send(2, &[])]);
        if wiring.direct || !wiring.a.crc {
            assert_eq!((w.completions(B), counts(&rule)), (vec!["2 Receive".into()], (0, 0)));
            continue;
        }
        assert_eq!(counts(&rule).1, 1, "{wiring:?}");
        assert_eq!(w.events(B), ["terminated 2/0/02"], "{wiring:?}");
        assert_eq!(w.events(A), ["terminated by peer 2/0/02"], "{wiring:?}");
        assert_eq!(w.completions(B), ["2 Receive WrFlush"], "{wiring:?}");
        let why = w.diagnoses(A).remove(0);
        assert_eq!(why.rule, "injected by fault crc", "{why:?}");
        drop(a);
    }
}

/// An adapter drops a packet with a wrong CRC, so neither QP raises an event. The request in flight
/// fails when the QP gets another stream, as after any loss of the stream.
#[test]
fn an_rc_qp_outlives_a_corrupt_crc() {
    for end in [A, B] {
        let mut w = linked(Wiring::tcp());
        let rule = set_one(&mut w, end, "do=corrupt-crc nth=1 name=crc");
        w.recv(B, 1, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(w.completions(A), [""; 0], "{end}");
        // The acknowledgement of the Send is corrupt.
        let received = if end == A { vec![] } else { vec!["1 Receive"] };
        assert_eq!(w.completions(B), received, "{end}");
        assert_eq!([w.state(A), w.state(B)], [QpState::Rts; 2], "{end}");
        assert_eq!(counts(&rule).1, 1, "{end}");
        w.link([A, B], Wiring::tcp(), LIMITS);
        assert_eq!(w.completions(A), ["1 Send TransportRetryExceeded"], "{end}");
        assert_eq!(w.responder_errors(A).len() + w.responder_errors(B).len(), 0, "{end}");
    }
}

/// Long messages in shared memory are sent without a copy only if there is no CRC.
#[test]
fn the_crc_of_a_long_message_is_corrupted() {
    let mut w = iwarp(Wiring::tcp());
    let a = w.any_mr(A, 100_000);
    let b = w.any_mr(B, 100_000);
    set(&mut w, A, "do=corrupt-crc nth=9");
    w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    assert_eq!(w.events(B), ["terminated 2/0/02"]);
}

/// Rules may be set before the QP is connected.
#[test]
fn a_configuration_has_rules() {
    for wiring in Wiring::both() {
        let mut w = World::new(if wiring.direct { &[1] } else { &[1, 1] });
        for host in [0, usize::from(!wiring.direct)] {
            let app = w.app(host);
            let cq = w.cq(app, 16);
            w.qp(app, cq, cq, Default::default());
        }
        let rules = armed("do=complete status=fatal-err nth=2", w.now);
        w.set_config(A, |config| config.faults = rules);
        let rules = armed("do=refuse as=access-error nth=1000", w.now);
        let of_b = rules[0].clone();
        w.set_config(B, |config| config.faults = rules);
        w.connect(A, B, wiring);
        w.settle();
        w.recv(B, 10, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        w.post(A, &[Wr::send(2, &[])]);
        assert_eq!(w.completions(A), ["1 Send", "2 Send Fatal"], "{wiring:?}");
        // The RTR of MPA, which no program has sent, does not count.
        assert_eq!(counts(&of_b), (1, 0), "{wiring:?}");
    }
}

#[test]
fn injected_ends_of_a_qp() {
    let name = FaultName::parse("over").unwrap();
    for effect in [QpFault::Disconnect, QpFault::Fatal] {
        for (mut w, which) in pairs() {
            w.recv(A, 10, &[]);
            w.command(A, |id| EngineCommand::Inject(id, name, effect));
            w.settle();
            assert_eq!(w.state(A), QpState::Error, "{which} {effect:?}");
            assert_eq!(w.completions(A), ["10 Receive WrFlush"], "{which} {effect:?}");
            let events = w.events(A);
            let is_fatal = events.iter().any(|e| e.starts_with("fatal"));
            assert_eq!(is_fatal, effect == QpFault::Fatal, "{which}: {events:?}");
            assert_injected(&w, A, "over");
        }
    }
}
