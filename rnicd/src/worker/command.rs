//! Commands of the control thread to a worker, all authorised.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rnic_abi::abi::control::{DisconnectMode, QpChange};
use rnic_abi::shm::doorbell::DoorbellScanner;
use rnic_abi::shm::queue::CopyProducer;
use rnic_abi::types::{CqId, QpId, SessionId, Stag, UserId};
use rnic_core::device::{Copier, Cq, Srq, StagChange, StagEntry, Window};
use rnic_core::engine::{
    ConnectedEnd, DatagramPort, DatagramRules, EngineOptions, PeerLimits, QpConfig,
};
use rnic_core::stream::startup::Negotiated;

use super::Ticket;
use crate::events::{ChannelSender, EventSender};
use crate::socket::Socket;

/// A command, with its ticket if the control thread waits for it.
pub(super) struct TicketedCommand {
    pub(super) ticket: Option<Ticket>,
    pub(super) command: Command,
}

pub(super) enum Command {
    Attach {
        session: SessionId,
        user: UserId,
        scanner: DoorbellScanner,
        eventfd: OwnedFd,
        events: Arc<EventSender>,
    },
    Detach(SessionId),
    RegisterCq {
        cq: CqId,
        session: SessionId,
        channel: Arc<ChannelSender>,
    },
    UnregisterCq(CqId),
    InstallStag(StagEntry),
    RevokeStag(Stag),
    AddWindow(Arc<Window>),
    RemoveWindow(Arc<Window>),
    /// Changes STags on all workers, for a QP of one of them.
    ChangeStags(StagChange),
    /// Every worker has carried out the change that this QP requested.
    StagsChanged(QpId),
    /// Adds a session's queue of copy jobs.
    AddCopyQueue {
        copier: Arc<Copier>,
        queue: CopyProducer,
    },
    /// Slots are free again in a CQ for which QPs of this worker wait.
    SpaceFreed(Arc<Cq>),
    /// The SRQ may have a receive for QPs of this worker that wait for one.
    ReceivesPosted(Arc<Srq>),
    AttachTcp {
        end: ConnectedEnd,
        stream: Socket,
    },
    AttachDirect {
        active: ConnectedEnd,
        passive: ConnectedEnd,
    },
    AttachInError(Box<QpConfig>),
    /// An RC, UC or UD QP.
    AttachRoce(Box<QpConfig>),
    /// Adds a UDP socket for datagrams.
    AddDatagramSocket {
        socket: UdpSocket,
        at: SocketAddr,
    },
    /// Removes the socket of an address that the host no longer has.
    RemoveDatagramSocket {
        at: SocketAddr,
    },
    /// Updates a UD QP after a change of the device's GID table.
    DatagramPort {
        qp: QpId,
        port: Arc<DatagramPort>,
    },
    /// Sends a packet from one of the device's addresses.
    SendDatagram {
        from: IpAddr,
        to: IpAddr,
        packet: Vec<u8>,
    },
    /// Replaces a UD QP's rules, which the administrator has changed.
    DatagramRules {
        qp: QpId,
        rules: Box<dyn DatagramRules>,
    },
    /// Links two RC or UC QPs of this worker.
    LinkDirect([(QpId, PeerLimits); 2]),
    /// Gives an RC or UC QP its stream.
    LinkTcp {
        qp: QpId,
        negotiated: Box<Negotiated>,
        peer: PeerLimits,
        stream: Socket,
    },
    Change {
        qp: QpId,
        change: QpChange,
    },
    /// Sets the reason why an RC or UC QP has no stream.
    UnlinkedBecause {
        qp: QpId,
        why: String,
    },
    /// Ends the stream of an RC or UC QP, which stays.
    Unlink {
        qp: QpId,
        why: String,
    },
    Disconnect {
        qp: QpId,
        mode: DisconnectMode,
    },
    ToError(QpId),
    /// Ends the connection like [`Command::Destroy`], but keeps the QP.
    AdminDisconnect(QpId),
    SetOptions(EngineOptions),
    Destroy(QpId),
    /// Does nothing. The sender only needs the ticket.
    Answer,
    Stop,
}

impl Command {
    /// Returns how soon a sleeping worker must run the command.
    pub(super) fn urgency(&self) -> Urgency {
        match self {
            Command::Answer
            | Command::InstallStag(_)
            | Command::AddWindow(_)
            | Command::RegisterCq { .. }
            | Command::SetOptions(_) => Urgency::Later,
            // A sleeping worker uses no STag, so the revocation takes effect at once. The worker
            // wakes up to release its reference to the mapping.
            Command::RevokeStag(_)
            | Command::RemoveWindow(_)
            | Command::ChangeStags(_)
            | Command::UnregisterCq(_) => Urgency::Wake,
            Command::Attach { .. }
            | Command::AddCopyQueue { .. }
            | Command::Detach(_)
            | Command::AttachTcp { .. }
            | Command::AttachDirect { .. }
            | Command::AttachInError(_)
            | Command::AttachRoce(_)
            | Command::AddDatagramSocket { .. }
            | Command::RemoveDatagramSocket { .. }
            | Command::DatagramPort { .. }
            | Command::SendDatagram { .. }
            | Command::DatagramRules { .. }
            | Command::LinkDirect(_)
            | Command::LinkTcp { .. }
            | Command::Change { .. }
            | Command::UnlinkedBecause { .. }
            | Command::Unlink { .. }
            | Command::Disconnect { .. }
            | Command::ToError(_)
            | Command::StagsChanged(_)
            | Command::AdminDisconnect(_)
            | Command::SpaceFreed(_)
            | Command::ReceivesPosted(_)
            | Command::Destroy(_)
            | Command::Stop => Urgency::Now,
        }
    }
}

/// How soon a sleeping worker must run a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// Counts as done: the worker runs its commands before anything else when it wakes up.
    Later,
    /// Counts as done, and wakes the worker.
    Wake,
    /// Wakes the worker, which must acknowledge the command.
    Now,
}
