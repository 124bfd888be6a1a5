//! System calls that move bytes between a socket and shared memory without a private copy.
//!
//! `IoSlice` would need references to foreign memory, so this module builds the I/O vectors from
//! raw pointers. Every call uses `MSG_DONTWAIT | MSG_NOSIGNAL`, because a client that shares the
//! socket may have cleared its `O_NONBLOCK`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use super::Mapping;

/// Maximum number of pieces per call. Further pieces are left for the next call, as after a short
/// write.
pub const MAX_PIECES: usize = 256;

/// Bytes to send: one element of the I/O vector of `sendmsg(2)`.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// Bytes in private memory of this process.
    Private(&'a [u8]),
    /// Bytes of a mapping. The process that shares it may still write or truncate it.
    Shared {
        /// Mapping that contains the bytes.
        mapping: &'a Mapping,
        /// Offset of the first byte in the mapping.
        offset: usize,
        /// Number of bytes.
        len: usize,
    },
}

/// Buffer for received bytes: one element of the I/O vector of `recvmsg(2)`.
#[derive(Debug)]
pub enum PieceMut<'a> {
    /// Buffer in private memory of this process.
    Private(&'a mut [u8]),
    /// Buffer in a mapping. The process that shares it may still write or truncate it.
    Shared {
        /// Mapping that contains the buffer.
        mapping: &'a Mapping,
        /// Offset of the first byte in the mapping.
        offset: usize,
        /// Number of bytes.
        len: usize,
    },
}

/// Sends the pieces in order. Returns the number of bytes that the socket accepted.
///
/// # Errors
///
/// `InvalidInput`: a piece is not within its mapping; nothing was sent. `EFAULT`: a page of a
/// shared piece is missing; all mappings of this call, which belong to one session, are poisoned.
pub fn send_pieces(fd: impl AsFd, pieces: &[Piece<'_>]) -> io::Result<usize> {
    let mut vectors = Vectors::new();
    for piece in pieces.iter().take(MAX_PIECES) {
        match *piece {
            Piece::Private(bytes) => vectors.push(bytes.as_ptr().cast_mut(), bytes.len()),
            Piece::Shared { mapping, offset, len } => vectors.push_shared(mapping, offset, len)?,
        }
    }
    let message = vectors.message();
    // SAFETY: the message and its vectors live until the call returns. The vectors cover private
    // bytes that are borrowed for the call and ranges of live mappings, all valid for reading. The
    // kernel does not write through them. Concurrent writes to the shared ranges change only the
    // bytes that are sent.
    let sent = unsafe { libc::sendmsg(fd.as_fd().as_raw_fd(), &message, FLAGS) };
    finish(sent, || {
        for piece in pieces {
            if let Piece::Shared { mapping, .. } = piece {
                mapping.poison();
            }
        }
    })
}

/// Receives into the pieces in order. Returns the number of bytes received, 0 at the end of the
/// stream.
///
/// # Errors
///
/// As for [`send_pieces`].
pub fn recv_pieces(fd: impl AsFd, pieces: &mut [PieceMut<'_>]) -> io::Result<usize> {
    let mut vectors = Vectors::new();
    for piece in pieces.iter_mut().take(MAX_PIECES) {
        match piece {
            PieceMut::Private(bytes) => vectors.push(bytes.as_mut_ptr(), bytes.len()),
            PieceMut::Shared { mapping, offset, len } => {
                vectors.push_shared(mapping, *offset, *len)?;
            }
        }
    }
    let mut message = vectors.message();
    // SAFETY: the message and its vectors live until the call returns. The vectors cover private
    // bytes that are exclusively borrowed for the call and ranges of live mappings, all valid for
    // writing. Without a control buffer no descriptor can arrive.
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

/// I/O vectors of one call, in a fixed array that is not initialised first.
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

    /// Returns a message that points to these vectors, which must outlive it.
    #[inline]
    fn message(&mut self) -> libc::msghdr {
        // SAFETY: an all-zero `msghdr` is a valid value of that C struct: no name, no control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.vectors.as_mut_ptr().cast();
        // `msg_iovlen` is a `size_t` in glibc and an `int` in musl. It is at most `MAX_PIECES`.
        message.msg_iovlen = self.len as _;
        message
    }
}

const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::super::CopyFault;
    use super::*;

    fn shared_buffer() -> std::sync::Arc<Mapping> {
        Mapping::create_shared_buffer(8192).expect("memory for the buffer").0
    }

    fn contents(mapping: &Mapping, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        mapping.read(offset, &mut bytes).expect("in range");
        bytes
    }

    #[test]
    fn pieces_are_sent_in_order() {
        let (a, mut b) = UnixStream::pair().expect("socket pair");
        let m = shared_buffer();
        m.write(4090, b"from shared memory").expect("in range");
        let pieces = [
            Piece::Private(b"head, "),
            Piece::Shared { mapping: &m, offset: 4090, len: 18 },
            Piece::Private(b""),
            Piece::Private(b", tail"),
        ];
        assert_eq!(send_pieces(&a, &pieces).expect("room in the socket"), 30);
        let mut bytes = [0; 30];
        b.read_exact(&mut bytes).expect("it was sent");
        assert_eq!(&bytes, b"head, from shared memory, tail");
    }

    #[test]
    fn pieces_are_filled_in_order() {
        let (mut a, b) = UnixStream::pair().expect("socket pair");
        let m = shared_buffer();
        a.write_all(b"payloadheader").expect("room in the socket");
        let mut header = [0; 8];
        let mut pieces = [
            PieceMut::Shared { mapping: &m, offset: 4093, len: 7 },
            PieceMut::Private(&mut header),
        ];
        assert_eq!(recv_pieces(&b, &mut pieces).expect("it was sent"), 13);
        assert_eq!(contents(&m, 4093, 7), b"payload");
        assert_eq!(&header, b"header\0\0");
        let mut pieces = [PieceMut::Private(&mut header)];
        let error = recv_pieces(&b, &mut pieces).expect_err("a blocking socket, and it is empty");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(a);
        let mut pieces = [PieceMut::Private(&mut header)];
        assert_eq!(recv_pieces(&b, &mut pieces).expect("end of stream"), 0);
    }

    /// The socket's own flags do not matter: these sockets are in blocking mode.
    #[test]
    fn full_and_closed_sockets() {
        let (a, b) = UnixStream::pair().expect("socket pair");
        let block = vec![0; 1 << 16];
        let error = loop {
            if let Err(error) = send_pieces(&a, &[Piece::Private(&block)]) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        let error = send_pieces(&a, &[Piece::Private(&block)]).expect_err("closed");
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_range_outside_its_mapping_is_refused() {
        let (a, b) = UnixStream::pair().expect("socket pair");
        let m = shared_buffer();
        let bad = Piece::Shared { mapping: &m, offset: 8000, len: 193 };
        let error = send_pieces(&a, &[Piece::Private(b"x"), bad]).expect_err("out of range");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let mut bad = [PieceMut::Shared { mapping: &m, offset: usize::MAX, len: 2 }];
        let error = recv_pieces(&b, &mut bad).expect_err("out of range");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        let error = recv_pieces(&b, &mut [PieceMut::Private(&mut [0])]).expect_err("nothing sent");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn at_most_max_pieces_per_call() {
        let (a, _b) = UnixStream::pair().expect("socket pair");
        let pieces = [Piece::Private(b"x"); MAX_PIECES + 10];
        assert_eq!(send_pieces(&a, &pieces).expect("room in the socket"), MAX_PIECES);
    }

    #[test]
    fn a_missing_page_poisons_the_mapping() {
        let (a, mut b) = UnixStream::pair().expect("socket pair");
        let gone = || {
            let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&fd, 4096)?;
            let mapping = Mapping::map(fd.as_fd(), 4096)?;
            rustix::fs::ftruncate(&fd, 0)?;
            io::Result::Ok(mapping)
        };
        let m = gone().expect("memory for the mapping");
        let piece = Piece::Shared { mapping: &m, offset: 0, len: 100 };
        let error = send_pieces(&a, &[piece]).expect_err("no page");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        assert!(m.is_poisoned());
        let m = gone().expect("memory for the mapping");
        b.write_all(b"data").expect("room in the socket");
        let piece = PieceMut::Shared { mapping: &m, offset: 0, len: 100 };
        let error = recv_pieces(&a, &mut [piece]).expect_err("no page");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        super::super::fault::install().expect("handler");
        assert_eq!(m.write(0, &[1]), Err(CopyFault::Poisoned));
    }
}
