//! Runs a benchmark of another project once: a server, and a client that prints the result.
//!
//! Both run on this machine, on an unused port and with a deadline. Both have ended when the call
//! returns.

use std::io::{Read, Seek};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::placement::Placement;

/// Command lines of a benchmark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Name of the program, found in `PATH`.
    pub program: &'static str,
    /// Environment of both processes.
    pub environment: Vec<(&'static str, &'static str)>,
    /// Arguments of the server, which listens on the port.
    pub server: Vec<String>,
    /// Arguments of the client.
    pub client: Vec<String>,
}

/// Returns the path of a program, or `None` if it is not installed.
pub fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Runs the benchmark at a free port. If another program takes the port before the server does, the
/// server exits; this function then tries another port.
pub fn run_on_free_port(
    pair: impl Fn(u16) -> Pair,
    placement: Placement,
) -> Result<String, String> {
    let mut tries = 1;
    loop {
        let port = free_port()?;
        match run(&pair(port), port, placement) {
            Err(why) if why.starts_with(NO_SERVER) && tries < TRIES => tries += 1,
            done => return done,
        }
    }
}

/// Returns a TCP port that is free on all addresses, as the servers require.
fn free_port() -> Result<u16, String> {
    let bound = TcpListener::bind("0.0.0.0:0").and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(|e| format!("no free port: {e}"))
}

/// Starts the server, waits until it listens on `port`, runs the client, and ends both. Returns the
/// standard output of the client, or an error.
fn run(pair: &Pair, port: u16, placement: Placement) -> Result<String, String> {
    let deadline = Instant::now() + PATIENCE;
    let mut server = {
        let _pin = placement.pin_peer(None).map_err(|e| e.to_string())?;
        Running::start(pair, &pair.server)?
    };
    server.await_port(port, deadline)?;
    let mut client = {
        let _pin = placement.pin_driver().map_err(|e| e.to_string())?;
        Running::start(pair, &pair.client)?
    };
    client.output(deadline)
}

/// A process that is killed when this is dropped.
struct Running {
    child: Child,
    /// Its standard error.
    stderr: std::fs::File,
}

impl Running {
    fn start(pair: &Pair, arguments: &[String]) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("starting {}: {e}", pair.program);
        let stderr = tempfile::tempfile().map_err(failed)?;
        let child = Command::new(pair.program)
            .args(arguments)
            .envs(pair.environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr.try_clone().map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        Ok(Running { child, stderr })
    }

    /// Waits until a process listens on the port. Does not connect, because the server would take
    /// that connection for its client.
    fn await_port(&mut self, port: u16, deadline: Instant) -> Result<(), String> {
        loop {
            let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
            let text = |table: &&str| std::fs::read_to_string(table).unwrap_or_default();
            if tables.iter().map(text).any(|table| listens(&table, port)) {
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("{NO_SERVER} with {status}{}", self.last_error_line()));
            }
            if Instant::now() > deadline {
                return Err(format!("the server does not listen{}", self.last_error_line()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns everything that the process prints until it ends.
    fn output(&mut self, deadline: Instant) -> Result<String, String> {
        let Some(mut pipe) = self.child.stdout.take() else {
            return Err("has no standard output".to_owned());
        };
        let printed = read_until(&mut pipe, deadline).map_err(|e| e + &self.last_error_line())?;
        let status = self.child.wait().map_err(|e| format!("waiting for it: {e}"))?;
        if status.success() {
            return Ok(printed);
        }
        // UCX prints errors on its standard output.
        Err(match (self.last_error_line(), printed.trim_end().lines().last()) {
            (said, Some(line)) if said.is_empty() => format!("ended with {status}: {line}"),
            (said, _) => format!("ended with {status}{said}"),
        })
    }

    /// Returns the last line of its standard error, for error messages.
    fn last_error_line(&mut self) -> String {
        let mut said = Vec::new();
        let read = self.stderr.rewind().and_then(|()| self.stderr.read_to_end(&mut said));
        let said = String::from_utf8_lossy(&said);
        match (read, said.trim_end().lines().last()) {
            (Ok(_), Some(line)) => format!(": {}", line.trim()),
            _ => String::new(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Failures do not matter here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads until the end of a pipe.
fn read_until(pipe: &mut ChildStdout, deadline: Instant) -> Result<String, String> {
    let mut bytes = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&*pipe, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(format!("printed no result in {} s", PATIENCE.as_secs())),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(format!("waiting for its output: {e}")),
        }
        let mut chunk = [0; 4096];
        match pipe.read(&mut chunk).map_err(|e| format!("reading its output: {e}"))? {
            0 => return Ok(String::from_utf8_lossy(&bytes).into_owned()),
            n if bytes.len() < MOST => bytes.extend_from_slice(&chunk[..n]),
            _ => return Err("prints without end".to_owned()),
        }
    }
}

/// Returns true if a table of `/proc/net/tcp` has a listener at the port. The second field ends
/// with the port in hexadecimal, and the fourth is the state.
fn listens(table: &str, port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let local = fields.next().is_some_and(|local| local.ends_with(&wanted));
        local && fields.nth(1) == Some("0A")
    })
}

/// Time limit for server and client together.
const PATIENCE: Duration = Duration::from_secs(120);
/// Start of the error of a server that exits before it listens.
const NO_SERVER: &str = "the server ended";
/// Number of ports to try.
const TRIES: u32 = 3;
/// Interval between checks of the server's port.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Maximum output of a benchmark in bytes, far above the usual.
const MOST: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(server: &str, client: &str) -> Pair {
        let script = |text: &str| vec!["-c".to_owned(), text.to_owned()];
        let environment = vec![("RATE", "42")];
        Pair { program: "sh", environment, server: script(server), client: script(client) }
    }

    #[test]
    fn listeners_are_found_by_port_and_state() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n\
                     \x20  0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000\n\
                     \x20  1: 0100007F:1F91 0100007F:1F90 01 00000000:00000000 00:00000000\n";
        assert!(listens(table, 8080));
        assert!(!listens(table, 8081) && !listens(table, 80));
        assert!(!listens("", 80) && !listens("odd\n\n", 80));
    }

    #[test]
    fn the_output_of_the_client_is_returned() {
        // The listener of this process replaces the server.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let pair = shell("exec sleep 1000", "echo $RATE");
        assert_eq!(run(&pair, port, Placement::Free), Ok("42\n".to_owned()));
        for output in [1, 2] {
            let fails = format!("echo no such device >&{output}; exit 3");
            let e = run(&shell("exec sleep 1000", &fails), port, Placement::Free);
            assert_eq!(e, Err("ended with exit status: 3: no such device".to_owned()));
        }
    }

    #[test]
    fn the_error_of_the_server_is_reported() {
        // No program listens at port 0.
        let port = 0;
        let e = run(&shell("echo in use >&2; exit 1", "echo 1"), port, Placement::Apart);
        assert_eq!(e, Err("the server ended with exit status: 1: in use".to_owned()));
    }

    #[test]
    fn a_taken_port_is_replaced() {
        let ports = std::cell::RefCell::new(Vec::new());
        let pair = |port| {
            ports.borrow_mut().push(port);
            shell("exit 1", "echo 1")
        };
        assert!(run_on_free_port(pair, Placement::Free).unwrap_err().starts_with(NO_SERVER));
        assert_eq!(ports.borrow().len(), TRIES as usize);
    }

    #[test]
    fn programs_are_found_where_the_shell_finds_them() {
        assert!(installed("sh").is_some());
        assert!(installed("a-program-that-nobody-has").is_none());
    }
}
