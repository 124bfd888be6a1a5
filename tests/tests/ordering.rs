//! Ordering guarantees for applications: a Send follows the Writes before it, a Read returns the
//! data written before it, and a fence holds later Writes back.

use rnic_client::{Mr, RecvRequest, SendRequest};
use rnic_tests::traffic::Rng;
use rnic_tests::{Daemon, End, PATHS, READ_WRITE, engine};

/// Returns the number of repetitions.
fn rounds(short: u64, long: u64) -> u64 {
    if std::env::var_os("RNIC_TEST_LONG").is_some() { long } else { short }
}

/// Returns a checksum of a region, read in pieces.
fn checksum(region: &Mr) -> u32 {
    let mut piece = vec![0; 1 << 20];
    (0..region.len() / piece.len() as u64).fold(0, |sum, n| {
        region.read_at(n * piece.len() as u64, &mut piece).unwrap();
        crc32c::crc32c_append(sum, &piece)
    })
}

//= RDMAP-5.1-7
//= RDMAP-5.5-10
/// Writes 64 MiB, then sends a message. When its receive completes, another thread sees all bytes.
#[test]
fn send_makes_the_prior_write_visible() {
    const LEN: u64 = 64 << 20;
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let [a, b] = End::pair(&daemon);
        let source = a.region(LEN, READ_WRITE);
        let sink = b.region(LEN, READ_WRITE);
        let mut rng = Rng::new(34);
        let mut piece = vec![0; 1 << 20];
        for n in 0..LEN >> 20 {
            rng.fill(&mut piece);
            source.write_at(n << 20, &piece).unwrap();
        }
        for round in 0..rounds(3, 30) {
            // Change bytes in every page in each round.
            for page in 0..LEN / 4096 {
                source.store_u64(page * 4096, rng.word()).unwrap();
            }
            let expected = checksum(&source);
            b.qp.post_recv(&[RecvRequest::new(round, &[])]).unwrap();
            std::thread::scope(|scope| {
                let watcher = scope.spawn(|| {
                    b.success();
                    checksum(&sink)
                });
                let sges = [source.sge(0, LEN as u32)];
                let write = SendRequest::write(1, &sges, sink.remote().at(0));
                let send = SendRequest::send_inline(2, b"").signaled();
                a.qp.post_send(&[write, send]).unwrap();
                assert_eq!(watcher.join().unwrap(), expected, "{path} round {round}");
            });
            assert_eq!(a.success().wr_id, 2);
        }
    }
}

//= RDMAP-5.5-12
/// A Read returns the data of the Write before it. With a fence, a later Write does not affect it.
/// Each batch contains several such sequences, all on the same word.
#[test]
fn read_sees_prior_writes_not_fenced_ones() {
    const BATCH: u64 = 8;
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let [a, b] = End::pair(&daemon);
        let sink = a.region(4096, READ_WRITE);
        let place = b.region(4096, READ_WRITE);
        let at = place.remote().at(0);
        let mut number = 0u64;
        for _ in 0..rounds(1_000, 100_000 / BATCH) {
            let numbers: Vec<[u8; 8]> = (0..BATCH).map(|n| (number + n).to_ne_bytes()).collect();
            let spoiler = u64::MAX.to_ne_bytes();
            let mut batch = Vec::new();
            for (n, bytes) in (0..).zip(&numbers) {
                let read = SendRequest::read(n, sink.sge(n * 8, 8), at).signaled();
                batch.push(SendRequest::write_inline(100, bytes, at));
                batch.push(read);
                batch.push(SendRequest::write_inline(101, &spoiler, at).fence());
            }
            a.qp.post_send(&batch).unwrap();
            for n in 0..BATCH {
                assert_eq!(a.success().wr_id, n, "{path}");
                assert_eq!(sink.load_u64(n * 8).unwrap(), number + n, "{path}");
            }
            number += BATCH;
        }
    }
}
