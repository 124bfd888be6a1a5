//! Starts a daemon so that it outlives the job that started it.
//!
//! The daemon runs outside the job's cgroup if the system allows that, and without the environment
//! variables by which CI systems find the processes of a job (`RUNNER_TRACKING_ID` of GitHub
//! Actions, `JENKINS_NODE_COOKIE`). With systemd it gets its own scope. Without systemd, root's
//! daemon is moved to the root of the cgroup hierarchy. Another user's daemon stays in the job's
//! cgroup, and if it is killed with the job, the next `rnic-run` starts another daemon.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Returns a command for `program` with only the environment that a daemon needs. May move the
/// calling process to another cgroup, so that the program starts there.
pub fn command(program: &Path) -> Command {
    let mut command = if let Some(mut scope) = scope() {
        scope.arg("--").arg(program);
        scope
    } else {
        leave_cgroup();
        Command::new(program)
    };
    keep_environment(&mut command);
    command
}

/// Returns `systemd-run` with its options if it can start a program in a scope here.
fn scope() -> Option<Command> {
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let options = scope_options(&cgroups, rustix::process::geteuid().is_root())?;
    let systemd_run = || {
        let mut command = Command::new("systemd-run");
        command.args(options);
        command
    };
    let mut probe = systemd_run();
    keep_environment(probe.args(["--", "true"]));
    probe.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    succeeds(probe.spawn().ok()?).then(systemd_run)
}

/// Returns options for `systemd-run`, or `None` if the daemon must stay in this cgroup. In a user's
/// login session (`session-2.scope`) it must stay there: the session outlives the user's service
/// manager, which exits with the last login.
fn scope_options(cgroups: &str, is_root: bool) -> Option<&'static [&'static str]> {
    let is_session = |line: &str| line.split('/').any(|part| part.starts_with("session-"));
    if is_root {
        Some(&["--scope", "--quiet", "--collect"])
    } else if cgroups.lines().any(is_session) {
        None
    } else {
        Some(&["--user", "--scope", "--quiet", "--collect"])
    }
}

/// Returns true if a process succeeds within [`PROBE_TIMEOUT`]. Kills it otherwise.
fn succeeds(mut child: Child) -> bool {
    let deadline = Instant::now() + PROBE_TIMEOUT;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            _ => break,
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    false
}

/// Moves this process to the root of the cgroup v2 hierarchy if root runs it and systemd does not
/// manage that hierarchy. On failure the process stays where it is.
fn leave_cgroup() {
    let has_systemd = Path::new("/run/systemd/system").is_dir();
    if has_systemd || !rustix::process::geteuid().is_root() {
        return;
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if let Some(mount) = cgroup_mount(&mounts) {
        // 0 means the writing process (cgroups(7)).
        let _ = std::fs::write(mount.join("cgroup.procs"), "0");
    }
}

/// Returns the mount point of the whole cgroup v2 hierarchy (proc_pid_mountinfo(5)).
fn cgroup_mount(mounts: &str) -> Option<PathBuf> {
    let mount_of = |line: &str| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let root = fields.next()?;
        let point = fields.next()?;
        (root == "/" && filesystem.starts_with("cgroup2 ")).then(|| PathBuf::from(point))
    };
    mounts.lines().find_map(mount_of)
}

fn keep_environment(command: &mut Command) {
    command.env_clear();
    let set = |name: &&'static str| Some((*name, std::env::var_os(name)?));
    command.envs(KEPT.iter().filter_map(set));
}

/// Variables that the daemon reads, or by which `systemd-run` finds the user's service manager.
const KEPT: [&str; 7] = [
    "PATH",
    "HOME",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "RUST_LOG",
    "RUST_BACKTRACE",
];
/// Time limit for `systemd-run` with a program that does nothing.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Time between two checks of that program.
const PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn login_session_is_kept() {
        let job = "0::/system.slice/ci.service\n";
        let session = "1:name=systemd:/user.slice/user-7.slice/session-2.scope\n0::/\n";
        let manager = "0::/user.slice/user-7.slice/user@7.service/app.slice/job.scope\n";
        assert_eq!(scope_options(session, false), None);
        for cgroups in [job, manager] {
            assert_eq!(scope_options(cgroups, false).map(|options| options[0]), Some("--user"));
        }
        assert_eq!(scope_options(session, true).map(|options| options[0]), Some("--scope"));
    }

    #[test]
    fn whole_cgroup_mount_is_found() {
        let part = "41 31 0:38 /job /part rw - cgroup2 cgroup2 rw\n";
        let old = "40 31 0:37 / /old rw - cgroup cgroup rw,cpu\n";
        let whole = "42 31 0:38 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
        assert_eq!(cgroup_mount(&[part, old].concat()), None);
        let found = cgroup_mount(&[part, old, whole].concat());
        assert_eq!(found, Some(PathBuf::from("/sys/fs/cgroup")));
    }
}
