//! The control connection: a `SOCK_SEQPACKET` Unix socket with one request and one reply at a time.
//!
//! This module handles Hello, packets, descriptors and deadlines; [`crate::session`] interprets the
//! replies. A reply that misses its deadline ends the connection, because a late reply could carry
//! descriptors that no request expects any more.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::*;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, connect, recvmsg, sendmsg, shutdown, socket_with,
};

use crate::error::{AdmissionError, Error};
use crate::inbox::wait_readable;

/// Maximum number of descriptors in one packet (`SCM_MAX_FD`, unix(7)).
const MAX_DESCRIPTORS: usize = 253;

/// The client's end of the control socket.
pub(crate) struct Control {
    socket: OwnedFd,
    /// Maximum time for a reply.
    deadline: Duration,
    /// ID of the last request.
    last_id: u32,
    /// This end has closed the connection, which ends the session.
    closed: bool,
}

/// The daemon's Hello reply with its descriptors.
pub(crate) struct Welcome {
    pub(crate) reply: HelloReply,
    pub(crate) arena: OwnedFd,
    pub(crate) events: OwnedFd,
    /// One eventfd per worker.
    pub(crate) doorbells: Vec<OwnedFd>,
}

/// Connects to the socket at `path`. Sends nothing yet.
pub(crate) fn dial(path: &Path, deadline: Duration) -> io::Result<OwnedFd> {
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Limits `connect` and `sendmsg` if the daemon no longer reads.
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
    /// Sends Hello on a connected socket and reads the daemon's reply.
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
            // A daemon that refuses the session may have replied and closed already. The reply can
            // still be read.
            Ok(()) | Err(Error::DaemonGone) => {}
            Err(e) => return Err(e),
        }
        let mut space = [0; HELLO_LEN];
        let (packet, descriptors) = match control.receive(&mut space) {
            // The daemon closed without reading the Hello. The kernel reports this first, and only
            // once. An earlier reply can still be read.
            Err(Error::DaemonGone) => control.receive(&mut space)?,
            other => other?,
        };
        let reply = HelloReply::from_bytes(packet)
            .ok_or_else(|| Error::protocol("the first packet is not a Hello reply"))?;
        let why = match HelloStatus::from_u32(reply.status) {
            Some(HelloStatus::Ok) if reply.version == ABI_VERSION => {
                return Ok((control, welcome(reply, descriptors)?));
            }
            Some(HelloStatus::Ok | HelloStatus::Version) => {
                AdmissionError::Version { daemon: reply.version, ours: ABI_VERSION }
            }
            Some(HelloStatus::SessionLimit) => AdmissionError::SessionLimit,
            Some(HelloStatus::Stopping) => AdmissionError::Stopping,
            Some(HelloStatus::Resources) => AdmissionError::Resources,
            Some(HelloStatus::NotAllowed) => AdmissionError::NotAllowed,
            Some(HelloStatus::UserSessions) => AdmissionError::UserSessions,
            Some(HelloStatus::Draining) => AdmissionError::Draining,
            Some(HelloStatus::TooManyUnauthenticated) => AdmissionError::TooManyUnauthenticated,
            None => {
                return Err(Error::protocol(format!("unknown Hello status {}", reply.status)));
            }
        };
        Err(Error::NotAdmitted { path: path.into(), why })
    }

    /// Sends a request and waits for the reply.
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
                // Requests and replies no longer match.
                self.close();
                Err(e)
            }
        }
    }

    /// Closes the connection, which ends the session.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    /// Returns true if this end has closed the connection.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Exchanges one request and reply. Any error ends the connection.
    fn exchange(
        &mut self,
        request: &Request,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(Reply, Vec<OwnedFd>), Error> {
        let packet = postcard::to_stdvec(request)
            .map_err(|e| Error::protocol(format!("cannot encode a request: {e}")))?;
        self.send(&packet, descriptor)?;
        let mut space = [0; MAX_MESSAGE];
        let (packet, descriptors) = self.receive(&mut space)?;
        let reply: Reply = postcard::from_bytes(packet)
            .map_err(|e| Error::protocol(format!("cannot decode a reply: {e}")))?;
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
            // Cannot fail: the space fits exactly one descriptor.
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
                Err(Errno::AGAIN) => return Err(self.timed_out()),
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
                return Err(self.timed_out());
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

    fn timed_out(&self) -> Error {
        Error::TimedOut { what: "the daemon's reply; the session has ended" }
    }
}

/// Assigns the descriptors of a Hello reply: arena, event socket and one doorbell eventfd per
/// worker.
fn welcome(reply: HelloReply, descriptors: Vec<OwnedFd>) -> Result<Welcome, Error> {
    let given = descriptors.len();
    let wanted = 2 + usize::from(reply.workers);
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
