//! A user with its maximum number of sessions, all of them busy.

use std::convert::Infallible;
use std::path::Path;

use rnic_abi::abi::queue::{ARM_NONE, SendFlags, SendHeader, SendOpcode, Sge};
use rnic_abi::types::{Access, Stag};

use super::flush::send;
use super::intruder::{Completions, End, Intruder};
use super::progress::Progress;
use crate::traffic::Failure;

/// Depth of each send queue.
const DEPTH: u32 = 64;
/// Length of a Write in bytes.
const LEN: usize = 64 * 1024;

/// A session with a QP that writes to another QP of the session.
struct Busy {
    intruder: Intruder,
    end: End,
    completions: Completions,
    _other: End,
}

/// Keeps the send queues of `sessions` sessions full forever.
pub fn run(socket: &Path, sessions: usize) -> Result<Infallible, Failure> {
    let busy = (0..sessions).map(|_| Busy::new(socket)).collect::<Result<Vec<_>, _>>()?;
    let progress = Progress::begin();
    loop {
        for Busy { intruder, end, completions, .. } in &busy {
            completions.ring.drain(ARM_NONE);
            let new = end.sq.refill();
            if new > 0 {
                intruder.ring_for(&end.sq);
            }
            progress.add(new.into());
        }
    }
}

impl Busy {
    fn new(socket: &Path) -> Result<Self, Failure> {
        let mut intruder = Intruder::open(socket)?;
        let completions = intruder.cq(2 * DEPTH, false)?;
        let end = intruder.qp(completions.cq, DEPTH)?;
        let other = intruder.qp(completions.cq, 1)?;
        let (_, address) = intruder.listen(1)?;
        intruder.couple(address, &end, &other)?;
        let region = intruder.region(LEN, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        end.sq.fill(|n| write(region, n));
        Ok(Busy { intruder, end, completions, _other: other })
    }
}

/// Encodes a Write of a region into itself.
fn write(region: Stag, n: u32) -> Vec<u64> {
    let none = SendFlags::empty();
    let header = SendHeader { num_sge: 1, rkey: region.0, ..send(SendOpcode::Write, none, n) };
    let mut words = header.to_words().to_vec();
    words.extend(Sge { addr: 0, length: LEN as u32, lkey: region.0 }.to_words());
    words
}
