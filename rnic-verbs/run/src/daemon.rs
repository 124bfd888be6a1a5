//! Finds a daemon for this user, and starts one if there is none.
//!
//! The daemon must not become a child of the program. A helper process ([`start`]) starts it,
//! waits until it accepts clients, and then exits itself, so that `init` adopts the daemon. If two
//! helpers start a daemon at the same time, the lock beside the socket lets only one daemon run,
//! and both programs use it.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rnic_client::{AdmissionError, Context, DeviceRow, Error, Profile, StatusInfo};

use crate::outlive;

/// Environment variable with the path of the daemon's socket.
pub const SOCKET_VARIABLE: &str = "RNIC_SOCKET";

/// Result of the search for a daemon. The texts are error messages of the library.
#[derive(Debug)]
pub enum Probe {
    /// A daemon serves this user.
    Serves {
        /// Process of the daemon.
        pid: u32,
        /// Directory with its device files, if there is one.
        tree: Option<PathBuf>,
        /// Its devices.
        devices: Vec<DeviceRow>,
        /// Profile of its devices.
        profile: Box<Profile>,
        /// Its status.
        status: Box<StatusInfo>,
    },
    /// No daemon is running.
    Absent(String),
    /// The daemon is stopping.
    Ending(String),
    /// Only the system's daemon is running, and it does not serve this user.
    Foreign(String),
    /// A daemon refuses this user.
    Refuses(String),
}

/// Reason why there is no daemon for the program.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// A daemon refuses this user.
    #[error("{0}")]
    Refuses(String),
    /// No daemon is running, and `--no-start` forbids starting one.
    #[error("{0}; omit --no-start to let rnic-run start one")]
    Absent(String),
    /// The daemon has another profile than `--as`.
    #[error("--as {wanted}: the daemon {place} has the profile {has}; {action}")]
    OtherProfile {
        /// The requested profile.
        wanted: String,
        /// The place of the daemon.
        place: &'static str,
        /// Profile of the daemon.
        has: String,
        /// Advice.
        action: String,
    },
    /// `--devices` names a device that the daemon does not have.
    #[error("--devices: there is no device {name:?}; {place} has {devices}")]
    NoDevice {
        /// Name of the device.
        name: String,
        /// The daemon.
        place: &'static str,
        /// Names of its devices.
        devices: String,
    },
    /// The program `rnicd` was not found.
    #[error(
        "{why}, and there is no rnicd to start, neither in {} nor in PATH; install it or set its \
         path with --daemon", own.display()
    )]
    NoProgram {
        /// The library's error message.
        why: String,
        /// Directory of this program.
        own: PathBuf,
    },
    /// The daemon exited before it accepted clients.
    #[error("{} exited ({status}) before it accepted clients: {message}; see its log, {}", program.display(), log.display())]
    Ended {
        /// Program of the daemon.
        program: PathBuf,
        /// Exit status of the daemon.
        status: ExitStatus,
        /// Last line of its log.
        message: String,
        /// Path of its log.
        log: PathBuf,
    },
    /// The daemon did not accept clients in time.
    #[error("no daemon accepts clients after {} s: {why}; see the log of the started daemon, {}", timeout.as_secs(), log.display())]
    Late {
        /// Time limit.
        timeout: Duration,
        /// The library's error message.
        why: String,
        /// Path of the daemon's log.
        log: PathBuf,
    },
    /// The directory for socket and log is not safe to use.
    #[error("{} is not a directory of this user with mode 0700; remove it, or set XDG_RUNTIME_DIR", path.display())]
    UnsafeFolder {
        /// The directory.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{what} {}: {error}", path.display())]
    System {
        /// The operation that failed, for display.
        what: &'static str,
        /// File of the operation.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// Options for starting a daemon.
#[derive(Debug)]
pub struct StartOptions<'a> {
    /// Program of the daemon, if the user specified one.
    pub program: Option<&'a Path>,
    /// Time without clients after which it exits, in the syntax of `rnicd`.
    pub idle: &'a str,
    /// Profile of its devices: a name, or the absolute path of a file.
    pub profile: Option<&'a str>,
}

/// A daemon that this process has started.
#[derive(Debug)]
pub struct StartedDaemon {
    /// Process of the daemon.
    pub pid: u32,
    /// Path of its log.
    pub log: PathBuf,
}

/// A daemon for the program.
#[derive(Debug)]
pub struct Found {
    /// Result of the search.
    pub probe: Probe,
    /// Its socket, if the libraries would find another daemon.
    pub socket: Option<PathBuf>,
}

/// Searches for a daemon of this user with this profile. Without a profile, or with `RNIC_SOCKET`,
/// that is the daemon that the libraries find. Otherwise a daemon with a profile has a socket of
/// its own, so that it does not serve programs without `--as`.
///
/// # Errors
///
/// [`DaemonError::OtherProfile`], or the folder of the profile's socket cannot be used.
pub fn find(profile: Option<&str>) -> Result<Found, DaemonError> {
    let probe = probe();
    let Some(wanted) = profile else { return Ok(Found { probe, socket: None }) };
    let is_named = named_socket()?.is_some();
    let has = match &probe {
        Probe::Serves { profile, .. } => Some(profile.name.clone()),
        _ => None,
    };
    let other = |place, has, action| {
        let wanted = wanted.to_owned();
        Err(DaemonError::OtherProfile { wanted, place, has, action })
    };
    match has {
        Some(has) if has == wanted => return Ok(Found { probe, socket: None }),
        Some(has) if is_named => {
            let action = format!(
                "give that daemon the profile (rnicd exec --profile {wanted}, rnicd run --profile \
                 {wanted}, or wired.profile), or unset RNIC_SOCKET"
            );
            return other("in RNIC_SOCKET", has, action);
        }
        // A new daemon gets the default socket only with the default profile.
        None if is_named || wanted == DEFAULT_PROFILE => return Ok(Found { probe, socket: None }),
        _ => {}
    }
    let socket = socket_of_profile(wanted)?;
    match probe_at(&socket) {
        Probe::Serves { profile, .. } if profile.name != wanted => {
            other("at the socket of the profile", profile.name.clone(), "stop it".to_owned())
        }
        probe => Ok(Found { probe, socket: Some(socket) }),
    }
}

/// Checks that the daemon has all devices of `--devices`. `running` has the devices of the daemon;
/// `None` stands for those of a daemon that would be started.
pub fn check_devices(
    wanted: Option<&OsStr>,
    running: Option<&[DeviceRow]>,
) -> Result<(), DaemonError> {
    let Some(wanted) = wanted else { return Ok(()) };
    let (place, devices) = match running {
        Some(rows) => ("this daemon", rows.iter().map(|device| &*device.name).collect()),
        None => ("a daemon that rnic-run starts", BUILT_IN_DEVICES.to_vec()),
    };
    let wanted = wanted.to_string_lossy();
    let mut names = wanted.split(',').map(str::trim);
    match names.find(|name| !devices.contains(name)) {
        None => Ok(()),
        Some(name) => {
            let name = name.to_owned();
            Err(DaemonError::NoDevice { name, place, devices: devices.join(", ") })
        }
    }
}

/// Searches for a daemon in the same way as the libraries.
pub fn probe() -> Probe {
    examine(Context::open())
}

/// Searches for a daemon at this socket.
pub fn probe_at(socket: &Path) -> Probe {
    examine(Context::open_at(socket))
}

fn examine(opened: Result<Context, Error>) -> Probe {
    let asked = opened.and_then(|context| Ok((context.status()?, context.device_unruled()?)));
    match asked {
        Ok((status, device)) => Probe::Serves {
            pid: status.pid,
            status: Box::new(status),
            tree: Some(PathBuf::from(device.tree)).filter(|tree| tree.is_dir()),
            devices: device.devices,
            profile: Box::new(device.profile),
        },
        Err(error) => refused(&error, &foreign_socket()),
    }
}

/// Classifies a failure to open the device. If the daemon at the socket `foreign` does not serve
/// this user, that is not an error, because the user can have its own daemon.
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
        Error::NotAdmitted { why: AdmissionError::Stopping, .. } | Error::DaemonGone => {
            Probe::Ending(words)
        }
        _ => Probe::Refuses(words),
    }
}

/// Returns the socket of the system's daemon, unless that would be this user's own daemon or the
/// environment specifies the socket.
fn foreign_socket() -> Option<PathBuf> {
    let is_named = std::env::var_os(SOCKET_VARIABLE).is_some_and(|value| !value.is_empty());
    let is_own = rustix::process::geteuid().is_root();
    (!is_named && !is_own).then(|| PathBuf::from(SERVICE_SOCKET))
}

/// Returns true if a socket does not exist or belongs to a daemon that is gone.
fn is_absent(why: &io::Error) -> bool {
    matches!(why.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Returns the daemon's program: the specified path, else `rnicd` beside this program, else the
/// first `rnicd` in `PATH`.
pub fn program(named: Option<&Path>) -> Option<PathBuf> {
    if let Some(named) = named {
        return Some(named.to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = own_folder().into_iter().chain(std::env::split_paths(&path));
    folders.map(|folder| folder.join("rnicd")).find(|program| is_executable(program))
}

/// Returns true if this process may execute a file.
pub fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

fn own_folder() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(Path::to_owned)
}

/// Starts a daemon that outlives this process, unless another process is faster, and waits until a
/// daemon serves this user. Returns `None` if that is not the daemon started here.
pub fn start(what: &StartOptions<'_>) -> Result<Option<StartedDaemon>, DaemonError> {
    let socket = named_socket()?;
    let log = log_file(socket.as_deref())?;
    let deadline = Instant::now() + START_TIMEOUT;
    let mut child: Option<(PathBuf, Child, u64)> = None;
    loop {
        let why = match probe() {
            Probe::Serves { pid, .. } => {
                let ours = child.is_some_and(|(_, child, _)| child.id() == pid);
                return Ok(ours.then_some(StartedDaemon { pid, log }));
            }
            Probe::Refuses(why) => return Err(DaemonError::Refuses(why)),
            Probe::Absent(why) | Probe::Foreign(why) | Probe::Ending(why) => why,
        };
        if Instant::now() >= deadline {
            return Err(DaemonError::Late { timeout: START_TIMEOUT, why, log });
        }
        child = match child {
            None => Some(spawn(what, socket.as_deref(), &log, why)?),
            Some((program, mut running, logged)) => {
                match running.try_wait().map_err(system("cannot wait for", &program))? {
                    None => Some((program, running, logged)),
                    // Another daemon holds the socket. Either it will accept clients, or it is
                    // stopping and the loop starts a daemon again.
                    Some(status) if status.code() == Some(ANOTHER_SERVES) => None,
                    Some(status) => {
                        let message = last_line(&log, logged);
                        return Err(DaemonError::Ended { program, status, message, log });
                    }
                }
            }
        };
        std::thread::sleep(PAUSE);
    }
}

/// Starts a daemon. Returns its program, the process, and the previous length of the log.
fn spawn(
    what: &StartOptions<'_>,
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
    if let Some(profile) = what.profile {
        command.args(["--profile", profile]);
    }
    if let Some(socket) = socket {
        command.arg("--socket").arg(socket);
    }
    // Any other working directory would keep its file system from being unmounted.
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    let child = command.spawn().map_err(system("cannot run", &program))?;
    Ok((program, child, logged))
}

/// Returns the socket from the environment as an absolute path, because the daemon runs in a
/// different directory.
fn named_socket() -> Result<Option<PathBuf>, DaemonError> {
    let named = std::env::var_os(SOCKET_VARIABLE).filter(|value| !value.is_empty());
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(system("cannot find the directory of", &path))
    };
    named.map(|path| absolute(path.into())).transpose()
}

/// Returns the socket of this user's daemon with this profile.
fn socket_of_profile(profile: &str) -> Result<PathBuf, DaemonError> {
    // The hash (FNV-1a) distinguishes files of the same name.
    let hash = profile
        .bytes()
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let stem = Path::new(profile).file_stem().unwrap_or_default().to_string_lossy();
    let plain = |c: &char| c.is_ascii_alphanumeric() || *c == '-';
    // The path of a socket has at most 108 bytes (unix(7)).
    let stem: String = stem.chars().filter(plain).take(16).collect();
    Ok(own_directory()?.join(format!("rnicd-{stem}-{hash:08x}.sock")))
}

/// Returns the path for the log of a new daemon: beside its socket.
fn log_file(socket: Option<&Path>) -> Result<PathBuf, DaemonError> {
    if let Some(socket) = socket {
        return Ok(socket.with_extension("log"));
    }
    Ok(own_directory()?.join("rnicd.log"))
}

/// Returns this user's directory for sockets and logs. Creates it if necessary.
fn own_directory() -> Result<PathBuf, DaemonError> {
    let uid = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    // After `su`, the variable still contains the previous user's directory. The daemon and the
    // library skip it too.
    let is_own = |folder: &Path| std::fs::metadata(folder).is_ok_and(|found| found.uid() == uid);
    match runtime.filter(|folder| folder.is_absolute() && is_own(folder)) {
        _ if uid == 0 => {
            let folder = PathBuf::from("/run/rnicd");
            let made = DirBuilder::new().mode(0o755).recursive(true).create(&folder);
            made.map_err(system("cannot create directory", &folder))?;
            Ok(folder)
        }
        Some(folder) => Ok(folder),
        None => folder_in_temp(&std::env::temp_dir(), uid),
    }
}

/// Creates this user's directory in the temporary directory, where the daemon and the library
/// search for it. Fails if it belongs to another user, because any user may write to the temporary
/// directory.
fn folder_in_temp(temp: &Path, uid: u32) -> Result<PathBuf, DaemonError> {
    let path = temp.join(format!("rnicd-{uid}"));
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(system("cannot create directory", &path)(error));
        }
        _ => {}
    }
    let found = std::fs::symlink_metadata(&path).map_err(system("cannot examine", &path))?;
    if found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0 {
        Ok(path)
    } else {
        Err(DaemonError::UnsafeFolder { path })
    }
}

/// Opens the log for appending. Truncates it if it is longer than [`LONG_LOG`].
fn open_log(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600);
    // Does not follow a link that another user may have placed.
    let log = options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()).open(path)?;
    if log.metadata()?.len() > LONG_LOG {
        log.set_len(0)?;
    }
    Ok(log)
}

/// Returns the last line of the log after the first `before` bytes.
fn last_line(log: &Path, before: u64) -> String {
    let read = || -> io::Result<String> {
        let mut log = File::open(log)?;
        log.seek(SeekFrom::Start(before))?;
        let mut text = Vec::new();
        log.take(LONG_LOG).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let text = read().unwrap_or_default();
    text.lines().last().unwrap_or("no output").to_owned()
}

fn system(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DaemonError {
    let path = path.to_owned();
    move |error| DaemonError::System { what, path, error }
}

/// Devices of a daemon with the built-in configuration.
const BUILT_IN_DEVICES: [&str; 2] = ["rnicd1", "rnicd0"];
/// Profile of a daemon without `--as`.
const DEFAULT_PROFILE: &str = "rnicd";
/// Socket of the system's daemon.
const SERVICE_SOCKET: &str = "/run/rnicd/rnicd.sock";
/// Exit status of a daemon that finds another daemon on its socket.
const ANOTHER_SERVES: i32 = 75;
/// Maximum time until a new daemon accepts clients.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time between two probes.
const PAUSE: Duration = Duration::from_millis(10);
/// Length in bytes above which a log is truncated.
const LONG_LOG: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn foreign_system_daemon_is_ignored() {
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
            |path: &str| Error::NotAdmitted { path: path.into(), why: AdmissionError::NotAllowed };
        assert!(matches!(refused(&not_admitted(SERVICE_SOCKET), &foreign), Probe::Foreign(_)));
        assert!(matches!(refused(&not_admitted("/x"), &foreign), Probe::Refuses(_)));
    }

    #[test]
    fn folder_of_other_user_is_not_used() {
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
    fn log_is_appended_then_truncated() {
        let temp = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = temp.path().join("log");
        let length = || open_log(&path).and_then(|log| log.metadata()).map(|found| found.len());
        std::fs::write(&path, "one\ntwo\n").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(length().ok(), Some(8));
        assert_eq!((last_line(&path, 0), last_line(&path, 8)), ("two".into(), "no output".into()));
        std::fs::write(&path, vec![b'x'; LONG_LOG as usize + 1]).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(length().ok(), Some(0));
        let link = temp.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap_or_else(|e| panic!("{e}"));
        assert!(open_log(&link).is_err());
    }
}
