//! FPDUs that have not arrived in full, and the limits on them.
//!
//! A peer may be slow to send the rest of an FPDU that it has announced. So the buffer of a stream
//! grows with the bytes that have arrived, to the next power of two, and not with the announced
//! length. The few FPDUs that are incomplete at any one time in running streams use a pool of
//! full-size buffers, which need not grow. Buffers outside the pool are charged
//! ([`charge`](crate::engine::charge)). A working connection completes an FPDU in milliseconds, so
//! above a limit the stream with the oldest incomplete FPDU ends. A stream also ends if no byte of
//! its incomplete FPDU has arrived for too long.

use std::time::Duration;

use crate::engine::charge::{ChargeLimits, ChargeNames, Charges, Excess, Owner, StreamCharge};
use crate::engine::deadlines::{Deadlines, Due};
use crate::engine::schedule::Key;
use crate::mpa::MAX_FPDU;
use rnic_abi::types::{SessionId, Time};

/// Limits on incomplete FPDUs of one engine, not counting its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialLimits {
    /// Limits in bytes on incomplete FPDUs, per session and in total.
    pub bytes: ChargeLimits,
    /// Maximum pause of a stream inside an FPDU.
    pub stall: Duration,
}

impl Default for PartialLimits {
    fn default() -> Self {
        PartialLimits { bytes: ChargeLimits::default(), stall: Duration::from_secs(120) }
    }
}

/// An FPDU that has arrived in part.
#[derive(Default)]
pub(in crate::engine) struct Partial {
    /// Its length is the room for the FPDU.
    buffer: Vec<u8>,
    len: usize,
    /// The buffer belongs to the pool.
    pooled: bool,
    /// Charge of the session for a buffer outside the pool.
    charge: StreamCharge,
    /// Arrival time of the last byte.
    latest: Time,
    /// Time of the next stall check. It outlives the FPDU.
    watched: Option<Time>,
}

impl Partial {
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(in crate::engine) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }

    /// Returns the free part of the buffer, up to a total of `needed` bytes in the buffer.
    pub(in crate::engine) fn spare(&mut self, needed: usize) -> &mut [u8] {
        let end = needed.clamp(self.len, self.buffer.len().max(self.len));
        &mut self.buffer[self.len..end]
    }

    /// Adds `n` bytes that were written to the spare room.
    pub(in crate::engine) fn grow(&mut self, n: usize, now: Time) {
        self.len += n;
        self.latest = now;
    }

    /// Restarts the time after which a stream counts as stalled.
    pub(in crate::engine) fn note_progress(&mut self, now: Time) {
        self.latest = now;
    }

    /// Returns true if there is no buffer.
    #[cfg(test)]
    pub(in crate::engine) fn holds_nothing(&self) -> bool {
        self.buffer.capacity() == 0
    }
}

/// The buffers of incomplete FPDUs of one engine.
pub(in crate::engine) struct PartialBuffers {
    stall: Duration,
    /// Free full-size buffers, and the number of full-size buffers in use.
    free: Vec<Vec<u8>>,
    lent: usize,
    charges: Charges,
}

impl PartialBuffers {
    pub(in crate::engine) fn new(limits: PartialLimits) -> Self {
        PartialBuffers {
            stall: limits.stall,
            free: Vec::new(),
            lent: 0,
            charges: Charges::new(limits.bytes, NAMES),
        }
    }

    /// Replaces the limits. Memory already held counts against them, but no stream ends before a
    /// buffer grows.
    pub(in crate::engine) fn set_limits(&mut self, limits: PartialLimits) {
        self.stall = limits.stall;
        self.charges.set_limits(limits.bytes);
    }

    /// Appends bytes to an incomplete FPDU, and begins it if it is empty. If that exceeds a limit,
    /// returns the stream that must end. The bytes are appended even then.
    pub(in crate::engine) fn append(
        &mut self,
        partial: &mut Partial,
        owner: Owner,
        bytes: &[u8],
        now: Time,
        deadlines: &mut Deadlines,
    ) -> Option<Excess> {
        if partial.is_empty() {
            self.begin(partial, owner, now, deadlines);
        }
        let len = partial.len + bytes.len();
        let mut excess = None;
        if len > partial.buffer.len() {
            let room = len.next_power_of_two().clamp(MIN_BUFFER, MAX_FPDU.max(len));
            let more = room - partial.buffer.len();
            partial.buffer.reserve_exact(more);
            partial.buffer.resize(room, 0);
            if !partial.pooled {
                excess = self.charges.set(&mut partial.charge, owner, room);
            }
        }
        partial.buffer[partial.len..len].copy_from_slice(bytes);
        partial.grow(bytes.len(), now);
        excess
    }

    fn begin(&mut self, partial: &mut Partial, owner: Owner, now: Time, deadlines: &mut Deadlines) {
        let pooled = self.free.pop();
        if pooled.is_some() || self.lent < POOL {
            self.lent += 1;
            partial.buffer = pooled.unwrap_or_else(|| vec![0; MAX_FPDU]);
            partial.pooled = true;
        }
        if partial.watched.is_none() {
            self.watch(partial, owner.key, now, deadlines);
        }
    }

    /// Takes the buffer and length of the whole FPDU, and leaves nothing. The caller returns the
    /// buffer with [`PartialBuffers::give_buffer`].
    pub(in crate::engine) fn take(
        &mut self,
        partial: &mut Partial,
        session: SessionId,
    ) -> (Vec<u8>, usize) {
        let buffer = std::mem::take(&mut partial.buffer);
        if std::mem::take(&mut partial.pooled) {
            self.lent -= 1;
        } else {
            self.charges.release(&mut partial.charge, session);
        }
        (buffer, std::mem::take(&mut partial.len))
    }

    /// Returns a buffer to the pool, or frees it.
    pub(in crate::engine) fn give_buffer(&mut self, buffer: Vec<u8>) {
        if buffer.len() == MAX_FPDU && self.free.len() + self.lent < POOL {
            self.free.push(buffer);
        }
    }

    /// Drops an incomplete FPDU that is no longer needed.
    pub(in crate::engine) fn give(
        &mut self,
        partial: &mut Partial,
        owner: Owner,
        deadlines: &mut Deadlines,
    ) {
        let (buffer, _) = self.take(partial, owner.session);
        self.give_buffer(buffer);
        unwatch(partial, owner.key, deadlines);
    }

    /// Returns true if nothing is charged and no buffer is in use.
    #[cfg(test)]
    pub(in crate::engine) fn is_unused(&self) -> bool {
        self.charges.is_unused() && self.lent == 0
    }

    // --- Stalls ------------------------------------------------------------------------------

    fn watch(&self, partial: &mut Partial, key: Key, from: Time, deadlines: &mut Deadlines) {
        let at = from.after(self.stall);
        deadlines.set(at, Due::Stall(key));
        partial.watched = Some(at);
    }

    /// Checks a stream for a stall. Returns how long it has paused inside an FPDU if that is too
    /// long.
    pub(in crate::engine) fn stalled(
        &mut self,
        partial: &mut Partial,
        key: Key,
        now: Time,
        deadlines: &mut Deadlines,
    ) -> Option<Duration> {
        partial.watched = None;
        if partial.is_empty() {
            return None;
        }
        let paused = now.since(partial.latest);
        if paused < self.stall {
            self.watch(partial, key, partial.latest, deadlines);
            return None;
        }
        Some(paused)
    }
}

/// Cancels the stall check of a stream until it has an incomplete FPDU again.
pub(in crate::engine) fn unwatch(partial: &mut Partial, key: Key, deadlines: &mut Deadlines) {
    if let Some(at) = partial.watched.take() {
        deadlines.clear(at, Due::Stall(key));
    }
}

/// Names of the limits, for error texts.
const NAMES: ChargeNames = ChargeNames {
    device: "limits.partial_bytes",
    session: "limits.session_partial_bytes",
    thing: "incomplete FPDU was",
};
/// Maximum number of full-size buffers, free and in use.
const POOL: usize = 16;
/// Size of the smallest buffer in bytes.
const MIN_BUFFER: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: SessionId = SessionId(1);

    fn owner(key: Key, session: SessionId) -> Owner {
        Owner { key, session }
    }

    /// Returns buffers with an exhausted pool.
    fn buffers(device: usize, session: usize) -> PartialBuffers {
        let stall = Duration::from_secs(1);
        let mut buffers =
            PartialBuffers::new(PartialLimits { bytes: ChargeLimits { device, session }, stall });
        buffers.lent = POOL;
        buffers
    }

    #[test]
    fn buffer_grows_with_received_bytes() {
        let mut b = buffers(1 << 20, 1 << 20);
        let mut d = Deadlines::default();
        let mut p = Partial::default();
        for (more, room) in [(1, 256), (255, 256), (1, 512), (1000, 2048), (64_000, 65_536)] {
            assert_eq!(b.append(&mut p, owner(1, MINE), &vec![7; more], Time(0), &mut d), None);
            let charged = (b.charges.used(), b.charges.used_by(MINE));
            assert_eq!((p.buffer.len(), charged), (room, (room, room)));
        }
        assert_eq!(p.bytes(), vec![7; 65_257]);
        assert_eq!(p.spare(MAX_FPDU).len(), 65_536 - 65_257);
        assert_eq!(b.append(&mut p, owner(1, MINE), &[7; 280], Time(0), &mut d), None);
        assert_eq!(b.charges.used(), MAX_FPDU.max(65_537));
        let (buffer, len) = b.take(&mut p, MINE);
        assert_eq!((buffer[..len].len(), b.charges.is_unused()), (65_537, true));
    }

    #[test]
    fn pooled_buffers_are_not_charged() {
        let mut b = PartialBuffers::new(PartialLimits {
            bytes: ChargeLimits { device: 0, session: 0 },
            ..Default::default()
        });
        let mut d = Deadlines::default();
        let mut held: Vec<_> = (0..POOL).map(|_| Partial::default()).collect();
        for (key, p) in (0..).zip(&mut held) {
            assert_eq!(b.append(p, owner(key, MINE), &[1; 100], Time(0), &mut d), None);
        }
        let mut p = Partial::default();
        let excess =
            b.append(&mut p, owner(99, MINE), &[1], Time(0), &mut d).expect("above the limit");
        assert_eq!(excess.victim, 99);
        b.give(&mut p, owner(99, MINE), &mut d);
        b.give(&mut held[3], owner(3, MINE), &mut d);
        assert_eq!(b.append(&mut p, owner(99, MINE), &[1], Time(0), &mut d), None);
        assert_eq!((b.charges.used(), b.lent, b.free.len()), (0, POOL, 0));
        held.push(p);
        for (key, p) in (0..).zip(&mut held) {
            let key = if key == POOL as Key { 99 } else { key };
            b.give(p, owner(key, MINE), &mut d);
        }
        assert_eq!((b.lent, b.free.len(), d.next()), (0, POOL, None));
    }

    #[test]
    fn pool_size_is_limited() {
        let mut b = PartialBuffers::new(PartialLimits::default());
        let mut d = Deadlines::default();
        let mut held: Vec<_> = (0..2 * POOL).map(|_| Partial::default()).collect();
        for (key, p) in (0..).zip(&mut held) {
            assert_eq!(b.append(p, owner(key, MINE), &[1; MAX_FPDU], Time(0), &mut d), None);
        }
        assert_eq!(b.charges.used(), POOL * MAX_FPDU);
        for (key, p) in (0..).zip(&mut held) {
            b.give(p, owner(key, MINE), &mut d);
            assert!(b.free.len() + b.lent <= POOL);
        }
        assert!(b.is_unused());
        assert_eq!(b.free.len(), POOL);
    }
}
