//! Memory of a burst returns to the kernel after the burst.

use std::time::Instant;

use rnic_client::{Context, QpOptions};
use rnic_tests::{DEADLINE, Daemon, READ_WRITE};

/// Creates many objects in several sessions, and returns the daemon's memory before they are freed.
fn burst(daemon: &Daemon) -> u64 {
    let sessions: Vec<Context> =
        (0..4).map(|_| Context::open_at(daemon.socket()).unwrap()).collect();
    let mut kept = Vec::new();
    for context in &sessions {
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(16, None).unwrap();
        let buffer = context.create_shared_buffer(4096).unwrap();
        let options = QpOptions { sq_depth: 1, rq_depth: 1, ..QpOptions::new(&cq) };
        let qps: Vec<_> = (0..1500).map(|_| pd.create_qp(&options).unwrap()).collect();
        // Workers hold memory for QPs in the error state.
        qps.iter().for_each(|qp| qp.to_error().unwrap());
        let mrs: Vec<_> = (0..4000).map(|_| pd.reg_mr(&buffer, .., READ_WRITE).unwrap()).collect();
        kept.push((qps, mrs));
    }
    daemon.anonymous_kib()
}

#[test]
fn memory_of_a_burst_is_returned() {
    let config = "[engine]\nworkers = 2\n[limits]\ndiagnoses = 16\nevent_records = 16\n";
    let daemon = Daemon::start(config);
    // Memory that one client costs permanently.
    drop(Context::open_at(daemon.socket()).unwrap());
    daemon.is_empty();
    let before = daemon.anonymous_kib();
    let high = burst(&daemon);
    assert!(high > before + (12 << 10), "{before} KiB became only {high} KiB: no burst");
    daemon.is_empty();
    let deadline = Instant::now() + DEADLINE;
    loop {
        let now = daemon.anonymous_kib();
        if now <= before + (6 << 10) {
            break;
        }
        assert!(Instant::now() < deadline, "{before} KiB became {high} KiB, and {now} KiB stay");
        std::thread::yield_now();
    }
}
