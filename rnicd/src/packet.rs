//! One packet of the control socket, without ever blocking and without taking descriptors that
//! nobody asked for.
//!
//! A packet is first looked at without a control buffer: the kernel then says whether descriptors
//! are attached but hands out none, and what is never installed is never closed by us either,
//! which could block (a FUSE server decides when `close` returns). Only for a request that
//! carries a descriptor is there a control buffer.

use std::collections::VecDeque;
use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rnic_core::abi::control::MAX_MESSAGE;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// What waits at the front of the socket.
#[derive(Debug, PartialEq, Eq)]
pub enum Front {
    /// No packet has arrived yet.
    Empty,
    /// A packet of this many bytes, of which at most [`MAX_MESSAGE`] are in the buffer.
    Packet {
        /// Bytes of the whole packet, which may be more than [`MAX_MESSAGE`].
        len: usize,
        /// Whether descriptors are attached.
        descriptors: bool,
    },
    /// The peer has gone (or sent an empty packet, which is no message).
    End,
}

/// Looks at the front packet and leaves it there.
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

/// Lets nothing more pass, either way. What was sent before still arrives.
pub fn shut(socket: BorrowedFd<'_>) {
    // It fails only if there is no peer any more, from whom nothing comes either.
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

/// Whether there is a packet, be it an empty one. What it carries stays unknown: afterwards all
/// packets look as if descriptors were attached.
pub fn is_waiting(socket: BorrowedFd<'_>) -> bool {
    // With this every packet has something for a control buffer, and the end of the stream has not.
    if rustix::net::sockopt::set_socket_passcred(socket, true).is_err() {
        return true;
    }
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    loop {
        let mut none = RecvAncillaryBuffer::new(&mut []);
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut none, flags) {
            Ok(got) => return got.flags.contains(ReturnFlags::CTRUNC),
            // Told once, before what the peer sent.
            Err(Errno::CONNRESET | Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Takes the front packet away, without its descriptors, of which the last ones are closed
/// thereby. A packet with descriptors is not for a thread that may not wait: closing a TCP socket
/// takes as long as its owner wants (`SO_LINGER`).
pub fn take(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut none = RecvAncillaryBuffer::new(&mut []);
    let flags = RecvFlags::DONTWAIT;
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut none, flags)?;
    Ok(())
}

/// Takes the front packet away and returns its descriptors, and whether there were more than this
/// process can have. There is room for all that a packet carries, because the kernel closes the
/// others as [`take`] does.
pub fn take_descriptors(socket: BorrowedFd<'_>) -> io::Result<(Vec<OwnedFd>, bool)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_TAKEN))];
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
    /// Bytes of the packet, which one call sends.
    pub bytes: Vec<u8>,
    /// Descriptors that go with it.
    pub descriptors: Vec<OwnedFd>,
}

impl OutgoingPacket {
    /// Sends it, if that is possible now.
    fn send(&self, socket: BorrowedFd<'_>) -> io::Result<Sent> {
        let borrowed: Vec<BorrowedFd<'_>> = self.descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::Error::other("more descriptors than a packet carries"));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let bytes = [IoSlice::new(&self.bytes)];
        match rustix::net::sendmsg(socket, &bytes, &mut ancillary, flags) {
            Ok(_) => Ok(Sent::Done),
            Err(Errno::AGAIN) => Ok(Sent::NoRoom),
            // TOOMANYREFS: clients of the daemon's user, any of them, have left too many
            // descriptors unread.
            Err(Errno::INTR | Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS) => {
                Ok(Sent::NotNow)
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// What became of a packet that was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    /// The peer has it.
    Done,
    /// The peer must read first; then the socket becomes writable.
    NoRoom,
    /// The system refuses for now; nothing tells when it would not.
    NotNow,
}

/// Packets the peer has not had room for. Nothing more is read from a peer while any wait, which
/// bounds it to the answers of one request.
#[derive(Debug, Default)]
pub struct Outbox {
    waiting: VecDeque<OutgoingPacket>,
    /// Nothing will tell when they can be sent.
    untold: bool,
}

impl Outbox {
    /// Sends `packet`, or keeps it until [`Outbox::flush`].
    pub fn send(&mut self, socket: BorrowedFd<'_>, packet: OutgoingPacket) -> io::Result<()> {
        self.waiting.push_back(packet);
        self.flush(socket)
    }

    /// Sends what can be sent.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.untold = false;
        while let Some(packet) = self.waiting.front() {
            match packet.send(socket)? {
                Sent::Done => drop(self.waiting.pop_front()),
                Sent::NoRoom => break,
                Sent::NotNow => {
                    self.untold = true;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whether packets wait that are to be [flushed](Outbox::flush) after a while: the socket does
    /// not tell when.
    pub fn is_to_be_tried_again(&self) -> bool {
        self.untold
    }

    /// Whether everything has been sent.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

/// Most descriptors of one packet: the Hello reply's arena, channel and one eventfd per worker.
const MOST_DESCRIPTORS: usize = 80;

/// `SCM_MAX_FD`, the most that the kernel lets a packet carry.
const MOST_TAKEN: usize = 253;

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
    fn looking_tells_length_and_descriptors_without_taking_them() {
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
    fn the_end_is_told_from_packets_that_look_like_it() {
        for (bytes, descriptors) in [(b"x".as_slice(), 0), (b"", 0), (b"", 1)] {
            for gone in [false, true] {
                let (a, b) = pair();
                assert!(!is_waiting(b.as_fd()), "nothing was sent");
                assert!(Outbox::default().send(a.as_fd(), outgoing(bytes, descriptors)).is_ok());
                let mut a = Some(a);
                if gone {
                    // With a packet of ours unread, so that the end is a reset.
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
    fn a_peer_that_does_not_read_is_waited_for_without_blocking() {
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
