//! What passes between an engine and the worker that runs it: what it is told once, what it wants
//! done, and what came of a call.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::charge::ChargeLimits;
use super::link::tcp::partial::PartialLimits;
use crate::abi::control::Event;
use crate::device::copier::CopyJob;
use crate::device::{Cq, DiagnosisLog, Srq, StagChange};
use crate::types::{CqId, QpId, SessionId, SrqId, Time};

/// What an engine is told once.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Number of this worker, which clients' doorbell pages are counted by.
    pub worker: u32,
    /// How long a Terminate may take to leave and the peer's FIN to follow it.
    pub terminate_deadline: Duration,
    /// How long a disconnect may take to finish what was posted and see the peer's FIN.
    pub close_deadline: Duration,
    /// How long a copier may take for a copy.
    pub copy_deadline: Duration,
    /// How long a responder waits for the first FPDU.
    pub first_fpdu_deadline: Duration,
    /// Where MULPDU comes from.
    pub mulpdu: MulpduPolicy,
    /// What incomplete FPDUs may cost, and how long they may take.
    pub partial: PartialLimits,
    /// What bytes may cost that TCP does not take.
    pub unsent: ChargeLimits,
    /// Where reasons of failures go.
    pub diagnoses: Arc<DiagnosisLog>,
}

/// Why MULPDU is what it is: the formula of RFC 5044 section 4.5, or all that DDP allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MulpduPolicy {
    /// From the connection's effective MSS.
    Emss,
    /// The largest, for peers known to cope; outside the RFC.
    Max,
}

/// What the worker carries out for the engine.
pub enum Output {
    /// Put an event on a session's event channel.
    Event {
        /// The client's session.
        session: SessionId,
        /// What it is told.
        event: Event,
    },
    /// Send one record on the channel of this CQ.
    NotifyCq(Arc<Cq>),
    /// Shut down the sending direction of the QP's socket.
    ShutdownWrite(QpId),
    /// Hand these last bytes to the QP's socket if it takes them at once; `Close` follows.
    FinalTerminate {
        /// The QP, which is gone.
        qp: QpId,
        /// An FPDU: a whole Terminate.
        bytes: Vec<u8>,
    },
    /// Close the QP's socket.
    Close {
        /// The QP whose socket it is.
        qp: QpId,
        /// Reset the connection instead of closing it in order.
        reset: bool,
    },
    /// Read the QP's socket again: [`Engine::receive`](super::Engine::receive) had said
    /// [`Receive::Blocked`].
    ReadAgain(QpId),
    /// Send a datagram to another daemon, if its socket takes it at once; else it is lost.
    SendDatagram {
        /// The address that it is sent from, one of the device's.
        from: IpAddr,
        /// The address that it goes to.
        to: IpAddr,
        /// The payload of a packet of UDP.
        packet: Vec<u8>,
    },
    /// Hand a copy to its copier, then call [`Engine::handle_copied`](super::Engine::handle_copied)
    /// with the answer, or when there will be none.
    Copy(CopyJob),
    /// Something the operator should know about a client's program.
    Warning {
        /// The client's session.
        session: SessionId,
        /// What the client's program did, as a sentence for the log.
        text: String,
    },
    /// Tell the resource manager.
    Notification(Notification),
}

/// What an engine has the resource manager know or do.
#[derive(Debug)]
pub enum Notification {
    /// Have every worker carry out a change of its STag table by
    /// [`Engine::change_stags`](super::Engine::change_stags), wait for the copies that its
    /// [copier](StagChange::copier) has by then, settle the change, then call
    /// [`Engine::handle_stags_changed`](super::Engine::handle_stags_changed).
    ChangeStags {
        /// The QP that waits for it.
        qp: QpId,
        /// What is revoked, installed and rebound, on every worker alike.
        change: Box<StagChange>,
    },
    /// A CQ died: every QP that uses it on another worker must go to Error; this engine's have.
    CqFailed(CqId),
    /// A shared receive queue died: every QP that uses it on another worker must go to Error; this
    /// engine's have.
    SrqFailed(SrqId),
    /// Slots of a CQ have become free, by no doing of its client: call
    /// [`Engine::handle_cq_space`](super::Engine::handle_cq_space) on these workers, which have QPs
    /// that wait for one.
    CqSpaceFreed {
        /// The CQ that has free slots again.
        cq: Arc<Cq>,
        /// Bit `n` for worker `n`.
        workers: u64,
    },
    /// QPs that wait for a receive of a shared queue may get one, by no doing of its client: call
    /// [`Engine::handle_receives_posted`](super::Engine::handle_receives_posted) on these workers.
    ReceivesFreed {
        /// The shared receive queue that QPs wait on.
        srq: Arc<Srq>,
        /// Bit `n` for worker `n`.
        workers: u64,
    },
    /// A peer named memory that it does not have, over TCP, be it an STag that is none of its or an
    /// offset outside of the region: such guesses are to be limited.
    StagGuessed {
        /// The session whose QP was tried.
        session: SessionId,
        /// The peer's address.
        peer: IpAddr,
        /// Time at which the segment came, of the engine's clock.
        at: Time,
    },
    /// A client broke the contract: its session must end.
    Misbehaved {
        /// The client's session.
        session: SessionId,
        /// What it did, in words: the reason that the session's end is given.
        why: String,
    },
    /// A session's attached address space is gone: its regions there must be revoked and the client
    /// told. May come more than once.
    Detached {
        /// The session that attached the address space.
        session: SessionId,
    },
    /// A QP that is wired by hand has no stream any more, and may get another one.
    Unlinked {
        /// The QP, in Rtr, Rts or Sqd.
        qp: QpId,
    },
    /// Something that whoever watches the daemon may want to know.
    Note {
        /// The session whose doing or loss it is.
        session: SessionId,
        /// What kind, for programs: "qp_terminated", "connection_lost".
        kind: &'static str,
        /// A sentence for people.
        text: String,
    },
}

/// Work that needs the worker's hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Call [`Engine::transmit`](super::Engine::transmit) for this QP.
    Transmit(QpId),
    /// Call [`Engine::receive`](super::Engine::receive) for this QP, which is
    /// [readable](super::Engine::handle_readable).
    Receive(QpId),
    /// None: the engine has taken the turn. It says so while several users have turns, for
    /// [`Engine::turn_over`](super::Engine::turn_over).
    TurnTaken,
}

/// What came of [`Engine::transmit`](super::Engine::transmit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// Nothing was to be sent.
    Idle,
    /// Bytes were accepted; the QP is scheduled again if it has more.
    More,
    /// TCP takes no more: call [`Engine::handle_writable`](super::Engine::handle_writable) when it
    /// does.
    Blocked,
}

/// What came of [`Engine::receive`](super::Engine::receive).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Bytes were handled, or had to wait for the QP's turn; there may be more.
    Progress,
    /// Bytes were handled, fewer than there was room for: wait until the socket is readable.
    Emptied,
    /// The socket has nothing to read: wait until it is readable.
    WouldBlock,
    /// Nothing more will come, or nothing more is wanted.
    Closed,
    /// Nothing was read and nothing is to be until [`Output::ReadAgain`]. The socket may have
    /// failed already: look, and watch it for errors, for
    /// [`Engine::handle_socket_error`](super::Engine::handle_socket_error).
    Blocked,
}
