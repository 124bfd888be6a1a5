//! Doorbells that are rung for nothing, thousands at a time.

use std::convert::Infallible;
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_core::abi::queue::doorbell;

use super::intruder::Intruder;
use super::progress::Progress;
use crate::traffic::Failure;

/// QPs, which are connected to each other.
const QPS: u32 = 8000;
/// How often all doorbells are rung.
const EVERY: Duration = Duration::from_millis(2);

/// Rings for all QPs again and again, none of which has anything to do.
pub fn run(socket: &Path) -> Result<Infallible, Failure> {
    let mut intruder = Intruder::open(socket)?;
    let cq = intruder.cq(64, false)?.cq;
    let (_, address) = intruder.listen(1)?;
    let mut ends = Vec::new();
    for _ in 0..QPS / 2 {
        let (one, two) = (intruder.qp(cq, 1)?, intruder.qp(cq, 1)?);
        intruder.couple(address, &one, &two)?;
        intruder.forget_events();
        ends.push((one, two));
    }
    let progress = Progress::begin();
    let workers = u32::from(intruder.raw.workers);
    let mut next = Instant::now();
    loop {
        for worker in 0..workers {
            for index in 0..(QPS + 1).min(doorbell::INDICES) {
                intruder.ring_index(worker, index);
            }
        }
        progress.add(u64::from(QPS));
        next += EVERY;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}
