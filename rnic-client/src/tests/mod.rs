//! Tests of the library against a daemon in the same process ([`crate::fake`]).

mod connections;
mod data;
mod handles;
mod leases;
mod resizing;
mod session;
mod waiting;
mod windows;

use std::time::{Duration, Instant};

use rnic_abi::abi::queue::Cqe;

use crate::fake::FakeDaemon;
use crate::*;

/// Timeout of waits in tests, long enough for any machine. Only a failing test reaches it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// Calls `look` until it returns something, and yields to other threads in between.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "no {what}");
        std::thread::yield_now();
    }
}

/// Returns a successful completion of a Send.
fn entry(wr_id: u64) -> Cqe {
    Cqe::new(1, wr_id, CompletionOpcode::Send, CompletionStatus::Success)
}

/// A daemon with a context, a PD, a CQ and a QP, as most tests need.
struct Rig {
    daemon: FakeDaemon,
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: Qp,
}

fn rig() -> Rig {
    let daemon = FakeDaemon::start();
    let context = daemon.open();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let options = QpOptions {
        sq_depth: 4,
        rq_depth: 4,
        max_send_sge: 2,
        max_recv_sge: 2,
        ..QpOptions::new(&cq)
    };
    let qp = pd.create_qp(&options).unwrap();
    Rig { daemon, context, pd, cq, qp }
}
