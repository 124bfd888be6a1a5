//! FPDUs over an emulated link: framed bytes enter a line, and go to the socket when they are due.
//!
//! For requests, bytes in the line count as accepted by TCP. The FIN and the end of the stream wait
//! for these bytes.

use super::TcpLink;
use crate::engine::link::emulation::delay_line::DelayLine;
use crate::engine::qp::Qp;
use crate::engine::state::EngineState;
use rnic_abi::types::Time;

impl Qp {
    /// Frames as much as the emulated link accepts now, and moves due bytes from the line to the
    /// tail. Returns true if there may be more to do in the next turn.
    pub(super) fn fill_line(&mut self, engine: &mut EngineState, slab: &mut [u8]) -> bool {
        let now = engine.now;
        let Some(tcp) = self.link.tcp_mut() else { return false };
        tcp.take_due(now);
        let Some(emulation) = &mut self.emulation else { return false };
        if !emulation.has_room(&tcp.line, self.core.session, &engine.held)
            || !emulation.is_open(now)
        {
            return false;
        }
        let most = emulation.allowance(now);
        let (produced, more) = self.fill(engine, slab, most);
        if produced > 0 {
            let at = self.leaves(now, produced);
            if let Some(tcp) = self.link.tcp_mut() {
                tcp.line.push(at, produced, slab[..produced].into());
                tcp.framed += produced as u64;
                tcp.entered = tcp.framed;
                tcp.take_due(now);
            }
        }
        if !more {
            self.end_backlog();
        }
        // In a late turn, new bytes may be due at once, after the bytes in the tail.
        more || self.link.tcp().is_some_and(|tcp| tcp.line.next().is_some_and(|at| at <= now))
    }
}

impl TcpLink {
    /// Returns the bytes in flight on the emulated link.
    pub(in crate::engine) fn line(&self) -> &DelayLine<Box<[u8]>> {
        &self.line
    }

    /// Moves the bytes that are due to the tail, which goes to the socket.
    fn take_due(&mut self, now: Time) {
        if !self.tail().is_empty() {
            return;
        }
        self.tail_at = 0;
        self.tail.clear();
        while let Some(bytes) = self.line.take_due(now, |_| true) {
            self.tail.extend_from_slice(&bytes);
        }
    }

    /// Takes the bytes in flight, for a connection that closes. Returns no bytes if TCP has not
    /// accepted all earlier bytes.
    pub(super) fn take_line(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.tail().is_empty() {
            while let Some(next) = self.line.take_first() {
                bytes.extend_from_slice(&next);
            }
            self.accepted += bytes.len() as u64;
        }
        bytes
    }
}
