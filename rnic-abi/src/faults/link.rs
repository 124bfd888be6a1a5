//! The shape of an emulated link: the delay, rate and losses of the data that a QP sends.

use std::time::Duration;

use thiserror::Error;

use super::error::FaultError;
use super::trigger::probability;
use super::words::{Words, yes};

/// Shape of a link in one direction. The default has no effect.
///
/// Delay, jitter, rate and stall apply to every QP. Losses apply to datagrams of UD QPs and to
/// messages of UC QPs, which a seed selects by their number, never by time. RC and iWARP QPs ignore
/// losses, because their transport retransmits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkShape {
    /// Time from the sender to the receiver, at most [`MAX_DELAY`](Self::MAX_DELAY).
    pub delay: Duration,
    /// Maximum additional delay, uniformly distributed from 0, at most
    /// [`MAX_DELAY`](Self::MAX_DELAY). The order of a QP's segments does not change.
    pub jitter: Duration,
    /// Bits per second that all QPs with this link send together, at least
    /// [`MIN_RATE`](Self::MIN_RATE). `None` is unlimited.
    pub rate: Option<u64>,
    /// Send nothing. Segments in flight still arrive.
    pub stall: bool,
    /// Lost datagrams and UC messages, in parts per million.
    pub loss: u32,
    /// Datagrams that arrive twice, in parts per million. The receiver of a UC message discards the
    /// second copy.
    pub duplicate: u32,
    /// Datagrams that the next datagram of the QP overtakes, in parts per million. UC drops such a
    /// message, whose packets are out of sequence.
    pub reorder: u32,
    /// Datagrams and UC messages that arrive cut short, in parts per million. Receivers drop them.
    pub truncate: u32,
    /// Seed of jitter and losses.
    pub seed: u64,
}

/// Error of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum LinkShapeError {
    /// The delay or the jitter is too long.
    #[error("delay and jitter of a link must not exceed {} s each", LinkShape::MAX_DELAY.as_secs())]
    Delay,
    /// The rate is too low.
    #[error("the rate of a link must be at least {} bit/s", LinkShape::MIN_RATE)]
    Rate,
    /// A share of lost, duplicated, reordered or truncated packets is too large.
    #[error("loss, duplicate, reorder and truncate of a link must not exceed 1 each")]
    Share,
}

impl LinkShape {
    /// Maximum of [`delay`](Self::delay) and of [`jitter`](Self::jitter).
    pub const MAX_DELAY: Duration = Duration::from_secs(60);
    /// Minimum of [`rate`](Self::rate) in bits per second. A segment of 64 KiB takes 9 minutes.
    pub const MIN_RATE: u64 = 1000;
    /// The share that means all packets, in parts per million.
    pub const WHOLE: u32 = 1_000_000;

    /// Checks the ranges of all fields.
    ///
    /// # Errors
    ///
    /// The first value out of range.
    pub fn check(self) -> Result<(), LinkShapeError> {
        let shares = [self.loss, self.duplicate, self.reorder, self.truncate];
        if self.delay.max(self.jitter) > Self::MAX_DELAY {
            Err(LinkShapeError::Delay)
        } else if self.rate.is_some_and(|rate| rate < Self::MIN_RATE) {
            Err(LinkShapeError::Rate)
        } else if shares.iter().any(|share| *share > Self::WHOLE) {
            Err(LinkShapeError::Share)
        } else {
            Ok(())
        }
    }

    /// Returns true if the shape has an effect only on UC and UD QPs.
    pub fn only_loses_packets(self) -> bool {
        let losses = self.loss | self.duplicate | self.reorder | self.truncate;
        let shapes = !self.delay.is_zero() || !self.jitter.is_zero() || self.rate.is_some();
        losses != 0 && !shapes && !self.stall
    }
}

/// Removes the shape of a link. `seed` is here the seed of the link, because a setting has no
/// trigger.
pub(super) fn link(words: &mut Words) -> Result<LinkShape, FaultError> {
    let share = |share: Option<u32>| share.unwrap_or_default();
    let shape = LinkShape {
        delay: words.time("delay")?.unwrap_or_default(),
        jitter: words.time("jitter")?.unwrap_or_default(),
        rate: words.parse("rate", rate)?,
        stall: words.parse("stall", yes)?.unwrap_or_default(),
        loss: share(words.parse("loss", millionths)?),
        duplicate: share(words.parse("duplicate", millionths)?),
        reorder: share(words.parse("reorder", millionths)?),
        truncate: share(words.parse("truncate", millionths)?),
        seed: words.number("seed", 0, u64::MAX)?.unwrap_or_default(),
    };
    shape.check().map_err(|error| FaultError::Value {
        key: "do".to_owned(),
        value: "link".to_owned(),
        why: error.to_string(),
    })?;
    Ok(shape)
}

/// Parses bits per second: a number with `bit`, `kbit`, `Mbit` or `Gbit`.
fn rate(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = match unit.to_lowercase().as_str() {
        "bit" => Some(1),
        "kbit" => Some(1_000),
        "mbit" => Some(1_000_000),
        "gbit" => Some(1_000_000_000),
        _ => None,
    };
    let rate = number.parse::<u64>().ok().zip(unit).and_then(|(n, unit)| n.checked_mul(unit));
    rate.ok_or_else(|| "needs bits per second, as in 100Mbit (bit, kbit, Mbit, Gbit)".to_owned())
}

/// Parses a share as parts per million.
fn millionths(text: &str) -> Result<u32, String> {
    probability(text).map(|billionths| billionths / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_a_link_shape() {
        let shape = LinkShape::default();
        assert_eq!(shape.check(), Ok(()));
        let most = LinkShape {
            delay: LinkShape::MAX_DELAY,
            jitter: LinkShape::MAX_DELAY,
            rate: Some(LinkShape::MIN_RATE),
            loss: LinkShape::WHOLE,
            duplicate: LinkShape::WHOLE,
            reorder: LinkShape::WHOLE,
            truncate: LinkShape::WHOLE,
            ..LinkShape::default()
        };
        assert_eq!(most.check(), Ok(()));
        let longer = LinkShape::MAX_DELAY + Duration::from_nanos(1);
        for (shape, error) in [
            (LinkShape { delay: longer, ..most }, LinkShapeError::Delay),
            (LinkShape { jitter: longer, ..most }, LinkShapeError::Delay),
            (LinkShape { rate: Some(999), ..most }, LinkShapeError::Rate),
            (LinkShape { loss: 1_000_001, ..most }, LinkShapeError::Share),
            (LinkShape { duplicate: 1_000_001, ..most }, LinkShapeError::Share),
            (LinkShape { reorder: 1_000_001, ..most }, LinkShapeError::Share),
            (LinkShape { truncate: 1_000_001, ..most }, LinkShapeError::Share),
        ] {
            assert_eq!(shape.check(), Err(error));
        }
    }

    #[test]
    fn shapes_without_effect_on_reliable_qps() {
        let lossy = LinkShape { loss: 1, ..LinkShape::default() };
        assert!(lossy.only_loses_packets());
        assert!(!LinkShape::default().only_loses_packets());
        assert!(!LinkShape { stall: true, ..lossy }.only_loses_packets());
        assert!(!LinkShape { delay: Duration::from_nanos(1), ..lossy }.only_loses_packets());
    }
}
