//! Counts the users of an object. An object with users cannot be destroyed.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use rnic_core::device::{Cq, Srq};

/// An object that counts its users.
pub trait Used {
    /// Returns the counter.
    fn users(&self) -> &AtomicU32;
}

/// A counted use of an object, until dropped.
#[derive(Debug)]
#[must_use = "a dropped use is no longer counted"]
pub struct Use<T: Used>(Arc<T>);

impl<T: Used> Use<T> {
    /// Counts one more user.
    pub fn of(used: &Arc<T>) -> Self {
        used.users().fetch_add(1, Relaxed);
        Use(used.clone())
    }
}

impl<T: Used> Drop for Use<T> {
    fn drop(&mut self) {
        self.0.users().fetch_sub(1, Relaxed);
    }
}

/// A counter of an object's users of one kind.
#[derive(Debug, Default)]
pub struct Users(Arc<AtomicU32>);

impl Users {
    /// Returns the number of users.
    pub fn count(&self) -> u32 {
        self.0.load(Relaxed)
    }

    /// Counts one more user, until the result is dropped.
    pub fn add(&self) -> Use<AtomicU32> {
        Use::of(&self.0)
    }
}

impl Used for AtomicU32 {
    fn users(&self) -> &AtomicU32 {
        self
    }
}

impl Used for Cq {
    fn users(&self) -> &AtomicU32 {
        &self.qps
    }
}

impl Used for Srq {
    fn users(&self) -> &AtomicU32 {
        &self.qps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_counts_until_it_is_dropped() {
        let users = Users::default();
        let first = users.add();
        let second = users.add();
        assert_eq!(users.count(), 2);
        drop(first);
        assert_eq!(users.count(), 1);
        drop(second);
        assert_eq!(users.count(), 0);
    }
}
