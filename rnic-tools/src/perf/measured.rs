//! Rounds of a measurement.

use std::time::Duration;

use super::error::PerfError;
use super::stats::{Series, Times};

/// Length of a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// About this time. The warm-up determines the number of messages.
    Time(Duration),
    /// This number of messages or round trips.
    Messages(u64),
}

/// Results of all rounds.
#[derive(Debug, Default)]
pub struct Measured {
    /// Messages or round trips per round.
    pub count: u64,
    /// Messages per second of each round.
    pub rates: Series,
    /// Median round trip of each round, in microseconds; empty for a stream.
    pub medians_us: Series,
    /// Each round trip of all rounds; empty for a stream.
    pub times: Times,
}

/// Runs a number of messages or round trips, and records the times of round trips.
pub type Run<'a> = dyn FnMut(u64, &mut Times) -> Result<Duration, PerfError> + 'a;

impl Measured {
    /// Warms up and determines the number of messages per round, a multiple of `batch`.
    pub fn prepare(amount: Amount, batch: u32, run: &mut Run<'_>) -> Result<Self, PerfError> {
        let batch = u64::from(batch);
        let (time, most) = match amount {
            Amount::Time(time) => (time, u64::MAX),
            Amount::Messages(count) => (WARM, count.max(1)),
        };
        // Each run is four times as long as the previous run, so that the last run dominates.
        let mut count = batch.min(most);
        let spent = loop {
            let spent = run(count, &mut Times::new())?;
            if spent >= time / 4 || count >= most {
                break spent;
            }
            count = count.saturating_mul(4).min(most);
        };
        let count = match amount {
            Amount::Time(time) => messages_for(time, count, spent),
            Amount::Messages(count) => count.max(1),
        };
        Ok(Measured { count: count.next_multiple_of(batch), ..Measured::default() })
    }

    /// Measures another round.
    pub fn round(&mut self, run: &mut Run<'_>) -> Result<(), PerfError> {
        let mut times = Times::new();
        let elapsed = run(self.count, &mut times)?;
        self.rates.push(self.count as f64 / elapsed.as_secs_f64());
        let percentiles = times.percentiles();
        if percentiles.count > 0 {
            self.medians_us.push(percentiles.p50_us);
            self.times.add(&times);
        }
        Ok(())
    }
}

/// Returns the number of messages that takes about `time` if `count` messages took `spent`.
fn messages_for(time: Duration, count: u64, spent: Duration) -> u64 {
    let per_message = spent.as_secs_f64().max(1e-9) / count.max(1) as f64;
    ((time.as_secs_f64() / per_message) as u64).max(1)
}

/// Longest warm-up of a measurement with a given number of messages.
const WARM: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_has_as_many_messages_as_fit_its_time() {
        let ms = Duration::from_millis;
        assert_eq!(messages_for(ms(500), 1000, ms(100)), 5000);
        assert_eq!(messages_for(ms(1), 1, ms(100)), 1);
        assert!(messages_for(ms(500), 1, Duration::ZERO) > 1000);
    }
}
