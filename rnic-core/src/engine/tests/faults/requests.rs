//! Rules of requests: completions with an error, and reports to the resource manager.

use std::time::Duration;

use super::super::requests::Wr;
use super::super::world::{A, B, Wiring, World};
use super::{assert_injected, counts, pairs, set, set_one};
use crate::engine::EngineCommand;
use rnic_abi::types::QpState;

const STATUSES: [(&str, &str); 15] = [
    ("loc-len-err", "LocalLength"),
    ("loc-qp-op-err", "LocalQpOperation"),
    ("loc-prot-err", "LocalProtection"),
    ("wr-flush-err", "WrFlush"),
    ("mw-bind-err", "MwBind"),
    ("bad-resp-err", "BadResponse"),
    ("loc-access-err", "LocalAccess"),
    ("rem-inv-req-err", "RemoteInvalidRequest"),
    ("rem-access-err", "RemoteAccess"),
    ("rem-op-err", "RemoteOperation"),
    ("retry-exc-err", "TransportRetryExceeded"),
    ("rnr-retry-exc-err", "ReceiverNotReady"),
    ("rem-abort-err", "RemoteAborted"),
    ("fatal-err", "Fatal"),
    ("general-err", "General"),
];

/// The peer receives the requests before the failed request, and nothing of the failed request.
#[test]
fn a_request_completes_with_each_status() {
    for (name, status) in STATUSES {
        for (mut w, which) in pairs() {
            let a = w.any_mr(A, 100);
            let b = w.any_mr(B, 100);
            a.pattern(1);
            let text = format!("do=complete status={name} opcode=write name=bad-write");
            let rule = set_one(&mut w, A, &text);
            w.recv(B, 10, &[]);
            w.recv(B, 11, &[]);
            let write = Wr::write(2, &[a.all()], &b, 0);
            w.post(A, &[Wr::send(1, &[])]);
            w.post(A, &[write, Wr::send(3, &[])]);
            let expected = ["1 Send", &format!("2 RdmaWrite {status}"), "3 Send WrFlush"];
            assert_eq!(w.completions(A), expected, "{which}");
            assert_eq!(w.state(A), QpState::Error, "{which} {status}");
            assert_eq!(w.completions(B)[0], "10 Receive", "{which} {status}");
            assert_eq!(b.bytes(), [0; 100], "{which} {status}");
            assert_eq!(counts(&rule), (1, 1), "{which} {status}");
            assert_injected(&w, A, "bad-write");
        }
    }
}

#[test]
fn an_unsignaled_request_fails_with_a_completion() {
    for (mut w, which) in pairs() {
        set(&mut w, A, "do=complete status=rem-op-err");
        w.post(A, &[Wr::send(1, &[]).unsignaled()]);
        assert_eq!(w.completions(A), ["1 Send RemoteOperation"], "{which}");
    }
}

/// A Read or atomic whose response is missing is flushed, as by any other fault of the requester.
#[test]
fn earlier_requests_complete_first() {
    for (mut w, which) in pairs() {
        let a = w.any_mr(A, 16);
        let b = w.any_mr(B, 16);
        b.pattern(7);
        set(&mut w, A, "do=complete status=general-err opcode=send");
        let add = Wr::fetch_add(2, 1, a.sge(8..16), &b, 8);
        w.post(A, &[Wr::read(1, a.sge(0..8), &b, 0), add, Wr::send(3, &[]), Wr::send(4, &[])]);
        let done = w.completions(A);
        assert_eq!(done[2..], ["3 Send General", "4 Send WrFlush"], "{which}");
        let read = done[0].starts_with("1 RdmaRead");
        assert!(read && done[1].starts_with("2 FetchAdd"), "{which}: {done:?}");
    }
}

#[test]
fn the_nth_request_of_an_opcode_fails() {
    for (mut w, which) in pairs() {
        let b = w.any_mr(B, 8);
        let rule = set_one(&mut w, A, "do=complete status=fatal-err opcode=send nth=3");
        for n in 0..4 {
            w.recv(B, n, &[]);
            w.post(A, &[Wr::send(n, &[]), Wr::write(10 + n, &[], &b, 0).unsignaled()]);
            let status = ["", "", " Fatal", " WrFlush"][n as usize];
            let done = w.completions(A);
            assert_eq!(done[0], format!("{n} Send{status}"), "{which}");
            if n == 2 {
                break;
            }
        }
        assert_eq!(counts(&rule), (3, 1), "{which}");
    }
}

#[test]
fn a_rule_waits_until_its_time() {
    for (mut w, which) in pairs() {
        let rule = set_one(&mut w, A, "do=complete status=fatal-err after=2s");
        for n in 0..2 {
            w.recv(B, n, &[]);
            w.post(A, &[Wr::send(n, &[])]);
            assert_eq!(w.completions(A), [format!("{n} Send")], "{which}");
        }
        assert_eq!(counts(&rule), (0, 0), "{which}: nothing counts before");
        w.advance(Duration::from_secs(2));
        w.post(A, &[Wr::send(2, &[])]);
        assert_eq!(w.completions(A), ["2 Send Fatal"], "{which}");
    }
}

/// Resumes the request that waits for the effect of a rule.
fn take_effect(w: &mut World) {
    w.command(A, EngineCommand::FaultTookEffect);
    w.settle();
}

/// Workers report these actions, because their effects are not limited to one QP.
#[test]
fn a_request_triggers_other_actions() {
    for (mut w, which) in pairs() {
        let rule = set_one(&mut w, A, "do=disconnect opcode=send every=2 limit=2");
        let own = w.qps[A].id;
        for n in 1..=8 {
            w.recv(B, n, &[]);
            w.post(A, &[Wr::send(n, &[])]);
            if n == 2 || n == 4 {
                assert_eq!(w.completions(A), [""; 0], "{which}: the request waits");
                assert_eq!(w.struck.pop(), Some((rule.number, own)), "{which}");
                take_effect(&mut w);
            }
            assert_eq!(w.completions(A), [format!("{n} Send")], "{which}: the engine does it");
        }
        assert_eq!((w.struck.len(), counts(&rule)), (0, (8, 2)), "{which}");
    }
}

/// The effect of a rule may be the end of the QP.
#[test]
fn a_request_that_waits_for_a_rule_is_flushed() {
    for (mut w, which) in pairs() {
        set_one(&mut w, A, "do=qp-fatal opcode=send nth=2");
        w.recv(B, 1, &[]);
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[]), Wr::send(3, &[])]);
        assert_eq!(w.completions(A), ["1 Send"], "{which}");
        w.abort(A);
        take_effect(&mut w);
        assert_eq!(w.completions(A), ["2 Send WrFlush", "3 Send WrFlush"], "{which}");
    }
}

#[test]
fn a_request_is_delayed_with_those_behind_it() {
    for (mut w, which) in pairs() {
        let rule = set_one(&mut w, A, "do=delay-request by=1s nth=2");
        for n in 1..=3 {
            w.recv(B, n, &[]);
        }
        w.post(A, &[Wr::send(1, &[]), Wr::send(2, &[]), Wr::send(3, &[])]);
        assert_eq!(w.completions(A), ["1 Send"], "{which}");
        w.advance(Duration::from_millis(999));
        assert_eq!(w.completions(A), [""; 0], "{which}");
        w.advance(Duration::from_millis(1));
        assert_eq!(w.completions(A), ["2 Send", "3 Send"], "{which}");
        assert_eq!(counts(&rule), (3, 1), "{which}");
        assert_injected(&w, A, "delay-request");
    }
}

#[test]
fn a_delayed_request_ends_with_its_rule_or_qp() {
    for (mut w, which) in pairs() {
        set_one(&mut w, A, "do=delay-request by=1h");
        w.recv(B, 1, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        set(&mut w, A, "");
        assert_eq!(w.completions(A), ["1 Send"], "{which}");
        set_one(&mut w, A, "do=delay-request by=1h");
        w.post(A, &[Wr::send(2, &[])]);
        w.abort(A);
        assert_eq!(w.completions(A), ["2 Send WrFlush"], "{which}");
        w.destroy(A);
        let hour = Duration::from_secs(3000);
        assert!(w.next_timeout().is_none_or(|at| at.since(w.now) < hour), "{which}");
    }
}

#[test]
fn a_request_waits_no_longer_than_its_rule() {
    for (mut w, which) in pairs() {
        set_one(&mut w, A, "do=qp-fatal opcode=send");
        w.recv(B, 1, &[]);
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(w.completions(A), [""; 0], "{which}");
        set(&mut w, A, "");
        assert_eq!(w.completions(A), ["1 Send"], "{which}");
    }
}

/// A program causes occasions faster than the resource manager handles them.
#[test]
fn few_reports_of_a_rule_wait() {
    let mut w = super::iwarp(Wiring::direct());
    let b = w.any_mr(B, 8);
    let rule = set_one(&mut w, A, "do=event event=cq-err opcode=write");
    let write = |w: &mut World| {
        w.post(A, &[Wr::write(1, &[], &b, 0)]);
        w.completions(A);
    };
    for _ in 0..100 {
        write(&mut w);
        take_effect(&mut w);
        w.completions(A);
    }
    assert_eq!((w.struck.len(), counts(&rule)), (8, (100, 100)));
    rule.end_report();
    write(&mut w);
    write(&mut w);
    assert_eq!(w.struck.len(), 9);
}
