//! Copies of this process's own memory for a daemon that cannot access it.
//!
//! The library starts one thread per worker of the daemon. Threads that poll a CQ also make copies,
//! because a copy often precedes a completion. The library's threads block all signals, so they run
//! no code of the program. They end with the session.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rnic_core::shm::own::without_signals;
use rnic_core::shm::owner::Owner;
use rnic_core::shm::queue::{CopyConsumer, QueueMemory};

use crate::session::Doorbell;

/// The queues of copies of a session.
pub(crate) struct Copies {
    /// Process with the queues and the threads. A forked child has neither.
    owner: Owner,
    served: Box<[Arc<Served>]>,
}

/// The queue of one worker.
struct Served {
    queue: CopyConsumer,
    doorbell: Arc<Doorbell>,
    /// The thread for this queue has been started.
    has_thread: AtomicBool,
}

impl Copies {
    /// Creates the copies of a session of `owner`, with one queue and doorbell per worker.
    pub(crate) fn new(
        owner: Owner,
        queues: impl Iterator<Item = (QueueMemory, Arc<Doorbell>)>,
    ) -> Copies {
        let changing = Arc::<Mutex<()>>::default();
        let serve = |(memory, doorbell)| {
            let queue = CopyConsumer::new(memory, changing.clone());
            Arc::new(Served { queue, doorbell, has_thread: AtomicBool::new(false) })
        };
        Copies { owner, served: queues.map(serve).collect() }
    }

    /// Starts the threads that are not running yet. The caller must serialize calls.
    pub(crate) fn start_threads(&self) -> io::Result<()> {
        for served in self.served.iter().filter(|s| !s.has_thread.load(Ordering::Relaxed)) {
            let thread = std::thread::Builder::new().name("rnic-copies".to_owned());
            let served_there = served.clone();
            without_signals(|| thread.stack_size(STACK).spawn(move || served_there.run()))?;
            served.has_thread.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Makes at most one waiting copy of each worker. Skips queues that another thread serves.
    #[inline]
    pub(crate) fn help(&self) {
        for served in &self.served {
            if served.queue.is_wanted() && served.queue.help() {
                served.tell();
            }
        }
    }

    /// Ends the queues. No copy is in progress when this returns, so the program may reuse its
    /// memory.
    pub(crate) fn end(&self) {
        for served in &self.served {
            served.queue.end();
        }
        for served in &self.served {
            served.queue.await_end();
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        if self.owner.is_current() {
            self.end();
        }
    }
}

impl Served {
    fn run(&self) {
        follow_main_thread();
        loop {
            self.queue.prepare_sleep();
            if self.queue.has_ended() {
                return;
            }
            match self.queue.serve() {
                true => self.tell(),
                false => self.queue.sleep(),
            }
        }
    }

    fn tell(&self) {
        self.doorbell.ring(self.queue.doorbell());
    }
}

/// Sets this thread's CPU affinity to that of the process's main thread. The thread that registered
/// memory may be pinned to a CPU on which it spins.
fn follow_main_thread() {
    let main = rustix::process::getpid();
    // On failure the thread keeps the affinity that it inherited.
    let _ = rustix::thread::sched_getaffinity(Some(main))
        .and_then(|cpus| rustix::thread::sched_setaffinity(None, &cpus));
}

/// Stack size of a thread, in bytes.
const STACK: usize = 128 * 1024;

#[cfg(test)]
mod tests {
    use rnic_core::abi::queue::{PAGE, QueueKind, QueueShape};
    use rnic_core::shm::Mapping;
    use rnic_core::shm::doorbell::DoorbellRinger;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// Returns the copies of a session of `owner` with one worker.
    fn copies_of(owner: Owner) -> Copies {
        let shape = QueueShape::copies();
        let (arena, _) = Mapping::create_arena("copies", 2 * PAGE).expect("a little memory");
        let (memory, _) = Mapping::create_arena("copies", shape.bytes()).expect("a little memory");
        let queue = QueueMemory::format(memory, 0, QueueKind::Copies, shape, 0, 0);
        let doorbell = Doorbell {
            ringer: DoorbellRinger::new(arena, 0).expect("within the arena"),
            eventfd: eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor"),
        };
        Copies::new(owner, std::iter::once((queue.expect("fits"), Arc::new(doorbell))))
    }

    #[test]
    fn the_threads_of_a_session_end_with_it() {
        let copies = copies_of(Owner::current());
        copies.start_threads().expect("a thread");
        let served = copies.served[0].clone();
        drop(copies);
        assert!(served.queue.has_ended());
        while Arc::strong_count(&served) > 1 {
            std::thread::yield_now();
        }
    }

    /// The child has not inherited the queues, and its parent still uses them.
    #[test]
    fn a_forked_child_ends_no_copies_of_its_parent() {
        let copies = copies_of(Owner::by_id(std::os::unix::process::parent_id()));
        let served = copies.served[0].clone();
        drop(copies);
        assert!(!served.queue.has_ended());
    }
}
