//! The process at the other end: the handle that the driver has, and what runs in it.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command as Program, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rnic_client::{Context, Error, OpenOptions, RemoteMr};

use super::end::{End, RemoteMemory, Role};
use super::error::PerfError;
use super::raw::RawEnd;
use super::relay::{Member, Page};
use super::spec::Spec;
use super::talk::{Command, Place, Reply, hear, say};
use crate::cli;
use crate::endpoint::{Endpoint, loopback};

/// A running peer process, or one of another host that [`serve_hosts`] runs. It ends its part when
/// this is dropped.
pub struct Peer {
    process: Process,
    commands: Option<Box<dyn Write + Send>>,
    replies: Box<dyn BufRead + Send>,
}

/// What runs the peer's part.
enum Process {
    Child(Child),
    Host(TcpStream),
}

impl Peer {
    /// Starts `program`, which must call [`serve`] with nothing else on its standard output.
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
            // Both were asked for.
            _ => Err(PerfError::Peer("has no standard input or output".to_owned())),
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

    /// Returns the address under which this process reaches a listener of the peer.
    pub fn reach(&self, listener: SocketAddr) -> Result<SocketAddr, PerfError> {
        match &self.process {
            Process::Child(_) => Ok(listener),
            // With the scope that a link-local address has here.
            Process::Host(stream) => {
                let mut address =
                    stream.peer_addr().map_err(PerfError::io("finding the peer's address"))?;
                address.set_port(listener.port());
                Ok(address)
            }
        }
    }

    /// Sends a command to the peer.
    pub fn command(&mut self, command: &Command) -> Result<(), PerfError> {
        match &mut self.commands {
            Some(pipe) => say(pipe, command),
            None => Err(PerfError::Peer("has ended".to_owned())),
        }
    }

    /// The next reply; a failure of the peer is an error here.
    pub fn reply(&mut self) -> Result<Reply, PerfError> {
        match hear(&mut self.replies)? {
            Some(Reply::Failed { why }) => Err(PerfError::Peer(why)),
            Some(reply) => Ok(reply),
            None => Err(PerfError::Peer("ended without a word".to_owned())),
        }
    }

    /// Waits for `Ready` or `Done`, whichever is `wanted`.
    pub fn await_reply(&mut self, wanted: &Reply) -> Result<(), PerfError> {
        match self.reply()? {
            reply if std::mem::discriminant(&reply) == std::mem::discriminant(wanted) => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// After a failure on this side: ends the peer and adds what it has to say of it.
    pub fn explain(&mut self, failure: PerfError) -> PerfError {
        self.commands = None;
        let ended = self.process.end();
        loop {
            match hear(&mut self.replies) {
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
        // The end of its commands ends it; if it is stuck in one, the signal does. Neither can fail
        // in a way that matters now.
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
    /// Ends it after its commands have ended. Returns the status of a child that ended by itself.
    fn end(&mut self) -> Option<ExitStatus> {
        match self {
            Process::Child(child) => {
                // It may be about to end by itself, with a reason that a signal of ours would hide.
                let start = Instant::now();
                let mut ended = None;
                while ended.is_none() && start.elapsed() < GRACE {
                    ended = child.try_wait().ok().flatten();
                    std::thread::sleep(LOOK);
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

/// What a peer process does: carries out commands from standard input until its end. `socket` is
/// that of its daemon. Returns an error that has been reported to the driver already.
pub fn serve(socket: Option<&Path>) -> Result<(), PerfError> {
    let served = open(socket).map_err(PerfError::from).and_then(|context| {
        let mut input = std::io::stdin().lock();
        let mut output = std::io::stdout().lock();
        obey(&context, true, loopback().ip(), &mut input, &mut output)
    });
    if let Err(e) = &served {
        // A driver that is gone needs no report.
        let _ = say(&mut std::io::stdout(), &Reply::Failed { why: e.to_string() });
    }
    served
}

/// Plays the peer for drivers of other hosts, one after the other. Ends only if it cannot listen
/// or has no daemon.
pub fn serve_hosts(socket: Option<&Path>, listen: &Endpoint) -> Result<(), PerfError> {
    open(socket)?;
    let bind =
        |address: SocketAddr| TcpListener::bind(address).map_err(|e| format!("{address}: {e}"));
    let listener = listen.try_each(bind, |_| true).map_err(|e| PerfError::Peer(e.to_string()))?;
    let address = listener.local_addr().map_err(PerfError::io("finding the address"))?;
    cli::say(format!("listening on {address}")).map_err(PerfError::io("printing"))?;
    loop {
        let (stream, driver) = listener.accept().map_err(PerfError::io("accepting a driver"))?;
        // A driver that fails ends its own measurement only.
        if let Err(e) = serve_host(socket, &stream) {
            cli::complain("rnic-perf", format!("{driver}: {e}"));
        }
    }
}

fn serve_host(socket: Option<&Path>, stream: &TcpStream) -> Result<(), PerfError> {
    let io = PerfError::io;
    stream.set_nodelay(true).map_err(io("setting TCP_NODELAY"))?;
    // A silent driver keeps the others waiting.
    stream.set_read_timeout(Some(LONGEST_ROUND)).map_err(io("setting a timeout"))?;
    let ip = stream.local_addr().map_err(io("finding the address"))?.ip();
    let mut output = stream;
    let served = open(socket)
        .map_err(PerfError::from)
        .and_then(|context| obey(&context, false, ip, &mut BufReader::new(stream), &mut output));
    if let Err(e) = &served {
        let _ = say(&mut output, &Reply::Failed { why: e.to_string() });
    }
    served
}

/// Opens the device behind `socket`, or the one that the environment names.
pub fn open(socket: Option<&Path>) -> Result<Context, Error> {
    let socket = socket.map(Path::to_path_buf);
    Context::open_with(OpenOptions { socket, ..OpenOptions::default() })
}

/// The program of the second process.
pub fn peer_program(socket: Option<&Path>) -> Result<Program, PerfError> {
    let mut program = this_program("peer")?;
    if let Some(socket) = socket {
        program.arg("--socket").arg(socket);
    }
    Ok(program)
}

/// The program of the second process of a relay.
pub fn relay_program() -> Result<Program, PerfError> {
    this_program("relay")
}

fn this_program(part: &str) -> Result<Program, PerfError> {
    let own = std::env::current_exe().map_err(PerfError::io("finding this program"))?;
    // A load of another user may run what lies in a folder that is closed to it.
    let mut program = Program::new(if own.exists() { own } else { THIS.into() });
    program.arg(part);
    Ok(program)
}

/// The program of a load; it is run as that user, if one is named.
pub fn load_program(
    socket: Option<&Path>,
    peer_socket: Option<&Path>,
    user: Option<u32>,
) -> Result<Program, PerfError> {
    let mut program = match user {
        None => this_program("load")?,
        Some(id) => {
            let mut program = Program::new(THIS);
            program.arg("load").uid(id).gid(id).current_dir("/");
            program
        }
    };
    for (option, socket) in [("--socket", socket), ("--peer-socket", peer_socket)] {
        if let Some(socket) = socket {
            program.arg(option).arg(socket);
        }
    }
    Ok(program)
}

/// An error for a message at the wrong time.
pub fn unexpected(message: &impl std::fmt::Debug) -> PerfError {
    PerfError::Peer(format!("did not expect {message:?} now"))
}

/// Carries out commands until their end, with listeners at `ip`. A driver over TCP may have no
/// relay, which names a file of this host.
fn obey(
    context: &Context,
    is_child: bool,
    ip: IpAddr,
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> Result<(), PerfError> {
    let mut ends = Vec::new();
    let mut tcp = None;
    let mut page = None;
    while let Some(command) = hear(input)? {
        match command {
            Command::Link { end, spec, sink, places } => {
                spec.check()?;
                // First the memory of those before goes.
                ends.truncate(end);
                ends.push(link(context, ip, &spec, sink, &places, output)?);
            }
            Command::RawLink { spec } => {
                spec.check()?;
                drop(tcp.take());
                tcp = Some(raw_link(ip, spec, output)?);
            }
            Command::Rdma { end, count, placement } => {
                let (end, remote) = ends.get_mut(end).ok_or_else(|| unexpected(&"Rdma"))?;
                let _pin = placement.pin_peer()?;
                say(output, &Reply::Ready)?;
                End::follow(end, remote, count)?;
            }
            Command::Tcp { count, manner } => {
                let end = tcp.as_mut().ok_or_else(|| unexpected(&"Tcp"))?;
                let _pin = manner.placement.pin_peer()?;
                RawEnd::set_manner(end, manner)?;
                say(output, &Reply::Ready)?;
                RawEnd::follow(end, count)?;
            }
            command @ (Command::RelayLink { .. } | Command::Relay { .. }) if is_child => {
                pass_on(&mut page, Member::Third, command, output)?;
            }
            command => return Err(unexpected(&command)),
        }
        say(output, &Reply::Done)?;
    }
    Ok(())
}

/// What the second process of a relay does: passes on what it is told to until the end of its
/// commands.
pub fn serve_relay() -> Result<(), PerfError> {
    let mut input = std::io::stdin().lock();
    let mut output = std::io::stdout().lock();
    let mut obey = || {
        let mut page = None;
        while let Some(command) = hear(&mut input)? {
            pass_on(&mut page, Member::Second, command, &mut output)?;
            say(&mut output, &Reply::Done)?;
        }
        Ok(())
    };
    let served = obey();
    if let Err(e) = &served {
        // A driver that is gone needs no report.
        let _ = say(&mut output, &Reply::Failed { why: PerfError::to_string(e) });
    }
    served
}

/// The commands about a relay.
fn pass_on(
    page: &mut Option<Page>,
    member: Member,
    command: Command,
    output: &mut impl Write,
) -> Result<(), PerfError> {
    match command {
        Command::RelayLink { memory } => *page = Some(Page::open(&memory)?),
        Command::Relay { count, seats } => {
            let page = page.as_ref().ok_or_else(|| unexpected(&"Relay"))?;
            let _pin = seats.pin(member)?;
            say(output, &Reply::Ready)?;
            page.follow(member, count)?;
        }
        other => return Err(unexpected(&other)),
    }
    Ok(())
}

fn link(
    context: &Context,
    ip: IpAddr,
    spec: &Spec,
    sink: RemoteMr,
    peers: &[Place],
    output: &mut impl Write,
) -> Result<(End, RemoteMemory), PerfError> {
    let end = End::new(context, Role::Peer, spec)?;
    let (source, own) = (end.source(), end.sink());
    if spec.wired {
        end.wire(context, peers)?;
        let places = end.places(context)?;
        say(output, &Reply::Wired { places, source, sink: own })?;
        return Ok((end, RemoteMemory { source: None, sink }));
    }
    let listener = context.listen(SocketAddr::new(ip, 0), BACKLOG)?;
    let address = listener.local_addr();
    say(output, &Reply::Listening { address, source, sink: own })?;
    end.accept(&listener)?;
    Ok((end, RemoteMemory { source: None, sink }))
}

fn raw_link(ip: IpAddr, spec: Spec, output: &mut impl Write) -> Result<RawEnd, PerfError> {
    let io = PerfError::io;
    let listener = TcpListener::bind(SocketAddr::new(ip, 0)).map_err(io("binding a TCP socket"))?;
    let address = listener.local_addr().map_err(io("the address of a TCP socket"))?;
    say(output, &Reply::RawListening { address })?;
    let stream: TcpStream = listener.accept().map_err(io("accepting a TCP connection"))?.0;
    RawEnd::new(stream, spec)
}

/// The program that runs, whoever runs it and wherever it lies.
const THIS: &str = "/proc/self/exe";
/// How long a peer may take to end after a failure on this side.
const GRACE: Duration = Duration::from_millis(200);
/// How long a peer on another host may take to say why it failed.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long a driver of another host may say nothing: as long as a round at most.
const LONGEST_ROUND: Duration = Duration::from_secs(4000);
/// Between two looks at it.
const LOOK: Duration = Duration::from_millis(5);
/// Connections come one at a time.
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
    fn a_failure_of_the_peer_is_told_here() {
        let mut peer = shell(r#"echo '"Ready"'; echo '{"Failed":{"why":"no daemon"}}'"#);
        peer.await_reply(&Reply::Ready).unwrap();
        let e = peer.await_reply(&Reply::Done).unwrap_err();
        assert_eq!(e.to_string(), "the peer process: no daemon");
    }

    #[test]
    fn the_end_of_the_peer_is_no_reply() {
        let e = shell("exit 3").reply().unwrap_err();
        assert_eq!(e.to_string(), "the peer process: ended without a word");
    }

    #[test]
    fn a_failure_here_tells_what_the_peer_said_of_it() {
        let stuck = || PerfError::Stuck { what: "completion", seconds: 20 };
        // The line is read after the reply before it, so it is there when the peer is killed.
        let mut peer =
            shell(r#"printf '"Ready"\n{"Failed":{"why":"flushed"}}\n'; exec sleep 1000"#);
        peer.await_reply(&Reply::Ready).unwrap();
        let said = peer.explain(stuck()).to_string();
        assert_eq!(said, "the peer process: flushed (on this side: no completion for 20 s)");
        let said = shell("kill -9 $$").explain(stuck()).to_string();
        assert!(said.contains("signal: 9") && said.contains("no completion"), "{said}");
        assert_eq!(shell("exit 0").explain(stuck()).to_string(), stuck().to_string());
    }
}
