//! Idle workers do not wake up. Alone in its process, so that all threads are known.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::{Events, Poll, Token, Waker};
use rnic_abi::shm::wait::WaitPolicy;
use rnic_core::engine::{EngineOptions, MulpduPolicy};
use rnicd::worker::{WorkerOptions, Workers};

/// Returns the context switches of every worker thread.
fn switches() -> BTreeMap<String, String> {
    std::fs::read_dir("/proc/self/task")
        .expect("proc")
        .filter_map(|task| {
            let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
            let field = |name: &str| {
                let line = status.lines().find(|l| l.starts_with(name))?;
                Some(line.split_once(':')?.1.trim().to_owned())
            };
            let name = field("Name")?;
            name.starts_with("rnicd-worker").then_some(())?;
            Some((name, field("voluntary_ctxt_switches")? + "/" + &field("nonvoluntary_ctxt")?))
        })
        .collect()
}

#[test]
fn idle_workers_do_not_wake() {
    let options = WorkerOptions {
        seccomp: rnicd::config::Seccomp::Enforce,
        engine: EngineOptions {
            worker: 0,
            terminate_deadline: Duration::from_secs(1),
            error_deadline: Duration::from_millis(500),
            copy_deadline: Duration::from_secs(1),
            close_deadline: Duration::from_secs(1),
            first_fpdu_deadline: Duration::from_secs(1),
            partial: Default::default(),
            unsent: Default::default(),
            mulpdu: MulpduPolicy::Emss,
            diagnoses: Arc::default(),
        },
        wait: WaitPolicy::default(),
    };
    let mut control = Poll::new().expect("epoll");
    let waker = Arc::new(Waker::new(control.registry(), Token(0)).expect("eventfd"));
    let workers = Workers::start(3, &options, waker).expect("threads");
    let mut nothing = Events::with_capacity(1);
    let begun = Instant::now();
    loop {
        let before = switches();
        // Nothing wakes this poll: the timeout is the interval of observation.
        control.poll(&mut nothing, Some(Duration::from_millis(200))).expect("epoll");
        let after = switches();
        if before.len() == 3 && before == after {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(180), "{before:?} became {after:?}");
    }
    workers.stop();
}
