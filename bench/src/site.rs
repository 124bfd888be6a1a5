//! Private daemons and the two processes that use them.

use std::path::Path;
use std::time::Duration;

use rnic_client::Context;
use rnic_tools::perf::PerfError;
use rnic_tools::perf::measured::Amount;
use rnic_tools::perf::peer::{Peer, open, peer_program};

use crate::daemon::{Daemon, Setup};

/// Options of the measurements with private daemons.
pub struct Options<'a> {
    /// The daemon's binary.
    pub rnicd: &'a Path,
    /// Selects parts by their titles (`--only`).
    pub only: &'a str,
    /// Length of a round of each subject.
    pub amount: Amount,
    /// Number of rounds; the result is the median.
    pub rounds: u32,
}

impl Options<'_> {
    /// Returns the round length of a subject that cannot count messages.
    pub fn time(&self) -> Duration {
        match self.amount {
            Amount::Time(time) => time,
            Amount::Messages(_) => Duration::from_millis(100),
        }
    }
}

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
    pub fn start(rnicd: &Path, setup: Setup) -> Result<Self, PerfError> {
        let start = |_| Daemon::start(rnicd, setup);
        Ok(Site { daemons: (0..setup.daemons).map(start).collect::<Result<_, _>>()? })
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
