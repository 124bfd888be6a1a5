//! FPDUs that have not arrived in full, and what they may cost.
//!
//! A peer may take as long as it likes with the rest of an FPDU that it has announced, so what a
//! stream holds follows what has arrived, not what was announced: a buffer of the next power of two.
//! The few that are incomplete at one time while streams run come from a pool of whole buffers,
//! which spares them growing. What is not pooled is charged ([`charge`](super::charge)); a working connection
//! completes an FPDU in milliseconds, so the oldest gives way. So ends a stream of whose incomplete FPDU no byte has come for long.

use std::collections::BTreeSet;
use std::time::Duration;

use super::charge::{Charges, Held, HoldLimits, Names};
pub(super) use super::charge::{Excess, Owner};
use super::schedule::Key;
use crate::mpa::MAX_FPDU;
use crate::types::{SessionId, Time};

/// What incomplete FPDUs may cost one engine, its pool apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialLimits {
    /// Bytes.
    pub held: HoldLimits,
    /// How long a stream may pause inside an FPDU.
    pub stall: Duration,
}

impl Default for PartialLimits {
    fn default() -> Self {
        PartialLimits { held: HoldLimits::default(), stall: Duration::from_secs(120) }
    }
}

/// An FPDU of which some bytes are still to come.
#[derive(Default)]
pub(super) struct Partial {
    /// As long as there is room.
    buffer: Vec<u8>,
    len: usize,
    /// Its buffer is the pool's.
    pooled: bool,
    /// What its session is charged otherwise.
    held: Held,
    /// When its last byte came.
    latest: Time,
    /// When to look whether it has stalled; outlives the FPDU.
    watched: Option<Time>,
}

impl Partial {
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    /// Room for bytes up to a length of `needed`, as far as there is some.
    pub(super) fn window(&mut self, needed: usize) -> &mut [u8] {
        let end = needed.clamp(self.len, self.buffer.len().max(self.len));
        &mut self.buffer[self.len..end]
    }

    /// Notes bytes that were put into the window.
    pub(super) fn grow(&mut self, n: usize, now: Time) {
        self.len += n;
        self.latest = now;
    }

    /// Whether there is no buffer.
    #[cfg(test)]
    pub(super) fn holds_nothing(&self) -> bool {
        self.buffer.capacity() == 0
    }
}

/// The buffers of incomplete FPDUs of one engine.
pub(super) struct Buffers {
    stall: Duration,
    /// Whole buffers at hand, and how many more are in use.
    free: Vec<Vec<u8>>,
    lent: usize,
    charges: Charges,
    /// When to look at which stream.
    watched: BTreeSet<(Time, Key)>,
}

impl Buffers {
    pub(super) fn new(limits: PartialLimits) -> Self {
        Buffers {
            stall: limits.stall,
            free: Vec::new(),
            lent: 0,
            charges: Charges::new(limits.held, NAMES),
            watched: BTreeSet::new(),
        }
    }

    /// Takes other limits. What is there already counts against them, and is kept until there is more.
    pub(super) fn set_limits(&mut self, limits: PartialLimits) {
        self.stall = limits.stall;
        self.charges.set_limits(limits.held);
    }

    /// Takes in bytes of an FPDU that is not complete, the first or further ones. If that exceeds a
    /// limit, the stream to end is told; until it has, the bytes are there all the same.
    pub(super) fn append(
        &mut self,
        partial: &mut Partial,
        owner: Owner,
        bytes: &[u8],
        now: Time,
    ) -> Option<Excess> {
        if partial.is_empty() {
            self.begin(partial, owner, now);
        }
        let len = partial.len + bytes.len();
        let mut excess = None;
        if len > partial.buffer.len() {
            let room = len.next_power_of_two().clamp(LEAST, MAX_FPDU.max(len));
            let more = room - partial.buffer.len();
            partial.buffer.reserve_exact(more);
            partial.buffer.resize(room, 0);
            if !partial.pooled {
                excess = self.charges.set(&mut partial.held, owner, room);
            }
        }
        partial.buffer[partial.len..len].copy_from_slice(bytes);
        partial.grow(bytes.len(), now);
        excess
    }

    fn begin(&mut self, partial: &mut Partial, owner: Owner, now: Time) {
        let pooled = self.free.pop();
        if pooled.is_some() || self.lent < POOL {
            self.lent += 1;
            partial.buffer = pooled.unwrap_or_else(|| vec![0; MAX_FPDU]);
            partial.pooled = true;
        }
        if partial.watched.is_none() {
            self.watch(partial, owner.key, now);
        }
    }

    /// The whole FPDU, its buffer to be given back by [`Buffers::give_buffer`]; afterwards this
    /// holds nothing.
    pub(super) fn take(&mut self, partial: &mut Partial, session: SessionId) -> (Vec<u8>, usize) {
        let buffer = std::mem::take(&mut partial.buffer);
        if std::mem::take(&mut partial.pooled) {
            self.lent -= 1;
        } else {
            self.charges.release(&mut partial.held, session);
        }
        (buffer, std::mem::take(&mut partial.len))
    }

    /// Takes back a buffer.
    pub(super) fn give_buffer(&mut self, buffer: Vec<u8>) {
        if buffer.len() == MAX_FPDU && self.free.len() + self.lent < POOL {
            self.free.push(buffer);
        }
    }

    /// Drops an incomplete FPDU, which nobody wants any more.
    pub(super) fn give(&mut self, partial: &mut Partial, owner: Owner) {
        let (buffer, _) = self.take(partial, owner.session);
        self.give_buffer(buffer);
        self.unwatch(partial, owner.key);
    }

    /// Stops to look at a stream until it has an incomplete FPDU again.
    pub(super) fn unwatch(&mut self, partial: &mut Partial, key: Key) {
        if let Some(at) = partial.watched.take() {
            self.watched.remove(&(at, key));
        }
    }

    /// Whether nothing is charged, lent or watched.
    #[cfg(test)]
    pub(super) fn is_unused(&self) -> bool {
        self.charges.is_unused() && self.lent == 0 && self.watched.is_empty()
    }

    // --- Stalls ------------------------------------------------------------------------------

    fn watch(&mut self, partial: &mut Partial, key: Key, from: Time) {
        let at = from.after(self.stall);
        self.watched.insert((at, key));
        partial.watched = Some(at);
    }

    /// When the next look at a stream is due.
    pub(super) fn next_look(&self) -> Option<Time> {
        self.watched.first().map(|(at, _)| *at)
    }

    /// A stream that is to be looked at.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Key> {
        let (at, key) = *self.watched.first()?;
        (at <= now).then(|| {
            self.watched.pop_first();
            key
        })
    }

    /// How long the stream that [`Buffers::pop_due`] named has paused inside an FPDU, if too long.
    pub(super) fn stalled(
        &mut self,
        partial: &mut Partial,
        key: Key,
        now: Time,
    ) -> Option<Duration> {
        partial.watched = None;
        if partial.is_empty() {
            return None;
        }
        let paused = now.since(partial.latest);
        if paused < self.stall {
            self.watch(partial, key, partial.latest);
            return None;
        }
        Some(paused)
    }
}

/// Its limits, in words.
const NAMES: Names = Names {
    device: "limits.partial_bytes",
    session: "limits.session_partial_bytes",
    thing: "incomplete FPDU was",
};
/// Whole buffers of an engine, in use and at hand.
const POOL: usize = 16;
/// Bytes of the smallest buffer.
const LEAST: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: SessionId = SessionId(1);
    const THEIRS: SessionId = SessionId(2);

    fn owner(key: Key, session: SessionId) -> Owner {
        Owner { key, session }
    }

    /// Buffers whose pool is used up.
    fn buffers(device: usize, session: usize) -> Buffers {
        let stall = Duration::from_secs(1);
        let mut buffers =
            Buffers::new(PartialLimits { held: HoldLimits { device, session }, stall });
        buffers.lent = POOL;
        buffers
    }

    #[test]
    fn a_buffer_grows_with_what_has_arrived() {
        let mut b = buffers(1 << 20, 1 << 20);
        let mut p = Partial::default();
        for (more, room) in [(1, 256), (255, 256), (1, 512), (1000, 2048), (64_000, 65_536)] {
            assert_eq!(b.append(&mut p, owner(1, MINE), &vec![7; more], Time(0)), None);
            let charged = (b.charges.used(), b.charges.used_by(MINE));
            assert_eq!((p.buffer.len(), charged), (room, (room, room)));
        }
        assert_eq!(p.bytes(), vec![7; 65_257]);
        assert_eq!(p.window(MAX_FPDU).len(), 65_536 - 65_257);
        assert_eq!(b.append(&mut p, owner(1, MINE), &[7; 280], Time(0)), None);
        assert_eq!(b.charges.used(), MAX_FPDU.max(65_537));
        let (buffer, len) = b.take(&mut p, MINE);
        assert_eq!((buffer[..len].len(), b.charges.is_unused()), (65_537, true));
    }

    #[test]
    fn the_pool_serves_the_first_without_charge() {
        let mut b = Buffers::new(PartialLimits {
            held: HoldLimits { device: 0, session: 0 },
            ..Default::default()
        });
        let mut held: Vec<_> = (0..POOL).map(|_| Partial::default()).collect();
        for (key, p) in (0..).zip(&mut held) {
            assert_eq!(b.append(p, owner(key, MINE), &[1; 100], Time(0)), None);
        }
        let mut p = Partial::default();
        let excess = b.append(&mut p, owner(99, MINE), &[1], Time(0)).expect("above the limit");
        assert_eq!(excess.victim, 99);
        b.give(&mut p, owner(99, MINE));
        b.give(&mut held[3], owner(3, MINE));
        assert_eq!(b.append(&mut p, owner(99, MINE), &[1], Time(0)), None);
        assert_eq!((b.charges.used(), b.lent, b.free.len()), (0, POOL, 0));
        held.push(p);
        for (key, p) in (0..).zip(&mut held) {
            let key = if key == POOL as Key { 99 } else { key };
            b.give(p, owner(key, MINE));
        }
        assert_eq!((b.lent, b.free.len(), b.next_look()), (0, POOL, None));
    }

    #[test]
    fn the_oldest_of_a_session_gives_way_to_it_and_of_the_one_with_most_to_all() {
        let mut b = buffers(1024, 512);
        let mut p: Vec<_> = (0..5).map(|_| Partial::default()).collect();
        assert_eq!(b.append(&mut p[0], owner(0, THEIRS), &[0; 256], Time(0)), None);
        assert_eq!(b.append(&mut p[1], owner(1, MINE), &[0; 256], Time(0)), None);
        assert_eq!(b.append(&mut p[2], owner(2, MINE), &[0; 256], Time(0)), None);
        let excess = b.append(&mut p[3], owner(3, MINE), &[0; 1], Time(0)).expect("above 512");
        assert_eq!(excess.victim, 1);
        assert!(
            excess.why.starts_with("limits.session_partial_bytes is reached"),
            "{}",
            excess.why
        );
        // It has not gone yet, and is not named again.
        let excess = b.append(&mut p[4], owner(4, THEIRS), &[0; 1], Time(0)).expect("above 1024");
        assert_eq!(excess.victim, 2);
        assert!(excess.why.starts_with("limits.partial_bytes is reached"), "{}", excess.why);
        for (key, session) in [(0, THEIRS), (1, MINE), (2, MINE), (3, MINE), (4, THEIRS)] {
            b.give(&mut p[key as usize], owner(key, session));
        }
        assert!(b.charges.is_unused());
    }

    #[test]
    fn only_a_pause_inside_of_one_fpdu_is_a_stall() {
        let second = 1_000_000_000;
        let mut b = buffers(1024, 512);
        let mut p = Partial::default();
        b.append(&mut p, owner(7, MINE), &[0; 2], Time(0));
        assert_eq!((b.next_look(), b.pop_due(Time(second - 1))), (Some(Time(second)), None));
        // Another byte in time, and the look is put off.
        b.append(&mut p, owner(7, MINE), &[0; 2], Time(second / 2));
        assert_eq!(b.pop_due(Time(second)), Some(7));
        assert_eq!(b.stalled(&mut p, 7, Time(second)), None);
        assert_eq!(b.next_look(), Some(Time(second * 3 / 2)));
        // Complete, and another begun: one look serves both.
        b.take(&mut p, MINE);
        b.append(&mut p, owner(7, MINE), &[0; 2], Time(second * 5 / 4));
        assert_eq!(b.pop_due(Time(second * 3 / 2)), Some(7));
        assert_eq!(b.stalled(&mut p, 7, Time(second * 3 / 2)), None);
        assert_eq!(b.pop_due(Time(second * 9 / 4)), Some(7));
        assert_eq!(b.stalled(&mut p, 7, Time(second * 9 / 4)), Some(Duration::from_secs(1)));
    }
}
