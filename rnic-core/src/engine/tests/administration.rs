//! Disconnects by an administrator, and option changes while connections exist.

use std::time::Duration;

use super::requests::Wr;
use super::world::{A, B, Wiring, World, options};
use crate::engine::{EngineCommand, EngineOptions};
use rnic_abi::types::QpState;

#[test]
fn an_expelled_qp_is_terminated_and_flushed() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        w.recv(A, 1, &[]);
        w.recv(B, 2, &[]);
        w.admin_disconnect(A);
        assert_eq!(w.state(A), QpState::Error, "{wiring:?}");
        assert_eq!(w.completions(A), ["1 Receive WrFlush"], "{wiring:?}");
        assert_eq!(w.completions(B), ["2 Receive WrFlush"], "{wiring:?}");
        assert!(w.events(A)[0].starts_with("terminated 0/0/00"), "{wiring:?}");
        assert!(w.events(B)[0].starts_with("terminated by peer 0/0/00"), "{wiring:?}");
        // Later requests are flushed as well, and a second call changes nothing.
        w.admin_disconnect(A);
        w.post(A, &[Wr::send(3, &[])]);
        assert_eq!(w.completions(A), ["3 Send WrFlush"], "{wiring:?}");
        assert_eq!(w.events(A), [""; 0]);
    }
}

#[test]
fn after_a_fin_an_expelled_qp_is_reset() {
    let mut w = World::connected(Wiring::tcp());
    w.disconnect(A);
    assert!(w.events(B)[0].starts_with("peer closed"), "{:?}", w.state(B));
    w.admin_disconnect(A);
    assert!(w.events(A)[0].starts_with("aborted"));
    assert!(w.events(B)[0].starts_with("lost: "));
    assert_eq!(w.state(A), QpState::Error);
}

#[test]
fn an_unsent_terminate_ends_in_a_reset() {
    let mut w = World::connected(Wiring::tcp());
    w.links[0].pipes[0].window = 0;
    let from = w.any_mr(A, 10);
    let to = w.any_mr(B, 10);
    w.push(A, &[Wr::write(1, &[from.all()], &to, 0)]);
    w.round();
    let terminate_deadline = Duration::from_secs(2);
    let other = EngineOptions { terminate_deadline, ..options(7) };
    for qp in [A, B] {
        w.command(qp, |_| EngineCommand::SetOptions(other.clone()));
    }
    w.admin_disconnect(A);
    w.advance(Duration::from_millis(1999));
    assert_eq!(w.events(B), [""; 0]);
    w.advance(Duration::from_millis(1));
    assert!(w.events(B)[0].starts_with("lost: "));
}

/// Every reload of the configuration sets the options again, but the log is created only once.
#[test]
fn new_options_keep_the_diagnosis_log() {
    let mut w = World::connected(Wiring::tcp());
    let log = w.engines[0].state.options.diagnoses.clone();
    for qp in [A, B] {
        w.command(qp, |_| EngineCommand::SetOptions(options(7)));
    }
    w.post(A, &[Wr::send(1, &[])]);
    assert!(w.events(A)[0].starts_with("terminated by peer 1/2/02"));
    assert!(log.made() > 0, "the record is in the shared log");
}
