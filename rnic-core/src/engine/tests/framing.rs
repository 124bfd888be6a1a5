//! Streams that are cut, delayed or refused at any point.

use super::link::Cuts;
use super::requests::Wr;
use super::world::{A, B, Wiring, World};
use rnic_abi::abi::queue::SendFlags;

/// Exchanges requests in both directions. Returns the completions, and the number of bytes sent by
/// each end.
fn exchange(wiring: Wiring, arrange: impl Fn(&mut World)) -> (Vec<String>, [u64; 2]) {
    let mut w = World::pair(wiring);
    arrange(&mut w);
    let a = w.any_mr(A, 700);
    let b = w.any_mr(B, 700);
    let bytes = a.pattern(7);
    w.recv(B, 50, &[b.sge(100..105), b.sge(105..300)]);
    w.recv(B, 51, &[]);
    w.recv(A, 52, &[a.sge(690..700)]);
    w.push(
        A,
        &[
            Wr::write(1, &[a.sge(0..100)], &b, 0),
            Wr::send(2, &[a.sge(100..300)]),
            Wr::read(3, a.sge(600..650), &b, 300),
            Wr::send(4, &[]).with(SendFlags::SOLICITED),
            Wr::write(5, &[a.sge(300..600)], &b, 400),
        ],
    );
    b.mapping.write(300, &[0xAB; 50]).unwrap();
    w.push(B, &[Wr::send(6, &[]).inline(b"answer"), Wr::write(7, &[], &a, 650).inline(b"w")]);
    w.settle();
    let mut log = w.completions(A);
    log.extend(w.completions(B));
    let got = b.bytes();
    assert_eq!(got[..300], bytes[..300], "{wiring:?}");
    assert_eq!(got[400..700], bytes[300..600]);
    assert_eq!(a.bytes()[600..650], [0xAB; 50]);
    assert_eq!(&a.bytes()[690..696], b"answer");
    assert_eq!(a.bytes()[650], b'w');
    (log, [w.links[0].pipes[0].sent, w.links[0].pipes[1].sent])
}

const DONE: [&str; 10] = [
    "52 Receive 6",
    "1 RdmaWrite",
    "2 Send",
    "3 RdmaRead 50",
    "4 Send",
    "5 RdmaWrite",
    "50 Receive 200",
    "51 Receive solicited",
    "6 Send",
    "7 RdmaWrite",
];

fn assert_done(mut log: Vec<String>, what: &str) {
    let mut expected: Vec<String> = DONE.iter().map(|s| (*s).to_owned()).collect();
    // The interleaving of the two ends' completions depends on the cuts. The order within each
    // queue is fixed.
    for queue in [["1 ", "2 ", "3 ", "4 ", "5 "].as_slice(), &["50", "51"], &["6 ", "7 "]] {
        let of = |l: &[String]| -> Vec<String> {
            l.iter().filter(|c| queue.iter().any(|q| c.starts_with(q))).cloned().collect()
        };
        assert_eq!(of(&log), of(&expected), "{what}");
    }
    log.sort();
    expected.sort();
    assert_eq!(log, expected, "{what}");
}

fn framings() -> Vec<Wiring> {
    let mut all: Vec<Wiring> = Wiring::all().into_iter().filter(|w| !w.direct).collect();
    all.push(Wiring { rdmac: true, ..Wiring::tcp() });
    all
}

//= DDP-3-4
//= MPA-5.1-6
//= MPA-A.4-1
#[test]
fn a_stream_cut_at_every_byte() {
    for wiring in framings() {
        let (_, sent) = exchange(wiring, |_| ());
        for (direction, sent) in sent.into_iter().enumerate() {
            for at in 0..=sent {
                let (log, _) = exchange(wiring, |w| {
                    w.links[0].pipes[direction].cuts = Cuts::At(at);
                });
                assert_done(log, &format!("cut {direction} at {at}: {wiring:?}"));
            }
        }
    }
}

//= DDP-3-11
//= DDP-3-7
#[test]
fn byte_by_byte_and_at_random() {
    for wiring in framings() {
        let ways =
            [Cuts::Every(1), Cuts::Every(3), Cuts::Random(1), Cuts::Random(2), Cuts::Random(3)];
        for cuts in ways {
            let (log, _) = exchange(wiring, |w| {
                for pipe in &mut w.links[0].pipes {
                    pipe.cuts = cuts.clone();
                    pipe.latency = 1000;
                }
            });
            assert_done(log, &format!("{cuts:?}: {wiring:?}"));
        }
    }
}

//= DDP-3-3
#[test]
fn short_writes_at_every_byte() {
    for wiring in framings() {
        let (_, sent) = exchange(wiring, |_| ());
        for (direction, sent) in sent.into_iter().enumerate() {
            for at in 1..=sent {
                let (log, _) = exchange(wiring, |w| {
                    w.links[0].pipes[direction].takes = Cuts::At(at);
                });
                assert_done(log, &format!("{direction} takes until {at}: {wiring:?}"));
            }
        }
        for window in [1, 5, 64, 1000] {
            let (log, _) = exchange(wiring, |w| {
                for pipe in &mut w.links[0].pipes {
                    pipe.window = window;
                    pipe.latency = 100;
                }
            });
            assert_done(log, &format!("window {window}: {wiring:?}"));
        }
    }
}

//= MPA-4.5-6
#[test]
fn a_long_message_follows_emss_changes() {
    for crc in [true, false] {
        let mut w = World::pair(Wiring::tcp().with(|o| o.crc = crc));
        w.emss = 8960;
        let a = w.any_mr(A, 400_000);
        let b = w.any_mr(B, 400_000);
        let bytes = a.pattern(3);
        w.links[0].pipes[0].window = 50_000;
        w.push(A, &[Wr::write(1, &[a.all()], &b, 0)]);
        w.round();
        let seen = |w: &World| w.qps[A].shared.counters().segments_sent as usize;
        let queued = seen(&w);
        assert!(queued > 5 && queued < 400_000 / 8940, "{queued} segments so far");
        // Queued segments are not cut again (RFC 5041 section 3). The rest uses the new size.
        w.emss = 1460;
        w.links[0].pipes[0].window = 1 << 20;
        w.settle();
        assert_eq!(b.bytes(), bytes);
        let rest = 400_000 - queued * (8954 - 14);
        let expected = rest.div_ceil(1454 - 14);
        assert_eq!(seen(&w) - queued, expected, "CRC {crc}");
    }
}

#[test]
fn an_idle_connection_holds_no_buffers() {
    let mut w = World::pair(Wiring::tcp());
    let a = w.any_mr(A, 5000);
    let b = w.any_mr(B, 5000);
    w.links[0].pipes[0].cuts = Cuts::Every(7);
    w.links[0].pipes[0].takes = Cuts::Every(11);
    w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
    assert_eq!(w.completions(A), ["1 RdmaWrite"]);
    for engine in &w.engines {
        for qp in engine.qps.iter().flatten() {
            assert!(qp.link.tcp().expect("the QP runs over TCP").holds_no_buffer());
        }
    }
}
