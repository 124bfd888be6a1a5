//! Packets of the control socket, without blocking and without unwanted descriptors.
//!
//! A packet is first read with `MSG_PEEK` and without a control buffer. The kernel then reports
//! whether descriptors are attached, but installs none. A descriptor that is not installed need not
//! be closed by this process, and a close could block (a FUSE server decides when `close` returns).
//! A control buffer is used only for a request that carries a descriptor.

use std::collections::VecDeque;
use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rnic_abi::abi::control::MAX_MESSAGE;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// The front of the socket's queue.
#[derive(Debug, PartialEq, Eq)]
pub enum Front {
    /// No packet has arrived yet.
    Empty,
    /// A packet of this many bytes, of which at most [`MAX_MESSAGE`] are in the buffer.
    Packet {
        /// Bytes of the whole packet, which may be more than [`MAX_MESSAGE`].
        len: usize,
        /// Descriptors are attached.
        descriptors: bool,
    },
    /// The peer is gone, or sent an empty packet, which is not a message.
    End,
}

/// Reads the front packet and leaves it in the socket.
pub fn peek(socket: BorrowedFd<'_>, buffer: &mut [u8; MAX_MESSAGE]) -> io::Result<Front> {
    let flags = RecvFlags::PEEK | RecvFlags::TRUNC | RecvFlags::DONTWAIT;
    let mut none = RecvAncillaryBuffer::new(&mut []);
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut none, flags);
    match got {
        Ok(got) if got.bytes == 0 => Ok(Front::End),
        Ok(got) => Ok(Front::Packet {
            len: got.bytes,
            descriptors: got.flags.contains(ReturnFlags::CTRUNC),
        }),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Front::Empty),
        Err(Errno::CONNRESET) => Ok(Front::End),
        Err(error) => Err(error.into()),
    }
}

/// Shuts the socket down in both directions. Packets already sent still arrive.
pub fn shut(socket: BorrowedFd<'_>) {
    // Fails only if the peer is gone, which then sends nothing either.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Returns true if there is a packet, even an empty one. Afterwards all packets look as if
/// descriptors were attached, so that information is lost.
pub fn is_waiting(socket: BorrowedFd<'_>) -> bool {
    // With SO_PASSCRED every packet has control data, but the end of the stream has none.
    if rustix::net::sockopt::set_socket_passcred(socket, true).is_err() {
        return true;
    }
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    loop {
        let mut none = RecvAncillaryBuffer::new(&mut []);
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut none, flags) {
            Ok(got) => return got.flags.contains(ReturnFlags::CTRUNC),
            // CONNRESET is reported once, before the packets of the peer.
            Err(Errno::CONNRESET | Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Removes the front packet and drops its descriptors. A thread that must not block may not call
/// this for a packet with descriptors: dropping the last reference to a TCP socket takes as long as
/// its owner wants (`SO_LINGER`).
pub fn take(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut none = RecvAncillaryBuffer::new(&mut []);
    let flags = RecvFlags::DONTWAIT;
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut none, flags)?;
    Ok(())
}

/// Removes the front packet and returns its descriptors, and true if some were lost because this
/// process can have no more. The buffer has room for all descriptors of a packet, because the
/// kernel closes the others as [`take`] does.
pub fn take_descriptors(socket: BorrowedFd<'_>) -> io::Result<(Vec<OwnedFd>, bool)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_TAKEN))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, flags)?;
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(list) = message {
            descriptors.extend(list);
        }
    }
    Ok((descriptors, got.flags.contains(ReturnFlags::CTRUNC)))
}

/// A packet to send.
#[derive(Debug)]
pub struct OutgoingPacket {
    /// Bytes of the packet, sent by one call.
    pub bytes: Vec<u8>,
    /// Descriptors that the packet carries.
    pub descriptors: Vec<OwnedFd>,
}

impl OutgoingPacket {
    /// Tries to send it without blocking.
    fn send(&self, socket: BorrowedFd<'_>) -> io::Result<Sent> {
        let borrowed: Vec<BorrowedFd<'_>> = self.descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::Error::other("more descriptors than a packet can carry"));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let bytes = [IoSlice::new(&self.bytes)];
        match rustix::net::sendmsg(socket, &bytes, &mut ancillary, flags) {
            Ok(_) => Ok(Sent::Done),
            Err(Errno::AGAIN) => Ok(Sent::NoRoom),
            // TOOMANYREFS: clients of the daemon's user have left too many descriptors unread, in
            // any of their sockets.
            Err(Errno::INTR | Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS) => {
                Ok(Sent::NotNow)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Result of sending a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    /// The peer has it.
    Done,
    /// The peer must read first. Then the socket becomes writable.
    NoRoom,
    /// The kernel refuses for now, and no event reports when it would accept.
    NotNow,
}

/// Packets that wait for the peer to make room. Nothing more is read from the peer while packets
/// wait, so they are at most the replies to one request.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: VecDeque<OutgoingPacket>,
    /// No event reports when the packets can be sent.
    needs_retry: bool,
}

impl Outbox {
    /// Sends `packet`, or keeps it until [`Outbox::flush`].
    pub fn send(&mut self, socket: BorrowedFd<'_>, packet: OutgoingPacket) -> io::Result<()> {
        self.waiting.push_back(packet);
        self.flush(socket)
    }

    /// Sends waiting packets as far as the kernel accepts them.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.needs_retry = false;
        while let Some(packet) = self.waiting.front() {
            match packet.send(socket)? {
                Sent::Done => drop(self.waiting.pop_front()),
                Sent::NoRoom => break,
                Sent::NotNow => {
                    self.needs_retry = true;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Returns true if waiting packets need another [flush](Outbox::flush) after a pause, because
    /// no event reports when they can be sent.
    pub fn needs_retry(&self) -> bool {
        self.needs_retry
    }

    /// Returns true if all packets have been sent.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// Maximum descriptors to send with a packet: the arena, the event channel and one eventfd per
/// worker in the Hello reply.
const MAX_DESCRIPTORS: usize = 80;

/// `SCM_MAX_FD`, the kernel's maximum for one packet.
const MAX_TAKEN: usize = 253;

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap_or_else(|e| panic!("{e}"))
    }

    fn outgoing(bytes: &[u8], descriptors: usize) -> OutgoingPacket {
        let open = || std::fs::File::open("/dev/null").unwrap_or_else(|e| panic!("{e}")).into();
        OutgoingPacket {
            bytes: bytes.to_vec(),
            descriptors: (0..descriptors).map(|_| open()).collect(),
        }
    }

    #[test]
    fn peek_reports_length_and_descriptors() {
        let (a, b) = pair();
        let mut buffer = [0; MAX_MESSAGE];
        assert_eq!(peek(b.as_fd(), &mut buffer).ok(), Some(Front::Empty));
        let mut outbox = Outbox::default();
        for n in [0, 1, 5] {
            assert!(outbox.send(a.as_fd(), outgoing(b"hello", n)).is_ok());
        }
        let long = vec![7; MAX_MESSAGE + 100];
        assert!(outbox.send(a.as_fd(), outgoing(&long, 0)).is_ok());
        let packet = |len, descriptors| Some(Front::Packet { len, descriptors });

        assert_eq!(peek(b.as_fd(), &mut buffer).ok(), packet(5, false));
        assert_eq!(&buffer[..5], b"hello");
        assert!(take(b.as_fd()).is_ok());

        assert_eq!(peek(b.as_fd(), &mut buffer).ok(), packet(5, true));
        let (descriptors, more) = take_descriptors(b.as_fd()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((descriptors.len(), more), (1, false));

        assert_eq!(peek(b.as_fd(), &mut buffer).ok(), packet(5, true));
        let (descriptors, more) = take_descriptors(b.as_fd()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((descriptors.len(), more), (5, false));

        assert_eq!(peek(b.as_fd(), &mut buffer).ok(), packet(MAX_MESSAGE + 100, false));
        assert!(take(b.as_fd()).is_ok());
        drop(a);
        assert_eq!(peek(b.as_fd(), &mut buffer).ok(), Some(Front::End));
    }

    #[test]
    fn end_of_stream_differs_from_empty_packet() {
        for (bytes, descriptors) in [(b"x".as_slice(), 0), (b"", 0), (b"", 1)] {
            for gone in [false, true] {
                let (a, b) = pair();
                assert!(!is_waiting(b.as_fd()), "nothing was sent");
                assert!(Outbox::default().send(a.as_fd(), outgoing(bytes, descriptors)).is_ok());
                let mut a = Some(a);
                if gone {
                    // This end's packet stays unread, so the stream ends with a reset.
                    assert!(Outbox::default().send(b.as_fd(), outgoing(b"y", 0)).is_ok());
                    a = None;
                }
                shut(b.as_fd());
                assert!(is_waiting(b.as_fd()), "{bytes:?} {descriptors} {gone}");
                assert!(take(b.as_fd()).is_ok());
                assert!(!is_waiting(b.as_fd()), "{bytes:?} {descriptors} {gone}");
                drop(a);
            }
        }
    }

    #[test]
    fn unread_packets_wait_without_blocking() {
        let (a, b) = pair();
        let mut outbox = Outbox::default();
        let mut sent = 0;
        while outbox.is_empty() {
            assert!(outbox.send(a.as_fd(), outgoing(&[1; 4096], 0)).is_ok());
            sent += 1;
        }
        let mut buffer = [0; MAX_MESSAGE];
        let mut received = 0;
        while let Ok(Front::Packet { len, .. }) = peek(b.as_fd(), &mut buffer) {
            assert_eq!(len, 4096);
            assert!(take(b.as_fd()).is_ok());
            received += 1;
            assert!(outbox.flush(a.as_fd()).is_ok());
        }
        assert_eq!(sent, received);
        assert!(outbox.is_empty());
    }
}
