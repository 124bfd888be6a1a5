//! A daemon for this user: whether one serves, and a new one if there is none.
//!
//! Nobody is left between the program and a daemon that was started for it: a helper process
//! ([`start`]) starts it, waits until it serves and ends, so that the daemon is nobody's child but
//! `init`'s. Of two that start one at the same time, the lock beside the socket lets one daemon
//! live; who was second goes on with that one.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rnic_client::{Admission, Context, Error, StatusInfo};

use crate::outlive;

/// Environment variable that names the daemon's socket.
pub const SOCKET_VARIABLE: &str = "RNIC_SOCKET";

/// What became of looking for a daemon.
#[derive(Debug)]
pub enum Probe {
    /// One serves this user.
    Serves {
        /// Its process.
        pid: u32,
        /// Folder in which it shows its devices in files, if there is one.
        tree: Option<PathBuf>,
        /// Names of its devices.
        devices: [String; 2],
        /// What it says of itself.
        status: Box<StatusInfo>,
    },
    /// There is none, in the library's words.
    Absent(String),
    /// There is one that is about to end, in the library's words.
    Ending(String),
    /// Only the system's daemon is there and it does not serve this user, in the library's words.
    Foreign(String),
    /// There is one that does not serve this user, in the library's words.
    Refuses(String),
}

/// Why there is no daemon for the program.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// There is one, which refuses.
    #[error("{0}")]
    Refuses(String),
    /// There is none, and none may be started.
    #[error("{0}; without --no-start one would be started")]
    Absent(String),
    /// The daemon's program is nowhere.
    #[error(
        "{why}, and there is no rnicd to start, neither beside {} nor in PATH; install it or name \
         it by --daemon", own.display()
    )]
    NoProgram {
        /// What the library says.
        why: String,
        /// This program's folder.
        own: PathBuf,
    },
    /// It was started and ended.
    #[error("{} ended ({status}) before it served: {said}; its log is {}", program.display(), log.display())]
    Ended {
        /// The daemon's program.
        program: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// The end of its log.
        said: String,
        /// Where it logs.
        log: PathBuf,
    },
    /// It takes too long.
    #[error("no daemon serves after {}s: {why}; the log of the one that was started is {}", patience.as_secs(), log.display())]
    Late {
        /// How long it was waited for.
        patience: Duration,
        /// What the library says.
        why: String,
        /// Where it logs.
        log: PathBuf,
    },
    /// The folder for socket and log is not safe to use.
    #[error("{} is not a folder of this user with mode 0700; remove it, or set XDG_RUNTIME_DIR", path.display())]
    UnsafeFolder {
        /// The folder.
        path: PathBuf,
    },
    /// The system refused.
    #[error("{what} {}: {error}", path.display())]
    System {
        /// The operation that failed, in words.
        what: &'static str,
        /// The file it was about.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// A daemon to be started.
#[derive(Debug)]
pub struct Starting<'a> {
    /// Its program, if it was named.
    pub program: Option<&'a Path>,
    /// How long it is to stay without clients, as `rnicd` reads it.
    pub idle: &'a str,
}

/// A daemon that was started.
#[derive(Debug)]
pub struct Started {
    /// Its process.
    pub pid: u32,
    /// Where it logs.
    pub log: PathBuf,
}

/// Looks for a daemon as the libraries will.
pub fn probe() -> Probe {
    let asked = Context::open().and_then(|context| Ok((context.status()?, context.device()?)));
    match asked {
        Ok((status, device)) => Probe::Serves {
            pid: status.pid,
            status: Box::new(status),
            tree: Some(PathBuf::from(device.tree)).filter(|tree| tree.is_dir()),
            devices: [device.name, device.wired_name],
        },
        Err(error) => refused(&error, &foreign_socket()),
    }
}

/// Classifies a failure to open the device. A daemon at the socket `foreign` need not serve this
/// user, who can have another one.
fn refused(error: &Error, foreign: &Option<PathBuf>) -> Probe {
    let words = error.to_string();
    let is_foreign = |path: &PathBuf| foreign.as_ref() == Some(path);
    match error {
        Error::NoDaemon { tried } if tried.iter().all(|(_, why)| is_absent(why)) => {
            Probe::Absent(words)
        }
        Error::NoDaemon { tried }
            if tried.iter().all(|(path, why)| is_absent(why) || is_foreign(path)) =>
        {
            Probe::Foreign(words)
        }
        Error::NotAdmitted { path, .. } if is_foreign(path) => Probe::Foreign(words),
        Error::NotAdmitted { why: Admission::Stopping, .. } | Error::DaemonGone => {
            Probe::Ending(words)
        }
        _ => Probe::Refuses(words),
    }
}

/// Returns the socket of the system's daemon if the user's own daemon has another one.
fn foreign_socket() -> Option<PathBuf> {
    let is_named = std::env::var_os(SOCKET_VARIABLE).is_some_and(|value| !value.is_empty());
    let is_own = rustix::process::geteuid().is_root();
    (!is_named && !is_own).then(|| PathBuf::from(SERVICE_SOCKET))
}

/// Whether a socket is not there, or was left over by a daemon that is gone.
fn is_absent(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// The daemon's program: the one that was named, else the one beside this program, else the first
/// in `PATH`.
pub fn program(named: Option<&Path>) -> Option<PathBuf> {
    if let Some(named) = named {
        return Some(named.to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = own_folder().into_iter().chain(std::env::split_paths(&path));
    folders.map(|folder| folder.join("rnicd")).find(|program| is_executable(program))
}

/// Whether this process may run a file.
pub fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

fn own_folder() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(Path::to_owned)
}

/// Starts a daemon that outlives this process, unless another one is faster, and waits until one
/// serves. `None` if that is another one.
pub fn start(what: &Starting<'_>) -> Result<Option<Started>, DaemonError> {
    let socket = named_socket()?;
    let log = log_file(socket.as_deref())?;
    let deadline = Instant::now() + PATIENCE;
    let mut child: Option<(PathBuf, Child, u64)> = None;
    loop {
        let why = match probe() {
            Probe::Serves { pid, .. } => {
                let ours = child.is_some_and(|(_, child, _)| child.id() == pid);
                return Ok(ours.then_some(Started { pid, log }));
            }
            Probe::Refuses(why) => return Err(DaemonError::Refuses(why)),
            Probe::Absent(why) | Probe::Foreign(why) | Probe::Ending(why) => why,
        };
        if Instant::now() >= deadline {
            return Err(DaemonError::Late { patience: PATIENCE, why, log });
        }
        child = match child {
            None => Some(spawn(what, socket.as_deref(), &log, why)?),
            Some((program, mut running, logged)) => {
                match running.try_wait().map_err(system("cannot wait for", &program))? {
                    None => Some((program, running, logged)),
                    // Another one has the socket: it will serve, or it is ending, and then it is
                    // this one's turn again.
                    Some(status) if status.code() == Some(LOST) => None,
                    Some(status) => {
                        let said = last_line(&log, logged);
                        return Err(DaemonError::Ended { program, status, said, log });
                    }
                }
            }
        };
        std::thread::sleep(PAUSE);
    }
}

/// Starts a daemon: its program, the process, and how long the log was before.
fn spawn(
    what: &Starting<'_>,
    socket: Option<&Path>,
    log: &Path,
    why: String,
) -> Result<(PathBuf, Child, u64), DaemonError> {
    let Some(program) = program(what.program) else {
        return Err(DaemonError::NoProgram { why, own: own_folder().unwrap_or_default() });
    };
    let file = open_log(log).map_err(system("cannot write", log))?;
    let logged = file.metadata().map_or(0, |found| found.len());
    let mut command = outlive::command(&program);
    command.args(["run", "--detached", "--exit-when-idle", what.idle]);
    if let Some(socket) = socket {
        command.arg("--socket").arg(socket);
    }
    // No folder is kept from being unmounted by a daemon that was started there.
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    let child = command.spawn().map_err(system("cannot run", &program))?;
    Ok((program, child, logged))
}

/// The socket that the environment names. The daemon starts in another folder than this.
fn named_socket() -> Result<Option<PathBuf>, DaemonError> {
    let named = std::env::var_os(SOCKET_VARIABLE).filter(|value| !value.is_empty());
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(system("cannot find out the folder of", &path))
    };
    named.map(|path| absolute(path.into())).transpose()
}

/// Where a daemon that is started logs: beside its socket, wherever that will be.
fn log_file(socket: Option<&Path>) -> Result<PathBuf, DaemonError> {
    if let Some(socket) = socket {
        return Ok(socket.with_extension("log"));
    }
    let uid = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    // Another user's folder is left over from before `su`; daemon and library skip it as well.
    let is_own = |folder: &Path| std::fs::metadata(folder).is_ok_and(|found| found.uid() == uid);
    let folder = match runtime.filter(|folder| folder.is_absolute() && is_own(folder)) {
        _ if uid == 0 => {
            let folder = PathBuf::from("/run/rnicd");
            let made = DirBuilder::new().mode(0o755).recursive(true).create(&folder);
            made.map_err(system("cannot make folder", &folder))?;
            folder
        }
        Some(folder) => folder,
        None => folder_in_temp(&std::env::temp_dir(), uid)?,
    };
    Ok(folder.join("rnicd.log"))
}

/// This user's folder in the temp dir, as the daemon and the library look for it: anybody may write
/// to the temp dir, so what lies there may be somebody else's.
fn folder_in_temp(temp: &Path, uid: u32) -> Result<PathBuf, DaemonError> {
    let path = temp.join(format!("rnicd-{uid}"));
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(system("cannot make folder", &path)(error));
        }
        _ => {}
    }
    let found = std::fs::symlink_metadata(&path).map_err(system("cannot look at", &path))?;
    match found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0 {
        true => Ok(path),
        false => Err(DaemonError::UnsafeFolder { path }),
    }
}

/// The log, to be written to at its end. One that has grown long is begun anew.
fn open_log(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600);
    // Not what somebody's link leads to.
    let log = options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()).open(path)?;
    if log.metadata()?.len() > LONG_LOG {
        log.set_len(0)?;
    }
    Ok(log)
}

/// The last line of what was logged after the first `before` bytes.
fn last_line(log: &Path, before: u64) -> String {
    let read = || -> io::Result<String> {
        let mut log = File::open(log)?;
        log.seek(SeekFrom::Start(before))?;
        let mut text = Vec::new();
        log.take(LONG_LOG).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let text = read().unwrap_or_default();
    text.lines().last().unwrap_or("it said nothing").to_owned()
}

fn system(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DaemonError {
    let path = path.to_owned();
    move |error| DaemonError::System { what, path, error }
}

/// Socket of the daemon as a service.
const SERVICE_SOCKET: &str = "/run/rnicd/rnicd.sock";
/// Exit code of a daemon whose socket another one has.
const LOST: i32 = 75;
/// How long a daemon may take until it serves.
const PATIENCE: Duration = Duration::from_secs(20);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);
/// Bytes of a log that is begun anew.
const LONG_LOG: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_foreign_system_daemon_is_passed_over() {
        let own = || (PathBuf::from("/run/user/7/rnicd.sock"), io::ErrorKind::NotFound.into());
        let denied = |path: &str| (PathBuf::from(path), io::ErrorKind::PermissionDenied.into());
        let foreign = Some(PathBuf::from(SERVICE_SOCKET));
        let tried = || Error::NoDaemon { tried: vec![own(), denied(SERVICE_SOCKET)] };
        assert!(matches!(refused(&tried(), &foreign), Probe::Foreign(_)));
        assert!(matches!(refused(&tried(), &None), Probe::Refuses(_)));
        let own_denied = Error::NoDaemon { tried: vec![denied("/run/user/7/rnicd.sock")] };
        assert!(matches!(refused(&own_denied, &foreign), Probe::Refuses(_)));
        let absent = Error::NoDaemon { tried: vec![own()] };
        assert!(matches!(refused(&absent, &foreign), Probe::Absent(_)));
        let not_admitted =
            |path: &str| Error::NotAdmitted { path: path.into(), why: Admission::NotAllowed };
        assert!(matches!(refused(&not_admitted(SERVICE_SOCKET), &foreign), Probe::Foreign(_)));
        assert!(matches!(refused(&not_admitted("/x"), &foreign), Probe::Refuses(_)));
    }

    #[test]
    fn a_folder_of_somebody_else_is_not_used() {
        let temp = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let uid = rustix::process::geteuid().as_raw();
        let folder = folder_in_temp(temp.path(), uid).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(folder_in_temp(temp.path(), uid).ok(), Some(folder.clone()));
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o750))
            .unwrap_or_else(|e| panic!("{e}"));
        let error = folder_in_temp(temp.path(), uid);
        assert!(matches!(error, Err(DaemonError::UnsafeFolder { .. })));
    }

    #[test]
    fn a_log_is_appended_to_until_it_is_long_and_never_by_a_link() {
        let temp = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = temp.path().join("log");
        let length = || open_log(&path).and_then(|log| log.metadata()).map(|found| found.len());
        std::fs::write(&path, "one\ntwo\n").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(length().ok(), Some(8));
        assert_eq!(
            (last_line(&path, 0), last_line(&path, 8)),
            ("two".into(), "it said nothing".into())
        );
        std::fs::write(&path, vec![b'x'; LONG_LOG as usize + 1]).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(length().ok(), Some(0));
        let link = temp.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap_or_else(|e| panic!("{e}"));
        assert!(open_log(&link).is_err());
    }
}
