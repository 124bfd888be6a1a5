//! Ports that rules have changed, as UD QPs see them.

use std::sync::Arc;

use super::{A, B, World};
use crate::engine::tests::datagrams::{KEY, both, port_of, to};
use crate::engine::tests::requests::Wr;
use crate::engine::{DatagramPort, EngineCommand, PortChanges};

fn change(w: &mut World, qp: usize, changes: PortChanges) {
    let port = Arc::new(DatagramPort { changes, ..port_of(w, qp) });
    w.command(qp, |id| EngineCommand::SetDatagramPort(id, port.clone()));
    w.settle();
}

/// Sends a datagram from A to B. Returns the number of datagrams that B has completed and dropped.
fn send(w: &mut World) -> (usize, u64) {
    let request = to(w, Wr::send(1, &[]), B, KEY);
    w.post(A, &[request]);
    assert_eq!(w.completions(A), ["1 Send"]);
    (w.completions(B).len(), w.qps[B].shared.counters().dropped)
}

fn ready() -> [World; 2] {
    both().map(|mut w| {
        let b = w.any_mr(B, 64);
        for id in 0..4 {
            w.recv(B, id, &[b.all()]);
        }
        w
    })
}

#[test]
fn datagrams_of_a_lost_gid_are_dropped() {
    for mut w in ready() {
        let lost = |w: &World, qp| PortChanges {
            lost: vec![port_of(w, qp).gids[0]],
            ..PortChanges::default()
        };
        let of_sender = lost(&w, A);
        change(&mut w, A, of_sender);
        assert_eq!(send(&mut w), (0, 0));
        change(&mut w, A, PortChanges::default());
        assert_eq!(send(&mut w), (1, 0));
        let of_receiver = lost(&w, B);
        change(&mut w, B, of_receiver);
        assert_eq!(send(&mut w), (0, 1));
        change(&mut w, B, PortChanges::default());
        assert_eq!(send(&mut w), (1, 1));
    }
}

#[test]
fn datagrams_of_another_partition_are_dropped() {
    for mut w in ready() {
        let key = |p_key| PortChanges { p_key, ..PortChanges::default() };
        change(&mut w, A, key(0x7FFF));
        assert_eq!(send(&mut w), (1, 0), "the receiver is a full member");
        change(&mut w, B, key(0x7FFF));
        assert_eq!(send(&mut w), (0, 1));
        change(&mut w, A, key(0x8001));
        assert_eq!(send(&mut w), (0, 2));
        change(&mut w, B, key(0x0001));
        assert_eq!(send(&mut w), (1, 2));
    }
}
