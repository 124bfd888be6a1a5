//! Two sessions that bounce a message, to see what others do to its time.

use std::path::Path;
use std::time::{Duration, Instant};

use rnic_client::{Context, Qp, RecvRequest, SendRequest};

use crate::{Client, Daemon};

/// A ping-pong of one thread over two sessions.
pub struct Pinger {
    ends: [(Client, Qp); 2],
}

impl Pinger {
    /// Connects the two.
    ///
    /// # Panics
    ///
    /// If the daemon does not let it.
    pub fn new(daemon: &Daemon) -> Self {
        Pinger::at(daemon.socket())
    }

    /// Connects the two at the daemon that serves this socket.
    ///
    /// # Panics
    ///
    /// If the daemon does not let it.
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

    /// Median time of a round trip, of so many.
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

    /// Round trips per second, of as many as begin in this time.
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

    /// So many round trips.
    ///
    /// # Panics
    ///
    /// If a message is not delivered.
    pub fn rounds(&self, n: u64) {
        (0..n).for_each(|_| self.round());
    }

    /// There and back.
    fn round(&self) {
        for (from, to) in [(0, 1), (1, 0)] {
            let (client, qp) = &self.ends[to];
            qp.post_recv(&[RecvRequest::new(0, &[])]).expect("room");
            let ping = SendRequest::send_inline(1, b"");
            self.ends[from].1.post_send(&[ping]).expect("room");
            client.success();
        }
    }
}
