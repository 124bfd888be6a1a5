//! Clients that have not sent their Hello yet: their number per user, and their deadlines.

use std::collections::{BTreeSet, HashMap};

use rnic_abi::types::Time;

/// Clients that have sent no Hello.
#[derive(Debug, Default)]
pub(super) struct PendingHellos {
    deadlines: BTreeSet<(Time, usize)>,
    users: HashMap<u32, usize>,
}

impl PendingHellos {
    /// Adds a client that must send a Hello before `deadline`.
    pub(super) fn insert(&mut self, deadline: Time, client: usize, user: u32) {
        self.deadlines.insert((deadline, client));
        *self.users.entry(user).or_default() += 1;
    }

    /// Removes a client that has sent its Hello or is gone.
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

    /// Returns the number of a user's clients without a Hello.
    pub(super) fn of(&self, user: u32) -> usize {
        self.users.get(&user).copied().unwrap_or(0)
    }

    /// Returns the client with the earliest deadline.
    pub(super) fn first(&self) -> Option<(Time, usize)> {
        self.deadlines.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_counted_once_per_user() {
        let mut pending_hellos = PendingHellos::default();
        pending_hellos.insert(Time(9), 1, 1000);
        pending_hellos.insert(Time(5), 2, 1000);
        pending_hellos.insert(Time(5), 3, 1001);
        assert_eq!((pending_hellos.of(1000), pending_hellos.first()), (2, Some((Time(5), 2))));
        for _ in 0..2 {
            pending_hellos.remove(Time(5), 2, 1000);
        }
        assert_eq!((pending_hellos.of(1000), pending_hellos.first()), (1, Some((Time(5), 3))));
        pending_hellos.remove(Time(5), 3, 1001);
        assert_eq!((pending_hellos.of(1001), pending_hellos.first()), (0, Some((Time(9), 1))));
    }
}
