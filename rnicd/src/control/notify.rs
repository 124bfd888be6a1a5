//! Notifications to a service manager (`sd_notify(3)`): ready, reloading, stopping, a status line,
//! and the watchdog's keep-alive (`WATCHDOG_USEC`).
//!
//! The crate `sd-notify` is not used: it does not support abstract sockets, and its sends block if
//! the manager does not read.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rnic_abi::types::Time;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::{ClockId, clock_gettime};

/// Connection to the service manager, if there is one.
#[derive(Debug, Default)]
pub struct Notifier {
    socket: Option<OwnedFd>,
    watchdog: Option<Watchdog>,
}

/// Watchdog of the manager, which kills the daemon if no keep-alive arrives in time.
#[derive(Debug)]
struct Watchdog {
    /// Half the watchdog timeout.
    every: Duration,
    /// Time of the next check of the workers; `None` until they answer.
    due: Option<Time>,
}

impl Watchdog {
    /// Returns the watchdog of `WATCHDOG_USEC` and `WATCHDOG_PID`, if it is for this process.
    fn of(usec: Option<&str>, pid: Option<&str>, own: u32) -> Option<Self> {
        let usec = usec?.parse::<u64>().ok().filter(|usec| *usec > 0)?;
        if pid.is_some_and(|pid| pid.parse() != Ok(own)) {
            return None;
        }
        Some(Watchdog { every: Duration::from_micros(usec) / 2, due: Some(Time(0)) })
    }
}

impl Notifier {
    /// Connects to `NOTIFY_SOCKET`, if a service manager has started the daemon.
    pub fn from_environment() -> io::Result<Self> {
        match std::env::var_os("NOTIFY_SOCKET") {
            None => Ok(Notifier::default()),
            Some(name) => {
                let socket = connect(&name).map_err(|error| {
                    let name = name.to_string_lossy();
                    io::Error::new(error.kind(), format!("NOTIFY_SOCKET={name}: {error}"))
                })?;
                let variable = |name| std::env::var(name).ok();
                let usec = variable("WATCHDOG_USEC");
                let pid = variable("WATCHDOG_PID");
                let watchdog = Watchdog::of(usec.as_deref(), pid.as_deref(), std::process::id());
                Ok(Notifier { socket: Some(socket), watchdog })
            }
        }
    }

    /// Reports that the daemon serves clients: after its start, or after a reload.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={}\n", Notifier::line(status)));
    }

    /// Reports that the daemon reads its configuration again. [`Notifier::ready`] must follow.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=reloading\n"));
    }

    /// Returns the time of the next check of the workers, if there is a watchdog.
    pub fn next_keepalive(&self) -> Option<Time> {
        self.watchdog.as_ref().and_then(|watchdog| watchdog.due)
    }

    /// Returns true if the workers must be checked now. The caller must then call
    /// [`Notifier::send_keepalive`] when all have answered. Returns false until that call.
    pub fn is_keepalive_due(&mut self, now: Time) -> bool {
        let due = self.watchdog.as_mut().map(|watchdog| &mut watchdog.due);
        due.is_some_and(|due| due.take_if(|due| *due <= now).is_some())
    }

    /// Sends a keep-alive, which states that this thread and all workers make progress.
    pub fn send_keepalive(&mut self, now: Time) {
        if let Some(watchdog) = &mut self.watchdog {
            watchdog.due = Some(now.after(watchdog.every));
            self.send("WATCHDOG=1\n");
        }
    }

    /// Reports that the daemon is about to end.
    pub fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={status}\n"));
    }

    /// Joins the lines of a status. A line break would end it.
    fn line(status: &str) -> String {
        status.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn send(&self, state: &str) {
        let Some(socket) = &self.socket else { return };
        // Never block on a manager that does not read.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if let Err(error) = rustix::net::send(socket, state.as_bytes(), flags) {
            tracing::warn!(%error, "cannot notify the service manager");
        }
    }
}

fn connect(name: &OsStr) -> io::Result<OwnedFd> {
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddrUnix::new_abstract_name(rest)?,
        [b'/', ..] => SocketAddrUnix::new(name)?,
        _ => return Err(io::Error::new(io::ErrorKind::Unsupported, "not a path or abstract name")),
    };
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};

    use super::*;

    #[test]
    fn notifies_paths_and_abstract_names() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = dir.path().join("n");
        let by_path = UnixDatagram::bind(&path).unwrap_or_else(|e| panic!("{e}"));
        let name = format!("rnicd-notify-{}", std::process::id());
        let by_name = SocketAddr::from_abstract_name(&name)
            .and_then(|address| UnixDatagram::bind_addr(&address))
            .unwrap_or_else(|e| panic!("{e}"));
        let name = format!("@{name}");
        for (name, manager) in [(path.as_os_str(), by_path), (OsStr::new(&name), by_name)] {
            let socket = connect(name).unwrap_or_else(|e| panic!("{e}"));
            let notifier = Notifier { socket: Some(socket), watchdog: None };
            let mut buffer = [0; 256];
            let mut next = || {
                let n = manager.recv(&mut buffer).unwrap_or_else(|e| panic!("{e}"));
                String::from_utf8_lossy(&buffer[..n]).into_owned()
            };
            notifier.ready("serving");
            assert_eq!(next(), "READY=1\nSTATUS=serving\n");
            notifier.reloading();
            assert!(next().starts_with("RELOADING=1\nMONOTONIC_USEC="));
            notifier.stopping("2 sessions");
            assert_eq!(next(), "STOPPING=1\nSTATUS=2 sessions\n");
            // More than the manager's queue holds: the rest is dropped, without blocking.
            (0..10_000).for_each(|_| notifier.ready("serving"));
        }
        assert!(connect(OsStr::new("vsock:2:1")).is_err());
    }

    #[test]
    fn keepalive_waits_for_all_workers() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = dir.path().join("n");
        let manager = UnixDatagram::bind(&path).unwrap_or_else(|e| panic!("{e}"));
        manager.set_nonblocking(true).unwrap_or_else(|e| panic!("{e}"));
        let heard = || {
            let mut buffer = [0; 256];
            manager
                .recv(&mut buffer)
                .ok()
                .map(|n| String::from_utf8_lossy(&buffer[..n]).into_owned())
        };
        let watchdog = Watchdog::of(Some("2000000"), None, 7);
        let mut notifier = Notifier { socket: connect(path.as_os_str()).ok(), watchdog };
        let at = |seconds| Time(0).after(Duration::from_secs(seconds));
        assert!(notifier.is_keepalive_due(at(5)), "at once");
        // The workers are asked only once, and no keep-alive is sent before they answer.
        assert!(!notifier.is_keepalive_due(at(6)) && !notifier.is_keepalive_due(at(60)));
        assert_eq!((notifier.next_keepalive(), heard()), (None, None));
        notifier.send_keepalive(at(61));
        assert_eq!(heard().as_deref(), Some("WATCHDOG=1\n"));
        assert_eq!(notifier.next_keepalive(), Some(at(62)), "half of the time that is allowed");
        assert!(!notifier.is_keepalive_due(at(61)) && notifier.is_keepalive_due(at(62)));
    }

    #[test]
    fn only_a_watchdog_of_this_process_is_answered() {
        let every = |usec, pid| Watchdog::of(usec, pid, 7).map(|watchdog| watchdog.every);
        let second = Some(Duration::from_secs(1));
        assert_eq!(every(Some("2000000"), None), second);
        assert_eq!(every(Some("2000000"), Some("7")), second);
        for (usec, pid) in
            [(None, None), (Some("0"), None), (Some("x"), None), (Some("2000000"), Some("8"))]
        {
            assert_eq!(every(usec, pid), None, "{usec:?} {pid:?}");
        }
    }
}
