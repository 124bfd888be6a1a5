//! A daemon on a socket of its own, in a folder that goes with it.
//!
//! [`PrivateDaemon`] runs in threads of whoever starts it. [`serve`] is a process around one: it
//! lives as long as its standard input, so that it also ends, in order and with its folder, when
//! whoever started it is killed.

use std::fs::Permissions;
use std::io::{self, BufRead, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::JoinHandle;

use crate::config::{Config, ConfigError, Loopback, Seccomp};
use crate::control::{ControlSocket, Notifier, Server, StartError, Stopper};
use crate::log::Log;
use crate::privilege;

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
pub enum PrivateError {
    /// It did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Its configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Privileges could not be given up.
    #[error(transparent)]
    Privileges(#[from] privilege::RenounceError),
    /// The operating system refused something else.
    #[error("{what}: {error}")]
    System {
        /// The operation that failed, in words.
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
    /// Starts it in a new folder that only this user may enter.
    pub fn start(config: Config) -> Result<Self, PrivateError> {
        let folder = Folder::new().map_err(system("cannot make a folder for the socket"))?;
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

    /// Its socket, for `RNIC_SOCKET`.
    pub fn socket(&self) -> PathBuf {
        self.folder.socket()
    }

    /// Stops it in order and removes its folder.
    pub fn stop(mut self) -> io::Result<()> {
        self.stopper.stop();
        self.join()
    }

    /// Waits until it has been stopped and removes its folder.
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
        // Not stopped in order; whoever drops it has an error of its own to tell.
        let _ = self.join();
    }
}

/// A folder for a daemon's socket, which is removed with this and with everything in it.
#[derive(Debug)]
pub(super) struct Folder(PathBuf);

impl Folder {
    /// A new one that only this user may enter.
    pub(super) fn new() -> io::Result<Self> {
        // Otherwise it would have what the umask leaves of everybody's rights.
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
        // It is gone already if a daemon of another process had it as well.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What is different from the configuration.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// `engine.loopback`.
    pub loopback: Option<Loopback>,
    /// `control.seccomp`.
    pub seccomp: Option<Seccomp>,
}

/// The process of a private daemon, whose socket is in `folder`: made by whoever started it, and
/// removed by who of the two ends last in order. Its configuration comes on standard input, with a
/// zero byte behind it; the daemon serves until the input ends. One line on standard output says
/// where, or why not: `ready` or `failed`, a tabulator, and the socket or the reason.
pub fn serve(folder: PathBuf, overrides: Overrides) -> ExitCode {
    match start(Folder(folder), overrides) {
        Ok((daemon, log)) => {
            let ended = daemon.wait();
            if let Err(error) = &ended {
                tracing::error!(%error, "did not stop in order");
            }
            drop(log);
            ended.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS)
        }
        Err(error) => {
            // Who is gone need not be told.
            let _ = tell(FAILED, error.to_string().replace('\n', "; ").as_bytes());
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
    // Whoever sent it has named the file in its own errors.
    let mut config = Config::parse(Path::new("configuration"), &String::from_utf8_lossy(&text))?;
    config.engine.loopback = overrides.loopback.unwrap_or(config.engine.loopback);
    config.control.seccomp = overrides.seccomp.unwrap_or(config.control.seccomp);
    let (mut log, problem) = Log::start(&config.log);
    if let Some(problem) = problem {
        tracing::warn!("{problem}; using log.level of the configuration");
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
            // Nothing more is said: whatever comes is the end, and so is an error.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            stopper.stop();
        })
        .map_err(system("cannot start a thread"))?;
    let socket = daemon.socket();
    tell(READY, socket.as_os_str().as_encoded_bytes())
        .map_err(system("cannot say where the socket is"))?;
    Ok((daemon, log))
}

fn tell(kind: &[u8], what: &[u8]) -> io::Result<()> {
    io::stdout().write_all(&[kind, b"\t", what, b"\n"].concat())
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> PrivateError {
    move |error| PrivateError::System { what, error }
}

/// What a private daemon writes when it serves.
pub(super) const READY: &[u8] = b"ready";
/// The daemon did not start.
pub(super) const FAILED: &[u8] = b"failed";
const SOCKET: &str = "rnicd.sock";
