//! Two sessions that bounce a message, to see what others do to its time.

use std::path::Path;
use std::time::{Duration, Instant};

use rnic_client::{
    AcceptOptions, Completion, ConnectOptions, Context, Cq, Qp, QpOptions, RecvRequest, SendRequest,
};

use crate::{DEADLINE, Daemon};

/// A ping-pong of one thread over two sessions.
pub struct Pinger {
    ends: [(Qp, Cq); 2],
    _contexts: [Context; 2],
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
        let contexts = [(); 2].map(|()| Context::open_at(socket).expect("the daemon answers"));
        let ends = [0, 1].map(|n| {
            let pd = contexts[n].open_pd(None).expect("a domain");
            let cq = contexts[n].create_cq(16, None).expect("a queue");
            let qp = pd.create_qp(&QpOptions::new(&cq)).expect("a QP");
            (qp, cq)
        });
        let listener = contexts[1].listen(([127, 0, 0, 1], 0).into(), 1).expect("an address");
        let options = ConnectOptions::default();
        ends[0].0.start_connect(listener.local_addr(), &options).expect("a connection");
        let request = listener.accept_request(Some(DEADLINE)).expect("its request");
        request.accept(&ends[1].0, &AcceptOptions::default()).expect("accepted");
        ends[0].0.wait_connected(Some(DEADLINE)).expect("connected");
        Pinger { ends, _contexts: contexts }
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

    /// There and back.
    fn round(&self) {
        for (from, to) in [(0, 1), (1, 0)] {
            let (qp, cq) = &self.ends[to];
            qp.post_recv(&[RecvRequest::new(0, &[])]).expect("room");
            let ping = SendRequest::send_inline(1, b"");
            self.ends[from].0.post_send(&[ping]).expect("room");
            let mut one = [Completion::default()];
            assert_eq!(cq.wait(&mut one, Some(DEADLINE)).expect("the daemon lives"), 1);
            one[0].ok().expect("delivered");
        }
    }
}
