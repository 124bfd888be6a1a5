//! Sends without a receive, which wait until the RNR timeout and block a Read Response. Each of
//! them could cause a log line.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rnic_abi::abi::control::{QpRequest, RequestBody};
use rnic_abi::abi::queue::{ARM_NONE, SendFlags, SendHeader, SendOpcode, Sge};
use rnic_abi::types::{Access, RnrPolicy, Stag};

use super::flush::send;
use super::intruder::{Completions, Intruder};
use super::progress::Progress;
use crate::raw::qp_request;
use crate::traffic::Failure;

/// Makes connections fail in this way, forever. Opens a new session whenever the daemon ends one.
pub fn run(socket: &Path) -> Result<Infallible, Failure> {
    let progress = Progress::begin();
    loop {
        if let Ok(mut holding) = Holding::new(socket) {
            while holding.hold().is_ok() {
                progress.add(PAIRS);
            }
        }
    }
}

/// Number of connections at the same time.
const PAIRS: u64 = 32;

/// A session and the objects that all its connections share.
struct Holding {
    intruder: Intruder,
    completions: Completions,
    address: SocketAddr,
    region: Stag,
}

impl Holding {
    fn new(socket: &Path) -> Result<Self, Failure> {
        let mut intruder = Intruder::open(socket)?;
        intruder.timeout = Duration::from_secs(1);
        let completions = intruder.cq(4096, false)?;
        let (_, address) = intruder.listen(64)?;
        let region = intruder.region(4096, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        Ok(Holding { intruder, completions, address, region })
    }

    /// Connects, sends without a posted receive, reads in the other direction, and destroys the
    /// QPs.
    fn hold(&mut self) -> Result<(), Failure> {
        let Holding { intruder, completions, address, region } = self;
        let mut pairs = Vec::new();
        for _ in 0..PAIRS {
            let holds = RnrPolicy::Wait { timeout_ms: 5 };
            let holding =
                QpRequest { rnr_policy: holds, ..qp_request(intruder.pd, completions.cq) };
            let sending = intruder.qp(completions.cq, 1)?;
            let holding = intruder.qp_with(holding)?;
            sending.sq.fill(|n| send(SendOpcode::Send, SendFlags::empty(), n).to_words().to_vec());
            intruder.couple(*address, &sending, &holding)?;
            holding.sq.fill(|n| {
                let none = SendFlags::empty();
                let header =
                    SendHeader { num_sge: 1, rkey: region.0, ..send(SendOpcode::Read, none, n) };
                let mut words = header.to_words().to_vec();
                words.extend(Sge { addr: 0, length: 8, lkey: region.0 }.to_words());
                words
            });
            for end in [&sending, &holding] {
                end.sq.refill();
                intruder.ring_for(&end.sq);
            }
            pairs.push((sending, holding));
        }
        std::thread::sleep(Duration::from_millis(10));
        intruder.forget_events();
        completions.ring.drain(ARM_NONE);
        for (one, two) in pairs {
            for end in [one, two] {
                intruder.call(RequestBody::DestroyQp { qp: end.qp })?;
            }
        }
        Ok(())
    }
}
