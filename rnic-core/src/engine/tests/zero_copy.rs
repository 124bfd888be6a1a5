//! Sending payload in place: short calls, revoked memory, missing pages.

use super::link::Cuts;
use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use rnic_abi::shm::Mapping;
use rnic_abi::types::{Access, QpState, Scope};

fn bare() -> Wiring {
    Wiring::tcp().with(|o| o.crc = false)
}

/// Exchanges small and long messages in both directions and checks the results.
fn exchange(arrange: impl Fn(&mut World)) -> u64 {
    let mut w = World::pair(bare());
    w.emss = 9000;
    arrange(&mut w);
    let a = w.any_mr(A, 40_000);
    let b = w.any_mr(B, 40_000);
    let pa = a.pattern(1);
    let pb = b.pattern(2);
    let sink = w.any_mr(A, 20_000);
    let to = w.any_mr(B, 70_000);
    w.recv(B, 7, &[to.sge(40_000..69_000)]);
    w.push(
        A,
        &[
            Wr::write(1, &[], &to, 69_990).inline(b"front"),
            Wr::write(2, &[a.sge(0..20_001), a.sge(0..0), a.sge(20_001..40_000)], &to, 0),
            Wr::read(3, sink.all(), &b, 11),
            Wr::send(4, &[a.sge(3..29_000)]),
            Wr::write(5, &[], &to, 69_995).inline(b"back!"),
        ],
    );
    w.settle();
    let sent = ["1 RdmaWrite", "2 RdmaWrite", "3 RdmaRead 20000", "4 Send", "5 RdmaWrite"];
    assert_eq!(w.completions(A), sent);
    assert_eq!(w.completions(B), ["7 Receive 28997"]);
    let got = to.bytes();
    assert_eq!(got[..40_000], pa);
    assert_eq!(got[40_000..68_997], pa[3..29_000]);
    assert_eq!(&got[69_990..], b"frontback!");
    assert_eq!(sink.bytes(), pb[11..20_011]);
    w.links[0].pipes[0].sent
}

#[test]
fn short_calls_lose_and_repeat_nothing() {
    let total = exchange(|_| ());
    // Every byte around the heads and tails of FPDUs, and some in between.
    for at in (1..total).filter(|at| at % 9000 < 60 || at % 9000 > 8940 || at % 131 == 0) {
        exchange(|w| w.links[0].pipes[0].takes = Cuts::At(at));
    }
    for seed in 0..40 {
        exchange(|w| {
            for pipe in &mut w.links[0].pipes {
                pipe.takes = Cuts::Random(seed);
                pipe.cuts = Cuts::Random(seed + 100);
            }
        });
    }
    for window in [1, 100, 8999, 9000, 9001, 30_000] {
        exchange(|w| {
            for pipe in &mut w.links[0].pipes {
                pipe.window = window;
                pipe.latency = 10;
            }
        });
    }
}

#[test]
fn payload_accepted_by_tcp_is_not_copied() {
    let mut w = World::connected(bare());
    w.emss = 65483;
    let a = w.any_mr(A, 1 << 20);
    let b = w.any_mr(B, 1 << 20);
    let bytes = a.pattern(1);
    w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    assert_eq!(b.bytes(), bytes);
    // The remaining bytes, fewer than 16 KiB, would need their own call, so copying is cheaper.
    let fpdu = usize::from(crate::mpa::mulpdu(65483, false)) - 14;
    let rest = (1 << 20) % fpdu;
    assert!(rest < 16 * 1024);
    assert_eq!(w.shared_bytes, (1 << 20) - rest);
    // With a CRC or Markers all data are copied.
    for wiring in [Wiring::tcp(), bare().with(|o| o.markers = true)] {
        let mut w = World::connected(wiring);
        let a = w.any_mr(A, 1 << 20);
        let b = w.any_mr(B, 1 << 20);
        w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
        assert_eq!(w.shared_bytes, 0);
    }
}

#[test]
fn revoked_memory_is_not_read_again() {
    for at in [1, 2, 16, 17, 5000, 8999, 9000, 9001, 20_000] {
        let mut w = World::pair(bare());
        w.emss = 9000;
        let a = w.any_mr(A, 60_000);
        let b = w.any_mr(B, 60_000);
        let bytes = a.pattern(1);
        let rtr = w.links[0].pipes[0].sent;
        w.links[0].pipes[0].takes = Cuts::At(rtr + at);
        w.links[0].pipes[0].window = at as usize;
        w.push(A, &[Wr::write(1, &[a.all()], &b, 0)]);
        // After one call the memory is revoked and overwritten.
        let engine = w.qps[A].engine;
        let now = w.now;
        w.engines[engine].poll_doorbells(now);
        let Some(crate::engine::Work::Transmit(qp)) = w.engines[engine].poll_work(now) else {
            panic!("nothing to send")
        };
        w.transmit(engine, qp);
        w.revoke(A, a.stag);
        a.fill(0xEE);
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        assert_eq!(w.completions(A), ["1 RdmaWrite LocalProtection"]);
        assert!(w.events(B)[1].starts_with("terminated by peer 0/0/00"), "framing is intact");
        let got = b.bytes();
        let whole = got.iter().zip(&bytes).take_while(|(g, o)| g == o).count();
        assert!(got[whole..].iter().all(|o| *o == 0), "no later read at {at}");
    }
}

#[test]
fn memory_that_vanishes_costs_its_owner_only() {
    rnic_abi::shm::fault::install().unwrap();
    for response in [false, true] {
        let mut w = World::pair(bare());
        w.emss = 9000;
        w.events(A);
        let owner = if response { B } else { A };
        let (mapping, fd) = Mapping::create_shared_buffer(65536).unwrap();
        let bad = w.mr_over(owner, mapping, 65536, Access::all(), Scope::Pd, 0x10_0000);
        let good = w.any_mr(1 - owner, 65536);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        // Data framed earlier still arrive.
        let to = w.any_mr(1 - owner, 4);
        w.push(owner, &[Wr::write(9, &[], &to, 0).inline(b"last")]);
        let wr = if response {
            Wr::read(1, good.all(), &bad, 0)
        } else {
            Wr::write(1, &[bad.all()], &good, 0)
        };
        w.post(A, &[wr]);
        assert_eq!(&to.bytes(), b"last");
        let events = w.events(1 - owner);
        assert!(events.last().unwrap().starts_with("terminated by peer 0/0/00"), "{events:?}");
        assert!(w.misbehaved.iter().all(|(s, _)| *s == w.apps[owner].session));
        assert!(!w.misbehaved.is_empty());
        assert_eq!([w.state(A), w.state(B)], [QpState::Error, QpState::Error]);
        assert_eq!(good.bytes(), vec![0; 65536]);
    }
}
