//! A worker's copy queues, one per session. The client's library performs the copies.
//!
//! The worker wakes the library's thread if it sleeps. If threads that poll a CQ performed the last
//! copies, the worker waits for [`GRACE`] first, which usually saves the wake-up.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rnic_abi::shm::queue::{CopyOutcome, CopyProducer, CopyTask, QueueFault};
use rnic_abi::types::{SessionId, Time};
use rnic_core::device::Copier;
use rnic_core::device::copier::{CopyJob, CopyResult, Direction, MAX_COPY};
use rnic_core::device::memory::Unreachable;

/// The copy queue of one session.
#[derive(Debug)]
struct Queue {
    copier: Arc<Copier>,
    producer: CopyProducer,
    /// Ids and results of published jobs, oldest first.
    sent: VecDeque<(u64, JobOutput)>,
    /// Jobs that wait for room in the queue.
    unsent: VecDeque<CopyJob>,
    /// Time before the library's thread is woken for a new job.
    grace: Duration,
    /// Time at which the library's thread is woken, if it sleeps.
    wake_at: Option<Time>,
    /// The library has written an invalid index. Its jobs then stay unanswered until the session
    /// has ended, because each answer may end a QP, and the engine ends a session's QPs in batches.
    broken: bool,
}

/// Result of a completed job.
#[derive(Clone, Copy, Debug)]
enum JobOutput {
    /// Number of bytes to read from the queue entry.
    Bytes(usize),
    /// Original value of an atomic operation.
    Word,
}

/// The queues of all sessions.
#[derive(Debug, Default)]
pub(super) struct CopyQueues {
    of: HashMap<SessionId, Queue>,
    /// Sessions with unanswered jobs, in the order of the next polls.
    busy: VecDeque<SessionId>,
}

/// Result of a poll.
#[derive(Default)]
pub(super) struct Polled {
    pub answers: Vec<Answer>,
    /// Sessions with an invalid index, written by their library.
    pub faults: Vec<(SessionId, QueueFault)>,
    /// Jobs were completed or published; more may follow.
    pub worked: bool,
}

/// Result of a job, with the id of the job.
pub(super) type Answer = (Arc<Copier>, u64, CopyResult);

impl CopyQueues {
    pub(super) fn add(&mut self, copier: Arc<Copier>, producer: CopyProducer) {
        let session = copier.session();
        let queue = Queue {
            copier,
            producer,
            sent: VecDeque::new(),
            unsent: VecDeque::new(),
            grace: Duration::ZERO,
            wake_at: None,
            broken: false,
        };
        self.of.insert(session, queue);
    }

    /// Removes a session's queue. Returns failures for its unanswered jobs.
    pub(super) fn remove(&mut self, session: SessionId) -> Vec<Answer> {
        self.busy.retain(|s| *s != session);
        self.of.remove(&session).map_or(Vec::new(), |mut queue| queue.give_up())
    }

    /// Submits a job. Returns its failure if the session has no queue.
    pub(super) fn submit(&mut self, job: CopyJob, now: Time) -> Option<Answer> {
        let session = job.copier.session();
        let Some(queue) = self.of.get_mut(&session) else {
            return Some((job.copier.clone(), job.id, Err(Unreachable::Detached)));
        };
        if queue.is_idle() {
            self.busy.push_back(session);
        }
        queue.unsent.push_back(job);
        if !queue.broken {
            let mut of_one = MAX_COPY;
            queue.flush(now, &mut of_one);
        }
        None
    }

    /// Returns true if jobs are unanswered.
    pub(super) fn is_busy(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Takes completed jobs and publishes waiting ones, for at most [`SESSIONS_PER_POLL`] sessions
    /// and about [`BYTES`] bytes.
    pub(super) fn poll(&mut self, now: Time) -> Polled {
        let mut polled = Polled::default();
        let mut budget = BYTES;
        for _ in 0..self.busy.len().min(SESSIONS_PER_POLL) {
            let Some(session) = self.busy.pop_front() else { break };
            let Some(queue) = self.of.get_mut(&session) else { continue };
            if let Err(fault) = queue.poll(now, &mut budget, &mut polled.answers) {
                queue.broken = true;
                polled.faults.push((session, fault));
                continue;
            }
            if !queue.is_idle() {
                self.busy.push_back(session);
            }
            if budget == 0 {
                break;
            }
        }
        polled.worked = budget < BYTES || !polled.answers.is_empty();
        polled
    }

    /// Returns the number of [polls](Self::poll) that poll every busy session at least once, if no
    /// session has a result.
    pub(super) fn rounds(&self) -> usize {
        self.busy.len().div_ceil(SESSIONS_PER_POLL)
    }

    /// Wakes all threads that still have a grace period, because the worker is about to sleep.
    pub(super) fn wake_all(&mut self) {
        for session in &self.busy {
            // Threads without a grace period have been woken already.
            if let Some(queue) = self.of.get_mut(session).filter(|queue| queue.wake_at.is_some()) {
                queue.wake();
            }
        }
    }
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.sent.is_empty() && self.unsent.is_empty()
    }

    /// Returns failures for all unanswered jobs.
    fn give_up(&mut self) -> Vec<Answer> {
        let unsent = self.unsent.drain(..).map(|job| job.id);
        let left = self.sent.drain(..).map(|(id, _)| id).chain(unsent);
        left.map(|id| (self.copier.clone(), id, Err(Unreachable::Detached))).collect()
    }

    /// Publishes jobs while the queue has room and the budget lasts.
    fn flush(&mut self, now: Time, budget: &mut usize) {
        while *budget > 0
            && let Some(job) = self.unsent.front()
        {
            let len = job.pieces.iter().map(|(_, len)| *len as usize).sum();
            let (task, output) = match &job.direction {
                Direction::Out => (CopyTask::Out, JobOutput::Bytes(len)),
                Direction::In { bytes, tail_last } => {
                    (CopyTask::In { bytes, tail_last: *tail_last }, JobOutput::Bytes(0))
                }
                Direction::Update(operation) => (CopyTask::Update(*operation), JobOutput::Word),
            };
            if !self.producer.push(&job.pieces, task) {
                return;
            }
            if let Direction::In { bytes, .. } = &job.direction {
                *budget = budget.saturating_sub(bytes.len());
            }
            self.sent.push_back((job.id, output));
            self.unsent.pop_front();
            if self.grace.is_zero() {
                self.wake();
            } else if self.wake_at.is_none() {
                self.wake_at = Some(now.after(self.grace));
            }
        }
    }

    fn wake(&mut self) {
        self.wake_at = None;
        if self.producer.sleeps() {
            self.producer.wake();
        }
    }

    fn poll(
        &mut self,
        now: Time,
        budget: &mut usize,
        answers: &mut Vec<Answer>,
    ) -> Result<(), QueueFault> {
        let before = answers.len();
        while *budget > 0
            && let Some(outcome) = self.producer.poll()?
        {
            let Some((id, output)) = self.sent.pop_front() else { break };
            self.grace = if outcome.by_poller { GRACE } else { Duration::ZERO };
            if let JobOutput::Bytes(len) = output {
                *budget = budget.saturating_sub(len);
            }
            answers.push((self.copier.clone(), id, self.result(&outcome, output)));
            self.producer.retire();
        }
        if answers.len() > before {
            // The thread that performed these copies is awake and takes the next jobs, too.
            self.wake_at = (!self.sent.is_empty()).then(|| now.after(self.grace));
        }
        self.flush(now, budget);
        if self.wake_at.is_some_and(|at| at <= now) {
            self.wake();
        }
        Ok(())
    }

    fn result(&self, outcome: &CopyOutcome, output: JobOutput) -> CopyResult {
        match output {
            _ if !outcome.copied => Err(Unreachable::Unmapped),
            JobOutput::Word => Ok(outcome.old.to_ne_bytes().to_vec()),
            JobOutput::Bytes(len) => {
                let mut bytes = vec![0; len];
                self.producer.read(outcome, &mut bytes);
                Ok(bytes)
            }
        }
    }
}

/// Maximum number of sessions in a poll.
const SESSIONS_PER_POLL: usize = 16;

/// Number of bytes after which a poll ends.
const BYTES: usize = 2 * MAX_COPY;

/// Grace period for programs that poll a CQ.
const GRACE: Duration = Duration::from_micros(30);

#[cfg(test)]
mod tests {
    use rnic_abi::abi::copies::COPY_ENTRIES;
    use rnic_abi::abi::queue::{QueueKind, QueueShape, queue_header};
    use rnic_abi::shm::Mapping;
    use rnic_abi::shm::queue::{CopyConsumer, QueueMemory};

    use super::*;

    /// Adds a session. Returns the consumer side of its queue.
    fn session(queues: &mut CopyQueues, id: u32) -> (Arc<Copier>, CopyConsumer) {
        let shape = QueueShape::copies();
        let (arena, _) =
            Mapping::create_arena("copies", shape.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena, 0, QueueKind::Copies, shape, 0, 0).expect("fits");
        let copier = Copier::new(SessionId(id), 1);
        queues.add(copier.clone(), CopyProducer::new(queue.clone()));
        (copier, CopyConsumer::new(queue, Arc::default()))
    }

    #[test]
    fn one_call_moves_a_bounded_number_of_bytes() {
        let mut queues = CopyQueues::default();
        let now = Time::default();
        let mut program = vec![7; MAX_COPY];
        let at = program.as_mut_ptr().expose_provenance() as u64;
        let sessions = [1, 2, 3].map(|id| session(&mut queues, id));
        let into = |id| id % 2 == 1;
        for (copier, _) in &sessions {
            for id in 0..2 * u64::from(COPY_ENTRIES) {
                let direction = if into(id) {
                    Direction::In { bytes: vec![7; MAX_COPY], tail_last: false }
                } else {
                    Direction::Out
                };
                let pieces = [(at, MAX_COPY as u32)].into_iter().collect();
                let job = CopyJob { copier: copier.clone(), id, pieces, direction };
                assert!(queues.submit(job, now).is_none());
            }
        }
        let mut answered = [0u64; 3];
        while queues.is_busy() {
            for (_, library) in &sessions {
                while library.serve() {}
            }
            let polled = queues.poll(now);
            assert!(polled.faults.is_empty());
            let mut brought = 0;
            for (copier, id, result) in polled.answers {
                let of = &mut answered[copier.session().0 as usize - 1];
                assert_eq!(id, *of, "in order");
                *of += 1;
                let bytes = result.expect("a completed copy");
                assert_eq!(bytes.len(), if into(id) { 0 } else { MAX_COPY });
                brought += bytes.len();
            }
            assert!(brought <= BYTES, "{brought} bytes");
            let least = answered.iter().min();
            let most = answered.iter().max();
            let apart = most.expect("three sessions") - least.expect("three sessions");
            assert!(apart <= COPY_ENTRIES.into(), "in turns: {answered:?}");
        }
        assert_eq!(answered, [2 * u64::from(COPY_ENTRIES); 3]);
        assert!(!queues.poll(now).worked);
        drop(program);
    }

    /// An answer may end a QP, and the engine ends the QPs of a session in batches.
    #[test]
    fn jobs_of_a_broken_queue_wait_for_the_end() {
        let mut queues = CopyQueues::default();
        let now = Time::default();
        let shape = QueueShape::copies();
        let (arena, _) =
            Mapping::create_arena("copies", shape.bytes()).expect("memory for the arena");
        let queue = QueueMemory::format(arena.clone(), 0, QueueKind::Copies, shape, 0, 0);
        let copier = Copier::new(SessionId(1), 1);
        queues.add(copier.clone(), CopyProducer::new(queue.expect("fits")));
        let job = |id| {
            let copier = copier.clone();
            let pieces = [(4096, 8)].into_iter().collect();
            CopyJob { copier, id, pieces, direction: Direction::Out }
        };
        assert!(queues.submit(job(0), now).is_none());
        arena.write(queue_header::CONSUMER, &77u32.to_ne_bytes()).expect("within the arena");
        let polled = queues.poll(now);
        assert!(polled.answers.is_empty());
        assert_eq!(polled.faults.len(), 1);
        assert!(queues.submit(job(1), now).is_none());
        let polled = queues.poll(now);
        assert!(polled.answers.is_empty() && polled.faults.is_empty());
        let left = queues.remove(SessionId(1));
        let ids: Vec<_> = left.iter().map(|(_, id, _)| *id).collect();
        assert_eq!(ids, [0, 1]);
        assert!(!queues.is_busy());
    }
}
