//! One lease on the device: the control connection, the arenas, the doorbells and the events.
//!
//! Everything an application holds keeps its session alive; when the last of it is dropped the
//! sockets close and the daemon takes back what is left. The session belongs to the process that
//! opened it: a forked child has neither the queues (they are mapped `MADV_DONTFORK`) nor the right
//! to speak on the control socket, where it would garble its parent's requests.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rnic_core::abi::control::*;
use rnic_core::abi::queue::QueueKind;
use rnic_core::shm::Mapping;
use rnic_core::shm::doorbell::DoorbellRinger;
use rnic_core::shm::owner::Owner;
use rnic_core::shm::queue::QueueMemory;
use rnic_core::shm::wait::cpus;
use rnic_core::types::SessionId;

use crate::control::{Control, Welcome};
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
    doorbells: Box<[Doorbell]>,
    pub(crate) events: Inbox<Events>,
    /// STags of regions that are leased as slices.
    pub(crate) local_keys: LocalKeys,
    /// The daemon has this process's memory.
    attached: Mutex<bool>,
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

/// How one worker is woken.
struct Doorbell {
    ringer: DoorbellRinger,
    eventfd: OwnedFd,
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
                Ok(Doorbell { ringer, eventfd })
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
            attached: Mutex::new(false),
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
            self.gone.store(true, Ordering::Relaxed);
        }
        let (reply, descriptors) = answer?;
        let mut descriptor = descriptors.into_iter().next();
        let (ReplyBody::Cq { new_arena, .. }
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

    /// Passes this process's memory to the daemon, unless it has it already.
    pub(crate) fn attach_memory(&self) -> Result<(), Error> {
        let mut attached = self.attached.lock();
        if !*attached {
            let memory = std::fs::File::options().read(true).write(true).open("/proc/self/mem");
            let memory = memory.map_err(|e| Error::io("opening /proc/self/mem", e))?;
            match self.request_with(RequestBody::AttachMemory, Some(memory.as_fd()))?.0 {
                ReplyBody::Done => *attached = true,
                other => return Err(unexpected(&other)),
            }
        }
        Ok(())
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
        if doorbell.ringer.ring(index) {
            // The eventfd is edge-triggered and never read, so its count only grows; a full one
            // (2^64 - 2 wake-ups) would still be a wake-up.
            let _ = rustix::io::write(&doorbell.eventfd, &1u64.to_ne_bytes());
        }
        Ok(())
    }

    /// Ends the session, in which the daemon has done what this process cannot follow.
    pub(crate) fn give_up(&self) {
        self.channel.lock().control.give_up();
        self.gone.store(true, Ordering::Relaxed);
    }

    /// Whether the daemon is still there, as far as is known without asking.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.gone.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::DaemonGone),
        }
    }

    /// Asks whether this is still the process that opened the session, and then the kernel whether
    /// the daemon still holds the other end: one system call.
    pub(crate) fn check_thoroughly(&self) -> Result<(), Error> {
        self.check_owner()?;
        if self.events.is_closed() {
            self.gone.store(true, Ordering::Relaxed);
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
        self.events.wait(deadline, take)
    }

    /// As [`await_event`](Self::await_event), for a task, as long as it takes.
    #[cfg(feature = "tokio")]
    pub(crate) async fn task_event<T>(
        &self,
        take: impl FnMut(&mut Events) -> Option<T>,
    ) -> Result<T, Error> {
        self.check_owner()?;
        crate::tasks::taken(&self.events, take).await
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
