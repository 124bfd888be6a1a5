//! Copy jobs for the library of a client whose memory the daemon cannot access.
//!
//! Workers and the resource manager share a [`Copier`]: its session and the number of jobs of each
//! worker in progress. Jobs of one worker complete in the order in which they began, so two counts
//! tell when all jobs that began before a given time have ended. A revocation is answered then,
//! because a job no longer looks up its STag.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use arrayvec::ArrayVec;

use super::fault::Unreachable;
use crate::shm::queue::MAX_SGE;
use crate::types::{AtomicOperation, SessionId};

pub use crate::abi::copies::MAX_COPY;

/// A copier, as far as it is shared.
#[derive(Debug)]
pub struct Copier {
    session: SessionId,
    /// Counts of jobs, by worker number.
    jobs: Box<[JobCount]>,
    /// Somebody waits for jobs to end.
    watched: AtomicBool,
    /// It is being ended: nobody waits for its jobs.
    ended: AtomicBool,
}

#[derive(Debug, Default)]
struct JobCount {
    begun: AtomicU64,
    over: AtomicU64,
}

/// Jobs begun at some moment, by worker.
#[derive(Clone, Debug)]
pub struct Mark(Vec<u64>);

impl Copier {
    /// The copier of a session, for so many workers.
    pub fn new(session: SessionId, workers: u32) -> Arc<Self> {
        Arc::new(Copier {
            session,
            jobs: (0..workers).map(|_| JobCount::default()).collect(),
            watched: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        })
    }

    /// Whose memory it reaches.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// A job of this worker begins.
    pub(crate) fn begin(&self, worker: u32) {
        if let Some(jobs) = self.jobs.get(worker as usize) {
            jobs.begun.fetch_add(1, SeqCst);
        }
    }

    /// A job of this worker is over.
    pub(crate) fn over(&self, worker: u32) {
        if let Some(jobs) = self.jobs.get(worker as usize) {
            jobs.over.fetch_add(1, SeqCst);
        }
    }

    /// Jobs of this worker that are under way.
    pub(crate) fn under_way(&self, worker: u32) -> u64 {
        let jobs = self.jobs.get(worker as usize);
        // Those that have begun are counted by the worker itself, which asks.
        jobs.map_or(0, |jobs| jobs.begun.load(SeqCst).saturating_sub(jobs.over.load(SeqCst)))
    }

    /// Whether somebody waits for jobs to end, and is to be told when some are. Asked after they
    /// are counted: the pair of [`mark`](Self::mark).
    pub fn is_watched(&self) -> bool {
        self.watched.load(SeqCst)
    }

    /// The jobs begun by now; from here on somebody waits for them. What ends after this is told:
    /// either the worker's count is seen by [`has_passed`](Self::has_passed), which is asked
    /// afterwards, or the worker sees that it is watched.
    pub fn mark(&self) -> Mark {
        self.watched.store(true, SeqCst);
        Mark(self.jobs.iter().map(|jobs| jobs.begun.load(SeqCst)).collect())
    }

    /// Whether all jobs begun before are over, or will never touch a living session's memory.
    pub fn has_passed(&self, mark: &Mark) -> bool {
        let over = self.jobs.iter().zip(&mark.0).all(|(jobs, m)| jobs.over.load(SeqCst) >= *m);
        over || self.ended.load(SeqCst)
    }

    /// Nobody waits any more.
    pub fn unwatch(&self) {
        self.watched.store(false, SeqCst);
    }

    /// It is being ended with its session.
    pub fn end(&self) {
        self.ended.store(true, SeqCst);
    }
}

/// Ranges of addresses, in order.
pub type Pieces = ArrayVec<(u64, u32), MAX_SGE>;

/// A copy for a copier to make.
#[derive(Debug)]
pub struct CopyJob {
    /// Its number, unique among those of its worker.
    pub id: u64,
    /// The copier that is to carry it out.
    pub copier: Arc<Copier>,
    /// Where in the address space.
    pub pieces: Pieces,
    /// Whether bytes are read from the client's memory or written to it, and which.
    pub direction: Direction,
}

/// Direction of a copy.
#[derive(Debug)]
pub enum Direction {
    /// Out of the address space: the answer brings the bytes of all pieces.
    Out,
    /// Into the address space: a write to the client's memory.
    In {
        /// Bytes for all pieces, one after the other; as many as the pieces have together.
        bytes: Vec<u8>,
        /// The last bytes become visible last.
        tail_last: bool,
    },
    /// A change of the word that is the only piece: the answer brings what was there before, in the
    /// order of the host.
    Update(AtomicOperation),
}

/// What came of a job: the bytes of [`Direction::Out`] and [`Direction::Update`], none of
/// [`Direction::In`].
pub type CopyResult = Result<Vec<u8>, Unreachable>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_passed_when_every_worker_has_ended_what_it_had_begun() {
        let copier = Copier::new(SessionId(1), 2);
        assert!(!copier.is_watched());
        let before = copier.mark();
        assert!(copier.is_watched() && copier.has_passed(&before));
        copier.unwatch();
        assert!(!copier.is_watched());
        copier.begin(0);
        copier.begin(1);
        let mark = copier.mark();
        copier.begin(1);
        assert!(copier.has_passed(&before) && !copier.has_passed(&mark));
        copier.over(1);
        assert!(!copier.has_passed(&mark));
        copier.over(0);
        assert!(copier.has_passed(&mark));
        let mark = copier.mark();
        assert!(!copier.has_passed(&mark));
        copier.end();
        assert!(copier.has_passed(&mark));
    }
}
