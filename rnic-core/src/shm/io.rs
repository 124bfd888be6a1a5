//! System calls that move octets between a socket and shared memory without a private copy.
//!
//! `IoSlice` would need references to foreign memory, so the vectors are built from raw pointers
//! here. Every call is made with `MSG_DONTWAIT | MSG_NOSIGNAL`: a socket that a client can also
//! reach may have lost its `O_NONBLOCK` by now.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use super::Mapping;

/// Pieces that one call takes; what is beyond is left for the next call, like a short write.
pub const MAX_PIECES: usize = 256;

/// Octets to send.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// In private memory.
    Private(&'a [u8]),
    /// In shared memory.
    Shared {
        /// Where.
        mapping: &'a Mapping,
        /// First octet.
        offset: usize,
        /// Octets.
        len: usize,
    },
}

/// Room for octets to receive.
#[derive(Debug)]
pub enum PieceMut<'a> {
    /// In private memory.
    Private(&'a mut [u8]),
    /// In shared memory.
    Shared {
        /// Where.
        mapping: &'a Mapping,
        /// First octet.
        offset: usize,
        /// Octets.
        len: usize,
    },
}

/// Sends the pieces in order; how many octets the socket took.
///
/// `InvalidInput`: a piece is not within its mapping, nothing was sent. `EFAULT`: a page of a shared
/// piece is gone, and the mappings of this call are poisoned (they are all of one session).
pub fn send_pieces(fd: impl AsFd, pieces: &[Piece<'_>]) -> io::Result<usize> {
    let mut vectors = Vectors::new();
    for piece in pieces.iter().take(MAX_PIECES) {
        match *piece {
            Piece::Private(octets) => vectors.push(octets.as_ptr().cast_mut(), octets.len()),
            Piece::Shared { mapping, offset, len } => vectors.push_shared(mapping, offset, len)?,
        }
    }
    let message = vectors.message();
    // SAFETY: the message and its vectors live until the call returns; the vectors cover private
    // octets that are borrowed for the call and ranges of live mappings, all valid for reading; the
    // kernel does not write through them. That others write the shared ones meanwhile changes what
    // is sent and nothing else.
    let sent = unsafe { libc::sendmsg(fd.as_fd().as_raw_fd(), &message, FLAGS) };
    finish(sent, || {
        for piece in pieces {
            if let Piece::Shared { mapping, .. } = piece {
                mapping.poison();
            }
        }
    })
}

/// Receives into the pieces in order; how many octets came, 0 at the end of the stream.
///
/// Errors are those of [`send_pieces`].
pub fn recv_pieces(fd: impl AsFd, pieces: &mut [PieceMut<'_>]) -> io::Result<usize> {
    let mut vectors = Vectors::new();
    for piece in pieces.iter_mut().take(MAX_PIECES) {
        match piece {
            PieceMut::Private(octets) => vectors.push(octets.as_mut_ptr(), octets.len()),
            PieceMut::Shared { mapping, offset, len } => {
                vectors.push_shared(mapping, *offset, *len)?;
            }
        }
    }
    let mut message = vectors.message();
    // SAFETY: the message and its vectors live until the call returns; the vectors cover private
    // octets that are exclusively borrowed for the call and ranges of live mappings, all valid for
    // writing; no control buffer is given, so no descriptor can arrive.
    let got = unsafe { libc::recvmsg(fd.as_fd().as_raw_fd(), &mut message, FLAGS) };
    finish(got, || {
        for piece in pieces {
            if let PieceMut::Shared { mapping, .. } = piece {
                mapping.poison();
            }
        }
    })
}

fn finish(result: isize, poison: impl FnOnce()) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| {
        let error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::EFAULT) {
            poison();
        }
        error
    })
}

/// The vectors of one call, in place and without being zeroed first.
struct Vectors {
    len: usize,
    vectors: [MaybeUninit<libc::iovec>; MAX_PIECES],
}

impl Vectors {
    #[inline]
    fn new() -> Self {
        Vectors { len: 0, vectors: [const { MaybeUninit::uninit() }; MAX_PIECES] }
    }

    #[inline]
    fn push(&mut self, base: *mut u8, len: usize) {
        self.vectors[self.len].write(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.len += 1;
    }

    #[inline]
    fn push_shared(&mut self, mapping: &Mapping, offset: usize, len: usize) -> io::Result<()> {
        let base = mapping.range(offset, len).ok_or(io::ErrorKind::InvalidInput)?;
        self.push(base, len);
        Ok(())
    }

    /// A message of these vectors, which must outlive it.
    #[inline]
    fn message(&mut self) -> libc::msghdr {
        // SAFETY: an all-zero `msghdr` is a valid value of that C struct: no name, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.vectors.as_mut_ptr().cast();
        message.msg_iovlen = self.len;
        message
    }
}

const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
