//! Peers that do not read: data that TCP does not accept are kept and charged.

use super::partial::{crowd, dead};
use super::requests::Wr;
use super::world::{A, options};
use crate::engine::{ChargeLimits, EngineCommand, EngineOptions};
use rnic_abi::abi::control::DisconnectMode;
use rnic_abi::types::QpState;

/// Length of a message in bytes.
const LEN: usize = 8000;

#[test]
fn the_stream_blocked_longest_is_evicted() {
    // Three messages of one session are allowed.
    let unsent = ChargeLimits { device: 1 << 20, session: 30_000 };
    let (mut w, raws) = crowd(5, EngineOptions { unsent, ..options(0) });
    for (qp, raw) in raws.iter().enumerate() {
        w.links[raw.link].pipes[0].window = 0;
        let near = w.any_mr(qp, LEN);
        w.push(qp, &[Wr::send(1, &[near.all()])]);
        w.settle();
        assert_eq!(dead(&w), (0..(qp + 1).saturating_sub(3)).collect::<Vec<_>>());
    }
    let held = w.engines[0].state.unsent.used();
    assert!((3 * LEN..=30_000).contains(&held), "{held}");
    let events = w.events(A);
    assert_eq!(events.len(), 2, "{events:?}");
    for event in events {
        assert!(event.contains("limits.session_unsent_bytes is exceeded"), "{event}");
    }
    // Peers that read again get all data, and nothing stays charged.
    for raw in &raws {
        w.links[raw.link].pipes[0].window = 1 << 20;
    }
    w.settle();
    assert!((2..5).all(|qp| w.state(qp) == QpState::Rts));
    assert!(w.engines[0].state.unsent.is_unused());
}

#[test]
fn unsent_limits_of_a_reload_hold() {
    let (mut w, raws) = crowd(5, options(0));
    let unsent = ChargeLimits { device: 1 << 20, session: 30_000 };
    w.command(A, |_| EngineCommand::SetOptions(EngineOptions { unsent, ..options(0) }));
    for (qp, raw) in raws.iter().enumerate() {
        w.links[raw.link].pipes[0].window = 0;
        let near = w.any_mr(qp, LEN);
        w.push(qp, &[Wr::send(1, &[near.all()])]);
        w.settle();
    }
    assert_eq!(dead(&w), [0, 1]);
}

#[test]
fn every_end_frees_the_unsent_data() {
    let (mut w, mut raws) = crowd(4, options(0));
    for (qp, raw) in raws.iter().enumerate() {
        w.links[raw.link].pipes[0].window = 0;
        let near = w.any_mr(qp, LEN);
        w.push(qp, &[Wr::send(1, &[near.all()])]);
        w.settle();
    }
    assert!(w.engines[0].state.unsent.used() >= 4 * LEN);
    let now = w.now;
    let id = w.qps[0].id;
    w.engines[0].destroy(id, now);
    w.command(1, |id| EngineCommand::Disconnect(id, DisconnectMode::Abort));
    // A Terminate from the peer, which is not answered.
    let terminate = raws[2].untagged(crate::rdmap::Opcode::Terminate, 2, 1, 0, true);
    raws[2].segment(&mut w, terminate, &[0x11, 0x02, 0, 0]);
    let held = w.engines[0].state.unsent.used();
    assert!((LEN..2 * LEN).contains(&held), "{held}");
    let session = w.apps[0].session;
    w.engines[0].detach_session(session, now);
    assert!(w.engines[0].state.unsent.is_unused());
}
