//! A load of GETs and PUTs over several connections, with every value checked.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rnic_client::Context;

use super::{Client, KvError};
use crate::latency::Latencies;

/// Parameters of the load.
#[derive(Clone, Copy, Debug)]
pub struct Bench {
    /// Address of the server.
    pub server: SocketAddr,
    /// Number of connections, one thread each.
    pub connections: u32,
    /// Number of different keys.
    pub keys: u64,
    /// Value size in bytes, at least [`Bench::MIN_VALUE`].
    pub value: u32,
    /// Percentage of GETs; the other operations are PUTs.
    pub gets: u8,
    /// Duration of the load, excluding the time to fill the table.
    pub duration: Duration,
    /// Time limit for a reply from the server.
    pub patience: Duration,
}

/// Results of the GETs or the PUTs.
#[derive(Clone, Debug, Default)]
pub struct Operations {
    /// Latencies of the operations.
    pub latencies: Latencies,
    /// Total bytes of the values.
    pub bytes: u64,
}

/// Results of a load.
#[derive(Clone, Debug, Default)]
pub struct BenchReport {
    /// All GETs of the load.
    pub gets: Operations,
    /// All PUTs after the table was filled.
    pub puts: Operations,
    /// Number of Reads that found a torn slot and were repeated.
    pub torn: u64,
    /// Time from the first operation to the last.
    pub elapsed: Duration,
}

impl Bench {
    /// Minimum size of a value, which contains the number of its key and of its PUT.
    pub const MIN_VALUE: u32 = 16;

    /// Fills the table, then runs the load. Calls `progress` from time to time with the elapsed
    /// share of the duration. The first error ends all connections.
    pub fn run(
        &self,
        context: &Context,
        mut progress: impl FnMut(f64),
    ) -> Result<BenchReport, KvError> {
        let mut first = Client::connect(context, self.server, self.patience)?;
        for key in 0..self.keys {
            if let Err(e) = first.put(&name(key), &self.make_value(key, 0)) {
                first.close();
                return Err(e);
            }
        }
        let mut clients = vec![first];
        for _ in 1..self.connections {
            clients.push(Client::connect(context, self.server, self.patience)?);
        }
        let stop = AtomicBool::new(false);
        let puts = AtomicU64::new(1);
        let start = Instant::now();
        let outcomes: Vec<(Result<BenchReport, KvError>, Client)> = std::thread::scope(|scope| {
            let threads: Vec<_> = clients
                .into_iter()
                .zip(1..)
                .map(|(mut client, seed)| {
                    let stop = &stop;
                    let puts = &puts;
                    scope.spawn(move || {
                        let outcome = self.one(&mut client, seed, start, stop, puts);
                        stop.fetch_or(outcome.is_err(), Ordering::Relaxed);
                        (outcome, client)
                    })
                })
                .collect();
            while start.elapsed() < self.duration && !stop.load(Ordering::Relaxed) {
                progress(start.elapsed().as_secs_f64() / self.duration.as_secs_f64());
                std::thread::sleep(
                    PROGRESS_INTERVAL.min(self.duration.saturating_sub(start.elapsed())),
                );
            }
            threads
                .into_iter()
                .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let mut sum = BenchReport { elapsed: start.elapsed(), ..BenchReport::default() };
        let mut failure = None;
        for (outcome, client) in outcomes {
            sum.torn += client.torn();
            client.close();
            let one = match outcome {
                Ok(one) => one,
                Err(e) => {
                    failure.get_or_insert(e);
                    continue;
                }
            };
            sum.gets.add(&one.gets);
            sum.puts.add(&one.puts);
        }
        match failure {
            Some(e) => Err(e),
            None => Ok(sum),
        }
    }

    /// Runs the operations of one connection.
    fn one(
        &self,
        client: &mut Client,
        seed: u64,
        start: Instant,
        stop: &AtomicBool,
        puts: &AtomicU64,
    ) -> Result<BenchReport, KvError> {
        let mut report = BenchReport::default();
        let mut random = Random(seed);
        let mut now = Instant::now();
        while now.duration_since(start) < self.duration && !stop.load(Ordering::Relaxed) {
            let key = random.next() % self.keys;
            let operations = if random.next() % 100 < u64::from(self.gets) {
                let found = client.get(&name(key))?;
                let value = found.map(|found| found.value);
                self.check(key, value.as_deref())?;
                &mut report.gets
            } else {
                let put = puts.fetch_add(1, Ordering::Relaxed);
                client.put(&name(key), &self.make_value(key, put))?;
                &mut report.puts
            };
            let then = std::mem::replace(&mut now, Instant::now());
            operations.latencies.record(now.duration_since(then));
            operations.bytes += u64::from(self.value);
        }
        Ok(report)
    }

    /// Returns the value that only this PUT of this key writes.
    fn make_value(&self, key: u64, put: u64) -> Vec<u8> {
        let mut random = Random(key ^ put.rotate_left(32));
        let mut value = Vec::with_capacity(self.value as usize + 8);
        value.extend(key.to_le_bytes());
        value.extend(put.to_le_bytes());
        while value.len() < self.value as usize {
            value.extend(random.next().to_le_bytes());
        }
        value.truncate(self.value as usize);
        value
    }

    fn check(&self, key: u64, value: Option<&[u8]>) -> Result<(), KvError> {
        let wrong = |why: String| {
            let key = String::from_utf8_lossy(&name(key)).into_owned();
            Err(KvError::Wrong { key, why })
        };
        let Some(value) = value else { return wrong("it does not exist".to_owned()) };
        match value.split_at_checked(8).and_then(|(_, rest)| rest.first_chunk()) {
            Some(put) if self.make_value(key, u64::from_le_bytes(*put)) == value => Ok(()),
            _ => wrong(format!("no PUT has written these {} bytes", value.len())),
        }
    }
}

impl Operations {
    fn add(&mut self, other: &Operations) {
        self.latencies.merge(&other.latencies);
        self.bytes += other.bytes;
    }
}

/// Returns the key with this number.
fn name(key: u64) -> Vec<u8> {
    format!("bench-{key:08}").into_bytes()
}

/// splitmix64: good enough to choose keys and to distinguish values.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
}

/// Interval of calls to `progress`.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    fn bench(value: u32) -> Bench {
        Bench {
            server: ([127, 0, 0, 1], 1).into(),
            connections: 1,
            keys: 10,
            value,
            gets: 50,
            duration: Duration::ZERO,
            patience: Duration::ZERO,
        }
    }

    #[test]
    fn a_value_is_only_right_for_its_own_key_and_put() {
        for size in [16, 17, 100] {
            let b = bench(size);
            let value = b.make_value(3, 9);
            assert_eq!(value.len(), size as usize);
            assert!(b.check(3, Some(&value)).is_ok());
            assert!(b.check(4, Some(&value)).is_err());
            assert!(b.check(3, Some(&value[1..])).is_err());
            assert!(b.check(3, Some(&[])).is_err());
            assert!(b.check(3, None).is_err());
        }
        let b = bench(64);
        let mut mixed = b.make_value(3, 9);
        mixed[32..].copy_from_slice(&b.make_value(3, 10)[32..]);
        assert!(b.check(3, Some(&mixed)).is_err());
    }
}
