//! A daemon of a test.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::process::Process;

/// Where this package's binaries are; only the tests know (`env!("CARGO_BIN_EXE_...")`).
#[derive(Clone, Copy)]
pub struct Binaries {
    /// The daemon.
    pub rnicd: &'static str,
    /// The control tool.
    pub rnicctl: &'static str,
    /// A client.
    pub actor: &'static str,
}

/// This package's binaries, as only an integration test can name them.
#[macro_export]
macro_rules! binaries {
    () => {
        $crate::daemon::Binaries {
            rnicd: env!("CARGO_BIN_EXE_rnicd-under-test"),
            rnicctl: env!("CARGO_BIN_EXE_rnicctl-under-test"),
            actor: env!("CARGO_BIN_EXE_actor"),
        }
    };
}

/// A running daemon with a directory of its own.
pub struct Daemon {
    binaries: Binaries,
    process: Option<Process>,
    dir: TempDir,
    socket: PathBuf,
}

impl Daemon {
    /// Starts a daemon with this configuration and waits until it serves.
    ///
    /// # Panics
    ///
    /// If it does not.
    pub fn start(binaries: Binaries, config: &str) -> Self {
        let dir = TempDir::with_prefix("rnic-test-").expect("a temporary directory");
        let socket = dir.path().join("rnicd.sock");
        let file = dir.path().join("rnicd.toml");
        std::fs::write(&file, config).expect("a file in a directory just made");
        let mut command = Command::new(binaries.rnicd);
        command.arg("run").arg("--config").arg(&file).arg("--socket").arg(&socket);
        let mut process = Process::start(command);
        process.line_after("serving");
        Daemon { binaries, process: Some(process), dir, socket }
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Process::id)
    }

    /// A client process of this daemon that plays `part`.
    pub fn actor(&self, part: &[&str]) -> Process {
        let mut command = Command::new(self.binaries.actor);
        command.env("RNIC_SOCKET", &self.socket).args(part);
        Process::start(command)
    }

    /// What `rnicctl ARGS --json` says.
    ///
    /// # Panics
    ///
    /// If it fails or prints no JSON.
    pub fn ctl(&self, args: &[&str]) -> serde_json::Value {
        let mut command = Command::new(self.binaries.rnicctl);
        command.env("RNIC_SOCKET", &self.socket).args(args).arg("--json");
        let lines = Process::start(command).succeed();
        serde_json::from_str(&lines.join("\n"))
            .unwrap_or_else(|e| panic!("rnicctl {args:?}: {e}\n{}", lines.join("\n")))
    }

    /// Stops it with `SIGTERM` and insists on an orderly end; what it printed.
    ///
    /// # Panics
    ///
    /// If it ends otherwise or leaves its socket behind.
    pub fn stop(mut self) -> Vec<String> {
        self.stop_in_order()
    }

    /// Kills it.
    pub fn kill(mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    fn stop_in_order(&mut self) -> Vec<String> {
        let Some(process) = self.process.take() else { return Vec::new() };
        process.signal(Signal::TERM);
        let (status, lines) = process.finish();
        assert!(status.success(), "rnicd: {status}\n{}", lines.join("\n"));
        assert!(!self.socket.exists(), "rnicd left its socket behind");
        lines
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop_in_order();
        }
    }
}
