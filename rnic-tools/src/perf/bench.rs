//! A measurement: RDMA and its yardsticks in turn, round by round, in the same two processes.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use rnic_client::Context;

use super::copies::Copies;
use super::end::{End, RemoteMemory, Role};
use super::error::PerfError;
use super::peer::{Peer, relay_program, unexpected};
use super::placement::Placement;
use super::protocol::{Command, Reply};
use super::raw::{RawEnd, TcpMode};
use super::relay::{Relay, RelayPlacement};
use super::spec::{Op, Spec};
use super::stats::{Series, Times};

/// Subject of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The operation over the RNIC.
    Rdma,
    /// The same with the processes pinned to CPUs.
    Placed(Placement),
    /// The same over RC QPs.
    Rc,
    /// RDMA Reads of the same size.
    Reads,
    /// The same messages over a TCP connection between the two processes.
    Tcp(TcpMode),
    /// A ping-pong through a process in the middle.
    Relay(RelayPlacement),
    /// The same bytes, copied by the driver.
    Memcpy,
    /// The CRC32C of the same bytes, computed by the driver.
    Crc,
}

impl Subject {
    /// Returns the parameters of an RNIC subject with its own QPs.
    fn spec(self, spec: &Spec) -> Option<Spec> {
        match self {
            Subject::Rdma => Some(Spec { rc: false, ..spec.clone() }),
            Subject::Rc => Some(Spec { rc: true, ..spec.clone() }),
            Subject::Reads => Some(Spec { op: Op::Read, rc: false, ..spec.clone() }),
            // Uses the QPs of the first subject.
            Subject::Placed(_) => None,
            Subject::Tcp(_) | Subject::Relay(_) | Subject::Memcpy | Subject::Crc => None,
        }
    }
}

/// Length of a round of a subject.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    /// About this time. The warm-up determines the number of messages.
    Time(Duration),
    /// This number of messages or round trips.
    Messages(u64),
}

/// Results of a subject over all rounds.
pub struct Measured {
    /// RDMA or a yardstick.
    pub subject: Subject,
    /// Messages or round trips per round.
    pub count: u64,
    /// Messages per second of each round.
    pub rates: Series,
    /// Median round trip of each round, in microseconds; empty for a stream.
    pub medians_us: Series,
    /// Each round trip of all rounds; empty for a stream.
    pub times: Times,
}

/// The driver's side of a measurement, connected.
pub struct Bench<'a> {
    peer: &'a mut Peer,
    /// PID of the driver's daemon.
    daemon: u32,
    spec: Spec,
    subjects: Vec<Subject>,
    /// The RNIC subjects.
    ends: Vec<Rdma>,
    yardsticks: Yardsticks,
    path: String,
}

/// The resources of the other subjects, where needed.
struct Yardsticks {
    raw: Option<RawEnd>,
    relay: Option<Relay>,
    copies: Option<Copies>,
}

/// The resources of an RNIC subject.
struct Rdma {
    subject: Subject,
    end: End,
    remote: RemoteMemory,
}

impl<'a> Bench<'a> {
    /// Creates both ends of all `subjects`, of which the first must be an RNIC subject.
    pub fn new(
        context: &Context,
        peer: &'a mut Peer,
        spec: &Spec,
        subjects: &[Subject],
    ) -> Result<Self, PerfError> {
        spec.check()?;
        let made = Self::connect(context, peer, spec, subjects);
        match made {
            Ok((ends, yardsticks)) => {
                let first = ends.first().ok_or_else(not_prepared)?;
                let path = first.end.path()?;
                let spec = spec.clone();
                let mut subjects = subjects.to_vec();
                let daemon = context.status()?.pid;
                // Only works for a daemon of the same user that both processes share.
                if path != "direct" || Placement::WithWorkers.pin_workers(daemon).is_err() {
                    subjects.retain(|s| *s != Subject::Placed(Placement::WithWorkers));
                }
                Ok(Bench { peer, daemon, spec, subjects, ends, yardsticks, path })
            }
            Err(e) => Err(peer.explain(e)),
        }
    }

    fn connect(
        context: &Context,
        peer: &mut Peer,
        spec: &Spec,
        subjects: &[Subject],
    ) -> Result<(Vec<Rdma>, Yardsticks), PerfError> {
        let mut ends = Vec::new();
        for &subject in subjects {
            if let Some(spec) = subject.spec(spec) {
                ends.push(Self::link(context, peer, subject, &spec, ends.len())?.0);
            }
        }
        let any = |wanted: fn(&Subject) -> bool| subjects.iter().any(wanted);
        let mut yardsticks = Yardsticks { raw: None, relay: None, copies: None };
        if any(|s| matches!(s, Subject::Tcp(_))) {
            yardsticks.raw = Some(Self::raw_link(peer, spec)?);
        }
        if any(|s| matches!(s, Subject::Relay(_))) {
            let relay = Relay::start(relay_program()?)?;
            peer.command(&Command::RelayLink { memory: relay.memory() })?;
            peer.await_reply(&Reply::Done)?;
            yardsticks.relay = Some(relay);
        }
        if any(|s| matches!(s, Subject::Memcpy | Subject::Crc)) {
            yardsticks.copies = Some(Copies::new(context, spec)?);
        }
        Ok((ends, yardsticks))
    }

    fn raw_link(peer: &mut Peer, spec: &Spec) -> Result<RawEnd, PerfError> {
        peer.command(&Command::RawLink { spec: spec.clone() })?;
        let stream = match peer.reply()? {
            Reply::RawListening { address } => {
                let address = peer.reach(address)?;
                TcpStream::connect(address).map_err(PerfError::io("connecting raw TCP"))?
            }
            other => return Err(unexpected(&other)),
        };
        peer.await_reply(&Reply::Done)?;
        RawEnd::new(stream, spec.clone())
    }

    /// Creates both ends of a subject; the peer's end gets number `n`. Returns the time that
    /// connecting their QPs has taken.
    fn link(
        context: &Context,
        peer: &mut Peer,
        subject: Subject,
        spec: &Spec,
        n: usize,
    ) -> Result<(Rdma, Duration), PerfError> {
        let end = End::new(context, Role::Driver, spec)?;
        let places = if spec.rc { end.places(context)? } else { Vec::new() };
        let sink = end.sink();
        peer.command(&Command::Link { end: n, spec: spec.clone(), sink, places })?;
        let reply = peer.reply()?;
        let start = Instant::now();
        let remote = match reply {
            Reply::Listening { address, source, sink } => {
                end.connect(peer.reach(address)?)?;
                RemoteMemory { source: Some(source), sink }
            }
            Reply::Rc { places, source, sink } => {
                end.wire(context, &places)?;
                RemoteMemory { source: Some(source), sink }
            }
            other => return Err(unexpected(&other)),
        };
        peer.await_reply(&Reply::Done)?;
        Ok((Rdma { subject, end, remote }, start.elapsed()))
    }

    /// Connects the QPs of an additional measurement, one after the other, and destroys them.
    /// Returns connections per second, each established at both ends.
    pub fn connect_more(&mut self, context: &Context, spec: &Spec) -> Result<f64, PerfError> {
        let n = self.ends.len();
        let mut link = |spec: &Spec| Self::link(context, self.peer, Subject::Rdma, spec, n);
        let connected = link(spec).and_then(|(_, spent)| {
            // Creating the next end destroys the peer's QPs.
            link(&Spec { qps: 1, active: 1, ..spec.clone() })?;
            Ok(f64::from(spec.qps) / spent.as_secs_f64())
        });
        connected.map_err(|e| self.peer.explain(e))
    }

    /// Returns the driver's end of the first subject, and the peer's memory that it may access.
    pub fn driver(&mut self) -> Result<(&mut End, &RemoteMemory), PerfError> {
        let first = self.ends.first_mut().ok_or_else(not_prepared)?;
        Ok((&mut first.end, &first.remote))
    }

    /// Returns the path of the connections: `direct` or `tcp`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Warms up, then measures all subjects in turn, `rounds` times. Calls `progress` before each
    /// step.
    pub fn measure(
        &mut self,
        amount: Amount,
        rounds: u32,
        progress: &mut dyn FnMut(Subject, u32),
    ) -> Result<Vec<Measured>, PerfError> {
        let mut all = Vec::new();
        for subject in self.subjects.clone() {
            progress(subject, 0);
            all.push(self.prepare(subject, amount)?);
        }
        for round in 1..=rounds {
            for measured in &mut all {
                progress(measured.subject, round);
                self.round(measured)?;
            }
        }
        Ok(all)
    }

    /// Warms up a subject and determines its number of messages per round.
    pub fn prepare(&mut self, subject: Subject, amount: Amount) -> Result<Measured, PerfError> {
        Ok(Measured {
            subject,
            count: self.warm_up(subject, amount)?,
            rates: Series::default(),
            medians_us: Series::default(),
            times: Times::new(),
        })
    }

    /// Measures another round of a subject.
    pub fn round(&mut self, measured: &mut Measured) -> Result<(), PerfError> {
        let mut times = Times::new();
        let elapsed = self.run(measured.subject, measured.count, &mut times)?;
        measured.rates.push(measured.count as f64 / elapsed.as_secs_f64());
        let percentiles = times.percentiles();
        if percentiles.count > 0 {
            measured.medians_us.push(percentiles.p50_us);
            measured.times.add(&times);
        }
        Ok(())
    }

    /// Runs until warm. Returns the number of messages per round.
    fn warm_up(&mut self, subject: Subject, amount: Amount) -> Result<u64, PerfError> {
        let batch = u64::from(self.spec.batch);
        let (time, most) = match amount {
            Amount::Time(time) => (time, u64::MAX),
            Amount::Messages(count) => (WARM, count.max(1)),
        };
        // Each run is four times as long as the previous one, so that the last one dominates.
        let mut count = batch.min(most);
        let spent = loop {
            let spent = self.run(subject, count, &mut Times::new())?;
            if spent >= time / 4 || count >= most {
                break spent;
            }
            count = count.saturating_mul(4).min(most);
        };
        Ok(match amount {
            Amount::Time(time) => messages_for(time, count, spent).next_multiple_of(batch),
            Amount::Messages(count) => count.max(1).next_multiple_of(batch),
        })
    }

    fn run(
        &mut self,
        subject: Subject,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        let ran = match subject {
            Subject::Rdma | Subject::Rc | Subject::Reads => {
                self.run_rdma(subject, Placement::Free, count, times)
            }
            Subject::Placed(placement) => self.run_rdma(Subject::Rdma, placement, count, times),
            Subject::Tcp(manner) => self.run_tcp(count, manner, times),
            Subject::Relay(placement) => match &mut self.yardsticks.relay {
                Some(relay) => relay.drive(self.peer, placement, count, times),
                None => Err(not_prepared()),
            },
            Subject::Memcpy | Subject::Crc => match &mut self.yardsticks.copies {
                Some(copies) if subject == Subject::Crc => Ok(copies.sum(count)),
                Some(copies) => Ok(copies.copy(count)),
                None => Err(not_prepared()),
            },
        };
        ran.map_err(|e| self.peer.explain(e))
    }

    fn run_rdma(
        &mut self,
        subject: Subject,
        placement: Placement,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        let _pins = (placement.pin_workers(self.daemon)?, placement.pin_driver()?);
        let of = |rdma: &(usize, &mut Rdma)| rdma.1.subject == subject;
        let (end, rdma) = self.ends.iter_mut().enumerate().find(of).ok_or_else(not_prepared)?;
        self.peer.command(&Command::Rdma { end, count, placement })?;
        self.peer.await_reply(&Reply::Ready)?;
        let elapsed = rdma.end.drive(&rdma.remote, count, times)?;
        self.peer.await_reply(&Reply::Done)?;
        Ok(elapsed)
    }

    fn run_tcp(
        &mut self,
        count: u64,
        manner: TcpMode,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        let Some(raw) = &mut self.yardsticks.raw else { return Err(not_prepared()) };
        let _pin = manner.placement.pin_driver()?;
        raw.set_mode(manner)?;
        self.peer.command(&Command::Tcp { count, manner })?;
        self.peer.await_reply(&Reply::Ready)?;
        let elapsed = raw.drive(count, times)?;
        self.peer.await_reply(&Reply::Done)?;
        Ok(elapsed)
    }
}

fn not_prepared() -> PerfError {
    PerfError::Arguments("the subject was not prepared".to_owned())
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
