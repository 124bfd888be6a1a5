//! RDMA Write, Send and RDMA Read over both paths and all framings.

use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use rnic_abi::types::QpState;

//= RDMAP-4.4-5
//= RDMAP-5.2.1-10
//= RDMAP-5.2.1-11
#[test]
fn read_fetches_bytes() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        let sink = w.any_mr(A, 100);
        let from = w.any_mr(B, 100);
        let bytes = from.pattern(1);
        w.post(A, &[Wr::read(1, sink.sge(20..70), &from, 5)]);
        assert_eq!(w.completions(A), ["1 RdmaRead 50"], "{wiring:?}");
        assert_eq!(sink.bytes()[20..70], bytes[5..55]);
        assert_eq!(sink.bytes()[..20], [0; 20]);
        assert_eq!(w.qps[B].shared.counters().reads_answered, 1);
    }
}

//= DDP-5.2-4
//= DDP-5.2-5
#[test]
fn messages_of_many_segments() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        let len = 300_000;
        let a = w.any_mr(A, len);
        let b = w.any_mr(B, len);
        let bytes = a.pattern(1);
        w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
        assert_eq!(b.bytes(), bytes, "{wiring:?}");
        b.fill(0);
        w.recv(B, 9, &[b.sge(0..100_000), b.sge(100_000..len)]);
        w.post(
            A,
            &[Wr::send(2, &[a.sge(0..1), a.sge(1..1), a.sge(1..70_000), a.sge(70_000..len)])],
        );
        assert_eq!(w.completions(B), ["9 Receive 300000"]);
        assert_eq!(b.bytes(), bytes);
        a.fill(0);
        w.post(A, &[Wr::read(3, a.all(), &b, 0)]);
        assert_eq!(w.completions(A), ["1 RdmaWrite", "2 Send", "3 RdmaRead 300000"]);
        assert_eq!(a.bytes(), bytes, "{wiring:?}");
    }
}

//= RDMAP-5.1-9
//= RDMAP-5.2.1-12
//= RDMAP-5.3-10
//= RDMAP-5.3-11
//= DDP-4.4-1
//= DDP-5.2-9
#[test]
fn zero_length_forms() {
    for wiring in Wiring::all() {
        let mut w = World::connected(wiring);
        let garbage = w.any_mr(B, 1);
        let mut nowhere = garbage.clone();
        nowhere.stag.0 ^= 0x5A5A_0000;
        w.recv(B, 7, &[]);
        w.recv(B, 8, &[garbage.all()]);
        w.post(
            A,
            &[
                Wr::write(1, &[], &nowhere, 77),
                Wr::send(2, &[]),
                Wr::read(3, garbage.sge(0..0), &nowhere, 1 << 60),
                Wr::send(4, &[]).inline(&[]),
                Wr::write(5, &[garbage.sge(0..0)], &nowhere, 0),
            ],
        );
        let expected = ["1 RdmaWrite", "2 Send", "3 RdmaRead", "4 Send", "5 RdmaWrite"];
        assert_eq!(w.completions(A), expected, "{wiring:?}");
        assert_eq!(w.completions(B), ["7 Receive", "8 Receive"]);
        assert_eq!(w.state(A), QpState::Rts);
        assert_eq!(w.state(B), QpState::Rts);
    }
}

#[test]
fn unsignaled_requests_free_their_slots() {
    for wiring in Wiring::both() {
        let mut w = World::connected(wiring);
        let to = w.any_mr(B, 8);
        for round in 0..10 {
            let mut batch: Vec<Wr> = (0..31)
                .map(|n| Wr::write(n, &[], &to, 0).inline(&[n as u8; 8]).unsignaled())
                .collect();
            batch.push(Wr::write(round, &[], &to, 0).inline(&[round as u8; 8]));
            w.post(A, &batch);
            assert_eq!(w.completions(A), [format!("{round} RdmaWrite")], "{wiring:?}");
        }
        assert_eq!(to.bytes(), [9; 8]);
        let (unread, reserved, written) = w.apps[0].cqs[0].cq.usage();
        assert_eq!((unread, reserved, written), (0, 0, 10));
    }
}
