//! Private daemons in the measured configurations.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rnic_client::Context;
use rnic_tools::perf::PerfError;
use rustix::process::{Pid, Signal, kill_process};

/// A number of daemons, and their settings that differ from the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Number of daemons: 1 for both ends, or 2.
    pub daemons: u32,
    /// Even connections within the daemon use TCP.
    pub loopback_tcp: bool,
    /// TCP connections use CRCs (`mpa.crc`).
    pub crc: bool,
    /// Maximum QPs of the daemon and of a session.
    pub qps: u32,
    /// Number of workers (`engine.workers`); `None` leaves it to the daemon.
    pub workers: Option<u32>,
    /// Maximum sessions of the daemon and of a user.
    pub sessions: u32,
    /// Other users may use the daemon.
    pub others: bool,
}

impl Setup {
    /// The direct path, with checksums on TCP connections and few QPs.
    pub const DIRECT: Setup = Setup {
        daemons: 1,
        loopback_tcp: false,
        crc: true,
        qps: 1024,
        workers: None,
        sessions: 128,
        others: false,
    };

    /// The same with all connections over TCP, between two daemons.
    pub const TCP: Setup = Setup { daemons: 2, loopback_tcp: true, ..Setup::DIRECT };

    /// Describes the daemons.
    pub fn words(self) -> String {
        let crc = if self.crc { "on" } else { "off" };
        let all = match (self.loopback_tcp, self.daemons) {
            (false, _) => "one daemon".to_owned(),
            (true, 1) => format!("one daemon, CRC {crc}"),
            (true, n) => format!("{n} daemons, CRC {crc}"),
        };
        match self.workers {
            None => all,
            Some(1) => all + ", one worker",
            Some(n) => format!("{all}, {n} workers"),
        }
    }

    /// Returns the path of connections: `direct` or `tcp`.
    pub fn path(self) -> &'static str {
        if self.loopback_tcp { "tcp" } else { "direct" }
    }

    /// Returns the title, which `--only` searches.
    pub fn title(self) -> String {
        format!("{}: {}", self.path(), self.words())
    }

    /// Returns the number of connections for which each daemon has `qps` QPs. A daemon has one or
    /// both ends of each connection.
    pub fn connections(self, qps: u32) -> u32 {
        (qps / (3 - self.daemons)).max(1)
    }

    /// Returns the text of the configuration file.
    fn config(self) -> String {
        let loopback = if self.loopback_tcp { "tcp" } else { "direct" };
        let Setup { crc, qps, sessions, .. } = self;
        let workers = self.workers.map_or("\"auto\"".to_owned(), |n| n.to_string());
        let mode = if self.others { "0666" } else { "0600" };
        // Connection rates are unlimited, because some measurements measure them.
        format!(
            "[control]\nmode = \"{mode}\"\n\
             [engine]\nloopback = \"{loopback}\"\nworkers = {workers}\n\
             [mpa]\ncrc = {crc}\n\
             [limits]\nqps = {qps}\nsessions = {sessions}\n\
             [limits.user]\nsessions = {sessions}\n\
             accepts_per_second = {RATE}\nconnections_per_second = {RATE}\n\
             [limits.peer]\nconnections_per_second = {RATE}\n\
             [limits.session]\nqps = {qps}\n\
             [log]\nlevel = \"warn\"\n"
        )
    }
}

/// A running private daemon, stopped when dropped.
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    /// Holds socket, configuration and log.
    _folder: tempfile::TempDir,
}

impl Daemon {
    /// Starts `rnicd` and waits until it accepts sessions.
    pub fn start(rnicd: &Path, setup: Setup) -> Result<Self, PerfError> {
        let folder = tempfile::Builder::new()
            .prefix("rnic-bench-")
            .tempdir()
            .map_err(PerfError::io("making a temporary folder"))?;
        if setup.others {
            // Other users must be able to reach the socket.
            fs::set_permissions(folder.path(), Permissions::from_mode(0o711))
                .map_err(PerfError::io("opening a temporary folder to others"))?;
        }
        let config = folder.path().join("rnicd.toml");
        let socket = folder.path().join("rnicd.sock");
        let log = folder.path().join("log");
        fs::write(&config, setup.config()).map_err(PerfError::io("writing a configuration"))?;
        let stderr = File::create(&log).map_err(PerfError::io("making a log file"))?;
        let child = Command::new(rnicd)
            .args(["run".as_ref(), "--config".as_ref(), config.as_os_str()])
            .args(["--socket".as_ref(), socket.as_os_str()])
            // Stops the daemon if this program is killed.
            .args(["--exit-when-idle", "60s"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .map_err(|e| PerfError::Daemon(format!("starting {}: {e}", rnicd.display())))?;
        let mut daemon = Daemon { child, socket, _folder: folder };
        daemon.await_answer(&log)?;
        Ok(daemon)
    }

    /// Returns the path of the control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn await_answer(&mut self, log: &Path) -> Result<(), PerfError> {
        let start = Instant::now();
        loop {
            let Err(e) = Context::open_at(&self.socket) else { return Ok(()) };
            let ended = self.child.try_wait().map_err(PerfError::io("waiting for the daemon"))?;
            let why = match ended {
                Some(status) => format!("ended with {status}"),
                None if start.elapsed() > START => format!("does not answer: {e}"),
                None => {
                    std::thread::sleep(POLL_INTERVAL);
                    continue;
                }
            };
            let said = fs::read_to_string(log).unwrap_or_default();
            return Err(PerfError::Daemon(format!("{why}\n{}", said.trim_end())));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Tries a graceful stop, so that the daemon removes its socket and shared memory.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // Fails only if the daemon has ended, which `try_wait` reports.
            let _ = kill_process(pid, Signal::TERM);
        }
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if start.elapsed() > STOP {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Returns the path of `rnicd`: `named`, or `rnicd` in the folder of this program.
pub fn find(named: Option<PathBuf>) -> Result<PathBuf, PerfError> {
    if let Some(path) = named {
        return Ok(path);
    }
    let own = std::env::current_exe().map_err(PerfError::io("finding this program"))?;
    let beside = own.with_file_name("rnicd");
    if beside.is_file() {
        return Ok(beside);
    }
    Err(PerfError::Arguments(format!(
        "there is no {}: build it with `cargo build --release -p rnicd`, or pass --rnicd PATH",
        beside.display()
    )))
}

/// Connections per second, more than any measurement reaches.
const RATE: u32 = 1_000_000;
/// Time limit for the start of a daemon.
const START: Duration = Duration::from_secs(10);
/// Time limit for a graceful stop.
const STOP: Duration = Duration::from_secs(10);
/// Interval between checks of a daemon that starts or stops.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_does_not_start_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let fake = folder.path().join("rnicd");
        fs::write(&fake, "#!/bin/sh\necho \"$1: no such key: engine.loopback\" >&2\nexit 2\n")
            .unwrap();
        let mut mode = fs::metadata(&fake).unwrap().permissions();
        mode.set_mode(0o755);
        fs::set_permissions(&fake, mode).unwrap();
        let e = Daemon::start(&fake, Setup::TCP).err().unwrap().to_string();
        assert!(e.contains("run: no such key") && e.contains("exit status: 2"), "{e}");
    }

    #[test]
    fn words_describe_the_setup() {
        let two = Setup { workers: Some(2), ..Setup::DIRECT };
        let one_tcp = Setup { daemons: 1, ..Setup::TCP };
        let one = Setup { workers: Some(1), crc: false, ..Setup::TCP };
        for (setup, said) in [
            (Setup::DIRECT, "direct: one daemon"),
            (two, "direct: one daemon, 2 workers"),
            (one_tcp, "tcp: one daemon, CRC on"),
            (one, "tcp: 2 daemons, CRC off, one worker"),
        ] {
            assert_eq!(setup.title(), said);
        }
        assert_eq!([Setup::DIRECT, Setup::TCP].map(|s| s.connections(10)), [5, 10]);
    }

    #[test]
    fn a_missing_binary_is_named() {
        let e = find(None).unwrap_err().to_string();
        assert!(e.contains("--rnicd"), "{e}");
        let e = Daemon::start(Path::new("/nonexistent/rnicd"), Setup::DIRECT).err().unwrap();
        assert!(e.to_string().contains("/nonexistent/rnicd"), "{e}");
    }

    #[test]
    fn configurations_differ_in_what_is_compared() {
        let config = Setup { crc: false, qps: 20_000, ..Setup::TCP }.config();
        for line in ["loopback = \"tcp\"", "crc = false", "qps = 20000", "mode = \"0600\""] {
            assert!(config.contains(line), "{config}");
        }
        let config =
            Setup { workers: Some(2), sessions: 9, others: true, ..Setup::DIRECT }.config();
        for line in ["loopback = \"direct\"", "workers = 2", "sessions = 9", "mode = \"0666\""] {
            assert!(config.contains(line), "{config}");
        }
        assert!(Setup::DIRECT.config().contains("workers = \"auto\""));
    }
}
