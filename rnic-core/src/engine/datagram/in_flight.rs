//! Datagrams in flight on an emulated link.

use crate::engine::link::emulation::delay_line::DelayLine;
use crate::engine::link::emulation::shared::Fate;
use rnic_abi::roce::Datagram;
use rnic_abi::types::Time;

/// Datagrams in flight from a UD QP.
#[derive(Default)]
pub(in crate::engine) struct DelayedDatagrams {
    pub(super) line: DelayLine<DelayedDatagram>,
    /// The datagram that the next datagram overtakes, and the time at which it is sent if no other
    /// follows.
    overtaken: Option<(Time, DelayedDatagram)>,
}

/// A datagram in flight.
#[derive(Clone)]
pub(in crate::engine) struct DelayedDatagram {
    pub datagram: Datagram,
    /// The GRH, then the data.
    pub bytes: Box<[u8]>,
}

impl DelayedDatagrams {
    /// Returns the memory of the datagrams in bytes.
    pub(in crate::engine) fn room(&self) -> usize {
        self.line.room() + self.overtaken.as_ref().map_or(0, |(_, held)| held.bytes.len())
    }

    /// Returns the time after `now` at which the next datagram is due.
    pub(in crate::engine) fn next_after(&self, now: Time) -> Option<Time> {
        let held = self.overtaken.as_ref().map(|(at, _)| *at).filter(|at| *at > now);
        self.line.next_after(now).into_iter().chain(held).min()
    }

    pub(super) fn push(&mut self, at: Time, delayed: DelayedDatagram, fate: Fate) {
        let held = self.overtaken.take();
        match fate {
            Fate::Lost | Fate::Truncated => {
                self.overtaken = held;
                return;
            }
            Fate::Reordered if held.is_none() => {
                self.overtaken = Some((at.after(HOLD), delayed));
                return;
            }
            Fate::Duplicated => self.line.push(at, delayed.bytes.len(), delayed.clone()),
            Fate::Reordered | Fate::Arrives => {}
        }
        self.line.push(at, delayed.bytes.len(), delayed);
        if let Some((_, held)) = held {
            self.line.push(at, held.bytes.len(), held);
        }
    }

    pub(super) fn take_due(&mut self, now: Time) -> Option<DelayedDatagram> {
        if let Some((_, held)) = self.overtaken.take_if(|(at, _)| *at <= now) {
            self.line.push(now, held.bytes.len(), held);
        }
        self.line.take_due(now, |_| true)
    }
}

/// Time for which a datagram waits for another to overtake it.
const HOLD: std::time::Duration = std::time::Duration::from_millis(10);
