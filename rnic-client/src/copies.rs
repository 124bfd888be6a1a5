//! Copies data to and from this process's memory on behalf of a daemon that cannot access it.
//!
//! The library starts one thread per worker of the daemon. Threads that poll a CQ also perform
//! copies, because a completion often waits for a copy. The library's threads block all signals, so
//! no signal handler runs on them. The threads end with the session.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rnic_abi::shm::own::without_signals;
use rnic_abi::shm::owner::Owner;
use rnic_abi::shm::queue::{CopyConsumer, QueueMemory};

use crate::doorbell::Doorbell;

/// Copy queues of a session, one per worker.
pub(crate) struct CopyQueues {
    /// Process that owns the queues and the threads. A forked child has neither.
    owner: Owner,
    queues: Box<[Arc<CopyQueue>]>,
}

/// Copy queue of one worker.
struct CopyQueue {
    queue: CopyConsumer,
    doorbell: Arc<Doorbell>,
    /// The thread for this queue has been started.
    has_thread: AtomicBool,
}

impl CopyQueues {
    /// Takes the copy queues of a session of `owner`: one queue and doorbell per worker.
    pub(crate) fn new(
        owner: Owner,
        queues: impl Iterator<Item = (QueueMemory, Arc<Doorbell>)>,
    ) -> CopyQueues {
        let move_lock = Arc::<Mutex<()>>::default();
        let serve = |(memory, doorbell)| {
            let queue = CopyConsumer::new(memory, move_lock.clone());
            Arc::new(CopyQueue { queue, doorbell, has_thread: AtomicBool::new(false) })
        };
        CopyQueues { owner, queues: queues.map(serve).collect() }
    }

    /// Starts the threads that are not running yet. The caller must serialize calls.
    pub(crate) fn start_threads(&self) -> io::Result<()> {
        for served in self.queues.iter().filter(|s| !s.has_thread.load(Ordering::Relaxed)) {
            let thread = std::thread::Builder::new().name("rnic-copies".to_owned());
            let queue = served.clone();
            without_signals(|| thread.stack_size(STACK).spawn(move || queue.run()))?;
            served.has_thread.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Performs at most one pending copy job per worker. Skips queues that another thread serves.
    #[inline]
    pub(crate) fn try_copy(&self) {
        for served in &self.queues {
            if served.queue.is_wanted() && served.queue.try_copy() {
                served.ring();
            }
        }
    }

    /// Ends the queues. When this returns, no copy is in progress, so the program may reuse its
    /// memory.
    pub(crate) fn end(&self) {
        for served in &self.queues {
            served.queue.end();
        }
        for served in &self.queues {
            served.queue.await_end();
        }
    }
}

impl Drop for CopyQueues {
    fn drop(&mut self) {
        if self.owner.is_current() {
            self.end();
        }
    }
}

impl CopyQueue {
    fn run(&self) {
        use_main_thread_affinity();
        loop {
            self.queue.prepare_sleep();
            if self.queue.has_ended() {
                return;
            }
            if self.queue.serve() {
                self.ring();
            } else {
                self.queue.sleep();
            }
        }
    }

    fn ring(&self) {
        self.doorbell.ring(self.queue.doorbell());
    }
}

/// Sets this thread's CPU affinity to that of the process's main thread. The thread that registered
/// memory may be pinned to a CPU on which it spins.
fn use_main_thread_affinity() {
    let main = rustix::process::getpid();
    // On failure the thread keeps the affinity that it inherited.
    let _ = rustix::thread::sched_getaffinity(Some(main))
        .and_then(|cpus| rustix::thread::sched_setaffinity(None, &cpus));
}

/// Stack size of a thread, in bytes.
const STACK: usize = 128 * 1024;

#[cfg(test)]
mod tests {
    use rnic_abi::abi::queue::{PAGE, QueueKind, QueueShape};
    use rnic_abi::shm::Mapping;
    use rnic_abi::shm::doorbell::DoorbellRinger;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// Returns the copy queues of a session of `owner` with one worker.
    fn copy_queues_of(owner: Owner) -> CopyQueues {
        let shape = QueueShape::copies();
        let (arena, _) = Mapping::create_arena("copies", 2 * PAGE).expect("memory for the arena");
        let (memory, _) =
            Mapping::create_arena("copies", shape.bytes()).expect("memory for the queue");
        let queue = QueueMemory::format(memory, 0, QueueKind::Copies, shape, 0, 0);
        let doorbell = Doorbell {
            ringer: DoorbellRinger::new(arena, 0).expect("within the arena"),
            eventfd: eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor"),
        };
        CopyQueues::new(owner, std::iter::once((queue.expect("fits"), Arc::new(doorbell))))
    }

    #[test]
    fn the_threads_of_a_session_end_with_it() {
        let copies = copy_queues_of(Owner::current());
        copies.start_threads().expect("a thread");
        let served = copies.queues[0].clone();
        drop(copies);
        assert!(served.queue.has_ended());
        while Arc::strong_count(&served) > 1 {
            std::thread::yield_now();
        }
    }

    /// The child has not inherited the queues, and its parent still uses them.
    #[test]
    fn a_forked_child_ends_no_copies_of_its_parent() {
        let copies = copy_queues_of(Owner::by_id(std::os::unix::process::parent_id()));
        let served = copies.queues[0].clone();
        drop(copies);
        assert!(!served.queue.has_ended());
    }
}
