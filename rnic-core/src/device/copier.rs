//! Copy jobs for client memory that the daemon cannot access. The client's library executes them.
//!
//! Workers and the resource manager share a [`Copier`], which contains the session and, for each
//! worker, two counts of jobs: begun and completed. Jobs of one worker complete in the order in
//! which they began, so these counts show when all jobs begun before a given time have ended. A
//! revocation is acknowledged only then, because a job does not look up its STag again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use arrayvec::ArrayVec;

use super::fault::Unreachable;
use rnic_abi::shm::queue::MAX_SGE;
use rnic_abi::types::{AtomicOperation, SessionId};

pub use rnic_abi::abi::copies::MAX_COPY;

/// State shared by the workers and the resource manager.
#[derive(Debug)]
pub struct Copier {
    session: SessionId,
    /// Counts of jobs, by worker number.
    jobs: Box<[JobCount]>,
    /// Set while a caller of [`Copier::mark`] waits for jobs to end.
    watched: AtomicBool,
    /// Set when the session ends. No caller waits for its jobs after that.
    ended: AtomicBool,
}

#[derive(Debug, Default)]
struct JobCount {
    begun: AtomicU64,
    over: AtomicU64,
}

/// Number of jobs begun by each worker at some moment.
#[derive(Clone, Debug)]
pub struct Mark(Vec<u64>);

impl Copier {
    /// Creates the copier of a session, for this number of workers.
    pub fn new(session: SessionId, workers: u32) -> Arc<Self> {
        Arc::new(Copier {
            session,
            jobs: (0..workers).map(|_| JobCount::default()).collect(),
            watched: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        })
    }

    /// Returns the session that owns the memory.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// Counts a new job of this worker.
    pub(crate) fn begin(&self, worker: u32) {
        if let Some(jobs) = self.jobs.get(worker as usize) {
            jobs.begun.fetch_add(1, SeqCst);
        }
    }

    /// Counts a completed job of this worker.
    pub(crate) fn over(&self, worker: u32) {
        if let Some(jobs) = self.jobs.get(worker as usize) {
            jobs.over.fetch_add(1, SeqCst);
        }
    }

    /// Returns the number of this worker's jobs in progress.
    pub(crate) fn under_way(&self, worker: u32) -> u64 {
        let jobs = self.jobs.get(worker as usize);
        // Called by the worker itself, so no job begins between the two loads.
        jobs.map_or(0, |jobs| jobs.begun.load(SeqCst).saturating_sub(jobs.over.load(SeqCst)))
    }

    /// Returns true if a caller waits for jobs to end and must be notified. Must be called after
    /// counting the completed jobs, see [`mark`](Self::mark).
    pub fn is_watched(&self) -> bool {
        self.watched.load(SeqCst)
    }

    /// Returns the numbers of jobs begun so far, and declares that the caller waits for these jobs.
    /// The caller learns of every job that ends later: either its next call of
    /// [`has_passed`](Self::has_passed) sees the worker's count, or the worker sees that the copier
    /// is watched.
    pub fn mark(&self) -> Mark {
        self.watched.store(true, SeqCst);
        Mark(self.jobs.iter().map(|jobs| jobs.begun.load(SeqCst)).collect())
    }

    /// Returns true if all jobs before the mark have ended, or the session has ended.
    pub fn has_passed(&self, mark: &Mark) -> bool {
        let over = self.jobs.iter().zip(&mark.0).all(|(jobs, m)| jobs.over.load(SeqCst) >= *m);
        over || self.ended.load(SeqCst)
    }

    /// Declares that the caller no longer waits.
    pub fn unwatch(&self) {
        self.watched.store(false, SeqCst);
    }

    /// Ends the copier with its session.
    pub fn end(&self) {
        self.ended.store(true, SeqCst);
    }
}

/// Address ranges, in order: start and length in bytes.
pub type Pieces = ArrayVec<(u64, u32), MAX_SGE>;

/// A copy job for a copier.
#[derive(Debug)]
pub struct CopyJob {
    /// Job number, unique for its worker.
    pub id: u64,
    /// The copier that executes the job.
    pub copier: Arc<Copier>,
    /// Ranges in the client's address space.
    pub pieces: Pieces,
    /// Operation and its data.
    pub direction: Direction,
}

/// Operation of a copy job.
#[derive(Debug)]
pub enum Direction {
    /// Copies out of the address space. The result contains the bytes of all pieces.
    Out,
    /// Copies into the address space, that is, writes to the client's memory.
    In {
        /// Bytes for all pieces, in order.
        bytes: Vec<u8>,
        /// True if the last bytes must become visible last.
        tail_last: bool,
    },
    /// Applies an atomic operation to the only piece, a word. The result is the old value in host
    /// byte order.
    Update(AtomicOperation),
}

/// Result of a job: the bytes for [`Direction::Out`] and [`Direction::Update`], empty for
/// [`Direction::In`].
pub type CopyResult = Result<Vec<u8>, Unreachable>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_passed_when_all_jobs_have_ended() {
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
