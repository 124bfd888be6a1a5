//! One client's end of the control socket: from its Hello to its end, one request at a time.
//!
//! Length is checked before decoding, and that a descriptor is wanted before one is taken.
//! Nothing is read while an answer is owed or unread, so a client can neither reorder nor pile up.
//! The server drives it; it decides nothing about resources.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rnic_core::abi::control::{
    Hello, HelloReply, MAX_MESSAGE, Refusal, Reply, Request, RequestBody,
};
use rnic_core::types::{SessionId, Time};

use crate::events::EventSender;
use crate::packet::{self, Front, Outbox, OutgoingPacket};
use crate::privilege::Peer;
use crate::reaper::{Passed, PassedKind, Reaper};
use crate::resource::{Refused, Response};

/// A connected client, with or without a session, as the control thread serves it.
pub struct Connection {
    socket: OwnedFd,
    /// Process, user and groups of the client, as the kernel tells them.
    pub peer: Peer,
    /// How far it is.
    pub stage: Stage,
    outbox: Outbox,
    /// Its event channel, once it has a session.
    pub events: Option<Arc<EventSender>>,
    /// Whether a packet may wait in the socket.
    pub readable: bool,
    /// Whether it stands in the server's queue.
    pub queued: bool,
}

/// How far a client is: what is awaited.
#[expect(clippy::enum_variant_names, reason = "states say what is awaited")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its Hello is awaited.
    AwaitHello {
        /// Time at which a client that has sent none is turned away.
        deadline: Time,
    },
    /// A request is awaited.
    AwaitRequest(SessionId),
    /// The workers' acknowledgement is awaited, to answer a request.
    AwaitWorkers {
        /// Session of the client that asked.
        session: SessionId,
        /// Id of the request.
        request: u32,
    },
}

/// What came from a client.
#[derive(Debug)]
pub enum Incoming {
    /// Nothing to be done now.
    Nothing,
    /// Hello, the client's first packet.
    Hello(Hello),
    /// A request, with the descriptor that came with it if it carries one: a memfd, a socket, or
    /// what the client says is its memory, which nobody has touched. It lacks that if this process
    /// has no descriptor left.
    Request(Request, Option<Passed>),
    /// The connection has come to its end, and the session with it.
    End(End),
}

/// Why a client's session ends.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// The client closed its socket.
    #[error("closed by the client")]
    Closed,
    /// The client's process is gone, whoever holds its socket now.
    #[error("the process has exited")]
    Exited,
    /// The client broke the protocol of the control socket.
    #[error("malformed message: {0}")]
    Malformed(String),
    /// The client passed a descriptor while too many of its user's wait to be closed.
    #[error("passes descriptors faster than they can be closed: {0}")]
    Crowded(Refusal),
    /// No Hello came in time.
    #[error("said nothing")]
    Silent,
    /// The client broke the rules of shared memory.
    #[error("misbehaved: {0}")]
    Misbehaved(String),
    /// A call to the client's socket failed.
    #[error("control socket: {0}")]
    Failed(io::Error),
    /// The daemon stops and ends all sessions.
    #[error("the daemon stops")]
    Stopping,
}

impl End {
    /// What happened, without the particulars.
    pub fn kind(&self) -> &'static str {
        match self {
            End::Closed => "closed",
            End::Exited => "exited",
            End::Malformed(_) => "malformed",
            End::Misbehaved(_) => "misbehaved",
            End::Crowded(_) => "crowded",
            End::Silent => "silent",
            End::Failed(_) => "failed",
            End::Stopping => "stopping",
        }
    }

    /// Whether the client is to blame.
    pub fn is_hostile(&self) -> bool {
        matches!(self, End::Malformed(_) | End::Misbehaved(_) | End::Crowded(_) | End::Silent)
    }
}

impl Connection {
    /// A client that has just connected.
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

    /// Its session, if it has one.
    pub fn session(&self) -> Option<SessionId> {
        match self.stage {
            Stage::AwaitHello { .. } => None,
            Stage::AwaitRequest(session) | Stage::AwaitWorkers { session, .. } => Some(session),
        }
    }

    /// Takes the next packet, if it may be taken now. One with a descriptor is left where it is if
    /// `may_pass` refuses: there it costs nothing more, and it goes with the client.
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
                let why = format!("{len} bytes, at most {MAX_MESSAGE} are allowed");
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
                Incoming::Hello(hello.ok_or_else(|| malformed("no Hello of this protocol"))?)
            }
            _ => Incoming::Request(decode_request(bytes).map_err(End::Malformed)?, None),
        };
        let wanted = match &incoming {
            Incoming::Request(request, _) => Wanted::by(&request.body),
            _ => None,
        };
        match (wanted, descriptors, incoming) {
            (Some(wanted), true, Incoming::Request(request, _)) => {
                may_pass().map_err(End::Crowded)?;
                let descriptor = self.take_wanted(wanted, reaper).map_err(End::Malformed)?;
                Ok(Incoming::Request(request, descriptor))
            }
            (Some(wanted), false, _) => {
                Err(malformed(&format!("the descriptor of {} is missing", wanted.name())))
            }
            (None, true, _) => Err(malformed("a descriptor that nobody asked for")),
            (_, _, incoming) => {
                packet::take(self.socket.as_fd()).map_err(End::Failed)?;
                Ok(incoming)
            }
        }
    }

    /// Takes the front packet with its descriptor, which must be one of the wanted kind; every
    /// other is closed where closing may take for ever. None if the kernel dropped it because this
    /// process has no descriptor left, which is no fault of the client.
    fn take_wanted(&self, wanted: Wanted, reaper: &Reaper) -> Result<Option<Passed>, String> {
        let (descriptors, more) =
            packet::take_descriptors(self.socket.as_fd()).map_err(|e| e.to_string())?;
        if descriptors.is_empty() && more && self.socket.try_clone().is_err() {
            return Ok(None);
        }
        let descriptors = descriptors.into_iter().map(|d| Passed::new(d, self.peer.uid, reaper));
        let (mut right, others): (Vec<_>, Vec<_>) =
            descriptors.partition(|passed| wanted.is_met_by(passed.kind()));
        if right.len() == 1 && others.is_empty() && !more {
            return Ok(right.pop());
        }
        Err(match others.is_empty() {
            true => "one descriptor is expected, more came".to_owned(),
            false => format!("the descriptor is not {}", wanted.name()),
        })
    }

    /// Sends the reply to Hello with its descriptors.
    pub fn welcome(&mut self, reply: HelloReply, descriptors: Vec<OwnedFd>) -> io::Result<()> {
        let packet = OutgoingPacket { bytes: reply.to_bytes().to_vec(), descriptors };
        self.outbox.send(self.socket.as_fd(), packet)
    }

    /// Sends the reply to request `id`: what was done or a refusal.
    pub fn reply(&mut self, id: u32, result: Result<Response, Refused>) -> io::Result<()> {
        let (result, diagnosis_id, descriptors) = match result {
            Ok(Response { body, descriptors }) => (Ok(body), 0, descriptors),
            Err(Refused { refusal, diagnosis_id }) => (Err(refusal), diagnosis_id, Vec::new()),
        };
        let packet =
            OutgoingPacket { bytes: encode(Reply { id, result, diagnosis_id }), descriptors };
        self.outbox.send(self.socket.as_fd(), packet)
    }

    /// StagKind what ends this client, as the last thing it is told.
    pub fn complain(&mut self, refusal: Refusal, diagnosis_id: u64) {
        // The id, if there was one, is part of what may not be readable; and who has gone already
        // need not be told.
        let _ = self.reply(0, Err(Refused { refusal, diagnosis_id }));
    }

    /// Closes it, where that may take its time.
    pub fn close(self, reaper: &Reaper) {
        let Connection { socket, peer, outbox, events, .. } = self;
        let user = peer.uid;
        reaper.close_client(user, socket);
        reaper.drop_later(user, (peer, outbox, events));
    }

    /// Whether what waits is to be [flushed](Connection::flush) after a while, because nothing
    /// tells when it can be sent.
    pub fn is_to_be_tried_again(&self) -> bool {
        self.outbox.is_to_be_tried_again()
    }

    /// Sends what waited for the client to read.
    pub fn flush(&mut self) -> io::Result<()> {
        self.outbox.flush(self.socket.as_fd())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Answers the Hello of a client that is not served and of whom nothing is known.
pub fn turn_away(socket: BorrowedFd<'_>, reply: HelloReply) {
    let packet = OutgoingPacket { bytes: reply.to_bytes().to_vec(), descriptors: Vec::new() };
    // It is turned away whether or not it hears why.
    let _ = Outbox::default().send(socket, packet);
}

/// The kind of descriptor that a request carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// Of a shared buffer.
    Memfd,
    /// The client's `/proc/self/mem`.
    AddressSpace,
    /// Which kind of socket it is, and refuses others by name, is seen by whoever uses it.
    Socket,
}

impl Wanted {
    fn by(body: &RequestBody) -> Option<Self> {
        match body {
            RequestBody::AddSharedBuffer { .. } | RequestBody::FillSharedBuffer { .. } => {
                Some(Wanted::Memfd)
            }
            RequestBody::AttachMemory => Some(Wanted::AddressSpace),
            RequestBody::ConnectOver { .. } | RequestBody::ServeOver { .. } => Some(Wanted::Socket),
            _ => None,
        }
    }

    fn is_met_by(self, kind: PassedKind) -> bool {
        match self {
            Wanted::Memfd => kind == PassedKind::Memfd,
            // More than that cannot be asked here: it may be safe to do so, or not.
            Wanted::AddressSpace => true,
            Wanted::Socket => kind == PassedKind::Socket,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Wanted::Memfd => "a memfd",
            Wanted::AddressSpace => "the client's memory",
            Wanted::Socket => "a socket",
        }
    }
}

/// Reads a request; bytes after it are as bad as bytes missing.
fn decode_request(bytes: &[u8]) -> Result<Request, String> {
    match postcard::take_from_bytes::<Request>(bytes) {
        Ok((request, [])) => Ok(request),
        Ok((_, rest)) => Err(format!("{} bytes after the request", rest.len())),
        Err(error) => Err(format!("no request: {error}")),
    }
}

/// A reply's packet. Replies are bounded by their types and by pages; one that is longer all the
/// same, or that does not encode, becomes a refusal, which is short.
fn encode(reply: Reply) -> Vec<u8> {
    let id = reply.id;
    let encoded = postcard::to_stdvec(&reply).ok().filter(|bytes| bytes.len() <= MAX_MESSAGE);
    encoded.unwrap_or_else(|| {
        tracing::error!(id, "a reply does not fit a message");
        let refusal = Refusal::System {
            what: "cannot answer".to_owned(),
            error: "the reply does not fit a message".to_owned(),
            errno: crate::system::number(&rustix::io::Errno::MSGSIZE.into()),
        };
        postcard::to_stdvec(&Reply { id, result: Err(refusal), diagnosis_id: 0 })
            .unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use rnic_core::abi::control::{PAGE_ROWS, QpCounters, QpRow, ReplyBody, Rows};
    use rnic_core::types::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A client with a session, and its own end.
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
    fn nothing_is_taken_from_a_client_that_is_owed_an_answer_or_has_not_read_one() {
        let (mut connection, theirs) = connection();
        let (reaper, mut buffer) = (Reaper::without_threads(), [0; MAX_MESSAGE]);
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
    fn a_descriptor_of_a_user_with_too_many_stays_where_it_is() {
        let (mut connection, theirs) = connection();
        let (reaper, mut buffer) = (Reaper::without_threads(), [0; MAX_MESSAGE]);
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
    fn requests_are_read_whole_or_refused_at_every_cut() {
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
