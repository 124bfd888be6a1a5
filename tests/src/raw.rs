//! A client that speaks the control socket by hand, so that nothing the library checks stands
//! between a test and the daemon, and that keeps every descriptor it is given.
//!
//! The tests of the daemon's package include this file (`rnicd/tests/support`). What is called
//! `try_` copes with a daemon that is not there or ends the session; the rest panics.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::*;
use rnic_core::shm::Mapping;
use rnic_core::types::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::Uid;

/// A session spoken by hand.
pub struct Raw {
    /// The control socket.
    pub socket: OwnedFd,
    /// Its first arena's mapping, once there is a session.
    pub arenas: Vec<Arc<Mapping>>,
    /// Descriptors that came: arenas, event channel, eventfds, completion channels.
    pub descriptors: Vec<OwnedFd>,
    /// Workers of the daemon.
    pub workers: u16,
    next: u32,
}

/// A packet's bytes and descriptors, or nothing at the end of the session.
pub type Packet = Option<(Vec<u8>, Vec<OwnedFd>)>;

impl Raw {
    /// Connects and says nothing.
    ///
    /// # Panics
    ///
    /// If the daemon is not there.
    pub fn connect(path: &Path) -> Raw {
        Raw::try_connect(path).expect("the daemon is there")
    }

    /// As [`Raw::connect`]; `None` if the daemon is not there or does not answer.
    pub fn try_connect(path: &Path) -> Option<Raw> {
        Raw::connect_within(path, WATCHDOG)
    }

    /// As [`Raw::try_connect`], if the daemon takes it within this time.
    fn connect_within(path: &Path, patience: Duration) -> Option<Raw> {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .ok()?;
        let which = rustix::net::sockopt::Timeout::Send;
        rustix::net::sockopt::set_socket_timeout(&socket, which, Some(patience)).ok()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
        let which = rustix::net::sockopt::Timeout::Recv;
        // A watchdog, so that a daemon that does not answer fails a test and does not hang it.
        rustix::net::sockopt::set_socket_timeout(&socket, which, Some(WATCHDOG)).ok()?;
        let (arenas, descriptors) = (Vec::new(), Vec::new());
        Some(Raw { socket, arenas, descriptors, workers: 0, next: 1 })
    }

    /// Connects and opens a session.
    ///
    /// # Panics
    ///
    /// If the daemon is not there or does not admit it.
    pub fn open(path: &Path) -> Raw {
        Raw::try_open(path).expect("a session")
    }

    /// As [`Raw::open`]; `None` if there is no session to be had.
    pub fn try_open(path: &Path) -> Option<Raw> {
        let raw = Raw::try_connect(path)?;
        raw.send(&HELLO.to_bytes(), &[]);
        raw.welcomed()
    }

    /// As [`Raw::open`], as another user, which only root can be: identities belong to threads, and
    /// a socket keeps the one it was connected with.
    ///
    /// # Panics
    ///
    /// If the daemon does not admit that user.
    pub fn open_as(path: &Path, uid: u32) -> Raw {
        std::thread::scope(|scope| {
            let open = || {
                rustix::thread::set_thread_groups(&[]).expect("root may");
                rustix::thread::set_thread_uid(Uid::from_raw(uid)).expect("root may");
                Raw::open(path)
            };
            scope.spawn(open).join().expect("a session")
        })
    }

    /// As [`Raw::try_open`], if the daemon answers within this time.
    pub fn open_within(path: &Path, patience: Duration) -> Option<Raw> {
        let raw = Raw::connect_within(path, patience)?;
        raw.send(&HELLO.to_bytes(), &[]);
        raw.hears_within(patience).then(|| raw.welcomed()).flatten()
    }

    /// Says Hello and returns what came back, which is the caller's.
    ///
    /// # Panics
    ///
    /// If it is no answer to a Hello.
    pub fn hello(&mut self) -> Option<(HelloReply, Vec<OwnedFd>)> {
        self.send(&HELLO.to_bytes(), &[]);
        let (bytes, descriptors) = self.receive()?;
        Some((HelloReply::from_bytes(&bytes).expect("a Hello reply"), descriptors))
    }

    /// Takes the answer to a Hello.
    fn welcomed(mut self) -> Option<Raw> {
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

    /// Whether something comes from the daemon within this time, be it the end.
    pub fn hears_within(&self, patience: Duration) -> bool {
        readable_within(self.socket.as_fd(), patience)
    }

    /// Ends the session and waits until nothing of it is left: then the last that the daemon gives
    /// up is its end of the event channel. False if that takes longer than `patience`.
    pub fn ends_within(self, patience: Duration) -> bool {
        let Raw { socket, mut descriptors, .. } = self;
        let events = descriptors.swap_remove(1);
        drop((socket, descriptors));
        let end = Instant::now() + patience;
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

    /// Sends a packet; whether the daemon was there to take it is seen when receiving.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let bytes = [IoSlice::new(bytes)];
        // Without waiting: a hostile client may have filled the socket itself.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::sendmsg(&self.socket, &bytes, &mut ancillary, flags);
    }

    /// Receives a packet; `None` at the end of the session.
    ///
    /// # Panics
    ///
    /// If the daemon neither answers nor hangs up.
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

    /// Sends a request and returns its id.
    pub fn ask(&mut self, body: RequestBody, descriptors: &[BorrowedFd<'_>]) -> u32 {
        let id = self.next;
        self.next += 1;
        let bytes = postcard::to_stdvec(&Request { id, body }).expect("requests encode");
        self.send(&bytes, descriptors);
        id
    }

    /// Receives a reply and keeps what comes with it; `None` at the end of the session.
    ///
    /// # Panics
    ///
    /// If it is no reply.
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

    /// Asks and returns the answer.
    ///
    /// # Panics
    ///
    /// If something else comes next, or the session ends.
    pub fn call(&mut self, body: RequestBody) -> Result<ReplyBody, Refusal> {
        self.call_with(body, &[])
    }

    /// As [`Raw::call`], with descriptors.
    ///
    /// # Panics
    ///
    /// If something else comes next, or the session ends.
    pub fn call_with(
        &mut self,
        body: RequestBody,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<ReplyBody, Refusal> {
        let id = self.ask(body, descriptors);
        let reply = self.reply().expect("the session goes on");
        assert_eq!(reply.id, id);
        reply.result
    }

    /// As [`Raw::call_with`], past the replies to what was asked before; `None` if the session
    /// ends.
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

    /// Asks for what is to be refused, and returns the refusal in words.
    ///
    /// # Panics
    ///
    /// If it is granted.
    pub fn refused(&mut self, body: RequestBody) -> String {
        match self.call(body) {
            Ok(body) => panic!("granted: {body:?}"),
            Err(refusal) => refusal.to_string(),
        }
    }
}

/// What has to be granted. Each panics if it is not.
impl Raw {
    /// A private domain.
    pub fn pd(&mut self) -> PdId {
        match self.call(RequestBody::OpenPd { name: None }) {
            Ok(ReplyBody::Pd { pd }) => pd,
            other => panic!("{other:?}"),
        }
    }

    /// A completion queue without a channel.
    pub fn cq(&mut self, entries: u32) -> CqId {
        match self.call(RequestBody::CreateCq { entries, channel: None, context: 0 }) {
            Ok(ReplyBody::Cq { cq, .. }) => cq,
            other => panic!("{other:?}"),
        }
    }

    /// A queue pair that is wired by hand, in a domain and with a completion queue of its own.
    pub fn wired_qp(&mut self) -> QpId {
        self.qp_of(QpType::Wired)
    }

    /// A queue pair of any kind, likewise.
    pub fn qp_of(&mut self, kind: QpType) -> QpId {
        let (pd, cq) = (self.pd(), self.cq(16));
        let request = QpRequest { kind, ..qp_request(pd, cq) };
        match self.call(RequestBody::CreateQp(request)) {
            Ok(ReplyBody::Qp { qp, .. }) => qp,
            other => panic!("{other:?}"),
        }
    }

    /// A completion channel.
    pub fn channel(&mut self) -> ChannelId {
        match self.call(RequestBody::CreateChannel) {
            Ok(ReplyBody::Channel { channel }) => channel,
            other => panic!("{other:?}"),
        }
    }

    /// A shared buffer of new memory.
    pub fn shared_buffer(&mut self, length: usize) -> SharedBufferId {
        self.shared_buffer_of(memfd(length).as_fd(), length as u64)
    }

    /// A shared buffer of this memory.
    pub fn shared_buffer_of(&mut self, memory: BorrowedFd<'_>, length: u64) -> SharedBufferId {
        match self.call_with(RequestBody::AddSharedBuffer { length }, &[memory]) {
            Ok(ReplyBody::SharedBuffer { buffer }) => buffer,
            other => panic!("{other:?}"),
        }
    }

    /// A region as [`reg_mr`] asks for it.
    pub fn mr(&mut self, pd: PdId, buffer: SharedBufferId, length: u64) -> (MrId, Stag) {
        match self.call(reg_mr(pd, buffer, length)) {
            Ok(ReplyBody::Mr { mr, stag }) => (mr, stag),
            other => panic!("{other:?}"),
        }
    }

    /// A QP as [`qp_request`] asks for it.
    pub fn qp(&mut self, pd: PdId, cq: CqId) -> QpId {
        match self.call(RequestBody::CreateQp(qp_request(pd, cq))) {
            Ok(ReplyBody::Qp { qp, .. }) => qp,
            other => panic!("{other:?}"),
        }
    }

    /// An address of the loopback interface, bound and not listened on.
    pub fn listener(&mut self) -> (ListenerId, std::net::SocketAddr) {
        let address = ([127, 0, 0, 1], 0).into();
        match self.call(RequestBody::Bind { address, context: 0, v6_only: false }) {
            Ok(ReplyBody::Listener { listener, address }) => (listener, address),
            other => panic!("{other:?}"),
        }
    }

    /// Figures of the daemon.
    pub fn status(&mut self) -> StatusInfo {
        match self.call(RequestBody::Status) {
            Ok(ReplyBody::Status(status)) => status,
            other => panic!("{other:?}"),
        }
    }
}

/// What a client of this version says first.
const HELLO: Hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };

/// Time after which a daemon that does not answer fails a test.
const WATCHDOG: Duration = Duration::from_secs(180);

/// Whether there is something to be read within this time, be it the end.
fn readable_within(socket: BorrowedFd<'_>, patience: Duration) -> bool {
    let patience =
        Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    let mut ready = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    rustix::event::poll(&mut ready, Some(&patience)).is_ok_and(|n| n > 0)
}

/// A request for a region of a whole shared buffer, from address 0x1000 on, that peers read and
/// write.
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

/// A request for a QP of modest size.
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
        kind: QpType::Connected,
    }
}

/// A populated memfd as the library would share it.
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
