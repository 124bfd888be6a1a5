//! Waiting for completions and for words in memory, in the three ways that are compared.

use std::time::{Duration, Instant};

use rnic_client::{Arm, Completion, CompletionChannel, Context, Cq, Mr};

use super::error::PerfError;
use super::machine::cpus;
use super::spec::Wait;

/// A CQ, how its completions are awaited, and those that were taken last.
pub struct Completions {
    cq: Cq,
    channel: CompletionChannel,
    wait: Wait,
    cpus: usize,
    /// It was armed for a sleep that was not needed: its event is still to come.
    stray: bool,
    taken: Box<[Completion]>,
}

impl Completions {
    /// A CQ of at least `entries` entries.
    pub fn new(context: &Context, entries: u32, wait: Wait) -> Result<Self, PerfError> {
        let channel = context.create_completion_channel()?;
        let cq = context.create_cq(entries, Some(&channel))?;
        let taken = vec![Completion::default(); TAKE].into();
        Ok(Completions { cq, channel, wait, cpus: cpus(), stray: false, taken })
    }

    pub fn cq(&self) -> &Cq {
        &self.cq
    }

    /// At least one completion. A failed request is an error.
    #[inline]
    pub fn next(&mut self) -> Result<&[Completion], PerfError> {
        let n = match self.wait {
            Wait::Polled => {
                let (cq, taken) = (&self.cq, &mut self.taken);
                look(self.cpus, || {
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

    /// As event-driven programs do: arm, look once more, sleep (`ibv_get_cq_event(3)`).
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
            // Without a deadline that is one system call. A peer that is gone ends its connection,
            // which completes what is posted.
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

/// Waits until the word at `offset` is `wanted`, as the peer of a Write does.
pub fn await_word(mr: &Mr, offset: u64, wanted: u64) -> Result<(), PerfError> {
    look(cpus(), || Ok((mr.load_u64(offset)? == wanted).then_some(())))
}

/// Looks until there is something, with yields but no sleep between.
#[inline]
pub fn look<T>(
    cpus: usize,
    mut find: impl FnMut() -> Result<Option<T>, PerfError>,
) -> Result<T, PerfError> {
    let mut spins = if cpus > LOOKERS { SPINS } else { 0 };
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

/// Looks in a row before the first yield, as many as in `Cq::wait`.
const SPINS: u32 = 100;
/// The two ends and a worker look for work: on no more CPUs than these, a spin only keeps one of
/// them from running.
const LOOKERS: usize = 3;
/// Completions taken at once.
const TAKE: usize = 64;
/// How long nothing may happen.
const PATIENCE: Duration = Duration::from_secs(120);
