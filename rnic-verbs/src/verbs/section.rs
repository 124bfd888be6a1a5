//! Critical sections that begin in one API call and end in another, where no guard can live.

use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;

/// A critical section of one object.
pub(crate) struct Section(RawMutex);

impl Section {
    pub(crate) const fn new() -> Self {
        Section(RawMutex::INIT)
    }

    /// Waits until no other thread is in the section, and enters it.
    pub(crate) fn enter(&self) {
        self.0.lock();
    }

    /// Leaves the section, so that another thread can enter.
    pub(crate) fn leave(&self) {
        if self.0.is_locked() {
            // SAFETY: this thread has locked it, unless the program leaves a section that it has
            // not entered. Then two threads may be in it at once, which is memory-safe: the data
            // that the section protects have their own locks.
            unsafe { self.0.unlock() };
        }
    }
}
