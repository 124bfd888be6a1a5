//! Refusals of the C API: a number of `errno(3)` with its reason.
//!
//! An [`Errno`] cannot be made without a reason, and leaves this library only through the functions
//! below, which log the reason where `RNIC_LOG` asks for it.

use std::fmt;

use rnic_client::{Admission, Error, Refusal};

use crate::{log, system};

/// A failed call: a number of `errno(3)`, and which rule refused which value of which object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Errno {
    number: i32,
    /// `None` if nobody reads it: the log is off, or the call found nothing to return yet.
    reason: Option<Box<str>>,
}

impl Errno {
    /// A refusal. The reason is formatted only if the log is on.
    pub(crate) fn new(number: i32, reason: fmt::Arguments<'_>) -> Errno {
        Errno { number, reason: log::is_on().then(|| reason.to_string().into()) }
    }

    /// `EINVAL`.
    pub(crate) fn invalid(reason: fmt::Arguments<'_>) -> Errno {
        Errno::new(libc::EINVAL, reason)
    }

    /// `EOPNOTSUPP`.
    pub(crate) fn unsupported(reason: fmt::Arguments<'_>) -> Errno {
        Errno::new(libc::EOPNOTSUPP, reason)
    }

    /// `EBUSY`.
    pub(crate) fn busy(reason: fmt::Arguments<'_>) -> Errno {
        Errno::new(libc::EBUSY, reason)
    }

    /// No refusal: an empty queue, or an interrupted wait. Polling programs see it all the time, so
    /// it is not logged.
    pub(crate) fn nothing_yet(number: i32) -> Errno {
        Errno { number, reason: None }
    }

    pub(crate) fn number(&self) -> i32 {
        self.number
    }

    /// The same refusal under another number.
    pub(crate) fn with_number(self, number: i32) -> Errno {
        Errno { number, ..self }
    }

    /// Logs the reason and sets `errno`. Returns the number.
    pub(crate) fn report(self) -> i32 {
        self.log();
        system::set_errno(self.number);
        self.number
    }

    /// Logs the reason, for functions that return nothing.
    pub(crate) fn log(&self) {
        if let Some(reason) = &self.reason {
            let number = self.number;
            log::debug(|| format!("{reason} (errno {number})"));
        }
    }
}

impl From<Error> for Errno {
    fn from(error: Error) -> Self {
        Errno::new(number(&error), format_args!("{error}"))
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        match error.raw_os_error().unwrap_or(libc::EIO) {
            number @ (libc::EAGAIN | libc::EINTR) => Errno::nothing_yet(number),
            number => Errno::new(number, format_args!("a system call failed: {error}")),
        }
    }
}

impl From<rustix::io::Errno> for Errno {
    fn from(error: rustix::io::Errno) -> Self {
        std::io::Error::from(error).into()
    }
}

/// A verb that returns a number of `errno(3)`, 0 for success.
pub(crate) fn status(result: Result<(), Errno>) -> i32 {
    result.map_or_else(Errno::report, |()| 0)
}

/// A call that returns -1 and sets `errno`.
pub(crate) fn minus_one(result: Result<(), Errno>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            errno.report();
            -1
        }
    }
}

/// A call that returns the negative number of its error.
pub(crate) fn negative(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(value) => value.cast_signed(),
        Err(errno) => -(errno.report() as isize),
    }
}

/// A call that returns a pointer, or null and sets `errno`.
pub(crate) fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|errno| {
        errno.report();
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
        Refusal::InUse { kind, .. } if kind == "wildcard address" => libc::EADDRNOTAVAIL,
        Refusal::InUse { .. } => libc::EBUSY,
        Refusal::WrongState { .. } => libc::EINVAL,
        Refusal::NotAllowed { .. } => libc::EACCES,
        Refusal::System { errno, .. } => i32::from(*errno),
        Refusal::Malformed { .. } => libc::EPROTO,
        Refusal::Draining => libc::EAGAIN,
    }
}
