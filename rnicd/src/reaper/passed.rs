//! A descriptor that a client has passed, until it is used or refused.
//!
//! Closing it may take long, and every refusal must close it. So it is never closed in place:
//! unless [taken out](Passed::into_inner), it goes to the [`Reaper`] when dropped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::Reaper;

/// A client's descriptor.
#[derive(Debug)]
pub struct Passed {
    /// `None` only after it has been taken out or dropped.
    descriptor: Option<OwnedFd>,
    kind: PassedKind,
    user: u32,
    reaper: Reaper,
}

/// Kind of a descriptor, as far as system calls that cannot block can determine it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassedKind {
    /// A memfd: `F_GET_SEALS` succeeds.
    Memfd,
    /// A socket of any family: `SO_TYPE` succeeds.
    Socket,
    /// Any other file. No call on it is safe.
    Unknown,
}

impl PassedKind {
    /// Determines the kind with two calls that fail on other files and that no file can delay.
    fn of(descriptor: BorrowedFd<'_>) -> Self {
        if rustix::fs::fcntl_get_seals(descriptor).is_ok() {
            PassedKind::Memfd
        } else if rustix::net::sockopt::socket_type(descriptor).is_ok() {
            PassedKind::Socket
        } else {
            PassedKind::Unknown
        }
    }
}

impl Passed {
    /// Takes ownership of a descriptor that a client of this user has passed.
    pub fn new(descriptor: OwnedFd, user: u32, reaper: &Reaper) -> Self {
        let kind = PassedKind::of(descriptor.as_fd());
        Passed { descriptor: Some(descriptor), kind, user, reaper: reaper.clone() }
    }

    /// Returns the kind of the descriptor, as determined by [`Passed::new`].
    pub fn kind(&self) -> PassedKind {
        self.kind
    }

    /// Takes the descriptor out. The caller must close it.
    pub fn into_inner(mut self) -> OwnedFd {
        match self.descriptor.take() {
            Some(descriptor) => descriptor,
            // Only this method and `drop` take it, and both consume the value.
            None => unreachable!("the descriptor is present until it is taken out"),
        }
    }
}

impl AsFd for Passed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.descriptor {
            Some(descriptor) => descriptor.as_fd(),
            None => unreachable!("the descriptor is present until it is taken out"),
        }
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        let Some(descriptor) = self.descriptor.take() else { return };
        match self.kind {
            PassedKind::Memfd => self.reaper.close_memfd(self.user, descriptor),
            PassedKind::Socket => self.reaper.close_socket(self.user, descriptor),
            PassedKind::Unknown => self.reaper.close_unknown(self.user, descriptor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that holds the descriptor may have no time to close it.
    #[test]
    fn dropped_descriptor_goes_to_the_reaper() {
        let reaper = Reaper::without_threads();
        let file =
            || OwnedFd::from(std::fs::File::open("/dev/null").unwrap_or_else(|e| panic!("{e}")));
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let memfd = rustix::fs::memfd_create("test", flags).unwrap_or_else(|e| panic!("{e}"));
        let socket =
            std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap_or_else(|e| panic!("{e}"));
        let all = [
            (file(), PassedKind::Unknown),
            (memfd, PassedKind::Memfd),
            (socket.into(), PassedKind::Socket),
        ];
        for (n, (descriptor, kind)) in all.into_iter().enumerate() {
            let passed = Passed::new(descriptor, 1000, &reaper);
            assert_eq!((passed.kind(), reaper.closing(1000)), (kind, n));
            drop(passed);
            assert_eq!((reaper.closing(1000), reaper.closing(1001)), (n + 1, 0));
        }
        drop(Passed::new(file(), 1000, &reaper).into_inner());
        assert_eq!(
            (reaper.closing(1000), reaper.closing_of_all(), reaper.closing_soon()),
            (3, 3, 2)
        );
    }
}
