//! Round-robin scheduling of users, and of each user's clients within its turns.
//!
//! A user with a thousand clients gets one turn like every other user. The caller decides how long
//! a turn lasts and when a user must rest. [`Turns`] only maintains the order.

use std::collections::{BTreeSet, HashMap, VecDeque};

use rnic_abi::types::Time;

/// Clients that may have input, by user.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Users with waiting clients, next first.
    users: VecDeque<u32>,
    clients: HashMap<u32, VecDeque<usize>>,
    /// Users that must rest before their next turn, by the end of their rest.
    resting: BTreeSet<(Time, u32)>,
}

impl Turns {
    /// Adds a client after all others of its user. It must not be queued yet.
    pub(super) fn add(&mut self, user: u32, client: usize) {
        let clients = self.clients.entry(user).or_insert_with(|| {
            self.users.push_back(user);
            VecDeque::new()
        });
        clients.push_back(client);
    }

    /// Removes a client, queued or not.
    pub(super) fn remove(&mut self, user: u32, client: usize) {
        if let Some(clients) = self.clients.get_mut(&user) {
            clients.retain(|waiting| *waiting != client);
        }
    }

    /// Begins the next user's turn. The caller must end it with [`end`](Turns::end) or
    /// [`rest`](Turns::rest).
    pub(super) fn begin(&mut self) -> Option<u32> {
        self.users.pop_front()
    }

    /// Removes and returns the next client in a user's turn.
    pub(super) fn client(&mut self, user: u32) -> Option<usize> {
        self.clients.get_mut(&user)?.pop_front()
    }

    /// Ends a user's turn. If clients of the user still wait, its next turn is after all others.
    pub(super) fn end(&mut self, user: u32) {
        match self.clients.get(&user) {
            Some(clients) if !clients.is_empty() => self.users.push_back(user),
            _ => drop(self.clients.remove(&user)),
        }
    }

    /// Ends a user's turn. Its next turn is not before `until`.
    pub(super) fn rest(&mut self, user: u32, until: Time) {
        self.resting.insert((until, user));
    }

    /// Queues users that have rested until `now`.
    pub(super) fn wake(&mut self, now: Time) {
        while self.next_wake().is_some_and(|until| until <= now)
            && let Some((_, user)) = self.resting.pop_first()
        {
            self.end(user);
        }
    }

    /// Returns the time at which the next rest ends.
    pub(super) fn next_wake(&self) -> Option<Time> {
        self.resting.first().map(|(until, _)| *until)
    }

    /// Returns the number of users with a turn in this round.
    pub(super) fn users(&self) -> usize {
        self.users.len()
    }

    /// Returns true if no user may have a turn now.
    pub(super) fn is_empty(&self) -> bool {
        self.users.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives turns of `clients` clients each. All clients stay queued. Returns the served clients.
    fn serve(turns: &mut Turns, users: usize, clients: usize) -> Vec<(u32, usize)> {
        let mut served = Vec::new();
        for _ in 0..users {
            let Some(user) = turns.begin() else { break };
            for _ in 0..clients {
                let Some(client) = turns.client(user) else { break };
                served.push((user, client));
                turns.add(user, client);
            }
            turns.end(user);
        }
        served
    }

    #[test]
    fn many_clients_of_one_user_have_one_turn() {
        let mut turns = Turns::default();
        (0..100).for_each(|client| turns.add(1, client));
        turns.add(2, 100);
        let expected = [(1, 0), (1, 1), (2, 100), (2, 100), (1, 2), (1, 3), (2, 100), (2, 100)];
        assert_eq!(serve(&mut turns, 4, 2), expected);
    }

    #[test]
    fn user_without_waiting_clients_ends_its_turn() {
        let mut turns = Turns::default();
        turns.add(1, 7);
        turns.add(2, 8);
        assert_eq!((turns.begin(), turns.client(1), turns.client(1)), (Some(1), Some(7), None));
        turns.end(1);
        assert_eq!(turns.users(), 1);
        // The user's next turn is after those of the waiting users.
        turns.add(1, 7);
        assert_eq!(serve(&mut turns, 2, 1), [(2, 8), (1, 7)]);
        assert_eq!((turns.begin(), turns.client(2)), (Some(2), Some(8)));
        turns.end(2);
        assert_eq!((turns.begin(), turns.client(1)), (Some(1), Some(7)));
        turns.end(1);
        assert!(turns.is_empty() && turns.clients.is_empty());
    }
    #[test]
    fn resting_user_gets_no_turn() {
        let mut turns = Turns::default();
        turns.add(1, 7);
        turns.add(2, 8);
        assert_eq!((turns.begin(), turns.client(1)), (Some(1), Some(7)));
        turns.add(1, 7);
        turns.rest(1, Time(50));
        turns.add(1, 9);
        assert_eq!(serve(&mut turns, 3, 1), [(2, 8), (2, 8), (2, 8)]);
        turns.wake(Time(49));
        assert_eq!((turns.users(), turns.next_wake()), (1, Some(Time(50))));
        turns.wake(Time(50));
        assert_eq!((turns.users(), turns.next_wake()), (2, None));
        assert_eq!(serve(&mut turns, 3, 1), [(2, 8), (1, 7), (2, 8)]);
        // A resting user without clients leaves no entry.
        assert_eq!(turns.begin(), Some(1));
        turns.rest(1, Time(60));
        turns.remove(1, 7);
        turns.remove(1, 9);
        turns.wake(Time(60));
        assert_eq!((turns.users(), turns.clients.len()), (1, 1));
    }
}
