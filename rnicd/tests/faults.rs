//! Fault rules over the control socket: who may set them, which sessions they concern, and their
//! effects outside of the engine.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use std::time::{Duration, Instant};

use rnic_abi::abi::control::*;
use rnic_abi::types::*;
use support::*;

/// Users without an account on any system.
const ALICE: u32 = 1_987_654_321;
const BOB: u32 = 1_987_654_322;

const CQ_ERR: u32 = 0;
const QP_FATAL: u32 = 1;
const DEVICE_FATAL: u32 = 8;
const PORT_ACTIVE: u32 = 9;
const PORT_ERR: u32 = 10;
const SRQ_ERR: u32 = 14;

fn try_set(raw: &mut Raw, rules: &str, own: bool) -> Result<ReplyBody, Refusal> {
    raw.call(RequestBody::SetFaults { rules: rules.to_owned(), own })
}

/// Sets rules for all sessions of the user.
fn set(raw: &mut Raw, rules: &str) {
    assert_eq!(try_set(raw, rules, false), Ok(ReplyBody::Done), "{rules}");
}

fn set_refused(raw: &mut Raw, rules: &str) -> String {
    match try_set(raw, rules, false) {
        Ok(body) => panic!("{rules}: {body:?}"),
        Err(refusal) => refusal.to_string(),
    }
}

fn clear(raw: &mut Raw, name: Option<&str>) -> Result<ReplyBody, Refusal> {
    raw.call(RequestBody::ClearFaults { name: name.map(str::to_owned) })
}

fn faults(raw: &mut Raw) -> Vec<FaultRow> {
    match raw.call(RequestBody::List { what: ListKind::Faults, from: 0 }) {
        Ok(ReplyBody::Rows { rows: Rows::Faults(rows), total, next: 0 }) => {
            assert_eq!(rows.len(), total as usize);
            rows
        }
        other => panic!("{other:?}"),
    }
}

fn names(raw: &mut Raw) -> Vec<String> {
    faults(raw).into_iter().map(|row| row.name).collect()
}

fn open_pd(raw: &mut Raw) -> Result<ReplyBody, Refusal> {
    raw.call(RequestBody::OpenPd { name: None })
}

/// Returns the next event, which must be asynchronous: its number and object.
fn async_event(raw: &Raw) -> (u32, AsyncObject) {
    match event(raw) {
        Event::Async { event, object } => (event, object),
        other => panic!("{other:?}"),
    }
}

/// Checks that all events have been read. Events precede the reply of a later request.
fn assert_no_event(raw: &mut Raw) {
    raw.status();
    assert_eq!(event_within(raw, Duration::ZERO), None);
}

fn ports_down(raw: &mut Raw) -> Vec<bool> {
    match raw.call(RequestBody::QueryDevice) {
        Ok(ReplyBody::Device(device)) => device.devices.iter().map(|row| row.port_down).collect(),
        other => panic!("{other:?}"),
    }
}

/// Opens a session with a QP and a listening address.
fn with_qp(raw: &mut Raw) -> (QpId, RequestBody) {
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qp = raw.qp(pd, cq);
    let (listener, peer) = raw.listener();
    assert_eq!(raw.call(RequestBody::Listen { listener, backlog: 16 }), Ok(ReplyBody::Done));
    let connect =
        RequestBody::Connect { qp, peer, local: None, ird: None, ord: None, private_data: vec![] };
    (qp, connect)
}

fn state(raw: &mut Raw, qp: QpId) -> QpState {
    match raw.call(RequestBody::QueryQp { qp }) {
        Ok(ReplyBody::QpInfo(row)) => row.state,
        other => panic!("{other:?}"),
    }
}

#[test]
fn other_users_rules_are_for_administrators() {
    let Some(daemon) = for_others("") else { return };
    let mut alice = Raw::open_as(&daemon.socket(), ALICE);
    for rules in ["do=stop user=any".to_owned(), format!("do=stop user={BOB}")] {
        for own in [false, true] {
            let refusal = try_set(&mut alice, &rules, own).unwrap_err().to_string();
            assert!(refusal.starts_with("not allowed by control.admins"), "{refusal}");
        }
    }
    set(&mut alice, &format!("do=fail errno=EIO verb=alloc_pd user={ALICE}"));
    assert_eq!(names(&mut alice), ["fail"]);
    // An administrator may, and each user sees only its own rules.
    let mut admin = Raw::open(&daemon.socket());
    set(&mut admin, &format!("do=fail errno=EBUSY verb=alloc_pd user={BOB} name=of-admin"));
    assert_eq!(names(&mut alice), ["fail"]);
    let mut bob = Raw::open_as(&daemon.socket(), BOB);
    assert_eq!(names(&mut bob), [""; 0]);
    assert_eq!(names(&mut admin), ["fail", "of-admin"]);
    // The status counts the rules that apply to a user, too.
    let counts = [&mut alice, &mut bob, &mut admin].map(|raw| raw.status().faults);
    assert_eq!(counts, [1, 1, 2]);
    let failure = |raw: &mut Raw| open_pd(raw).map_err(|refusal| refusal.to_string());
    assert!(failure(&mut bob).unwrap_err().starts_with("injected by fault of-admin"));
    assert!(failure(&mut alice).unwrap_err().starts_with("injected by fault fail"));
    assert!(failure(&mut admin).is_ok());
}

#[test]
fn names_are_unique_for_owner_and_session() {
    let Some(daemon) = for_others("") else { return };
    let mut alice = Raw::open_as(&daemon.socket(), ALICE);
    let mut bob = Raw::open_as(&daemon.socket(), BOB);
    set(&mut alice, "do=stop name=x");
    let refusal = set_refused(&mut alice, "do=disconnect name=x");
    assert!(refusal.contains("there is already a fault x"), "{refusal}");
    // All rules of a text are set, or none.
    let refusal = set_refused(&mut alice, "do=stop name=y; do=stop name=y");
    assert!(refusal.contains("there is already a fault y"), "{refusal}");
    set(&mut alice, "do=stop; do=stop; do=lose-completion name=stop-3; do=stop");
    assert_eq!(names(&mut alice), ["x", "stop", "stop-2", "stop-3", "stop-4"]);
    set(&mut bob, "do=stop name=x");
    assert_eq!(names(&mut bob), ["x"]);
    // Each process of a job has the rules of its environment.
    let mut other = Raw::open_as(&daemon.socket(), BOB);
    for raw in [&mut bob, &mut other] {
        assert_eq!(try_set(raw, "do=lose-event name=x", true), Ok(ReplyBody::Done));
        assert!(try_set(raw, "do=stop name=x", true).is_err());
    }
    assert_eq!(names(&mut bob), ["x"; 3]);
}

#[test]
fn own_rules_end_with_their_session() {
    let daemon = one_worker("");
    let mut first = Raw::open(&daemon.socket());
    let mut second = Raw::open(&daemon.socket());
    let rule = "do=fail errno=EIO verb=alloc_pd";
    assert_eq!(try_set(&mut first, rule, true), Ok(ReplyBody::Done));
    assert!(open_pd(&mut first).is_err());
    assert!(open_pd(&mut second).is_ok(), "the rule concerns one session");
    let rows = faults(&mut second);
    assert_eq!((rows.len(), rows[0].seen, rows[0].injected), (1, 1, 1));
    assert!(rows[0].session.is_some());
    assert_eq!((rows[0].owner, rows[0].rule.as_str()), (uid(), rule));
    set(&mut first, "do=fail errno=EIO verb=alloc_mw");
    assert_eq!(names(&mut second), ["fail"; 2]);
    drop(first);
    until("the end of the session's rule", || names(&mut second) == ["fail"]);
}

#[test]
fn rules_count_against_the_limit_of_a_user() {
    let daemon = one_worker("[limits.user]\nfaults = 2\n");
    let mut raw = Raw::open(&daemon.socket());
    let mut other = Raw::open(&daemon.socket());
    let refusal = set_refused(&mut raw, "do=stop; do=stop; do=stop");
    let key = format!("limits.user.faults (user {}) = 2 reached", uid());
    assert!(refusal.starts_with(&key), "{refusal}");
    assert_eq!(names(&mut raw), [""; 0]);
    set(&mut raw, "do=stop; do=stop");
    assert!(set_refused(&mut other, "do=stop").starts_with(&key));
    assert_eq!(clear(&mut other, Some("stop")), Ok(ReplyBody::Done));
    set(&mut other, "do=stop");
    assert_eq!(names(&mut raw), ["stop-2", "stop"]);
}

#[test]
fn rules_are_cleared_by_their_owners() {
    let Some(daemon) = for_others("") else { return };
    let mut alice = Raw::open_as(&daemon.socket(), ALICE);
    let mut bob = Raw::open_as(&daemon.socket(), BOB);
    set(&mut alice, "do=stop name=a; do=stop name=b; do=stop name=c");
    set(&mut bob, "do=stop name=a; do=stop name=d");
    let refusal = clear(&mut alice, Some("d")).unwrap_err().to_string();
    assert!(refusal.contains("there is no fault \"d\""), "{refusal}");
    assert_eq!(clear(&mut alice, Some("a")), Ok(ReplyBody::Done));
    assert_eq!(
        (names(&mut alice), names(&mut bob)),
        (vec!["b".into(), "c".into()], vec!["a".into(), "d".into()])
    );
    assert_eq!(clear(&mut alice, None), Ok(ReplyBody::Done));
    assert_eq!((names(&mut alice).len(), names(&mut bob).len()), (0, 2));
    assert_eq!(clear(&mut alice, None), Ok(ReplyBody::Done), "no rules are no error");
    let mut admin = Raw::open(&daemon.socket());
    assert_eq!(clear(&mut admin, Some("d")), Ok(ReplyBody::Done));
    assert_eq!(names(&mut bob), ["a"]);
    assert_eq!(clear(&mut admin, None), Ok(ReplyBody::Done));
    assert_eq!(names(&mut bob).len(), 0);
}

#[test]
fn verbs_fail_with_their_error_number() {
    let Some(daemon) = for_others("") else { return };
    let mut alice = Raw::open_as(&daemon.socket(), ALICE);
    let mut second = Raw::open_as(&daemon.socket(), ALICE);
    let mut bob = Raw::open_as(&daemon.socket(), BOB);
    set(&mut alice, "do=fail errno=ENOMEM verb=ibv_alloc_pd nth=3 name=third");
    assert!(open_pd(&mut alice).is_ok());
    assert!(open_pd(&mut bob).is_ok());
    // The sessions of a user count together.
    assert!(open_pd(&mut second).is_ok());
    let refusal = open_pd(&mut alice).unwrap_err();
    let errno = libc_enomem();
    assert!(matches!(refusal, Refusal::System { errno: e, .. } if e == errno), "{refusal:?}");
    assert!(refusal.to_string().starts_with("injected by fault third: "), "{refusal}");
    assert!(open_pd(&mut alice).is_ok());
    assert!(open_pd(&mut bob).is_ok());
    assert_eq!(faults(&mut alice)[0].injected, 1);
}

fn libc_enomem() -> u16 {
    rustix::io::Errno::NOMEM.raw_os_error() as u16
}

#[test]
fn rules_of_verbs_select_by_pd_and_qp() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let (qp, _) = with_qp(&mut raw);
    let pd = raw.pd();
    let cq = raw.cq(1);
    let other = raw.qp(pd, cq);
    set(&mut raw, &format!("do=fail errno=EIO verb=query_qp qp={}", qp.0));
    let query = |qp| RequestBody::Call(Function::QueryQp.of(CallObject::Qp(qp)));
    assert!(raw.call(query(other)).is_ok());
    assert!(raw.call(query(qp)).is_err());
    // Without a verb, a rule fails all requests with its keys but those that destroy the object.
    set(&mut raw, &format!("name=all do=fail errno=EIO qp={}", other.0));
    assert!(raw.call(RequestBody::QpToError { qp: other }).is_err());
    assert_eq!(raw.call(RequestBody::DestroyQp { qp: other }), Ok(ReplyBody::Done));
    set(&mut raw, &format!("do=fail errno=EIO verb=create_qp pd={}", pd.0));
    assert!(raw.call(RequestBody::CreateQp(qp_request(pd, cq))).is_err());
    let pd = raw.pd();
    assert!(raw.call(RequestBody::CreateQp(qp_request(pd, cq))).is_ok());
}

#[test]
fn a_connection_is_rejected() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let (qp, connect) = with_qp(&mut raw);
    set(&mut raw, "do=reject nth=1 data=00ff61");
    assert_eq!(raw.call(connect.clone()), Ok(ReplyBody::Done));
    let Event::Rejected { qp: of, private_data, .. } = event(&raw) else { panic!() };
    assert_eq!((of, &*private_data), (qp, &b"\0\xffa"[..]));
    // The next attempt reaches the peer.
    assert_eq!(raw.call(connect), Ok(ReplyBody::Done));
    assert!(matches!(event(&raw), Event::ConnectionRequest { .. }));
}

/// Otherwise a program of the RoCE device would see fewer data than the rule has.
#[test]
fn data_of_a_rejection_fit_into_the_message() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    set(&mut raw, &format!("do=reject data={}", "5a".repeat(148)));
    let longer = format!("do=reject name=long data={}", "5a".repeat(149));
    let refusal = set_refused(&mut raw, &longer);
    let text = "RoCE devices reject with at most 148 bytes; select device=rnicd0 for more";
    assert!(refusal.contains(text), "{refusal}");
    set(&mut raw, &format!("{longer} device=rnicd0"));
}

#[test]
fn an_accepted_request_is_rejected() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let (qp, connect) = with_qp(&mut raw);
    let (pd, cq) = (raw.pd(), raw.cq(1));
    let passive = raw.qp(pd, cq);
    set(&mut raw, "do=reject verb=rdma_accept data=6e6f");
    assert_eq!(raw.call(connect), Ok(ReplyBody::Done));
    let Event::ConnectionRequest { request, .. } = event(&raw) else { panic!() };
    let private_data = vec![];
    let accept = RequestBody::Accept { request, qp: passive, ird: None, ord: None, private_data };
    assert_eq!(raw.call(accept.clone()), Ok(ReplyBody::Done));
    let Event::Unreachable { qp: of, errno, .. } = event(&raw) else { panic!() };
    assert_eq!((of, errno), (passive, rustix::io::Errno::CONNRESET.raw_os_error() as u16));
    let Event::Rejected { qp: of, private_data, .. } = event(&raw) else { panic!() };
    assert_eq!((of, &*private_data), (qp, &b"no"[..]));
    assert!(raw.call(accept).is_err(), "the request has ended");
    assert_eq!(faults(&mut raw)[0].injected, 2, "the rule has struck, without a request");
}

/// The QPs of both ends have no peer yet.
#[test]
fn rules_select_connections_by_peer() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let (_, connect) = with_qp(&mut raw);
    set(&mut raw, "do=reject peer=127.0.0.9; do=no-reply peer=127.0.0.9 name=other");
    set(&mut raw, "do=fail errno=EIO verb=rdma_reject peer=127.0.0.9 name=fails");
    assert_eq!(raw.call(connect.clone()), Ok(ReplyBody::Done));
    let Event::ConnectionRequest { request, .. } = event(&raw) else { panic!() };
    let reject = RequestBody::Reject { request, private_data: vec![] };
    set(&mut raw, "do=fail errno=EPERM verb=rdma_reject peer=127.0.0.1 name=mine");
    let refusal = raw.call(reject.clone()).unwrap_err().to_string();
    assert!(refusal.starts_with("injected by fault mine"), "{refusal}");
    clear(&mut raw, Some("mine")).unwrap();
    let (pd, cq) = (raw.pd(), raw.cq(1));
    let qp = raw.qp(pd, cq);
    set(&mut raw, "do=fail errno=EPERM verb=rdma_accept peer=127.0.0.1 name=mine");
    let accept = RequestBody::Accept { request, qp, ird: None, ord: None, private_data: vec![] };
    let refusal = raw.call(accept).unwrap_err().to_string();
    assert!(refusal.starts_with("injected by fault mine"), "{refusal}");
    assert_eq!(raw.call(reject), Ok(ReplyBody::Done));
    assert!(matches!(event(&raw), Event::Rejected { .. }));
    set(&mut raw, "do=reject peer=127.0.0.1 name=rejects");
    assert_eq!(raw.call(connect), Ok(ReplyBody::Done));
    assert!(matches!(event(&raw), Event::Rejected { .. }));
    assert_eq!(
        faults(&mut raw).iter().map(|row| row.injected).collect::<Vec<_>>(),
        [0, 0, 0, 1, 1]
    );
}

/// Keys that a request does not have: they select the objects of the effect, or nothing.
#[test]
fn keys_select_requests_or_effects() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let (qp, _) = with_qp(&mut raw);
    let (pd, cq) = (raw.pd(), raw.cq(1));
    let other = raw.qp(pd, cq);
    set(&mut raw, &format!("do=qp-fatal verb=alloc_pd qp={}", other.0));
    raw.pd();
    assert!(matches!(event(&raw), Event::QpFatal { qp: of, .. } if of == other));
    assert_eq!(state(&mut raw, qp), QpState::Idle);
    clear(&mut raw, None).unwrap();
    set(&mut raw, &format!("do=fail errno=EIO cq={}", cq.0));
    raw.pd();
    assert!(raw.call(RequestBody::QpToError { qp: other }).is_err());
    assert!(raw.call(RequestBody::ResizeCq { cq, entries: 2 }).is_err());
    state(&mut raw, qp);
    clear(&mut raw, None).unwrap();
    for (rule, why) in [
        ("do=rnr device=rnicd0", "rnicd0 is the iWARP device, which has no RNR NAKs"),
        ("do=cm-message effect=drop device=rnicd0", "rnicd0 is the iWARP device, which has MPA"),
        (
            "do=fail errno=EIO verb=reg_mr device=rnicd0",
            "because requests of reg_mr have no device",
        ),
    ] {
        let refusal = set_refused(&mut raw, rule);
        assert!(refusal.contains(why), "{rule}: {refusal}");
    }
}

#[test]
fn a_held_accept_ends_with_its_listener() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let (qp, connect) = with_qp(&mut raw);
    let (pd, cq) = (raw.pd(), raw.cq(1));
    let passive = raw.qp(pd, cq);
    set(&mut raw, "do=no-reply");
    assert_eq!(raw.call(connect), Ok(ReplyBody::Done));
    let Event::ConnectionRequest { listener, request, .. } = event(&raw) else { panic!() };
    let accept =
        RequestBody::Accept { request, qp: passive, ird: None, ord: None, private_data: vec![] };
    assert_eq!(raw.call(accept), Ok(ReplyBody::Done));
    assert_no_event(&mut raw);
    assert_eq!(raw.call(RequestBody::CloseListener { listener }), Ok(ReplyBody::Done));
    let ended = [event(&raw), event(&raw)];
    assert!(ended.iter().any(|e| matches!(e, Event::Rejected { qp: of, .. } if *of == qp)));
    let has_failed = |e: &Event| matches!(e, Event::Unreachable { qp: of, .. } if *of == passive);
    assert!(ended.iter().any(has_failed), "{ended:?}");
}

#[test]
fn an_unreachable_peer_takes_its_time() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let (qp, connect) = with_qp(&mut raw);
    set(&mut raw, "do=unreachable errno=EHOSTUNREACH by=200ms");
    let begun = Instant::now();
    assert_eq!(raw.call(connect), Ok(ReplyBody::Done));
    let Event::Unreachable { qp: of, errno, reason, .. } = event(&raw) else { panic!() };
    assert!(begun.elapsed() >= Duration::from_millis(200));
    let expected = rustix::io::Errno::HOSTUNREACH.raw_os_error() as u16;
    assert_eq!((of, errno), (qp, expected));
    assert_eq!(reason, "injected by fault unreachable");
}

/// Otherwise a program could fill the daemon's memory with events that are due tomorrow.
#[test]
fn few_failures_of_a_session_are_delayed() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let (_, connect) = with_qp(&mut raw);
    set(&mut raw, "do=unreachable by=24h");
    for n in 0..70 {
        assert_eq!(raw.call(connect.clone()), Ok(ReplyBody::Done), "{n}");
    }
    for _ in 64..70 {
        assert!(matches!(event(&raw), Event::Unreachable { .. }));
    }
    assert_no_event(&mut raw);
}

#[test]
fn a_port_goes_down_for_its_user() {
    let Some(daemon) = for_others("") else { return };
    let mut alice = Raw::open_as(&daemon.socket(), ALICE);
    let second = Raw::open_as(&daemon.socket(), ALICE);
    let mut bob = Raw::open_as(&daemon.socket(), BOB);
    let devices = ports_down(&mut alice).len();
    set(&mut alice, "do=port-down");
    assert_eq!(ports_down(&mut alice), vec![true; devices]);
    assert_eq!(ports_down(&mut bob), vec![false; devices]);
    assert!(faults(&mut alice)[0].in_effect);
    for raw in [&alice, &second] {
        for _ in 0..devices {
            let (number, object) = async_event(raw);
            assert_eq!(number, PORT_ERR);
            assert!(matches!(object, AsyncObject::Device(_)), "{object:?}");
        }
    }
    assert_eq!(clear(&mut alice, None), Ok(ReplyBody::Done));
    for raw in [&alice, &second] {
        for _ in 0..devices {
            assert_eq!(async_event(raw).0, PORT_ACTIVE);
        }
    }
    assert_eq!(ports_down(&mut alice), vec![false; devices]);
    // Up again after a time.
    set(&mut alice, "do=port-down for=50ms");
    for number in [PORT_ERR, PORT_ACTIVE] {
        for _ in 0..devices {
            assert_eq!(async_event(&alice).0, number);
        }
    }
    assert!(!faults(&mut alice)[0].in_effect);
    assert_no_event(&mut bob);
}

#[test]
fn events_concern_the_selected_objects() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let mut other = Raw::open(&daemon.socket());
    let (qp, _) = with_qp(&mut raw);
    with_qp(&mut raw);
    with_qp(&mut other);
    set(&mut raw, &format!("do=event event=qp-fatal qp={}", qp.0));
    assert_eq!(async_event(&raw), (QP_FATAL, AsyncObject::Qp(qp)));
    assert_ne!(state(&mut raw, qp), QpState::Error, "nothing else changes");
    let cq = raw.cq(1);
    set(&mut raw, &format!("do=event event=cq-err cq={}", cq.0));
    assert_eq!(async_event(&raw), (CQ_ERR, AsyncObject::Cq(cq)));
    let pd = raw.pd();
    let request = SrqRequest { pd, depth: 1, max_sge: 1, limit: 0, context: 0 };
    let Ok(ReplyBody::Srq { srq, .. }) = raw.call(RequestBody::CreateSrq(request)) else {
        panic!()
    };
    set(&mut raw, "do=event event=srq-err");
    assert_eq!(async_event(&raw), (SRQ_ERR, AsyncObject::Srq(srq)));
    assert_no_event(&mut raw);
    assert_no_event(&mut other);
    // A rule without a QP concerns those of all sessions of the user.
    set(&mut raw, "do=event event=qp-fatal");
    assert_eq!([async_event(&raw).0, async_event(&raw).0], [QP_FATAL; 2]);
    assert_eq!(async_event(&other).0, QP_FATAL);
}

#[test]
fn a_device_fails_with_its_qps() {
    let Some(daemon) = for_others("") else { return };
    let mut alice = Raw::open_as(&daemon.socket(), ALICE);
    let mut bob = Raw::open_as(&daemon.socket(), BOB);
    let (qp, _) = with_qp(&mut alice);
    let (of_bob, _) = with_qp(&mut bob);
    let devices = ports_down(&mut alice).len();
    set(&mut alice, "do=device-fatal");
    let mut numbers = Vec::new();
    while numbers.len() < devices {
        if let Event::Async { event, .. } = event(&alice) {
            numbers.push(event);
        }
    }
    assert_eq!(numbers, vec![DEVICE_FATAL; devices]);
    until("the QP to fail", || state(&mut alice, qp) == QpState::Error);
    assert_ne!(state(&mut bob, of_bob), QpState::Error);
    assert_no_event(&mut bob);
}

#[test]
fn an_unconnected_qp_fails_without_a_reply() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(1);
    let qp = raw.qp(pd, cq);
    set(&mut raw, "do=qp-fatal verb=alloc_mw");
    // This request waits for the worker, as the failing QP does. It gets its own reply.
    let kind = WindowKind::Type1;
    let reply = raw.call(RequestBody::AllocWindow { pd, kind });
    assert!(matches!(reply, Ok(ReplyBody::Window { .. })), "{reply:?}");
    assert!(matches!(event(&raw), Event::QpFatal { qp: of, .. } if of == qp));
    until("the QP to fail", || state(&mut raw, qp) == QpState::Error);
}

#[test]
fn queues_fail_with_their_qps() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let (cq, other) = (raw.cq(1), raw.cq(1));
    let [qp, beside] = [cq, other].map(|cq| raw.qp(pd, cq));
    set(&mut raw, &format!("do=cq-fatal verb=alloc_mw cq={}", cq.0));
    // This request waits for the worker, as the failing QP does. It gets its own reply.
    let reply = raw.call(RequestBody::AllocWindow { pd, kind: WindowKind::Type1 });
    assert!(matches!(reply, Ok(ReplyBody::Window { .. })), "{reply:?}");
    assert!(matches!(event(&raw), Event::CqError { cq: of, .. } if of == cq));
    until("the QP to fail", || state(&mut raw, qp) == QpState::Error);
    assert_ne!(state(&mut raw, beside), QpState::Error);
    assert_eq!(clear(&mut raw, None), Ok(ReplyBody::Done));
    let request = SrqRequest { pd, depth: 1, max_sge: 1, limit: 0, context: 0 };
    let Ok(ReplyBody::Srq { srq, .. }) = raw.call(RequestBody::CreateSrq(request)) else {
        panic!()
    };
    set(&mut raw, &format!("do=srq-fatal qp={}", beside.0));
    assert_no_event(&mut raw);
    set(&mut raw, "do=srq-fatal name=all");
    assert!(matches!(event(&raw), Event::SrqError { srq: of, .. } if of == srq));
    assert_ne!(state(&mut raw, beside), QpState::Error);
}

#[test]
fn sessions_end_by_a_rule() {
    let Some(daemon) = for_others("") else { return };
    let mut alice = Raw::open_as(&daemon.socket(), ALICE);
    let mut bob = Raw::open_as(&daemon.socket(), BOB);
    let set_end = RequestBody::SetFaults {
        rules: "do=end-session verb=alloc_pd nth=2".to_owned(),
        own: false,
    };
    let mut second = Raw::open_as(&daemon.socket(), ALICE);
    assert_eq!(second.call(set_end), Ok(ReplyBody::Done));
    assert!(open_pd(&mut second).is_ok());
    alice.ask(RequestBody::OpenPd { name: None }, &[]);
    while alice.receive().is_some() {}
    // Only the session of the request has ended.
    second.status();
    assert!(open_pd(&mut bob).is_ok());
    set(&mut bob, "do=stop");
    let end = RequestBody::SetFaults { rules: "do=end-session".to_owned(), own: false };
    bob.ask(end, &[]);
    while bob.receive().is_some() {}
    second.status();
    // None of them misbehaved.
    let mut admin = Raw::open(&daemon.socket());
    assert_eq!(admin.status().sessions_ended, 0);
    let listed = RequestBody::List { what: ListKind::Diagnoses, from: 0 };
    let Ok(ReplyBody::Rows { rows: Rows::Diagnoses(rows), .. }) = admin.call(listed) else {
        panic!()
    };
    let of_ends = rows.iter().filter(|row| row.rule.starts_with("injected by fault end-session"));
    assert_eq!(of_ends.count(), 2, "{rows:?}");
    assert_eq!(rows.len(), 2, "{rows:?}");
}

#[test]
fn a_rule_takes_effect_after_a_time() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let begun = Instant::now();
    set(&mut raw, "do=event event=lid-change after=200ms");
    let devices = ports_down(&mut raw).len();
    for _ in 0..devices {
        assert_eq!(async_event(&raw).0, 11);
    }
    assert!(begun.elapsed() >= Duration::from_millis(200));
    assert_eq!(faults(&mut raw)[0].injected, 1);
    // A rule that is cleared in time has none.
    set(&mut raw, "do=event event=lid-change after=24h name=late");
    assert_eq!(faults(&mut raw)[1].seen, 0);
    assert_eq!(clear(&mut raw, Some("late")), Ok(ReplyBody::Done));
    assert_no_event(&mut raw);
}

#[test]
fn a_wrong_rule_is_refused_with_its_reason() {
    let daemon = one_worker("");
    let mut raw = Raw::open(&daemon.socket());
    let refusal = set_refused(&mut raw, "do=stop; do=complete");
    assert!(refusal.contains("do=complete needs status"), "{refusal}");
    let refusal = set_refused(&mut raw, &format!("do=stop command={}", "x".repeat(2000)));
    assert!(refusal.contains("the maximum is 1024"), "{refusal}");
    assert_eq!(names(&mut raw), [""; 0]);
}
