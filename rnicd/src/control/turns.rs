//! Whose turn it is: users in rotation, and within a user's turn his clients in rotation.
//!
//! A user with a thousand clients has one turn like everybody else. How long a turn lasts, and who
//! has had so much that he is to rest, is decided by who gives it; [`Turns`] only keeps the order.

use std::collections::{BTreeSet, HashMap, VecDeque};

use rnic_core::types::Time;

/// Clients that may have something to say, by user.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Users of whom a client waits, the one whose turn is next first.
    users: VecDeque<u32>,
    clients: HashMap<u32, VecDeque<usize>>,
    /// Users who have no turn for now, and until when.
    resting: BTreeSet<(Time, u32)>,
}

impl Turns {
    /// A client waits behind all others of its user. It is not to wait already.
    pub(super) fn add(&mut self, user: u32, client: usize) {
        let clients = self.clients.entry(user).or_insert_with(|| {
            self.users.push_back(user);
            VecDeque::new()
        });
        clients.push_back(client);
    }

    /// A client that waits is gone.
    pub(super) fn remove(&mut self, user: u32, client: usize) {
        if let Some(clients) = self.clients.get_mut(&user) {
            clients.retain(|waiting| *waiting != client);
        }
    }

    /// Begins the next user's turn. It has to be ended, by [`end`](Turns::end) or
    /// [`rest`](Turns::rest).
    pub(super) fn begin(&mut self) -> Option<u32> {
        self.users.pop_front()
    }

    /// The next client in a user's turn.
    pub(super) fn client(&mut self, user: u32) -> Option<usize> {
        self.clients.get_mut(&user)?.pop_front()
    }

    /// Ends a user's turn: if clients of his still wait, it comes again after everybody else's.
    pub(super) fn end(&mut self, user: u32) {
        match self.clients.get(&user) {
            Some(clients) if !clients.is_empty() => self.users.push_back(user),
            _ => drop(self.clients.remove(&user)),
        }
    }

    /// Ends a user's turn, who has the next one not before then.
    pub(super) fn rest(&mut self, user: u32, until: Time) {
        self.resting.insert((until, user));
    }

    /// Users who have rested have turns again.
    pub(super) fn wake(&mut self, now: Time) {
        while self.next_wake().is_some_and(|until| until <= now)
            && let Some((_, user)) = self.resting.pop_first()
        {
            self.end(user);
        }
    }

    /// When somebody has rested.
    pub(super) fn next_wake(&self) -> Option<Time> {
        self.resting.first().map(|(until, _)| *until)
    }

    /// Users whose turn it is in this round.
    pub(super) fn users(&self) -> usize {
        self.users.len()
    }

    /// Whether nobody waits for a turn that he may have now.
    pub(super) fn is_empty(&self) -> bool {
        self.users.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives turns of `clients` clients each, all of whom want to go on; returns who was served.
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
    fn whoever_has_nothing_more_to_say_gives_his_turn_up() {
        let mut turns = Turns::default();
        turns.add(1, 7);
        turns.add(2, 8);
        assert_eq!((turns.begin(), turns.client(1), turns.client(1)), (Some(1), Some(7), None));
        turns.end(1);
        assert_eq!(turns.users(), 1);
        // He comes again, behind those who wait.
        turns.add(1, 7);
        assert_eq!(serve(&mut turns, 2, 1), [(2, 8), (1, 7)]);
        assert_eq!((turns.begin(), turns.client(2)), (Some(2), Some(8)));
        turns.end(2);
        assert_eq!((turns.begin(), turns.client(1)), (Some(1), Some(7)));
        turns.end(1);
        assert!(turns.is_empty() && turns.clients.is_empty());
    }
    #[test]
    fn who_rests_has_no_turn_until_then_whatever_his_clients_do() {
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
        // Nobody is left of whoever rests.
        assert_eq!(turns.begin(), Some(1));
        turns.rest(1, Time(60));
        turns.remove(1, 7);
        turns.remove(1, 9);
        turns.wake(Time(60));
        assert_eq!((turns.users(), turns.clients.len()), (1, 1));
    }
}
