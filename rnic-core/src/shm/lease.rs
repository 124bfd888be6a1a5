//! Memory that is lent out as slices, and that the daemon may touch only while nobody has one.
//!
//! A slice promises that nobody else writes. For memory shared with the daemon that takes three
//! things, each of which a type stands for:
//!
//! * No other access in this process: a [`Lendable`] owns its mapping, and gives out ranges that do
//!   not overlap, each as a [`Lease`].
//! * No request that names the range while the slice can be had: whoever posts one gives the lease
//!   away ([`Lease::lend`]) and keeps a [`Loan`], which gives access to nothing.
//! * The lease comes back only when the daemon is done with that request: [`Loan::reclaim`] takes a
//!   [`Done`], which only
//!   [`CompletionConsumer::poll_loan`](super::queue::CompletionConsumer::poll_loan) makes, of a
//!   completion that has the loan's own number. Numbers are used once in a process.
//!
//! What is left to the caller, `rnic-client`: that the region has no rights for peers, that no
//! other request names it, and that no other request has a loan's number. The daemon is trusted to
//! touch nothing that it was not asked to, as a kernel would be.
//!
//! Nothing depends on a destructor: what is forgotten, or never completes, stays taken for as long
//! as the memory exists.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::mm::Advice;

use super::mapping::Mapping;

/// The high 12 bits of a `wr_id` that is the number of a loan.
const MARK: u64 = 0x1EA;
const MARK_SHIFT: u32 = 52;

/// Whether a request of this `wr_id` could be taken for one that has memory on loan.
#[inline]
pub fn is_loan(wr_id: u64) -> bool {
    wr_id >> MARK_SHIFT == MARK
}

/// Memory that nobody in this process reaches but by a lease.
#[derive(Debug)]
pub struct Lendable {
    mapping: Mapping,
    /// Ranges that are leased or on loan: start and end, in bytes from the mapping's start.
    taken: Mutex<BTreeMap<usize, usize>>,
}

impl Lendable {
    /// Takes over memory that nobody else has a handle of; gives it back otherwise.
    pub fn new(mapping: Arc<Mapping>) -> Result<Arc<Self>, Arc<Mapping>> {
        let mapping = Arc::try_unwrap(mapping)?;
        // A child made by `fork` could write what its parent has a slice of. Where the kernel will
        // not see to that, whoever forks has to: it takes `unsafe` code anyway.
        let _ = mapping.advise(Advice::LinuxDontFork);
        Ok(Arc::new(Lendable { mapping, taken: Mutex::new(BTreeMap::new()) }))
    }

    /// Bytes of the memory, at least 1.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Never: it has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Leases `len` bytes at `offset`, at least one; `None` if they do not lie within or one of
    /// them is taken.
    pub fn lease(self: &Arc<Self>, offset: usize, len: usize) -> Option<Lease> {
        self.mapping.range(offset, len).filter(|_| len > 0)?;
        // Within the mapping, so it cannot overflow.
        let end = offset + len;
        let mut taken = self.taken.lock();
        if taken.range(..end).next_back().is_some_and(|(_, before)| *before > offset) {
            return None;
        }
        taken.insert(offset, end);
        Some(Lease { memory: self.clone(), offset, len })
    }
}

/// A range that is its owner's alone, as a slice. Dropping it gives it back.
pub struct Lease {
    memory: Arc<Lendable>,
    offset: usize,
    len: usize,
}

impl Lease {
    /// Bytes from the start of the memory.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// For a request of this number, which may be shown to the daemon from now on.
    pub fn lend(self, number: LoanNumber) -> Loan {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, so this takes its only owned part out of it.
        let memory = unsafe { std::ptr::read(&this.memory) };
        Loan { memory, offset: this.offset, len: this.len, number }
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: the range was checked when it was leased.
        unsafe { self.memory.mapping.base().add(self.offset) }
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies within the mapping, which `self` keeps; nobody else in this
        // process has it, since leased ranges do not overlap and the mapping is not reachable
        // otherwise; the daemon has no request that names it, as the module explains.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.memory.taken.lock().remove(&self.offset);
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("offset", &self.offset).field("len", &self.len).finish()
    }
}

/// The number of one loan, which no other has.
#[derive(Debug, PartialEq, Eq)]
pub struct LoanNumber(u64);

impl LoanNumber {
    /// The next one; `None` after 2^52, which takes a hundred years at a million a second.
    pub fn next() -> Option<Self> {
        // Process-wide, because what it must differ from is: completions of all sessions.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        (n >> MARK_SHIFT == 0).then_some(LoanNumber(MARK << MARK_SHIFT | n))
    }

    /// As the request has it.
    pub fn wr_id(&self) -> u64 {
        self.0
    }
}

/// A range that a posted request names. Dropping it does not give it back.
#[derive(Debug)]
pub struct Loan {
    memory: Arc<Lendable>,
    offset: usize,
    len: usize,
    number: LoanNumber,
}

impl Loan {
    /// The lease again, if it is this request that is done.
    pub fn reclaim(self, done: Done) -> Result<Lease, Loan> {
        if done.0 != self.number.0 {
            return Err(self);
        }
        let Loan { memory, offset, len, .. } = self;
        Ok(Lease { memory, offset, len })
    }
}

/// That a request with memory on loan is done: read from a completion queue.
#[derive(Debug, PartialEq, Eq)]
pub struct Done(u64);

impl Done {
    /// What a completion that was just read says.
    #[inline]
    pub(super) fn read(wr_id: u64) -> Option<Self> {
        is_loan(wr_id).then_some(Done(wr_id))
    }

    /// The request's number.
    pub fn wr_id(&self) -> u64 {
        self.0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn lendable() -> Arc<Lendable> {
        let (mapping, _fd) = Mapping::create_shared_buffer(8192).expect("a little memory");
        Lendable::new(mapping).expect("nobody else has it")
    }

    #[test]
    fn leased_ranges_do_not_overlap_and_come_back() {
        let memory = lendable();
        let mut lease = memory.lease(100, 50).expect("free");
        assert_eq!((lease.offset(), lease.len(), memory.len()), (100, 50, 8192));
        lease.fill(7);
        for (offset, len) in [(100, 50), (149, 1), (99, 2), (0, 8192), (120, 5), (100, 1)] {
            assert!(memory.lease(offset, len).is_none(), "{len} at {offset}");
        }
        let (before, behind) = (memory.lease(0, 100), memory.lease(150, 8042));
        assert!(before.as_ref().is_some_and(|l| l.iter().all(|b| *b == 0)));
        drop((before, behind, lease));
        assert!(memory.lease(0, 8192).is_some_and(|all| all[99..151].ends_with(&[7, 0])));
        for (offset, len) in [(0, 0), (8192, 0), (8192, 1), (1, 8192), (usize::MAX, 2)] {
            assert!(memory.lease(offset, len).is_none(), "{len} at {offset}");
        }
    }

    #[test]
    fn only_memory_that_nobody_else_has_is_lent() {
        let (mapping, _fd) = Mapping::create_shared_buffer(4096).expect("a little memory");
        let other = mapping.clone();
        let mapping = Lendable::new(mapping).expect_err("there is another owner");
        drop(other);
        assert!(Lendable::new(mapping).is_ok());
    }

    #[test]
    fn a_loan_ends_by_its_own_completion_only_and_stays_taken_otherwise() {
        let memory = lendable();
        let (one, other) = (LoanNumber::next().expect("few"), LoanNumber::next().expect("few"));
        assert_ne!(one, other);
        assert!(is_loan(one.wr_id()) && !is_loan(0) && !is_loan(u64::MAX));
        let (done, wrong) = (Done::read(one.wr_id()), Done::read(other.wr_id()));
        let loan = memory.lease(0, 4096).expect("free").lend(one);
        assert!(memory.lease(4095, 1).is_none(), "on loan");
        let loan = loan.reclaim(wrong.expect("a loan's")).expect_err("of another request");
        let lease = loan.reclaim(done.expect("a loan's")).expect("its own");
        assert_eq!(lease.len(), 4096);
        drop(lease);
        let lost = memory.lease(0, 1).expect("it came back").lend(other);
        drop(lost);
        assert!(memory.lease(0, 1).is_none(), "nobody knows what the daemon does to it");
        assert_eq!(Done::read(7), None);
    }
}
