//! An endless flush: the QP is in Error, and every flushed request is posted again at once.

use std::convert::Infallible;
use std::path::Path;

use rnic_abi::abi::control::RequestBody;
use rnic_abi::abi::queue::{ARM_NEXT, ARM_NONE, ReceiveHeader, SendFlags, SendHeader, SendOpcode};

use super::intruder::{Completions, End, Intruder};
use super::progress::Progress;
use crate::traffic::Failure;

/// Depth of each queue: the maximum.
const DEPTH: u32 = 16_384;

/// The queue that is flushed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The send queue.
    Sends,
    /// The receive queue.
    Receives,
}

/// Refills the queue and empties the CQ forever. Rearms the CQ each time if `armed` is set.
pub fn run(socket: &Path, side: Side, armed: bool) -> Result<Infallible, Failure> {
    let mut intruder = Intruder::open(socket)?;
    let completions = intruder.cq(2 * DEPTH, armed)?;
    let end = intruder.qp(completions.cq, DEPTH)?;
    end.sq.fill(|n| send(SendOpcode::Write, SendFlags::SIGNALED, n).to_words().to_vec());
    end.rq.fill(|n| {
        ReceiveHeader { num_sge: 0, wr_id: n.into(), reserved_is_zero: true }.to_words().to_vec()
    });
    intruder.call(RequestBody::QpToError { qp: end.qp })?;
    let progress = Progress::begin();
    loop {
        progress.add(turn(&intruder, &end, &completions, side, armed).into());
    }
}

fn turn(intruder: &Intruder, end: &End, all: &Completions, side: Side, armed: bool) -> u32 {
    let queue = match side {
        Side::Sends => &end.sq,
        Side::Receives => &end.rq,
    };
    let new = queue.refill();
    if new > 0 {
        intruder.ring_for(queue);
    }
    all.ring.drain(if armed { ARM_NEXT } else { ARM_NONE });
    new
}

/// Returns the header of a request without data.
pub(super) fn send(opcode: SendOpcode, flags: SendFlags, wr_id: u32) -> SendHeader {
    SendHeader {
        opcode: opcode as u8,
        num_sge: 0,
        flags: flags.bits(),
        inline_len: 0,
        wr_id: wr_id.into(),
        remote_addr: 0,
        rkey: 0,
        inv_rkey: 0,
        params: [0; 4],
        reserved_is_zero: true,
    }
}
