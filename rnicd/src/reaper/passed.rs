//! A descriptor that a client passed, on its way to whoever uses it.
//!
//! Closing it may take its time, whichever way it is refused on. So it is never simply dropped:
//! what is not [taken out](Passed::into_inner) goes to the [`Reaper`], by its kind.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::Reaper;

/// A client's descriptor.
#[derive(Debug)]
pub struct Passed {
    /// Always there until it is taken out or dropped.
    descriptor: Option<OwnedFd>,
    kind: PassedKind,
    user: u32,
    reaper: Reaper,
}

/// What a descriptor is, as far as that can be asked without waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassedKind {
    /// A memfd: it answers `F_GET_SEALS`.
    Memfd,
    /// A socket, of whatever family: it answers `SO_TYPE`.
    Socket,
    /// Anything else: no call on it is safe.
    Unknown,
}

impl PassedKind {
    /// Asks two questions that no file of another kind answers, and none can delay.
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
    /// Takes charge of a descriptor that a client of this user passed.
    pub fn new(descriptor: OwnedFd, user: u32, reaper: &Reaper) -> Self {
        let kind = PassedKind::of(descriptor.as_fd());
        Passed { descriptor: Some(descriptor), kind, user, reaper: reaper.clone() }
    }

    /// What the descriptor was found to be when it was taken.
    pub fn kind(&self) -> PassedKind {
        self.kind
    }

    /// Takes the descriptor out: from here on somebody else sees to its end.
    pub fn into_inner(mut self) -> OwnedFd {
        match self.descriptor.take() {
            Some(descriptor) => descriptor,
            // Taken only here and by `drop`, both of which end this.
            None => unreachable!("a passed descriptor is there until it is taken out"),
        }
    }
}

impl AsFd for Passed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.descriptor {
            Some(descriptor) => descriptor.as_fd(),
            None => unreachable!("a passed descriptor is there until it is taken out"),
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

    /// Whoever holds one may have no time for closing it, so dropping it does not.
    #[test]
    fn what_is_dropped_is_closed_elsewhere_whatever_it_is() {
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
