//! A daemon in this process and a client that speaks the control socket by hand, so that nothing
//! the client library checks stands between a test and the daemon.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::*;
use rnic_core::types::*;
use rnicd::config::Config;
use rnicd::exec::PrivateDaemon;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{Gid, Uid};

#[path = "../../../tests/src/omit.rs"]
mod omit;

/// A daemon with a configuration of the test's choice.
pub fn daemon(configuration: &str) -> PrivateDaemon {
    let config = Config::parse(Path::new("test.toml"), configuration).expect("configuration");
    PrivateDaemon::start(config).expect("daemon")
}

/// The user these tests run as.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A daemon with one worker and this configuration.
pub fn one_worker(configuration: &str) -> PrivateDaemon {
    daemon(&format!("[engine]\nworkers = 1\n{configuration}"))
}

/// A daemon that other users reach as well; none if this test cannot be other users.
pub fn for_others(configuration: &str) -> Option<PrivateDaemon> {
    if uid() != 0 {
        omit::omit("only root can be several users");
        return None;
    }
    let daemon = one_worker(&format!("{configuration}[control]\nmode = \"0666\"\n"));
    let folder = daemon.socket().parent().unwrap().to_owned();
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    Some(daemon)
}

/// Connects as another user: identities belong to threads, and a socket keeps the one it was
/// connected with.
pub fn connect_as(socket: &PathBuf, user: u32, groups: &[u32]) -> Raw {
    std::thread::scope(|scope| {
        let connect = || {
            let groups: Vec<Gid> = groups.iter().map(|g| Gid::from_raw(*g)).collect();
            rustix::thread::set_thread_groups(&groups).unwrap();
            rustix::thread::set_thread_uid(Uid::from_raw(user)).unwrap();
            Raw::connect(socket)
        };
        scope.spawn(connect).join().unwrap()
    })
}

pub fn open_as(socket: &PathBuf, user: u32, groups: &[u32]) -> Raw {
    let mut raw = connect_as(socket, user, groups);
    assert_eq!(raw.hello().unwrap().0.status, HelloStatus::Ok as u32);
    raw
}

/// A connected control socket.
pub struct Raw {
    pub socket: OwnedFd,
    next: u32,
}

/// What came: bytes and descriptors, or the end.
pub type Packet = Option<(Vec<u8>, Vec<OwnedFd>)>;

impl Raw {
    /// Connects and says nothing.
    pub fn connect(path: &PathBuf) -> Raw {
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("socket");
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).expect("path")).expect("connect");
        // A watchdog, so that a daemon that does not answer fails a test and does not hang it.
        let patience = Some(std::time::Duration::from_secs(20));
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            patience,
        )
        .expect("timeout");
        Raw { socket, next: 1 }
    }

    /// Connects and opens a session.
    pub fn open(path: &PathBuf) -> Raw {
        let mut raw = Raw::connect(path);
        let (reply, descriptors) = raw.hello().expect("a reply");
        assert_eq!(reply.status, HelloStatus::Ok as u32);
        assert_eq!(descriptors.len(), 2 + usize::from(reply.workers));
        raw
    }

    /// Says Hello and returns what came back.
    pub fn hello(&mut self) -> Option<(HelloReply, Vec<OwnedFd>)> {
        let hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };
        self.send(&hello.to_bytes(), &[]);
        let (bytes, descriptors) = self.receive()?;
        Some((HelloReply::from_bytes(&bytes).expect("a Hello reply"), descriptors))
    }

    /// Sends a packet; whether the daemon was there to take it is seen when receiving.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let _ = rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
    }

    /// Receives a packet; `None` at the end of the session.
    pub fn receive(&self) -> Packet {
        let mut bytes = vec![0; MAX_MESSAGE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(80))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        );
        let got = match got {
            Ok(got) if got.bytes == 0 => return None,
            Ok(got) => got,
            Err(rustix::io::Errno::CONNRESET) => return None,
            Err(error) => panic!("the daemon does not answer: {error}"),
        };
        bytes.truncate(got.bytes);
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(list) = message {
                descriptors.extend(list);
            }
        }
        Some((bytes, descriptors))
    }

    /// Sends a request and returns its id.
    pub fn ask(&mut self, body: RequestBody, descriptors: &[BorrowedFd<'_>]) -> u32 {
        let id = self.next;
        self.next += 1;
        let bytes = postcard::to_stdvec(&Request { id, body }).expect("a request");
        self.send(&bytes, descriptors);
        id
    }

    /// Receives a reply; `None` at the end of the session.
    pub fn reply(&self) -> Option<Reply> {
        self.receive().map(|(bytes, _)| postcard::from_bytes(&bytes).expect("a reply"))
    }

    /// Asks and returns the answer.
    pub fn call(&mut self, body: RequestBody) -> Result<ReplyBody, Refusal> {
        self.call_with(body, &[])
    }

    /// Asks with descriptors and returns the answer.
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

    /// Asks for what is to be refused, and returns the refusal in words.
    pub fn refused(&mut self, body: RequestBody) -> String {
        match self.call(body) {
            Ok(body) => panic!("granted: {body:?}"),
            Err(refusal) => refusal.to_string(),
        }
    }

    pub fn pd(&mut self) -> PdId {
        match self.call(RequestBody::OpenPd { name: None }) {
            Ok(ReplyBody::Pd { pd }) => pd,
            other => panic!("{other:?}"),
        }
    }

    pub fn cq(&mut self, entries: u32) -> CqId {
        match self.call(RequestBody::CreateCq { entries, channel: None, context: 0 }) {
            Ok(ReplyBody::Cq { cq, .. }) => cq,
            other => panic!("{other:?}"),
        }
    }

    pub fn channel(&mut self) -> ChannelId {
        match self.call(RequestBody::CreateChannel) {
            Ok(ReplyBody::Channel { channel }) => channel,
            other => panic!("{other:?}"),
        }
    }

    pub fn segment(&mut self, length: usize) -> SegmentId {
        let memfd = memfd(length);
        let body = RequestBody::AddSegment { length: length as u64, client_address: 0 };
        match self.call_with(body, &[memfd.as_fd()]) {
            Ok(ReplyBody::Segment { segment }) => segment,
            other => panic!("{other:?}"),
        }
    }

    pub fn mr(&mut self, pd: PdId, segment: SegmentId, length: u64) -> (MrId, Stag) {
        match self.call(reg_mr(pd, segment, length)) {
            Ok(ReplyBody::Mr { mr, stag }) => (mr, stag),
            other => panic!("{other:?}"),
        }
    }

    pub fn qp(&mut self, pd: PdId, cq: CqId) -> QpId {
        match self.call(RequestBody::CreateQp(qp_request(pd, cq))) {
            Ok(ReplyBody::Qp { qp, .. }) => qp,
            other => panic!("{other:?}"),
        }
    }

    pub fn listener(&mut self) -> (ListenerId, std::net::SocketAddr) {
        let address = ([127, 0, 0, 1], 0).into();
        match self.call(RequestBody::Bind { address, context: 0 }) {
            Ok(ReplyBody::Listener { listener, address }) => (listener, address),
            other => panic!("{other:?}"),
        }
    }

    pub fn status(&mut self) -> StatusInfo {
        match self.call(RequestBody::Status) {
            Ok(ReplyBody::Status(status)) => status,
            other => panic!("{other:?}"),
        }
    }
}

pub fn reg_mr(pd: PdId, segment: SegmentId, length: u64) -> RequestBody {
    RequestBody::RegMr {
        pd,
        source: MrSource::Segment { segment, offset: 0 },
        length,
        iova: 0x1000,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
        scope: Scope::Pd,
    }
}

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
        no_receive: NoReceive::Terminate,
        context: 0,
    }
}

/// Memory as the client library would share it.
pub fn memfd(length: usize) -> OwnedFd {
    use rustix::fs::{MemfdFlags, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = memfd_create("test", flags).expect("memfd");
    let zeros = vec![0; length];
    let mut written = 0;
    while written < length {
        written += rustix::io::write(&memfd, &zeros[written..]).expect("write");
    }
    memfd
}
