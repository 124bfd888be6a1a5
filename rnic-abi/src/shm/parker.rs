//! A flag that tells the control thread that a worker sleeps, so that it can acknowledge a command
//! on the worker's behalf.
//!
//! A revocation is complete when every worker has acknowledged it. A sleeping worker accesses no
//! memory, so it need not be woken for this. It publishes that it is parked, and processes its
//! commands before anything else when it wakes.

use super::sync::{AtomicU32, Ordering, fence};

/// State of one worker, shared with the control thread.
#[derive(Debug)]
pub struct Parker {
    parked: AtomicU32,
}

impl Parker {
    /// Creates the state of a worker that is awake.
    pub fn new() -> Self {
        Parker { parked: AtomicU32::new(0) }
    }

    /// Publishes that the worker parks, then calls `idle`, which returns true if there is still no
    /// command. Called by the worker before it sleeps. If this returns true, the worker may sleep,
    /// and must call [`unpark`](Self::unpark) when it wakes.
    ///
    /// Pairs with [`is_parked`](Self::is_parked). Here: store `parked`, fence, check for commands.
    /// There: push the command, fence, load `parked`. The two SeqCst fences are totally ordered. If
    /// this one is first, the control thread sees `parked`. If the other is first, `idle` sees the
    /// command. They cannot both miss.
    #[must_use = "the worker may sleep only if this is true"]
    pub fn park(&self, idle: impl FnOnce() -> bool) -> bool {
        // Release: the worker's accesses to memory before it parked are complete for a thread that
        // loads this value.
        self.parked.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if idle() {
            return true;
        }
        self.unpark();
        false
    }

    /// Clears the flag. Called by the worker when it wakes, before it accesses any memory. The
    /// worker must then process its commands before anything else.
    ///
    /// Pairs with [`is_parked`](Self::is_parked). Here: clear `parked`, fence, check for commands.
    /// If the control thread still saw `parked` and acknowledged for the worker, its load came
    /// before this store and its fence before this one. The worker then finds the command, which
    /// was pushed before that fence. So the command takes effect before the worker copies a single
    /// byte.
    pub fn unpark(&self) {
        self.parked.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Returns true if the control thread must acknowledge a command for the worker. Called after
    /// pushing the command. If it returns false, the worker itself sees the command before it
    /// sleeps.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        fence(Ordering::SeqCst);
        self.parked.load(Ordering::Acquire) != 0
    }
}

impl Default for Parker {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn parked_only_between_a_granted_park_and_unpark() {
        let parker = Parker::default();
        assert!(!parker.is_parked());
        assert!(!parker.park(|| false));
        assert!(!parker.is_parked());
        assert!(parker.park(|| parker.is_parked()), "visible while commands are looked for");
        assert!(parker.is_parked());
        parker.unpark();
        assert!(!parker.is_parked());
    }
}
