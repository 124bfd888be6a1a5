//! The control connection: a `SOCK_SEQPACKET` Unix socket with one request and one reply at a time.
//!
//! Knows Hello, packets, descriptors and deadlines; what requests mean is the business of
//! [`crate::session`]. A reply that does not come within the deadline ends the connection, because
//! a late one could carry descriptors that nobody would expect any more.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::*;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, connect, recvmsg, sendmsg, shutdown, socket_with,
};

use crate::error::{Admission, Error};
use crate::inbox::wait_readable;

/// Most descriptors the kernel passes with one packet (`SCM_MAX_FD`, unix(7)).
const MAX_DESCRIPTORS: usize = 253;

/// Our end of the control socket.
pub(crate) struct Control {
    socket: OwnedFd,
    /// How long a reply may take.
    deadline: Duration,
    /// Id of the last request.
    last_id: u32,
    /// Nothing more can be asked.
    closed: bool,
}

/// A welcome, with what came along.
pub(crate) struct Welcome {
    pub(crate) reply: HelloReply,
    pub(crate) arena: OwnedFd,
    pub(crate) events: OwnedFd,
    /// One eventfd per worker.
    pub(crate) doorbells: Vec<OwnedFd>,
}

/// Connects to the socket at `path`; says nothing yet.
pub(crate) fn dial(path: &Path, deadline: Duration) -> io::Result<OwnedFd> {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Bounds `connect` and `sendmsg` against a daemon that no longer reads.
    set_socket_timeout(&socket, Timeout::Send, Some(deadline.max(Duration::from_millis(1))))?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        match connect(&socket, &address) {
            Err(Errno::INTR) => {}
            other => return other.map(|()| socket).map_err(Into::into),
        }
    }
}

impl Control {
    /// Says hello on a connected socket and reads the daemon's answer.
    pub(crate) fn open(
        socket: OwnedFd,
        deadline: Duration,
        path: &Path,
    ) -> Result<(Control, Welcome), Error> {
        let control = Control { socket, deadline, last_id: 0, closed: false };
        let hello = Hello {
            min_version: ABI_VERSION,
            max_version: ABI_VERSION,
            features: Features::DIRECT_PATH.bits(),
        };
        match control.send(&hello.to_bytes(), None) {
            // A daemon that refuses may have answered and hung up already: its reason still waits.
            Ok(()) | Err(Error::DaemonGone) => {}
            Err(e) => return Err(e),
        }
        let mut space = [0; HELLO_LEN];
        let (packet, descriptors) = match control.receive(&mut space) {
            // It hung up without having read our Hello, which the kernel tells first, and once: an
            // answer it gave before is still there.
            Err(Error::DaemonGone) => control.receive(&mut space)?,
            other => other?,
        };
        let reply = HelloReply::from_bytes(packet)
            .ok_or_else(|| Error::protocol("its first packet is no Hello reply"))?;
        let why = match HelloStatus::from_u32(reply.status) {
            Some(HelloStatus::Ok) if reply.version == ABI_VERSION => {
                return Ok((control, welcome(reply, descriptors)?));
            }
            Some(HelloStatus::Ok | HelloStatus::Version) => {
                Admission::Version { daemon: reply.version, ours: ABI_VERSION }
            }
            Some(HelloStatus::SessionLimit) => Admission::SessionLimit,
            Some(HelloStatus::Stopping) => Admission::Stopping,
            Some(HelloStatus::Resources) => Admission::Resources,
            Some(HelloStatus::NotAllowed) => Admission::NotAllowed,
            Some(HelloStatus::UserSessions) => Admission::UserSessions,
            Some(HelloStatus::Draining) => Admission::Draining,
            Some(HelloStatus::Silent) => Admission::Silent,
            None => {
                return Err(Error::protocol(format!("unknown Hello status {}", reply.status)));
            }
        };
        Err(Error::NotAdmitted { path: path.into(), why })
    }

    /// Asks and waits for the answer.
    pub(crate) fn request(
        &mut self,
        body: RequestBody,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(ReplyBody, Vec<OwnedFd>), Error> {
        if self.closed {
            return Err(Error::DaemonGone);
        }
        self.last_id = self.last_id.wrapping_add(1);
        let id = self.last_id;
        let answer = self.exchange(&Request { id, body }, descriptor);
        match answer {
            Ok((reply, descriptors)) => match reply.result {
                Ok(body) => Ok((body, descriptors)),
                Err(refusal) => Err(Error::Refused { refusal, diagnosis_id: reply.diagnosis_id }),
            },
            Err(e) => {
                // Request and reply are out of step for good.
                self.give_up();
                Err(e)
            }
        }
    }

    /// Gives the connection up: the daemon ends the session.
    pub(crate) fn give_up(&mut self) {
        self.closed = true;
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Whether the connection has been given up.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// One request and its reply. Errors are those of the connection.
    fn exchange(
        &mut self,
        request: &Request,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(Reply, Vec<OwnedFd>), Error> {
        let packet = postcard::to_stdvec(request)
            .map_err(|e| Error::protocol(format!("a request did not encode: {e}")))?;
        self.send(&packet, descriptor)?;
        let mut space = [0; MAX_MESSAGE];
        let (packet, descriptors) = self.receive(&mut space)?;
        let reply: Reply = postcard::from_bytes(packet)
            .map_err(|e| Error::protocol(format!("a reply did not decode: {e}")))?;
        if reply.id != request.id {
            let why = format!("reply {} to request {}", reply.id, request.id);
            return Err(Error::protocol(why));
        }
        Ok((reply, descriptors))
    }

    fn send(&self, packet: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let passed = descriptor.as_slice();
        if !passed.is_empty() {
            // The space was made for exactly this one descriptor.
            ancillary.push(SendAncillaryMessage::ScmRights(passed));
        }
        loop {
            match sendmsg(
                &self.socket,
                &[IoSlice::new(packet)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            ) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(self.late()),
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                    return Err(Error::DaemonGone);
                }
                Err(e) => return Err(Error::io("sending to the daemon", e)),
            }
        }
    }

    fn receive<'b>(&self, space: &'b mut [u8]) -> Result<(&'b [u8], Vec<OwnedFd>), Error> {
        let deadline = Instant::now().checked_add(self.deadline);
        let mut rights = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut rights);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = loop {
            if !wait_readable(self.socket.as_fd(), deadline)? {
                return Err(self.late());
            }
            let mut parts = [IoSliceMut::new(space)];
            match recvmsg(&self.socket, &mut parts, &mut ancillary, flags) {
                Ok(received) => break received,
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(Errno::CONNRESET) => return Err(Error::DaemonGone),
                Err(e) => return Err(Error::io("receiving from the daemon", e)),
            }
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                descriptors.extend(passed);
            }
        }
        if received.bytes == 0 {
            return Err(Error::DaemonGone);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            // The usual cause is our own limit on open files (unix(7)).
            return Err(Error::io("receiving descriptors from the daemon", Errno::MFILE));
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(Error::protocol("an oversized packet"));
        }
        Ok((&space[..received.bytes], descriptors))
    }

    fn late(&self) -> Error {
        Error::TimedOut { what: "the daemon's reply; the session is given up" }
    }
}

/// Sorts the descriptors of a welcome.
fn welcome(reply: HelloReply, descriptors: Vec<OwnedFd>) -> Result<Welcome, Error> {
    let (given, wanted) = (descriptors.len(), 2 + usize::from(reply.workers));
    let mut descriptors = descriptors.into_iter();
    let (Some(arena), Some(events)) = (descriptors.next(), descriptors.next()) else {
        return Err(Error::protocol(format!("{given} descriptors with Hello, not {wanted}")));
    };
    if given != wanted || reply.workers == 0 {
        let why = format!("{given} descriptors with Hello for {} workers", reply.workers);
        return Err(Error::protocol(why));
    }
    Ok(Welcome { reply, arena, events, doorbells: descriptors.collect() })
}
