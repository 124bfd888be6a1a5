//! Thousands of doorbells that are rung although their QPs have no work.

use std::convert::Infallible;
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_abi::abi::queue::doorbell;

use super::intruder::Intruder;
use super::progress::Progress;
use crate::traffic::Failure;

/// Number of QPs, connected in pairs.
const QPS: u32 = 8000;
/// Interval at which all doorbells are rung.
const INTERVAL: Duration = Duration::from_millis(2);

/// Rings the doorbells of all QPs repeatedly. No QP has any work.
pub fn run(socket: &Path) -> Result<Infallible, Failure> {
    let mut intruder = Intruder::open(socket)?;
    let cq = intruder.cq(64, false)?.cq;
    let (_, address) = intruder.listen(1)?;
    let mut ends = Vec::new();
    for _ in 0..QPS / 2 {
        let one = intruder.qp(cq, 1)?;
        let two = intruder.qp(cq, 1)?;
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
        next += INTERVAL;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}
