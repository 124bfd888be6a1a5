//! A worker on a CPU that another thread uses as well.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// Confines this thread, and the threads it starts later, to one CPU.
fn stay_on(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).expect("an allowed CPU");
}

/// A thread that spins until dropped, on the CPU of the thread that starts it.
struct Hog {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hog {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        Hog { stop, thread: Some(thread) }
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the median time of `rounds` round trips, with a pause before each.
fn median(rounds: usize, mut round: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..rounds)
        .map(|_| {
            // Long enough for a worker to stop spinning.
            std::thread::sleep(Duration::from_micros(300));
            let begun = Instant::now();
            round();
            begun.elapsed()
        })
        .collect();
    times.sort();
    times[rounds / 2]
}

/// A worker that kept yielding to a busy thread on its CPU would run only once every few
/// milliseconds. `rnic_abi::shm::wait` tests the same under virtual time.
#[test]
fn worker_on_busy_cpu_sleeps_and_does_not_yield() {
    if !crate::omit::timing("round trips of a worker on a busy CPU") {
        return;
    }
    let allowed = rustix::thread::sched_getaffinity(None).expect("affinity");
    let cpus: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    let here = cpus[0];
    let there = cpus[cpus.len() - 1];
    // A separate thread, so that the affinity of other tests does not change.
    let outcome = std::thread::spawn(move || {
        stay_on(there);
        let hog = Hog::start();
        let mut rig = Rig::start(1);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let address = listener.local_addr().expect("bound");
        let echo = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("accept");
            stream.set_nodelay(true).expect("an option");
            let mut byte = [0];
            while stream.read_exact(&mut byte).is_ok() {
                stream.write_all(&byte).expect("open");
            }
        });
        stay_on(here);
        let mut stream = TcpStream::connect(address).expect("connect");
        stream.set_nodelay(true).expect("an option");
        let mut client = Client::attach(1, &mut rig);
        let (mut a, a_config) = client.make_qp(1);
        let (_b, b_config) = client.make_qp(2);
        rig.connect(0, a_config, b_config);
        expect_established(&client, a.id);
        let mut raw = Vec::new();
        let mut ours = Vec::new();
        // Measure both alternately, with busy polling, so that other load on the machine affects
        // both.
        stream.set_nonblocking(true).expect("an option");
        for _ in 0..8 {
            raw.push(median(25, || {
                let mut byte = [7];
                stream.write_all(&byte).expect("open");
                until("an echo", || stream.read(&mut byte).is_ok());
            }));
            ours.push(median(25, || {
                client.post(&mut a, &write_to(&client, 1, 0), &[client.sge(4096, 8)]);
                a.completes(1);
            }));
        }
        drop(stream);
        echo.join().expect("it ends with the connection");
        rig.workers.stop();
        drop(hog);
        raw.sort();
        ours.sort();
        // If several threads are busy on this CPU, the wait is longer. So compare with a quiet run.
        (raw[raw.len() / 2], ours[ours.len() / 4])
    });
    let (raw, ours) = outcome.join().expect("no panic");
    // A yielding worker took two to four milliseconds, raw TCP some tens of microseconds.
    let bound = (raw * 5).max(Duration::from_micros(600));
    assert!(ours < bound, "{ours:?} beside {raw:?} of raw TCP");
}
