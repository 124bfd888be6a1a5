//! A session with the daemon: the control connection, the arenas, the doorbells and the events.
//!
//! Every object of the application keeps its session alive. When the last one is dropped, the
//! sockets close and the daemon destroys all remaining objects. Only the process that opened the
//! session may use it: in a forked child the queues are not mapped (`MADV_DONTFORK`), and the
//! child's requests on the control socket would mix with those of the parent.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rnic_abi::abi::control::*;
use rnic_abi::abi::queue::QueueKind;
use rnic_abi::shm::Mapping;
use rnic_abi::shm::doorbell::DoorbellRinger;
use rnic_abi::shm::own::check_copies;
use rnic_abi::shm::owner::Owner;
use rnic_abi::shm::queue::QueueMemory;
use rnic_abi::shm::ruled_calls::RuledCalls;
use rnic_abi::shm::wait::cpus;
use rnic_abi::types::SessionId;

use crate::control::{Control, Welcome};
use crate::copies::CopyQueues;
use crate::doorbell::Doorbell;
use crate::error::Error;
use crate::events::Events;
use crate::inbox::{Inbox, Sleep};
use crate::local_keys::LocalKeys;

pub(crate) struct Session {
    /// Process that may use the session.
    owner: Owner,
    id: SessionId,
    features: Features,
    /// CPUs available to the process when it opened the session.
    cpus: usize,
    channel: Mutex<ControlChannel>,
    /// Doorbell of each worker, by worker number.
    doorbells: Box<[Arc<Doorbell>]>,
    pub(crate) events: Inbox<Events>,
    /// Library calls for which fault rules are in force.
    ruled_calls: RuledCalls,
    /// STags of regions with leased bytes.
    pub(crate) local_keys: LocalKeys,
    attachment: Mutex<Attachment>,
    /// Copy queues, if the library copies this process's memory for the daemon.
    copies: OnceLock<CopyQueues>,
    /// The daemon is known to be gone. Never cleared.
    gone: AtomicBool,
}

/// The control connection and the arenas from its replies. One lock protects both, because a reply
/// may place a queue in the arena of an earlier reply.
struct ControlChannel {
    control: Control,
    /// Mapped arenas with their numbers in this session.
    arenas: Vec<(u32, Arc<Mapping>)>,
}

/// Progress of attaching this process's own memory.
#[derive(Default)]
struct Attachment {
    is_made: bool,
    /// Copy queues created so far, by worker. Moved to [`Session::copies`] once all exist.
    queues: Vec<QueueMemory>,
}

impl Session {
    /// Exchanges Hello on a connected control socket, for process `owner`.
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
        let ruled_calls = RuledCalls::new(arena.clone())
            .map_err(|e| Error::protocol(format!("the first arena is unusable: {e}")))?;
        Ok(Session {
            owner,
            id: reply.session,
            features: Features::from_bits_truncate(reply.features),
            cpus: cpus(),
            channel: Mutex::new(ControlChannel { control, arenas: vec![(0, arena)] }),
            doorbells,
            events: Inbox::new(
                events,
                MAX_MESSAGE,
                Events::new(),
                Events::handle_packet,
                Sleep::Poll,
            ),
            ruled_calls,
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

    /// Sends a request without a descriptor and returns the reply.
    pub(crate) fn request(&self, body: RequestBody) -> Result<ReplyBody, Error> {
        self.request_with(body, None).map(|(reply, _)| reply)
    }

    /// Sends a request and expects the reply `Done`.
    pub(crate) fn command(&self, body: RequestBody) -> Result<(), Error> {
        match self.request(body)? {
            ReplyBody::Done => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns true if fault rules for such calls are in force. Must not be called in a forked
    /// child, in which the arena is not mapped.
    #[inline]
    pub(crate) fn has_rules_for(&self, call: LibraryCall) -> bool {
        self.ruled_calls.include(call.bit())
    }

    /// Fails if a fault rule fails this call. Asks the daemon only if rules for such calls are in
    /// force. Must not be called in a forked child.
    #[inline]
    pub(crate) fn admit(&self, call: LibraryCall) -> Result<(), Error> {
        if self.has_rules_for(call) { self.ask(call).map(drop) } else { Ok(()) }
    }

    /// Same as [`admit`](Self::admit), but admits every call of a forked child. Returns false if a
    /// rule carries out the call, and an event follows.
    #[inline]
    pub(crate) fn admit_of_owner(&self, call: LibraryCall) -> Result<bool, Error> {
        if self.owner.may_be_current() && self.has_rules_for(call) {
            self.ask(call)
        } else {
            Ok(true)
        }
    }

    /// Returns the number of times that a program gets an rdma_cm event: 1 in a forked child, or
    /// unless a rule repeats or drops the event.
    pub(crate) fn times_queued(&self, event: LibraryCall) -> u8 {
        if !self.owner.may_be_current() || !self.has_rules_for(event) {
            return 1;
        }
        match self.request(RequestBody::Call(event)) {
            Ok(ReplyBody::Events { count }) => count.min(2),
            _ => 1,
        }
    }

    /// Asks the daemon to evaluate the rules of a call. If the session has ended, admits the call,
    /// so that it can still take completions from the queues.
    #[cold]
    fn ask(&self, call: LibraryCall) -> Result<bool, Error> {
        match self.request(RequestBody::Call(call)) {
            Err(error @ Error::Refused { .. }) => Err(error),
            reply => Ok(!matches!(reply, Ok(ReplyBody::EventFollows))),
        }
    }

    /// Sends a request with an optional descriptor. Returns the reply and its descriptor, if any,
    /// except that of a new arena, which is mapped here.
    pub(crate) fn request_with(
        &self,
        body: RequestBody,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(ReplyBody, Option<OwnedFd>), Error> {
        self.check_owner()?;
        let mut channel = self.channel.lock();
        let answer = channel.control.request(body, descriptor);
        if channel.control.is_closed() {
            self.mark_gone();
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
            let missing = || Error::protocol("a new arena without its descriptor");
            let fd = descriptor.take().ok_or_else(missing)?;
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
        check_copies().map_err(|e| Error::io("process_vm_readv on this process", e))?;
        let made = if self.copies.get().is_some() { self.doorbells.len() } else { queues.len() };
        for worker in made..self.doorbells.len() {
            // A daemon has at most 64 workers.
            let reply = self.request(RequestBody::ServeCopies { worker: worker as u32 })?;
            let ReplyBody::Copies { queue, .. } = reply else { return Err(unexpected(&reply)) };
            queues.push(self.queue(queue, QueueKind::Copies)?);
        }
        let copies = self.copies.get_or_init(|| {
            let queues = queues.drain(..).zip(self.doorbells.iter().cloned());
            CopyQueues::new(self.owner, queues)
        });
        copies.start_threads().map_err(|e| Error::io("starting a thread", e))
    }

    /// Performs at most one pending copy job per worker.
    #[inline]
    pub(crate) fn try_copy(&self) {
        if let Some(copies) = self.copies.get() {
            copies.try_copy();
        }
    }

    /// Opens a queue that the daemon has created.
    pub(crate) fn queue(&self, at: QueueLocation, kind: QueueKind) -> Result<QueueMemory, Error> {
        let channel = self.channel.lock();
        let (_, mapping) = channel
            .arenas
            .iter()
            .find(|(number, _)| *number == at.arena)
            .ok_or_else(|| Error::protocol(format!("a queue in unknown arena {}", at.arena)))?;
        QueueMemory::open(mapping.clone(), at.offset as usize, kind, at.shape)
            .map_err(|e| Error::protocol(format!("a queue from the daemon is unusable: {e}")))
    }

    /// Rings doorbell `index` of `worker`, and wakes the worker only if it sleeps. The caller must
    /// first publish the entry and the producer index.
    pub(crate) fn ring(&self, worker: u32, index: u32) -> Result<(), Error> {
        let Some(doorbell) = self.doorbells.get(worker as usize) else {
            return Err(Error::protocol(format!("a queue of unknown worker {worker}")));
        };
        doorbell.ring(index);
        Ok(())
    }

    /// Ends the session because its state no longer matches that of the daemon.
    pub(crate) fn give_up(&self) {
        self.channel.lock().control.close();
        self.mark_gone();
    }

    /// Records that the daemon is gone. When this returns, no copy for the daemon is in progress.
    fn mark_gone(&self) {
        if let Some(copies) = self.copies.get() {
            copies.end();
        }
        // Release: pairs with the acquire in `check`. A caller that gets `DaemonGone` may reuse its
        // memory, so the last copy must be visible.
        self.gone.store(true, Ordering::Release);
    }

    /// Records that the daemon is gone if waiting for an event has failed for that reason.
    fn check_event<T>(&self, found: Result<T, Error>) -> Result<T, Error> {
        if matches!(found, Err(Error::DaemonGone)) {
            self.mark_gone();
        }
        found
    }

    /// Fails if the daemon is known to be gone. Makes no system call.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.gone.load(Ordering::Acquire) { Err(Error::DaemonGone) } else { Ok(()) }
    }

    /// Fails if this is not the process that opened the session, or if the daemon has closed its
    /// end. Makes one system call for the latter.
    pub(crate) fn check_thoroughly(&self) -> Result<(), Error> {
        self.check_owner()?;
        if self.events.is_closed() {
            self.mark_gone();
        }
        self.check()
    }

    /// Waits until `take` returns a value or `deadline` passes (`None`: no deadline).
    pub(crate) fn await_event<T>(
        &self,
        deadline: Option<Instant>,
        take: impl FnMut(&mut Events) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        self.check_owner()?;
        self.check_event(self.events.wait(deadline, take))
    }

    /// Same as [`await_event`](Self::await_event), for a task and without a deadline.
    #[cfg(feature = "tokio")]
    pub(crate) async fn task_event<T>(
        &self,
        take: impl FnMut(&mut Events) -> Option<T>,
    ) -> Result<T, Error> {
        self.check_owner()?;
        self.check_event(self.events.wait_in_task(take).await)
    }

    /// Fails if this is not the process that opened the session.
    #[inline]
    pub(crate) fn check_owner(&self) -> Result<(), Error> {
        self.of_owner(self.owner.is_current())
    }

    /// Same as [`check_owner`](Self::check_owner), but without a system call, so it may miss a
    /// fork.
    #[inline]
    pub(crate) fn check_owner_in_passing(&self) -> Result<(), Error> {
        self.of_owner(self.owner.may_be_current())
    }

    #[inline]
    fn of_owner(&self, is_current: bool) -> Result<(), Error> {
        if is_current { Ok(()) } else { Err(Error::AfterFork { owner: self.owner.id() }) }
    }
}

/// Returns the error for a reply of the wrong type.
pub(crate) fn unexpected(reply: &ReplyBody) -> Error {
    Error::protocol(format!("unexpected reply {reply:?}"))
}

fn map_arena(fd: BorrowedFd<'_>, length: u32) -> Result<Arc<Mapping>, Error> {
    Mapping::map_arena(fd, length as usize).map_err(|e| Error::io("mapping an arena", e))
}
