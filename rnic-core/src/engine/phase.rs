//! The phases of a stream.
//!
//! ```text
//!  AwaitFirstFpdu --FirstFpdu--> Open --PeerFin--> HalfClosed
//!                                 |                    |
//!                                 +----Disconnect------+--> Closing --Drained--> FinSent
//!
//!  any but Terminating, Draining, Ended:
//!      --Fault, and the peer can be told--> Terminating --TerminateWritten--> Draining
//!      --PeerTerminate, over TCP--> Draining
//!      --Fault or PeerTerminate otherwise, Abort--> Ended
//!
//!  to Ended also: AwaitFirstFpdu by Disconnect, PeerFin or Deadline; Closing by Drained behind the
//!  peer's FIN, or by Deadline; FinSent, Draining by PeerFin or Deadline; Terminating by
//!  TerminateWritten behind the peer's FIN, or by Deadline; any by Lost
//! ```
//!
//! A queue pair that is wired by hand begins in Unlinked, and comes back to it from AwaitFirstFpdu
//! and Open where others would be lost, half closed or, by a Terminate that blames no request of
//! its own, draining ([`Qp::unlink`](super::qp::Qp::unlink)). An RC QP that owes responses to
//! earlier requests goes from Open to Refusing when it refuses a request, and leaves it like Open,
//! except by PeerFin and Deadline, which put the refusal into effect
//! ([`Qp::put_refusal_into_effect`](super::qp::Qp::put_refusal_into_effect)).
//!
//! RFC 5040 section 6.2 and RFC 5044 section 7.1 have the rules behind it. Applications see the
//! states of verbs ([`StreamPhase::state`]).

use crate::types::QpState;

/// Where a stream is. What may be sent and what becomes of arriving bytes follows from it alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamPhase {
    /// Responder before its first valid FPDU: receives, sends nothing (RFC 5044 section 7.1.2).
    AwaitFirstFpdu,
    /// Both directions run.
    Open,
    /// RC QP that has refused a request of its peer: sends the responses to earlier requests, then
    /// the Terminate. Takes in nothing but responses and begins no request.
    Refusing,
    /// The peer has finished; this side may go on sending.
    HalfClosed,
    /// The application disconnects: what was posted before is finished, then FIN.
    Closing,
    /// FIN sent after everything else; the peer's is awaited.
    FinSent,
    /// A Terminate is to be sent; nothing is received any more.
    Terminating,
    /// Everything sent; the peer's FIN is awaited and its bytes are dropped, so that closing does
    /// not reset the connection under our Terminate.
    Draining,
    /// Of a queue pair that is wired by hand: no stream, none yet or none any more; one may come.
    Unlinked,
    /// No stream: none yet, or none any more.
    Ended,
}

/// What happens to a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEvent {
    /// The first FPDU came and is valid.
    FirstFpdu,
    /// The application disconnects in order.
    Disconnect,
    /// The application disconnects at once.
    Abort,
    /// Everything posted before the disconnect is done and sent.
    Drained {
        /// The peer's FIN has been seen.
        peer_fin: bool,
    },
    /// An RC QP refuses a request and owes responses to earlier ones.
    Refusal,
    /// A fault of this side or the peer's.
    Fault {
        /// A Terminate can still be sent over the connection.
        can_send_terminate: bool,
    },
    /// TCP has taken our Terminate.
    TerminateWritten {
        /// The peer's FIN has been seen.
        peer_fin: bool,
    },
    /// The peer's Terminate came.
    PeerTerminate {
        /// Over a connection that is to be closed in order.
        over_tcp: bool,
    },
    /// The peer's FIN came, between two FPDUs.
    PeerFin,
    /// The connection is gone.
    Lost,
    /// The phase has lasted as long as it may.
    Deadline,
}

impl StreamPhase {
    /// The phase after an event; `None` where the event changes nothing.
    pub(super) fn after(self, event: StreamEvent) -> Option<StreamPhase> {
        use StreamEvent as E;
        use StreamPhase::{
            AwaitFirstFpdu, Closing, Draining, Ended, FinSent, HalfClosed, Open, Refusing,
            Terminating, Unlinked,
        };
        match (self, event) {
            (AwaitFirstFpdu, E::FirstFpdu) => Some(Open),
            (_, E::FirstFpdu) => None,

            // Nothing may be sent yet, so nothing can be finished in order.
            (AwaitFirstFpdu, E::Disconnect) => Some(Ended),
            //= RDMAP-6.2-1
            (Open | HalfClosed, E::Disconnect) => Some(Closing),
            (
                Refusing | Closing | FinSent | Terminating | Draining | Unlinked | Ended,
                E::Disconnect,
            ) => None,

            (
                AwaitFirstFpdu | Open | Refusing | HalfClosed | Closing | FinSent | Unlinked,
                E::Abort,
            ) => Some(Ended),
            (Terminating | Draining | Ended, E::Abort) => None,

            //= DDP-6.2.1-1
            (Closing, E::Drained { peer_fin: false }) => Some(FinSent),
            (Closing, E::Drained { peer_fin: true }) => Some(Ended),
            (_, E::Drained { .. }) => None,

            (Open, E::Refusal) => Some(Refusing),
            (_, E::Refusal) => None,

            // The first fault wins. Before its first valid FPDU a responder may send nothing, not
            // even a Terminate (RFC 5044 section 7.1.2).
            //= MPA-7.1.2-4
            (AwaitFirstFpdu | Unlinked, E::Fault { .. }) => Some(Ended),
            (
                //= DDP-6.2.2-4
                Open | Refusing | HalfClosed | Closing | FinSent,
                E::Fault { can_send_terminate: true },
            ) => Some(Terminating),
            (
                Open | Refusing | HalfClosed | Closing | FinSent,
                E::Fault { can_send_terminate: false },
            ) => Some(Ended),
            //= RDMAP-7.1-5
            (Terminating | Draining | Ended, E::Fault { .. }) => None,

            (Terminating, E::TerminateWritten { peer_fin: false }) => Some(Draining),
            (Terminating, E::TerminateWritten { peer_fin: true }) => Some(Ended),
            (_, E::TerminateWritten { .. }) => None,

            // It is reported, never answered (RFC 5040 section 7.1).
            (
                AwaitFirstFpdu | Open | Refusing | HalfClosed | Closing | FinSent,
                E::PeerTerminate { over_tcp },
            ) => Some(if over_tcp { Draining } else { Ended }),
            (Terminating | Draining | Unlinked | Ended, E::PeerTerminate { .. }) => None,

            (Open, E::PeerFin) => Some(HalfClosed),
            (AwaitFirstFpdu | FinSent | Draining, E::PeerFin) => Some(Ended),
            // What is still to be sent goes on: all of it, or the Terminate.
            (Refusing | HalfClosed | Closing | Terminating | Unlinked | Ended, E::PeerFin) => None,

            (Unlinked | Ended, E::Lost | E::Deadline) => None,
            (_, E::Lost) => Some(Ended),
            (AwaitFirstFpdu | Closing | FinSent | Terminating | Draining, E::Deadline) => {
                Some(Ended)
            }
            (Open | Refusing | HalfClosed, E::Deadline) => None,
        }
    }

    /// Returns true if responses may be sent.
    pub(super) fn responds(self) -> bool {
        self.sends() || self == StreamPhase::Refusing
    }

    /// Whether requests and responses may be sent.
    pub(super) fn sends(self) -> bool {
        //= MPA-7.1.2-4, DDP-3-8a, RDMAP-5.4-9, RDMAP-7-3
        matches!(self, StreamPhase::Open | StreamPhase::HalfClosed | StreamPhase::Closing)
    }

    /// Whether a stream stands by which messages come and go.
    pub(super) fn is_linked(self) -> bool {
        matches!(self, StreamPhase::AwaitFirstFpdu | StreamPhase::Open)
    }

    /// Whether TCP has everything that this side says, its FIN included.
    pub(super) fn has_said_all(self) -> bool {
        matches!(self, StreamPhase::FinSent | StreamPhase::Draining)
    }

    /// Whether arriving segments are carried out; in Refusing, responses alone.
    pub(super) fn receives(self) -> bool {
        //= DDP-3-8a, RDMAP-7-3
        matches!(
            self,
            StreamPhase::AwaitFirstFpdu
                | StreamPhase::Open
                | StreamPhase::Refusing
                | StreamPhase::Closing
                | StreamPhase::FinSent
        )
    }

    /// Whether new requests are flushed instead of carried out.
    pub(super) fn flushes(self) -> bool {
        matches!(self, StreamPhase::Terminating | StreamPhase::Draining | StreamPhase::Ended)
    }

    /// The state that applications see.
    pub(super) fn state(self) -> QpState {
        match self {
            StreamPhase::AwaitFirstFpdu
            | StreamPhase::Open
            | StreamPhase::Refusing
            | StreamPhase::Unlinked => QpState::Rts,
            StreamPhase::HalfClosed | StreamPhase::Closing | StreamPhase::FinSent => {
                QpState::Closing
            }
            StreamPhase::Terminating | StreamPhase::Draining => QpState::Terminate,
            StreamPhase::Ended => QpState::Error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::StreamEvent::{
        Abort, Deadline, Disconnect, Drained, Fault, FirstFpdu, Lost, PeerFin, PeerTerminate,
        Refusal, TerminateWritten,
    };
    use super::StreamPhase::{
        AwaitFirstFpdu, Closing, Draining, Ended, FinSent, HalfClosed, Open, Refusing, Terminating,
        Unlinked,
    };

    /// Every phase against every event.
    #[test]
    fn every_event_leads_from_every_phase_where_the_diagram_says() {
        let phases =
            [AwaitFirstFpdu, Open, HalfClosed, Closing, FinSent, Terminating, Draining, Ended];
        let (no, yes) = (None, Some(Ended));
        let table = [
            (FirstFpdu, [Some(Open), no, no, no, no, no, no, no]),
            (Disconnect, [yes, Some(Closing), Some(Closing), no, no, no, no, no]),
            (Abort, [yes, yes, yes, yes, yes, no, no, no]),
            (Drained { peer_fin: false }, [no, no, no, Some(FinSent), no, no, no, no]),
            (Drained { peer_fin: true }, [no, no, no, yes, no, no, no, no]),
            (
                Fault { can_send_terminate: true },
                [
                    yes,
                    Some(Terminating),
                    Some(Terminating),
                    Some(Terminating),
                    Some(Terminating),
                    no,
                    no,
                    no,
                ],
            ),
            (Fault { can_send_terminate: false }, [yes, yes, yes, yes, yes, no, no, no]),
            (TerminateWritten { peer_fin: false }, [no, no, no, no, no, Some(Draining), no, no]),
            (TerminateWritten { peer_fin: true }, [no, no, no, no, no, yes, no, no]),
            (
                PeerTerminate { over_tcp: true },
                [
                    Some(Draining),
                    Some(Draining),
                    Some(Draining),
                    Some(Draining),
                    Some(Draining),
                    no,
                    no,
                    no,
                ],
            ),
            (PeerTerminate { over_tcp: false }, [yes, yes, yes, yes, yes, no, no, no]),
            (PeerFin, [yes, Some(HalfClosed), no, no, yes, no, yes, no]),
            (Lost, [yes, yes, yes, yes, yes, yes, yes, no]),
            (Deadline, [yes, no, no, yes, yes, yes, yes, no]),
        ];
        for (event, expected) in table {
            for (phase, expected) in phases.into_iter().zip(expected) {
                assert_eq!(phase.after(event), expected, "{phase:?}, {event:?}");
            }
            // Without a stream only this side can bring about its end.
            let ends = matches!(event, Abort | Fault { .. });
            assert_eq!(Unlinked.after(event), ends.then_some(Ended), "{event:?}");
        }
    }

    #[test]
    fn refusing_is_left_like_open_and_at_no_deadline() {
        for event in [
            Abort,
            Fault { can_send_terminate: true },
            Fault { can_send_terminate: false },
            PeerTerminate { over_tcp: true },
            PeerTerminate { over_tcp: false },
            Lost,
        ] {
            assert_eq!(Refusing.after(event), Open.after(event), "{event:?}");
        }
        for event in [
            FirstFpdu,
            Disconnect,
            Drained { peer_fin: false },
            Refusal,
            TerminateWritten { peer_fin: false },
            PeerFin,
            Deadline,
        ] {
            assert_eq!(Refusing.after(event), None, "{event:?}");
        }
        assert_eq!(Open.after(Refusal), Some(Refusing));
        for phase in [AwaitFirstFpdu, HalfClosed, Closing, FinSent, Terminating, Unlinked, Ended] {
            assert_eq!(phase.after(Refusal), None, "{phase:?}");
        }
    }

    #[test]
    fn what_a_phase_allows() {
        let all = [
            (AwaitFirstFpdu, (false, true, false)),
            (Open, (true, true, false)),
            (Refusing, (false, true, false)),
            (HalfClosed, (true, false, false)),
            (Closing, (true, true, false)),
            (FinSent, (false, true, false)),
            (Terminating, (false, false, true)),
            (Draining, (false, false, true)),
            (Unlinked, (false, false, false)),
            (Ended, (false, false, true)),
        ];
        for (phase, expected) in all {
            assert_eq!((phase.sends(), phase.receives(), phase.flushes()), expected, "{phase:?}");
        }
    }
}
