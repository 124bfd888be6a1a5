//! Running somebody else's benchmark once: a server, and a client that prints.
//!
//! Both run on this machine, at a port of their own, with a deadline; neither outlives the call.

use std::io::{Read, Seek};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::perf::placement::Placement;

/// How a benchmark is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Name of the program, which is searched in `PATH`.
    pub program: &'static str,
    /// Environment of both.
    pub environment: Vec<(&'static str, &'static str)>,
    /// Arguments of the server, which listens at the port.
    pub server: Vec<String>,
    /// Arguments of the client.
    pub client: Vec<String>,
}

/// Where a program is installed; `None` if it is not.
pub fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Runs it at a port of its own. Another program may take the port before the server does, which
/// then ends: it gets another one.
pub fn run_somewhere(pair: impl Fn(u16) -> Pair, placement: Placement) -> Result<String, String> {
    let mut tries = 1;
    loop {
        let port = free_port()?;
        match run(&pair(port), port, placement) {
            Err(why) if why.starts_with(NO_SERVER) && tries < TRIES => tries += 1,
            done => return done,
        }
    }
}

/// A TCP port that is in use at no address, as the servers want it.
fn free_port() -> Result<u16, String> {
    let bound = TcpListener::bind("0.0.0.0:0").and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(|e| format!("no free port: {e}"))
}

/// Starts the server, waits until it listens at `port`, runs the client, ends both. What the client
/// has printed on its standard output, or why there is nothing.
fn run(pair: &Pair, port: u16, placement: Placement) -> Result<String, String> {
    let deadline = Instant::now() + PATIENCE;
    let mut server = {
        let _pin = placement.pin_peer().map_err(|e| e.to_string())?;
        Running::start(pair, &pair.server)?
    };
    server.await_port(port, deadline)?;
    let mut client = {
        let _pin = placement.pin_driver().map_err(|e| e.to_string())?;
        Running::start(pair, &pair.client)?
    };
    client.output(deadline)
}

/// A process that does not outlive this.
struct Running {
    child: Child,
    /// What it says on its standard error.
    complaints: std::fs::File,
}

impl Running {
    fn start(pair: &Pair, arguments: &[String]) -> Result<Self, String> {
        let failed = |e: std::io::Error| format!("starting {}: {e}", pair.program);
        let complaints = tempfile::tempfile().map_err(failed)?;
        let child = Command::new(pair.program)
            .args(arguments)
            .envs(pair.environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(complaints.try_clone().map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        Ok(Running { child, complaints })
    }

    /// Waits until some process listens at the port. To connect would be to take the client's turn.
    fn await_port(&mut self, port: u16, deadline: Instant) -> Result<(), String> {
        loop {
            let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
            let text = |table: &&str| std::fs::read_to_string(table).unwrap_or_default();
            if tables.iter().map(text).any(|table| listens(&table, port)) {
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("{NO_SERVER} with {status}{}", self.complaint()));
            }
            if Instant::now() > deadline {
                return Err(format!("the server does not listen{}", self.complaint()));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// What it prints until its end.
    fn output(&mut self, deadline: Instant) -> Result<String, String> {
        let Some(mut pipe) = self.child.stdout.take() else {
            return Err("has no standard output".to_owned());
        };
        let printed = read_until(&mut pipe, deadline).map_err(|e| e + &self.complaint())?;
        let status = self.child.wait().map_err(|e| format!("waiting for it: {e}"))?;
        match status.success() {
            true => Ok(printed),
            // UCX complains on its standard output.
            false => Err(match (self.complaint(), printed.trim_end().lines().last()) {
                (said, Some(line)) if said.is_empty() => format!("ended with {status}: {line}"),
                (said, _) => format!("ended with {status}{said}"),
            }),
        }
    }

    /// The last line of its standard error, for people.
    fn complaint(&mut self) -> String {
        let mut said = Vec::new();
        let read = self.complaints.rewind().and_then(|()| self.complaints.read_to_end(&mut said));
        let said = String::from_utf8_lossy(&said);
        match (read, said.trim_end().lines().last()) {
            (Ok(_), Some(line)) => format!(": {}", line.trim()),
            _ => String::new(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Neither fails in a way that matters: it may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Everything until the end of a pipe.
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

/// Whether a table of `/proc/net/tcp` has a listener at the port: the second field ends with it, in
/// hexadecimal digits, and the fourth is the state.
fn listens(table: &str, port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let local = fields.next().is_some_and(|local| local.ends_with(&wanted));
        local && fields.nth(1) == Some("0A")
    })
}

/// How long a server and a client may take together.
const PATIENCE: Duration = Duration::from_secs(120);
/// How the error of a server begins that never listened.
const NO_SERVER: &str = "the server ended";
/// Ports that are tried.
const TRIES: u32 = 3;
/// Between two looks for the server's port.
const LOOK: Duration = Duration::from_millis(2);
/// More than any benchmark prints.
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
    fn what_the_client_prints_is_returned_once_the_server_listens() {
        // This process is what listens.
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
    fn a_server_that_ends_says_why() {
        // No program listens at port 0.
        let port = 0;
        let e = run(&shell("echo in use >&2; exit 1", "echo 1"), port, Placement::Apart);
        assert_eq!(e, Err("the server ended with exit status: 1: in use".to_owned()));
    }

    #[test]
    fn a_server_whose_port_was_taken_gets_another_one() {
        let ports = std::cell::RefCell::new(Vec::new());
        let pair = |port| {
            ports.borrow_mut().push(port);
            shell("exit 1", "echo 1")
        };
        assert!(run_somewhere(pair, Placement::Free).unwrap_err().starts_with(NO_SERVER));
        assert_eq!(ports.borrow().len(), TRIES as usize);
    }

    #[test]
    fn programs_are_found_where_the_shell_finds_them() {
        assert!(installed("sh").is_some());
        assert!(installed("a-program-that-nobody-has").is_none());
    }
}
