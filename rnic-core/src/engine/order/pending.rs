//! Pieces of incoming messages that have arrived and are not visible yet.
//!
//! This module decides which piece is placed next. It has no access to memory or the engine, so
//! that tests can run it alone: the caller places the pieces.

use std::collections::VecDeque;

use arrayvec::ArrayVec;

use super::chooser::{PieceId, Position, hold_time, rank};
use super::model::{Inversion, permission};
use crate::device::memory::{MemoryFault, Payload};
use crate::rdmap::{AtomicRequest, ReadRequest};
use rnic_abi::faults::order::OrderRule;
use rnic_abi::types::{Stag, Time};

/// Kind of a message whose payload is placed in tagged buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Kind {
    /// An RDMA Write of the peer.
    Write,
    /// The response to an RDMA Read of this QP.
    Response,
}

/// A segment with payload.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Arrival {
    pub kind: Kind,
    pub stag: Stag,
    pub to: u64,
    /// The message ends here.
    pub last: bool,
}

/// A part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub kind: Kind,
    /// Number of the message on the QP.
    pub message: u64,
    pub stag: Stag,
    pub to: u64,
    pub len: usize,
}

/// A part of a message, with its bytes.
#[derive(Debug)]
pub(super) struct Piece {
    pub part: Part,
    pub bytes: Box<[u8]>,
    /// Time at which it is placed at the latest.
    until: Time,
    rank: u64,
}

/// Two parts of which the second was placed before the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Inverted {
    pub first: Part,
    /// `None` if the first part only became visible late.
    pub second: Option<Part>,
}

/// A Read whose response was delayed.
#[derive(Clone, Copy, Debug)]
pub(super) struct DelayedRead {
    /// Number of the Read on the QP.
    pub message: u64,
    pub request: ReadRequest,
    /// Number of bytes that were read early.
    pub early_len: usize,
}

/// An atomic operation whose result was written late.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateAtomic {
    /// Number of the request on the QP.
    pub message: u64,
    pub request: AtomicRequest,
}

/// The message in progress of one kind.
#[derive(Clone, Copy, Debug)]
struct Current {
    number: u64,
    /// The rule applies to it.
    active: bool,
    /// Bytes that have arrived.
    bytes: u64,
}

/// The pieces that a QP holds, and the numbers of its messages.
pub(super) struct Pending {
    pub rule: OrderRule,
    /// Number of the QP.
    stream: u64,
    /// Number of the next message.
    next: u64,
    writing: Option<Current>,
    responding: Option<Current>,
    /// In the order of their arrival.
    pieces: VecDeque<Piece>,
    bytes: usize,
    arrivals: u64,
    /// Inversions to be reported, at most one for each message held.
    pub inverted: ArrayVec<Inverted, MAX_INVERTED>,
    reported: Option<u64>,
    /// The last Write, since a Read was delayed.
    pub latest: Option<Part>,
    /// A delayed Read to be reported, with the last Write before its response.
    pub delayed: Option<(DelayedRead, Option<Part>)>,
    /// A late atomic operation to be reported.
    pub atomic: Option<LateAtomic>,
}

impl Pending {
    pub(super) fn new(rule: OrderRule, stream: u64) -> Self {
        Pending {
            rule,
            stream,
            next: 0,
            writing: None,
            responding: None,
            pieces: VecDeque::new(),
            bytes: 0,
            arrivals: 0,
            inverted: ArrayVec::new(),
            reported: None,
            latest: None,
            delayed: None,
            atomic: None,
        }
    }

    /// Returns the number of bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the earliest time at which a piece must be placed.
    pub(super) fn due(&self) -> Option<Time> {
        self.pieces.iter().map(|piece| piece.until).min()
    }

    /// Returns true if a piece is held for this STag.
    pub(super) fn holds(&self, stag: Stag) -> bool {
        self.pieces.iter().any(|piece| piece.part.stag == stag)
    }

    /// Returns the identity of the next message and whether the rule applies to it.
    pub(super) fn number_message(&mut self) -> (PieceId, bool) {
        let message = self.next;
        self.next += 1;
        let active = self.rule.inversions.as_ref().is_none_or(|range| range.contains(&message));
        (PieceId { stream: self.stream, message, offset: 0 }, active)
    }

    /// Accepts the payload of a segment. Calls `place` for each piece that is placed now. If the
    /// payload cannot be read, fails without any change.
    pub(super) fn arrive(
        &mut self,
        arrival: Arrival,
        payload: &Payload<'_>,
        now: Time,
        mut place: impl FnMut(&Piece),
    ) -> Result<(), MemoryFault> {
        let cuts = cuts(arrival.to, payload.len());
        let mut parts = ArrayVec::<Box<[u8]>, MAX_CUTS>::new();
        let mut from = 0;
        for &end in &cuts {
            let mut bytes = vec![0; end - from].into_boxed_slice();
            payload.read(from, &mut bytes)?;
            parts.push(bytes);
            from = end;
        }
        // Pieces that are still held afterwards are due later, and so is a piece that must not pass
        // them.
        self.release_due(now, &mut place);
        let mut current = self.current(arrival.kind);
        if arrival.kind == Kind::Response && arrival.last {
            // The Read completes as soon as this returns.
            self.release_all(&mut place);
            current.active = false;
        }
        let mut offset = current.bytes;
        let count = parts.len();
        for (n, bytes) in parts.into_iter().enumerate() {
            let position = match (offset == 0, arrival.last && n + 1 == count) {
                (true, true) => Position::Only,
                (true, false) => Position::First,
                (false, true) => Position::Last,
                (false, false) => Position::Middle,
            };
            let len = bytes.len();
            let to = arrival.to.wrapping_add(offset - current.bytes);
            let Arrival { kind, stag, .. } = arrival;
            let part = Part { kind, message: current.number, stag, to, len };
            let id = PieceId { stream: self.stream, message: current.number, offset };
            self.take(part, bytes, id, position, current.active, now, &mut place);
            offset += len as u64;
        }
        let current = Current { bytes: offset, ..current };
        *self.in_progress(arrival.kind) = (!arrival.last).then_some(current);
        Ok(())
    }

    /// Places the pieces that are due.
    pub(super) fn release_due(&mut self, now: Time, mut place: impl FnMut(&Piece)) {
        while let Some(index) = self.next_index(|piece| piece.until <= now) {
            self.release(index, false, &mut place);
        }
    }

    /// Places all pieces.
    pub(super) fn release_all(&mut self, mut place: impl FnMut(&Piece)) {
        while let Some(index) = self.next_index(|_| true) {
            self.release(index, true, &mut place);
        }
    }

    /// Ends the message in progress of this kind: the rest has no payload or will not arrive.
    pub(super) fn end_message(&mut self, kind: Kind) {
        *self.in_progress(kind) = None;
    }

    fn in_progress(&mut self, kind: Kind) -> &mut Option<Current> {
        match kind {
            Kind::Write => &mut self.writing,
            Kind::Response => &mut self.responding,
        }
    }

    /// Returns the message in progress of this kind, or a new one.
    fn current(&mut self, kind: Kind) -> Current {
        (*self.in_progress(kind)).unwrap_or_else(|| {
            let (id, active) = self.number_message();
            Current { number: id.message, active, bytes: 0 }
        })
    }

    /// Places a piece or holds it.
    #[expect(clippy::too_many_arguments, reason = "the parts of a piece")]
    fn take(
        &mut self,
        part: Part,
        bytes: Box<[u8]>,
        id: PieceId,
        position: Position,
        active: bool,
        now: Time,
        place: &mut impl FnMut(&Piece),
    ) {
        if part.kind == Kind::Write {
            self.latest = Some(part);
        }
        let others = !self.pieces.is_empty() && !self.keeps_order();
        let hold = hold_time(&self.rule.order, id, position, others).filter(|_| active);
        let rank = rank(&self.rule.order, id, self.arrivals);
        self.arrivals += 1;
        let mut piece = Piece { part, bytes, until: now, rank };
        if let Some(hold) = hold {
            piece.until = now.after(hold);
        } else if others {
            self.note_inversion(self.pieces.len(), &part, false);
            return place(&piece);
        }
        if self.keeps_order() {
            // A piece must not pass an earlier piece.
            let before = self.pieces.back().map_or(piece.until, |last| last.until);
            piece.until = piece.until.max(before);
        }
        if piece.until <= now {
            return place(&piece);
        }
        self.bytes += piece.bytes.len();
        self.pieces.push_back(piece);
        while self.bytes > MAX_BYTES || self.pieces.len() > MAX_PIECES {
            self.release(0, true, place);
        }
    }

    /// Returns true if the model forbids a piece to pass an earlier piece.
    pub(super) fn keeps_order(&self) -> bool {
        permission(self.rule.model, Inversion::Messages).is_none()
    }

    /// Returns the index of the next piece to be placed among those that qualify.
    fn next_index(&self, qualifies: impl Fn(&Piece) -> bool) -> Option<usize> {
        if self.keeps_order() {
            return self.pieces.front().filter(|piece| qualifies(piece)).map(|_| 0);
        }
        let candidates = self.pieces.iter().enumerate().filter(|(_, piece)| qualifies(piece));
        candidates.min_by_key(|(_, piece)| piece.rank).map(|(index, _)| index)
    }

    /// Places a piece. At a barrier, earlier pieces follow at once, so only the order of
    /// overlapping pieces matters.
    fn release(&mut self, index: usize, barrier: bool, place: &mut impl FnMut(&Piece)) {
        let Some(piece) = self.pieces.get(index) else { return };
        let part = piece.part;
        self.note_inversion(index, &part, barrier);
        if !barrier && part.kind == Kind::Write {
            self.report(Inverted { first: part, second: None });
        }
        let Some(piece) = self.pieces.remove(index) else { return };
        self.bytes -= piece.bytes.len();
        place(&piece);
    }

    /// Records that `part` passes the oldest of the first `before` pieces, or if `overlapping`, the
    /// oldest piece that it overlaps.
    fn note_inversion(&mut self, before: usize, part: &Part, overlapping: bool) {
        let passed = self.pieces.iter().take(before).map(|piece| piece.part);
        let first = passed.into_iter().find(|first| !overlapping || first.overlaps(part));
        if let Some(first) = first {
            self.report(Inverted { first, second: Some(*part) });
        }
    }

    fn report(&mut self, inverted: Inverted) {
        let message = inverted.first.message;
        if self.reported != Some(message) && !self.inverted.is_full() {
            self.reported = Some(message);
            self.inverted.push(inverted);
        }
    }
}

impl Part {
    fn overlaps(&self, other: &Part) -> bool {
        self.stag == other.stag
            && self.to < other.to.saturating_add(other.len as u64)
            && other.to < self.to.saturating_add(self.len as u64)
    }
}

/// Returns the ends of the pieces of `len` bytes at `to`. A piece begins at the first byte or at a
/// multiple of eight bytes, so that a word is never torn.
fn cuts(to: u64, len: usize) -> ArrayVec<usize, MAX_CUTS> {
    let size = len.div_ceil(CUTS).next_multiple_of(WORD);
    let skew = usize::try_from(to % WORD as u64).unwrap_or(0);
    let mut cuts = ArrayVec::new();
    let mut end = 0;
    while end < len {
        // After `CUTS` pieces at most the bytes of a skewed first piece are left.
        end = if cuts.len() + 1 == MAX_CUTS {
            len
        } else {
            ((end + skew + size) / WORD * WORD - skew).min(len)
        };
        cuts.push(end);
    }
    cuts
}

/// Number of pieces of a segment, apart from one for a skewed start.
const CUTS: usize = 8;
const MAX_CUTS: usize = CUTS + 1;
/// Bytes of a word, which is placed at once.
const WORD: usize = 8;
/// Maximum number of bytes that a QP holds. A piece is shorter than a segment of 64 KiB.
pub(super) const MAX_BYTES: usize = 64 * 1024;
/// Maximum number of pieces that a QP holds.
const MAX_PIECES: usize = 128;
/// Maximum number of inversions between two reports.
const MAX_INVERTED: usize = 4;
