//! Fault rules of calls that libraries carry out without a request, as a library meets them: the
//! word in its arena, and the requests that it makes while the word has the bit of a call.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use std::time::{Duration, Instant};

use rnic_abi::abi::control::*;
use rnic_abi::abi::queue::arena_header;
use rnic_abi::types::*;
use support::*;

/// Users without an account on any system.
const ALICE: u32 = 1_987_654_321;
const BOB: u32 = 1_987_654_322;

fn set(raw: &mut Raw, rules: &str, own: bool) {
    let request = RequestBody::SetFaults { rules: rules.to_owned(), own };
    assert_eq!(raw.call(request), Ok(ReplyBody::Done), "{rules}");
}

fn clear(raw: &mut Raw) {
    assert_eq!(raw.call(RequestBody::ClearFaults { name: None }), Ok(ReplyBody::Done));
}

/// Returns the calls of the session that have rules.
fn ruled(raw: &Raw) -> u64 {
    raw.arenas[0].load_u64(arena_header::RULED_CALLS).unwrap()
}

fn ask(raw: &mut Raw, call: LibraryCall) -> Result<ReplyBody, Refusal> {
    raw.call(RequestBody::Call(call))
}

/// Returns the occasions and faults of the first rule.
fn counts(raw: &mut Raw) -> (u64, u64) {
    match raw.call(RequestBody::List { what: ListKind::Faults, from: 0 }) {
        Ok(ReplyBody::Rows { rows: Rows::Faults(rows), .. }) => (rows[0].seen, rows[0].injected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn rules_are_published_to_their_sessions() {
    let Some(daemon) = for_others("") else { return };
    let mut alice = Raw::open_as(&daemon.socket(), ALICE);
    let bob = Raw::open_as(&daemon.socket(), BOB);
    let poll = LibraryCall::PollCq { cq: CqId(0) }.bit();
    let post = LibraryCall::PostRecv { qp: QpId(0) }.bit();
    set(&mut alice, "do=fail errno=EIO verb=poll_cq after=1h", false);
    assert_eq!((ruled(&alice), ruled(&bob)), (poll, 0));
    let second = Raw::open_as(&daemon.socket(), ALICE);
    assert_eq!(ruled(&second), poll, "a session that is opened later");
    set(&mut alice, "do=stop verb=post_recv", true);
    assert_eq!((ruled(&alice), ruled(&second)), (poll | post, poll));
    let third = Raw::open_as(&daemon.socket(), ALICE);
    clear(&mut alice);
    assert_eq!([&alice, &second, &third].map(ruled), [0; 3]);
    set(&mut alice, "do=complete status=fatal-err; do=fail errno=EIO; do=reject", false);
    assert_eq!(ruled(&alice), 0);
}

/// A rule without `verb` concerns requests only: a program that polls would use it up.
#[test]
fn only_rules_with_their_verb_concern_calls() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    set(&mut raw, "do=fail errno=EIO limit=1", false);
    assert_eq!(ask(&mut raw, LibraryCall::QueryPkey), Ok(ReplyBody::Done));
    assert!(raw.call(RequestBody::OpenPd { name: None }).is_err());
}

#[test]
fn objects_of_other_sessions_are_not_selected() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qp = raw.qp(pd, cq);
    let mut other = Raw::open(&daemon.socket());
    set(&mut other, "do=fail errno=EIO verb=post_send", false);
    let post = LibraryCall::PostSend { qp, opcode: 255 };
    assert_eq!(ask(&mut other, post), Ok(ReplyBody::Done));
    assert_eq!(counts(&mut other), (0, 0));
    let refusal = ask(&mut raw, post).unwrap_err().to_string();
    assert!(refusal.starts_with("injected by fault fail: "), "{refusal}");
    clear(&mut other);
    set(&mut other, "do=fail errno=EIO verb=post_send opcode=send", false);
    assert_eq!(ask(&mut raw, post), Ok(ReplyBody::Done), "there is no opcode 255");
    assert_eq!(counts(&mut other), (0, 0));
}

#[test]
fn functions_are_selected_by_their_objects() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qp = raw.qp(pd, cq);
    let other = raw.qp(pd, cq);
    let peer = |last| CallObject::Peer(([192, 0, 2, last], 1).into());
    let rules = format!(
        "do=fail errno=EIO verb=destroy_ah pd={}; do=fail errno=EIO verb=destroy_cq cq={}; \
         do=fail errno=EIO verb=modify_qp qp={}; do=fail errno=EIO verb=rdma_set_option \
         peer=192.0.2.1; do=fail errno=EIO verb=open_device",
        pd.0, cq.0, qp.0
    );
    set(&mut raw, &rules, true);
    for (function, object, fails) in [
        (Function::DestroyAh, CallObject::Pd(pd), true),
        (Function::DestroyAh, CallObject::Pd(PdId(pd.0 + 1000)), false),
        (Function::DestroyCq, CallObject::Cq(cq), true),
        (Function::DestroyCq, CallObject::Cq(CqId(cq.0 + 1000)), false),
        (Function::ModifyQp, CallObject::Qp(qp), true),
        (Function::ModifyQp, CallObject::Qp(other), false),
        (Function::SetOption, peer(1), true),
        (Function::SetOption, peer(2), false),
        (Function::SetOption, CallObject::None, false),
        (Function::OpenDevice, CallObject::None, true),
        (Function::CloseDevice, CallObject::None, false),
    ] {
        let answer = ask(&mut raw, function.of(object));
        assert_eq!(answer.is_err(), fails, "{function:?} {object:?}");
    }
    let ruled_functions = [
        Function::DestroyAh,
        Function::DestroyCq,
        Function::ModifyQp,
        Function::SetOption,
        Function::OpenDevice,
    ];
    assert_eq!(ruled(&raw), ruled_functions.map(|function| function.call().bit()).iter().sum());
}

#[test]
fn calls_have_the_effects_of_other_actions() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    set(&mut raw, "do=event event=port-err verb=poll_cq nth=2", false);
    let poll = LibraryCall::PollCq { cq: CqId(0) };
    for _ in 0..2 {
        assert_eq!(ask(&mut raw, poll), Ok(ReplyBody::Done));
    }
    assert_eq!(counts(&mut raw), (2, 1));
    set(&mut raw, "do=end-session verb=query_port", false);
    raw.ask(RequestBody::Call(LibraryCall::QueryPort), &[]);
    assert!(raw.ends_within(Duration::from_secs(180)));
}

#[test]
fn a_failed_resolution_is_followed_by_its_event() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let peer = ([192, 0, 2, 1], 1).into();
    set(&mut raw, "do=addr-error by=50ms; do=route-error errno=EIO peer=192.0.2.1", false);
    let began = Instant::now();
    let call = LibraryCall::ResolveAddr { context: 7, peer };
    assert_eq!(ask(&mut raw, call), Ok(ReplyBody::EventFollows));
    assert_eq!(event(&raw), Event::ResolutionFailed { context: 7, errno: 19 });
    assert!(began.elapsed() >= Duration::from_millis(50));
    let to = |peer| LibraryCall::ResolveRoute { context: 8, peer };
    assert_eq!(ask(&mut raw, to(([192, 0, 2, 2], 1).into())), Ok(ReplyBody::Done));
    assert_eq!(ask(&mut raw, to(peer)), Ok(ReplyBody::EventFollows));
    assert_eq!(event(&raw), Event::ResolutionFailed { context: 8, errno: 5 });
}

#[test]
fn events_of_rdma_cm_are_repeated_or_lost() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let queue = |kind: u32, port: Option<u16>| LibraryCall::CmEvent {
        kind,
        peer: port.map(|port| ([192, 0, 2, 1], port).into()),
    };
    set(&mut raw, "do=cm-event effect=duplicate peer=192.0.2.1 nth=2", false);
    assert_eq!(ruled(&raw), queue(0, None).bit());
    let twice = Ok(ReplyBody::Events { count: 2 });
    assert_eq!(ask(&mut raw, queue(9, Some(1))), Ok(ReplyBody::Done));
    // Neither a connection request nor an event without a peer is an occasion.
    assert_eq!(ask(&mut raw, queue(4, Some(1))), Ok(ReplyBody::Done));
    assert_eq!(ask(&mut raw, queue(10, None)), Ok(ReplyBody::Done));
    assert_eq!(ask(&mut raw, queue(u32::MAX, Some(1))), Ok(ReplyBody::Done));
    assert_eq!(ask(&mut raw, queue(10, Some(1))), twice);
    assert_eq!(counts(&mut raw), (2, 1));
    clear(&mut raw);
    set(&mut raw, "do=cm-event effect=drop type=connect-request", false);
    assert_eq!(ask(&mut raw, queue(9, Some(1))), Ok(ReplyBody::Done));
    assert_eq!(ask(&mut raw, queue(4, Some(1))), Ok(ReplyBody::Events { count: 0 }));
    // A rule for other requests does not concern events.
    set(&mut raw, "do=fail errno=EIO verb=rdma_get_cm_event", false);
    let get = LibraryCall::GetCmEvent;
    assert_eq!(ruled(&raw), get.bit() | queue(0, None).bit());
    assert!(ask(&mut raw, get).is_err());
    assert_eq!(ask(&mut raw, queue(9, None)), Ok(ReplyBody::Done));
    // Other effects take place before the event is queued.
    clear(&mut raw);
    set(&mut raw, "do=event event=port-err verb=rdma_cm_event", false);
    assert_eq!(ask(&mut raw, queue(9, None)), Ok(ReplyBody::Done));
    assert!(matches!(event(&raw), Event::Async { event: 10, .. }));
}
