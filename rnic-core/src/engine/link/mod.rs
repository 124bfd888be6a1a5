//! What a queue pair is connected by: TCP, or another queue pair of this engine.
//!
//! This is the one place that matches on which it is. [`tcp`] makes FPDUs of segments and back;
//! [`direct`] hands the same segments over before MPA would frame them, in the form that the
//! stream's checks would give them. On both, every outgoing FPDU passes
//! [`Qp::fpdu_sent`](super::qp::Qp::fpdu_sent), every incoming one
//! [`Qp::fpdu_received`](super::qp::Qp::fpdu_received), and every segment that passed the checks
//! [`Qp::segment_arrived`](super::qp::Qp::segment_arrived); but for `short_writes` in a row,
//! which are counted there all at once and placed as they stand in the queue.

mod direct;
mod itself;
mod short_writes;
pub(super) mod tcp;

use tcp::TcpLink;

use super::charge::Owner;
use super::interface::Output;
use super::qp_core::QpCore;
use super::state::{EngineState, Peer, PeerSignal};
use crate::stream::Fault;

/// What a queue pair is connected by.
pub(super) enum Link {
    None,
    Tcp(Box<TcpLink>),
    /// Another QP of this engine.
    Direct(Peer),
    /// It was another QP, which has left in order: nothing can be sent or told any more.
    Left,
    /// Whoever each of its datagrams names.
    Datagrams,
}

/// What a link wants in its QP's turn.
pub(super) enum LinkTurn {
    /// Nothing: there is no link, or TCP takes no more for now.
    Idle,
    /// A call to its socket.
    Transmit,
    /// Segments handed to this QP.
    HandOver(Peer),
    /// To find that there is nobody to hand anything to.
    FindNobody,
    /// Its datagrams to be sent.
    Datagrams,
}

/// What came of finishing the outgoing direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fin {
    /// The FIN is sent.
    Sent,
    /// TCP has bytes still to take.
    Later,
    /// There is nothing to finish.
    NoLink,
}

impl Link {
    /// The TCP connection, if it is one.
    #[inline]
    pub(super) fn tcp(&self) -> Option<&TcpLink> {
        match self {
            Link::Tcp(tcp) => Some(tcp),
            Link::None | Link::Direct(_) | Link::Left | Link::Datagrams => None,
        }
    }

    /// The TCP connection, if it is one.
    #[inline]
    pub(super) fn tcp_mut(&mut self) -> Option<&mut TcpLink> {
        match self {
            Link::Tcp(tcp) => Some(tcp),
            Link::None | Link::Direct(_) | Link::Left | Link::Datagrams => None,
        }
    }

    /// Bytes the lower layer has accepted; without TCP everything counts as accepted.
    #[inline]
    pub(super) fn accepted(&self) -> u64 {
        self.tcp().map_or(u64::MAX, TcpLink::accepted)
    }

    /// What there is to do in a turn.
    pub(super) fn turn(&self) -> LinkTurn {
        match self {
            Link::None => LinkTurn::Idle,
            Link::Tcp(tcp) if tcp.awaits_socket() => LinkTurn::Idle,
            Link::Tcp(_) => LinkTurn::Transmit,
            Link::Direct(peer) => LinkTurn::HandOver(*peer),
            Link::Left => LinkTurn::FindNobody,
            Link::Datagrams => LinkTurn::Datagrams,
        }
    }

    // --- Incoming ----------------------------------------------------------------------------

    /// What was read and not looked at is not wanted any more.
    pub(super) fn drop_unread(&mut self) {
        if let Some(tcp) = self.tcp_mut() {
            tcp.drop_unread();
        }
    }

    /// The incoming direction moves again.
    pub(super) fn read_on(&self, core: &QpCore, engine: &mut EngineState) {
        match self {
            Link::Tcp(_) => engine.outputs.push_back(Output::ReadAgain(core.id)),
            Link::Direct(peer) => engine.awakened.push(*peer),
            Link::None | Link::Left | Link::Datagrams => {}
        }
    }

    /// A copier has placed a segment: the peer of a direct connection need not wait for its turn to
    /// see that.
    pub(super) fn tell_placed(&self, engine: &mut EngineState) {
        if let Link::Direct(peer) = self {
            engine.signal(*peer, PeerSignal::Placed);
        }
    }

    /// The segment that waited is refused: the peer of a direct connection is rid of it, as it
    /// would have been long before with TCP between them.
    pub(super) fn refuse_waiting(&self, engine: &mut EngineState) {
        if let Link::Direct(peer) = self {
            engine.signal(*peer, PeerSignal::SegmentTaken);
        }
    }

    // --- What arrives ------------------------------------------------------------------------

    /// Whether the message that a Send segment ends is whole, and how long it is; `None` if it goes
    /// on.
    #[inline]
    pub(super) fn send_placed(
        &mut self,
        (mo, len, last): (u32, usize, bool),
        total: Option<u32>,
    ) -> Result<Option<u32>, Fault> {
        match self {
            Link::Tcp(tcp) => tcp.send_placed(mo, len, last),
            // Each segment of a message is handed over in order.
            Link::Direct(_) | Link::None | Link::Left | Link::Datagrams => {
                Ok(total.filter(|_| last))
            }
        }
    }

    // --- Ends --------------------------------------------------------------------------------

    /// Whether a Terminate can still be sent within the stream.
    pub(super) fn can_send_terminate(&self) -> bool {
        self.tcp().is_some_and(TcpLink::can_send_terminate)
    }

    /// The peer is told by this Terminate that the stream ends: at once, or `within` the stream.
    /// Whether it is sent already; within the stream it has its turn to come.
    pub(super) fn terminate(
        &mut self,
        payload: Vec<u8>,
        within: bool,
        engine: &mut EngineState,
    ) -> bool {
        match self {
            Link::Direct(peer) => {
                engine.signal(*peer, PeerSignal::Terminate(payload));
                true
            }
            Link::Tcp(tcp) => {
                if within {
                    tcp.queue_terminate(payload);
                }
                false
            }
            Link::None | Link::Left | Link::Datagrams => false,
        }
    }

    /// Nothing more is sent but a FIN: the peer wants nothing any more.
    pub(super) fn stop_sending(&mut self, core: &QpCore, engine: &mut EngineState) {
        if let Some(tcp) = self.tcp_mut() {
            tcp.drop_unsent(core, engine);
            if tcp.finish() {
                engine.outputs.push_back(Output::ShutdownWrite(core.id));
            }
        }
    }

    /// Sends the FIN, if all that is before it has been accepted.
    pub(super) fn finish_sending(&mut self, core: &QpCore, engine: &mut EngineState) -> Fin {
        match self {
            Link::None | Link::Datagrams => Fin::NoLink,
            Link::Direct(peer) => {
                engine.signal(*peer, PeerSignal::Fin);
                Fin::Sent
            }
            // Nobody hears it, as over TCP.
            Link::Left => Fin::Sent,
            Link::Tcp(tcp) if tcp.has_unsent() => Fin::Later,
            Link::Tcp(tcp) => {
                tcp.finish();
                engine.outputs.push_back(Output::ShutdownWrite(core.id));
                Fin::Sent
            }
        }
    }

    /// Closes the connection; afterwards there is none. The other end of a direct one is told in
    /// every case, or it would go on with whoever has this QP's key next.
    pub(super) fn close(&mut self, reset: bool, core: &QpCore, engine: &mut EngineState) {
        match std::mem::replace(self, Link::None) {
            Link::Direct(peer) if reset => engine.signal(peer, PeerSignal::Reset),
            Link::Direct(peer) => engine.signal(peer, PeerSignal::Left),
            Link::None | Link::Left | Link::Datagrams => {}
            Link::Tcp(mut tcp) => {
                tcp.release(Owner { key: core.key, session: core.session }, engine);
                engine.outputs.push_back(Output::Close { qp: core.id, reset });
            }
        }
    }

    /// Closes the connection of a QP that is destroyed: with this Terminate, in order, or with a
    /// reset, which would take back what is still on its way.
    pub(super) fn destroy(
        &mut self,
        terminate: Option<Vec<u8>>,
        in_order: bool,
        core: &QpCore,
        engine: &mut EngineState,
    ) {
        let reset = terminate.is_none() && !in_order;
        match (&*self, terminate) {
            (Link::Direct(peer), Some(payload)) => {
                engine.signal(*peer, PeerSignal::Terminate(payload));
            }
            (Link::Tcp(_), Some(bytes)) => {
                engine.outputs.push_back(Output::FinalTerminate { qp: core.id, bytes });
            }
            (Link::None | Link::Left | Link::Datagrams, _) | (_, None) => {}
        }
        self.close(reset, core, engine);
    }

    /// The Terminate with which a QP leaves that is destroyed while connected, from its RDMAP
    /// header: an FPDU, or that header for the direct path. None where nothing may be sent.
    pub(super) fn final_terminate(&mut self, payload: Vec<u8>) -> Option<Vec<u8>> {
        match self {
            Link::None | Link::Left | Link::Datagrams => None,
            Link::Direct(_) => Some(payload),
            Link::Tcp(tcp) => tcp.final_terminate(&payload),
        }
    }
}
