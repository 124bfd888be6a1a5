//! Shared memory lent out as slices. The daemon may access it only while no slice exists.
//!
//! A slice requires that nothing else writes to the memory. For memory shared with the daemon there
//! are three conditions, each represented by a type:
//!
//! * No other access in this process: a [`Lendable`] owns its mapping, and hands out ranges that do
//!   not overlap, each as a [`Lease`].
//! * No request that uses the range while a slice may exist: a caller that posts a request gives
//!   up the lease ([`Lease::lend`]) and keeps a [`Loan`], which allows no access.
//! * A lease is returned only after the daemon has completed that request: [`Loan::reclaim`] takes
//!   a [`Done`], which only
//!   [`CompletionConsumer::poll_loan`](super::queue::CompletionConsumer::poll_loan) creates, from a
//!   completion that has the number of this loan. A number is used only once in a process.
//!
//! The caller, `rnic-client`, must ensure that the region has no rights for peers, that no other
//! request uses it, and that no other request has the number of a loan. The daemon is trusted, as a
//! kernel would be, to access only the memory of a request.
//!
//! Nothing depends on a destructor: a range that is forgotten, or whose request never completes,
//! stays taken while the memory exists.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::mm::Advice;

use super::mapping::Mapping;

/// The high 12 bits of a `wr_id` that is a loan number.
const MARK: u64 = 0x1EA;
const MARK_SHIFT: u32 = 52;

/// Returns true if `wr_id` has the form of a loan number.
#[inline]
pub fn is_loan(wr_id: u64) -> bool {
    wr_id >> MARK_SHIFT == MARK
}

/// Memory that this process accesses only through leases.
#[derive(Debug)]
pub struct Lendable {
    mapping: Mapping,
    /// Ranges that are leased or on loan: start and end offset, in bytes.
    taken: Mutex<BTreeMap<usize, usize>>,
}

impl Lendable {
    /// Takes over a mapping. Returns the mapping as an error if it has another owner.
    pub fn new(mapping: Arc<Mapping>) -> Result<Arc<Self>, Arc<Mapping>> {
        let mapping = Arc::try_unwrap(mapping)?;
        // A child created by `fork` could write to memory while its parent has a slice of it. If
        // the kernel does not support the advice, the caller of `fork`, which is `unsafe`, must
        // prevent that.
        let _ = mapping.advise(Advice::LinuxDontFork);
        Ok(Arc::new(Lendable { mapping, taken: Mutex::new(BTreeMap::new()) }))
    }

    /// Returns the size of the memory in bytes, at least 1.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Returns false: the memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Leases `len` bytes at `offset`. Returns `None` if `len` is 0, the range is not within the
    /// memory, or part of it is taken.
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

/// Exclusive access to a range, as a slice. Dropping it frees the range.
pub struct Lease {
    memory: Arc<Lendable>,
    offset: usize,
    len: usize,
}

impl Lease {
    /// Returns the offset from the start of the memory, in bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Gives up access, for the request with this number. The caller may post the request only
    /// after this call.
    pub fn lend(self, number: LoanNumber) -> Loan {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, so its only owned field moves out exactly once.
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
        // SAFETY: the range lies within the mapping, which `self` keeps alive. No other code in
        // this process can access it, because leased ranges do not overlap and the mapping is not
        // reachable in any other way. The daemon has no request that uses it, as the module
        // explains.
        unsafe { std::slice::from_raw_parts(self.start(), self.len) }
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
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

/// Unique number of a loan.
#[derive(Debug, PartialEq, Eq)]
pub struct LoanNumber(u64);

impl LoanNumber {
    /// Returns the next number, or `None` after 2^52 numbers (more than a hundred years at a
    /// million per second).
    pub fn next() -> Option<Self> {
        // Process-wide, because it must be unique among the completions of all sessions.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        (n >> MARK_SHIFT == 0).then_some(LoanNumber(MARK << MARK_SHIFT | n))
    }

    /// Returns the number as the `wr_id` of the request.
    pub fn wr_id(&self) -> u64 {
        self.0
    }
}

/// A range used by a posted request. Dropping it does not free the range.
#[derive(Debug)]
pub struct Loan {
    memory: Arc<Lendable>,
    offset: usize,
    len: usize,
    number: LoanNumber,
}

impl Loan {
    /// Returns the lease if `done` belongs to this loan, otherwise the loan.
    pub fn reclaim(self, done: Done) -> Result<Lease, Loan> {
        if done.0 != self.number.0 {
            return Err(self);
        }
        let Loan { memory, offset, len, .. } = self;
        Ok(Lease { memory, offset, len })
    }
}

/// Proof that a request with memory on loan is complete, created from its completion.
#[derive(Debug, PartialEq, Eq)]
pub struct Done(u64);

impl Done {
    /// Returns the proof for a completion that was just read, if its `wr_id` is a loan number.
    #[inline]
    pub(super) fn read(wr_id: u64) -> Option<Self> {
        is_loan(wr_id).then_some(Done(wr_id))
    }

    /// Returns the number of the request.
    pub fn wr_id(&self) -> u64 {
        self.0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn lendable() -> Arc<Lendable> {
        let (mapping, _fd) = Mapping::create_shared_buffer(8192).expect("memory for the buffer");
        Lendable::new(mapping).expect("there is no other owner")
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
        let before = memory.lease(0, 100);
        let after = memory.lease(150, 8042);
        assert!(before.as_ref().is_some_and(|l| l.iter().all(|b| *b == 0)));
        drop((before, after, lease));
        assert!(memory.lease(0, 8192).is_some_and(|all| all[99..151].ends_with(&[7, 0])));
        for (offset, len) in [(0, 0), (8192, 0), (8192, 1), (1, 8192), (usize::MAX, 2)] {
            assert!(memory.lease(offset, len).is_none(), "{len} at {offset}");
        }
    }

    #[test]
    fn only_exclusively_owned_memory_is_lendable() {
        let (mapping, _fd) = Mapping::create_shared_buffer(4096).expect("memory for the buffer");
        let other = mapping.clone();
        let mapping = Lendable::new(mapping).expect_err("there is another owner");
        drop(other);
        assert!(Lendable::new(mapping).is_ok());
    }

    #[test]
    fn a_loan_ends_only_by_its_own_completion() {
        let memory = lendable();
        let one = LoanNumber::next().expect("the first numbers");
        let other = LoanNumber::next().expect("the first numbers");
        assert_ne!(one, other);
        assert!(is_loan(one.wr_id()) && !is_loan(0) && !is_loan(u64::MAX));
        let done = Done::read(one.wr_id());
        let wrong = Done::read(other.wr_id());
        let loan = memory.lease(0, 4096).expect("free").lend(one);
        assert!(memory.lease(4095, 1).is_none(), "on loan");
        let loan = loan.reclaim(wrong.expect("a loan's")).expect_err("of another request");
        let lease = loan.reclaim(done.expect("a loan's")).expect("its own");
        assert_eq!(lease.len(), 4096);
        drop(lease);
        let lost = memory.lease(0, 1).expect("it came back").lend(other);
        drop(lost);
        assert!(memory.lease(0, 1).is_none(), "the daemon may still access it");
        assert_eq!(Done::read(7), None);
    }
}
