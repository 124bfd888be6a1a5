//! A client's connection to the control socket, from its Hello to its end. It has one request at a
//! time.
//!
//! The length is checked before a packet is decoded, and the request before a descriptor is taken.
//! Nothing is read while a reply is pending, so a client can neither reorder requests nor queue
//! them in the daemon. The server drives it; the resource manager executes the requests.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rnic_abi::abi::control::{
    DescriptorKind, Hello, HelloReply, MAX_MESSAGE, Refusal, Reply, Request,
};
use rnic_abi::types::{SessionId, Time};

use crate::events::EventSender;
use crate::packet::{self, Front, Outbox, OutgoingPacket};
use crate::privilege::Peer;
use crate::reaper::{Passed, PassedKind, Reaper};
use crate::resource::{Refused, Response};

/// A connected client, with or without a session.
pub struct Connection {
    socket: OwnedFd,
    /// Process, user and groups of the client, from the kernel.
    pub peer: Peer,
    /// Current stage.
    pub stage: Stage,
    outbox: Outbox,
    /// Event channel of the session, if there is one.
    pub events: Option<Arc<EventSender>>,
    /// A packet may wait in the socket.
    pub readable: bool,
    /// The client is in the server's queue.
    pub queued: bool,
}

/// Event that a client's connection waits for.
#[expect(clippy::enum_variant_names, reason = "states are named after the awaited event")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its Hello.
    AwaitHello {
        /// Time at which a client without a Hello is rejected.
        deadline: Time,
    },
    /// A request.
    AwaitRequest(SessionId),
    /// The deferred answer to a request.
    AwaitWorkers {
        /// Session of the client.
        session: SessionId,
        /// Id of the request.
        request: u32,
    },
}

/// Input from a client.
#[derive(Debug)]
pub enum Incoming {
    /// Nothing to do now.
    Nothing,
    /// Hello, the client's first packet.
    Hello(Hello),
    /// A request and its descriptor: a memfd, a socket, or the client's memory. Only the
    /// descriptor's kind was checked. `None` if the request has no descriptor, or if the kernel
    /// dropped it because this process has too many.
    Request(Request, Option<Passed>),
    /// The connection has ended, and the session with it.
    End(End),
}

/// Reasons for the end of a client's session.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// The client closed its socket.
    #[error("closed by the client")]
    Closed,
    /// The client's process has exited, even if another process still has its socket.
    #[error("the process has exited")]
    Exited,
    /// The client violated the protocol of the control socket.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// The client passed a descriptor while too many descriptors of its user wait to be closed.
    #[error("passed descriptors faster than the daemon can close them: {0}")]
    Crowded(Refusal),
    /// No Hello before the deadline.
    #[error("sent no Hello in time")]
    Silent,
    /// The client violated the rules of shared memory.
    #[error("misbehaved: {0}")]
    Misbehaved(String),
    /// A fault rule ended the session.
    #[error("{0}")]
    Injected(String),
    /// A call on the client's socket failed.
    #[error("control socket: {0}")]
    Failed(io::Error),
    /// The daemon stops and ends all sessions.
    #[error("daemon shutdown")]
    Stopping,
}

impl End {
    /// Returns the kind of end, without details.
    pub fn kind(&self) -> &'static str {
        match self {
            End::Closed => "closed",
            End::Exited => "exited",
            End::Malformed(_) => "malformed",
            End::Misbehaved(_) => "misbehaved",
            End::Injected(_) => "injected",
            End::Crowded(_) => "crowded",
            End::Silent => "silent",
            End::Failed(_) => "failed",
            End::Stopping => "stopping",
        }
    }

    /// Returns true if the client caused the end by violating the protocol or a limit.
    pub fn is_hostile(&self) -> bool {
        matches!(self, End::Malformed(_) | End::Misbehaved(_) | End::Crowded(_) | End::Silent)
    }
}

impl Connection {
    /// Creates a client that has just connected.
    pub fn new(socket: OwnedFd, peer: Peer, deadline: Time) -> Self {
        Connection {
            socket,
            peer,
            stage: Stage::AwaitHello { deadline },
            outbox: Outbox::default(),
            events: None,
            readable: true,
            queued: false,
        }
    }

    /// Returns the client's session, if it has one.
    pub fn session(&self) -> Option<SessionId> {
        match self.stage {
            Stage::AwaitHello { .. } => None,
            Stage::AwaitRequest(session) | Stage::AwaitWorkers { session, .. } => Some(session),
        }
    }

    /// Takes the next packet, if the stage allows it. A packet with a descriptor stays unread if
    /// `may_pass` refuses: its descriptor costs nothing more and is closed with the socket.
    pub fn receive(
        &mut self,
        buffer: &mut [u8; MAX_MESSAGE],
        reaper: &Reaper,
        may_pass: impl FnOnce() -> Result<(), Refusal>,
    ) -> Incoming {
        let busy = matches!(self.stage, Stage::AwaitWorkers { .. }) || !self.outbox.is_empty();
        if busy || !self.readable {
            return Incoming::Nothing;
        }
        let front = match packet::peek(self.socket.as_fd(), buffer) {
            Ok(front) => front,
            Err(error) => return Incoming::End(End::Failed(error)),
        };
        let (len, descriptors) = match front {
            Front::Empty => {
                self.readable = false;
                return Incoming::Nothing;
            }
            Front::End => return Incoming::End(End::Closed),
            Front::Packet { len, descriptors } => (len, descriptors),
        };
        let taken = match buffer.get(..len) {
            Some(bytes) => self.decode(bytes, descriptors, reaper, may_pass),
            None => {
                let why = format!("{len} bytes, but the maximum is {MAX_MESSAGE}");
                Err(End::Malformed(why))
            }
        };
        taken.unwrap_or_else(Incoming::End)
    }

    fn decode(
        &self,
        bytes: &[u8],
        descriptors: bool,
        reaper: &Reaper,
        may_pass: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<Incoming, End> {
        let malformed = |why: &str| End::Malformed(why.to_owned());
        let incoming = match self.stage {
            Stage::AwaitHello { .. } => {
                let hello = Hello::from_bytes(bytes);
                Incoming::Hello(hello.ok_or_else(|| malformed("not a Hello of this protocol"))?)
            }
            _ => Incoming::Request(decode_request(bytes).map_err(End::Malformed)?, None),
        };
        let wanted = match &incoming {
            Incoming::Request(request, _) => request.body.info().descriptor,
            _ => None,
        };
        match (wanted, descriptors, incoming) {
            (Some(wanted), true, Incoming::Request(request, _)) => {
                may_pass().map_err(End::Crowded)?;
                let descriptor = self.take_wanted(wanted, reaper).map_err(End::Malformed)?;
                Ok(Incoming::Request(request, descriptor))
            }
            (Some(wanted), false, _) => {
                Err(malformed(&format!("the descriptor of {} is missing", name_of(wanted))))
            }
            (None, true, _) => Err(malformed("an unexpected descriptor")),
            (_, _, incoming) => {
                packet::take(self.socket.as_fd()).map_err(End::Failed)?;
                Ok(incoming)
            }
        }
    }

    /// Takes the first packet with its descriptor, which must be of the wanted kind. Passes other
    /// descriptors to the reaper, because closing them may block forever. Returns `None` if the
    /// kernel dropped the descriptor because this process had none left, which is not the client's
    /// fault.
    fn take_wanted(
        &self,
        wanted: DescriptorKind,
        reaper: &Reaper,
    ) -> Result<Option<Passed>, String> {
        let (descriptors, more) =
            packet::take_descriptors(self.socket.as_fd()).map_err(|e| e.to_string())?;
        if descriptors.is_empty() && more && self.socket.try_clone().is_err() {
            return Ok(None);
        }
        let descriptors = descriptors.into_iter().map(|d| Passed::new(d, self.peer.uid, reaper));
        let (mut right, others): (Vec<_>, Vec<_>) =
            descriptors.partition(|passed| is_wanted(wanted, passed.kind()));
        if right.len() == 1 && others.is_empty() && !more {
            return Ok(right.pop());
        }
        Err(if others.is_empty() {
            "more than one descriptor".to_owned()
        } else {
            format!("the descriptor is not {}", name_of(wanted))
        })
    }

    /// Sends the reply to Hello with its descriptors.
    pub fn welcome(&mut self, reply: HelloReply, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let packet = OutgoingPacket { bytes: reply.to_bytes().to_vec(), descriptors };
        self.outbox.send(self.socket.as_fd(), packet)
    }

    /// Sends the reply to request `id`: a response or a refusal.
    pub fn reply(&mut self, id: u32, result: Result<Response, Refused>) -> io::Result<()> {
        let (result, diagnosis_id, descriptors) = match result {
            Ok(Response { body, descriptors }) => (Ok(body), 0, descriptors),
            Err(Refused { refusal, diagnosis_id }) => (Err(refusal), diagnosis_id, Vec::new()),
        };
        let packet =
            OutgoingPacket { bytes: encode(Reply { id, result, diagnosis_id }), descriptors };
        self.outbox.send(self.socket.as_fd(), packet)
    }

    /// Sends the reason for the client's end, as its last message.
    pub fn send_last_refusal(&mut self, refusal: Refusal, diagnosis_id: u64) {
        // The request may be unreadable, so its id is unknown. The client may be gone, so errors
        // are ignored.
        let _ = self.reply(0, Err(Refused { refusal, diagnosis_id }));
    }

    /// Closes all descriptors through the reaper, because a close may block.
    pub fn close(self, reaper: &Reaper) {
        let Connection { socket, peer, outbox, events, .. } = self;
        let user = peer.uid;
        reaper.close_client(user, socket);
        reaper.drop_later(user, (peer, outbox, events));
    }

    /// Returns true if pending packets need another [flush](Connection::flush) after a pause,
    /// because no event reports when they can be sent.
    pub fn needs_retry(&self) -> bool {
        self.outbox.needs_retry()
    }

    /// Sends packets that waited for the client to read.
    pub fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(self.socket.as_fd())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends a Hello reply to a client rejected before its identity is known.
pub fn reject_client(socket: BorrowedFd<'_>, reply: HelloReply) {
    let packet = OutgoingPacket { bytes: reply.to_bytes().to_vec(), descriptors: Vec::new() };
    // The client is rejected even if the reply cannot be sent.
    let _ = Outbox::default().send(socket, packet);
}

/// Returns true if a descriptor is of the kind that a request needs. Requests with a socket check
/// later that it is TCP. Any kind may be an address space: a call on a descriptor of an untrusted
/// user can block, so `AttachMemory` checks it, and only for trusted users.
fn is_wanted(wanted: DescriptorKind, kind: PassedKind) -> bool {
    match wanted {
        DescriptorKind::Memfd => kind == PassedKind::Memfd,
        DescriptorKind::AddressSpace => true,
        DescriptorKind::Socket => kind == PassedKind::Socket,
    }
}

fn name_of(wanted: DescriptorKind) -> &'static str {
    match wanted {
        DescriptorKind::Memfd => "a memfd",
        DescriptorKind::AddressSpace => "the client's memory",
        DescriptorKind::Socket => "a socket",
    }
}

/// Decodes a request. Trailing bytes are an error, as are missing ones.
fn decode_request(bytes: &[u8]) -> Result<Request, String> {
    match postcard::take_from_bytes::<Request>(bytes) {
        Ok((request, [])) => Ok(request),
        Ok((_, rest)) => Err(format!("{} bytes after the request", rest.len())),
        Err(error) => Err(format!("invalid request: {error}")),
    }
}

/// Encodes a reply. Types and listing pages bound it. If it is too long or cannot be encoded, a
/// short refusal replaces it.
fn encode(reply: Reply) -> Vec<u8> {
    let id = reply.id;
    let encoded = postcard::to_stdvec(&reply).ok().filter(|bytes| bytes.len() <= MAX_MESSAGE);
    encoded.unwrap_or_else(|| {
        tracing::error!(id, "a reply does not fit in a message");
        let refusal = Refusal::System {
            what: "cannot send the reply".to_owned(),
            error: "the reply does not fit in a message".to_owned(),
            errno: crate::system::number(&rustix::io::Errno::MSGSIZE.into()),
        };
        postcard::to_stdvec(&Reply { id, result: Err(refusal), diagnosis_id: 0 })
            .unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use rnic_abi::abi::control::{PAGE_ROWS, QpCounters, QpRow, ReplyBody, RequestBody, Rows};
    use rnic_abi::types::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A client with a session, and its own end of the socket.
    fn connection() -> (Connection, OwnedFd) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap_or_else(|e| panic!("{e}"));
        let peer = Peer::of(ours.as_fd()).unwrap_or_else(|e| panic!("{e}"));
        let mut connection = Connection::new(ours, peer, Time(0));
        connection.stage = Stage::AwaitRequest(SessionId(1));
        (connection, theirs)
    }

    fn ask(socket: &OwnedFd, body: RequestBody, descriptors: Vec<OwnedFd>) {
        let bytes = postcard::to_stdvec(&Request { id: 7, body }).unwrap_or_default();
        let packet = OutgoingPacket { bytes, descriptors };
        assert!(Outbox::default().send(socket.as_fd(), packet).is_ok());
    }

    #[test]
    fn no_request_is_read_while_a_reply_is_pending() {
        let (mut connection, theirs) = connection();
        let reaper = Reaper::without_threads();
        let mut buffer = [0; MAX_MESSAGE];
        ask(&theirs, RequestBody::Status, Vec::new());
        let session = SessionId(1);
        connection.stage = Stage::AwaitWorkers { session, request: 7 };
        let got = connection.receive(&mut buffer, &reaper, || Ok(()));
        assert!(matches!(got, Incoming::Nothing), "{got:?}");
        connection.stage = Stage::AwaitRequest(session);
        while connection.outbox.is_empty() {
            assert!(connection.reply(7, Ok(ReplyBody::Done.into())).is_ok());
        }
        let got = connection.receive(&mut buffer, &reaper, || Ok(()));
        assert!(matches!(got, Incoming::Nothing), "{got:?}");
        while packet::take(theirs.as_fd()).is_ok() {}
        assert!(connection.flush().is_ok());
        let got = connection.receive(&mut buffer, &reaper, || Ok(()));
        assert!(matches!(got, Incoming::Request(Request { id: 7, .. }, None)), "{got:?}");
    }

    #[test]
    fn refused_descriptor_stays_in_the_socket() {
        let (mut connection, theirs) = connection();
        let reaper = Reaper::without_threads();
        let mut buffer = [0; MAX_MESSAGE];
        let memfd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC);
        let memfd = memfd.unwrap_or_else(|e| panic!("{e}"));
        ask(&theirs, RequestBody::AddSharedBuffer { length: 4096 }, vec![memfd]);
        let refused =
            || Err(Refusal::Limit { key: "closing".into(), limit: 1, used: 1, wanted: 1 });
        let got = connection.receive(&mut buffer, &reaper, refused);
        assert!(matches!(got, Incoming::End(End::Crowded(_))), "{got:?}");
        let front = packet::peek(connection.as_fd(), &mut buffer);
        assert!(matches!(front, Ok(Front::Packet { descriptors: true, .. })), "{front:?}");
        let got = connection.receive(&mut buffer, &reaper, || Ok(()));
        assert!(matches!(got, Incoming::Request(_, Some(_))), "{got:?}");
    }

    #[test]
    fn truncated_requests_are_refused() {
        let request =
            Request { id: 300, body: RequestBody::OpenPd { name: Some("shared".to_owned()) } };
        let bytes = postcard::to_stdvec(&request).unwrap_or_default();
        for cut in 0..bytes.len() {
            assert!(decode_request(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        assert_eq!(decode_request(&bytes), Ok(request));
        let longer = [bytes.as_slice(), &[0]].concat();
        assert_eq!(decode_request(&longer), Err("1 bytes after the request".to_owned()));
    }

    #[test]
    fn a_page_of_the_longest_rows_fits_a_message() {
        let all = u64::MAX;
        let address = std::net::SocketAddr::from(([0xFFFF; 8], u16::MAX));
        let row = QpRow {
            srq: Some(SrqId(u32::MAX)),
            qp: QpId(u32::MAX),
            kind: QpType::Ud,
            session: SessionId(u32::MAX),
            pd: PdId(u32::MAX),
            state: QpState::Error,
            path: "direct".to_owned(),
            addresses: Some(AddressPair { local: address, peer: address }),
            worker: Some(u32::MAX),
            ird: u16::MAX,
            ord: u16::MAX,
            counters: QpCounters {
                sends_completed: all,
                receives_completed: all,
                bytes_sent: all,
                bytes_received: all,
                segments_sent: all,
                segments_received: all,
                reads_answered: all,
                errors: all,
                dropped: all,
            },
            terminate: Some((
                TerminateOrigin::Peer,
                TerminateCode { layer: 255, etype: 255, code: 255 },
            )),
            remote_qp: Some(QpId(u32::MAX)),
            rq_psn: u32::MAX,
            sq_psn: u32::MAX,
        };
        let rows = Rows::Qps(vec![row; PAGE_ROWS]);
        let reply = Reply {
            id: u32::MAX,
            result: Ok(ReplyBody::Rows { rows, total: u32::MAX, next: u64::MAX }),
            diagnosis_id: 0,
        };
        let bytes = encode(reply.clone());
        assert_eq!(postcard::from_bytes::<Reply>(&bytes).ok(), Some(reply));
    }
}
