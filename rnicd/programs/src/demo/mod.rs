//! `rnicd demo`: RDMA between two unprivileged processes, with one command.
//!
//! For each path, a private daemon in its own process serves two child processes of this program.
//! They run every operation (`rnic_tools::tour`), copy a file with the code of `rnic-copy`, and
//! compare the path with raw TCP and memcpy. [`parts`] is the code of the children; this module
//! starts them and prints the report. If a child fails, so does the demo.

mod children;
pub mod parts;
mod report;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use children::{Child, ChildError};
use report::Report;
use rnicd::config::{Config, Loopback, Seccomp};
use rnicd::exec::{DaemonProcess, ExecError, LogTo, Overrides};
use rnicd::privilege::check_available;

/// Reasons why the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The private daemon did not start or stop.
    #[error(transparent)]
    Daemon(#[from] ExecError),
    /// A child process failed.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// Another operation failed.
    #[error("{what}: {error}")]
    System {
        /// The failed operation.
        what: String,
        /// The system's error.
        error: io::Error,
    },
    /// The copy has a different digest.
    #[error("the copy of {0} differs from the original")]
    Differs(PathBuf),
}

/// The file that the demo copies.
pub enum Payload {
    /// A file of the user, which is only read.
    File(PathBuf),
    /// A file of this many bytes, created for the demo.
    Generated(u64),
}

/// Runs the demo and prints its progress to standard output.
pub fn run(payload: &Payload) -> Result<ExitCode, DemoError> {
    if let Payload::File(path) = payload {
        // Before anything is started, so a missing file fails early.
        check(path)?;
    }
    let mut report = Report::begin();
    for (loopback, title) in [
        (Loopback::Direct, "Direct path: from memory to memory inside one daemon"),
        (Loopback::Tcp, "TCP path: iWARP with CRC on the loopback interface"),
    ] {
        report.section(title);
        // Some sandboxes have no seccomp, and the demo has no configuration to turn it off.
        let filters = check_available(Config::default().control.seccomp).is_ok();
        let seccomp = (!filters).then_some(Seccomp::Off);
        let overrides = Overrides { profile: None, loopback: Some(loopback), seccomp };
        let daemon = DaemonProcess::start("", overrides, LogTo::TempFile)?;
        if let Err(error) = steps(&daemon, payload, &mut report) {
            // If the daemon died, that is the cause.
            return Err(daemon.stop().map_or_else(DemoError::from, |()| error));
        }
        daemon.stop()?;
    }
    report.end();
    Ok(ExitCode::SUCCESS)
}

fn steps(daemon: &DaemonProcess, payload: &Payload, report: &mut Report) -> Result<(), DemoError> {
    tour(daemon, report)?;
    let file = match payload {
        Payload::File(path) => path.clone(),
        Payload::Generated(len) => {
            make(daemon.folder(), *len).map_err(system("cannot create the file"))?
        }
    };
    copy(daemon, &file, report)?;
    measure(daemon, report)
}

fn check(path: &Path) -> Result<(), DemoError> {
    let cannot_read = || format!("cannot read {}", path.display());
    let metadata = std::fs::metadata(path).map_err(system(&cannot_read()))?;
    if !metadata.is_file() {
        let error = io::Error::other("it is not a regular file");
        return Err(DemoError::System { what: cannot_read(), error });
    }
    File::open(path).map(drop).map_err(system(&cannot_read()))
}

fn tour(daemon: &DaemonProcess, report: &mut Report) -> Result<(), DemoError> {
    let mut host = Child::start(daemon, &["host".as_ref()])?;
    let address = host.line("address")?;
    let mut guest = Child::start(daemon, &["visit".as_ref(), address.as_ref()])?;
    report.pair(host.id(), guest.id());
    while let Some(line) = guest.next_line()? {
        report.step(&line);
    }
    guest.finish()?;
    host.finish()?;
    Ok(())
}

fn copy(daemon: &DaemonProcess, file: &Path, report: &mut Report) -> Result<(), DemoError> {
    // In the daemon's folder, which is removed with it.
    let folder = daemon.folder().join("received");
    std::fs::create_dir(&folder).map_err(system("cannot create a folder"))?;
    let mut receiver = Child::start(daemon, &["receive".as_ref(), folder.as_ref()])?;
    let address = receiver.line("address")?;
    let part = ["send".as_ref(), file.as_os_str(), address.as_ref()];
    let mut sender = Child::start(daemon, &part)?;
    let sent = sender.line("sent")?;
    let received = receiver.line("received")?;
    sender.finish()?;
    receiver.finish()?;
    let digest = |line: &str| line.split('\t').nth(1).map(str::to_owned);
    if digest(&sent) != digest(&received) {
        return Err(DemoError::Differs(file.to_owned()));
    }
    report.copied(file, &sent);
    // Makes room for the copy over the other path.
    std::fs::remove_dir_all(&folder).map_err(system("cannot remove the copy"))
}

fn measure(daemon: &DaemonProcess, report: &mut Report) -> Result<(), DemoError> {
    let mut child = Child::start(daemon, &["measure".as_ref()])?;
    while let Some(line) = child.next_line()? {
        report.measurement(&line);
    }
    child.finish()?;
    Ok(())
}

/// Creates a file of incompressible data.
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
