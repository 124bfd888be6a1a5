//! Fault rules that change devices, over the control socket.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use std::time::Duration;

use rnic_abi::abi::control::*;
use rnic_abi::types::*;
use support::*;

const GID_CHANGE: u32 = 18;
const CONFIG: &str = "[device]\naddresses = [\"127.0.0.1\", \"127.0.0.2\"]\n\
                      [wired]\ndevices = { one = \"lo\", two = \"lo\" }\n";

fn set(raw: &mut Raw, rules: &str) {
    let request = RequestBody::SetFaults { rules: rules.to_owned(), own: true };
    assert_eq!(raw.call(request), Ok(ReplyBody::Done), "{rules}");
}

fn clear(raw: &mut Raw) {
    assert_eq!(raw.call(RequestBody::ClearFaults { name: None }), Ok(ReplyBody::Done));
}

fn devices(raw: &mut Raw) -> Vec<DeviceRow> {
    match raw.call(RequestBody::QueryDevice) {
        Ok(ReplyBody::Device(device)) => device.devices,
        other => panic!("{other:?}"),
    }
}

fn state(raw: &mut Raw, qp: QpId) -> QpState {
    match raw.call(RequestBody::QueryQp { qp }) {
        Ok(ReplyBody::QpInfo(row)) => row.state,
        other => panic!("{other:?}"),
    }
}

/// Returns a QP of a device.
fn qp_on(raw: &mut Raw, device: &str) -> QpId {
    let pd = raw.pd();
    let cq = raw.cq(8);
    let of_device = QpRequest { kind: QpType::Rc, device: device.to_owned(), ..qp_request(pd, cq) };
    match raw.call(RequestBody::CreateQp(of_device)) {
        Ok(ReplyBody::Qp { qp, .. }) => qp,
        other => panic!("{other:?}"),
    }
}

/// Moves a QP to RTR, as its own peer at a GID.
fn to_rtr(raw: &mut Raw, qp: QpId, gid: Gid) -> Result<ReplyBody, Refusal> {
    let wiring = Wiring {
        local: gid,
        remote: gid,
        remote_qp: qp,
        rq_psn: 0,
        path_mtu: 1024,
        min_rnr_timer: 1,
        ird: 1,
        rights: Access::empty(),
    };
    raw.call(RequestBody::ModifyQp { qp, change: QpChange::ReadyToReceive(wiring) })
}

#[test]
fn a_gid_that_is_gone_serves_no_new_qp() {
    let daemon = daemon(CONFIG);
    let mut raw = Raw::open(&daemon.socket());
    let Ok(ReplyBody::Gids(gids)) = raw.call(RequestBody::QueryGids) else { panic!("no GIDs") };
    set(&mut raw, "do=gid-change index=0 device=one");
    assert_eq!(
        event(&raw),
        Event::Async { event: GID_CHANGE, object: AsyncObject::Device("one".to_owned()) }
    );
    let rows = devices(&mut raw);
    assert_eq!((&rows[0].gids, &rows[1].gids), (&vec![NO_GID, 1], &vec![0, 1]));
    for (device, index, is_refused) in [("one", 0, true), ("one", 1, false), ("two", 0, false)] {
        let qp = qp_on(&mut raw, device);
        let moved = to_rtr(&mut raw, qp, gids[index].gid);
        assert_eq!(moved.is_err(), is_refused, "{device} {index}: {moved:?}");
    }
    // Without a device, the QP may belong to either.
    let qp = raw.rc_qp();
    assert!(to_rtr(&mut raw, qp, gids[0].gid).is_err());
    clear(&mut raw);
    assert_eq!(to_rtr(&mut raw, qp, gids[0].gid), Ok(ReplyBody::Done));
}

#[test]
fn a_removed_device_fails_its_qps_without_events() {
    let daemon = daemon(CONFIG);
    let mut raw = Raw::open(&daemon.socket());
    let Ok(ReplyBody::Gids(gids)) = raw.call(RequestBody::QueryGids) else { panic!("no GIDs") };
    let qps = ["one", "one", "two"].map(|device| qp_on(&mut raw, device));
    assert_eq!(to_rtr(&mut raw, qps[0], gids[0].gid), Ok(ReplyBody::Done));
    set(&mut raw, "do=device-removal device=one");
    assert_eq!(event(&raw), Event::DeviceRemoved { device: "one".to_owned() });
    let names = |raw: &mut Raw| devices(raw).into_iter().map(|row| row.name).collect::<Vec<_>>();
    assert_eq!(names(&mut raw), ["two", "rnicd0"]);
    for qp in [qps[0], qps[1]] {
        until("the QP to fail", || state(&mut raw, qp) == QpState::Error);
    }
    assert_eq!(state(&mut raw, qps[2]), QpState::Idle);
    // The same error as that of the C library.
    let refused =
        [to_rtr(&mut raw, qps[0], gids[0].gid), raw.call(RequestBody::QpToError { qp: qps[1] })];
    for refusal in refused.map(Result::unwrap_err) {
        let Refusal::System { errno, .. } = refusal else { panic!("{refusal:?}") };
        assert_eq!(i32::from(errno), rustix::io::Errno::IO.raw_os_error());
    }
    let (pd, cq) = (raw.pd(), raw.cq(1));
    let on = |device: &str| {
        RequestBody::CreateQp(QpRequest { device: device.to_owned(), ..qp_request(pd, cq) })
    };
    assert!(raw.call(on("one")).is_err());
    assert!(raw.call(on("two")).is_ok());
    assert_eq!(raw.call(RequestBody::DestroyQp { qp: qps[0] }), Ok(ReplyBody::Done));
    clear(&mut raw);
    assert_eq!(event(&raw), Event::DevicesChanged);
    assert_eq!(names(&mut raw), ["one", "two", "rnicd0"]);
}

/// A program may cause any number of occasions.
#[test]
fn a_change_in_effect_is_not_announced_again() {
    let daemon = daemon(CONFIG);
    let mut raw = Raw::open(&daemon.socket());
    set(&mut raw, "do=speed-change speed=sdr device=one verb=alloc_pd");
    for _ in 0..3 {
        raw.pd();
    }
    assert!(matches!(event(&raw), Event::Async { .. }));
    raw.status();
    assert_eq!(event_within(&raw, Duration::ZERO), None);
}

#[test]
fn rules_that_change_devices_are_few() {
    let daemon = daemon(CONFIG);
    let mut raw = Raw::open(&daemon.socket());
    let rules = vec!["do=speed-change speed=sdr"; 16].join(";");
    set(&mut raw, &rules);
    for more in ["do=gid-change", "do=stop; do=device-removal device=none"] {
        let request = RequestBody::SetFaults { rules: more.to_owned(), own: true };
        let refusal = raw.call(request).unwrap_err().to_string();
        assert!(refusal.contains("may have at most 16 rules that change devices"), "{refusal}");
    }
}

#[test]
fn the_device_of_a_qp_is_a_name() {
    let daemon = daemon(CONFIG);
    let mut raw = Raw::open(&daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(8);
    let request = QpRequest { device: "x".repeat(64), ..qp_request(pd, cq) };
    let refusal = raw.refused(RequestBody::CreateQp(request));
    assert!(refusal.contains("must be 1 to 63 letters"), "{refusal}");
}
