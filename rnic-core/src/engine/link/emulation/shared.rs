//! An emulated link, shared by the QPs of one or several workers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::device::ArmedFault;
use rnic_abi::faults::link::LinkShape;
use rnic_abi::types::{QpId, Time};

/// A link with a [shape](LinkShape), in one direction. All QPs that hold it share its rate.
#[derive(Debug)]
pub struct EmulatedLink {
    /// The rule of the link, which counts packets and losses.
    fault: Arc<ArmedFault>,
    shape: LinkShape,
    /// Time in nanoseconds at which everything sent so far has left the sender. As a token bucket
    /// it holds no tokens for an idle link.
    free_at: AtomicU64,
}

/// Fate of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Fate {
    Arrives,
    Lost,
    Truncated,
    Reordered,
    Duplicated,
}

impl fmt::Display for Fate {
    /// Writes a predicate of the packet.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fate::Arrives => "arrived",
            Fate::Lost => "was lost",
            Fate::Truncated => "was cut short, so its receiver drops it",
            Fate::Reordered => "was overtaken",
            Fate::Duplicated => "was duplicated",
        })
    }
}

impl EmulatedLink {
    /// Creates the link of a rule. The shape has passed [`LinkShape::check`].
    pub fn new(fault: Arc<ArmedFault>, shape: LinkShape) -> Self {
        EmulatedLink { fault, shape, free_at: AtomicU64::new(0) }
    }

    /// Returns the rule of the link.
    pub fn fault(&self) -> &ArmedFault {
        &self.fault
    }

    /// Returns true if the link sends nothing.
    pub(super) fn is_stalled(&self) -> bool {
        self.shape.stall
    }

    /// Returns the time until which the link is busy with earlier bytes, or `None` without a rate.
    pub(super) fn free_at(&self) -> Option<Time> {
        self.shape.rate.map(|_| Time(self.free_at.load(Relaxed)))
    }

    /// Returns the number of bytes ready at `ready` that can leave until `until`, at least 1.
    pub(super) fn bytes_between(&self, ready: Time, until: Time) -> usize {
        let Some(rate) = self.shape.rate else { return usize::MAX };
        let begun = Time(self.free_at.load(Relaxed)).max(ready);
        let bits = until.since(begun).as_nanos() * u128::from(rate) / u128::from(NANOS);
        usize::try_from(bits / 8).unwrap_or(usize::MAX).max(1)
    }

    /// Sends bytes that were ready at `ready`. Returns the time at which the last byte has left.
    pub(super) fn send(&self, ready: Time, bytes: usize) -> Time {
        let Some(rate) = self.shape.rate else { return ready };
        let takes = time_of(bytes, rate);
        let leaves = |free: u64| free.max(ready.0).saturating_add(takes);
        let mut free = self.free_at.load(Relaxed);
        loop {
            let new = leaves(free);
            match self.free_at.compare_exchange_weak(free, new, Relaxed, Relaxed) {
                Ok(_) => return Time(new),
                Err(other) => free = other,
            }
        }
    }

    /// Returns the delay of a unit of a QP, jitter included.
    pub(super) fn delay(&self, qp: QpId, unit: u64) -> Duration {
        let LinkShape { delay, jitter, .. } = self.shape;
        if jitter.is_zero() {
            return delay;
        }
        // Jitter is at most a minute, which fits in 36 bits of nanoseconds.
        let most = u64::try_from(jitter.as_nanos()).unwrap_or(u64::MAX);
        delay + Duration::from_nanos(self.draw(qp, unit, Draw::Jitter) % most.saturating_add(1))
    }

    /// Returns what happens to a packet of a QP, and counts it.
    pub(in crate::engine) fn fate(&self, qp: QpId, packet: u64) -> Fate {
        let LinkShape { loss, truncate, reorder, duplicate, .. } = self.shape;
        let chances = [
            (loss, Draw::Loss, Fate::Lost),
            (truncate, Draw::Truncation, Fate::Truncated),
            (reorder, Draw::Order, Fate::Reordered),
            (duplicate, Draw::Copy, Fate::Duplicated),
        ];
        let drawn = |draw| self.draw(qp, packet, draw) % u64::from(LinkShape::WHOLE);
        let found = chances.into_iter().find(|(share, draw, _)| drawn(*draw) < u64::from(*share));
        self.fault.counter.count(found.is_some());
        found.map_or(Fate::Arrives, |(_, _, fate)| fate)
    }

    /// Returns a number that depends only on the seed, the QP, the number of the unit and the
    /// purpose.
    fn draw(&self, qp: QpId, unit: u64, draw: Draw) -> u64 {
        let place = u64::from(qp.0) << 32 | draw as u64;
        [place, unit].into_iter().fold(mix(self.shape.seed), |hash, part| mix(hash ^ part))
    }
}

/// Purpose of a draw.
#[derive(Clone, Copy)]
enum Draw {
    Jitter,
    Loss,
    Truncation,
    Order,
    Copy,
}

/// Returns the time that `bytes` take at this rate, in nanoseconds.
fn time_of(bytes: usize, rate: u64) -> u64 {
    // At most 2^20 bytes are sent at once, so the product fits.
    let bits = (bytes as u64).saturating_mul(8 * NANOS);
    bits.saturating_add(rate / 2) / rate
}

const NANOS: u64 = 1_000_000_000;

/// Mixes the bits of a number (the output function of SplitMix64, Steele et al. 2014).
fn mix(n: u64) -> u64 {
    let n = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(shape: LinkShape) -> EmulatedLink {
        EmulatedLink::new(Arc::new(ArmedFault::of_test("do=link")), shape)
    }

    #[test]
    fn rate_is_exact_and_shared() {
        let gigabit = link(LinkShape { rate: Some(1_000_000_000), ..LinkShape::default() });
        assert_eq!(gigabit.send(Time(1000), 125), Time(2000));
        // The second sender waits for the first.
        assert_eq!(gigabit.send(Time(1500), 125), Time(3000));
        // An idle link saves nothing up.
        assert_eq!(gigabit.send(Time(9000), 1), Time(9008));
        assert_eq!(gigabit.free_at(), Some(Time(9008)));
        let slow = link(LinkShape { rate: Some(LinkShape::MIN_RATE), ..LinkShape::default() });
        assert_eq!(slow.send(Time(0), 1 << 20), Time(8 * (1 << 20) * 1_000_000));
        let odd = link(LinkShape { rate: Some(3_000_000_000), ..LinkShape::default() });
        assert_eq!(odd.send(Time(0), 1), Time(3));
        let unlimited = link(LinkShape::default());
        assert_eq!((unlimited.send(Time(5), 1 << 20), unlimited.free_at()), (Time(5), None));
    }

    #[test]
    fn jitter_is_bounded_and_repeatable() {
        let shape = LinkShape {
            delay: Duration::from_nanos(100),
            jitter: Duration::from_nanos(9),
            ..LinkShape::default()
        };
        let jittery = link(shape);
        let delays: Vec<_> = (0..1000).map(|n| jittery.delay(QpId(7), n).as_nanos()).collect();
        assert_eq!((delays.iter().min(), delays.iter().max()), (Some(&100), Some(&109)));
        let again: Vec<_> = (0..1000).map(|n| jittery.delay(QpId(7), n).as_nanos()).collect();
        assert_eq!(delays, again);
        let reseeded = link(LinkShape { seed: 1, ..shape });
        assert!((0..1000).any(|n| reseeded.delay(QpId(7), n) != jittery.delay(QpId(7), n)));
        assert!((0..1000).any(|n| jittery.delay(QpId(8), n) != jittery.delay(QpId(7), n)));
    }

    #[test]
    fn fates_have_their_shares() {
        let lossy = link(LinkShape {
            loss: 100_000,
            truncate: 100_000,
            reorder: 100_000,
            duplicate: 100_000,
            ..LinkShape::default()
        });
        let fates: Vec<Fate> = (0..10_000).map(|n| lossy.fate(QpId(3), n)).collect();
        for (fate, share) in [
            (Fate::Lost, 1000),
            (Fate::Truncated, 900),
            (Fate::Reordered, 810),
            (Fate::Duplicated, 729),
        ] {
            let n = fates.iter().filter(|f| **f == fate).count() as u64;
            assert!(n.abs_diff(share) < share / 8, "{fate:?}: {n} of {share}");
        }
        let arrived = fates.iter().filter(|f| **f == Fate::Arrives).count() as u64;
        let counter = &lossy.fault.counter;
        assert_eq!((counter.seen(), counter.injected()), (10_000, 10_000 - arrived));
        let certain = link(LinkShape { loss: LinkShape::WHOLE, ..LinkShape::default() });
        assert!((0..1000).all(|n| certain.fate(QpId(3), n) == Fate::Lost));
        let clean = link(LinkShape::default());
        assert!((0..1000).all(|n| clean.fate(QpId(3), n) == Fate::Arrives));
    }
}
