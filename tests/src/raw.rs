//! A client that implements the control protocol itself, without the library's checks, and keeps
//! every descriptor that it receives.
//!
//! The tests of the daemon's package include this file (`rnicd/tests/support`). Functions named
//! `try_` return `None` if the daemon does not listen or ends the session. Others panic.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::*;
use rnic_abi::shm::Mapping;
use rnic_abi::types::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::Uid;

/// A session without the library.
pub struct Raw {
    /// The control socket.
    pub socket: OwnedFd,
    /// Mappings of the arenas. The first is created when the session opens.
    pub arenas: Vec<Arc<Mapping>>,
    /// Received descriptors: first arena, event channel, eventfds, completion channels.
    pub descriptors: Vec<OwnedFd>,
    /// Number of workers of the daemon.
    pub workers: u16,
    next: u32,
}

/// Bytes and descriptors of a packet, or `None` at the end of the session.
pub type Packet = Option<(Vec<u8>, Vec<OwnedFd>)>;

impl Raw {
    /// Connects without sending anything.
    ///
    /// # Panics
    ///
    /// If the daemon does not listen.
    pub fn connect(path: &Path) -> Raw {
        Raw::try_connect(path).expect("the daemon listens")
    }

    /// Like [`Raw::connect`]. Returns `None` if the daemon does not listen or does not answer.
    pub fn try_connect(path: &Path) -> Option<Raw> {
        Raw::connect_within(path, WATCHDOG)
    }

    /// Like [`Raw::try_connect`], with a time limit.
    fn connect_within(path: &Path, timeout: Duration) -> Option<Raw> {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .ok()?;
        let which = rustix::net::sockopt::Timeout::Send;
        rustix::net::sockopt::set_socket_timeout(&socket, which, Some(timeout)).ok()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
        let which = rustix::net::sockopt::Timeout::Recv;
        // A daemon that does not answer must fail the test instead of blocking it.
        rustix::net::sockopt::set_socket_timeout(&socket, which, Some(WATCHDOG)).ok()?;
        let arenas = Vec::new();
        let descriptors = Vec::new();
        Some(Raw { socket, arenas, descriptors, workers: 0, next: 1 })
    }

    /// Connects and opens a session.
    ///
    /// # Panics
    ///
    /// If the daemon does not listen or does not admit the client.
    pub fn open(path: &Path) -> Raw {
        Raw::try_open(path).expect("a session")
    }

    /// Like [`Raw::open`]. Returns `None` if the daemon admits no session.
    pub fn try_open(path: &Path) -> Option<Raw> {
        let raw = Raw::try_connect(path)?;
        raw.send(&HELLO.to_bytes(), &[]);
        raw.finish_hello()
    }

    /// Like [`Raw::open`], as another user. Requires root. The credentials of a thread are its own,
    /// and a socket keeps the credentials used in `connect`.
    ///
    /// # Panics
    ///
    /// If the daemon does not admit that user.
    pub fn open_as(path: &Path, uid: u32) -> Raw {
        std::thread::scope(|scope| {
            let open = || {
                rustix::thread::set_thread_groups(&[]).expect("root may change credentials");
                rustix::thread::set_thread_uid(Uid::from_raw(uid))
                    .expect("root may change credentials");
                Raw::open(path)
            };
            scope.spawn(open).join().expect("a session")
        })
    }

    /// Like [`Raw::try_open`], with a time limit.
    pub fn open_within(path: &Path, timeout: Duration) -> Option<Raw> {
        let raw = Raw::connect_within(path, timeout)?;
        raw.send(&HELLO.to_bytes(), &[]);
        raw.has_input_within(timeout).then(|| raw.finish_hello()).flatten()
    }

    /// Sends Hello and returns the reply and its descriptors.
    ///
    /// # Panics
    ///
    /// If the reply is malformed.
    pub fn hello(&mut self) -> Option<(HelloReply, Vec<OwnedFd>)> {
        self.send(&HELLO.to_bytes(), &[]);
        let (bytes, descriptors) = self.receive()?;
        Some((HelloReply::from_bytes(&bytes).expect("a Hello reply"), descriptors))
    }

    /// Receives the reply to Hello and opens the session.
    fn finish_hello(mut self) -> Option<Raw> {
        let raw = &mut self;
        let (bytes, descriptors) = raw.receive()?;
        let reply = HelloReply::from_bytes(&bytes)?;
        if reply.status != HelloStatus::Ok as u32 {
            return None;
        }
        raw.workers = reply.workers;
        let arena = descriptors.first()?.as_fd();
        raw.arenas.push(Mapping::map_arena(arena, reply.arena_len as usize).ok()?);
        raw.descriptors = descriptors;
        Some(self)
    }

    /// Returns true if a packet or the end of the session arrives within `timeout`.
    pub fn has_input_within(&self, timeout: Duration) -> bool {
        readable_within(self.socket.as_fd(), timeout)
    }

    /// Ends the session and waits until the daemon has released all its objects. The daemon closes
    /// its end of the event channel last. Returns false if that takes longer than `timeout`.
    pub fn ends_within(self, timeout: Duration) -> bool {
        let Raw { socket, mut descriptors, .. } = self;
        let events = descriptors.swap_remove(1);
        drop((socket, descriptors));
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if !readable_within(events.as_fd(), left) {
                return false;
            }
            let mut bytes = [0; 1];
            match rustix::net::recv(&events, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return true,
                Ok(_) => {}
                Err(_) => return true,
            }
        }
    }

    /// Sends a packet. A failure shows only at the next receive.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let bytes = [IoSlice::new(bytes)];
        // Nonblocking, because a hostile client may have filled its own socket.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::sendmsg(&self.socket, &bytes, &mut ancillary, flags);
    }

    /// Receives a packet. Returns `None` at the end of the session.
    ///
    /// # Panics
    ///
    /// If the daemon neither answers nor disconnects.
    pub fn receive(&self) -> Packet {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(80))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = match rustix::net::recvmsg(&self.socket, &mut parts, &mut ancillary, flags) {
            Ok(got) if got.bytes == 0 => return None,
            Ok(got) => got,
            Err(rustix::io::Errno::AGAIN) => panic!("the daemon does not answer"),
            Err(_) => return None,
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(list) = message {
                descriptors.extend(list);
            }
        }
        bytes.truncate(got.bytes);
        Some((bytes, descriptors))
    }

    /// Sends a request and returns its ID.
    pub fn ask(&mut self, body: RequestBody, descriptors: &[BorrowedFd<'_>]) -> u32 {
        let id = self.next;
        self.next += 1;
        let bytes = postcard::to_stdvec(&Request { id, body }).expect("requests encode");
        self.send(&bytes, descriptors);
        id
    }

    /// Receives a reply and keeps its descriptors. Returns `None` at the end of the session.
    ///
    /// # Panics
    ///
    /// If the packet is not a reply.
    pub fn reply(&mut self) -> Option<Reply> {
        let (bytes, descriptors) = self.receive()?;
        let reply: Reply = postcard::from_bytes(&bytes).expect("a reply");
        if let Ok(
            ReplyBody::Cq { new_arena: Some(new), .. }
            | ReplyBody::Copies { new_arena: Some(new), .. }
            | ReplyBody::Qp { new_arena: Some(new), .. }
            | ReplyBody::Srq { new_arena: Some(new), .. },
        ) = &reply.result
            && let Some(fd) = descriptors.first()
            && let Ok(mapping) = Mapping::map_arena(fd.as_fd(), new.length as usize)
        {
            self.arenas.push(mapping);
        }
        self.descriptors.extend(descriptors);
        Some(reply)
    }

    /// Sends a request and returns the result.
    ///
    /// # Panics
    ///
    /// If the next packet is not its reply, or the session ends.
    pub fn call(&mut self, body: RequestBody) -> Result<ReplyBody, Refusal> {
        self.call_with(body, &[])
    }

    /// Like [`Raw::call`], with descriptors.
    ///
    /// # Panics
    ///
    /// If the next packet is not its reply, or the session ends.
    pub fn call_with(
        &mut self,
        body: RequestBody,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<ReplyBody, Refusal> {
        let id = self.ask(body, descriptors);
        let reply = self.reply().expect("the session is open");
        assert_eq!(reply.id, id);
        reply.result
    }

    /// Like [`Raw::call_with`], but skips replies to earlier requests. Returns `None` if the
    /// session ends.
    pub fn try_call(
        &mut self,
        body: RequestBody,
        descriptors: &[BorrowedFd<'_>],
    ) -> Option<Result<ReplyBody, Refusal>> {
        let id = self.ask(body, descriptors);
        loop {
            let reply = self.reply()?;
            if reply.id == id {
                return Some(reply.result);
            }
        }
    }

    /// Sends a request that the daemon must refuse and returns the text of the refusal.
    ///
    /// # Panics
    ///
    /// If the daemon grants it.
    pub fn refused(&mut self, body: RequestBody) -> String {
        match self.call(body) {
            Ok(body) => panic!("granted: {body:?}"),
            Err(refusal) => refusal.to_string(),
        }
    }
}

/// Requests that the daemon must grant. Each method panics if it refuses.
impl Raw {
    /// Opens a private domain.
    pub fn pd(&mut self) -> PdId {
        match self.call(RequestBody::OpenPd { name: None }) {
            Ok(ReplyBody::Pd { pd }) => pd,
            other => panic!("{other:?}"),
        }
    }

    /// Creates a completion queue without a channel.
    pub fn cq(&mut self, entries: u32) -> CqId {
        match self.call(RequestBody::CreateCq { entries, channel: None, context: 0 }) {
            Ok(ReplyBody::Cq { cq, .. }) => cq,
            other => panic!("{other:?}"),
        }
    }

    /// Creates an RC QP in a new domain and with a new completion queue.
    pub fn rc_qp(&mut self) -> QpId {
        self.qp_of(QpType::Rc)
    }

    /// Creates a QP of any type in a new domain and with a new completion queue.
    pub fn qp_of(&mut self, kind: QpType) -> QpId {
        let pd = self.pd();
        let cq = self.cq(16);
        let request = QpRequest { kind, ..qp_request(pd, cq) };
        match self.call(RequestBody::CreateQp(request)) {
            Ok(ReplyBody::Qp { qp, .. }) => qp,
            other => panic!("{other:?}"),
        }
    }

    /// Creates a completion channel.
    pub fn channel(&mut self) -> ChannelId {
        match self.call(RequestBody::CreateChannel) {
            Ok(ReplyBody::Channel { channel }) => channel,
            other => panic!("{other:?}"),
        }
    }

    /// Creates a shared buffer of new memory.
    pub fn shared_buffer(&mut self, length: usize) -> SharedBufferId {
        self.shared_buffer_of(memfd(length).as_fd(), length as u64)
    }

    /// Creates a shared buffer of this memory.
    pub fn shared_buffer_of(&mut self, memory: BorrowedFd<'_>, length: u64) -> SharedBufferId {
        match self.call_with(RequestBody::AddSharedBuffer { length }, &[memory]) {
            Ok(ReplyBody::SharedBuffer { buffer }) => buffer,
            other => panic!("{other:?}"),
        }
    }

    /// Registers a region as in [`reg_mr`].
    pub fn mr(&mut self, pd: PdId, buffer: SharedBufferId, length: u64) -> (MrId, Stag) {
        match self.call(reg_mr(pd, buffer, length)) {
            Ok(ReplyBody::Mr { mr, stag }) => (mr, stag),
            other => panic!("{other:?}"),
        }
    }

    /// Creates a QP as in [`qp_request`].
    pub fn qp(&mut self, pd: PdId, cq: CqId) -> QpId {
        match self.call(RequestBody::CreateQp(qp_request(pd, cq))) {
            Ok(ReplyBody::Qp { qp, .. }) => qp,
            other => panic!("{other:?}"),
        }
    }

    /// Binds a loopback address without listening on it.
    pub fn listener(&mut self) -> (ListenerId, std::net::SocketAddr) {
        let address = ([127, 0, 0, 1], 0).into();
        match self.call(RequestBody::Bind { address, context: 0, v6_only: false }) {
            Ok(ReplyBody::Listener { listener, address }) => (listener, address),
            other => panic!("{other:?}"),
        }
    }

    /// Queries the daemon's status.
    pub fn status(&mut self) -> StatusInfo {
        match self.call(RequestBody::Status) {
            Ok(ReplyBody::Status(status)) => status,
            other => panic!("{other:?}"),
        }
    }
}

/// The Hello of a client of this version.
const HELLO: Hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };

/// Time after which a daemon that does not answer fails a test.
const WATCHDOG: Duration = Duration::from_secs(180);

/// Returns true if the socket becomes readable, or reaches its end, within `timeout`.
fn readable_within(socket: BorrowedFd<'_>, timeout: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    let mut ready = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    rustix::event::poll(&mut ready, Some(&timeout)).is_ok_and(|n| n > 0)
}

/// Returns a request to register a whole shared buffer at address 0x1000, with remote read and
/// write access.
pub fn reg_mr(pd: PdId, buffer: SharedBufferId, length: u64) -> RequestBody {
    RequestBody::RegMr(MrRequest {
        pd,
        source: MrSource::Shared { buffer, offset: 0 },
        length,
        iova: 0x1000,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
        scope: Scope::Pd,
    })
}

/// Returns a request for an iWARP QP of modest size.
pub fn qp_request(pd: PdId, cq: CqId) -> QpRequest {
    QpRequest {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        sq_depth: 16,
        rq_depth: 16,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline: 64,
        signal_all: false,
        rnr_policy: RnrPolicy::Terminate,
        context: 0,
        kind: QpType::Iwarp,
        device: String::new(),
    }
}

/// Returns a memfd with all pages populated, like those that the library shares.
pub fn memfd(length: usize) -> OwnedFd {
    use rustix::fs::{MemfdFlags, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = memfd_create("test", flags).expect("a memfd");
    let zeros = vec![0; length];
    let mut written = 0;
    while written < length {
        written += rustix::io::write(&memfd, &zeros[written..]).expect("memory");
    }
    memfd
}
