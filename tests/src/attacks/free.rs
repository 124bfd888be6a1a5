//! Requests that send no message: binds and local invalidates of the attacker's own window, and
//! Reads after the peer's FIN. One or many sessions post them as fast as the daemon takes them.

use std::convert::Infallible;
use std::path::Path;

use rnic_abi::abi::control::{DisconnectMode, Event, ReplyBody, RequestBody};
use rnic_abi::abi::queue::{ARM_NONE, SendFlags, SendHeader, SendOpcode, Sge, WindowParams};
use rnic_abi::types::{Access, Stag, WindowKind};

use super::flush::send;
use super::intruder::{Completions, End, Intruder};
use super::progress::Progress;
use crate::traffic::Failure;

/// Depth of each send queue: the maximum. Must be even, so that binds and invalidates stay paired.
const DEPTH: u32 = 16_384;

/// Requests to post.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Requests {
    /// Binds and invalidates of a window.
    Binds,
    /// Reads that fail because the peer has sent FIN.
    Reads,
}

/// A session, its QP and its CQ.
struct Busy(Intruder, End, Completions);

/// Posts requests from `sessions` sessions, forever.
pub fn run(socket: &Path, requests: Requests, sessions: usize) -> Result<Infallible, Failure> {
    let open = || match requests {
        Requests::Binds => binds(socket),
        Requests::Reads => reads(socket),
    };
    let busy = (0..sessions).map(|_| open()).collect::<Result<Vec<_>, _>>()?;
    let progress = Progress::begin();
    loop {
        for Busy(intruder, end, completions) in &busy {
            completions.ring.drain(ARM_NONE);
            let new = end.sq.refill();
            if new > 0 {
                intruder.ring_for(&end.sq);
            }
            progress.add(new.into());
        }
    }
}

fn binds(socket: &Path) -> Result<Busy, Failure> {
    let (mut intruder, end, completions) = coupled(socket)?;
    let region = intruder.region(4096, Access::LOCAL_WRITE | Access::MW_BIND)?;
    let body = RequestBody::AllocWindow { pd: intruder.pd, kind: WindowKind::Type2 };
    let ReplyBody::Window { stag, .. } = intruder.call(body)? else {
        return Err("no window".into());
    };
    let access = Access::REMOTE_WRITE.bits();
    let params = WindowParams { address: 0, length: 4096, lkey: region.0, access }.to_params();
    end.sq.fill(|n| {
        let none = SendFlags::empty();
        let header = match n % 2 {
            0 => SendHeader {
                rkey: stag.0,
                inv_rkey: stag.0,
                params,
                ..send(SendOpcode::BindWindow, none, n)
            },
            _ => SendHeader { inv_rkey: stag.0, ..send(SendOpcode::LocalInvalidate, none, n) },
        };
        header.to_words().to_vec()
    });
    Ok(Busy(intruder, end, completions))
}

fn reads(socket: &Path) -> Result<Busy, Failure> {
    let (mut intruder, end, completions) = coupled(socket)?;
    let sink = intruder.region(4096, Access::LOCAL_WRITE)?;
    end.sq.fill(|n| read(sink, n));
    // The other end sends FIN. This end stays open.
    while !matches!(intruder.event()?, Event::PeerClosed { .. }) {}
    Ok(Busy(intruder, end, completions))
}

/// Encodes a Read of a few bytes into this region.
fn read(sink: Stag, n: u32) -> Vec<u64> {
    let header = SendHeader { num_sge: 1, ..send(SendOpcode::Read, SendFlags::SIGNALED, n) };
    let mut words = header.to_words().to_vec();
    words.extend(Sge { addr: 0, length: 8, lkey: sink.0 }.to_words());
    words
}

/// Connects two QPs of a new session. The second one has sent FIN.
fn coupled(socket: &Path) -> Result<(Intruder, End, Completions), Failure> {
    let mut intruder = Intruder::open(socket)?;
    let completions = intruder.cq(2 * DEPTH, false)?;
    let end = intruder.qp(completions.cq, DEPTH)?;
    let other = intruder.qp(completions.cq, 1)?;
    let (_, address) = intruder.listen(1)?;
    intruder.couple(address, &end, &other)?;
    intruder.call(RequestBody::Disconnect { qp: other.qp, mode: DisconnectMode::Orderly })?;
    Ok((intruder, end, completions))
}
