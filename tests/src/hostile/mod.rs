//! A hostile client: opens sessions, creates valid objects and traffic, and then misuses everything
//! that it received from the daemon.
//!
//! A seed determines its choices. Its sessions may fail in any way. The test fails only if the
//! daemon stops answering.

mod objects;
mod roce;

use std::io::{Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::*;
use rnic_abi::abi::queue::{
    PAGE, QUEUE_HEADER_LEN, SendHeader, SendOpcode, Sge, doorbell, doorbell_offset, queue_header,
};
use rnic_abi::shm::doorbell::DoorbellRinger;
use rnic_abi::types::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FallocateFlags, MemfdFlags, OFlags};
use rustix::io::FdFlags;
use rustix::net::{RecvFlags, SendFlags};

use crate::raw::{Raw, memfd, qp_request};
use crate::traffic::Rng;

/// Length of a shared buffer in bytes.
const BUFFER: usize = 64 * 1024;

/// Minimum number of sessions of an attack, even if a busy machine needs longer than `time`.
const MIN_SESSIONS: u64 = 21;

/// Opens sessions and misuses them for `time`. Returns the number of sessions.
pub fn attack(socket: &Path, seed: u64, time: Duration, victim: Option<SocketAddr>) -> u64 {
    let end = Instant::now() + time;
    let mut rng = Rng::new(seed);
    let mut sessions = 0;
    while Instant::now() < end || sessions < MIN_SESSIONS {
        let Some(mut session) = Session::open(socket, victim, &mut rng) else { continue };
        sessions += 1;
        for _ in 0..1 + rng.below(60) {
            if session.misbehave(&mut rng).is_none() {
                break;
            }
        }
        session.leave(&mut rng);
    }
    sessions
}

/// A session with all its objects.
struct Session {
    raw: Raw,
    events: OwnedFd,
    pd: PdId,
    cqs: Vec<CqId>,
    srqs: Vec<SrqId>,
    qps: Vec<QpId>,
    listener: Option<ListenerId>,
    regions: Vec<(MrId, Stag)>,
    buffer: SharedBufferId,
    memory: OwnedFd,
    queues: Vec<QueueLocation>,
    /// Producer indexes of the queues, initially correct.
    produced: Vec<u32>,
    objects: objects::Objects,
    roce: roce::RoceObjects,
    style: Style,
}

/// Rules that a session breaks. The daemon soon ends a session that breaks all rules, so the other
/// styles reach more code.
#[derive(Clone, Copy)]
enum Style {
    /// Everything.
    Vandal,
    /// Well-formed control messages, garbage in shared memory.
    Scribbler,
    /// Well-formed control messages and queues with nonsensical contents.
    Liar,
}

impl Session {
    /// Opens a session with two QPs that are connected to each other, or to a victim.
    fn open(socket: &Path, victim: Option<SocketAddr>, rng: &mut Rng) -> Option<Self> {
        let mut raw = Raw::try_open(socket)?;
        let events = raw.descriptors.get(1)?.try_clone().ok()?;
        let memory = memfd(BUFFER);
        let body = RequestBody::AddSharedBuffer { length: BUFFER as u64 };
        let Ok(ReplyBody::SharedBuffer { buffer }) = raw.try_call(body, &[memory.as_fd()])? else {
            return None;
        };
        let Ok(ReplyBody::Pd { pd }) = raw.try_call(RequestBody::OpenPd { name: None }, &[])?
        else {
            return None;
        };
        let mut session = Session {
            raw,
            events,
            pd,
            cqs: Vec::new(),
            srqs: Vec::new(),
            qps: Vec::new(),
            listener: None,
            regions: Vec::new(),
            buffer,
            memory,
            queues: Vec::new(),
            produced: Vec::new(),
            objects: objects::Objects::default(),
            roce: roce::RoceObjects::default(),
            style: [Style::Vandal, Style::Scribbler, Style::Liar][rng.below(3) as usize],
        };
        for _ in 0..2 {
            session.make_cq(rng)?;
            session.make_srq(rng)?;
            session.make_region(rng)?;
        }
        for _ in 0..2 + rng.below(3) {
            session.make_qp(rng)?;
        }
        session.connect_some(victim)?;
        Some(session)
    }

    fn make_cq(&mut self, rng: &mut Rng) -> Option<()> {
        let channel = match self.raw.try_call(RequestBody::CreateChannel, &[])? {
            Ok(ReplyBody::Channel { channel }) if rng.below(2) == 0 => Some(channel),
            _ => None,
        };
        let entries = 1 << rng.below(7);
        let body = RequestBody::CreateCq { entries, channel, context: rng.word() };
        if let Ok(ReplyBody::Cq { cq, queue, .. }) = self.raw.try_call(body, &[])? {
            self.cqs.push(cq);
            self.add_queue(queue);
        }
        Some(())
    }

    fn make_srq(&mut self, rng: &mut Rng) -> Option<()> {
        let request = SrqRequest {
            pd: self.pd,
            depth: 1 << rng.below(7),
            max_sge: 2,
            limit: rng.below(2) as u32,
            context: rng.word(),
        };
        if let Ok(ReplyBody::Srq { srq, queue, .. }) =
            self.raw.try_call(RequestBody::CreateSrq(request), &[])?
        {
            self.srqs.push(srq);
            self.add_queue(queue);
        }
        Some(())
    }

    fn make_qp(&mut self, rng: &mut Rng) -> Option<()> {
        let mut request = qp_request(self.pd, pick(&self.cqs, rng)?);
        request.recv_cq = pick(&self.cqs, rng)?;
        request.signal_all = rng.below(2) == 0;
        request.srq = pick(&self.srqs, rng).filter(|_| rng.below(2) == 0);
        if rng.below(2) == 0 {
            request.rnr_policy = RnrPolicy::Wait { timeout_ms: rng.below(500) as u32 };
        }
        if let Ok(ReplyBody::Qp { qp, sq, rq, .. }) =
            self.raw.try_call(RequestBody::CreateQp(request), &[])?
        {
            self.qps.push(qp);
            self.add_queue(sq);
            rq.into_iter().for_each(|rq| self.add_queue(rq));
        }
        Some(())
    }

    fn make_region(&mut self, rng: &mut Rng) -> Option<()> {
        let scope = match pick(&self.qps, rng) {
            Some(qp) if rng.below(2) == 0 => Scope::Qp(qp),
            _ => Scope::Pd,
        };
        let offset = rng.below(BUFFER as u64);
        let body = RequestBody::RegMr(MrRequest {
            pd: self.pd,
            source: MrSource::Shared { buffer: self.buffer, offset },
            length: BUFFER as u64 - offset,
            iova: 0x1000,
            access: Access::LOCAL_WRITE
                | Access::REMOTE_WRITE
                | Access::REMOTE_READ
                | Access::REMOTE_ATOMIC,
            scope,
        });
        if let Ok(ReplyBody::Mr { mr, stag }) = self.raw.try_call(body, &[])? {
            self.regions.push((mr, stag));
        }
        Some(())
    }

    fn add_queue(&mut self, queue: QueueLocation) {
        self.queues.push(queue);
        self.produced.push(0);
    }

    /// Connects QP 0 to QP 1 through its own listener, and QP 2 to the victim.
    fn connect_some(&mut self, victim: Option<SocketAddr>) -> Option<()> {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let bind = RequestBody::Bind { address, context: 1, v6_only: false };
        let Ok(ReplyBody::Listener { listener, address }) = self.raw.try_call(bind, &[])? else {
            return Some(());
        };
        self.listener = Some(listener);
        let _ = self.raw.try_call(RequestBody::Listen { listener, backlog: 4 }, &[])?;
        for (qp, peer) in self.qps.clone().into_iter().zip([Some(address), None, victim]) {
            if let Some(peer) = peer {
                let body = RequestBody::Connect {
                    qp,
                    peer,
                    local: None,
                    ird: None,
                    ord: None,
                    private_data: Vec::new(),
                };
                let _ = self.raw.try_call(body, &[])?;
            }
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            if let Some(Event::ConnectionRequest { request, .. }) = self.event() {
                let qp = *self.qps.get(1)?;
                let body = RequestBody::Accept {
                    request,
                    qp,
                    ird: None,
                    ord: None,
                    private_data: Vec::new(),
                };
                let _ = self.raw.try_call(body, &[])?;
                return Some(());
            }
        }
        Some(())
    }

    fn event(&self) -> Option<Event> {
        let mut bytes = [0; MAX_MESSAGE];
        let (n, _) = rustix::net::recv(&self.events, &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
        postcard::from_bytes(&bytes[..n]).ok()
    }

    /// Performs one misuse. Returns `None` when the session has ended.
    fn misbehave(&mut self, rng: &mut Rng) -> Option<()> {
        let misuse = match self.style {
            Style::Vandal => rng.below(28),
            Style::Scribbler => {
                [0, 1, 2, 3, 4, 5, 10, 11, 14, 15, 18, 20, 24][rng.below(13) as usize]
            }
            Style::Liar => {
                4 + [0, 1, 2, 3, 4, 5, 11, 12, 13, 14, 15, 16, 17, 20, 21][rng.below(15) as usize]
            }
        };
        match misuse {
            0 => self.scribble_anywhere(rng),
            1..=3 => self.scribble_header(rng),
            4..=9 => self.post(rng),
            10 => self.scribble_doorbells(rng),
            11 => self.abuse_descriptors(rng),
            12 => self.send_noise(rng)?,
            13 => self.send_descriptors(rng)?,
            14 => self.shrink_memory(rng),
            15..=17 => self.send_request(rng)?,
            18 => {
                self.make_region(rng)?;
                if let Some((mr, _)) = self.regions.pop() {
                    let _ = self.raw.try_call(RequestBody::DeregMr { mr }, &[])?;
                }
            }
            19 => {
                self.make_qp(rng)?;
                self.make_cq(rng)?;
            }
            20..=23 => self.misuse_objects(rng)?,
            _ => self.misuse_roce(rng)?,
        }
        Some(())
    }

    fn scribble_anywhere(&self, rng: &mut Rng) {
        for arena in &self.raw.arenas {
            for _ in 0..1 + rng.below(64) {
                let at = rng.below(arena.len() as u64 / 8) as usize * 8;
                let _ = arena.store_u64(at, odd_word(rng));
            }
            // Change a word in every page.
            if rng.below(8) == 0 {
                for page in 0..arena.len() / PAGE {
                    let at = page * PAGE + rng.below(PAGE as u64 / 8) as usize * 8;
                    let _ = arena.store_u64(at, odd_word(rng));
                }
            }
        }
    }

    fn scribble_header(&self, rng: &mut Rng) {
        let Some(queue) = pick(&self.queues, rng) else { return };
        let Some(arena) = self.raw.arenas.get(queue.arena as usize) else { return };
        let words = [
            queue_header::MAGIC,
            queue_header::SHAPE,
            queue_header::OWNER,
            queue_header::WORKER,
            queue_header::PRODUCER,
            queue_header::CONSUMER,
            queue_header::ARM,
            queue_header::CLIENT_SPINS,
            queue_header::ENGINE_WAITS,
        ];
        let at = queue.offset as usize + words[rng.below(words.len() as u64) as usize];
        let old = arena.load_u64(at).unwrap_or(0);
        let word = match rng.below(4) {
            0 => odd_word(rng),
            1 => old.wrapping_add(rng.below(64)),
            2 => old.wrapping_sub(rng.below(64)),
            _ => rng.below(4),
        };
        let _ = arena.store_u64(at, word);
        self.ring(rng);
    }

    /// Posts garbage that resembles requests and publishes it correctly.
    fn post(&mut self, rng: &mut Rng) {
        let n = rng.below(self.queues.len() as u64) as usize;
        let queue = self.queues[n];
        let Some(arena) = self.raw.arenas.get(queue.arena as usize) else { return };
        for _ in 0..1 + rng.below(24) {
            let index = self.produced[n];
            self.produced[n] = index.wrapping_add(1);
            let slot = (index & (queue.shape.capacity - 1)) * queue.shape.stride;
            let at = queue.offset as usize + QUEUE_HEADER_LEN + slot as usize;
            let stag = |rng: &mut Rng| pick(&self.regions, rng).map_or(7, |(_, stag)| stag.0);
            let opcodes = [
                SendOpcode::Write,
                SendOpcode::Send,
                SendOpcode::Read,
                SendOpcode::LocalInvalidate,
                SendOpcode::SendInvalidate,
                SendOpcode::ReadInvalidate,
                SendOpcode::BindWindow,
                SendOpcode::WriteImmediate,
                SendOpcode::FetchAdd,
                SendOpcode::CompareSwap,
            ];
            let window = self.objects.window(rng).filter(|_| rng.below(2) == 0);
            let binding = [0x1000 + rng.below(4096), rng.below(8192), 0, 0];
            let header = SendHeader {
                opcode: match rng.below(16) {
                    0 => rng.word() as u8,
                    1..=4 if window.is_some() => SendOpcode::BindWindow as u8,
                    n => opcodes[n as usize % opcodes.len()] as u8,
                },
                num_sge: rng.below(3) as u8,
                flags: rng.below(16) as u16,
                inline_len: rng.below(70) as u16,
                wr_id: rng.word(),
                remote_addr: 0x1000 + rng.below(BUFFER as u64),
                rkey: window.map_or_else(|| stag(rng), |w| w.0),
                inv_rkey: match window {
                    Some(window) => window.0 ^ rng.below(4) as u32,
                    None => stag(rng),
                },
                params: match window {
                    Some(_) => {
                        [binding[0], binding[1], u64::from(stag(rng)) | rng.below(64) << 32, 0]
                    }
                    // Up to four words that are not zero, as in some operations.
                    None => {
                        let given = rng.below(5) as usize;
                        std::array::from_fn(|n| if n < given { rng.word() } else { 0 })
                    }
                },
                reserved_is_zero: true,
            };
            let words = match rng.below(16) {
                0 => std::array::from_fn(|_| rng.word()),
                _ => header.to_words(),
            };
            for (i, word) in words.into_iter().enumerate() {
                let _ = arena.store_u64(at + i * 8, word);
            }
            for i in 0..2 {
                let length = rng.below(BUFFER as u64) as u32;
                let sge = Sge { addr: 0x1000 + rng.below(4096), length, lkey: stag(rng) };
                for (j, word) in sge.to_words().into_iter().enumerate() {
                    let _ = arena.store_u64(at + 64 + i * 16 + j * 8, word);
                }
            }
        }
        let producer = queue.offset as usize + queue_header::PRODUCER;
        let _ = arena.store_u64(producer, u64::from(self.produced[n]));
        self.ring(rng);
    }

    /// Rings many doorbells and writes all eventfds that are not full.
    fn ring(&self, rng: &mut Rng) {
        let Some(arena) = self.raw.arenas.first() else { return };
        for worker in 0..u32::from(self.raw.workers) {
            if let Ok(ringer) = DoorbellRinger::new(arena.clone(), worker) {
                for index in 0..16 {
                    let _ = ringer.ring(index);
                }
                let _ = ringer.ring(rng.below(u64::from(doorbell::INDICES)) as u32);
            }
            if let Some(eventfd) = self.raw.descriptors.get(2 + worker as usize)
                && takes_bytes(eventfd)
            {
                let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
            }
        }
    }

    fn scribble_doorbells(&self, rng: &mut Rng) {
        let Some(arena) = self.raw.arenas.first() else { return };
        let worker = rng.below(u64::from(self.raw.workers)) as u32;
        for _ in 0..1 + rng.below(128) {
            let at = doorbell_offset(worker) + rng.below(PAGE as u64 / 8) as usize * 8;
            let _ = arena.store_u64(at, odd_word(rng));
        }
        let _ = arena.store_u64(doorbell_offset(worker) + doorbell::SUMMARY, u64::MAX);
        self.ring(rng);
    }

    /// Fills every descriptor, makes it blocking, and shuts down or closes some.
    fn abuse_descriptors(&mut self, rng: &mut Rng) {
        for fd in &self.raw.descriptors {
            if let Ok(flags) = rustix::fs::fcntl_getfl(fd) {
                // Fill first, while writes do not block.
                let _ = rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK);
                let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
                for _ in 0..300 {
                    let all = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                    if rustix::net::send(fd, &[0xEE; 1024], all).is_err() {
                        break;
                    }
                }
                let _ = rustix::fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK);
            }
            if rng.below(6) == 0 {
                let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Both);
            }
        }
        if rng.below(3) == 0 && !self.raw.descriptors.is_empty() {
            let n = rng.below(self.raw.descriptors.len() as u64) as usize;
            drop(self.raw.descriptors.swap_remove(n));
        }
        if let Ok(same) = self.raw.socket.try_clone()
            && rng.below(4) == 0
        {
            self.raw.socket = same;
        }
    }

    fn send_noise(&mut self, rng: &mut Rng) -> Option<()> {
        let mut bytes = match rng.below(3) {
            0 => vec![0; rng.below(MAX_MESSAGE as u64 * 2) as usize],
            _ => postcard::to_stdvec(&Request { id: 1, body: RequestBody::Status }).ok()?,
        };
        match rng.below(3) {
            0 => rng.fill(&mut bytes),
            1 => bytes.push(rng.word() as u8),
            _ => {
                if let Some(byte) = bytes.first_mut() {
                    *byte = rng.word() as u8;
                }
            }
        }
        self.raw.send(&bytes, &[]);
        // The next request shows whether the daemon accepted the bytes.
        self.raw.try_call(RequestBody::Status, &[]).map(drop)
    }

    /// Passes a descriptor that is not, or no longer, a shared buffer.
    fn send_descriptors(&mut self, rng: &mut Rng) -> Option<()> {
        let sealed = rustix::fs::memfd_create("sealed", MemfdFlags::CLOEXEC).ok();
        let odd: Option<OwnedFd> = match rng.below(12) {
            0 => rustix::pipe::pipe().ok().map(|(read, _)| read),
            1 => rustix::pipe::pipe().ok().map(|(_, write)| write),
            2 => open("/tmp"),
            3 => open("/proc/self/mem"),
            4 => open("/proc/self/exe"),
            5 => open("/dev/zero"),
            6 => self.raw.socket.try_clone().ok(),
            7 => self.events.try_clone().ok(),
            8 => sealed,
            9 => self.raw.descriptors.first().and_then(|fd| fd.try_clone().ok()),
            10 => self.memory.try_clone().ok(),
            _ => Some(memfd(PAGE)),
        };
        let odd = odd?;
        let many: Vec<BorrowedFd<'_>> = (0..1 + rng.below(3)).map(|_| odd.as_fd()).collect();
        let length = [0, PAGE as u64, BUFFER as u64, u64::MAX][rng.below(4) as usize];
        let body = match rng.below(4) {
            0 => RequestBody::Status,
            _ => RequestBody::AddSharedBuffer { length },
        };
        self.raw.try_call(body, &many).map(drop)
    }

    /// Truncates, and punches holes in, memory that it has shared or is about to share.
    fn shrink_memory(&mut self, rng: &mut Rng) {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for fd in self.raw.descriptors.iter().take(1).chain([&self.memory]) {
            let _ = rustix::fs::ftruncate(fd, 0);
            let at = rng.below(16) * PAGE as u64;
            let _ = rustix::fs::fallocate(fd, punch, at, PAGE as u64 * (1 + rng.below(8)));
        }
        let fresh = memfd(BUFFER);
        std::thread::scope(|scope| {
            let thief = fresh.try_clone();
            scope.spawn(move || {
                for _ in 0..20 {
                    if let Ok(fd) = &thief {
                        let _ = rustix::fs::fallocate(fd, punch, 0, PAGE as u64);
                        let _ = rustix::fs::ftruncate(fd, 0);
                        let _ = rustix::fs::ftruncate(fd, BUFFER as u64);
                    }
                }
            });
            let body = RequestBody::AddSharedBuffer { length: BUFFER as u64 };
            if let Some(Ok(ReplyBody::SharedBuffer { buffer })) =
                self.raw.try_call(body, &[fresh.as_fd()])
            {
                self.buffer = buffer;
            }
        });
    }

    /// Sends a well-formed request for one of the session's objects or for a guessed ID.
    fn send_request(&mut self, rng: &mut Rng) -> Option<()> {
        let any = |rng: &mut Rng| rng.below(24) as u32;
        let qp = match rng.below(3) {
            0 => QpId(any(rng)),
            _ => pick(&self.qps, rng)?,
        };
        let body = match rng.below(17) {
            0 => RequestBody::DestroyQp { qp },
            1 => RequestBody::QpToError { qp },
            2 => {
                let within = DisconnectMode::OrderlyWithin { ms: rng.below(1000) as u32 };
                let modes = [DisconnectMode::Orderly, within, DisconnectMode::Abort];
                RequestBody::Disconnect { qp, mode: modes[rng.below(3) as usize] }
            }
            3 => RequestBody::QueryQp { qp },
            4 => RequestBody::DestroyCq { cq: CqId(any(rng)) },
            5 => RequestBody::DeregMr { mr: MrId(any(rng)) },
            6 => RequestBody::RemoveSharedBuffer { buffer: SharedBufferId(any(rng)) },
            7 => RequestBody::ClosePd { pd: PdId(any(rng)) },
            8 => RequestBody::DestroyChannel { channel: ChannelId(any(rng)) },
            9 => RequestBody::CloseListener { listener: ListenerId(any(rng)) },
            10 => RequestBody::Reject { request: RequestId(any(rng)), private_data: vec![1] },
            11 => RequestBody::SetContext { object: ObjectRef::Qp(qp), context: rng.word() },
            12 => RequestBody::List { what: ListKind::Qps, from: rng.word() },
            13 => RequestBody::DestroySrq { srq: SrqId(any(rng)) },
            14 => RequestBody::QuerySrq { srq: SrqId(any(rng)) },
            15 => RequestBody::ArmSrq { srq: SrqId(any(rng)), limit: rng.below(9) as u32 },
            _ => {
                let peer = SocketAddr::from(([127, 0, 0, 1], 1 + rng.below(65_000) as u16));
                RequestBody::Connect {
                    qp,
                    peer,
                    local: None,
                    ird: Some(9),
                    ord: None,
                    private_data: vec![3; 100],
                }
            }
        };
        let _ = self.raw.try_call(body, &[])?;
        Some(())
    }

    /// Ends the session in one of several ways.
    fn leave(self, rng: &mut Rng) {
        match rng.below(8) {
            // A child process keeps all descriptors briefly.
            0 => {
                let all = self.raw.descriptors.iter().chain([&self.raw.socket, &self.memory]);
                for fd in all {
                    let _ = rustix::io::fcntl_setfd(fd, FdFlags::empty());
                }
                if let Ok(mut child) = Command::new("sleep").arg("0.01").spawn() {
                    drop(self);
                    let _ = child.wait();
                }
            }
            // End while one reply is unread and another is pending.
            1 => {
                let Session { mut raw, .. } = self;
                raw.ask(RequestBody::Status, &[]);
                raw.ask(RequestBody::OpenPd { name: None }, &[]);
            }
            _ => {}
        }
    }
}

/// Opens a session, posts requests, and misuses its doorbells and descriptors. Returns a guard that
/// keeps the session open and idle.
pub fn linger(socket: &Path, seed: u64) -> Option<impl Drop> {
    let mut rng = Rng::new(seed);
    let mut session = Session::open(socket, None, &mut rng)?;
    for _ in 0..3 {
        session.post(&mut rng);
        session.scribble_doorbells(&mut rng);
        session.abuse_descriptors(&mut rng);
    }
    Some(Lingering(session))
}

struct Lingering(Session);

impl Drop for Lingering {
    fn drop(&mut self) {
        // The session ends only here.
        self.0.raw.descriptors.clear();
    }
}

/// Executes another program in the middle of a session, with all descriptors open.
///
/// # Errors
///
/// Returns the error of `exec`. Does not return otherwise.
pub fn exec_in_a_session(socket: &Path, seed: u64, then: &mut Command) -> std::io::Error {
    let mut rng = Rng::new(seed);
    if let Some(mut session) = Session::open(socket, None, &mut rng) {
        session.post(&mut rng);
        for fd in session.raw.descriptors.iter().chain([&session.raw.socket]) {
            let _ = rustix::io::fcntl_setfd(fd, FdFlags::empty());
        }
        return then.exec();
    }
    std::io::Error::other("no session")
}

fn pick<T: Copy>(of: &[T], rng: &mut Rng) -> Option<T> {
    of.get(rng.below(of.len().max(1) as u64) as usize).copied()
}

/// Returns a word that an attacker might choose.
fn odd_word(rng: &mut Rng) -> u64 {
    match rng.below(6) {
        0 => 0,
        1 => u64::MAX,
        2 => rng.below(256),
        3 => 1 << rng.below(64),
        4 => rng.below(1 << 32) << 32 | rng.below(1 << 32),
        _ => rng.word(),
    }
}

/// Returns true if a write does not block. The descriptor may be full and blocking.
fn takes_bytes(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())) == Ok(1)
        && fds[0].revents() == PollFlags::OUT
}

fn open(path: &str) -> Option<OwnedFd> {
    let mut file = std::fs::File::open(path).ok()?;
    // The passed descriptor shares the file position.
    let _ = file.seek(SeekFrom::Start(7)).and_then(|_| file.flush());
    Some(file.into())
}
