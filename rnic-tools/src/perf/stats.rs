//! Medians and percentiles.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// A result for each round, in the order measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Series {
    /// The results, one per round.
    pub rounds: Vec<f64>,
}

impl Series {
    /// Adds the result of a round.
    pub fn push(&mut self, figure: f64) {
        self.rounds.push(figure);
    }

    /// Returns the median, or `None` before the first round.
    pub fn median(&self) -> Option<f64> {
        let mut sorted = self.rounds.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => None,
            n if n % 2 == 1 => Some(sorted[middle]),
            _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
        }
    }

    /// Returns the results multiplied by `by`.
    #[must_use]
    pub fn scaled(&self, by: f64) -> Self {
        Series { rounds: self.rounds.iter().map(|x| x * by).collect() }
    }

    /// Returns the smallest result, or `None` before the first round.
    pub fn lowest(&self) -> Option<f64> {
        self.rounds.iter().copied().min_by(f64::total_cmp)
    }

    /// Returns the largest result, or `None` before the first round.
    pub fn highest(&self) -> Option<f64> {
        self.rounds.iter().copied().max_by(f64::total_cmp)
    }
}

/// Histogram of operation times, with three digits.
#[derive(Clone, Debug)]
pub struct Times {
    nanoseconds: Histogram<u64>,
}

/// Summary of many times, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Number of times.
    pub count: u64,
    /// Mean of all times.
    pub mean_us: f64,
    /// Half of the times are below.
    pub p50_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
    /// 99.9th percentile in microseconds.
    pub p999_us: f64,
    /// The longest time.
    pub max_us: f64,
}

impl Percentiles {
    /// Returns the summary with all times multiplied by `by`.
    #[must_use]
    pub fn scaled(self, by: f64) -> Self {
        Percentiles {
            count: self.count,
            mean_us: self.mean_us * by,
            p50_us: self.p50_us * by,
            p99_us: self.p99_us * by,
            p999_us: self.p999_us * by,
            max_us: self.max_us * by,
        }
    }
}

impl Times {
    /// Creates an empty histogram.
    pub fn new() -> Self {
        let nanoseconds = Histogram::new_with_bounds(1, LONGEST_NS, 3);
        // Fails only for bounds in the wrong order or more than five digits.
        Times { nanoseconds: nanoseconds.expect("bounds and digits are valid constants") }
    }

    /// Adds a time. A time above a minute counts as a minute.
    #[inline]
    pub fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.saturating_record(ns.clamp(1, LONGEST_NS));
    }

    /// Adds all times of another histogram.
    pub fn add(&mut self, other: &Times) {
        // Fails only if the bounds differ.
        self.nanoseconds.add(&other.nanoseconds).expect("histograms have the same bounds");
    }

    /// Returns the summary.
    pub fn percentiles(&self) -> Percentiles {
        let at = |q| self.nanoseconds.value_at_quantile(q) as f64 / 1e3;
        if self.nanoseconds.is_empty() {
            return Percentiles::default();
        }
        Percentiles {
            count: self.nanoseconds.len(),
            mean_us: self.nanoseconds.mean() / 1e3,
            p50_us: at(0.5),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: self.nanoseconds.max() as f64 / 1e3,
        }
    }
}

impl Default for Times {
    fn default() -> Self {
        Times::new()
    }
}

/// Nanoseconds in a minute, the longest time.
const LONGEST_NS: u64 = 60_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn series(rounds: &[f64]) -> Series {
        Series { rounds: rounds.to_vec() }
    }

    #[test]
    fn median_of_an_odd_and_an_even_number_of_rounds() {
        assert_eq!(series(&[]).median(), None);
        assert_eq!(series(&[3.0]).median(), Some(3.0));
        assert_eq!(series(&[9.0, 1.0, 2.0]).median(), Some(2.0));
        assert_eq!(series(&[9.0, 1.0, 2.0, 4.0]).median(), Some(3.0));
    }

    #[test]
    fn the_median_ignores_a_bad_round() {
        let s = series(&[10.0, 11.0, 0.1, 10.5, 10.2]);
        assert_eq!(s.median(), Some(10.2));
        assert_eq!((s.lowest(), s.highest()), (Some(0.1), Some(11.0)));
    }

    #[test]
    fn percentiles_are_those_of_the_times() {
        let mut times = Times::new();
        for us in 1..=1000 {
            times.record(Duration::from_micros(us));
        }
        let p = times.percentiles();
        let close = |a: f64, b: f64| (a - b).abs() <= b * 0.002;
        assert_eq!(p.count, 1000);
        assert!(close(p.mean_us, 500.5), "{p:?}");
        assert!(close(p.p50_us, 500.0), "{p:?}");
        assert!(close(p.p99_us, 990.0), "{p:?}");
        assert!(close(p.p999_us, 999.0), "{p:?}");
        assert!(close(p.max_us, 1000.0), "{p:?}");
    }

    #[test]
    fn times_beyond_the_bounds_are_clamped() {
        let mut times = Times::new();
        times.record(Duration::ZERO);
        times.record(Duration::MAX);
        let p = times.percentiles();
        assert_eq!(p.count, 2);
        assert!(p.max_us >= 60e6 * 0.999, "{p:?}");
    }

    #[test]
    fn added_times_count_together() {
        let mut a = Times::new();
        let mut b = Times::new();
        a.record(Duration::from_micros(10));
        b.record(Duration::from_micros(30));
        a.add(&b);
        assert_eq!(a.percentiles().count, 2);
        assert_eq!(Times::new().percentiles(), Percentiles::default());
    }
}
