//! Who uses an object: it cannot go as long as anybody does.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use rnic_core::device::{Cq, Srq};

/// Something that counts its users.
pub trait Used {
    /// How many there are.
    fn users(&self) -> &AtomicU32;
}

/// One use of it, over when this is dropped.
#[derive(Debug)]
#[must_use = "what is dropped is no use any more"]
pub struct Use<T: Used>(Arc<T>);

impl<T: Used> Use<T> {
    /// Counts one user more.
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

/// The users of one kind that an object has.
#[derive(Debug, Default)]
pub struct Users(Arc<AtomicU32>);

impl Users {
    /// How many there are.
    pub fn count(&self) -> u32 {
        self.0.load(Relaxed)
    }

    /// Counts one more user, until what is returned is dropped.
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
        let (first, second) = (users.add(), users.add());
        assert_eq!(users.count(), 2);
        drop(first);
        assert_eq!(users.count(), 1);
        drop(second);
        assert_eq!(users.count(), 0);
    }
}
