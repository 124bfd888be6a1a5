//! A measurement of RDMA and its yardsticks, all in the same two processes and in every round.

use std::hint::black_box;
use std::time::Duration;

use rnic_client::Context;
use rnic_tools::perf::PerfError;
use rnic_tools::perf::copies::Copies;
use rnic_tools::perf::driver::{Link, TcpLink};
use rnic_tools::perf::measured::{Amount, Measured};
use rnic_tools::perf::peer::Peer;
use rnic_tools::perf::raw::TcpMode;
use rnic_tools::perf::spec::{Op, Spec};
use rnic_tools::perf::stats::Times;

use crate::placement::Placement;
use crate::relay::{Relay, RelayPlacement};

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
    Tcp {
        /// Both ends poll and never sleep.
        polled: bool,
        /// Placement of both processes.
        placement: Placement,
    },
    /// A ping-pong through a process in the middle.
    Relay(RelayPlacement),
    /// The same bytes, copied by the driver.
    Memcpy,
    /// The CRC32C of the same bytes, computed by the driver.
    Crc,
}

impl Subject {
    /// Raw TCP with blocking calls, placed by the scheduler.
    pub const TCP: Subject = Subject::Tcp { polled: false, placement: Placement::Free };

    /// Returns the parameters of an RNIC subject with its own QPs.
    fn spec(self, spec: &Spec) -> Option<Spec> {
        match self {
            Subject::Rdma => Some(Spec { rc: false, ..spec.clone() }),
            Subject::Rc => Some(Spec { rc: true, ..spec.clone() }),
            Subject::Reads => Some(Spec { op: Op::Read, rc: false, ..spec.clone() }),
            // Uses the QPs of the first subject.
            Subject::Placed(_) => None,
            Subject::Tcp { .. } | Subject::Relay(_) | Subject::Memcpy | Subject::Crc => None,
        }
    }
}

/// The driver's side of a measurement, connected.
pub struct Bench<'a> {
    peer: &'a mut Peer,
    /// PID of the driver's daemon.
    daemon: u32,
    batch: u32,
    subjects: Vec<Subject>,
    /// The RNIC subjects.
    links: Vec<(Subject, Link)>,
    yardsticks: Yardsticks,
    path: String,
}

/// Resources for the other subjects, as needed.
#[derive(Default)]
struct Yardsticks {
    tcp: Option<TcpLink>,
    relay: Option<Relay>,
    copies: Option<Copies>,
}

impl<'a> Bench<'a> {
    /// Creates both ends of all `subjects`, of which the first must be an RNIC subject.
    pub fn new(
        context: &Context,
        peer: &'a mut Peer,
        spec: &Spec,
        subjects: &[Subject],
    ) -> Result<Self, PerfError> {
        let mut links = Vec::new();
        for &subject in subjects {
            if let Some(spec) = subject.spec(spec) {
                links.push((subject, Link::new(context, peer, &spec, links.len())?));
            }
        }
        let made = Self::yardsticks(context, peer, spec, subjects);
        let yardsticks = made.map_err(|e| peer.explain(e))?;
        let path = links.first().ok_or_else(not_prepared)?.1.end.path()?;
        let daemon = context.status()?.pid;
        let mut subjects = subjects.to_vec();
        // Only works for a daemon of the same user that both processes share.
        if path != "direct" || Placement::WithWorkers.pin_workers(daemon).is_err() {
            subjects.retain(|s| *s != Subject::Placed(Placement::WithWorkers));
        }
        Ok(Bench { peer, daemon, batch: spec.batch, subjects, links, yardsticks, path })
    }

    fn yardsticks(
        context: &Context,
        peer: &mut Peer,
        spec: &Spec,
        subjects: &[Subject],
    ) -> Result<Yardsticks, PerfError> {
        let any = |wanted: fn(&Subject) -> bool| subjects.iter().any(wanted);
        let mut yardsticks = Yardsticks::default();
        if any(|s| matches!(s, Subject::Tcp { .. })) {
            yardsticks.tcp = Some(TcpLink::new(peer, spec)?);
        }
        if any(|s| matches!(s, Subject::Relay(_))) {
            yardsticks.relay = Some(Relay::start()?);
        }
        if any(|s| matches!(s, Subject::Memcpy | Subject::Crc)) {
            yardsticks.copies = Some(Copies::new(context, spec)?);
        }
        Ok(yardsticks)
    }

    /// Returns the path of the connections: `direct` or `tcp`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Warms up, then measures all subjects in each of `rounds` rounds. Calls `progress` before
    /// each step.
    pub fn measure(
        &mut self,
        amount: Amount,
        rounds: u32,
        progress: &mut dyn FnMut(Subject, u32),
    ) -> Result<Vec<(Subject, Measured)>, PerfError> {
        let mut all = Vec::new();
        for subject in self.subjects.clone() {
            progress(subject, 0);
            let batch = self.batch;
            let mut run = |count, times: &mut Times| self.run(subject, count, times);
            let measured = Measured::prepare(amount, batch, &mut run);
            all.push((subject, measured.map_err(|e| self.peer.explain(e))?));
        }
        for round in 1..=rounds {
            for (subject, measured) in &mut all {
                progress(*subject, round);
                let run = measured.round(&mut |count, times| self.run(*subject, count, times));
                run.map_err(|e| self.peer.explain(e))?;
            }
        }
        Ok(all)
    }

    fn run(
        &mut self,
        subject: Subject,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        let yardsticks = &mut self.yardsticks;
        match subject {
            Subject::Rdma | Subject::Rc | Subject::Reads => {
                self.run_rdma(subject, Placement::Free, count, times)
            }
            Subject::Placed(placement) => self.run_rdma(Subject::Rdma, placement, count, times),
            Subject::Tcp { polled, placement } => {
                let tcp = yardsticks.tcp.as_mut().ok_or_else(not_prepared)?;
                let mode = match (polled, placement) {
                    (false, _) => TcpMode::Blocking,
                    (true, Placement::Apart) => TcpMode::Spinning,
                    (true, _) => TcpMode::Yielding,
                };
                let _pins = (placement.pin_driver()?, placement.pin_peer(self.peer.pid())?);
                tcp.run(self.peer, mode, count, times)
            }
            Subject::Relay(placement) => {
                let relay = yardsticks.relay.as_mut().ok_or_else(not_prepared)?;
                relay.drive(placement, count, times)
            }
            Subject::Memcpy => Ok(yardsticks.copies.as_mut().ok_or_else(not_prepared)?.copy(count)),
            Subject::Crc => {
                let copies = yardsticks.copies.as_ref().ok_or_else(not_prepared)?;
                Ok(copies.read(count, |message| {
                    black_box(crc32c::crc32c(message));
                }))
            }
        }
    }

    fn run_rdma(
        &mut self,
        subject: Subject,
        placement: Placement,
        count: u64,
        times: &mut Times,
    ) -> Result<Duration, PerfError> {
        let _pins = (
            placement.pin_workers(self.daemon)?,
            placement.pin_driver()?,
            placement.pin_peer(self.peer.pid())?,
        );
        let link = self.links.iter_mut().find(|(of, _)| *of == subject).ok_or_else(not_prepared)?;
        link.1.run(self.peer, count, times)
    }
}

fn not_prepared() -> PerfError {
    PerfError::Arguments("the subject was not prepared".to_owned())
}
