//! What passes between an engine and the worker that runs it: what it is told once, what it wants done,
//! and what came of a call.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::MulpduPolicy;
use super::charge::HoldLimits;
use super::partial::PartialLimits;
use crate::abi::control::Event;
use crate::device::mover::MoveJob;
use crate::device::{Cq, Srq, StagChange, WhyLog};
use crate::types::{CqId, QpId, SessionId, SrqId, Time};

/// What an engine is told once.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Number of this worker, which clients' doorbell pages are counted by.
    pub worker: u32,
    /// How long a Terminate may take to leave and the peer's FIN to follow it.
    pub drain_deadline: Duration,
    /// How long a disconnect may take to finish what was posted and see the peer's FIN.
    pub close_deadline: Duration,
    /// How long a mover may take for a copy.
    pub mover_deadline: Duration,
    /// How long a responder waits for the first FPDU.
    pub first_fpdu_deadline: Duration,
    /// Where MULPDU comes from.
    pub mulpdu: MulpduPolicy,
    /// What incomplete FPDUs may cost, and how long they may take.
    pub partial: PartialLimits,
    /// What bytes may cost that TCP does not take.
    pub unsent: HoldLimits,
    /// Where reasons of failures go.
    pub why: Arc<WhyLog>,
}

/// What the worker carries out for the engine.
pub enum Output {
    /// Tell a client.
    Event {
        /// Whom.
        session: SessionId,
        /// What.
        event: Event,
    },
    /// Send one record on the channel of this CQ.
    Notify(Arc<Cq>),
    /// Shut down the sending direction of the QP's socket.
    ShutdownWrite(QpId),
    /// Hand these last bytes to the QP's socket if it takes them at once; `Close` follows.
    Farewell {
        /// Whose.
        qp: QpId,
        /// A whole Terminate.
        bytes: Vec<u8>,
    },
    /// Close the QP's socket.
    Close {
        /// Whose.
        qp: QpId,
        /// Reset the connection instead of closing it in order.
        reset: bool,
    },
    /// Have every worker carry out a change of its STag table by [`Engine::change_stags`](super::Engine::change_stags), wait for
    /// the jobs that its [mover](StagChange::mover) has by then, settle the change, then call
    /// [`Engine::stags_changed`](super::Engine::stags_changed).
    ChangeStags {
        /// The QP that waits for it.
        qp: QpId,
        /// The change.
        change: Box<StagChange>,
    },
    /// A CQ died: every QP that uses it on another worker must go to Error; this engine's have.
    CqFailed(CqId),
    /// Slots of a CQ have become free, by no doing of its client: call [`Engine::space_freed`](super::Engine::space_freed) on
    /// these workers (bit `n` for worker `n`), which have QPs that wait for one.
    SpaceFreed {
        /// The CQ.
        cq: Arc<Cq>,
        /// The workers.
        workers: u64,
    },
    /// A shared receive queue died: every QP that uses it on another worker must go to Error; this
    /// engine's have.
    SrqFailed(SrqId),
    /// QPs that wait for a receive of a shared queue may get one, by no doing of its client: call
    /// [`Engine::receives_posted`](super::Engine::receives_posted) on these workers (bit `n` for worker `n`).
    ReceivesFreed {
        /// The queue.
        srq: Arc<Srq>,
        /// The workers.
        workers: u64,
    },
    /// Read the QP's socket again: [`Engine::receive`](super::Engine::receive) had said [`Receive::Paused`].
    ReadAgain(QpId),
    /// Something the operator should know about a client's program.
    Warning {
        /// Whose.
        session: SessionId,
        /// What.
        text: String,
    },
    /// A peer named memory that it does not have, over TCP, be it an STag that is none of its or an
    /// offset outside of the region: such guesses are to be limited.
    StagGuessed {
        /// Whose QP it was.
        session: SessionId,
        /// The peer's address.
        peer: IpAddr,
        /// When.
        at: Time,
    },
    /// A client broke the contract: its session must end.
    Misbehaved {
        /// Whose.
        session: SessionId,
        /// How.
        why: String,
    },
    /// Something that whoever watches the daemon may want to know.
    Note {
        /// Whose doing or loss it is.
        session: SessionId,
        /// What kind, for programs: "qp_terminated", "connection_lost".
        kind: &'static str,
        /// A sentence for people.
        text: String,
    },
    /// Hand a copy to its mover, then call [`Engine::moved`](super::Engine::moved) with the answer, or when there will be
    /// none.
    Move(MoveJob),
    /// A session's attached address space is gone: its regions there must be revoked and the client
    /// told. May come more than once.
    Detached {
        /// Whose.
        session: SessionId,
    },
}

/// Work that needs the worker's hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Call [`Engine::transmit`](super::Engine::transmit) for this QP.
    Transmit(QpId),
    /// Call [`Engine::receive`](super::Engine::receive) for this QP, which is [readable](super::Engine::readable).
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
    /// TCP takes no more: call [`Engine::writable`](super::Engine::writable) when it does.
    Blocked,
}

/// What came of [`Engine::receive`](super::Engine::receive).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Bytes were handled, or had to wait for the QP's turn; there may be more.
    Progress,
    /// Nothing is there.
    WouldBlock,
    /// Nothing more will come, or nothing more is wanted.
    Closed,
    /// Nothing was read and nothing is to be until [`Output::ReadAgain`]. The socket may have failed
    /// already: look, and watch it for errors, for [`Engine::socket_failed`](super::Engine::socket_failed).
    Paused,
}
