//! What a service manager is told (`sd_notify(3)`): ready, reloading, stopping, a line of status,
//! and if it waits for that (`WATCHDOG_USEC`), that the daemon is alive.
//!
//! By hand and not with the crate `sd-notify`: that one does not reach abstract sockets, and its
//! sends wait for a manager that does not read.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rnic_core::types::Time;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::{ClockId, clock_gettime};

/// The way to the service manager, if there is one.
#[derive(Debug, Default)]
pub struct Notifier {
    socket: Option<OwnedFd>,
    watchdog: Option<Watchdog>,
}

/// A manager that ends a daemon of which it hears nothing for a time.
#[derive(Debug)]
struct Watchdog {
    /// Half of that time.
    every: Duration,
    /// When to ask the workers; not before they have answered the last time.
    due: Option<Time>,
}

impl Watchdog {
    /// As `WATCHDOG_USEC` and `WATCHDOG_PID` say, if they are meant for this process.
    fn of(usec: Option<&str>, pid: Option<&str>, own: u32) -> Option<Self> {
        let usec = usec?.parse::<u64>().ok().filter(|usec| *usec > 0)?;
        if pid.is_some_and(|pid| pid.parse() != Ok(own)) {
            return None;
        }
        Some(Watchdog { every: Duration::from_micros(usec) / 2, due: Some(Time(0)) })
    }
}

impl Notifier {
    /// For a daemon that a service manager may have started: connects to `NOTIFY_SOCKET`.
    pub fn from_environment() -> io::Result<Self> {
        match std::env::var_os("NOTIFY_SOCKET") {
            None => Ok(Notifier::default()),
            Some(name) => {
                let socket = connect(&name).map_err(|error| {
                    let name = name.to_string_lossy();
                    io::Error::new(error.kind(), format!("NOTIFY_SOCKET={name}: {error}"))
                })?;
                let variable = |name| std::env::var(name).ok();
                let (usec, pid) = (variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"));
                let watchdog = Watchdog::of(usec.as_deref(), pid.as_deref(), std::process::id());
                Ok(Notifier { socket: Some(socket), watchdog })
            }
        }
    }

    /// Clients are served from now on, or again after [`Notifier::reloading`].
    pub fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={}\n", Notifier::line(status)));
    }

    /// The configuration is being read again; [`Notifier::ready`] follows.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=reloading\n"));
    }

    /// When the workers are to be asked whether they are alive, if they are.
    pub fn next_question(&self) -> Option<Time> {
        self.watchdog.as_ref().and_then(|watchdog| watchdog.due)
    }

    /// Whether to ask them now; [`Notifier::alive`] is to follow when all have answered, and no
    /// other question comes before.
    pub fn asks(&mut self, now: Time) -> bool {
        let due = self.watchdog.as_mut().map(|watchdog| &mut watchdog.due);
        due.is_some_and(|due| due.take_if(|due| *due <= now).is_some())
    }

    /// This thread and all workers do their work.
    pub fn alive(&mut self, now: Time) {
        if let Some(watchdog) = &mut self.watchdog {
            watchdog.due = Some(now.after(watchdog.every));
            self.tell("WATCHDOG=1\n");
        }
    }

    /// The daemon is about to end.
    pub fn stopping(&self, status: &str) {
        self.tell(&format!("STOPPING=1\nSTATUS={status}\n"));
    }

    /// What is told is lines: a status must be one.
    fn line(status: &str) -> String {
        status.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn tell(&self, state: &str) {
        let Some(socket) = &self.socket else { return };
        // A manager that does not read holds nobody up.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if let Err(error) = rustix::net::send(socket, state.as_bytes(), flags) {
            tracing::warn!(%error, "cannot tell the service manager");
        }
    }
}

fn connect(name: &OsStr) -> io::Result<OwnedFd> {
    let address = match name.as_bytes() {
        [b'@', rest @ ..] => SocketAddrUnix::new_abstract_name(rest)?,
        [b'/', ..] => SocketAddrUnix::new(name)?,
        _ => return Err(io::Error::new(io::ErrorKind::Unsupported, "neither a path nor abstract")),
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
    fn paths_and_abstract_names_are_reached() {
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
            // More than the manager's queue holds: what does not fit is not waited for.
            (0..10_000).for_each(|_| notifier.ready("serving"));
        }
        assert!(connect(OsStr::new("vsock:2:1")).is_err());
    }

    #[test]
    fn nobody_is_told_that_it_is_alive_before_all_have_answered() {
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
        assert!(notifier.asks(at(5)), "at once");
        // However long it takes: they are asked once, and nothing is said.
        assert!(!notifier.asks(at(6)) && !notifier.asks(at(60)));
        assert_eq!((notifier.next_question(), heard()), (None, None));
        notifier.alive(at(61));
        assert_eq!(heard().as_deref(), Some("WATCHDOG=1\n"));
        assert_eq!(notifier.next_question(), Some(at(62)), "half of the time that is allowed");
        assert!(!notifier.asks(at(61)) && notifier.asks(at(62)));
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
