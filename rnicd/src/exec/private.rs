//! A daemon with a private socket, in a folder that is removed with it.
//!
//! [`PrivateDaemon`] runs in threads of the calling process. [`serve`] runs one as a process, until
//! its standard input is closed. So it also stops gracefully, and removes its folder, when its
//! parent is killed.

use std::fs::Permissions;
use std::io::{self, BufRead, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::JoinHandle;

use crate::config::{Config, ConfigError, Loopback, Profile, Seccomp};
use crate::control::{ControlSocket, Notifier, Server, StartError, Stopper};
use crate::log::Log;
use crate::privilege;

/// Reasons why the daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum PrivateError {
    /// The server did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Its configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its profile cannot be loaded.
    #[error("{0}")]
    Profile(String),
    /// Privileges could not be given up.
    #[error(transparent)]
    Privileges(#[from] privilege::RenounceError),
    /// Another operation failed.
    #[error("{what}: {error}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

/// A daemon in threads of this process, on a private socket.
pub struct PrivateDaemon {
    folder: Folder,
    stopper: Stopper,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl PrivateDaemon {
    /// Starts a daemon with a new folder that only this user can enter.
    pub fn start(config: Config) -> Result<Self, PrivateError> {
        let folder = Folder::new().map_err(system("cannot create a folder for the socket"))?;
        PrivateDaemon::start_in(config, folder)
    }

    fn start_in(config: Config, folder: Folder) -> Result<Self, PrivateError> {
        let path = folder.socket();
        let socket = ControlSocket::open(Some(&path), &config.control).map_err(StartError::from)?;
        let server = Server::start(config, socket, None, Notifier::default())?;
        let stopper = server.stopper();
        let thread = std::thread::Builder::new()
            .name("rnicd-control".to_owned())
            .spawn(|| server.run())
            .map_err(system("cannot start a thread"))?;
        Ok(PrivateDaemon { folder, stopper, thread: Some(thread) })
    }

    /// Returns the path of its socket, for `RNIC_SOCKET`.
    pub fn socket(&self) -> PathBuf {
        self.folder.socket()
    }

    /// Stops it gracefully and removes its folder.
    pub fn stop(mut self) -> io::Result<()> {
        self.stopper.stop();
        self.join()
    }

    /// Waits until it is stopped, and removes its folder.
    pub fn wait(mut self) -> io::Result<()> {
        self.join()
    }

    fn join(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the daemon panicked")))
    }
}

impl Drop for PrivateDaemon {
    fn drop(&mut self) {
        self.stopper.stop();
        // Dropped instead of stopped: the caller already reports another error.
        let _ = self.join();
    }
}

/// A folder for a daemon's socket. Dropping it removes it with its contents.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// Creates a folder that only this user can enter.
    pub(super) fn new() -> io::Result<Self> {
        // The default mode would be 0777 without the bits of the umask.
        let own = Permissions::from_mode(0o700);
        let mut builder = tempfile::Builder::new();
        Ok(Folder(builder.prefix("rnicd-exec-").permissions(own).tempdir()?.keep()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    fn socket(&self) -> PathBuf {
        self.0.join(SOCKET)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The daemon's process may have removed it already.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Values that override the configuration.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// `wired.profile`.
    pub profile: Option<String>,
    /// `engine.loopback`.
    pub loopback: Option<Loopback>,
    /// `control.seccomp`.
    pub seccomp: Option<Seccomp>,
}

/// Runs a private daemon in this process. Its socket is in `folder`, which the parent has created;
/// both remove it when they end. The configuration arrives on standard input, followed by a zero
/// byte. The daemon serves until the input is closed. It writes one line to standard output:
/// `ready` or `failed`, a tab, and the socket or the reason.
pub fn serve(folder: PathBuf, overrides: Overrides) -> ExitCode {
    match start(Folder(folder), overrides) {
        Ok((daemon, log)) => {
            let ended = daemon.wait();
            if let Err(error) = &ended {
                tracing::error!(%error, "the daemon did not stop gracefully");
            }
            drop(log);
            ended.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
        }
        Err(error) => {
            // Fails if the parent is gone.
            let _ = write_line(FAILED, error.to_string().replace('\n', "; ").as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn start(folder: Folder, overrides: Overrides) -> Result<(PrivateDaemon, Log), PrivateError> {
    let mut text = Vec::new();
    let mut input = io::stdin().lock();
    input.read_until(0, &mut text).map_err(system("cannot read the configuration"))?;
    drop(input);
    text.pop();
    // The parent has already reported errors with the name of the file or the option.
    let mut config = Config::parse(Path::new("configuration"), &String::from_utf8_lossy(&text))?;
    if let Some(name) = overrides.profile {
        config.wired.profile = Profile::load(&name).map_err(PrivateError::Profile)?;
    }
    config.engine.loopback = overrides.loopback.unwrap_or(config.engine.loopback);
    config.control.seccomp = overrides.seccomp.unwrap_or(config.control.seccomp);
    let (mut log, problem) = Log::start(&config.log);
    if let Some(problem) = problem {
        tracing::warn!("{problem}; using log.level from the configuration");
    }
    if privilege::own_user() != 0 {
        privilege::renounce()?;
    }
    privilege::raise_descriptor_limit();
    log.start_writing(config.control.seccomp).map_err(system("cannot start a thread"))?;
    let daemon = PrivateDaemon::start_in(config, folder)?;
    let stopper = daemon.stopper.clone();
    std::thread::Builder::new()
        .name("rnicd-lifeline".to_owned())
        .spawn(move || {
            // The input has no more data. Its end and errors both mean stop.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            stopper.stop();
        })
        .map_err(system("cannot start a thread"))?;
    let socket = daemon.socket();
    write_line(READY, socket.as_os_str().as_encoded_bytes())
        .map_err(system("cannot write the path of the socket"))?;
    Ok((daemon, log))
}

fn write_line(kind: &[u8], what: &[u8]) -> io::Result<()> {
    io::stdout().write_all(&[kind, b"\t", what, b"\n"].concat())
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> PrivateError {
    move |error| PrivateError::System { what, error }
}

/// Start of the line that a serving daemon writes.
pub(super) const READY: &[u8] = b"ready";
/// Start of the line that a daemon writes if it did not start.
pub(super) const FAILED: &[u8] = b"failed";
const SOCKET: &str = "rnicd.sock";
