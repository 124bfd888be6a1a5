//! A daemon of a test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rnic_client::{Context, StatusInfo};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::process::{DEADLINE, Process, copy_files};

/// Where this package's binaries are; only the tests know (`env!("CARGO_BIN_EXE_...")`).
#[derive(Clone, Copy)]
pub struct Binaries {
    /// The daemon.
    pub rnicd: &'static str,
    /// A client.
    pub actor: &'static str,
}

/// This package's binaries, as only an integration test can name them.
#[macro_export]
macro_rules! binaries {
    () => {
        $crate::daemon::Binaries {
            rnicd: env!("CARGO_BIN_EXE_rnicd-under-test"),
            actor: env!("CARGO_BIN_EXE_actor"),
        }
    };
}

/// The two ways between QPs of one daemon, as its configuration names them.
pub const PATHS: [&str; 2] = ["direct", "tcp"];

/// A configuration in which QPs of one daemon reach each other this way.
pub fn on_path(path: &str) -> String {
    format!("[engine]\nloopback = \"{path}\"\n")
}

/// As [`on_path`], with so many workers. More keys of the engine, or other tables, may follow.
pub fn engine(workers: u32, path: &str) -> String {
    format!("{}workers = {workers}\n", on_path(path))
}

/// Whether there is nothing but the session that asks.
fn nothing_left(s: &StatusInfo) -> bool {
    let objects =
        [s.pds, s.shared_buffers, s.mrs, s.windows, s.cqs, s.srqs, s.qps, s.listeners, s.startups];
    s.sessions == 1 && objects == [0; 9] && s.shared_bytes == 0
}

/// What the kernel holds for a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Open descriptors.
    pub descriptors: usize,
    /// Mappings of memory that clients share.
    pub mappings: usize,
    /// Resident memory in KiB.
    pub resident: usize,
    /// Threads.
    pub threads: usize,
}

/// A running daemon with a directory of its own.
pub struct Daemon {
    binaries: Binaries,
    process: Option<Process>,
    dir: TempDir,
    socket: PathBuf,
}

impl Daemon {
    /// Starts a daemon with this configuration and waits until it serves.
    ///
    /// # Panics
    ///
    /// If it does not.
    pub fn start(binaries: Binaries, config: &str) -> Self {
        Daemon::start_limited(binaries, config, "true")
    }

    /// As [`Daemon::start`], after a command of the shell that limits it (`ulimit -n 100`).
    ///
    /// # Panics
    ///
    /// If it does not serve.
    pub fn start_limited(binaries: Binaries, config: &str, limit: &str) -> Self {
        let dir = TempDir::with_prefix("rnic-test-").expect("a temporary directory");
        let socket = dir.path().join("rnicd.sock");
        let file = dir.path().join("rnicd.toml");
        // Daemons of tests that run side by side would have one port of other daemons between them.
        let port = if config.contains("[wired]") {
            String::new()
        } else {
            format!("\n[wired]\nport = {}\n", crate::ports::of_nobody())
        };
        std::fs::write(&file, format!("{config}{port}")).expect("a file in a directory just made");
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("{limit}; exec \"$0\" \"$@\"")).arg(binaries.rnicd);
        command.arg("run").arg("--config").arg(&file).arg("--socket").arg(&socket);
        let mut process = Process::start(command);
        process.line_after("listening");
        Daemon { binaries, process: Some(process), dir, socket }
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Process::id)
    }

    /// A client process of this daemon that plays `part`.
    pub fn actor(&self, part: &[&str]) -> Process {
        let mut command = Command::new(self.binaries.actor);
        command.env("RNIC_SOCKET", &self.socket).args(part);
        Process::start(command)
    }

    /// As [`Daemon::actor`], as another user, which only root can do. The daemon's socket must be
    /// open to everybody.
    ///
    /// # Panics
    ///
    /// If the directory cannot be opened to others.
    pub fn actor_as(&self, uid: u32, part: &[&str]) -> Process {
        let ids = [format!("--reuid={uid}"), format!("--regid={uid}")];
        self.actor_by(&["setpriv", &ids[0], &ids[1], "--clear-groups"], part)
    }

    /// As [`Daemon::actor`], in user and network namespaces of its own, which only root can make
    /// everywhere.
    ///
    /// # Panics
    ///
    /// If the directory cannot be opened to others.
    pub fn actor_contained(&self, part: &[&str]) -> Process {
        self.actor_by(&["unshare", "--user", "--map-root-user", "--net"], part)
    }

    /// As [`Daemon::actor`], in a mount namespace of its own, which only root can make everywhere.
    ///
    /// # Panics
    ///
    /// If the directory cannot be opened to others.
    pub fn actor_unseen(&self, part: &[&str]) -> Process {
        self.actor_by(&["unshare", "--mount", "--propagation", "private"], part)
    }

    /// A client process started by another program.
    fn actor_by(&self, program: &[&str], part: &[&str]) -> Process {
        use std::os::unix::fs::PermissionsExt;
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(self.dir(), open).expect("a directory of our own");
        let actor = self.dir().join("actor");
        if !actor.exists() {
            copy_files(self.binaries.actor, &actor);
        }
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).env("RNIC_SOCKET", &self.socket).arg(actor).args(part);
        Process::start(command)
    }

    /// Figures of the daemon, asked by a session of its own, which they count.
    ///
    /// # Panics
    ///
    /// If the daemon does not answer.
    pub fn status(&self) -> StatusInfo {
        let context = Context::open_at(&self.socket).expect("the daemon answers");
        context.status().expect("the daemon answers")
    }

    /// Asks for the status until `settled` is content with it.
    ///
    /// # Panics
    ///
    /// If it never is.
    pub fn settles(&self, what: &str, settled: impl Fn(&StatusInfo) -> bool) -> StatusInfo {
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

    /// Waits until no session but the asking one and nothing of any session is left.
    pub fn is_empty(&self) -> StatusInfo {
        self.settles("empty", nothing_left)
    }

    /// What the kernel holds for the daemon when it has nothing but one session that asks.
    ///
    /// # Panics
    ///
    /// If it does not get there.
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
            // Sockets and mappings go a moment after the session that had them.
            if nothing_left(&status) && last == Some((now.descriptors, now.mappings)) {
                return now;
            }
            last = Some((now.descriptors, now.mappings));
            assert!(Instant::now() < deadline, "{now:?}, {status:?}");
        }
    }

    /// Waits until it is at rest and holds no more descriptors and mappings than at the start; what
    /// it holds then.
    ///
    /// # Panics
    ///
    /// If it keeps something.
    pub fn shrinks_to(&self, start: Footprint) -> Footprint {
        let deadline = Instant::now() + DEADLINE;
        // One session: those that have ended count until they are gone.
        let context = Context::open_at(&self.socket).expect("the daemon answers");
        loop {
            let now = self.at_rest_but_for(&context);
            // The start may have met a thread of the daemon with a socket open for a moment.
            if now.descriptors <= start.descriptors && now.mappings <= start.mappings {
                return now;
            }
            assert!(
                Instant::now() < deadline,
                "{now:?} is left of {start:?}:\n{}",
                self.descriptors().join("\n")
            );
        }
    }

    /// What its descriptors are, a line each; of a socket, the kernel's line about it.
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

    /// Time for which its threads have had a CPU.
    ///
    /// # Panics
    ///
    /// If it is gone.
    pub fn worked(&self) -> Duration {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid()));
        let of = |thread: std::io::Result<std::fs::DirEntry>| {
            let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
        };
        threads.expect("the daemon lives").filter_map(of).sum()
    }

    /// What the kernel holds for the daemon now.
    ///
    /// # Panics
    ///
    /// If it is gone.
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

    /// Stops it with `SIGTERM` and insists on an orderly end; what it printed.
    ///
    /// # Panics
    ///
    /// If it ends otherwise or leaves its socket behind.
    pub fn stop(mut self) -> Vec<String> {
        self.stop_in_order()
    }

    /// Waits until it has printed a line with `text`; what comes after that in the line.
    ///
    /// # Panics
    ///
    /// If it does not.
    pub fn says(&mut self, text: &str) -> String {
        self.process.as_mut().expect("it runs").line_after(text)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            process.signal(signal);
        }
    }

    /// Waits for the orderly end of a daemon that was told to stop and has given up its socket;
    /// what it printed.
    ///
    /// # Panics
    ///
    /// If it ends otherwise or stays.
    pub fn ends(mut self) -> Vec<String> {
        self.process.take().map(Process::succeed).unwrap_or_default()
    }

    /// Kills it.
    pub fn kill(mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    fn stop_in_order(&mut self) -> Vec<String> {
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
            self.stop_in_order();
        }
    }
}
