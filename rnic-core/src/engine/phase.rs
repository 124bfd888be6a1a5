//! The phases of a stream.
//!
//! ```text
//!  AwaitFirstFpdu --FirstFpdu--> Open --PeerFin--> HalfClosed
//!                                 |                    |
//!                                 +----Disconnect------+--> Closing --Drained--> FinSent
//!
//!  any but Unlinked, Terminating, Draining, Ended:
//!      --Fault, if a Terminate can be sent--> Terminating --TerminateWritten--> Draining
//!      --PeerTerminate, over TCP--> Draining
//!      --Fault or PeerTerminate otherwise, Abort--> Ended
//!
//!  also to Ended: AwaitFirstFpdu by Disconnect, PeerFin or Deadline; Closing by Drained after the
//!  peer's FIN, or by Deadline; FinSent, Draining by PeerFin or Deadline; Terminating by
//!  TerminateWritten after the peer's FIN, or by Deadline; any but Unlinked by Lost; Unlinked by
//!  Fault or Abort
//! ```
//!
//! In `AwaitFirstFpdu` no Terminate can be sent. An RC or UC QP begins in `Unlinked`. It returns to
//! `Unlinked` from `AwaitFirstFpdu` and `Open` where an iWARP QP would be lost, half closed or, by
//! a Terminate that blames none of its requests, draining ([`Qp::unlink`](super::qp::Qp::unlink)).
//! An RC QP that owes responses to earlier requests goes from `Open` to `Refusing` when it refuses
//! a request. It leaves `Refusing` like `Open`, except that `Disconnect` has no effect, and
//! `PeerFin` and `Deadline` [complete the refusal](super::qp::Qp::complete_refusal).
//!
//! The rules are in RFC 5040 section 6.2 and RFC 5044 section 7.1. Applications see the states of
//! verbs ([`StreamPhase::state`]).

use rnic_abi::types::QpState;

/// Phase of a stream, which alone decides what may be sent and how received bytes are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamPhase {
    /// Responder before its first valid FPDU: receives, sends nothing (RFC 5044 section 7.1.2).
    AwaitFirstFpdu,
    /// Both directions work.
    Open,
    /// An RC QP has refused a request of its peer: sends the responses to earlier requests, then
    /// the Terminate. Accepts only responses and begins no request.
    Refusing,
    /// The peer has finished sending; this side may still send.
    HalfClosed,
    /// The application disconnects: earlier requests are finished, then the FIN is sent.
    Closing,
    /// FIN sent after everything else; waits for the peer's FIN.
    FinSent,
    /// A Terminate must be sent; received bytes are dropped.
    Terminating,
    /// Everything is sent. Waits for the peer's FIN and drops its bytes, so that closing does not
    /// reset the connection before the peer has read the Terminate.
    Draining,
    /// An RC or UC QP without a stream, which may get one.
    Unlinked,
    /// No stream: before the first one, or after its end.
    Ended,
}

/// Event of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEvent {
    /// The first FPDU arrived and is valid.
    FirstFpdu,
    /// The application disconnects gracefully.
    Disconnect,
    /// The application aborts the connection.
    Abort,
    /// Everything posted before the disconnect is done and sent.
    Drained {
        /// The peer's FIN has been seen.
        peer_fin: bool,
    },
    /// An RC QP refuses a request and owes responses to earlier ones.
    Refusal,
    /// A fault of this side or of the peer.
    Fault {
        /// A Terminate can still be sent over the connection.
        can_send_terminate: bool,
    },
    /// TCP has accepted this side's Terminate.
    TerminateWritten {
        /// The peer's FIN has been seen.
        peer_fin: bool,
    },
    /// The peer's Terminate arrived.
    PeerTerminate {
        /// The connection is TCP, which must be closed gracefully.
        over_tcp: bool,
    },
    /// The peer's FIN arrived between two FPDUs.
    PeerFin,
    /// The connection is gone.
    Lost,
    /// The deadline of the phase has passed.
    Deadline,
}

impl StreamPhase {
    /// Returns the phase after an event, or `None` if the event changes nothing.
    pub(super) fn after(self, event: StreamEvent) -> Option<StreamPhase> {
        use StreamEvent as E;
        use StreamPhase::{
            AwaitFirstFpdu, Closing, Draining, Ended, FinSent, HalfClosed, Open, Refusing,
            Terminating, Unlinked,
        };
        match (self, event) {
            (AwaitFirstFpdu, E::FirstFpdu) => Some(Open),
            (_, E::FirstFpdu) => None,

            // Nothing may be sent yet, so nothing can be finished gracefully.
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

            // A Terminate is reported, never answered (RFC 5040 section 7.1).
            (
                AwaitFirstFpdu | Open | Refusing | HalfClosed | Closing | FinSent,
                E::PeerTerminate { over_tcp },
            ) => Some(if over_tcp { Draining } else { Ended }),
            (Terminating | Draining | Unlinked | Ended, E::PeerTerminate { .. }) => None,

            (Open, E::PeerFin) => Some(HalfClosed),
            (AwaitFirstFpdu | FinSent | Draining, E::PeerFin) => Some(Ended),
            // Pending data, or the Terminate, is still sent.
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

    /// Returns true if requests and responses may be sent.
    pub(super) fn sends(self) -> bool {
        //= MPA-7.1.2-4, DDP-3-8a, RDMAP-5.4-9, RDMAP-7-3
        matches!(self, StreamPhase::Open | StreamPhase::HalfClosed | StreamPhase::Closing)
    }

    /// Returns true if the stream works and is not being ended.
    pub(super) fn is_linked(self) -> bool {
        matches!(self, StreamPhase::AwaitFirstFpdu | StreamPhase::Open)
    }

    /// Returns true if TCP has accepted everything that this side sends, its FIN included.
    pub(super) fn has_sent_all(self) -> bool {
        matches!(self, StreamPhase::FinSent | StreamPhase::Draining)
    }

    /// Returns true if incoming segments are carried out; in Refusing only responses.
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

    /// Returns true if new requests are flushed instead of carried out.
    pub(super) fn flushes(self) -> bool {
        matches!(self, StreamPhase::Terminating | StreamPhase::Draining | StreamPhase::Ended)
    }

    /// Returns the QP state that applications see.
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

    #[test]
    fn every_event_in_every_phase() {
        let phases =
            [AwaitFirstFpdu, Open, HalfClosed, Closing, FinSent, Terminating, Draining, Ended];
        let no = None;
        let yes = Some(Ended);
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
            // Without a stream only this side can end the QP.
            let ends = matches!(event, Abort | Fault { .. });
            assert_eq!(Unlinked.after(event), ends.then_some(Ended), "{event:?}");
        }
    }

    #[test]
    fn transitions_of_refusing() {
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
    fn phase_properties() {
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
