//! What a failure is called by C.

use rnic_client::{Admission, Error, Refusal};

use crate::{log, system};

/// A failed verb: a number of `errno(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl Errno {
    pub(crate) const INVALID: Errno = Errno(libc::EINVAL);
    pub(crate) const NO_MEMORY: Errno = Errno(libc::ENOMEM);
    pub(crate) const UNSUPPORTED: Errno = Errno(libc::EOPNOTSUPP);
    pub(crate) const NO_DEVICE: Errno = Errno(libc::ENODEV);
}

/// The error of the library, which is told on stderr where `RNIC_LOG` asks for it.
impl From<Error> for Errno {
    fn from(error: Error) -> Self {
        log::debug(|| error.to_string());
        Errno(number(&error))
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(error: rustix::io::Errno) -> Self {
        Errno(error.raw_os_error())
    }
}

/// A verb that returns a number of `errno(3)`, 0 for success.
pub(crate) fn status(result: Result<(), Errno>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            system::set_errno(errno.0);
            errno.0
        }
    }
}

/// A call that returns -1 and sets `errno`.
pub(crate) fn minus_one(result: Result<(), Errno>) -> i32 {
    value_or_minus_one(result.map(|()| 0))
}

/// A call that returns a number, or -1 and sets `errno`.
pub(crate) fn value_or_minus_one(result: Result<i32, Errno>) -> i32 {
    result.unwrap_or_else(|errno| {
        system::set_errno(errno.0);
        -1
    })
}

/// A call that returns a pointer, or null and sets `errno`.
pub(crate) fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|errno| {
        system::set_errno(errno.0);
        std::ptr::null_mut()
    })
}

fn number(error: &Error) -> i32 {
    match error {
        Error::QueueFull { .. } | Error::NotEnoughMemory { .. } => libc::ENOMEM,
        Error::NotWritable { .. } => libc::EFAULT,
        Error::Refused { refusal, .. } => of_refusal(refusal),
        Error::NotAdmitted { why, .. } => match why {
            Admission::NotAllowed => libc::EACCES,
            _ => libc::EAGAIN,
        },
        Error::Rejected { .. } => libc::ECONNREFUSED,
        Error::Unreachable { .. } => libc::ENETUNREACH,
        Error::Disconnected(_) => libc::ENOTCONN,
        Error::TimedOut { .. } => libc::ETIMEDOUT,
        Error::NoDaemon { .. } | Error::DaemonGone => libc::ENODEV,
        Error::Protocol(_) => libc::EPROTO,
        Error::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        Error::AfterFork { .. } => libc::EIO,
        _ => libc::EINVAL,
    }
}

fn of_refusal(refusal: &Refusal) -> i32 {
    match refusal {
        Refusal::Limit { .. } => libc::ENOMEM,
        Refusal::AboveMaximum { .. } | Refusal::Invalid { .. } => libc::EINVAL,
        Refusal::NoSuchObject { .. } => libc::ENOENT,
        Refusal::InUse { kind, .. } if kind == "address" => libc::EADDRINUSE,
        Refusal::InUse { .. } => libc::EBUSY,
        Refusal::WrongState { .. } => libc::EINVAL,
        Refusal::NotAllowed { .. } => libc::EACCES,
        Refusal::System { errno, .. } => i32::from(*errno),
        Refusal::Malformed { .. } => libc::EPROTO,
        Refusal::Draining => libc::EAGAIN,
    }
}
