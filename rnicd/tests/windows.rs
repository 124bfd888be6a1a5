//! Memory windows on the control socket: limits, lists, and refusals.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use rnic_abi::abi::control::*;
use rnic_abi::types::*;
use support::*;

fn alloc(pd: PdId, kind: WindowKind) -> RequestBody {
    RequestBody::AllocWindow { pd, kind }
}

fn window(raw: &mut Raw, pd: PdId, kind: WindowKind) -> (MwId, Stag) {
    match raw.call(alloc(pd, kind)) {
        Ok(ReplyBody::Window { window, stag }) => (window, stag),
        other => panic!("{other:?}"),
    }
}

fn listed(raw: &mut Raw) -> Vec<WindowRow> {
    match raw.call(RequestBody::List { what: ListKind::Windows, from: 0 }) {
        Ok(ReplyBody::Rows { rows: Rows::Windows(rows), .. }) => rows,
        other => panic!("{other:?}"),
    }
}

#[test]
fn windows_are_counted_listed_and_limited() {
    let limits = "[engine]\nworkers = 3\n[limits]\nwindows = 3\n[limits.session]\nwindows = 2\n";
    let daemon = daemon(limits);
    let mut raw = Raw::open(&daemon.socket());
    let Ok(ReplyBody::Device(device)) = raw.call(RequestBody::QueryDevice) else { panic!() };
    assert_eq!(device.max_windows, 2);
    let pd = raw.pd();
    let (first, stag) = window(&mut raw, pd, WindowKind::Type1);
    let (second, _) = window(&mut raw, pd, WindowKind::Type2);
    let refusal = raw.refused(alloc(pd, WindowKind::Type1));
    assert!(refusal.starts_with("limits.session.windows = 2 reached"), "{refusal}");
    let mut other = Raw::open(&daemon.socket());
    let other_pd = other.pd();
    window(&mut other, other_pd, WindowKind::Type1);
    let refusal = other.refused(alloc(other_pd, WindowKind::Type1));
    assert!(refusal.starts_with("limits.windows = 3 reached"), "{refusal}");
    assert_eq!(raw.status().windows, 3, "all, for an administrator");

    let rows = listed(&mut raw);
    assert_eq!(rows.iter().map(|r| r.window).collect::<Vec<_>>()[..2], [first, second]);
    let kinds: Vec<WindowKind> = rows.iter().map(|r| r.kind).collect();
    assert_eq!(kinds, [WindowKind::Type1, WindowKind::Type2, WindowKind::Type1]);
    assert_eq!((rows[0].stag, rows[0].mr, rows[0].pd), (stag, None, pd));
    drop(other);

    let refusal = raw.refused(RequestBody::ClosePd { pd });
    assert!(refusal.ends_with("is in use by 2 windows"), "{refusal}");
    for window in [first, second] {
        assert_eq!(raw.call(RequestBody::DeallocWindow { window }), Ok(ReplyBody::Done));
        let refusal = raw.refused(RequestBody::DeallocWindow { window });
        assert!(refusal.starts_with("no window"), "{refusal}");
    }
    assert_eq!(raw.call(RequestBody::ClosePd { pd }), Ok(ReplyBody::Done));
}

#[test]
fn foreign_windows_do_not_exist() {
    let daemon = daemon("");
    let mut owner = Raw::open(&daemon.socket());
    let mut thief = Raw::open(&daemon.socket());
    let pd = owner.pd();
    let (window, _) = window(&mut owner, pd, WindowKind::Type2);
    for body in [RequestBody::DeallocWindow { window }, alloc(pd, WindowKind::Type1)] {
        let refusal = thief.call(body.clone());
        assert!(matches!(refusal, Err(Refusal::NoSuchObject { .. })), "{body:?}: {refusal:?}");
    }
    assert_eq!(owner.call(RequestBody::DeallocWindow { window }), Ok(ReplyBody::Done));
}

#[test]
fn windows_of_a_session_that_ends_are_free_again() {
    let daemon = daemon("[limits]\nwindows = 2\n");
    for _ in 0..5 {
        let mut raw = Raw::open(&daemon.socket());
        let pd = raw.pd();
        // Windows of the previous session count until it is gone.
        until("the end of the windows", || raw.status().windows == 0);
        window(&mut raw, pd, WindowKind::Type1);
        window(&mut raw, pd, WindowKind::Type2);
        raw.refused(alloc(pd, WindowKind::Type1));
    }
}
