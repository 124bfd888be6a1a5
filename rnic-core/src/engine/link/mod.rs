//! The link of a QP: TCP, or another QP of this engine.
//!
//! Few other modules distinguish the two. [`tcp`] turns segments into FPDUs and back. [`direct`]
//! hands the same segments over without framing, in the form that the TCP path produces. On both,
//! every outgoing FPDU passes [`Qp::fpdu_sent`](super::qp::Qp::fpdu_sent), every incoming one
//! [`Qp::fpdu_received`](super::qp::Qp::fpdu_received), and every segment that passed the checks
//! [`Qp::segment_arrived`](super::qp::Qp::segment_arrived). Exceptions are notices, RTR Sends, and
//! runs of short Writes (`short_writes`), which are counted once per run and executed in the queue.
//! An [`emulation`] delays the data of either link.

mod direct;
pub(super) mod emulation;
mod loopback;
mod short_writes;
pub(super) mod tcp;

use tcp::TcpLink;

use super::charge::Owner;
use super::interface::Output;
use super::qp_core::QpCore;
use super::state::{EngineState, Peer, PeerSignal};
use crate::stream::Fault;
use rnic_abi::types::Msn;

/// Link of a QP.
pub(super) enum Link {
    None,
    Tcp(Box<TcpLink>),
    /// Another QP of this engine.
    Direct(Peer),
    /// Another QP, which has closed. Nothing more can be sent.
    PeerClosed,
    /// None: each datagram of a UD QP has its own destination.
    Datagrams,
}

/// Action of a link in its QP's turn.
pub(super) enum LinkTurn {
    /// Do nothing: there is no link, or TCP accepts no more for now.
    Idle,
    /// Make a socket call.
    Transmit,
    /// Hand segments to this QP.
    HandOver(Peer),
    /// Handle a peer that has closed.
    PeerGone,
    /// Send datagrams.
    Datagrams,
}

/// Result of finishing the outgoing direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fin {
    /// The FIN is sent.
    Sent,
    /// TCP has yet to accept earlier bytes.
    Later,
    /// There is no stream to finish.
    NoLink,
}

impl Link {
    /// Returns the TCP connection, if the link is one.
    #[inline]
    pub(super) fn tcp(&self) -> Option<&TcpLink> {
        match self {
            Link::Tcp(tcp) => Some(tcp),
            Link::None | Link::Direct(_) | Link::PeerClosed | Link::Datagrams => None,
        }
    }

    /// Returns the TCP connection, if the link is one.
    #[inline]
    pub(super) fn tcp_mut(&mut self) -> Option<&mut TcpLink> {
        match self {
            Link::Tcp(tcp) => Some(tcp),
            Link::None | Link::Direct(_) | Link::PeerClosed | Link::Datagrams => None,
        }
    }

    /// Returns the number of bytes that the lower layer has accepted, or `u64::MAX` without TCP.
    #[inline]
    pub(super) fn accepted(&self) -> u64 {
        self.tcp().map_or(u64::MAX, TcpLink::accepted)
    }

    /// Returns the action for a turn.
    pub(super) fn turn(&self) -> LinkTurn {
        match self {
            Link::None => LinkTurn::Idle,
            Link::Tcp(tcp) if tcp.awaits_socket() => LinkTurn::Idle,
            Link::Tcp(_) => LinkTurn::Transmit,
            Link::Direct(peer) => LinkTurn::HandOver(*peer),
            Link::PeerClosed => LinkTurn::PeerGone,
            Link::Datagrams => LinkTurn::Datagrams,
        }
    }

    // --- Incoming ----------------------------------------------------------------------------

    /// Drops bytes that were read and not yet parsed.
    pub(super) fn drop_unread(&mut self) {
        if let Some(tcp) = self.tcp_mut() {
            tcp.drop_unread();
        }
    }

    /// Resumes the incoming direction.
    pub(super) fn read_on(&self, core: &QpCore, engine: &mut EngineState) {
        match self {
            Link::Tcp(_) => engine.outputs.push_back(Output::ReadAgain(core.id)),
            Link::Direct(peer) => engine.awakened.push(*peer),
            Link::None | Link::PeerClosed | Link::Datagrams => {}
        }
    }

    /// Gives the peer of a direct connection a turn.
    pub(in crate::engine) fn wake_peer(&self, engine: &mut EngineState) {
        if let Link::Direct(peer) = self {
            engine.awakened.push(*peer);
        }
    }

    /// Signals to the peer of a direct connection that a copier has placed a segment, so that it
    /// need not wait for its turn to see that.
    pub(super) fn signal_placed(&self, engine: &mut EngineState) {
        if let Link::Direct(peer) = self {
            engine.signal(*peer, PeerSignal::Placed);
        }
    }

    /// Signals to the peer of a direct connection that its waiting segment is refused. Over TCP the
    /// peer would already have sent it.
    pub(super) fn refuse_waiting(&self, engine: &mut EngineState) {
        if let Link::Direct(peer) = self {
            engine.signal(*peer, PeerSignal::SegmentTaken);
        }
    }

    // --- Incoming Sends ----------------------------------------------------------------------

    /// Returns the MSN of the last Send that was received over TCP and is done.
    #[inline]
    pub(super) fn last_send(&self) -> Option<Msn> {
        self.tcp().and_then(TcpLink::last_send)
    }

    /// Records a placed Send segment. Returns the length of the message if it is complete.
    #[inline]
    pub(super) fn send_placed(
        &mut self,
        mo: u32,
        len: usize,
        last: bool,
        total: Option<u32>,
    ) -> Result<Option<u32>, Fault> {
        match self {
            Link::Tcp(tcp) => tcp.send_placed(mo, len, last),
            // The direct path hands over the segments of a message in order.
            Link::Direct(_) | Link::None | Link::PeerClosed | Link::Datagrams => {
                Ok(total.filter(|_| last))
            }
        }
    }

    // --- Ends --------------------------------------------------------------------------------

    /// Returns true if a Terminate can still be sent within the stream.
    pub(super) fn can_send_terminate(&self) -> bool {
        self.tcp().is_some_and(TcpLink::can_send_terminate)
    }

    /// Sends the Terminate that ends the stream. Over TCP it is queued if it can be sent `within`
    /// the stream, and otherwise dropped. Returns true if it has been sent.
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
            Link::None | Link::PeerClosed | Link::Datagrams => false,
        }
    }

    /// Drops unsent bytes and sends only the FIN, because the peer accepts nothing more.
    pub(super) fn stop_sending(&mut self, core: &QpCore, engine: &mut EngineState) {
        if let Some(tcp) = self.tcp_mut() {
            tcp.drop_unsent(core, engine);
            if tcp.finish() {
                engine.outputs.push_back(Output::ShutdownWrite(core.id));
            }
        }
    }

    /// Sends the FIN once TCP has accepted everything before it.
    pub(super) fn finish_sending(&mut self, core: &QpCore, engine: &mut EngineState) -> Fin {
        match self {
            Link::None | Link::Datagrams => Fin::NoLink,
            Link::Direct(peer) => {
                engine.signal(*peer, PeerSignal::Fin);
                Fin::Sent
            }
            // The FIN is lost, as it would be over TCP.
            Link::PeerClosed => Fin::Sent,
            Link::Tcp(tcp) if tcp.has_unsent() => Fin::Later,
            Link::Tcp(tcp) => {
                tcp.finish();
                engine.outputs.push_back(Output::ShutdownWrite(core.id));
                Fin::Sent
            }
        }
    }

    /// Closes the connection, if any. The other end of a direct connection always gets a signal,
    /// because this QP's key may be reused.
    pub(super) fn close(&mut self, reset: bool, core: &QpCore, engine: &mut EngineState) {
        match std::mem::replace(self, Link::None) {
            Link::Direct(peer) if reset => engine.signal(peer, PeerSignal::Reset),
            Link::Direct(peer) => engine.signal(peer, PeerSignal::Closed),
            Link::None | Link::PeerClosed | Link::Datagrams => {}
            Link::Tcp(mut tcp) => {
                if !reset && let Some(bytes) = tcp.last_bytes() {
                    engine.outputs.push_back(Output::FinalFpdu { qp: core.id, bytes });
                }
                tcp.release(Owner { key: core.key, session: core.session }, engine);
                engine.outputs.push_back(Output::Close { qp: core.id, reset });
            }
        }
    }

    /// Closes the connection of a QP that is destroyed: with this Terminate, gracefully, or with a
    /// reset, which discards bytes in flight.
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
                engine.outputs.push_back(Output::FinalFpdu { qp: core.id, bytes });
            }
            (Link::None | Link::PeerClosed | Link::Datagrams, _) | (_, None) => {}
        }
        self.close(reset, core, engine);
    }

    /// Builds the Terminate of a QP that is destroyed while connected, from its RDMAP header: an
    /// FPDU, or only the header for the direct path. Returns `None` if nothing may be sent.
    pub(super) fn final_terminate(&mut self, payload: Vec<u8>) -> Option<Vec<u8>> {
        match self {
            Link::None | Link::PeerClosed | Link::Datagrams => None,
            Link::Direct(_) => Some(payload),
            Link::Tcp(tcp) => tcp.final_terminate(&payload),
        }
    }
}
