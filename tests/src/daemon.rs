//! A daemon under test.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rnic_client::{Context, StatusInfo};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::built;
use crate::process::{DEADLINE, Process, copy_files};

/// The values of `engine.loopback`: the two paths between QPs of one daemon.
pub const PATHS: [&str; 2] = ["direct", "tcp"];

/// Returns a configuration with this loopback path.
pub fn on_path(path: &str) -> String {
    format!("[engine]\nloopback = \"{path}\"\n")
}

/// Like [`on_path`], with a number of workers. More keys of `[engine]` or other tables may follow.
pub fn engine(workers: u32, path: &str) -> String {
    format!("{}workers = {workers}\n", on_path(path))
}

/// Returns true if the querying session is the only object.
fn nothing_left(s: &StatusInfo) -> bool {
    let objects =
        [s.pds, s.shared_buffers, s.mrs, s.windows, s.cqs, s.srqs, s.qps, s.listeners, s.startups];
    s.sessions == 1 && objects == [0; 9] && s.shared_bytes == 0
}

/// Kernel resources of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Number of open descriptors.
    pub descriptors: usize,
    /// Number of mappings of memory shared with clients.
    pub mappings: usize,
    /// Resident memory in KiB.
    pub resident: usize,
    /// Number of threads.
    pub threads: usize,
}

/// A running daemon with its own directory.
pub struct Daemon {
    process: Option<Process>,
    dir: TempDir,
    socket: PathBuf,
}

impl Daemon {
    /// Starts a daemon with this configuration and waits until it listens.
    ///
    /// # Panics
    ///
    /// If the daemon does not listen.
    pub fn start(config: &str) -> Self {
        Daemon::start_limited(config, "true")
    }

    /// Like [`Daemon::start`], after a shell command that limits the daemon (`ulimit -n 100`).
    ///
    /// # Panics
    ///
    /// If the daemon does not listen.
    pub fn start_limited(config: &str, limit: &str) -> Self {
        let dir = TempDir::with_prefix("rnic-test-").expect("a temporary directory");
        let socket = dir.path().join("rnicd.sock");
        let file = dir.path().join("rnicd.toml");
        // Tests run in parallel. Without distinct ports, their RoCE devices would share port 4791.
        let port = if config.contains("[wired]") {
            String::new()
        } else {
            format!("\n[wired]\nport = {}\n", crate::ports::unused_port())
        };
        std::fs::write(&file, format!("{config}{port}")).expect("a file in a directory just made");
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{limit}; exec \"$0\" \"$@\"")).arg(built::program("rnicd"));
        command.arg("run").arg("--config").arg(&file).arg("--socket").arg(&socket);
        let mut process = Process::start(command);
        process.line_after("listening");
        Daemon { process: Some(process), dir, socket }
    }

    /// Returns the path of the daemon's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the daemon's directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the daemon's process ID.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Process::id)
    }

    /// Runs `rnicctl` on this daemon.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    pub fn rnicctl(&self, args: &[&str]) -> Output {
        let mut command = Command::new(built::program("rnicctl"));
        command.args(args).arg("--socket").arg(&self.socket).output().expect("rnicctl starts")
    }

    /// Like [`Daemon::rnicctl`], and requires success.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub fn control(&self, args: &[&str]) -> Output {
        let output = self.rnicctl(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Returns the output of `rnicctl` with `--json`.
    ///
    /// # Panics
    ///
    /// If it fails.
    pub fn json(&self, args: &[&str]) -> Value {
        let output = self.control(&[args, &["--json"]].concat());
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Starts a client process of this daemon that plays `part`.
    pub fn actor(&self, part: &[&str]) -> Process {
        let mut command = Command::new(built::program("actor"));
        command.env("RNIC_SOCKET", &self.socket).args(part);
        Process::start(command)
    }

    /// Like [`Daemon::actor`], as another user. Requires root. All users must have access to the
    /// daemon's socket.
    ///
    /// # Panics
    ///
    /// If the permissions of the directory cannot be changed.
    pub fn actor_as(&self, uid: u32, part: &[&str]) -> Process {
        let ids = [format!("--reuid={uid}"), format!("--regid={uid}")];
        self.actor_by(&["setpriv", &ids[0], &ids[1], "--clear-groups"], part)
    }

    /// Like [`Daemon::actor`], in new user and network namespaces. Some hosts allow only root to
    /// create them.
    ///
    /// # Panics
    ///
    /// If the permissions of the directory cannot be changed.
    pub fn actor_contained(&self, part: &[&str]) -> Process {
        self.actor_by(&["unshare", "--user", "--map-root-user", "--net"], part)
    }

    /// Like [`Daemon::actor`], in a new mount namespace. Some hosts allow only root to create it.
    ///
    /// # Panics
    ///
    /// If the permissions of the directory cannot be changed.
    pub fn actor_unseen(&self, part: &[&str]) -> Process {
        self.actor_by(&["unshare", "--mount", "--propagation", "private"], part)
    }

    /// Starts a client process through another program.
    fn actor_by(&self, program: &[&str], part: &[&str]) -> Process {
        use std::os::unix::fs::PermissionsExt;
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(self.dir(), open).expect("the test owns the directory");
        let actor = self.dir().join("actor");
        if !actor.exists() {
            copy_files(built::program("actor"), &actor);
        }
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).env("RNIC_SOCKET", &self.socket).arg(actor).args(part);
        Process::start(command)
    }

    /// Returns the daemon's status, queried by a new session. The status includes that session.
    ///
    /// # Panics
    ///
    /// If the daemon does not answer.
    pub fn status(&self) -> StatusInfo {
        let context = Context::open_at(&self.socket).expect("the daemon answers");
        context.status().expect("the daemon answers")
    }

    /// Polls the status until `settled` returns true.
    ///
    /// # Panics
    ///
    /// If `settled` does not return true before the deadline.
    pub fn wait_status(&self, what: &str, settled: impl Fn(&StatusInfo) -> bool) -> StatusInfo {
        let deadline = Instant::now() + DEADLINE;
        let context = Context::open_at(&self.socket).expect("the daemon answers");
        loop {
            let status = context.status().expect("the daemon answers");
            if settled(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "not {what} at the deadline: {status:?}");
            std::thread::yield_now();
        }
    }

    /// Waits until the querying session is the only object left.
    pub fn is_empty(&self) -> StatusInfo {
        self.wait_status("empty", nothing_left)
    }

    /// Waits until the querying session is the only object left. Returns the daemon's footprint.
    ///
    /// # Panics
    ///
    /// If other objects remain at the deadline.
    pub fn at_rest(&self) -> Footprint {
        let context = Context::open_at(&self.socket).expect("the daemon answers");
        self.at_rest_but_for(&context)
    }

    fn at_rest_but_for(&self, context: &Context) -> Footprint {
        let deadline = Instant::now() + DEADLINE;
        let mut last = None;
        loop {
            let status = context.status().expect("the daemon answers");
            let now = self.footprint();
            // The kernel frees sockets and mappings shortly after the end of their session.
            if nothing_left(&status) && last == Some((now.descriptors, now.mappings)) {
                return now;
            }
            last = Some((now.descriptors, now.mappings));
            assert!(Instant::now() < deadline, "{now:?}, {status:?}");
        }
    }

    /// Waits until the daemon is at rest with no more descriptors and mappings than in `start`.
    /// Returns its footprint.
    ///
    /// # Panics
    ///
    /// If it leaks any.
    pub fn shrinks_to(&self, start: Footprint) -> Footprint {
        let deadline = Instant::now() + DEADLINE;
        // One session for all polls, because each ended session counts until the daemon removes it.
        let context = Context::open_at(&self.socket).expect("the daemon answers");
        loop {
            let now = self.at_rest_but_for(&context);
            // `start` may include a socket that a thread of the daemon had open briefly.
            if now.descriptors <= start.descriptors && now.mappings <= start.mappings {
                return now;
            }
            assert!(
                Instant::now() < deadline,
                "leaked: {now:?} after {start:?}:\n{}",
                self.descriptors().join("\n")
            );
        }
    }

    /// Describes each descriptor in one line. Sockets include the kernel's table entry.
    fn descriptors(&self) -> Vec<String> {
        let proc = PathBuf::from(format!("/proc/{}", self.pid()));
        let read = |name: &str| std::fs::read_to_string(proc.join("net").join(name));
        let sockets =
            ["tcp", "tcp6", "udp", "udp6", "unix"].map(|name| read(name).unwrap_or_default());
        let of = |target: &Path| {
            let target = target.to_string_lossy().into_owned();
            let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
            let line = inode.and_then(|inode| {
                let mut lines = sockets.iter().flat_map(|table| table.lines());
                lines.find(|line| line.split_whitespace().any(|word| word == inode))
            });
            format!("{target} {}", line.unwrap_or_default().trim())
        };
        let open = std::fs::read_dir(proc.join("fd")).into_iter().flatten().flatten();
        open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).map(|to| of(&to)).collect()
    }

    /// Returns the total CPU time of the daemon's threads.
    ///
    /// # Panics
    ///
    /// If the daemon is gone.
    pub fn cpu_time(&self) -> Duration {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid()));
        let of = |thread: std::io::Result<std::fs::DirEntry>| {
            let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
        };
        threads.expect("the daemon lives").filter_map(of).sum()
    }

    /// Returns the daemon's anonymous resident memory in KiB.
    ///
    /// # Panics
    ///
    /// If the daemon is gone.
    pub fn anonymous_kib(&self) -> u64 {
        let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid()));
        let rollup = rollup.expect("the daemon lives");
        let line = rollup.lines().find_map(|line| line.strip_prefix("Anonymous:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
        kib.expect("a number from the kernel")
    }

    /// Returns the daemon's current kernel resources.
    ///
    /// # Panics
    ///
    /// If the daemon is gone.
    pub fn footprint(&self) -> Footprint {
        let proc = PathBuf::from(format!("/proc/{}", self.pid()));
        let read = |name| std::fs::read_to_string(proc.join(name)).expect("the daemon lives");
        let status = read("status");
        let number = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_default();
            line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        Footprint {
            descriptors: std::fs::read_dir(proc.join("fd")).expect("the daemon lives").count(),
            mappings: read("maps").lines().filter(|l| l.contains("memfd:")).count(),
            resident: number("VmRSS:"),
            threads: number("Threads:"),
        }
    }

    /// Stops the daemon with `SIGTERM`. Returns its output.
    ///
    /// # Panics
    ///
    /// If it exits with a failure or leaves its socket file behind.
    pub fn stop(mut self) -> Vec<String> {
        self.stop_gracefully()
    }

    /// Waits for an output line with `text` and returns the rest of the line.
    ///
    /// # Panics
    ///
    /// If none appears before the deadline.
    pub fn line_after(&mut self, text: &str) -> String {
        self.process.as_mut().expect("a running daemon").line_after(text)
    }

    /// Sends the daemon a signal.
    pub fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            process.signal(signal);
        }
    }

    /// Waits until a daemon that is already stopping has exited. Returns its output.
    ///
    /// # Panics
    ///
    /// If it exits with a failure or does not exit before the deadline.
    pub fn ends(mut self) -> Vec<String> {
        self.process.take().map(Process::succeed).unwrap_or_default()
    }

    /// Kills the daemon.
    pub fn kill(mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    fn stop_gracefully(&mut self) -> Vec<String> {
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
            self.stop_gracefully();
        }
    }
}
