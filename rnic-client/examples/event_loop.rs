//! One thread, many connections, no call that waits but `poll(2)`: an echo server as an event loop.
//!
//!     event_loop serve 127.0.0.1:0 3        serves three visitors, then ends
//!     event_loop visit 127.0.0.1:PORT       sends lines and expects them back
//!
//! Two descriptors say everything: that of the completion channel, on which all completions of all
//! connections are announced, and that of the context, on which peers come and go.

use std::collections::HashMap;
use std::error::Error;
use std::os::fd::AsFd;
use std::time::Duration;

use rnic_client::*;
use rustix::event::{PollFd, PollFlags, poll};

/// Bytes of the longest message.
const LONGEST: u32 = 64;
/// Messages of one visit.
const MESSAGES: u32 = 100;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address, visitors] => serve(address.parse()?, visitors.parse()?),
        ["visit", address] => visit(address.parse()?),
        _ => Err("usage: event_loop serve ADDRESS VISITORS | visit ADDRESS".into()),
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

fn serve(address: std::net::SocketAddr, visitors: u32) -> Result<(), Box<dyn Error>> {
    let context = Context::open()?;
    let channel = context.create_completion_channel()?;
    let cq = context.create_cq(1024, Some(&channel))?;
    let pd = context.open_pd(None)?;
    let listener = context.listen(address, 64)?;
    println!("listening on {}", listener.local_addr());
    let mut server = Server { context, pd, channel, cq, peers: HashMap::new(), served: 0 };
    server.cq.arm(Arm::Next)?;
    while server.served < visitors {
        let (completions, events) = (server.channel.as_fd(), server.context.as_fd());
        let mut descriptors = [completions, events].map(|fd| {
            // Readable is all there is to be.
            PollFd::from_borrowed_fd(fd, PollFlags::IN)
        });
        match poll(&mut descriptors, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        // Looking at both costs little, and neither waits.
        server.take_events()?;
        server.take_completions()?;
    }
    println!("served {visitors}");
    Ok(())
}

impl Server {
    fn take_events(&mut self) -> Result<(), Box<dyn Error>> {
        while let Some(event) = self.context.next_event(Some(Duration::ZERO))? {
            match self.context.connection_request(event) {
                Ok(request) => self.welcome(request)?,
                Err(Event::PeerClosed { qp, .. }) => {
                    if let Some(peer) = self.peers.get(&qp) {
                        // Refused if it has ended meanwhile: then that is what comes next.
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
                // It stands now: what the peer sends shows by its completion.
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
        // Before the peer can send.
        peer.post_recv()?;
        request.start_accept(&peer.qp, &AcceptOptions::default())?;
        self.peers.insert(peer.qp.id(), peer);
        Ok(())
    }

    fn take_completions(&mut self) -> Result<(), Box<dyn Error>> {
        // Events first, then the arm, then completions: whatever comes later has an event again.
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
            // The receive that was left when the peer went.
            CompletionStatus::Success | CompletionStatus::WrFlush => {}
            status => println!("{:?} failed: {status:?}", completion.opcode),
        }
        Ok(())
    }
}

/// The other end, which has nothing else to do and so may wait.
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
            return Err("no answer".into());
        }
        let mut answer = vec![0; one[0].ok()?.byte_len as usize];
        inbox.read_at(0, &mut answer)?;
        if answer != message.as_bytes() {
            return Err(format!("{message:?} came back as {answer:?}").into());
        }
    }
    qp.disconnect()?;
    println!("{MESSAGES} messages there and back: {:?}", qp.wait_disconnected(None)?);
    Ok(())
}
