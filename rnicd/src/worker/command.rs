//! Authorised commands from the control thread to a worker.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rnic_abi::shm::doorbell::DoorbellScanner;
use rnic_abi::shm::queue::CopyProducer;
use rnic_abi::types::{CqId, QpId, SessionId, UserId};
use rnic_core::device::Copier;
use rnic_core::engine::{ConnectedEnd, EngineCommand, PeerLimits};
use rnic_core::stream::startup::Negotiated;

use super::Ticket;
use crate::events::{ChannelSender, EventSender};
use crate::socket::Socket;

/// A command, with its ticket if the control thread waits for it.
pub(super) struct TicketedCommand {
    pub(super) ticket: Option<Ticket>,
    pub(super) command: Command,
}

/// A command to a worker, or to its engine.
pub enum Command {
    /// A command that the engine carries out by itself.
    Engine(EngineCommand),
    /// Adds a session. Workers share their time among users.
    Attach {
        /// The session.
        session: SessionId,
        /// Its user.
        user: UserId,
        /// The worker's doorbell page of the session.
        scanner: DoorbellScanner,
        /// The worker's eventfd of the session.
        eventfd: OwnedFd,
        /// The session's event channel.
        events: Arc<EventSender>,
    },
    /// Ends all QPs of a session and removes it (see
    /// [`Workers::detach_session`](super::Workers::detach_session)).
    Detach(SessionId),
    /// Sets the channel for a CQ's events. Must precede the CQ's first QP.
    RegisterCq {
        /// The CQ.
        cq: CqId,
        /// The CQ's session.
        session: SessionId,
        /// The channel.
        channel: Arc<ChannelSender>,
    },
    /// Undoes [`RegisterCq`](Self::RegisterCq).
    UnregisterCq(CqId),
    /// Adds a session's queue of copy jobs.
    AddCopyQueue {
        /// The session's library, which copies.
        copier: Arc<Copier>,
        /// The queue.
        queue: CopyProducer,
    },
    /// Takes over a QP and its TCP connection.
    //= MPA-7.1-5
    AttachTcp {
        /// The QP.
        end: ConnectedEnd,
        /// The connection.
        stream: Socket,
    },
    /// Gives an RC or UC QP a stream to its peer.
    LinkTcp {
        /// The QP.
        qp: QpId,
        /// Result of the start-up negotiation.
        negotiated: Box<Negotiated>,
        /// The peer's limits.
        peer: PeerLimits,
        /// The connection.
        stream: Socket,
    },
    /// Destroys a QP. Once carried out, the worker no longer uses it.
    Destroy(QpId),
    /// Moves a RoCE QP to Error (see [`Workers::move_to_error`](super::Workers::move_to_error)).
    ToError {
        /// The QP.
        qp: QpId,
        /// It may soon have a stream, for which posted requests wait.
        expects_stream: bool,
    },
    /// Reads the socket of a QP, at most four times, and handles the messages.
    ReadAll(QpId),
    /// Adds a UDP socket for datagrams.
    AddDatagramSocket {
        /// The socket.
        socket: UdpSocket,
        /// The address to which it is bound.
        at: SocketAddr,
    },
    /// Closes the socket of an address that the host no longer has.
    RemoveDatagramSocket(SocketAddr),
    /// Sends a datagram packet.
    SendDatagram {
        /// Source address, one of the device's.
        from: IpAddr,
        /// Destination address.
        to: IpAddr,
        /// UDP payload.
        packet: Vec<u8>,
    },
    /// Does nothing. The sender only needs the ticket.
    Answer,
    /// Ends all connections and the thread.
    Stop,
}

impl From<EngineCommand> for Command {
    fn from(command: EngineCommand) -> Self {
        Command::Engine(command)
    }
}

impl Command {
    /// Returns how soon a sleeping worker must run the command, unless its QPs hold data.
    pub(super) fn urgency(&self) -> Urgency {
        use EngineCommand as E;
        match self {
            Command::Answer
            | Command::RegisterCq { .. }
            | Command::Engine(E::InstallStag(_) | E::AddWindow(_) | E::SetOptions(_)) => {
                Urgency::Later
            }
            // A sleeping worker that holds no data uses no STag, so the revocation takes effect at
            // once. The worker wakes up to release its reference to the mapping.
            Command::UnregisterCq(_)
            | Command::Engine(E::RevokeStag(_) | E::RemoveWindow(_) | E::ChangeStags(_)) => {
                Urgency::Wake
            }
            _ => Urgency::Now,
        }
    }

    /// Returns the number of QPs that the worker takes over.
    pub(super) fn qps(&self) -> u32 {
        use EngineCommand as E;
        match self {
            Command::Engine(E::AttachDirect(_)) => 2,
            Command::AttachTcp { .. } | Command::Engine(E::AttachInError(_) | E::AttachRoce(_)) => {
                1
            }
            _ => 0,
        }
    }
}

/// How soon a sleeping worker must run a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// The command counts as done, because the worker runs its commands first when it wakes up.
    Later,
    /// Counts as done, and wakes the worker.
    Wake,
    /// Wakes the worker, which must acknowledge the command.
    Now,
}
