//! The peer process: the driver's handle, and the code that the process runs.

use std::io::{BufRead, BufReader, Stdout, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command as Program, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rnic_client::{Context, Error, OpenOptions, RemoteMr};
use rustix::process::Pid;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::end::{End, RemoteMemory, Role};
use super::error::PerfError;
use super::protocol::{Command, QpAddress, Reply, read_msg, write_msg};
use super::raw::RawEnd;
use super::spec::Spec;
use crate::cli;
use crate::endpoint::{Endpoint, loopback};

/// A peer process: a child on this host, or [`serve_hosts`] on another. Drop ends only a child.
pub struct Peer {
    process: Process,
    commands: Option<Box<dyn Write + Send>>,
    replies: Box<dyn BufRead + Send>,
}

/// The process of a peer.
enum Process {
    Child(Child),
    Host(TcpStream),
}

impl Peer {
    /// Starts `program`, which must write only replies to its standard output.
    pub fn start(mut program: Program) -> Result<Self, PerfError> {
        let mut child = program
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(PerfError::io("starting the peer process"))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(commands), Some(replies)) => {
                let commands: Box<dyn Write + Send> = Box::new(commands);
                let replies = Box::new(BufReader::new(replies));
                Ok(Peer { process: Process::Child(child), commands: Some(commands), replies })
            }
            // Both are set to pipes above, so this cannot happen.
            _ => Err(PerfError::Peer("it has no standard input or output".to_owned())),
        }
    }

    /// Connects to `rnic-perf serve` on another host.
    pub fn connect(to: &Endpoint) -> Result<Self, PerfError> {
        let connect = |address: SocketAddr| {
            TcpStream::connect(address).map_err(|e| format!("{address}: {e}"))
        };
        let stream = to.try_each(connect, |_| true).map_err(|e| PerfError::Peer(e.to_string()))?;
        let io = PerfError::io;
        stream.set_nodelay(true).map_err(io("setting TCP_NODELAY"))?;
        let commands = stream.try_clone().map_err(io("connecting to the peer"))?;
        let replies = stream.try_clone().map_err(io("connecting to the peer"))?;
        Ok(Peer {
            process: Process::Host(stream),
            commands: Some(Box::new(commands)),
            replies: Box::new(BufReader::new(replies)),
        })
    }

    /// Returns the address at which this process reaches a listener of the peer.
    pub fn reach(&self, listener: SocketAddr) -> Result<SocketAddr, PerfError> {
        match &self.process {
            Process::Child(_) => Ok(listener),
            // Keeps the scope of a link-local address on this host.
            Process::Host(stream) => {
                let mut address =
                    stream.peer_addr().map_err(PerfError::io("finding the peer's address"))?;
                address.set_port(listener.port());
                Ok(address)
            }
        }
    }

    /// Returns the PID of the process, or `None` on another host.
    pub fn pid(&self) -> Option<Pid> {
        match &self.process {
            Process::Child(child) => Some(Pid::from_child(child)),
            Process::Host(_) => None,
        }
    }

    /// Sends a command to the peer.
    pub fn command(&mut self, command: &impl Serialize) -> Result<(), PerfError> {
        match &mut self.commands {
            Some(pipe) => write_msg(pipe, command),
            None => Err(PerfError::Peer("it has ended".to_owned())),
        }
    }

    /// Waits for the next reply. A failure reported by the peer is an error.
    pub fn reply(&mut self) -> Result<Reply, PerfError> {
        match self.receive()? {
            Reply::Failed { why } => Err(PerfError::Peer(why)),
            reply => Ok(reply),
        }
    }

    /// Waits for the next message, which may be of a type other than [`Reply`].
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<T, PerfError> {
        let ended = || PerfError::Peer("ended without an error message".to_owned());
        read_msg(&mut self.replies)?.ok_or_else(ended)
    }

    /// Waits for a reply of the same kind as `wanted`.
    pub fn await_reply(&mut self, wanted: &Reply) -> Result<(), PerfError> {
        match self.reply()? {
            reply if std::mem::discriminant(&reply) == std::mem::discriminant(wanted) => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Handles a failure on this side: ends the peer, and adds the peer's error to the failure.
    pub fn explain(&mut self, failure: PerfError) -> PerfError {
        self.commands = None;
        let ended = self.process.end();
        loop {
            match read_msg(&mut self.replies) {
                Ok(Some(Reply::Failed { why })) => {
                    return PerfError::Peer(format!("{why} (on this side: {failure})"));
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => break,
            }
        }
        match ended.filter(|status| !status.success()) {
            Some(status) => PerfError::Peer(format!("ended with {status} ({failure})")),
            None => failure,
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The peer exits when its input ends. The signal ends it if it is stuck in a command.
        self.commands = None;
        match &mut self.process {
            Process::Child(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Process::Host(stream) => drop(stream.shutdown(Shutdown::Both)),
        }
    }
}

impl Process {
    /// Ends a child, or the command stream to a host. Returns the status of a child that exited.
    fn end(&mut self) -> Option<ExitStatus> {
        match self {
            Process::Child(child) => {
                // The child may exit on its own; an early signal would hide the reason.
                let start = Instant::now();
                let mut ended = None;
                while ended.is_none() && start.elapsed() < GRACE {
                    ended = child.try_wait().ok().flatten();
                    std::thread::sleep(POLL_INTERVAL);
                }
                let _ = child.kill();
                ended
            }
            Process::Host(stream) => {
                let _ = stream.shutdown(Shutdown::Write);
                let _ = stream.set_read_timeout(Some(LAST_WORDS));
                None
            }
        }
    }
}

/// Runs a peer process: carries out commands from standard input until EOF. `socket` is the socket
/// of its daemon. The error returned has already been reported to the driver.
pub fn serve(socket: Option<&Path>) -> Result<(), PerfError> {
    serve_child(|output| {
        let context = open(socket)?;
        carry_out(&context, loopback().ip(), &mut std::io::stdin().lock(), output)
    })
}

/// Runs a child process that replies to commands, and reports a failure to its parent.
pub fn serve_child(
    carry_out: impl FnOnce(&mut Stdout) -> Result<(), PerfError>,
) -> Result<(), PerfError> {
    let mut output = std::io::stdout();
    let served = carry_out(&mut output);
    if let Err(e) = &served {
        // Fails if the parent has exited, which needs no report.
        let _ = write_msg(&mut output, &Reply::Failed { why: e.to_string() });
    }
    served
}

/// Runs the peer for drivers on other hosts, one driver at a time. Returns only if it fails to
/// start or to accept.
pub fn serve_hosts(socket: Option<&Path>, listen: &Endpoint) -> Result<(), PerfError> {
    open(socket)?;
    let bind =
        |address: SocketAddr| TcpListener::bind(address).map_err(|e| format!("{address}: {e}"));
    let listener = listen.try_each(bind, |_| true).map_err(|e| PerfError::Peer(e.to_string()))?;
    let address = listener.local_addr().map_err(PerfError::io("finding the address"))?;
    cli::print_line(format!("listening on {address}")).map_err(PerfError::io("printing"))?;
    loop {
        let (stream, driver) = listener.accept().map_err(PerfError::io("accepting a driver"))?;
        // A failure only ends the measurement of this driver.
        if let Err(e) = serve_host(socket, &stream) {
            cli::print_error("rnic-perf", format!("{driver}: {e}"));
        }
    }
}

fn serve_host(socket: Option<&Path>, stream: &TcpStream) -> Result<(), PerfError> {
    let io = PerfError::io;
    stream.set_nodelay(true).map_err(io("setting TCP_NODELAY"))?;
    // A silent driver must not block the others.
    stream.set_read_timeout(Some(LONGEST_ROUND)).map_err(io("setting a timeout"))?;
    let ip = stream.local_addr().map_err(io("finding the address"))?.ip();
    let mut output = stream;
    let served = open(socket)
        .map_err(PerfError::from)
        .and_then(|context| carry_out(&context, ip, &mut BufReader::new(stream), &mut output));
    if let Err(e) = &served {
        let _ = write_msg(&mut output, &Reply::Failed { why: e.to_string() });
    }
    served
}

/// Connects to the daemon at `socket`, or to the library's default.
pub fn open(socket: Option<&Path>) -> Result<Context, Error> {
    let socket = socket.map(Path::to_path_buf);
    Context::open_with(OpenOptions { socket, ..OpenOptions::default() })
}

/// Returns the command that starts a peer.
pub fn peer_program(socket: Option<&Path>) -> Result<Program, PerfError> {
    let mut program = this_program("peer")?;
    if let Some(socket) = socket {
        program.arg("--socket").arg(socket);
    }
    Ok(program)
}

/// Returns a command that runs this program with another subcommand.
pub fn this_program(part: &str) -> Result<Program, PerfError> {
    let own = std::env::current_exe().map_err(PerfError::io("finding this program"))?;
    // A process of another user may lack access to the program's path.
    let mut program = Program::new(if own.exists() { own } else { THIS.into() });
    program.arg(part);
    Ok(program)
}

/// Returns the error for an unexpected message.
pub fn unexpected(message: &impl std::fmt::Debug) -> PerfError {
    PerfError::Peer(format!("unexpected message {message:?}"))
}

/// Carries out commands until EOF, with listeners at `ip`.
fn carry_out(
    context: &Context,
    ip: IpAddr,
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> Result<(), PerfError> {
    let mut ends = Vec::new();
    let mut tcp = None;
    while let Some(command) = read_msg(input)? {
        match command {
            Command::Link { end, spec, sink, places } => {
                spec.check()?;
                // Frees the memory of replaced ends first.
                ends.truncate(end);
                ends.push(link(context, ip, &spec, sink, &places, output)?);
            }
            Command::RawLink { spec } => {
                spec.check()?;
                drop(tcp.take());
                tcp = Some(raw_link(ip, spec, output)?);
            }
            Command::Rdma { end, count } => {
                let (end, remote) = ends.get_mut(end).ok_or_else(|| unexpected(&"Rdma"))?;
                write_msg(output, &Reply::Ready)?;
                End::follow(end, remote, count)?;
            }
            Command::Tcp { count, mode } => {
                let end = tcp.as_mut().ok_or_else(|| unexpected(&"Tcp"))?;
                RawEnd::set_mode(end, mode)?;
                write_msg(output, &Reply::Ready)?;
                RawEnd::follow(end, count)?;
            }
        }
        write_msg(output, &Reply::Done)?;
    }
    Ok(())
}

fn link(
    context: &Context,
    ip: IpAddr,
    spec: &Spec,
    sink: RemoteMr,
    peers: &[QpAddress],
    output: &mut impl Write,
) -> Result<(End, RemoteMemory), PerfError> {
    let end = End::new(context, Role::Peer, spec)?;
    let source = end.source();
    let own = end.sink();
    if spec.rc {
        end.wire(context, peers)?;
        let places = end.places(context)?;
        write_msg(output, &Reply::Rc { places, source, sink: own })?;
        return Ok((end, RemoteMemory { source: None, sink }));
    }
    let listener = context.listen(SocketAddr::new(ip, 0), BACKLOG)?;
    let address = listener.local_addr();
    write_msg(output, &Reply::Listening { address, source, sink: own })?;
    end.accept(&listener)?;
    Ok((end, RemoteMemory { source: None, sink }))
}

fn raw_link(ip: IpAddr, spec: Spec, output: &mut impl Write) -> Result<RawEnd, PerfError> {
    let io = PerfError::io;
    let listener = TcpListener::bind(SocketAddr::new(ip, 0)).map_err(io("binding a TCP socket"))?;
    let address = listener.local_addr().map_err(io("finding the TCP address"))?;
    write_msg(output, &Reply::RawListening { address })?;
    let stream: TcpStream = listener.accept().map_err(io("accepting a TCP connection"))?.0;
    RawEnd::new(stream, spec)
}

/// The running program. This path works without access to the program's folder.
pub const THIS: &str = "/proc/self/exe";
/// Time for a peer to exit after a failure on this side.
const GRACE: Duration = Duration::from_millis(200);
/// Time for a peer on another host to report why it failed.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// Longest silence of a driver on another host: the longest round.
const LONGEST_ROUND: Duration = Duration::from_secs(4000);
/// Interval between checks of an exiting peer.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Connections arrive one at a time.
const BACKLOG: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Peer {
        let mut program = Program::new("sh");
        program.args(["-c", script]);
        Peer::start(program).unwrap()
    }

    #[test]
    fn a_failure_of_the_peer_is_an_error() {
        let mut peer = shell(r#"echo '"Ready"'; echo '{"Failed":{"why":"no daemon"}}'"#);
        peer.await_reply(&Reply::Ready).unwrap();
        let e = peer.await_reply(&Reply::Done).unwrap_err();
        assert_eq!(e.to_string(), "peer failed: no daemon");
    }

    #[test]
    fn the_end_of_the_peer_is_an_error() {
        let e = shell("exit 3").reply().unwrap_err();
        assert_eq!(e.to_string(), "peer failed: ended without an error message");
    }

    #[test]
    fn explain_adds_the_error_of_the_peer() {
        let stuck = || PerfError::Stuck { what: "completion", seconds: 20 };
        // A single printf writes both lines, so both have been written when the peer is killed.
        let mut peer =
            shell(r#"printf '"Ready"\n{"Failed":{"why":"flushed"}}\n'; exec sleep 1000"#);
        peer.await_reply(&Reply::Ready).unwrap();
        let said = peer.explain(stuck()).to_string();
        assert_eq!(said, "peer failed: flushed (on this side: no completion for 20 s)");
        let said = shell("kill -9 $$").explain(stuck()).to_string();
        assert!(said.contains("signal: 9") && said.contains("no completion"), "{said}");
        assert_eq!(shell("exit 0").explain(stuck()).to_string(), stuck().to_string());
    }
}
