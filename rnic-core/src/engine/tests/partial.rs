//! Peers that send FPDUs slowly or partially.

use std::time::Duration;

use super::raw::Raw;
use super::world::{A, QpShape, Wiring, World, options};
use crate::engine::{ChargeLimits, Engine, EngineCommand, EngineOptions, PartialLimits};
use rnic_abi::types::{Access, QpState, Stag};

/// Number of bytes of an incomplete FPDU.
const HALF: usize = 1000;

/// Connects initiators of one session, each to a scripted peer.
pub(super) fn crowd(n: usize, engine: EngineOptions) -> (World, Vec<Raw>) {
    let startup = Wiring::tcp().with(|o| o.peer_to_peer = false).a;
    let mut w = World::new(&[1]);
    w.engines[0] = Engine::new(engine);
    let app = w.app(0);
    let cq = w.cq(app, 128);
    let raws = (0..n).map(|_| {
        let qp = w.qp(app, cq, cq, QpShape::default());
        w.connect_raw(qp, true, startup, startup)
    });
    let raws = raws.collect();
    w.events(A);
    (w, raws)
}

/// Returns engine options with these limits.
fn limited(partial: PartialLimits) -> EngineOptions {
    EngineOptions { partial, ..options(0) }
}

pub(super) fn dead(w: &World) -> Vec<usize> {
    (0..w.qps.len()).filter(|qp| w.state(*qp) == QpState::Error).collect()
}

#[test]
fn the_oldest_partial_fpdu_is_evicted() {
    // Four buffers of 1 KiB in addition to the pool of 16.
    let limits = PartialLimits {
        bytes: ChargeLimits { device: 1 << 20, session: 4096 },
        ..Default::default()
    };
    let (mut w, mut raws) = crowd(24, limited(limits));
    let fpdus: Vec<_> = raws.iter_mut().map(|raw| raw.fpdu(&[0; 2 * HALF])).collect();
    for (raw, fpdu) in raws.iter_mut().zip(&fpdus).take(20) {
        raw.bytes(&mut w, &fpdu[..HALF]);
    }
    assert_eq!(dead(&w), []);
    for (n, (raw, fpdu)) in raws.iter_mut().zip(&fpdus).enumerate().skip(20) {
        raw.bytes(&mut w, &fpdu[..HALF]);
        // Buffers in the pool are not charged, so their streams continue.
        assert_eq!(dead(&w), (16..=n - 4).collect::<Vec<_>>());
    }
    let events = w.events(A);
    assert_eq!(events.len(), 4, "{events:?}");
    for event in events {
        assert!(event.contains("limits.session_partial_bytes is exceeded"), "{event}");
    }
    // A remaining peer completes its FPDU, which is processed as usual.
    raws[23].bytes(&mut w, &fpdus[23][HALF..]);
    assert_eq!(w.state(23), QpState::Terminate);
    assert_eq!(w.state(22), QpState::Rts);
}

#[test]
fn partial_limits_of_a_reload_hold() {
    let (mut w, mut raws) = crowd(22, options(0));
    let bytes = ChargeLimits { device: 1 << 20, session: 4096 };
    let options = limited(PartialLimits { bytes, ..Default::default() });
    w.command(A, |_| EngineCommand::SetOptions(options));
    for raw in &mut raws {
        let fpdu = raw.fpdu(&[0; 2 * HALF]);
        raw.bytes(&mut w, &fpdu[..HALF]);
    }
    assert_eq!(dead(&w), [16, 17]);
}

//= MPA-7.1.2-10a
#[test]
fn an_fpdu_may_be_slow_but_not_stall() {
    let stall = Duration::from_secs(10);
    let (mut w, mut raws) = crowd(1, limited(PartialLimits { stall, ..Default::default() }));
    let mr = w.mr(A, 64, Access::REMOTE_WRITE);
    let raw = &mut raws[0];
    let payload = super::requests::pattern(8, 3);
    let header = raw.tagged(crate::rdmap::Opcode::Write, mr.stag, mr.iova, true);
    let fpdu = raw.fpdu(&super::raw::ulpdu(&header, &payload));
    for byte in &fpdu {
        w.advance(stall - Duration::from_nanos(1));
        raw.bytes(&mut w, &[*byte]);
    }
    assert_eq!(mr.bytes()[..8], payload);
    // The time between two FPDUs is not limited.
    w.advance(stall * 100);
    assert_eq!((w.state(A), w.events(A).len()), (QpState::Rts, 0));
    let fpdu = raw.fpdu(&[0; 100]);
    raw.bytes(&mut w, &fpdu[..50]);
    w.advance(stall - Duration::from_nanos(1));
    assert_eq!(w.state(A), QpState::Rts);
    w.advance(Duration::from_nanos(1));
    assert_eq!(w.state(A), QpState::Error);
    let events = w.events(A);
    assert!(events[0].contains("mpa.stall_deadline"), "{events:?}");
}

#[test]
fn a_destroyed_qp_frees_its_partial_fpdu() {
    let (mut w, mut raws) = crowd(20, options(0));
    for raw in &mut raws {
        let fpdu = raw.fpdu(&[0; 2 * HALF]);
        raw.bytes(&mut w, &fpdu[..HALF]);
    }
    for qp in 0..20 {
        w.destroy(qp);
    }
    let state = &w.engines[0].state;
    assert!(state.partials.is_unused() && state.deadlines.only_of_phases());
}

#[test]
fn wrong_stags_are_reported_with_the_peer() {
    let peer = "192.0.2.2".parse::<std::net::IpAddr>().unwrap();
    let (mut w, mut raw) = World::raw();
    raw.write(&mut w, Stag(0x1234_5600), 0, b"x");
    assert_eq!(w.guesses, [peer]);
    // A valid STag, and the byte after its region.
    let (mut w, mut raw) = World::raw();
    let mr = w.mr(A, 64, Access::REMOTE_WRITE);
    raw.write(&mut w, mr.stag, mr.iova + 64, b"x");
    assert_eq!((w.state(A), &w.guesses[..]), (QpState::Terminate, &[peer][..]));
    // Other faults are not guesses.
    let (mut w, mut raw) = World::raw();
    raw.send(&mut w, 1, b"x");
    assert_eq!((w.state(A), w.guesses.len()), (QpState::Terminate, 0));
}
