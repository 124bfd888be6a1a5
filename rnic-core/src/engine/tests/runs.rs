//! Long messages over the direct path, which copies several segments at once. The results are the
//! same as for individual segments.

use super::requests::Wr;
use super::world::{A, B, QpShape, World};
use crate::engine::schedule::QUANTUM;

/// Payload bytes of one segment.
const PAYLOAD: usize = 15 * 4096;

#[test]
fn runs_are_counted_as_segments() {
    let mut w = World::pair_alone(QpShape::default(), 128);
    let mut segments = 0;
    let mut bytes = 0;
    for (wr_id, len) in [PAYLOAD, PAYLOAD + 1, 8 * PAYLOAD, 8 * PAYLOAD + 1, 17 * PAYLOAD - 3]
        .into_iter()
        .enumerate()
    {
        let from = w.any_mr(A, len);
        let to = w.any_mr(B, len);
        let back = w.any_mr(A, len);
        let pattern = from.pattern(wr_id as u8);
        let wr_id = wr_id as u64;
        w.post(A, &[Wr::write(wr_id, &[from.all()], &to, 0)]);
        assert_eq!(w.completions(A), [format!("{wr_id} RdmaWrite")]);
        assert!(to.bytes() == pattern, "{len} bytes");
        segments += len.div_ceil(PAYLOAD) as u64;
        bytes += len as u64;
        let sent = w.qps[A].shared.counters();
        let received = w.qps[B].shared.counters();
        assert_eq!((sent.segments_sent, sent.bytes_sent), (segments, bytes), "{len} bytes");
        assert_eq!((received.segments_received, received.bytes_received), (segments, bytes));

        w.post(A, &[Wr::read(wr_id, back.all(), &to, 0)]);
        assert_eq!(w.completions(A), [format!("{wr_id} RdmaRead {len}")]);
        assert!(back.bytes() == pattern, "{len} bytes read");
        // The request is a segment as well.
        segments += 1;
    }
}

#[test]
fn a_fault_in_a_run_ends_placement() {
    let mut w = World::pair_alone(QpShape::default(), 128);
    let from = w.any_mr(A, 12 * PAYLOAD);
    let to = w.any_mr(B, 10 * PAYLOAD + PAYLOAD / 2);
    let pattern = from.pattern(1);
    w.post(A, &[Wr::write(1, &[from.all()], &to, 0)]);
    let found = to.bytes();
    assert!(found[..10 * PAYLOAD] == pattern[..10 * PAYLOAD]);
    assert!(found[10 * PAYLOAD..].iter().all(|byte| *byte == 0));
    // One run, and the segments of the next run up to the fault: a run with a fault is not accepted
    // as a whole.
    assert_eq!(w.qps[B].shared.counters().segments_received, 11);
    // The peer returns the header of that segment with its length (including 14 bytes of header).
    let at = to.iova + 10 * PAYLOAD as u64;
    let named = format!("{:04x}8140{:08x}{at:016x}", PAYLOAD + 14, to.stag.0);
    assert_eq!(w.events(A), [format!("terminated by peer 1/1/01 {named}")]);
}

#[test]
fn the_first_turn_sends_its_quantum() {
    let mut w = World::pair_alone(QpShape::default(), 128);
    let from = w.any_mr(A, 60 * PAYLOAD);
    let to = w.any_mr(B, 60 * PAYLOAD);
    w.push(A, &[Wr::write(1, &[from.all()], &to, 0)]);
    let now = w.now;
    w.engines[0].poll_doorbells(now);
    assert_eq!(w.engines[0].poll_work(now), None);
    let sent = w.qps[A].shared.counters().bytes_sent;
    let worth = QUANTUM.cast_unsigned();
    assert!(worth <= sent && sent <= worth + PAYLOAD as u64, "{sent}");
    w.settle();
    assert_eq!(w.completions(A), ["1 RdmaWrite"]);
}

#[test]
fn a_stream_larger_than_the_caches() {
    const MESSAGE: usize = 1 << 20;
    const BUFFER: usize = 16 * MESSAGE;
    let mut w = World::pair_alone(QpShape::default(), 128);
    let from = w.any_mr(A, MESSAGE);
    let to = w.any_mr(B, BUFFER);
    let back = w.any_mr(A, BUFFER);
    for round in 0..2u8 {
        let mut expected = Vec::new();
        for n in 0..BUFFER / MESSAGE {
            let bytes = from.pattern(round * 16 + n as u8);
            w.post(A, &[Wr::write(1, &[from.all()], &to, (n * MESSAGE) as u64)]);
            assert_eq!(w.completions(A), ["1 RdmaWrite"]);
            expected.extend(bytes);
        }
        assert!(to.bytes() == expected, "round {round}");
        w.post(A, &[Wr::read(2, back.all(), &to, 0)]);
        assert_eq!(w.completions(A), [format!("2 RdmaRead {BUFFER}")]);
        assert!(back.bytes() == expected, "round {round}, read");
    }
}
