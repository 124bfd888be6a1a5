//! Three ways of waiting for completions, and polling for a value in memory.

use std::time::{Duration, Instant};

use rnic_client::{Arm, Completion, CompletionChannel, Context, Cq, Mr};

use super::error::PerfError;
use super::machine::cpus;
use super::spec::Wait;

/// A CQ, its way of waiting, and the completions polled last.
pub struct Completions {
    cq: Cq,
    channel: CompletionChannel,
    wait: Wait,
    cpus: usize,
    /// The CQ was armed without a sleep, so one event must be skipped.
    stray: bool,
    taken: Box<[Completion]>,
}

impl Completions {
    /// Creates a CQ with at least `entries` entries.
    pub fn new(context: &Context, entries: u32, wait: Wait) -> Result<Self, PerfError> {
        let channel = context.create_completion_channel()?;
        let cq = context.create_cq(entries, Some(&channel))?;
        let taken = vec![Completion::default(); TAKE].into();
        Ok(Completions { cq, channel, wait, cpus: cpus(), stray: false, taken })
    }

    /// Returns the CQ.
    pub fn cq(&self) -> &Cq {
        &self.cq
    }

    /// Waits for at least one completion. A failed request is an error.
    #[inline]
    pub fn wait(&mut self) -> Result<&[Completion], PerfError> {
        let n = match self.wait {
            Wait::Polled => {
                let cq = &self.cq;
                let taken = &mut self.taken;
                poll_until(self.cpus, || {
                    let n = cq.poll(taken)?;
                    Ok((n > 0).then_some(n))
                })?
            }
            Wait::Event => self.sleep()?,
            Wait::Adaptive => self.cq.wait(&mut self.taken, Some(PATIENCE))?,
        };
        match n {
            0 => Err(stuck("completion")),
            n => self.checked(n),
        }
    }

    /// Waits as event-driven programs do: arm, poll again, sleep (`ibv_get_cq_event(3)`).
    fn sleep(&mut self) -> Result<usize, PerfError> {
        loop {
            let n = self.cq.poll(&mut self.taken)?;
            if n > 0 {
                return Ok(n);
            }
            if std::mem::take(&mut self.stray) {
                self.channel.recv(Some(Duration::ZERO))?;
            }
            self.cq.arm(Arm::Next)?;
            let n = self.cq.poll(&mut self.taken)?;
            if n > 0 {
                self.stray = true;
                return Ok(n);
            }
            // Without a deadline this is a single system call. If the peer exits, the connection
            // ends, which completes the posted requests.
            self.channel.recv(None)?;
        }
    }

    fn checked(&self, n: usize) -> Result<&[Completion], PerfError> {
        let taken = &self.taken[..n];
        for completion in taken {
            completion.ok()?;
        }
        Ok(taken)
    }
}

/// Polls until the word at `offset` is `wanted`, like the peer of a Write.
pub fn await_word(mr: &Mr, offset: u64, wanted: u64) -> Result<(), PerfError> {
    poll_until(cpus(), || Ok((mr.load_u64(offset)? == wanted).then_some(())))
}

/// Calls `find` until it returns a value, with yields but without sleeping.
#[inline]
pub fn poll_until<T>(
    cpus: usize,
    mut find: impl FnMut() -> Result<Option<T>, PerfError>,
) -> Result<T, PerfError> {
    let mut spins = if cpus > POLLERS { SPINS } else { 0 };
    let start = Instant::now();
    loop {
        if let Some(found) = find()? {
            return Ok(found);
        }
        if spins > 0 {
            spins -= 1;
            std::hint::spin_loop();
        } else if start.elapsed() < PATIENCE {
            std::thread::yield_now();
        } else {
            return Err(stuck("message"));
        }
    }
}

fn stuck(what: &'static str) -> PerfError {
    PerfError::Stuck { what, seconds: PATIENCE.as_secs() }
}

/// Number of polls before the first yield, as in `Cq::wait`.
const SPINS: u32 = 100;
/// Number of threads that poll: the two ends and a worker. With no more CPUs than this, spinning
/// only keeps another thread from running.
const POLLERS: usize = 3;
/// Maximum number of completions per poll.
const TAKE: usize = 64;
/// Time after which a wait fails.
const PATIENCE: Duration = Duration::from_secs(120);
