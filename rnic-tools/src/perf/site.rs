//! Private daemons and the two processes that use them.

use std::path::Path;

use rnic_client::Context;

use super::daemon::{Daemon, Setup};
use super::error::PerfError;
use super::peer::{Peer, open, peer_program};

/// One or two daemons.
pub struct Site {
    daemons: Vec<Daemon>,
}

/// Sessions of both processes with the daemons.
pub struct Ends {
    /// Session of the driver.
    pub context: Context,
    /// The second process, with its session.
    pub peer: Peer,
}

impl Site {
    /// Starts the daemons and waits until they accept sessions.
    pub fn start(rnicd: &Path, setup: Setup, daemons: u32) -> Result<Self, PerfError> {
        let start = |_| Daemon::start(rnicd, setup);
        Ok(Site { daemons: (0..daemons).map(start).collect::<Result<_, _>>()? })
    }

    /// Starts the second process and opens both sessions.
    pub fn open(&self) -> Result<Ends, PerfError> {
        let context = open(self.socket())?;
        let peer = Peer::start(peer_program(self.peer_socket())?)?;
        Ok(Ends { context, peer })
    }

    /// Returns the socket of the driver's daemon.
    pub fn socket(&self) -> Option<&Path> {
        self.daemons.first().map(Daemon::socket)
    }

    /// Returns the socket of the peer's daemon.
    pub fn peer_socket(&self) -> Option<&Path> {
        self.daemons.last().map(Daemon::socket)
    }
}

/// Describes the daemons and their setup.
pub fn words(setup: Setup, daemons: u32) -> String {
    let crc = if setup.crc { "on" } else { "off" };
    let all = match (setup.loopback_tcp, daemons) {
        (false, _) => "one daemon".to_owned(),
        (true, 1) => format!("one daemon, CRC {crc}"),
        (true, n) => format!("{n} daemons, CRC {crc}"),
    };
    match setup.workers {
        None => all,
        Some(1) => all + ", one worker",
        Some(n) => format!("{all}, {n} workers"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_describe_the_setup() {
        let two = Setup { workers: Some(2), ..Setup::DIRECT };
        let one = Setup { workers: Some(1), crc: false, ..Setup::TCP };
        for (setup, daemons, said) in [
            (Setup::DIRECT, 1, "one daemon"),
            (two, 1, "one daemon, 2 workers"),
            (Setup::TCP, 1, "one daemon, CRC on"),
            (one, 2, "2 daemons, CRC off, one worker"),
        ] {
            assert_eq!(words(setup, daemons), said);
        }
    }
}
