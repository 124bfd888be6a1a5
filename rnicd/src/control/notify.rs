//! What a service manager is told (`sd_notify(3)`): ready, reloading, stopping, a line of status.
//!
//! By hand and not with the crate `sd-notify`: that one does not reach abstract sockets, and its
//! sends wait for a manager that does not read.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::{ClockId, clock_gettime};

/// The way to the service manager, if there is one.
#[derive(Debug, Default)]
pub struct Notifier {
    socket: Option<OwnedFd>,
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
                Ok(Notifier { socket: Some(socket) })
            }
        }
    }

    /// Clients are served from now on, or again after [`Notifier::reloading`].
    pub fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={status}\n"));
    }

    /// The configuration is being read again; [`Notifier::ready`] follows.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = now.tv_sec * 1_000_000 + now.tv_nsec / 1_000;
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={micros}\nSTATUS=reloading\n"));
    }

    /// The daemon is about to end.
    pub fn stopping(&self, status: &str) {
        self.tell(&format!("STOPPING=1\nSTATUS={status}\n"));
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
            let notifier = Notifier { socket: Some(socket) };
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
}
