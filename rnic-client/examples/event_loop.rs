//! An echo server as an event loop: one thread, many connections, and `poll(2)` as the only
//! blocking call.
//!
//!     event_loop serve 127.0.0.1:0 3        serves three clients, then ends
//!     event_loop visit 127.0.0.1:PORT       sends lines and expects them back
//!
//! It polls two descriptors: the completion channel, for completions of all connections, and the
//! context, for connection requests and ended connections.

use std::collections::HashMap;
use std::error::Error;
use std::os::fd::AsFd;
use std::time::Duration;

use rnic_client::*;
use rustix::event::{PollFd, PollFlags, poll};

/// Maximum length of a message, in bytes.
const LONGEST: u32 = 64;
/// Number of messages per client.
const MESSAGES: u32 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address, clients] => serve(address.parse()?, clients.parse()?),
        ["visit", address] => visit(address.parse()?),
        _ => Err("usage: event_loop serve ADDRESS CLIENTS | visit ADDRESS".into()),
    }
}

/// One connection of the server.
struct Peer {
    qp: Qp,
    inbox: Mr,
}

impl Peer {
    fn post_recv(&self) -> Result<(), PostError> {
        self.qp.post_recv(&[RecvRequest::new(0, &[self.inbox.sge(0, LONGEST)])])
    }
}

struct Server {
    context: Context,
    pd: Pd,
    channel: CompletionChannel,
    cq: Cq,
    peers: HashMap<QpId, Peer>,
    served: u32,
}

fn serve(address: std::net::SocketAddr, clients: u32) -> Result<(), Box<dyn Error>> {
    let context = Context::open()?;
    let channel = context.create_completion_channel()?;
    let cq = context.create_cq(1024, Some(&channel))?;
    let pd = context.open_pd(None)?;
    let listener = context.listen(address, 64)?;
    println!("listening on {}", listener.local_addr());
    let mut server = Server { context, pd, channel, cq, peers: HashMap::new(), served: 0 };
    server.cq.arm(Arm::Next)?;
    while server.served < clients {
        let completions = server.channel.as_fd();
        let events = server.context.as_fd();
        let mut descriptors = [completions, events].map(|fd| {
            // Both descriptors are polled for reading only.
            PollFd::from_borrowed_fd(fd, PollFlags::IN)
        });
        match poll(&mut descriptors, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        // Checking both costs little, and neither call waits.
        server.take_events()?;
        server.take_completions()?;
    }
    println!("served {clients}");
    Ok(())
}

impl Server {
    fn take_events(&mut self) -> Result<(), Box<dyn Error>> {
        while let Some(event) = self.context.next_event(Some(Duration::ZERO))? {
            match self.context.connection_request(event) {
                Ok(request) => self.welcome(request)?,
                Err(Event::PeerClosed { qp, .. }) => {
                    if let Some(peer) = self.peers.get(&qp) {
                        // Refused if the connection has ended. The event of its end follows.
                        match peer.qp.disconnect() {
                            Ok(()) | Err(rnic_client::Error::Refused { .. }) => {}
                            Err(e) => return Err(e.into()),
                        }
                    }
                }
                Err(Event::Disconnected { qp, reason, .. }) => {
                    println!("connection {qp} ended: {reason:?}");
                    self.peers.remove(&qp);
                    self.served += 1;
                }
                // Nothing to do: the peer's messages arrive as completions.
                Err(Event::Established { .. }) => {}
                Err(other) => println!("{other:?}"),
            }
        }
        Ok(())
    }

    fn welcome(&mut self, request: ConnectionRequest) -> Result<(), Box<dyn Error>> {
        let qp = self.pd.create_qp(&QpOptions::new(&self.cq))?;
        let buffer = self.context.create_shared_buffer(LONGEST.into())?;
        let inbox = self.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
        let peer = Peer { qp, inbox };
        // Must come before the accept, because the peer may send at once.
        peer.post_recv()?;
        request.start_accept(&peer.qp, &AcceptOptions::default())?;
        self.peers.insert(peer.qp.id(), peer);
        Ok(())
    }

    fn take_completions(&mut self) -> Result<(), Box<dyn Error>> {
        // Read the events first, then arm, then poll: a later completion then causes a new event.
        while self.channel.recv(Some(Duration::ZERO))?.is_some() {}
        self.cq.arm(Arm::Next)?;
        let mut some = [Completion::default(); 16];
        loop {
            let n = self.cq.poll(&mut some)?;
            if n == 0 {
                return Ok(());
            }
            for completion in &some[..n] {
                self.answer(completion)?;
            }
        }
    }

    fn answer(&mut self, completion: &Completion) -> Result<(), Box<dyn Error>> {
        let Some(peer) = self.peers.get(&completion.qp) else { return Ok(()) };
        match completion.status {
            CompletionStatus::Success if completion.opcode == CompletionOpcode::Receive => {
                let mut message = vec![0; completion.byte_len as usize];
                peer.inbox.read_at(0, &mut message)?;
                peer.post_recv()?;
                peer.qp.post_send(&[SendRequest::send_inline(0, &message).signaled()])?;
            }
            // A completed Send, or a receive flushed when the peer disconnected.
            CompletionStatus::Success | CompletionStatus::WrFlush => {}
            status => println!("{:?} failed: {status:?}", completion.opcode),
        }
        Ok(())
    }
}

/// The client, which may block because it has nothing else to do.
fn visit(address: std::net::SocketAddr) -> Result<(), Box<dyn Error>> {
    let context = Context::open()?;
    let pd = context.open_pd(None)?;
    let cq = context.create_cq(16, None)?;
    let qp = pd.create_qp(&QpOptions::new(&cq))?;
    let buffer = context.create_shared_buffer(LONGEST.into())?;
    let inbox = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE)?;
    qp.connect(address, &ConnectOptions::default())?;
    for n in 0..MESSAGES {
        let message = format!("message {n} of {}", std::process::id());
        qp.post_recv(&[RecvRequest::new(0, &[inbox.sge(0, LONGEST)])])?;
        qp.post_send(&[SendRequest::send_inline(1, message.as_bytes())])?;
        let mut one = [Completion::default()];
        if cq.wait(&mut one, Some(Duration::from_secs(60)))? == 0 {
            return Err("no reply".into());
        }
        let mut answer = vec![0; one[0].ok()?.byte_len as usize];
        inbox.read_at(0, &mut answer)?;
        if answer != message.as_bytes() {
            return Err(format!("sent {message:?}, but received {answer:?}").into());
        }
    }
    qp.disconnect()?;
    println!("{MESSAGES} messages echoed: {:?}", qp.wait_disconnected(None)?);
    Ok(())
}
