//! Sleeping for completions: arming, channel records, and several waiting threads.

use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{PATIENCE, Rig, entry, rig, until};
use crate::*;

fn armed(r: &Rig, cq: &Cq) -> bool {
    r.daemon.device().armed(cq.id())
}

fn spins(r: &Rig, cq: &Cq) -> bool {
    r.daemon.device().cqs[&cq.id()].producer.client_spins()
}

/// Returns true if a thread of this process sleeps in a system call.
fn sleeps(tid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('S')
}

/// Starts a thread that waits for completions. Returns its ID and handle.
fn waiter(
    cq: &Cq,
    timeout: Option<Duration>,
) -> (i32, thread::JoinHandle<Result<Vec<u64>, Error>>) {
    let (sender, receiver) = mpsc::channel();
    let cq = cq.clone();
    let thread = thread::spawn(move || {
        sender.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        let mut completions = [Completion::default(); 4];
        let n = cq.wait(&mut completions, timeout)?;
        Ok(completions[..n].iter().map(|c| c.wr_id).collect())
    });
    (receiver.recv().unwrap(), thread)
}

fn asleep(r: &Rig, cq: &Cq, tid: i32) {
    until("sleep", || (armed(r, cq) && sleeps(tid)).then_some(()));
}

#[test]
fn sleeper_wakes_by_channel_record() {
    let r = rig();
    for wr_id in 0..20 {
        let (tid, thread) = waiter(&r.cq, Some(PATIENCE));
        asleep(&r, &r.cq, tid);
        assert!(!spins(&r, &r.cq));
        r.daemon.device().complete(r.cq.id(), &entry(wr_id));
        assert_eq!(thread.join().unwrap().unwrap(), [wr_id]);
    }
}

#[test]
fn iterator_waits_and_ends_after_error() {
    let r = rig();
    (1..=3).for_each(|wr_id| r.daemon.device().complete(r.cq.id(), &entry(wr_id)));
    let mut all = r.cq.completions_iter();
    let three: Vec<u64> = all.by_ref().take(3).map(|c| c.unwrap().wr_id).collect();
    assert_eq!(three, [1, 2, 3]);
    let (tid, thread) = waiter(&r.cq, None);
    asleep(&r, &r.cq, tid);
    r.daemon.hang_up();
    assert!(thread.join().unwrap().is_err());
    assert!(matches!(all.next(), Some(Err(Error::DaemonGone))));
    assert!(all.next().is_none());
}

#[test]
fn successful_wait_does_not_arm() {
    let r = rig();
    r.daemon.device().complete(r.cq.id(), &entry(1));
    let mut completions = [Completion::default(); 4];
    assert_eq!(r.cq.wait(&mut completions, None).unwrap(), 1);
    assert!(!armed(&r, &r.cq));
    assert_eq!(r.cq.wait(&mut [], None).unwrap(), 0);
}

#[test]
fn timed_out_wait_disarms() {
    let r = rig();
    let mut completions = [Completion::default(); 4];
    let start = Instant::now();
    let timeout = Duration::from_millis(20);
    assert_eq!(r.cq.wait(&mut completions, Some(timeout)).unwrap(), 0);
    assert!(start.elapsed() >= timeout);
    assert!(!armed(&r, &r.cq) && !spins(&r, &r.cq));
    assert_eq!(r.cq.wait(&mut completions, Some(Duration::ZERO)).unwrap(), 0);
}

#[test]
fn spinning_lets_daemon_skip_events() {
    let r = rig();
    let mut seen = false;
    // Each wait spins for at most 40 us, so check many waits.
    let deadline = Instant::now() + PATIENCE;
    while !seen && Instant::now() < deadline {
        let (_, thread) = waiter(&r.cq, Some(Duration::from_micros(40)));
        while !thread.is_finished() {
            seen |= spins(&r, &r.cq);
        }
        thread.join().unwrap().unwrap();
    }
    assert!(seen);
    assert!(!spins(&r, &r.cq));
}

#[test]
fn two_sleepers_on_one_cq_both_get_their_share() {
    let r = rig();
    let (first, a) = waiter(&r.cq, Some(PATIENCE));
    asleep(&r, &r.cq, first);
    let (second, b) = waiter(&r.cq, Some(PATIENCE));
    asleep(&r, &r.cq, second);
    r.daemon.device().complete(r.cq.id(), &entry(1));
    until("waiter to return", || (a.is_finished() || b.is_finished()).then_some(()));
    let left = if a.is_finished() { second } else { first };
    asleep(&r, &r.cq, left);
    r.daemon.device().complete(r.cq.id(), &entry(2));
    let mut got = [a, b].map(|t| t.join().unwrap().unwrap());
    got.sort();
    assert_eq!(got, [vec![1], vec![2]]);
}

#[test]
fn leaving_waiter_keeps_arm_of_others() {
    let r = rig();
    let short = Some(Duration::from_millis(20));
    let (tid, other) = waiter(&r.cq, Some(PATIENCE));
    asleep(&r, &r.cq, tid);
    let (_, leaves) = waiter(&r.cq, short);
    assert_eq!(leaves.join().unwrap().unwrap(), [0; 0]);
    assert!(armed(&r, &r.cq), "another thread sleeps");
    r.daemon.device().complete(r.cq.id(), &entry(1));
    assert_eq!(other.join().unwrap().unwrap(), [1]);
    r.cq.arm(Arm::Next).unwrap();
    let (_, leaves) = waiter(&r.cq, short);
    assert_eq!(leaves.join().unwrap().unwrap(), [0; 0]);
    assert!(armed(&r, &r.cq), "the program has armed the CQ");
}

#[test]
fn sleepers_on_one_channel_are_independent() {
    let r = rig();
    let channel = r.context.create_completion_channel().unwrap();
    let cqs = [(); 2].map(|()| r.context.create_cq(4, Some(&channel)).unwrap());
    // The first sleeper is the reader for both.
    let (first, a) = waiter(&cqs[0], Some(PATIENCE));
    asleep(&r, &cqs[0], first);
    let (second, b) = waiter(&cqs[1], Some(PATIENCE));
    asleep(&r, &cqs[1], second);
    r.daemon.device().complete(cqs[1].id(), &entry(2));
    assert_eq!(b.join().unwrap().unwrap(), [2]);
    assert!(!a.is_finished());
    // If the reader leaves first, the other thread becomes the reader.
    let (second, b) = waiter(&cqs[1], Some(PATIENCE));
    asleep(&r, &cqs[1], second);
    r.daemon.device().complete(cqs[0].id(), &entry(1));
    assert_eq!(a.join().unwrap().unwrap(), [1]);
    r.daemon.device().complete(cqs[1].id(), &entry(3));
    assert_eq!(b.join().unwrap().unwrap(), [3]);
}

#[test]
fn channel_reports_the_fired_cq() {
    let r = rig();
    let channel = r.context.create_completion_channel().unwrap();
    let cqs = [(); 2].map(|()| r.context.create_cq(4, Some(&channel)).unwrap());
    let readable = || {
        let mut fds = [PollFd::from_borrowed_fd(channel.as_fd(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    };
    r.daemon.device().complete(cqs[0].id(), &entry(1));
    assert!(!readable(), "no CQ is armed");
    cqs[0].arm(Arm::Next).unwrap();
    cqs[1].arm(Arm::Solicited).unwrap();
    r.daemon.device().complete(cqs[1].id(), &entry(2));
    r.daemon.device().complete(cqs[0].id(), &entry(3));
    assert!(readable());
    assert_eq!(channel.recv(None).unwrap(), Some(cqs[1].id()));
    assert_eq!(channel.recv(None).unwrap(), Some(cqs[0].id()));
    assert!(!readable());
    assert_eq!(channel.recv(Some(Duration::ZERO)).unwrap(), None);
    // Each arm causes only one event.
    r.daemon.device().complete(cqs[0].id(), &entry(4));
    assert!(!readable());
}

#[test]
fn many_events_of_a_cq_are_reported_once() {
    let r = rig();
    let channel = r.cq.channel();
    for _ in 0..100 {
        r.daemon.device().fire(r.cq.id());
    }
    channel.inner.drain().unwrap();
    assert_eq!(channel.recv(Some(Duration::ZERO)).unwrap(), Some(r.cq.id()));
    assert_eq!(channel.recv(Some(Duration::ZERO)).unwrap(), None);
}

#[test]
fn stray_event_does_not_end_wait() {
    let r = rig();
    let (tid, thread) = waiter(&r.cq, Some(PATIENCE));
    asleep(&r, &r.cq, tid);
    r.daemon.device().fire(r.cq.id());
    asleep(&r, &r.cq, tid);
    r.daemon.device().complete(r.cq.id(), &entry(1));
    assert_eq!(thread.join().unwrap().unwrap(), [1]);
}

#[test]
fn sleepers_see_daemon_gone() {
    let r = rig();
    let channel = r.context.create_completion_channel().unwrap();
    let (tid, thread) = waiter(&r.cq, None);
    asleep(&r, &r.cq, tid);
    let receiver = thread::spawn(move || channel.recv(None));
    r.daemon.hang_up();
    assert!(matches!(thread.join().unwrap(), Err(Error::DaemonGone)));
    assert!(matches!(receiver.join().unwrap(), Err(Error::DaemonGone)));
}

/// The arm race: a daemon that completes as fast as possible against a client that sleeps whenever
/// it can. No completion may be lost, and no thread may sleep forever.
#[test]
fn no_completion_is_lost_before_sleep() {
    let r = rig();
    const COUNT: u64 = 20_000;
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..COUNT {
                // `complete` requires room in the CQ.
                until("room", || {
                    let device = r.daemon.device();
                    (device.cqs[&r.cq.id()].producer.unread() < 16).then_some(())
                });
                r.daemon.device().complete(r.cq.id(), &entry(n));
                if n % 64 == 0 {
                    // Let the client fall asleep sometimes.
                    until("poll", || {
                        let device = r.daemon.device();
                        (device.cqs[&r.cq.id()].producer.unread() == 0).then_some(())
                    });
                }
            }
        });
        let mut next = 0;
        let mut completions = [Completion::default(); 3];
        while next < COUNT {
            let n = r.cq.wait(&mut completions, Some(PATIENCE)).unwrap();
            assert!(n > 0, "lost after {next}");
            for c in &completions[..n] {
                assert_eq!(c.wr_id, next);
                next += 1;
            }
        }
    });
}
