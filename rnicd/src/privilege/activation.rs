//! Descriptors that a service manager opened for the daemon (`sd_listen_fds(3)`).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::fd::BorrowedFd;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// Takes over the one socket that a service manager passed to this process, if it passed one. To be
/// called once, before anything else opens descriptors.
pub fn passed_socket() -> io::Result<Option<OwnedFd>> {
    let variable = |name| std::env::var(name).ok();
    let own = std::process::id();
    match count(variable("LISTEN_PID").as_deref(), variable("LISTEN_FDS").as_deref(), own)? {
        0 => return Ok(None),
        1 => {}
        more => return Err(refused(format!("LISTEN_FDS={more}: one socket is enough"))),
    }
    // SAFETY: borrowed for the next call alone, which fails if the descriptor is not open. By the
    // protocol it is the manager's gift to this process, so nobody closes it meanwhile.
    let fd = unsafe { BorrowedFd::borrow_raw(FIRST) };
    let flags = fcntl_getfd(fd).map_err(|_| refused(format!("descriptor {FIRST} is not open")))?;
    if flags.contains(FdFlags::CLOEXEC) {
        // What came over an exec cannot have the flag: somebody opened it since.
        return Err(refused(format!("descriptor {FIRST} was opened by this process")));
    }
    fcntl_setfd(fd, FdFlags::CLOEXEC)?;
    // SAFETY: it is open, as just seen, and ours alone: it was passed to this process, and nothing
    // of this process has opened or adopted it (that would have set the flag).
    Ok(Some(unsafe { OwnedFd::from_raw_fd(FIRST) }))
}

/// How many descriptors the environment says were passed to process `own`.
fn count(pid: Option<&str>, fds: Option<&str>, own: u32) -> io::Result<u32> {
    let (Some(pid), Some(fds)) = (pid, fds) else { return Ok(0) };
    let number = |name: &str, text: &str| {
        text.parse::<u32>().map_err(|_| refused(format!("{name}={text}: not a number")))
    };
    // The variables may be inherited from a parent for whom they were meant.
    if number("LISTEN_PID", pid)? != own {
        return Ok(0);
    }
    number("LISTEN_FDS", fds)
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("socket activation: {why}"))
}

/// `SD_LISTEN_FDS_START`
const FIRST: i32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_meant_for_this_process_is_taken() {
        assert_eq!(count(None, None, 7).ok(), Some(0));
        assert_eq!(count(Some("7"), None, 7).ok(), Some(0));
        assert_eq!(count(None, Some("1"), 7).ok(), Some(0));
        assert_eq!(count(Some("8"), Some("1"), 7).ok(), Some(0));
        assert_eq!(count(Some("7"), Some("2"), 7).ok(), Some(2));
        let error = count(Some("7"), Some("-1"), 7).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("LISTEN_FDS=-1")));
    }
}
