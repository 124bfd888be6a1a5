//! Descriptors passed by a service manager (`sd_listen_fds(3)`).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::fd::BorrowedFd;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// Takes over the sockets that a service manager has passed to this process. Must be called once,
/// before anything else opens descriptors.
pub fn passed_sockets() -> io::Result<Vec<OwnedFd>> {
    let variable = |name| std::env::var(name).ok();
    let own = std::process::id();
    let count = count(variable("LISTEN_PID").as_deref(), variable("LISTEN_FDS").as_deref(), own)?;
    if count > MOST {
        return Err(refused(format!("LISTEN_FDS={count}: at most {MOST} sockets are accepted")));
    }
    (FIRST..FIRST + count.cast_signed()).map(take).collect()
}

fn take(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: borrowed for the next call alone, which fails if the descriptor is not open. By the
    // protocol the manager has given it to this process, so no other code closes it in between.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(fd).map_err(|_| refused(format!("descriptor {number} is not open")))?;
    if flags.contains(FdFlags::CLOEXEC) {
        // A descriptor inherited across exec does not have this flag, so this process opened it.
        return Err(refused(format!("descriptor {number} was opened by this process")));
    }
    fcntl_setfd(fd, FdFlags::CLOEXEC)?;
    // SAFETY: it is open, as just seen, and owned by nothing else: it was passed to this process,
    // and no code of this process has opened or adopted it (that would have set the flag).
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Returns the number of descriptors passed to process `own`, according to the environment.
fn count(pid: Option<&str>, fds: Option<&str>, own: u32) -> io::Result<u32> {
    let (Some(pid), Some(fds)) = (pid, fds) else { return Ok(0) };
    let number = |name: &str, text: &str| {
        text.parse::<u32>().map_err(|_| refused(format!("{name}={text}: not a number")))
    };
    // The variables may be inherited from a parent process that they were meant for.
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
/// Maximum number of sockets: the control socket, and sockets for `wired.port`.
const MOST: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_other_processes_are_ignored() {
        assert_eq!(count(None, None, 7).ok(), Some(0));
        assert_eq!(count(Some("7"), None, 7).ok(), Some(0));
        assert_eq!(count(None, Some("1"), 7).ok(), Some(0));
        assert_eq!(count(Some("8"), Some("1"), 7).ok(), Some(0));
        assert_eq!(count(Some("7"), Some("2"), 7).ok(), Some(2));
        let error = count(Some("7"), Some("-1"), 7).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("LISTEN_FDS=-1")));
    }
}
