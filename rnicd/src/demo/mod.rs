//! `rnicd demo`: RDMA between two unprivileged processes, seen with one command.
//!
//! For each path, a private daemon, a process of its own, serves two child processes of this
//! program. They exchange every operation (`rnic_tools::tour`), copy a file with `rcopy`'s transfer
//! code and measure themselves beside raw TCP and memcpy. [`parts`] is what the children do; here
//! is who starts them and what a person is told. Every verdict comes from a child's exit code, and
//! this process's repeats it.

mod children;
pub mod parts;
mod report;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::config::{Config, Loopback, Seccomp};
use crate::exec::{DaemonProcess, ExecError, LogTo, Overrides};
use crate::privilege::check_available;
use children::{Child, ChildError};
use report::Report;

/// Why the demo failed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The private daemon did not start or stop.
    #[error(transparent)]
    Daemon(#[from] ExecError),
    /// A child process failed.
    #[error(transparent)]
    Child(#[from] ChildError),
    /// The system refused something.
    #[error("{what}: {error}")]
    System {
        /// The operation that failed, in words.
        what: String,
        /// The system's error.
        error: io::Error,
    },
    /// The copy arrived under another digest or length.
    #[error("the copy of {0} differs from it")]
    Differs(PathBuf),
}

/// The file that the demo copies.
pub enum Cargo {
    /// A file of the user's, which is only read.
    File(PathBuf),
    /// A file of this many bytes, made for the purpose.
    Made(u64),
}

/// Runs the demo and tells how it went on standard output.
pub fn run(cargo: &Cargo) -> Result<ExitCode, DemoError> {
    if let Cargo::File(path) = cargo {
        // Before anything is started: a copy that cannot be would come late.
        check(path)?;
    }
    let mut report = Report::begin();
    for (loopback, title) in [
        (Loopback::Direct, "Direct path: from memory to memory inside one daemon"),
        (Loopback::Tcp, "TCP path: iWARP with CRC on the loopback interface"),
    ] {
        report.section(title);
        // Some sandboxes have no filters; a demo has no configuration to say so in.
        let filters = check_available(Config::default().control.seccomp).is_ok();
        let seccomp = (!filters).then_some(Seccomp::Off);
        let overrides = Overrides { loopback: Some(loopback), seccomp };
        let daemon = DaemonProcess::start("", overrides, LogTo::Nobody)?;
        if let Err(error) = steps(&daemon, cargo, &mut report) {
            // The reason behind whatever failed, if it died.
            return Err(daemon.stop().map_or_else(DemoError::from, |()| error));
        }
        daemon.stop()?;
    }
    report.end();
    Ok(ExitCode::SUCCESS)
}

fn steps(daemon: &DaemonProcess, cargo: &Cargo, report: &mut Report) -> Result<(), DemoError> {
    tour(daemon, report)?;
    let file = match cargo {
        Cargo::File(path) => path.clone(),
        Cargo::Made(len) => make(daemon.folder(), *len).map_err(system("cannot make the file"))?,
    };
    copy(daemon, &file, report)?;
    measure(daemon, report)
}

fn check(path: &Path) -> Result<(), DemoError> {
    let cannot_read = || format!("cannot read {}", path.display());
    let metadata = std::fs::metadata(path).map_err(system(&cannot_read()))?;
    if !metadata.is_file() {
        let error = io::Error::other("it is no regular file");
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
    // In the daemon's folder, so that it goes with it.
    let folder = daemon.folder().join("received");
    std::fs::create_dir(&folder).map_err(system("cannot make a folder"))?;
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
    // Room for the other path's.
    std::fs::remove_dir_all(&folder).map_err(system("cannot remove the copy"))
}

fn measure(daemon: &DaemonProcess, report: &mut Report) -> Result<(), DemoError> {
    let mut child = Child::start(daemon, &["measure".as_ref()])?;
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
