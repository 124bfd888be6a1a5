//! An attacker's session. It accesses the queues in shared memory directly, without the
//! checks of the library.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::*;
use rnic_abi::abi::queue::{QUEUE_HEADER_LEN, QueueShape, WORKER_NONE, queue_header};
use rnic_abi::shm::Mapping;
use rnic_abi::shm::doorbell::DoorbellRinger;
use rnic_abi::types::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::RecvFlags;

use crate::DEADLINE;
use crate::raw::{Raw, memfd, qp_request};
use crate::traffic::Failure;

/// A session with one protection domain.
pub struct Intruder {
    /// The control socket and everything received through it.
    pub raw: Raw,
    /// The domain.
    pub pd: PdId,
    /// Time limit for each answer and event.
    pub timeout: Duration,
    bells: Vec<DoorbellRinger>,
}

/// A QP and its queues.
pub struct End {
    /// The QP.
    pub qp: QpId,
    /// Its send queue.
    pub sq: Ring,
    /// Its receive queue.
    pub rq: Ring,
}

/// A completion queue.
pub struct Completions {
    /// Its handle.
    pub cq: CqId,
    /// Its memory.
    pub ring: Ring,
}

impl Intruder {
    /// Opens a session.
    ///
    /// # Errors
    ///
    /// If the daemon admits no session.
    pub fn open(socket: &Path) -> Result<Self, Failure> {
        let mut raw = Raw::try_open(socket).ok_or("no session")?;
        let bells = (0..u32::from(raw.workers))
            .map(|worker| DoorbellRinger::new(raw.arenas[0].clone(), worker))
            .collect::<Result<_, _>>()?;
        let ReplyBody::Pd { pd } = granted(&mut raw, RequestBody::OpenPd { name: None })? else {
            return Err("no domain".into());
        };
        Ok(Intruder { raw, pd, timeout: DEADLINE, bells })
    }

    /// Sends a request that the daemon must grant.
    ///
    /// # Errors
    ///
    /// If the daemon refuses it.
    pub fn call(&mut self, body: RequestBody) -> Result<ReplyBody, Failure> {
        granted(&mut self.raw, body)
    }

    /// Creates a completion queue, with a channel if `armed` is set.
    ///
    /// # Errors
    ///
    /// If the daemon refuses it.
    pub fn cq(&mut self, entries: u32, armed: bool) -> Result<Completions, Failure> {
        let channel = match armed.then(|| self.call(RequestBody::CreateChannel)).transpose()? {
            Some(ReplyBody::Channel { channel }) => Some(channel),
            _ => None,
        };
        let body = RequestBody::CreateCq { entries, channel, context: 0 };
        match self.call(body)? {
            ReplyBody::Cq { cq, queue, .. } => Ok(Completions { cq, ring: self.ring(queue)? }),
            other => Err(format!("{other:?}").into()),
        }
    }

    /// Creates a QP with queues of this depth.
    ///
    /// # Errors
    ///
    /// If the daemon refuses it.
    pub fn qp(&mut self, cq: CqId, depth: u32) -> Result<End, Failure> {
        let request = QpRequest {
            sq_depth: depth,
            rq_depth: depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            ..qp_request(self.pd, cq)
        };
        self.qp_with(request)
    }

    /// Creates a QP with its own receive queue.
    ///
    /// # Errors
    ///
    /// If the daemon refuses it.
    pub fn qp_with(&mut self, request: QpRequest) -> Result<End, Failure> {
        match self.call(RequestBody::CreateQp(request))? {
            ReplyBody::Qp { qp, sq, rq: Some(rq), .. } => {
                Ok(End { qp, sq: self.ring(sq)?, rq: self.ring(rq)? })
            }
            other => Err(format!("{other:?}").into()),
        }
    }

    /// Registers `length` bytes of new memory at address 0.
    ///
    /// # Errors
    ///
    /// If the daemon refuses it.
    pub fn region(&mut self, length: usize, access: Access) -> Result<Stag, Failure> {
        let buffer = self.shared_buffer(length)?;
        let source = MrSource::Shared { buffer, offset: 0 };
        let pd = self.pd;
        let length = length as u64;
        let body =
            RequestBody::RegMr(MrRequest { pd, source, length, iova: 0, access, scope: Scope::Pd });
        match self.call(body)? {
            ReplyBody::Mr { stag, .. } => Ok(stag),
            other => Err(format!("{other:?}").into()),
        }
    }

    /// Shares `length` bytes of new memory.
    ///
    /// # Errors
    ///
    /// If the daemon refuses it.
    pub fn shared_buffer(&mut self, length: usize) -> Result<SharedBufferId, Failure> {
        let memory = memfd(length);
        let add = RequestBody::AddSharedBuffer { length: length as u64 };
        match self.raw.try_call(add, &[memory.as_fd()]) {
            Some(Ok(ReplyBody::SharedBuffer { buffer })) => Ok(buffer),
            other => Err(format!("no shared buffer: {other:?}").into()),
        }
    }

    /// Listens on a loopback port that the kernel chooses.
    ///
    /// # Errors
    ///
    /// If the daemon refuses it.
    pub fn listen(&mut self, backlog: u32) -> Result<(ListenerId, SocketAddr), Failure> {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        match self.call(RequestBody::Bind { address, context: 0, v6_only: false })? {
            ReplyBody::Listener { listener, address } => {
                self.call(RequestBody::Listen { listener, backlog })?;
                Ok((listener, address))
            }
            other => Err(format!("{other:?}").into()),
        }
    }

    /// Connects two QPs of this session through its listener at `at`.
    ///
    /// # Errors
    ///
    /// If the connection fails.
    pub fn couple(&mut self, at: SocketAddr, active: &End, passive: &End) -> Result<(), Failure> {
        self.call(RequestBody::Connect {
            qp: active.qp,
            peer: at,
            local: None,
            ird: None,
            ord: None,
            private_data: Vec::new(),
        })?;
        self.accept(passive)?;
        active.sq.wait_for_worker(self.timeout)
    }

    /// Accepts the next connection with this QP and waits until a worker has taken the QP.
    ///
    /// # Errors
    ///
    /// If no request arrives, or the connection fails.
    pub fn accept(&mut self, end: &End) -> Result<(), Failure> {
        self.accept_within(end, self.timeout)
    }

    /// Like [`Intruder::accept`], with a time limit.
    ///
    /// # Errors
    ///
    /// If no request arrives in this time, or the connection fails.
    pub fn accept_within(&mut self, end: &End, timeout: Duration) -> Result<(), Failure> {
        let request = loop {
            if let Event::ConnectionRequest { request, .. } = self.event_within(timeout)? {
                break request;
            }
        };
        self.call(RequestBody::Accept {
            request,
            qp: end.qp,
            ird: None,
            ord: None,
            private_data: Vec::new(),
        })?;
        end.sq.wait_for_worker(timeout)
    }

    /// Waits for the next event.
    ///
    /// # Errors
    ///
    /// If none arrives.
    pub fn event(&self) -> Result<Event, Failure> {
        self.event_within(self.timeout)
    }

    /// Waits for the next event for at most `timeout`.
    ///
    /// # Errors
    ///
    /// If none arrives in this time.
    pub fn event_within(&self, timeout: Duration) -> Result<Event, Failure> {
        let events = self.raw.descriptors.get(1).ok_or("no event channel")?;
        let timeout =
            Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let mut ready = [PollFd::new(events, PollFlags::IN)];
        if rustix::event::poll(&mut ready, Some(&timeout))? == 0 {
            return Err("no event in time".into());
        }
        let mut bytes = [0; MAX_MESSAGE];
        let (n, _) = rustix::net::recv(events, &mut bytes[..], RecvFlags::DONTWAIT)?;
        Ok(postcard::from_bytes(&bytes[..n])?)
    }

    /// Discards all pending events.
    pub fn forget_events(&self) {
        while self.event_within(Duration::ZERO).is_ok() {}
    }

    /// Rings the doorbell for a queue of a QP that a worker has taken.
    pub fn ring_for(&self, ring: &Ring) {
        let worker = ring.header(queue_header::WORKER) as u32;
        self.ring_index(worker, (ring.header(queue_header::OWNER) >> 32) as u32);
    }

    /// Rings a doorbell of a worker.
    pub fn ring_index(&self, worker: u32, index: u32) {
        if let Some(bell) = self.bells.get(worker as usize)
            && bell.ring(index)
        {
            self.wake(worker);
        }
    }

    /// Writes the eventfd of a worker.
    pub fn wake(&self, worker: u32) {
        if let Some(eventfd) = self.raw.descriptors.get(2 + worker as usize) {
            let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
        }
    }

    fn ring(&self, queue: QueueLocation) -> Result<Ring, Failure> {
        let arena = self.raw.arenas.get(queue.arena as usize).ok_or("an arena not received")?;
        Ok(Ring { arena: arena.clone(), at: queue.offset as usize, shape: queue.shape })
    }
}

fn granted(raw: &mut Raw, body: RequestBody) -> Result<ReplyBody, Failure> {
    match raw.try_call(body, &[]) {
        Some(Ok(reply)) => Ok(reply),
        Some(Err(refusal)) => Err(refusal.to_string().into()),
        None => Err("the session has ended".into()),
    }
}

/// A queue in shared memory.
pub struct Ring {
    arena: Arc<Mapping>,
    at: usize,
    shape: QueueShape,
}

impl Ring {
    /// Writes every entry of the queue.
    pub fn fill(&self, words: impl Fn(u32) -> Vec<u64>) {
        for entry in 0..self.shape.capacity {
            let at = self.at + QUEUE_HEADER_LEN + (entry * self.shape.stride) as usize;
            for (n, word) in words(entry).into_iter().enumerate() {
                self.arena.store_u64(at + 8 * n, word).expect("access to own arena");
            }
        }
    }

    /// Publishes all consumed entries again. Returns their number.
    pub fn refill(&self) -> u32 {
        let consumed = self.header(queue_header::CONSUMER) as u32;
        let produced = self.header(queue_header::PRODUCER) as u32;
        let new = consumed.wrapping_add(self.shape.capacity);
        self.store(queue_header::PRODUCER, u64::from(new));
        new.wrapping_sub(produced)
    }

    /// Discards all completions and arms the queue. Returns the number of completions.
    pub fn drain(&self, arm: u32) -> u32 {
        let produced = self.header(queue_header::PRODUCER) as u32;
        let consumed = self.header(queue_header::CONSUMER) as u32;
        self.store(queue_header::CONSUMER, u64::from(produced));
        self.store(queue_header::ARM, u64::from(arm));
        produced.wrapping_sub(consumed)
    }

    /// Waits until a worker has taken the QP.
    fn wait_for_worker(&self, timeout: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + timeout;
        while self.header(queue_header::WORKER) as u32 == WORKER_NONE {
            if Instant::now() > deadline {
                return Err("no worker has taken the QP".into());
            }
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    }

    fn header(&self, field: usize) -> u64 {
        self.arena.load_u64(self.at + field).expect("access to own arena")
    }

    fn store(&self, field: usize, word: u64) {
        self.arena.store_u64(self.at + field, word).expect("access to own arena");
    }
}
