//! Effect of one user's load on the response time of another user.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rnic_abi::abi::control::*;
use rnic_abi::types::*;
use support::*;

/// A user with too many requests.
const HOSTILE: u32 = 61_031;
/// The user's sessions, each with the maximum number of diagnoses.
const SESSIONS: usize = 48;
const RECORDS: usize = 256;
/// Pending requests of each session.
const UNDER_WAY: usize = 8;
/// Bound on the 90th percentile in a flood, on a quiet machine. Before users were served
/// round-robin, it was seconds.
const SOON: Duration = Duration::from_millis(50);
const ROUNDS: usize = 40;
/// Long enough for several rounds of the flood.
const LONG_ENOUGH: Duration = Duration::from_millis(500);

/// Returns the 90th percentile of the time to register and deregister a region.
fn registering(raw: &mut Raw, pd: PdId, buffer: SharedBufferId) -> Duration {
    let mut took: Vec<Duration> = Vec::new();
    let began = Instant::now();
    while took.len() < ROUNDS || began.elapsed() < LONG_ENOUGH {
        let start = Instant::now();
        let (mr, _) = raw.mr(pd, buffer, 4096);
        raw.call(RequestBody::DeregMr { mr }).unwrap();
        took.push(start.elapsed());
    }
    took.sort_unstable();
    took[took.len() * 9 / 10]
}

/// Sends the same request in all sessions, again and again.
fn flood(sessions: &mut [Raw], body: &RequestBody, stop: &AtomicBool, answers: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        for raw in &mut *sessions {
            for _ in 0..UNDER_WAY {
                raw.ask(body.clone(), &[]);
            }
        }
        for raw in &mut *sessions {
            for _ in 0..UNDER_WAY {
                assert!(raw.reply().unwrap().result.is_ok());
                answers.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// `control::turns` tests that users take turns, `control::budget` the budget of a user.
#[test]
fn flood_of_requests_delays_no_other_user() {
    if !timing("requests during another user's flood") {
        return;
    }
    let Some(daemon) = for_others("") else { return };
    let socket = daemon.socket();
    let mut bystander = Raw::open(&socket);
    let pd = bystander.pd();
    let buffer = bystander.shared_buffer(4096);
    let mut hostile: Vec<Raw> = (0..SESSIONS).map(|_| open_as(&socket, HOSTILE, &[])).collect();
    for raw in &mut hostile {
        for _ in 0..RECORDS {
            raw.refused(RequestBody::ClosePd { pd: PdId(7) });
        }
    }
    let before = registering(&mut bystander, pd, buffer);
    for body in [
        RequestBody::List { what: ListKind::Diagnoses, from: 0 },
        RequestBody::List { what: ListKind::Limits, from: 0 },
        RequestBody::QueryDevice,
    ] {
        let stop = AtomicBool::new(false);
        let answers = AtomicU64::new(0);
        let during = std::thread::scope(|scope| {
            let flood = scope.spawn(|| flood(&mut hostile, &body, &stop, &answers));
            while answers.load(Ordering::Relaxed) == 0 && !flood.is_finished() {
                std::thread::yield_now();
            }
            let during = registering(&mut bystander, pd, buffer);
            let opened = Instant::now();
            drop(Raw::open(&socket));
            let opened = opened.elapsed();
            stop.store(true, Ordering::Relaxed);
            assert!(opened < 10 * SOON, "{body:?}: a session was opened in {opened:?}");
            during
        });
        println!("{body:?}: {before:?} before, {during:?} during {answers:?} answers");
        assert!(during < SOON, "{body:?}: {during:?}");
    }
    daemon.stop().unwrap();
}
