//! One lease on the device: the control connection, the arenas, the doorbells and the events.
//!
//! Everything an application holds keeps its session alive; when the last of it is dropped the
//! sockets close and the daemon takes back what is left. The session belongs to the process that
//! opened it: a forked child has neither the queues (they are mapped `MADV_DONTFORK`) nor the right
//! to speak on the control socket, where it would garble its parent's requests.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rnic_core::abi::control::*;
use rnic_core::abi::queue::QueueKind;
use rnic_core::shm::Mapping;
use rnic_core::shm::doorbell::DoorbellRinger;
use rnic_core::shm::own::check_copies;
use rnic_core::shm::owner::Owner;
use rnic_core::shm::queue::QueueMemory;
use rnic_core::shm::wait::cpus;
use rnic_core::types::SessionId;

use crate::control::{Control, Welcome};
use crate::copies::Copies;
use crate::error::Error;
use crate::events::Events;
use crate::inbox::{Inbox, Sleep};
use crate::lease::LocalKeys;

pub(crate) struct Session {
    /// Process that may use it.
    owner: Owner,
    id: SessionId,
    features: Features,
    /// CPUs the process could run on when it opened the session.
    cpus: usize,
    channel: Mutex<ControlChannel>,
    /// Doorbell of each worker, by its number.
    doorbells: Box<[Arc<Doorbell>]>,
    pub(crate) events: Inbox<Events>,
    /// STags of regions that are leased as slices.
    pub(crate) local_keys: LocalKeys,
    attachment: Mutex<Attachment>,
    /// Copies of this process's memory, if the daemon leaves them to the library.
    copies: OnceLock<Copies>,
    /// The daemon is known to be gone. Only ever set.
    gone: AtomicBool,
}

/// The control connection with the arenas that its replies bring: one lock, because a reply may
/// place a queue in an arena that came with the reply just before it.
struct ControlChannel {
    control: Control,
    /// Arenas that are mapped, each with its number in this session.
    arenas: Vec<(u32, Arc<Mapping>)>,
}

/// Progress of attaching this process's own memory.
#[derive(Default)]
struct Attachment {
    is_made: bool,
    /// Queues of copy jobs created so far, by worker. Empty once all exist.
    queues: Vec<QueueMemory>,
}

/// How one worker is woken.
pub(crate) struct Doorbell {
    pub(crate) ringer: DoorbellRinger,
    pub(crate) eventfd: OwnedFd,
}

impl Doorbell {
    /// Rings the doorbell of a queue. Wakes the worker only if it sleeps.
    #[inline]
    pub(crate) fn ring(&self, index: u32) {
        if self.ringer.ring(index) {
            // The eventfd is edge-triggered and never read, so its count only grows; a full one
            // (2^64 - 2 wake-ups) would still be a wake-up.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }
}

impl Session {
    /// Says hello on a connected control socket, as process `owner`.
    pub(crate) fn open(
        socket: OwnedFd,
        path: &Path,
        deadline: Duration,
        owner: Owner,
    ) -> Result<Session, Error> {
        let (control, Welcome { reply, arena, events, doorbells }) =
            Control::open(socket, deadline, path)?;
        let arena = map_arena(arena.as_fd(), reply.arena_len)?;
        let doorbells = (0u32..)
            .zip(doorbells)
            .map(|(worker, eventfd)| {
                let ringer = DoorbellRinger::new(arena.clone(), worker)
                    .map_err(|e| Error::protocol(format!("doorbell {worker} is unusable: {e}")))?;
                Ok(Arc::new(Doorbell { ringer, eventfd }))
            })
            .collect::<Result<_, Error>>()?;
        Ok(Session {
            owner,
            id: reply.session,
            features: Features::from_bits_truncate(reply.features),
            cpus: cpus(),
            channel: Mutex::new(ControlChannel { control, arenas: vec![(0, arena)] }),
            doorbells,
            events: Inbox::new(events, MAX_MESSAGE, Events::new(), Events::sort, Sleep::Poll),
            local_keys: LocalKeys::default(),
            attachment: Mutex::default(),
            copies: OnceLock::new(),
            gone: AtomicBool::new(false),
        })
    }

    pub(crate) fn id(&self) -> SessionId {
        self.id
    }

    pub(crate) fn features(&self) -> Features {
        self.features
    }

    pub(crate) fn cpus(&self) -> usize {
        self.cpus
    }

    /// Asks the daemon; the answer carries no descriptor.
    pub(crate) fn request(&self, body: RequestBody) -> Result<ReplyBody, Error> {
        self.request_with(body, None).map(|(reply, _)| reply)
    }

    /// Asks the daemon for something that has no answer but done.
    pub(crate) fn command(&self, body: RequestBody) -> Result<(), Error> {
        match self.request(body)? {
            ReplyBody::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Asks the daemon, passing a descriptor; the answer may bring one.
    pub(crate) fn request_with(
        &self,
        body: RequestBody,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(ReplyBody, Option<OwnedFd>), Error> {
        self.check_owner()?;
        let mut channel = self.channel.lock();
        let answer = channel.control.request(body, descriptor);
        if channel.control.is_closed() {
            self.lost();
        }
        let (reply, descriptors) = answer?;
        let mut descriptor = descriptors.into_iter().next();
        let (ReplyBody::Cq { new_arena, .. }
        | ReplyBody::Copies { new_arena, .. }
        | ReplyBody::Qp { new_arena, .. }
        | ReplyBody::Srq { new_arena, .. }) = &reply
        else {
            return Ok((reply, descriptor));
        };
        if let Some(new) = new_arena {
            let fd = descriptor.take().ok_or_else(|| Error::protocol("an arena without memory"))?;
            let mapping = map_arena(fd.as_fd(), new.length)?;
            channel.arenas.push((new.arena, mapping));
        }
        Ok((reply, descriptor))
    }

    /// Attaches this process's own memory, once per session.
    pub(crate) fn attach_memory(&self) -> Result<(), Error> {
        self.check_owner()?;
        let mut attachment = self.attachment.lock();
        if attachment.is_made {
            return Ok(());
        }
        if self.features.contains(Features::LIBRARY_COPIES) {
            self.serve_copies(&mut attachment.queues)?;
        } else {
            let memory = std::fs::File::options().read(true).write(true).open("/proc/self/mem");
            let memory = memory.map_err(|e| Error::io("opening /proc/self/mem", e))?;
            match self.request_with(RequestBody::AttachMemory, Some(memory.as_fd()))?.0 {
                ReplyBody::Done => {}
                other => return Err(unexpected(&other)),
            }
        }
        attachment.is_made = true;
        Ok(())
    }

    fn serve_copies(&self, queues: &mut Vec<QueueMemory>) -> Result<(), Error> {
        check_copies().map_err(|e| Error::io("process_vm_readv of this process", e))?;
        let made = if self.copies.get().is_some() { self.doorbells.len() } else { queues.len() };
        for worker in made..self.doorbells.len() {
            // A daemon has at most 64 workers.
            let reply = self.request(RequestBody::ServeCopies { worker: worker as u32 })?;
            let ReplyBody::Copies { queue, .. } = reply else { return Err(unexpected(&reply)) };
            queues.push(self.queue(queue, QueueKind::Copies)?);
        }
        let copies = self.copies.get_or_init(|| {
            let queues = queues.drain(..).zip(self.doorbells.iter().cloned());
            Copies::new(self.owner, queues)
        });
        copies.start_threads().map_err(|e| Error::io("starting a thread", e))
    }

    /// Makes copies that workers wait for, at most one for each.
    #[inline]
    pub(crate) fn help(&self) {
        if let Some(copies) = self.copies.get() {
            copies.help();
        }
    }

    /// A queue that the daemon made for us.
    pub(crate) fn queue(&self, at: QueueLocation, kind: QueueKind) -> Result<QueueMemory, Error> {
        let channel = self.channel.lock();
        let (_, mapping) = channel
            .arenas
            .iter()
            .find(|(number, _)| *number == at.arena)
            .ok_or_else(|| Error::protocol(format!("a queue in unknown arena {}", at.arena)))?;
        QueueMemory::open(mapping.clone(), at.offset as usize, kind, at.shape)
            .map_err(|e| Error::protocol(format!("a queue it made is unusable: {e}")))
    }

    /// Tells `worker` to look at the queues behind doorbell `index`, waking it only if it sleeps
    /// (the entry and the producer index have been published before).
    pub(crate) fn ring(&self, worker: u32, index: u32) -> Result<(), Error> {
        let Some(doorbell) = self.doorbells.get(worker as usize) else {
            return Err(Error::protocol(format!("a queue of unknown worker {worker}")));
        };
        doorbell.ring(index);
        Ok(())
    }

    /// Ends the session, in which the daemon has done what this process cannot follow.
    pub(crate) fn give_up(&self) {
        self.channel.lock().control.give_up();
        self.lost();
    }

    /// Records that the daemon is gone. No copy for it is in progress when this returns.
    fn lost(&self) {
        if let Some(copies) = self.copies.get() {
            copies.end();
        }
        // Release: pairs with the acquire in `check`. A caller that gets `DaemonGone` may reuse its
        // memory, so the last copy must be visible.
        self.gone.store(true, Ordering::Release);
    }

    /// Records the end of the daemon if waiting for an event has failed with it.
    fn check_event<T>(&self, found: Result<T, Error>) -> Result<T, Error> {
        if matches!(found, Err(Error::DaemonGone)) {
            self.lost();
        }
        found
    }

    /// Whether the daemon is still there, as far as is known without asking.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.gone.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::DaemonGone),
        }
    }

    /// Asks whether this is still the process that opened the session, and then the kernel whether
    /// the daemon still holds the other end: one system call.
    pub(crate) fn check_thoroughly(&self) -> Result<(), Error> {
        self.check_owner()?;
        if self.events.is_closed() {
            self.lost();
        }
        self.check()
    }

    /// Waits for what `take` finds among the events, at most until `deadline`.
    pub(crate) fn await_event<T>(
        &self,
        deadline: Option<Instant>,
        take: impl FnMut(&mut Events) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        self.check_owner()?;
        self.check_event(self.events.wait(deadline, take))
    }

    /// As [`await_event`](Self::await_event), for a task, as long as it takes.
    #[cfg(feature = "tokio")]
    pub(crate) async fn task_event<T>(
        &self,
        take: impl FnMut(&mut Events) -> Option<T>,
    ) -> Result<T, Error> {
        self.check_owner()?;
        self.check_event(crate::tasks::taken(&self.events, take).await)
    }

    /// Whether this is the process that opened the session.
    #[inline]
    pub(crate) fn check_owner(&self) -> Result<(), Error> {
        self.of_owner(self.owner.is_current())
    }

    /// The same as far as it takes no system call.
    #[inline]
    pub(crate) fn check_owner_in_passing(&self) -> Result<(), Error> {
        self.of_owner(self.owner.may_be_current())
    }

    #[inline]
    fn of_owner(&self, is_current: bool) -> Result<(), Error> {
        match is_current {
            true => Ok(()),
            false => Err(Error::AfterFork { owner: self.owner.id() }),
        }
    }
}

/// The answer to one request came to another one.
pub(crate) fn unexpected(reply: &ReplyBody) -> Error {
    Error::protocol(format!("unexpected reply {reply:?}"))
}

fn map_arena(fd: BorrowedFd<'_>, length: u32) -> Result<Arc<Mapping>, Error> {
    Mapping::map_arena(fd, length as usize).map_err(|e| Error::io("mapping an arena", e))
}
