//! Two sessions that bounce a message, to measure how other clients affect its latency.

use std::path::Path;
use std::time::{Duration, Instant};

use rnic_client::{Context, Qp, RecvRequest, SendRequest};

use crate::{Client, Daemon};

/// A single-threaded ping-pong between two sessions.
pub struct Pinger {
    ends: [(Client, Qp); 2],
}

impl Pinger {
    /// Connects two sessions.
    ///
    /// # Panics
    ///
    /// If the daemon refuses a request.
    pub fn new(daemon: &Daemon) -> Self {
        Pinger::at(daemon.socket())
    }

    /// Connects two sessions at the daemon with this socket.
    ///
    /// # Panics
    ///
    /// If the daemon refuses a request.
    pub fn at(socket: &Path) -> Self {
        let ends = [(); 2].map(|()| {
            let client = Client::of(&Context::open_at(socket).expect("the daemon answers"));
            let qp = client.qp();
            (client, qp)
        });
        let [(_, active), (passive, accepted)] = &ends;
        passive.join(active, accepted);
        Pinger { ends }
    }

    /// Returns the median time of `rounds` round trips.
    ///
    /// # Panics
    ///
    /// If a message is not delivered.
    pub fn median(&self, rounds: usize) -> Duration {
        let mut times: Vec<Duration> = (0..rounds)
            .map(|_| {
                let began = Instant::now();
                self.round();
                began.elapsed()
            })
            .collect();
        times.sort();
        times[rounds / 2]
    }

    /// Returns the number of round trips per second, measured for `time`.
    ///
    /// # Panics
    ///
    /// If a message is not delivered.
    pub fn rate(&self, time: Duration) -> f64 {
        let began = Instant::now();
        let mut rounds = 0;
        while began.elapsed() < time {
            self.round();
            rounds += 1;
        }
        f64::from(rounds) / began.elapsed().as_secs_f64()
    }

    /// Runs `n` round trips.
    ///
    /// # Panics
    ///
    /// If a message is not delivered.
    pub fn rounds(&self, n: u64) {
        (0..n).for_each(|_| self.round());
    }

    /// Sends a message there and back.
    fn round(&self) {
        for (from, to) in [(0, 1), (1, 0)] {
            let (client, qp) = &self.ends[to];
            qp.post_recv(&[RecvRequest::new(0, &[])]).expect("room in the queue");
            let ping = SendRequest::send_inline(1, b"");
            self.ends[from].1.post_send(&[ping]).expect("room in the queue");
            client.success();
        }
    }
}
