//! Errors of the C API: an `errno(3)` number with its reason.
//!
//! Each [`Errno`] is created with a reason, and leaves this library only through the functions
//! below, which log the reason if `RNIC_LOG` enables the log.

use std::fmt;

use rnic_client::{AdmissionError, Error, Refusal};

use crate::{log, system};

/// Creates an [`Errno`] from a number and the format of a reason.
macro_rules! errno {
    ($number:expr, $($reason:tt)*) => {
        $crate::errno::Errno::new($number, format_args!($($reason)*))
    };
}

/// Creates an `EINVAL`.
macro_rules! invalid {
    ($($reason:tt)*) => { errno!(libc::EINVAL, $($reason)*) };
}

/// Creates an `EOPNOTSUPP`.
macro_rules! unsupported {
    ($($reason:tt)*) => { errno!(libc::EOPNOTSUPP, $($reason)*) };
}

/// Creates an `EBUSY`.
macro_rules! busy {
    ($($reason:tt)*) => { errno!(libc::EBUSY, $($reason)*) };
}

/// The error of a call: an `errno(3)` number, and the reason with the value and object at fault.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Errno {
    number: i32,
    /// `None` if it is not logged: the log is off, or there was nothing to return.
    reason: Option<Box<str>>,
}

impl Errno {
    /// Creates an error. Formats the reason only if the log is enabled.
    pub(crate) fn new(number: i32, reason: fmt::Arguments<'_>) -> Errno {
        Errno { number, reason: log::is_on().then(|| reason.to_string().into()) }
    }

    /// Creates an error for an empty queue, an interrupted wait or an empty table entry. Not
    /// logged, because programs that poll or read a table get it all the time.
    pub(crate) fn nothing_yet(number: i32) -> Errno {
        Errno { number, reason: None }
    }

    pub(crate) fn number(&self) -> i32 {
        self.number
    }

    /// Replaces the error number.
    pub(crate) fn with_number(self, number: i32) -> Errno {
        Errno { number, ..self }
    }

    /// Puts the name of a function or an object before the reason, unless it begins with it.
    #[cold]
    pub(crate) fn of(self, name: &str) -> Errno {
        let named = |reason: Box<str>| {
            let has_name = reason.starts_with(name);
            if has_name { reason } else { format!("{name}: {reason}").into() }
        };
        Errno { reason: self.reason.map(named), ..self }
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
        let is_at_connect = matches!(error, Error::NoDaemon { .. } | Error::NotAdmitted { .. });
        let number = number(&error);
        if is_at_connect && number == libc::EACCES {
            log::denied(&error.to_string());
        }
        Errno::new(number, format_args!("{error}"))
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

/// Names the C function in the reason of its error. The name may lack `ibv_`: the inline functions
/// of the headers call some functions by a pointer.
pub(crate) fn of_call<T>(function: &str, result: Result<T, Errno>) -> Result<T, Errno> {
    result.map_err(|errno| {
        let is_whole = function.starts_with("ibv_") || function.starts_with("rdma_");
        let prefix = if is_whole { "" } else { "ibv_" };
        errno.of(&format!("{prefix}{}", function.trim_start_matches("_ibv_")))
    })
}

/// Converts the result of a function that returns an error number, 0 for success.
pub(crate) fn status(result: Result<(), Errno>) -> i32 {
    result.map_or_else(Errno::report, |()| 0)
}

/// Converts the result of a function that returns -1 and sets `errno`.
pub(crate) fn minus_one(result: Result<(), Errno>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            errno.report();
            -1
        }
    }
}

/// Converts the result of a function that returns a negative error number.
pub(crate) fn negative(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(value) => value.cast_signed(),
        Err(errno) => -(errno.report() as isize),
    }
}

/// Converts the result of a function that returns a pointer, or null and sets `errno`.
pub(crate) fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|errno| {
        errno.report();
        std::ptr::null_mut()
    })
}

/// Logs the error of a function that returns nothing.
pub(crate) fn nothing(result: Result<(), Errno>) {
    if let Err(errno) = result {
        errno.log();
    }
}

fn number(error: &Error) -> i32 {
    match error {
        Error::QueueFull { .. } | Error::NotEnoughMemory { .. } => libc::ENOMEM,
        Error::Refused { refusal, .. } => of_refusal(refusal),
        Error::NotAdmitted { why, .. } => match why {
            AdmissionError::NotAllowed => libc::EACCES,
            _ => libc::EAGAIN,
        },
        Error::Rejected { .. } => libc::ECONNREFUSED,
        Error::Unreachable { .. } => libc::ENETUNREACH,
        Error::Disconnected(_) => libc::ENOTCONN,
        Error::TimedOut { .. } => libc::ETIMEDOUT,
        Error::NoDaemon { tried } if tried.iter().any(|(_, why)| is_denied(why)) => libc::EACCES,
        Error::NoDaemon { .. } | Error::DaemonGone => libc::ENODEV,
        Error::Protocol(_) => libc::EPROTO,
        Error::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        Error::AfterFork { .. } => libc::EIO,
        _ => libc::EINVAL,
    }
}

fn is_denied(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::PermissionDenied
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
        Refusal::AboveProfile { errno, .. } => i32::from(*errno),
    }
}
