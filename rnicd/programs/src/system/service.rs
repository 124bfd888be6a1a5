//! The daemon of an installation: a service of systemd, or a process in the background if another
//! program is process 1, as in most containers.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rnic_client::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::loader::run;
use super::manifest::Manifest;
use super::parts::{CONFIG, Content, Parts};
use super::root::Root;
use super::{Install, OWN_NAME, SystemError};

/// Socket of the daemon.
pub const SOCKET: &str = "/run/rnicd/rnicd.sock";
/// Device files of the daemon, beside its socket.
pub const TREE: &str = "/run/rnicd/rnicd.sock.tree";
/// Process ID of a daemon in the background. The folder of the socket belongs to the daemon's user,
/// which must not choose the process that root kills.
const PID_FILE: &str = "/run/rnicd.pid";
/// Log of a daemon in the background.
const LOG: &str = "/var/log/rnicd.log";

const SERVICE: &str = include_str!("../../../../config/rnicd.service");
const SOCKET_UNIT: &str = include_str!("../../../../config/rnicd.socket");
const SYSUSERS: &str = include_str!("../../../../config/rnicd.sysusers");
/// Path of the program in [`SERVICE`].
const PACKAGED_PROGRAM: &str = "/usr/bin/rnicd";

/// How the daemon runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Systemd,
    Background,
    /// Another root: nothing runs there.
    Packaged,
}

impl Kind {
    fn of(root: &Root) -> Self {
        if !root.is_own() {
            Kind::Packaged
        } else if Path::new("/run/systemd/system").is_dir() {
            Kind::Systemd
        } else {
            Kind::Background
        }
    }
}

/// Adds the files of the service.
pub fn parts(parts: &mut Parts, args: &Install, root: &Root) {
    let program = args.prefix.join("bin/rnicd");
    let service = SERVICE.replace(PACKAGED_PROGRAM, &program.to_string_lossy());
    let socket = SOCKET_UNIT
        .replace("SocketGroup=rnicd", &format!("SocketGroup={}", args.allow.group()))
        .replace("SocketMode=0660", &format!("SocketMode={}", args.allow.mode()));
    match Kind::of(root) {
        Kind::Systemd => {
            let folder = "/etc/systemd/system";
            parts.file(&format!("{folder}/rnicd.service"), service);
            parts.file(&format!("{folder}/rnicd.socket"), socket);
            // As `systemctl enable` does.
            for (target, unit) in
                [("multi-user.target", "rnicd.service"), ("sockets.target", "rnicd.socket")]
            {
                let path = format!("{folder}/{target}.wants/{unit}");
                let to = PathBuf::from(format!("{folder}/{unit}"));
                parts.add(Path::new(&path), Content::Link { to });
            }
        }
        Kind::Background => {
            for path in [PID_FILE, LOG] {
                parts.add(Path::new(path), Content::Output);
            }
        }
        Kind::Packaged => {
            parts.file("/usr/lib/systemd/system/rnicd.service", service);
            parts.file("/usr/lib/systemd/system/rnicd.socket", socket);
            parts.file("/usr/lib/sysusers.d/rnicd.conf", SYSUSERS.to_owned());
        }
    }
    if root.is_own() {
        parts.add(&Path::new(SOCKET).with_extension("sock.lock"), Content::Output);
        parts.add(Path::new(SOCKET), Content::Output);
    }
}

/// Starts the daemon of an installation and waits until it accepts clients. Returns its process ID,
/// or `None` in another root, where nothing is started.
pub fn start(root: &Root, manifest: &Manifest) -> Result<Option<u32>, SystemError> {
    match Kind::of(root) {
        Kind::Packaged => Ok(None),
        Kind::Systemd => {
            systemctl(&["daemon-reload"])?;
            systemctl(&["start", "rnicd.socket", "rnicd.service"])?;
            serving().map(Some).map_err(SystemError::NoDaemon)
        }
        Kind::Background => start_in_background(&manifest.prefix.join("bin/rnicd")).map(Some),
    }
}

/// Stops the daemon of an installation, if it runs, and removes the files of a killed daemon.
pub fn stop(root: &Root) -> Result<(), SystemError> {
    match Kind::of(root) {
        Kind::Packaged => return Ok(()),
        Kind::Systemd => {
            // Fails if the units are missing, for example after an installation was killed.
            if Path::new("/etc/systemd/system/rnicd.service").exists() {
                systemctl(&["stop", "rnicd.service", "rnicd.socket"])?;
            }
        }
        Kind::Background => stop_process()?,
    }
    let tree = Path::new(TREE);
    if tree.join(".rnicd").exists() && serving().is_err() {
        fs::remove_dir_all(tree).map_err(SystemError::at("cannot remove", tree))?;
    }
    Ok(())
}

/// Makes systemd read its units again after they were removed.
pub fn reload(root: &Root) -> Result<(), SystemError> {
    if Kind::of(root) == Kind::Systemd { systemctl(&["daemon-reload"]).map(drop) } else { Ok(()) }
}

/// Returns the process ID of the daemon at the system's socket, or the reason why none answers.
pub fn serving() -> Result<u32, String> {
    let status = Context::open_at(SOCKET).and_then(|context| context.status());
    status.map(|status| status.pid).map_err(|error| error.to_string())
}

fn systemctl(arguments: &[&str]) -> Result<String, SystemError> {
    let mut command = Command::new("systemctl");
    command.args(arguments);
    run(command)
}

fn start_in_background(program: &Path) -> Result<u32, SystemError> {
    if let Ok(pid) = serving() {
        return if recorded() == Some(pid) {
            Ok(pid)
        } else {
            Err(SystemError::NoDaemon(format!(
                "another daemon (pid {pid}) uses {SOCKET}; stop it first"
            )))
        };
    }
    let log = open_log().map_err(SystemError::at("cannot write", Path::new(LOG)))?;
    let mut command = Command::new(program);
    command.args(["run", "--detached", "--config", CONFIG, "--config-optional"]);
    // Without the variables by which CI systems find and kill the processes of a step.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut child = command.spawn().map_err(SystemError::at("cannot run", program))?;
    let started = wait_until_serving(&mut child).and_then(|()| {
        fs::write(PID_FILE, format!("{}\n", child.id()))
            .map_err(SystemError::at("cannot write", Path::new(PID_FILE)))
    });
    started.inspect_err(|_| {
        let _ = child.kill();
        let _ = child.wait();
    })?;
    Ok(child.id())
}

fn wait_until_serving(child: &mut Child) -> Result<(), SystemError> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let why = match serving() {
            Ok(pid) if pid == child.id() => return Ok(()),
            Ok(pid) => format!("another daemon (pid {pid}) uses {SOCKET}"),
            Err(why) => why,
        };
        if let Ok(Some(status)) = child.try_wait() {
            let log = fs::read_to_string(LOG).unwrap_or_default();
            let last = log.lines().last().unwrap_or("no output");
            return Err(SystemError::NoDaemon(format!("{status}: {last}; see {LOG}")));
        }
        if Instant::now() > deadline {
            return Err(SystemError::NoDaemon(format!("{why}; see {LOG}")));
        }
        std::thread::sleep(PAUSE);
    }
}

fn open_log() -> io::Result<File> {
    let no_follow = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    OpenOptions::new().append(true).create(true).mode(0o644).custom_flags(no_follow).open(LOG)
}

/// Ends the daemon in the background: politely, then by SIGKILL.
fn stop_process() -> Result<(), SystemError> {
    let Some(pid) = recorded() else { return Ok(()) };
    end_process(pid).map_err(SystemError::at("cannot stop the process of", Path::new(PID_FILE)))?;
    match fs::remove_file(PID_FILE) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(SystemError::at("cannot remove", Path::new(PID_FILE))),
    }
}

fn end_process(pid: u32) -> io::Result<()> {
    let Some(pid) = Pid::from_raw(pid.cast_signed()) else { return Ok(()) };
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        process => process?,
    };
    // After the process is held by its descriptor. Otherwise the number may belong to a later one.
    let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
    if name.unwrap_or_default().trim_end() != OWN_NAME {
        return Ok(());
    }
    for signal in [Signal::TERM, Signal::KILL] {
        match pidfd_send_signal(&process, signal) {
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            sent => sent?,
        }
        let timeout = Timespec { tv_sec: STOP_SECONDS, tv_nsec: 0 };
        // Readable when the process has ended.
        if poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout))? > 0 {
            return Ok(());
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Returns the process ID in the pid file.
fn recorded() -> Option<u32> {
    fs::read_to_string(PID_FILE).ok()?.trim().parse().ok()
}

/// Maximum time until a new daemon accepts clients.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Time between two attempts to connect to a new daemon.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum time for an orderly end of the daemon.
const STOP_SECONDS: i64 = 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_contain_what_is_replaced() {
        assert_eq!(SERVICE.matches(PACKAGED_PROGRAM).count(), 2);
        assert_eq!(SOCKET_UNIT.matches("SocketGroup=rnicd").count(), 1);
        assert_eq!(SOCKET_UNIT.matches("SocketMode=0660").count(), 1);
        assert!(SOCKET_UNIT.contains(&format!("ListenSequentialPacket={SOCKET}\n")));
        assert_eq!(Kind::of(&Root::open(&std::env::temp_dir()).unwrap()), Kind::Packaged);
    }
}
