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

/// Sessions of both processes with the daemons of a site.
pub struct Ends {
    /// The driver's.
    pub context: Context,
    /// The second process, with the peer's.
    pub peer: Peer,
}

impl Site {
    /// Starts the daemons and waits until they answer.
    pub fn start(rnicd: &Path, setup: Setup, daemons: u32) -> Result<Self, PerfError> {
        let start = |_| Daemon::start(rnicd, setup);
        Ok(Site { daemons: (0..daemons).map(start).collect::<Result<_, _>>()? })
    }

    /// Starts the second process and opens both sessions.
    pub fn open(&self) -> Result<Ends, PerfError> {
        let socket = |daemon: Option<&Daemon>| daemon.map(|d| d.socket().to_path_buf());
        let context = open(socket(self.daemons.first()).as_deref())?;
        let peer = Peer::start(peer_program(socket(self.daemons.last()).as_deref())?)?;
        Ok(Ends { context, peer })
    }
}

/// How the daemons are set up.
pub fn words(setup: Setup, daemons: u32) -> String {
    let crc = if setup.crc { "on" } else { "off" };
    match (setup.loopback_tcp, daemons) {
        (false, _) => "one daemon".to_owned(),
        (true, 1) => format!("one daemon, CRC {crc}"),
        (true, n) => format!("{n} daemons, CRC {crc}"),
    }
}
