//! Distributes the work of many users over a few threads. One user's work occupies only some of the
//! threads, even if it never ends.
//!
//! Each user has a lane, which is a FIFO queue. Threads take items from the lanes round-robin. A
//! lane is skipped while `at_once` of its items are in progress, possibly forever.

use std::collections::{HashMap, VecDeque};

use parking_lot::{Condvar, Mutex};

/// Queued work, by user.
#[derive(Debug)]
pub(super) struct Lanes<T> {
    /// Maximum number of items of one user in progress at the same time.
    at_once: usize,
    state: Mutex<State<T>>,
    work: Condvar,
}

#[derive(Debug)]
struct State<T> {
    lanes: HashMap<u32, Lane<T>>,
    /// Users with an item that can be taken.
    turns: VecDeque<u32>,
    total: usize,
    closed: bool,
}

#[derive(Debug)]
struct Lane<T> {
    waiting: VecDeque<T>,
    taken: usize,
    /// The user is in `turns`.
    has_turn: bool,
}

impl<T> Lane<T> {
    fn may_be_taken(&self, at_once: usize) -> bool {
        !self.waiting.is_empty() && self.taken < at_once
    }
}

impl<T> Lanes<T> {
    /// Creates empty lanes, with at most `at_once` items of one user in progress.
    pub(super) fn new(at_once: usize) -> Self {
        let lanes = HashMap::new();
        let turns = VecDeque::new();
        let state = State { lanes, turns, total: 0, closed: false };
        Lanes { at_once, state: Mutex::new(state), work: Condvar::new() }
    }

    /// Adds an item to a user's lane.
    pub(super) fn add(&self, user: u32, item: T) {
        let mut state = self.state.lock();
        state.total += 1;
        let fresh = || Lane { waiting: VecDeque::new(), taken: 0, has_turn: false };
        state.lanes.entry(user).or_insert_with(fresh).waiting.push_back(item);
        self.give_turn(&mut state, user);
    }

    /// Waits for an item. After the work, the caller must call [`done`](Lanes::done) with that
    /// user. Returns `None` after [`close`](Lanes::close), once no item can be taken.
    pub(super) fn take(&self) -> Option<(u32, T)> {
        let mut state = self.state.lock();
        loop {
            if let Some(user) = state.turns.pop_front()
                && let Some(lane) = state.lanes.get_mut(&user)
                && let Some(item) = lane.waiting.pop_front()
            {
                lane.taken += 1;
                lane.has_turn = false;
                self.give_turn(&mut state, user);
                return Some((user, item));
            }
            if state.closed && state.turns.is_empty() {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    /// Marks an item taken from this user's lane as done.
    pub(super) fn done(&self, user: u32) {
        let mut state = self.state.lock();
        state.total -= 1;
        let Some(lane) = state.lanes.get_mut(&user) else { return };
        lane.taken -= 1;
        if lane.taken == 0 && lane.waiting.is_empty() {
            state.lanes.remove(&user);
            return;
        }
        self.give_turn(&mut state, user);
    }

    /// Returns the number of a user's items that are not done.
    pub(super) fn of(&self, user: u32) -> usize {
        let state = self.state.lock();
        state.lanes.get(&user).map_or(0, |lane| lane.waiting.len() + lane.taken)
    }

    /// Returns the number of all items that are not done.
    pub(super) fn total(&self) -> usize {
        self.state.lock().total
    }

    /// Makes [`take`](Lanes::take) return `None` once no item can be taken.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.work.notify_all();
    }

    fn give_turn(&self, state: &mut State<T>, user: u32) {
        if let Some(lane) = state.lanes.get_mut(&user)
            && !lane.has_turn
            && lane.may_be_taken(self.at_once)
        {
            lane.has_turn = true;
            state.turns.push_back(user);
            self.work.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_take_turns_with_a_bounded_share() {
        let lanes = Lanes::new(2);
        (0..5).for_each(|n| lanes.add(1, n));
        lanes.add(2, 10);
        assert_eq!((lanes.take(), lanes.take()), (Some((1, 0)), Some((2, 10))));
        assert_eq!(lanes.take(), Some((1, 1)));
        // Both items of the first user are never done. Other users continue.
        lanes.add(3, 20);
        assert_eq!(lanes.take(), Some((3, 20)));
        assert_eq!((lanes.of(1), lanes.of(2), lanes.of(4), lanes.total()), (5, 1, 0, 7));
        lanes.done(2);
        lanes.done(3);
        assert_eq!((lanes.of(2), lanes.total()), (0, 5));
        lanes.done(1);
        assert_eq!(lanes.take(), Some((1, 2)));
    }

    #[test]
    fn work_queued_before_close_is_done() {
        let lanes = Lanes::new(1);
        lanes.add(1, 0);
        lanes.add(2, 1);
        lanes.close();
        assert_eq!((lanes.take(), lanes.take(), lanes.take()), (Some((1, 0)), Some((2, 1)), None));
    }

    #[test]
    fn a_thread_that_waits_is_woken() {
        let lanes = Lanes::new(1);
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| std::iter::from_fn(|| lanes.take()).collect::<Vec<_>>());
            lanes.add(7, 'x');
            while lanes.of(7) > 0
                && !thread.is_finished()
                && lanes.state.lock().lanes[&7].taken == 0
            {
                std::thread::yield_now();
            }
            lanes.done(7);
            lanes.close();
            assert_eq!(thread.join().ok(), Some(vec![(7, 'x')]));
        });
    }
}
