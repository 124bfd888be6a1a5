//! Whether a worker sleeps, so that the control thread can acknowledge a command in its place.
//!
//! A revocation is answered when every worker has acknowledged it. A sleeping worker touches no
//! memory, so waking it only to say so would be waste: it publishes that it is parked, and looks at
//! its commands before anything else when it wakes.

use super::sync::{AtomicU32, Ordering, fence};

/// One per worker, shared with the control thread.
#[derive(Debug)]
pub struct Parker {
    parked: AtomicU32,
}

impl Parker {
    /// Of a worker that is awake.
    pub fn new() -> Self {
        Parker { parked: AtomicU32::new(0) }
    }

    /// Worker, before it sleeps: says so, then asks `idle` whether there is still no command. If it
    /// returns `true` the worker may sleep and must call [`unpark`](Self::unpark) on waking.
    ///
    /// Pairs with [`is_parked`](Self::is_parked). Here: store `parked`, fence, look for commands.
    /// There: push the command, fence, load `parked`. Of the two fences one comes first in the
    /// single order of all SeqCst fences. If ours does, the control thread sees `parked`; if theirs
    /// does, `idle` sees the command. Never do both miss.
    #[must_use = "the worker may sleep only if this is true"]
    pub fn park(&self, idle: impl FnOnce() -> bool) -> bool {
        // Release: what the worker did to memory before it parked is done for whoever sees this.
        self.parked.store(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if idle() {
            return true;
        }
        self.unpark();
        false
    }

    /// Worker, on waking, before it touches anything: it must look at its commands next.
    ///
    /// Pairs with [`is_parked`](Self::is_parked). Here: clear `parked`, fence, look for commands.
    /// If the control thread still saw `parked` and acknowledged for us, then its load came before
    /// our store, its fence before ours, and its command, pushed before that fence, is there to be
    /// found now: it takes effect before the worker copies a single byte.
    pub fn unpark(&self) {
        self.parked.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Control thread, after it pushed a command: whether to acknowledge it for the worker. If not,
    /// the worker sees the command by itself, before it sleeps.
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
