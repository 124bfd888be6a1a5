//! What the control thread tells a worker. Everything here has been authorised.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rnic_core::abi::control::{DisconnectMode, QpChange};
use rnic_core::device::{Copier, Cq, Srq, StagChange, StagEntry, Window};
use rnic_core::engine::{DatagramPort, DatagramRules, EngineOptions, PeerLimits, QpConfig};
use rnic_core::shm::doorbell::DoorbellScanner;
use rnic_core::shm::queue::CopyProducer;
use rnic_core::stream::startup::Negotiated;
use rnic_core::types::{AddressPair, CqId, QpId, SessionId, Stag, UserId};

use super::Ticket;
use crate::events::{ChannelSender, EventSender};
use crate::socket::Socket;

/// One end of a connection about to be bound.
pub struct ConnectedEnd {
    /// The QP at this end.
    pub config: Box<QpConfig>,
    /// What start-up agreed on.
    pub negotiated: Negotiated,
    /// Addresses as this end sees them.
    pub addresses: AddressPair,
}

/// A command with the ticket it answers, if somebody waits.
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
    /// A QP of some worker wants this of all.
    ChangeStags(StagChange),
    /// Every worker has carried out the change that this QP asked for.
    StagsChanged(QpId),
    /// Adds a session's queue of copy jobs.
    AddCopyQueue {
        copier: Arc<Copier>,
        queue: CopyProducer,
    },
    /// Another worker has freed slots of this CQ, for which QPs of this one wait.
    SpaceFreed(Arc<Cq>),
    /// QPs of this worker that wait for a receive of this SRQ may get one.
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
    /// A QP that is wired by hand.
    AttachWired(Box<QpConfig>),
    /// A socket of UDP by which datagrams go.
    AddDatagramSocket {
        socket: UdpSocket,
        at: SocketAddr,
    },
    /// The host no longer has this address.
    RemoveDatagramSocket {
        at: SocketAddr,
    },
    /// The table of the device's GIDs has changed.
    DatagramPort {
        qp: QpId,
        port: Arc<DatagramPort>,
    },
    /// A packet leaves from one address for another.
    SendDatagram {
        from: IpAddr,
        to: IpAddr,
        packet: Vec<u8>,
    },
    /// The administrator has changed the rules that it keeps to.
    DatagramRules {
        qp: QpId,
        rules: Box<dyn DatagramRules>,
    },
    /// Two of them, wired to each other.
    LinkDirect([(QpId, PeerLimits); 2]),
    /// One of them gets a stream.
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
    /// Why it has no stream.
    UnlinkedBecause {
        qp: QpId,
        why: String,
    },
    /// The stream of a QP that is wired by hand ends, and it stays.
    Unlink {
        qp: QpId,
        why: String,
    },
    Disconnect {
        qp: QpId,
        mode: DisconnectMode,
    },
    ToError(QpId),
    /// Ends the connection as destruction would, but keeps the QP.
    AdminDisconnect(QpId),
    SetOptions(EngineOptions),
    Destroy(QpId),
    /// Nothing but the answer is of interest.
    Answer,
    Stop,
}

impl Command {
    /// How a worker that sleeps takes it.
    pub(super) fn urgency(&self) -> Urgency {
        match self {
            Command::Answer
            | Command::InstallStag(_)
            | Command::AddWindow(_)
            | Command::RegisterCq { .. }
            | Command::SetOptions(_) => Urgency::Later,
            // A sleeping worker uses no STag, so the revocation holds; its share of the mapping is
            // to go all the same.
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
            | Command::AttachWired(_)
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

/// How a worker that sleeps takes a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// It is as good as done: the worker looks at its commands before anything else.
    Later,
    /// As good as done, and the worker is woken.
    Wake,
    /// Only the worker can do it: it is woken.
    Now,
}
