//! A child process with line-by-line access to its output. Every wait has a deadline.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Time limit of every operation that should be short. Reached only by a test that hangs.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// Raises the descriptor limit of this process to the hard limit. The soft limit of an unprivileged
/// user is often 1024.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    setrlimit(Resource::Nofile, raised).expect("a soft limit may reach the hard limit");
}

/// Returns the peak resident memory of this process in KiB.
///
/// # Errors
///
/// If `/proc/self/status` cannot be read or lacks the value.
pub fn peak_memory_kib() -> std::io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = peak.and_then(|rest| rest.split_ascii_whitespace().next()?.parse().ok());
    number.ok_or_else(|| std::io::Error::other("no VmHWM in /proc/self/status"))
}

/// Copies a program, or a directory with the targets of its links, to a place that other users can
/// read. A separate process writes the copy: a child that another thread is starting could inherit
/// a writable descriptor of this process, and executing the copy would fail with `ETXTBSY` until
/// that child calls exec.
///
/// # Panics
///
/// If `cp` fails.
pub fn copy_files(from: impl AsRef<Path>, to: &Path) {
    let from = from.as_ref();
    let mut copy = Command::new("cp");
    copy.args(["--recursive", "--dereference"]).arg(from).arg(to);
    let copied = copy.status().expect("cp");
    assert!(copied.success(), "{} cannot be copied to {}", from.display(), to.display());
}

/// Returns true if a program is in `PATH`.
pub fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Returns true if a program of a Debian package is in `PATH`. Otherwise reports a skipped test.
pub fn installed(program: &str, package: &str) -> bool {
    let found = in_path(program);
    if !found {
        crate::omit(&format!("no {program} here: Debian package {package}"));
    }
    found
}

/// Returns the standard error of a program, followed by its standard output.
pub fn output_text(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text + &String::from_utf8_lossy(&output.stdout)
}

/// A child process. Dropping it kills it if it is still running.
pub struct Process {
    name: String,
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
    /// Its standard input. An actor runs as long as this is open.
    input: Option<ChildStdin>,
}

impl Process {
    /// Starts a command and collects its standard output and error. Its standard input stays open
    /// until [`Process::release`].
    ///
    /// # Panics
    ///
    /// If the command cannot be started.
    pub fn start(mut command: Command) -> Self {
        let name =
            command.get_program().to_string_lossy().rsplit('/').next().unwrap_or("").to_owned();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let (sender, lines) = channel();
        let outputs: [Option<Box<dyn std::io::Read + Send>>; 2] = [
            child.stdout.take().map(|o| Box::new(o) as _),
            child.stderr.take().map(|o| Box::new(o) as _),
        ];
        for output in outputs.into_iter().flatten() {
            let sender = sender.clone();
            // Ends when the child and all processes that inherited its output have closed it.
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        let input = child.stdin.take();
        Process { name, child, lines, seen: Vec::new(), input }
    }

    /// Returns the process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that contains `text` and returns the rest of the line.
    ///
    /// # Panics
    ///
    /// If none appears before the deadline or the end of the process.
    pub fn line_after(&mut self, text: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if let Some((_, rest)) = line.split_once(text) {
                        return rest.trim().to_owned();
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.fail(&format!("no line with {text:?}")),
                Err(RecvTimeoutError::Disconnected) => {
                    self.fail(&format!("ended without a line with {text:?}"));
                }
            }
        }
    }

    /// Returns the text after `text` in the latest available line that contains it. Consumes all
    /// available lines.
    pub fn latest_after(&mut self, text: &str) -> Option<String> {
        let mut latest = None;
        while let Ok(line) = self.lines.try_recv() {
            if let Some((_, rest)) = line.split_once(text) {
                latest = Some(rest.trim().to_owned());
            } else {
                self.seen.push(line);
            }
        }
        latest
    }

    /// Writes a line to its standard input, waits for a line that contains `text`, and returns the
    /// rest of that line.
    ///
    /// # Panics
    ///
    /// If the process has ended, or does not answer before the deadline.
    pub fn ask(&mut self, line: &str, text: &str) -> String {
        let written = self.input.as_mut().map(|input| writeln!(input, "{line}"));
        if !matches!(written, Some(Ok(()))) {
            self.fail(&format!("cannot write {line:?} to its standard input"));
        }
        self.line_after(text)
    }

    /// Closes its standard input, on which an actor ends.
    pub fn release(&mut self) {
        self.input = None;
    }

    /// Returns true if the process has ended.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32) {
            // The process may have ended already.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Waits for the end. Returns the exit status and all output.
    ///
    /// # Panics
    ///
    /// If it does not end before the deadline.
    pub fn finish(self) -> (ExitStatus, Vec<String>) {
        self.finish_within(DEADLINE.as_secs())
    }

    /// Like [`Process::finish`], with a deadline in seconds.
    ///
    /// # Panics
    ///
    /// If it does not end before the deadline.
    pub fn finish_within(mut self, seconds: u64) -> (ExitStatus, Vec<String>) {
        let status = self.wait(Duration::from_secs(seconds));
        while let Ok(line) = self.lines.recv_timeout(DEADLINE) {
            self.seen.push(line);
        }
        (status, std::mem::take(&mut self.seen))
    }

    /// Waits for the end, which must be a success. Returns all output.
    ///
    /// # Panics
    ///
    /// If it fails or does not end before the deadline.
    pub fn succeed(self) -> Vec<String> {
        let name = self.name.clone();
        let (status, lines) = self.finish();
        assert!(status.success(), "{name}: {status}\n{}", lines.join("\n"));
        lines
    }

    /// Kills it (`SIGKILL`) and waits for its end.
    pub fn kill(self) {
        self.killed();
    }

    /// Kills the process (`SIGKILL`), and its process group if it leads one, and waits for the
    /// end. Returns the exit status, which may be that of an earlier exit, and all output.
    pub fn killed(mut self) -> (ExitStatus, Vec<String>) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::KILL);
        let _ = self.child.kill();
        let (status, lines) = self.finish();
        assert!(status.signal().is_some() || status.code().is_some());
        (status, lines)
    }

    /// Waits for the end for at most `timeout`. Returns true if the process has ended.
    pub fn ends_within(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        // A pidfd becomes readable when the process ends, so no polling is needed.
        let pid = rustix::process::Pid::from_child(&self.child);
        if let Ok(pidfd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = rustix::event::Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let mut fds = [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)];
            return rustix::event::poll(&mut fds, Some(&timeout)) != Ok(0);
        }
        self.has_ended()
    }

    fn wait(&mut self, timeout: Duration) -> ExitStatus {
        if !self.ends_within(timeout) {
            self.fail("still running at the deadline");
        }
        match self.child.wait() {
            Ok(status) => status,
            Err(e) => self.fail(&format!("cannot be waited for: {e}")),
        }
    }

    fn fail(&mut self, what: &str) -> ! {
        let _ = self.child.kill();
        while let Ok(line) = self.lines.recv_timeout(Duration::from_millis(200)) {
            self.seen.push(line);
        }
        panic!("{}: {what}; it printed:\n{}", self.name, self.seen.join("\n"));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
