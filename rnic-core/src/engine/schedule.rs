//! Schedules turns in round-robin order on three levels: users, the sessions of a user, and the
//! ready QPs of a session.
//!
//! The scheduler is deficit round robin (Shreedhar and Varghese 1996) on each level. Costs are in
//! bytes: moved data cost their length, and work that takes time without moving much costs as many
//! bytes as could have been moved in that time. A turn of a QP is worth [`QUANTUM`], and so is a
//! turn of a session or user, in which several QPs may be served one after the other. An overdrawn
//! turn is repaid in later turns. So a user with a thousand busy QPs or a hundred sessions gets no
//! more of a worker than a user with one QP.
//!
//! Long turns are efficient, but other users wait for their end. While several users have turns,
//! each turn is worth [`SHORT_QUANTUM`]. If one user is busy while others have sessions, their
//! programs or workers may wait for this CPU, and turns are worth [`MIDDLE_QUANTUM`]. A
//! latency-bound user is idle between messages, so short turns alone would favour bulk users.
//! Therefore a user rests after its turn for as long as the turn took, if the users of two
//! successive turns differed within the last `REST_FOR`.
//!
//! Work outside of QPs' turns (handling doorbells, ending QPs) is charged here as well. The
//! doorbells of a user with a large debt are [not scanned](Schedule::owes) until the debt is
//! repaid.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::numbers::count;
use rnic_abi::types::{Time, UserId};

/// Bytes that a user, a session and a QP may move per turn: some tens of microseconds. Of 128, 256
/// and 512 KiB the last was the fastest with small requests, because the client then sees their
/// completions in longer runs.
pub(super) const QUANTUM: i64 = 512 * 1024;
/// Quantum while several users have turns: one or two microseconds, during which all others wait.
const SHORT_QUANTUM: i64 = 8 * 1024;
/// Quantum while several users have sessions and only one of them is busy: some microseconds.
const MIDDLE_QUANTUM: i64 = 64 * 1024;
/// Time after a turn of a different user for which turns are short.
const SHORT_TURNS_FOR: Duration = Duration::from_millis(1);
/// Time after a turn of a different user for which users rest after their turns: several times as
/// long as a program takes to answer a message. It hardly slows down a user that shares a worker
/// with a mostly idle user.
const REST_FOR: Duration = Duration::from_micros(200);
/// Maximum rest. A turn that took longer was interrupted by other load on this CPU.
const LONGEST_REST: Duration = Duration::from_micros(100);
/// Minimum cost of a request. A request that becomes a message takes at least as long as a copy of
/// this many bytes, some 100 ns.
pub(super) const REQUEST_COST: i64 = 2048;
/// Minimum cost of an RDMA Write that is carried out in the queue: 20 to 40 ns.
pub(super) const SHORT_WRITE_COST: i64 = 1024;
/// Minimum cost of an FPDU. The cost of its request is mostly charged separately.
pub(super) const FPDU_COST: i64 = 1024;
/// Cost of passing over a QP in debt.
pub(super) const PASS_COST: i64 = 512;
/// Minimum cost of a turn, even without work.
pub(super) const TURN_COST: i64 = 2048;
/// Cost of a system call, in addition to the bytes that it moves.
pub(super) const CALL_COST: i64 = 8 * 1024;
/// Cost of the end of a stream: its record, its events, its socket.
pub(super) const END_COST: i64 = 16 * 1024;
/// Cost of an STag change on all workers, coordinated by the control thread.
pub(super) const CHANGE_COST: i64 = 64 * 1024;
/// Cost of visiting one entry of a list.
pub(super) const STEP_COST: i64 = 64;
/// Maximum debt, so that repaying it takes a bounded number of steps.
pub(super) const MAX_DEBT: i64 = 16 * QUANTUM;
/// Minimum repayment of a session in debt while its user is at the front of the queue. It limits
/// the number of steps, during which all users wait.
const MIN_REPAYMENT: i64 = 64 * 1024;
/// Debt of a user above which the doorbells of its sessions are not scanned until it is repaid.
const SCAN_DEBT_LIMIT: i64 = 128 * 1024;

/// Index of a QP in its engine.
pub(super) type Key = u32;

/// Slot of a session in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionSlot(u32);

impl SessionSlot {
    /// Slot of a session that is not attached. Its QPs have no turns.
    pub(super) const NONE: SessionSlot = SessionSlot(u32::MAX);

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Ready QPs by user and session.
#[derive(Default)]
pub(super) struct Schedule {
    /// Time of the current round, and whether its turns are short.
    now: Time,
    short: bool,
    /// User of the last turn, and the end of the short turns after the last change of users.
    last: u32,
    short_until: Time,
    /// End of the rests after the last change of users.
    rest_until: Time,
    /// All users with ready QPs are resting.
    resting: bool,
    /// Users with ready QPs or with a debt for other work, by index.
    turns: VecDeque<u32>,
    users: Vec<User>,
    free_users: Vec<u32>,
    by_user: HashMap<UserId, u32>,
    slots: Vec<Session>,
    free_slots: Vec<u32>,
    /// QPs in all queues.
    ready: usize,
}

struct User {
    id: UserId,
    credit: i64,
    /// Time before which the user has no turn, unless `Schedule::rest_until` is earlier.
    rests_until: Time,
    /// Sessions with ready QPs.
    turns: VecDeque<SessionSlot>,
    queued: bool,
    /// It has received the quantum of its current turn.
    paid: bool,
    /// Sessions that have a slot.
    sessions: u32,
    /// Held by each receive slab that keeps unread bytes of this user.
    slabs: Arc<()>,
}

struct Session {
    user: u32,
    credit: i64,
    ready: VecDeque<Key>,
    paid: bool,
    /// The session has not been closed: its QPs have turns.
    open: bool,
}

impl Schedule {
    /// Begins a round of turns. Returns its maximum cost, give or take one turn.
    pub(super) fn begin_round(&mut self, now: Time) -> i64 {
        self.now = now;
        self.short = now < self.short_until;
        // A user that becomes ready during another user's turn gets a turn in the same round.
        if self.short { 2 * SHORT_QUANTUM } else { self.quantum() }
    }

    /// Returns true if turns were short when this round began, because several users had turns.
    pub(super) fn is_shared(&self) -> bool {
        self.short
    }

    /// Returns the value of a turn in this round.
    pub(super) fn quantum(&self) -> i64 {
        match (self.short, self.users()) {
            (true, _) => SHORT_QUANTUM,
            (false, 0 | 1) => QUANTUM,
            (false, _) => MIDDLE_QUANTUM,
        }
    }

    /// Adds a session of this user and returns its slot.
    pub(super) fn join(&mut self, id: UserId) -> SessionSlot {
        let Schedule { users, free_users, by_user, .. } = self;
        let user = *by_user.entry(id).or_insert_with(|| {
            let user = User {
                id,
                credit: 0,
                rests_until: Time(0),
                turns: VecDeque::new(),
                queued: false,
                paid: false,
                sessions: 0,
                slabs: Arc::new(()),
            };
            place(users, free_users, user)
        });
        users[user as usize].sessions += 1;
        let ready = VecDeque::new();
        let session = Session { user, credit: 0, ready, paid: false, open: true };
        SessionSlot(place(&mut self.slots, &mut self.free_slots, session))
    }

    /// Removes all QPs of this session from the schedule and accepts no more.
    pub(super) fn close(&mut self, slot: SessionSlot) {
        let Some(session) = self.slots.get_mut(slot.index()).filter(|s| s.open) else { return };
        session.open = false;
        self.ready -= session.ready.len();
        if !session.ready.is_empty() {
            session.ready = VecDeque::new();
            // A user without ready sessions leaves the queue in its next turn.
            self.users[session.user as usize].turns.retain(|s| *s != slot);
        }
    }

    /// Returns true if this session has not been closed: its QPs have turns.
    pub(super) fn is_open(&self, slot: SessionSlot) -> bool {
        self.slots.get(slot.index()).is_some_and(|session| session.open)
    }

    /// Removes a session that no longer has QPs.
    pub(super) fn leave(&mut self, slot: SessionSlot) {
        self.close(slot);
        let Some(session) = self.slots.get(slot.index()) else { return };
        let at = session.user;
        self.free_slots.push(slot.0);
        let user = &mut self.users[at as usize];
        user.sessions -= 1;
        if user.sessions == 0 {
            if std::mem::take(&mut user.queued) {
                self.turns.retain(|u| *u != at);
            }
            self.by_user.remove(&user.id);
            self.free_users.push(at);
        }
    }

    /// Returns the user of a session.
    pub(super) fn user(&self, slot: SessionSlot) -> Option<UserId> {
        self.slots.get(slot.index()).map(|s| self.users[s.user as usize].id)
    }

    /// Returns the reference that receive slabs with unread bytes of this session's user hold.
    pub(super) fn slabs(&self, slot: SessionSlot) -> Option<&Arc<()>> {
        self.slots.get(slot.index()).map(|s| &self.users[s.user as usize].slabs)
    }

    /// Adds a QP that is not in the schedule. Returns true if its session has turns.
    pub(super) fn push(&mut self, slot: SessionSlot, key: Key) -> bool {
        let Some(session) = self.slots.get_mut(slot.index()).filter(|s| s.open) else {
            return false;
        };
        let user = &mut self.users[session.user as usize];
        if session.ready.is_empty() {
            user.turns.push_back(slot);
            session.paid = false;
        }
        session.ready.push_back(key);
        self.ready += 1;
        let at = session.user;
        self.queue(at);
        true
    }

    /// Puts a user at the end of the queue, unless it is queued.
    fn queue(&mut self, at: u32) {
        let user = &mut self.users[at as usize];
        if !std::mem::replace(&mut user.queued, true) {
            user.paid = false;
            self.turns.push_back(at);
        }
    }

    /// Takes the next QP out of the schedule, for its turn. The QP may have been destroyed, and its
    /// key reused.
    pub(super) fn pop(&mut self) -> Option<Key> {
        let quantum = self.quantum();
        // Resting users stay queued. Seeing the first one again ends the scan.
        let mut first = None;
        self.resting = false;
        while let Some(&at) = self.turns.front() {
            let user = &mut self.users[at as usize];
            if self.now < user.rests_until.min(self.rest_until) {
                if first == Some(at) {
                    self.resting = true;
                    return None;
                }
                first = first.or(Some(at));
                self.turns.rotate_left(1);
                continue;
            }
            if !has_turn(&mut user.credit, &mut user.paid, quantum, quantum) {
                self.turns.rotate_left(1);
                continue;
            }
            let Some(&slot) = user.turns.front() else {
                user.queued = false;
                self.turns.pop_front();
                continue;
            };
            let session = &mut self.slots[slot.index()];
            if !has_turn(
                &mut session.credit,
                &mut session.paid,
                quantum.max(MIN_REPAYMENT),
                quantum,
            ) {
                user.turns.rotate_left(1);
                continue;
            }
            let key = session.ready.pop_front();
            self.ready -= usize::from(key.is_some());
            if session.ready.is_empty() {
                user.turns.pop_front();
                if user.turns.is_empty() {
                    user.queued = false;
                    self.turns.pop_front();
                }
            }
            if key.is_some() {
                if std::mem::replace(&mut self.last, at) != at {
                    self.short_until = self.now.after(SHORT_TURNS_FOR);
                    self.rest_until = self.now.after(REST_FOR);
                }
                return key;
            }
        }
        None
    }

    /// Makes the user of the last turn rest for as long as the turn took.
    pub(super) fn turn_over(&mut self, began: Time, now: Time) {
        if let Some(user) = self.users.get_mut(self.last as usize) {
            user.rests_until = now.after(now.since(began).min(LONGEST_REST));
        }
    }

    /// Returns true if all users with ready QPs are resting.
    pub(super) fn is_resting(&self) -> bool {
        self.resting
    }

    /// Advances the time within the round.
    pub(super) fn set_now(&mut self, now: Time) {
        self.now = now;
    }

    /// Charges a session and its user for work.
    pub(super) fn charge(&mut self, slot: SessionSlot, cost: i64) {
        let Some(session) = self.slots.get_mut(slot.index()) else { return };
        session.credit = (session.credit - cost).max(-MAX_DEBT);
        let at = session.user;
        let user = &mut self.users[at as usize];
        user.credit = (user.credit - cost).max(-MAX_DEBT);
        if user.credit < -SCAN_DEBT_LIMIT {
            // The user repays while others have turns, even without a ready QP.
            self.queue(at);
        }
    }

    /// Returns true if the user of a session must repay a debt before its doorbells are scanned.
    pub(super) fn owes(&self, slot: SessionSlot) -> bool {
        let user = |s: &Session| &self.users[s.user as usize];
        self.slots.get(slot.index()).is_some_and(|s| user(s).credit < -SCAN_DEBT_LIMIT)
    }

    /// Returns the number of users with a session.
    pub(super) fn users(&self) -> usize {
        self.by_user.len()
    }

    /// Returns true if no QP is ready.
    pub(super) fn is_empty(&self) -> bool {
        self.ready == 0
    }
}

/// Adds `gets` to the credit of a user or session at the front of the queue, once per turn, up to
/// the value of a turn. Returns true if it has credit left; otherwise it must go to the end.
fn has_turn(credit: &mut i64, paid: &mut bool, gets: i64, quantum: i64) -> bool {
    if !*paid {
        *credit = (*credit + gets).min(quantum);
    }
    *paid = *credit > 0;
    *paid
}

/// Puts a value into a free slot of a list and returns its index.
fn place<T>(list: &mut Vec<T>, free: &mut Vec<u32>, what: T) -> u32 {
    match free.pop() {
        Some(at) => {
            list[at as usize] = what;
            at
        }
        None => {
            list.push(what);
            count(list.len() - 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves ready QPs that always have more to do. Returns the total cost of each session.
    fn serve(
        s: &mut Schedule,
        turns: usize,
        of: impl Fn(Key) -> (SessionSlot, i64),
    ) -> HashMap<SessionSlot, i64> {
        let mut served = HashMap::new();
        for _ in 0..turns {
            let key = s.pop().expect("a ready QP");
            let (slot, cost) = of(key);
            s.charge(slot, cost);
            *served.entry(slot).or_default() += cost;
            assert!(s.push(slot, key));
        }
        served
    }

    #[test]
    fn users_share_turns() {
        // Cost of a turn of the user with one session, and of the user with twenty sessions.
        for (one, many) in [
            (QUANTUM, QUANTUM),
            (QUANTUM, TURN_COST),
            (REQUEST_COST, QUANTUM),
            (QUANTUM / 3, QUANTUM + 7777),
            (QUANTUM * 5 / 2, QUANTUM),
            (QUANTUM, QUANTUM * 9 / 2),
        ] {
            let mut s = Schedule::default();
            let alone = s.join(UserId(1));
            let slots: Vec<SessionSlot> = (0..20).map(|_| s.join(UserId(2))).collect();
            // Enough QPs to consume a turn.
            for key in 0..256 {
                s.push(alone, key);
            }
            for key in 256..2816 {
                s.push(slots[key as usize % 20], key);
            }
            let slot_of = |key: Key| match key {
                0..256 => (alone, one),
                _ => (slots[key as usize % 20], many),
            };
            let served = serve(&mut s, 40_000, slot_of);
            let of_one = served[&alone];
            let all = served.values().sum::<i64>();
            let share = of_one as f64 / all as f64;
            assert!((0.48..0.52).contains(&share), "{one} against {many}: {share}");
            let of_many: Vec<i64> = slots.iter().map(|slot| served[slot]).collect();
            let least = of_many.iter().min().unwrap();
            let most = of_many.iter().max().unwrap();
            assert!(least * 2 > *most - QUANTUM, "{one} against {many}: {of_many:?}");
        }
    }

    #[test]
    fn turns_are_short_while_users_share() {
        let mut s = Schedule::default();
        let one = s.join(UserId(1));
        let two = s.join(UserId(2));
        assert_eq!(s.begin_round(Time(1)), MIDDLE_QUANTUM);
        s.push(one, 1);
        assert_eq!(s.pop(), Some(1));
        assert!(!s.is_shared());
        s.push(two, 2);
        assert_eq!(s.pop(), Some(2));
        let ms = |n: u64| Time(1 + n * 1_000_000);
        assert_eq!(s.begin_round(Time(2)), 2 * SHORT_QUANTUM);
        // The other user waits for a few requests of this one.
        s.push(one, 1);
        s.push(one, 3);
        s.push(two, 2);
        let mut before = 0;
        while let Some(key @ (1 | 3)) = s.pop() {
            s.charge(one, REQUEST_COST);
            s.push(one, key);
            before += 1;
        }
        assert_eq!(before, SHORT_QUANTUM / REQUEST_COST);
        // Again only one user is active.
        assert_eq!(s.begin_round(ms(2)), MIDDLE_QUANTUM);
        assert!(!s.is_shared());
        s.leave(two);
        assert_eq!(s.begin_round(ms(3)), QUANTUM);
    }

    #[test]
    fn rest_lasts_as_long_as_the_turn() {
        let us = |n: u64| Time(1_000_000 + n * 1000);
        let mut s = Schedule::default();
        let one = s.join(UserId(1));
        let two = s.join(UserId(2));
        // The only active user never rests.
        s.begin_round(us(0));
        s.push(one, 1);
        assert_eq!(s.pop(), Some(1));
        s.turn_over(us(0), us(20));
        s.set_now(us(20));
        s.push(one, 1);
        assert_eq!(s.pop(), Some(1));
        // Now a second user becomes active.
        s.set_now(us(40));
        s.push(two, 2);
        assert_eq!(s.pop(), Some(2));
        s.turn_over(us(40), us(41));
        s.push(one, 1);
        assert_eq!(s.pop(), Some(1));
        s.turn_over(us(21), us(51));
        s.push(one, 1);
        for now in [51, 80] {
            s.set_now(us(now));
            assert_eq!((s.pop(), s.is_resting(), s.is_empty()), (None, true, false));
        }
        // A user that does not rest gets its turn.
        s.push(two, 2);
        assert_eq!((s.pop(), s.is_resting()), (Some(2), false));
        s.turn_over(us(80), us(81));
        s.set_now(us(81));
        assert_eq!(s.pop(), Some(1));
        // A rest lasts at most `LONGEST_REST`, and ends `REST_FOR` after the last change of users.
        s.turn_over(us(81), us(9000));
        s.push(one, 1);
        s.rest_until = us(99_999);
        s.set_now(us(9000 + 99));
        assert_eq!(s.pop(), None);
        s.set_now(us(9000 + 100));
        assert_eq!(s.pop(), Some(1));
        s.push(two, 2);
        s.set_now(us(9200));
        assert_eq!(s.pop(), Some(2));
        s.turn_over(us(9200), us(9300));
        s.push(two, 2);
        s.set_now(us(9200 + 200));
        assert_eq!(s.pop(), Some(2));
    }

    #[test]
    fn debt_is_repaid_one_turn_at_a_time() {
        let us = |n: u64| Time(1_000_000 + n * 1000);
        let mut s = Schedule::default();
        let one = s.join(UserId(1));
        let two = s.join(UserId(2));
        let debtor = s.join(UserId(3));
        s.set_now(us(0));
        for (slot, key) in [(one, 1), (two, 2)] {
            s.push(slot, key);
            assert_eq!(s.pop(), Some(key));
            s.turn_over(us(0), us(50));
        }
        s.push(one, 1);
        s.push(two, 2);
        // The last user in the queue leaves it when its debt is repaid.
        s.charge(debtor, 3 * MIDDLE_QUANTUM + 1);
        for owes in [true, false, false, false] {
            assert_eq!((s.pop(), s.is_resting()), (None, true));
            assert_eq!(s.owes(debtor), owes);
        }
        s.set_now(us(100));
        assert_eq!((s.pop(), s.pop(), s.pop()), (Some(1), Some(2), None));
    }

    #[test]
    fn debtor_is_not_scanned_until_repaid() {
        let mut s = Schedule::default();
        let debtor = s.join(UserId(1));
        let other = s.join(UserId(2));
        s.push(debtor, 1);
        s.push(other, 2);
        s.charge(debtor, 9 * MIDDLE_QUANTUM);
        assert!(s.owes(debtor) && !s.owes(other));
        for _ in 0..9 {
            assert_eq!(s.pop(), Some(2));
            s.charge(other, MIDDLE_QUANTUM);
            s.push(other, 2);
        }
        assert!(!s.owes(debtor));
        let next: Vec<_> = (0..4).map_while(|_| s.pop().inspect(|k| assert!(*k < 3))).collect();
        assert!(next.contains(&1), "{next:?}");
        // A user without ready QPs repays as well, and causes no other work.
        assert!(s.is_empty());
        s.charge(debtor, i64::MAX / 2);
        assert!(s.owes(debtor) && s.is_empty());
        assert_eq!(s.pop(), None);
        assert!(!s.owes(debtor));
    }

    #[test]
    fn closed_session_is_not_served() {
        let mut s = Schedule::default();
        let one = s.join(UserId(1));
        let two = s.join(UserId(2));
        s.push(one, 1);
        s.push(two, 2);
        s.close(one);
        assert!(!s.push(one, 3));
        assert_eq!(s.pop(), Some(2));
        assert_eq!(s.pop(), None);
        assert!(s.is_empty());
        s.leave(one);
        assert_eq!((s.join(UserId(3)), s.user(one)), (one, Some(UserId(3))));
        assert!(s.push(one, 4));
        s.leave(one);
        assert_eq!((s.pop(), s.is_empty()), (None, true));
        assert!(!s.push(SessionSlot::NONE, 5));
    }
}
