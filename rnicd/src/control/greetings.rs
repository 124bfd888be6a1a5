//! Clients that have connected and not yet said Hello: how many of each user, and until when.

use std::collections::{BTreeSet, HashMap};

use rnic_core::types::Time;

/// Clients whose Hello is awaited.
#[derive(Debug, Default)]
pub(super) struct Greetings {
    deadlines: BTreeSet<(Time, usize)>,
    users: HashMap<u32, usize>,
}

impl Greetings {
    /// A client's Hello is awaited.
    pub(super) fn insert(&mut self, deadline: Time, client: usize, user: u32) {
        self.deadlines.insert((deadline, client));
        *self.users.entry(user).or_default() += 1;
    }

    /// It has come, or never will.
    pub(super) fn remove(&mut self, deadline: Time, client: usize, user: u32) {
        if !self.deadlines.remove(&(deadline, client)) {
            return;
        }
        if let Some(n) = self.users.get_mut(&user) {
            *n -= 1;
            if *n == 0 {
                self.users.remove(&user);
            }
        }
    }

    /// How many of a user's are awaited.
    pub(super) fn of(&self, user: u32) -> usize {
        self.users.get(&user).copied().unwrap_or(0)
    }

    /// The client whose deadline comes first.
    pub(super) fn first(&self) -> Option<(Time, usize)> {
        self.deadlines.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_counted_once_and_for_its_user() {
        let mut greetings = Greetings::default();
        greetings.insert(Time(9), 1, 1000);
        greetings.insert(Time(5), 2, 1000);
        greetings.insert(Time(5), 3, 1001);
        assert_eq!((greetings.of(1000), greetings.first()), (2, Some((Time(5), 2))));
        for _ in 0..2 {
            greetings.remove(Time(5), 2, 1000);
        }
        assert_eq!((greetings.of(1000), greetings.first()), (1, Some((Time(5), 3))));
        greetings.remove(Time(5), 3, 1001);
        assert_eq!((greetings.of(1001), greetings.first()), (0, Some((Time(9), 1))));
    }
}
