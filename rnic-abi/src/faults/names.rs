//! Tables of names in rules.

use crate::types::CompletionStatus;

/// Names with their values.
pub(super) type Names<T> = &'static [(&'static str, T)];

/// Returns the value of a name. Accepts the name of the C constant as well: with `prefix`, and with
/// `_` instead of `-`, in upper or lower case.
pub(super) fn listed<T: Copy>(names: Names<T>, text: &str, prefix: &str) -> Result<T, String> {
    let plain = text.to_lowercase().replace('_', "-");
    let plain = plain.strip_prefix(prefix).unwrap_or(&plain);
    let found = names.iter().find(|(name, _)| *name == plain);
    found.map(|(_, value)| *value).ok_or_else(|| format!("needs one of {}", all(names)))
}

/// Returns all names of a table.
pub(super) fn all<T>(names: Names<T>) -> String {
    names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// Parses a status of a failed completion (`ibv_wc_status`).
pub(super) fn status(text: &str) -> Result<CompletionStatus, String> {
    listed(STATUSES, text, "ibv-wc-")
}

const STATUSES: Names<CompletionStatus> = &[
    ("loc-len-err", CompletionStatus::LocalLength),
    ("loc-qp-op-err", CompletionStatus::LocalQpOperation),
    ("loc-prot-err", CompletionStatus::LocalProtection),
    ("wr-flush-err", CompletionStatus::WrFlush),
    ("mw-bind-err", CompletionStatus::MwBind),
    ("bad-resp-err", CompletionStatus::BadResponse),
    ("loc-access-err", CompletionStatus::LocalAccess),
    ("rem-inv-req-err", CompletionStatus::RemoteInvalidRequest),
    ("rem-access-err", CompletionStatus::RemoteAccess),
    ("rem-op-err", CompletionStatus::RemoteOperation),
    ("retry-exc-err", CompletionStatus::TransportRetryExceeded),
    ("rnr-retry-exc-err", CompletionStatus::ReceiverNotReady),
    ("rem-abort-err", CompletionStatus::RemoteAborted),
    ("fatal-err", CompletionStatus::Fatal),
    ("general-err", CompletionStatus::General),
];

/// Parses an error number, by name or as a number.
pub(super) fn errno(text: &str) -> Result<u16, String> {
    let by_name = ERRNOS.iter().find(|(name, _)| *name == text).map(|(_, number)| *number);
    let number = by_name.or_else(|| text.parse().ok());
    // The largest error number of the kernel (`MAX_ERRNO`).
    let number = number.filter(|number| (1..=4095).contains(number));
    let number = number.and_then(|number| u16::try_from(number).ok());
    number.ok_or_else(|| {
        let names = ERRNOS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        format!("needs a number from 1 to 4095 or one of {names}")
    })
}

const ERRNOS: &[(&str, i32)] = &[
    ("EPERM", libc::EPERM),
    ("ENOENT", libc::ENOENT),
    ("EINTR", libc::EINTR),
    ("EIO", libc::EIO),
    ("EAGAIN", libc::EAGAIN),
    ("ENOMEM", libc::ENOMEM),
    ("EACCES", libc::EACCES),
    ("EFAULT", libc::EFAULT),
    ("EBUSY", libc::EBUSY),
    ("EEXIST", libc::EEXIST),
    ("ENODEV", libc::ENODEV),
    ("EINVAL", libc::EINVAL),
    ("EMFILE", libc::EMFILE),
    ("ENOSPC", libc::ENOSPC),
    ("ENOSYS", libc::ENOSYS),
    ("EPROTO", libc::EPROTO),
    ("EOPNOTSUPP", libc::EOPNOTSUPP),
    ("EADDRINUSE", libc::EADDRINUSE),
    ("EADDRNOTAVAIL", libc::EADDRNOTAVAIL),
    ("ENETDOWN", libc::ENETDOWN),
    ("ENETUNREACH", libc::ENETUNREACH),
    ("ECONNRESET", libc::ECONNRESET),
    ("ENOBUFS", libc::ENOBUFS),
    ("ENOTCONN", libc::ENOTCONN),
    ("ETIMEDOUT", libc::ETIMEDOUT),
    ("ECONNREFUSED", libc::ECONNREFUSED),
    ("EHOSTUNREACH", libc::EHOSTUNREACH),
];
