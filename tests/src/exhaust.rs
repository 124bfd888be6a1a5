//! A client that exhausts a resource, keeps all objects, and continues to request more.

use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use clap::ValueEnum;
use rnic_client::{
    AcceptOptions, Access, ConnectOptions, Context, Error, Listener, MrOptions, Qp, QpOptions,
};

use crate::DEADLINE;

/// A resource of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Resource {
    /// Sessions.
    Sessions,
    /// Shared memory.
    Memory,
    /// Memory regions.
    Regions,
    /// Arena memory, by creating large completion queues.
    Arena,
    /// Queue pairs.
    QueuePairs,
    /// Descriptors, by creating completion channels.
    Channels,
    /// Bound addresses.
    Listeners,
    /// Connections between two QPs of the session.
    Connections,
}

/// Creates objects until the daemon refuses one, passes the refusal to `refused`, and keeps trying
/// while `go_on` returns true. Returns the number of objects created.
pub fn exhaust(
    resource: Resource,
    refused: impl FnOnce(&Error),
    go_on: impl Fn() -> bool,
) -> Result<usize, Error> {
    let mut refused = Some(refused);
    let mut hoard: Vec<Box<dyn std::any::Any>> = Vec::new();
    let mut taker = Taker::new()?;
    while refused.is_some() || go_on() {
        match taker.take(resource) {
            Ok(one) => hoard.push(one),
            Err(error) => {
                if let Some(refused) = refused.take() {
                    refused(&error);
                }
            }
        }
    }
    Ok(hoard.len())
}

/// Keeps `count` descriptors in flight, in unread packets, until the returned sockets are closed.
///
/// # Errors
///
/// System errors.
pub fn in_flight(count: usize) -> io::Result<[OwnedFd; 2]> {
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
        SocketType, sendmsg, socketpair,
    };
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let file = File::open("/dev/null")?;
    for sent in (0..count).step_by(PACKET) {
        let descriptors = vec![file.as_fd(); PACKET.min(count - sent)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PACKET))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(io::Error::other("too many descriptors for a packet"));
        }
        sendmsg(&ours, &[IoSlice::new(b"x")], &mut ancillary, SendFlags::DONTWAIT)?;
    }
    Ok([ours, theirs])
}

/// Maximum number of descriptors per packet.
const PACKET: usize = 100;

struct Taker {
    context: Context,
    pd: rnic_client::Pd,
    cq: rnic_client::Cq,
    buffer: rnic_client::SharedBuffer,
    listener: Option<Listener>,
}

impl Taker {
    fn new() -> Result<Self, Error> {
        let context = Context::open()?;
        let pd = context.open_pd(None)?;
        let cq = context.create_cq(16, None)?;
        let buffer = context.create_shared_buffer(4096)?;
        Ok(Taker { context, pd, cq, buffer, listener: None })
    }

    fn take(&mut self, resource: Resource) -> Result<Box<dyn std::any::Any>, Error> {
        Ok(match resource {
            Resource::Sessions => Box::new(Context::open()?),
            Resource::Memory => Box::new(self.context.create_shared_buffer(4 << 20)?),
            Resource::Regions => {
                let options = MrOptions { access: Access::LOCAL_WRITE, ..MrOptions::default() };
                Box::new(self.pd.reg_mr_with(&self.buffer, .., &options)?)
            }
            Resource::Arena => Box::new(self.context.create_cq(4096, None)?),
            Resource::QueuePairs => Box::new(self.qp()?),
            Resource::Channels => Box::new(self.context.create_completion_channel()?),
            Resource::Listeners => Box::new(self.context.bind("127.0.0.1:0")?),
            Resource::Connections => Box::new(self.connect()?),
        })
    }

    fn qp(&self) -> Result<Qp, Error> {
        self.pd.create_qp(&QpOptions::new(&self.cq))
    }

    /// Connects two QPs of this session.
    fn connect(&mut self) -> Result<[Qp; 2], Error> {
        let listener = match &mut self.listener {
            Some(listener) => listener,
            none => none.insert(self.context.listen("127.0.0.1:0", 16)?),
        };
        let address = listener.local_addr();
        let active = self.qp()?;
        let passive = self.qp()?;
        let options = ConnectOptions { ird: Some(1), ord: Some(1), ..ConnectOptions::default() };
        active.start_connect(address, &options)?;
        let request = self.listener.as_ref().map(|l| l.accept_request(Some(DEADLINE)));
        if let Some(request) = request.transpose()? {
            let options = AcceptOptions { ird: Some(1), ord: Some(1), ..AcceptOptions::default() };
            request.start_accept(&passive, &options)?;
            active.wait_connected(Some(DEADLINE))?;
        }
        Ok([active, passive])
    }
}
