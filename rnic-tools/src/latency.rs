//! Latencies of many operations, and their percentiles.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;

/// Histogram of times from 1 ns to 100 s with three significant digits. Longer times count as
/// 100 s.
#[derive(Clone, Debug)]
pub struct Latencies {
    nanoseconds: Histogram<u64>,
}

impl Latencies {
    /// Creates an empty histogram.
    pub fn new() -> Self {
        let nanoseconds = Histogram::new_with_bounds(1, LONGEST, 3)
            .expect("the histogram supports 1 to 10^11 in 3 digits");
        Latencies { nanoseconds }
    }

    /// Adds the time of an operation.
    pub fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(LONGEST);
        self.nanoseconds.saturating_record(ns.clamp(1, LONGEST));
    }

    /// Adds all times of another histogram.
    pub fn merge(&mut self, other: &Latencies) {
        self.nanoseconds.add(&other.nanoseconds).expect("all have the same bounds");
    }

    /// Returns the number of times.
    pub fn count(&self) -> u64 {
        self.nanoseconds.len()
    }

    /// Returns the quantile for a share from 0 to 1, in microseconds.
    pub fn quantile_us(&self, share: f64) -> f64 {
        self.nanoseconds.value_at_quantile(share) as f64 / 1e3
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

/// One line: `min 1.0  p50 1.2  p90 1.5  p99 2.0  p99.9 9.0  max 20.1  mean 1.3 us`.
impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanoseconds.is_empty() {
            return f.write_str("none");
        }
        write!(f, "min {:.1}", self.nanoseconds.min() as f64 / 1e3)?;
        for (name, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)] {
            write!(f, "  {name} {:.1}", self.quantile_us(share))?;
        }
        let max = self.nanoseconds.max() as f64 / 1e3;
        write!(f, "  max {max:.1}  mean {:.1} us", self.nanoseconds.mean() / 1e3)
    }
}

/// Nanoseconds in 100 seconds.
const LONGEST: u64 = 100_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_match_the_recorded_times() {
        let mut one = Latencies::new();
        (1..=500).for_each(|us| one.record(Duration::from_micros(us)));
        let mut two = Latencies::new();
        (501..=1000).for_each(|us| two.record(Duration::from_micros(us)));
        one.merge(&two);
        assert_eq!(one.count(), 1000);
        assert!((one.quantile_us(0.5) - 500.0).abs() < 1.0);
        assert!((one.quantile_us(0.99) - 990.0).abs() < 2.0);
        assert!(one.to_string().starts_with("min 1.0  p50 500."), "{one}");
    }

    #[test]
    fn the_longest_time_is_counted_not_lost() {
        let mut l = Latencies::new();
        l.record(Duration::MAX);
        l.record(Duration::ZERO);
        assert_eq!(l.count(), 2);
        assert_eq!(Latencies::new().to_string(), "none");
    }
}
