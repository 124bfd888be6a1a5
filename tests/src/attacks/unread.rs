//! Peers that never read.

use std::convert::Infallible;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use rnic_abi::abi::queue::{ARM_NONE, SendFlags, SendHeader, SendOpcode, Sge};
use rnic_abi::types::Access;

use super::flush::send;
use super::intruder::Intruder;
use super::progress::Progress;
use crate::traffic::Failure;
use crate::wire::{self, CRC, fpdu, tagged};

/// Number of connections.
pub const CONNECTIONS: usize = 100;
/// Length of a Write in bytes.
const LEN: usize = 1 << 20;
/// Depth of each send queue.
const DEPTH: u32 = 16;

/// Writes as much as each connection accepts, forever.
pub fn run(socket: &Path) -> Result<Infallible, Failure> {
    let mut intruder = Intruder::open(socket)?;
    let completions = intruder.cq(4096, false)?;
    let region = intruder.region(LEN, Access::LOCAL_WRITE)?;
    let (_, address) = intruder.listen(CONNECTIONS as u32)?;
    let mut all = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut peer = wire::dial(address);
        peer.write_all(&wire::request(CRC, 1, b""))?;
        let end = intruder.qp(completions.cq, DEPTH)?;
        intruder.accept(&end)?;
        wire::reply(&mut peer);
        peer.write_all(&fpdu(&tagged(0, 0, 0, b"")))?;
        end.sq.fill(|n| {
            let signaled = SendFlags::SIGNALED;
            let header = SendHeader { num_sge: 1, rkey: 7, ..send(SendOpcode::Write, signaled, n) };
            let mut words = header.to_words().to_vec();
            words.extend(Sge { addr: 0, length: LEN as u32, lkey: region.0 }.to_words());
            words
        });
        all.push((peer, end));
    }
    intruder.forget_events();
    let progress = Progress::begin();
    loop {
        completions.ring.drain(ARM_NONE);
        for (_, end) in &all {
            if end.sq.refill() > 0 {
                intruder.ring_for(&end.sq);
            }
            progress.add(1);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
