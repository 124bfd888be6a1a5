//! `rnicd demo`: RDMA between two unprivileged processes, seen with one command.
//!
//! For each path, a private daemon serves two child processes of this program. They exchange every
//! operation (`rnic_client::programs::tour`), copy a file with `rcopy`'s transfer code and measure themselves beside raw
//! TCP and memcpy. [`parts`] is what the children do; here is who starts them and what a person is
//! told. Every verdict comes from a child's exit code, and this process's repeats it.

mod children;
pub mod parts;
mod report;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::config::{Config, Loopback, Seccomp};
use crate::exec::PrivateDaemon;
use crate::privilege::check_available;
use children::{Child, ChildError};
use report::Report;

/// Why the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The private daemon did not start or stop.
    #[error("the daemon: {0}")]
    Daemon(#[from] crate::exec::ExecError),
    /// A child process failed.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The system refused something.
    #[error("{what}: {error}")]
    System {
        /// What was tried.
        what: String,
        /// Its error.
        error: io::Error,
    },
    /// The copy arrived under another digest or length.
    #[error("the copy of {0} differs from it")]
    Differs(PathBuf),
}

/// What to copy.
pub enum Cargo {
    /// This file.
    File(PathBuf),
    /// A file of this many octets, made for the purpose.
    Made(u64),
}

/// Runs the demo and tells how it went on standard output.
pub fn run(cargo: &Cargo) -> Result<ExitCode, DemoError> {
    let mut report = Report::begin();
    let folder = tempfile::Builder::new()
        .prefix("rnicd-demo-")
        .tempdir()
        .map_err(system("cannot make a folder"))?;
    let file = match cargo {
        Cargo::File(path) => path.clone(),
        Cargo::Made(len) => make(folder.path(), *len).map_err(system("cannot make the file"))?,
    };
    for (loopback, title) in [
        (Loopback::Direct, "Direct path: from memory to memory inside one daemon"),
        (Loopback::Tcp, "TCP path: iWARP with CRC on the loopback interface"),
    ] {
        report.section(title);
        let mut config = Config::default();
        config.engine.loopback = loopback;
        if check_available(config.control.seccomp).is_err() {
            // Some sandboxes have no filters; a demo has no configuration to say so in.
            config.control.seccomp = Seccomp::Off;
        }
        let daemon = PrivateDaemon::start(config)?;
        tour(&daemon, &mut report)?;
        copy(&daemon, &file, &mut report)?;
        measure(&daemon, &mut report)?;
        daemon.stop().map_err(system("the daemon did not stop in order"))?;
    }
    report.end();
    Ok(ExitCode::SUCCESS)
}

fn tour(daemon: &PrivateDaemon, report: &mut Report) -> Result<(), DemoError> {
    let mut host = Child::start(daemon, &["host"])?;
    let address = host.line("address")?;
    let mut guest = Child::start(daemon, &["visit", &address])?;
    report.pair(host.id(), guest.id());
    while let Some(line) = guest.next_line()? {
        report.step(&line);
    }
    guest.finish()?;
    host.finish()?;
    Ok(())
}

fn copy(daemon: &PrivateDaemon, file: &Path, report: &mut Report) -> Result<(), DemoError> {
    let folder = tempfile::Builder::new()
        .prefix("rnicd-demo-")
        .tempdir()
        .map_err(system("cannot make a folder"))?;
    let mut receiver = Child::start(daemon, &["receive", &folder.path().to_string_lossy()])?;
    let address = receiver.line("address")?;
    let mut sender = Child::start(daemon, &["send", &file.to_string_lossy(), &address])?;
    let sent = sender.line("sent")?;
    let received = receiver.line("received")?;
    sender.finish()?;
    receiver.finish()?;
    let digest = |line: &str| line.split('\t').nth(1).map(str::to_owned);
    if digest(&sent) != digest(&received) {
        return Err(DemoError::Differs(file.to_owned()));
    }
    report.copied(file, &sent);
    Ok(())
}

fn measure(daemon: &PrivateDaemon, report: &mut Report) -> Result<(), DemoError> {
    let mut child = Child::start(daemon, &["measure"])?;
    while let Some(line) = child.next_line()? {
        report.figure(&line);
    }
    child.finish()?;
    Ok(())
}

/// Makes a file that does not compress, like real data.
fn make(folder: &Path, len: u64) -> io::Result<PathBuf> {
    let path = folder.join("demo-data");
    let mut file = File::create(&path)?;
    let mut block = vec![0u8; 1 << 20];
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut left = len;
    while left > 0 {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_le_bytes());
        }
        let n = left.min(block.len() as u64);
        // At most the length of the block.
        file.write_all(&block[..n as usize])?;
        left -= n;
    }
    Ok(path)
}

fn system(what: &str) -> impl FnOnce(io::Error) -> DemoError {
    let what = what.to_owned();
    move |error| DemoError::System { what, error }
}
