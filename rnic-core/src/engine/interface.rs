//! Interface between an engine and the worker that runs it: options, outputs, and results of calls.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::charge::ChargeLimits;
use super::link::tcp::partial::PartialLimits;
use crate::device::copier::CopyJob;
use crate::device::{Cq, DiagnosisLog, Srq, StagChange};
use rnic_abi::abi::control::Event;
use rnic_abi::types::{CqId, QpId, SessionId, SrqId, Time};

/// Options of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Number of this worker, the index of its page in clients' doorbell pages.
    pub worker: u32,
    /// Time for a Terminate to leave and the peer's FIN to follow it.
    pub terminate_deadline: Duration,
    /// Time for a disconnect to finish posted requests and see the peer's FIN.
    pub close_deadline: Duration,
    /// Time in which an RC or UC QP that moves to Error sends posted requests.
    pub error_deadline: Duration,
    /// Maximum time for one copy by a copier.
    pub copy_deadline: Duration,
    /// Time for which a responder waits for the first FPDU.
    pub first_fpdu_deadline: Duration,
    /// Source of the MULPDU.
    pub mulpdu: MulpduPolicy,
    /// Limits on incomplete FPDUs: memory and time.
    pub partial: PartialLimits,
    /// Limits on bytes that TCP has not accepted.
    pub unsent: ChargeLimits,
    /// Log of diagnoses.
    pub diagnoses: Arc<DiagnosisLog>,
}

/// Source of the MULPDU: the formula of RFC 5044 section 4.5, or the maximum that DDP allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MulpduPolicy {
    /// From the connection's effective MSS.
    Emss,
    /// The maximum, for peers known to accept it; not allowed by RFC 5044.
    Max,
}

/// Actions that the worker carries out for the engine.
pub enum Output {
    /// Put an event on a session's event channel.
    Event {
        /// The client's session.
        session: SessionId,
        /// The event.
        event: Event,
    },
    /// Send one record on the channel of this CQ.
    NotifyCq(Arc<Cq>),
    /// Shut down the sending direction of the QP's socket.
    ShutdownWrite(QpId),
    /// Write these last bytes to the QP's socket if it accepts them at once. `Close` follows.
    FinalFpdu {
        /// The QP, which no longer exists.
        qp: QpId,
        /// An FPDU with a whole message: a Terminate, or the last acknowledgement of an RC QP.
        bytes: Vec<u8>,
    },
    /// Close the QP's socket.
    Close {
        /// QP that owns the socket.
        qp: QpId,
        /// Reset the connection instead of closing it gracefully.
        reset: bool,
    },
    /// The QP is in Error or gone, after [`Engine::move_to_error`](super::Engine::move_to_error).
    InError(QpId),
    /// Read the QP's socket again after [`Engine::receive`](super::Engine::receive) returned
    /// [`Receive::Blocked`].
    ReadAgain(QpId),
    /// Send a datagram to another daemon if the socket accepts it at once. Otherwise it is dropped.
    SendDatagram {
        /// Source address, one of the device's.
        from: IpAddr,
        /// Destination address.
        to: IpAddr,
        /// UDP payload.
        packet: Vec<u8>,
    },
    /// Pass a job to its copier, then call [`Engine::handle_copied`](super::Engine::handle_copied)
    /// with the result, or with an error if there will be no result.
    Copy(CopyJob),
    /// A warning about a client's program for the operator.
    Warning {
        /// The client's session.
        session: SessionId,
        /// A sentence for the log about the program's mistake.
        text: String,
    },
    /// Pass this to the resource manager.
    Notification(Notification),
    /// Pass this to the engines of the daemon's workers.
    Broadcast(Broadcast),
}

/// Requests of an engine to the engines of all workers.
#[derive(Debug)]
pub enum Broadcast {
    /// Send [`ChangeStags`](super::EngineCommand::ChangeStags) to every worker, wait for the copies
    /// that are then pending in the change's [copier](StagChange::copier), settle the change, then
    /// send [`StagsChanged`](super::EngineCommand::StagsChanged) to this worker.
    ChangeStags {
        /// The QP that waits for it.
        qp: QpId,
        /// STags revoked, installed and rebound, the same on every worker.
        change: Box<StagChange>,
    },
    /// Send [`Wake`](super::EngineCommand::Wake) to these workers, which have QPs that wait.
    Freed {
        /// The freed entries, for which no client rings a doorbell.
        freed: Freed,
        /// Bit `n` for worker `n`.
        workers: u64,
    },
}

/// Entries of a queue for which QPs wait.
#[derive(Clone, Debug)]
pub enum Freed {
    /// Free slots of a CQ.
    Slots(Arc<Cq>),
    /// Receives of an SRQ.
    Receives(Arc<Srq>),
}

/// Notifications of an engine for the resource manager.
#[derive(Debug)]
pub enum Notification {
    /// A CQ died: QPs that use it on other workers must go to Error. This engine ends its own.
    CqFailed(CqId),
    /// An SRQ died: QPs that use it on other workers must go to Error. This engine ends its own.
    SrqFailed(SrqId),
    /// A TCP peer addressed memory that it has no access to: an unknown STag or an offset outside
    /// the region. The resource manager limits such guesses.
    StagGuessed {
        /// Session of the QP that received the segment.
        session: SessionId,
        /// The peer's address.
        peer: IpAddr,
        /// Arrival time of the segment, by the engine's clock.
        at: Time,
    },
    /// A client broke the contract: its session must end.
    Misbehaved {
        /// The client's session.
        session: SessionId,
        /// Reason for the end of the session.
        why: String,
    },
    /// The address space that a session attached no longer exists: revoke its regions there and
    /// notify the client. May be sent more than once.
    Detached {
        /// The session that attached the address space.
        session: SessionId,
    },
    /// An RC or UC QP has lost its stream and may get another one.
    Unlinked {
        /// The QP, which is not in Error.
        qp: QpId,
    },
    /// An RC or UC QP has received its first message. Its peer considers the connection
    /// established.
    CommunicationEstablished {
        /// The QP.
        qp: QpId,
    },
    /// A fault rule with an effect outside of the engine has struck. The request waits for
    /// [`EngineCommand::FaultTookEffect`](super::EngineCommand::FaultTookEffect).
    FaultStruck {
        /// Number of the rule.
        fault: u64,
        /// The QP whose request the rule selected.
        qp: QpId,
    },
    /// An event for monitoring.
    Note {
        /// Session concerned.
        session: SessionId,
        /// Kind, for programs: "qp_terminated", "connection_lost".
        kind: &'static str,
        /// Description for operators.
        text: String,
    },
}

/// Work that needs a call by the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Call [`Engine::transmit`](super::Engine::transmit) for this QP.
    Transmit(QpId),
    /// Call [`Engine::receive`](super::Engine::receive) for this QP, which is
    /// [readable](super::Engine::handle_readable).
    Receive(QpId),
    /// The engine has taken the turn itself. Returned only while several users have turns, so that
    /// the worker calls [`Engine::turn_over`](super::Engine::turn_over).
    TurnTaken,
}

/// Result of [`Engine::transmit`](super::Engine::transmit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// Nothing to send.
    Idle,
    /// There may be more to send; the QP is scheduled again.
    More,
    /// TCP accepts no more: call [`Engine::handle_writable`](super::Engine::handle_writable) when
    /// it does.
    Blocked,
}

/// Result of [`Engine::receive`](super::Engine::receive).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Bytes were handled, or must wait for the QP's turn. There may be more.
    Progress,
    /// Fewer bytes were read than there was room for: wait until the socket is readable.
    Emptied,
    /// The socket has nothing to read: wait until it is readable.
    WouldBlock,
    /// No more bytes will arrive, or the QP accepts none.
    Closed,
    /// Nothing was read, and nothing must be read until [`Output::ReadAgain`]. The socket may have
    /// failed already: check it, and watch it for errors, for
    /// [`Engine::handle_socket_error`](super::Engine::handle_socket_error).
    Blocked,
}
