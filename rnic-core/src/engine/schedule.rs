//! Who is served next: users in turn, of a user his sessions in turn, and of a session its ready
//! QPs in turn.
//!
//! Deficit round robin (Shreedhar and Varghese 1996) on three levels. Costs are in bytes: what is
//! moved costs its length, and everything that costs time without moving much costs as much as
//! could have been moved in that time. A turn of a QP is worth [`QUANTUM`], and so is the turn of a
//! session and that of a user, in which several QPs may be served one after the other. Whoever
//! overdraws his turn repays it in his next ones. So who has a thousand busy QPs, or a hundred
//! sessions, gets no more of a worker than who has one of each.
//!
//! Long turns are cheap, and others wait for their end: while several users have turns, each is
//! worth [`SHORT_QUANTUM`]. Of a worker that has one busy user, while others have sessions, it is
//! those on its CPU who wait, another worker or a program: turns are worth [`MIDDLE_QUANTUM`]. Who
//! answers a message is not ready until he has got it, so to be served first would not help him
//! against who always is: after a turn a user rests for as long as it took, if another had a turn a
//! moment ago.
//!
//! Work that is no QP's turn (looking at what rang, ending queue pairs) is charged here as well; a
//! user who owes much for it is [not looked at](Schedule::owes) until he has repaid.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::numbers::count;
use crate::types::{Time, UserId};

/// Bytes that a user, a session and a QP may move per turn: some tens of microseconds. Of 128, 256
/// and 512 KiB the last was the fastest with small requests, whose completions the client then sees
/// in longer rows.
pub(super) const QUANTUM: i64 = 512 * 1024;
/// The same while several users have turns: a microsecond or two, for which everybody else waits.
const SHORT_QUANTUM: i64 = 8 * 1024;
/// The same while several users have sessions, and one of them all the turns: some microseconds.
const MIDDLE_QUANTUM: i64 = 64 * 1024;
/// How long after a change of users turns are short.
const TOGETHER: Duration = Duration::from_millis(1);
/// How long after a change of users each rests after a turn: some times as long as a program takes
/// to answer a message. Who shares a worker with one that has little to do is hardly slowed down.
const BESIDE: Duration = Duration::from_micros(200);
/// The longest rest. A turn that took longer was interrupted by others on this CPU.
const LONGEST_REST: Duration = Duration::from_micros(100);
/// What a request costs at least, whatever comes of it. One that becomes a message takes at least
/// as long as the copy of this many bytes, some 100 ns.
pub(super) const REQUEST_COST: i64 = 2048;
/// The same of an RDMA Write that is carried out as it stands in the queue: 20 to 40 ns.
pub(super) const SHORT_WRITE_COST: i64 = 1024;
/// What an FPDU costs at least: the request that it belongs to is mostly paid for elsewhere.
pub(super) const FPDU_COST: i64 = 1024;
/// What passing over a QP costs that has yet to repay.
pub(super) const PASS_COST: i64 = 512;
/// What a turn costs at least, with nothing to do in it.
pub(super) const TURN_COST: i64 = 2048;
/// What a system call costs besides what it moves.
pub(super) const CALL_COST: i64 = 8 * 1024;
/// What the end of a stream costs: its record, its events, its socket.
pub(super) const END_COST: i64 = 16 * 1024;
/// What a change of STags costs that all workers make, with the control thread between them.
pub(super) const CHANGE_COST: i64 = 64 * 1024;
/// What a step along a list costs.
pub(super) const STEP_COST: i64 = 64;
/// Nobody owes more than this, so repaying takes a bounded number of steps.
pub(super) const MOST_OWED: i64 = 16 * QUANTUM;
/// What a session repays at least when it is passed over: its user, who repays what it is worth,
/// waits for his turn meanwhile, and so does everybody else.
const REPAID: i64 = 64 * 1024;
/// Who owes more than this is not looked at until he has repaid.
const MUCH_OWED: i64 = 128 * 1024;

/// Index of a QP in its engine.
pub(super) type Key = u32;

/// A session's place in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionSlot(u32);

impl SessionSlot {
    /// Of a session that is not attached: its QPs have no turns.
    pub(super) const NONE: SessionSlot = SessionSlot(u32::MAX);

    pub(super) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Ready QPs by session and user.
#[derive(Default)]
pub(super) struct Schedule {
    /// When the present round began, and whether turns are short in it.
    now: Time,
    short: bool,
    /// Whose turn the last one was, and until when turns are short because it had been another's.
    last: u32,
    short_until: Time,
    /// Until when users rest, for the same reason.
    rest_until: Time,
    /// Whoever is ready waits, because his last turn took long.
    resting: bool,
    /// Users with ready QPs, or in debt for other work, by index.
    turns: VecDeque<u32>,
    users: Vec<User>,
    free_users: Vec<u32>,
    by_user: HashMap<UserId, u32>,
    seats: Vec<Session>,
    free_seats: Vec<u32>,
    /// QPs in all queues.
    ready: usize,
}

struct User {
    id: UserId,
    credit: i64,
    /// He has no turn before, if others have some.
    rests_until: Time,
    /// Sessions with ready QPs.
    turns: VecDeque<SessionSlot>,
    queued: bool,
    /// It has what its turn is worth.
    paid: bool,
    /// Sessions that have a seat.
    sessions: u32,
    /// Held by each receive slab that keeps unread bytes of this user's.
    slabs: Arc<()>,
}

struct Session {
    user: u32,
    credit: i64,
    ready: VecDeque<Key>,
    paid: bool,
    /// Its QPs have turns.
    open: bool,
}

impl Schedule {
    /// A round of turns begins: what it costs at most, one turn more or less.
    pub(super) fn begin_round(&mut self, now: Time) -> i64 {
        self.now = now;
        self.short = now < self.short_until;
        // Of several users, who came while another had his turn has his in the same round.
        if self.short { 2 * SHORT_QUANTUM } else { self.quantum() }
    }

    /// Whether several users had had turns lately when this round began.
    pub(super) fn is_shared(&self) -> bool {
        self.short
    }

    /// What a turn is worth in this round.
    pub(super) fn quantum(&self) -> i64 {
        match (self.short, self.users()) {
            (true, _) => SHORT_QUANTUM,
            (false, 0 | 1) => QUANTUM,
            (false, _) => MIDDLE_QUANTUM,
        }
    }

    /// A seat for a session of this user.
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
        SessionSlot(place(&mut self.seats, &mut self.free_seats, session))
    }

    /// No QP of this session has a turn any more.
    pub(super) fn close(&mut self, seat: SessionSlot) {
        let Some(session) = self.seats.get_mut(seat.index()).filter(|s| s.open) else { return };
        session.open = false;
        self.ready -= session.ready.len();
        if !session.ready.is_empty() {
            session.ready = VecDeque::new();
            // A user without sessions that are ready is forgotten when his turn comes.
            self.users[session.user as usize].turns.retain(|s| *s != seat);
        }
    }

    /// Returns true if the QPs of this session have turns: it has not been closed.
    pub(super) fn is_open(&self, seat: SessionSlot) -> bool {
        self.seats.get(seat.index()).is_some_and(|session| session.open)
    }

    /// Takes back the seat of a session that has no QP any more.
    pub(super) fn leave(&mut self, seat: SessionSlot) {
        self.close(seat);
        let Some(session) = self.seats.get(seat.index()) else { return };
        let at = session.user;
        self.free_seats.push(seat.0);
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

    /// Whose a seat is.
    pub(super) fn user(&self, seat: SessionSlot) -> Option<UserId> {
        self.seats.get(seat.index()).map(|s| self.users[s.user as usize].id)
    }

    /// What receive slabs hold that keep unread bytes of this session's user.
    pub(super) fn slabs(&self, seat: SessionSlot) -> Option<&Arc<()>> {
        self.seats.get(seat.index()).map(|s| &self.users[s.user as usize].slabs)
    }

    /// Adds a QP that is not in the schedule. Whether it has turns.
    pub(super) fn push(&mut self, seat: SessionSlot, key: Key) -> bool {
        let Some(session) = self.seats.get_mut(seat.index()).filter(|s| s.open) else {
            return false;
        };
        let user = &mut self.users[session.user as usize];
        if session.ready.is_empty() {
            user.turns.push_back(seat);
            session.paid = false;
        }
        session.ready.push_back(key);
        self.ready += 1;
        let at = session.user;
        self.queue(at);
        true
    }

    /// A user stands at the end of the queue, if he is not in it.
    fn queue(&mut self, at: u32) {
        let user = &mut self.users[at as usize];
        if !std::mem::replace(&mut user.queued, true) {
            user.paid = false;
            self.turns.push_back(at);
        }
    }

    /// The QP whose turn it is; it leaves the schedule. It may be gone, or another's key, by now.
    pub(super) fn pop(&mut self) -> Option<Key> {
        let quantum = self.quantum();
        // Nobody who rests leaves the queue here: whoever is the first of them is come by again.
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
            let Some(&seat) = user.turns.front() else {
                user.queued = false;
                self.turns.pop_front();
                continue;
            };
            let session = &mut self.seats[seat.index()];
            if !has_turn(&mut session.credit, &mut session.paid, quantum.max(REPAID), quantum) {
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
                    self.short_until = self.now.after(TOGETHER);
                    self.rest_until = self.now.after(BESIDE);
                }
                return key;
            }
        }
        None
    }

    /// The turn of whoever left the schedule last took so long.
    pub(super) fn turn_over(&mut self, began: Time, now: Time) {
        if let Some(user) = self.users.get_mut(self.last as usize) {
            user.rests_until = now.after(now.since(began).min(LONGEST_REST));
        }
    }

    /// Whether all who are ready rest.
    pub(super) fn is_resting(&self) -> bool {
        self.resting
    }

    /// The time has passed since the round began.
    pub(super) fn set_now(&mut self, now: Time) {
        self.now = now;
    }

    /// Has a session and its user pay for work.
    pub(super) fn charge(&mut self, seat: SessionSlot, cost: i64) {
        let Some(session) = self.seats.get_mut(seat.index()) else { return };
        session.credit = (session.credit - cost).max(-MOST_OWED);
        let at = session.user;
        let user = &mut self.users[at as usize];
        user.credit = (user.credit - cost).max(-MOST_OWED);
        if user.credit < -MUCH_OWED {
            // He repays while others have turns, whether or not a QP of his is ready.
            self.queue(at);
        }
    }

    /// Whether the user of a session has yet to repay what took more than a turn.
    pub(super) fn owes(&self, seat: SessionSlot) -> bool {
        let user = |s: &Session| &self.users[s.user as usize];
        self.seats.get(seat.index()).is_some_and(|s| user(s).credit < -MUCH_OWED)
    }

    /// Users with a session.
    pub(super) fn users(&self) -> usize {
        self.by_user.len()
    }

    /// Whether nobody is ready.
    pub(super) fn is_empty(&self) -> bool {
        self.ready == 0
    }
}

/// Who has come to the front gets so much, once, and has what a turn is worth at most; whether any
/// of it is left. If not, he goes to the end.
fn has_turn(credit: &mut i64, paid: &mut bool, gets: i64, quantum: i64) -> bool {
    if !*paid {
        *credit = (*credit + gets).min(quantum);
    }
    *paid = *credit > 0;
    *paid
}

/// Puts something into a list with holes: its index.
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

    /// Serves ready QPs that always have more to do, each at this cost, and says how often each
    /// was.
    fn serve(
        s: &mut Schedule,
        turns: usize,
        of: impl Fn(Key) -> (SessionSlot, i64),
    ) -> HashMap<SessionSlot, i64> {
        let mut served = HashMap::new();
        for _ in 0..turns {
            let key = s.pop().expect("ready");
            let (seat, cost) = of(key);
            s.charge(seat, cost);
            *served.entry(seat).or_default() += cost;
            assert!(s.push(seat, key));
        }
        served
    }

    #[test]
    fn sessions_take_turns_however_many_qps_they_have() {
        let mut s = Schedule::default();
        let (one, two) = (s.join(UserId(1)), s.join(UserId(1)));
        for key in 0..10 {
            s.push(one, key);
        }
        s.push(two, 100);
        let mut order = Vec::new();
        for _ in 0..6 {
            let key = s.pop().unwrap();
            order.push(key);
            let seat = if key == 100 { two } else { one };
            s.charge(seat, QUANTUM);
            s.push(seat, key);
        }
        assert_eq!(order, [0, 100, 1, 100, 2, 100]);
    }

    #[test]
    fn users_share_however_many_sessions_they_have_and_however_small_their_turns_are() {
        // Costs of a turn of the one with a single session, and of the one with twenty.
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
            let seats: Vec<SessionSlot> = (0..20).map(|_| s.join(UserId(2))).collect();
            // Enough QPs to use up a turn, however little each needs.
            for key in 0..256 {
                s.push(alone, key);
            }
            for key in 256..2816 {
                s.push(seats[key as usize % 20], key);
            }
            let seat_of = |key: Key| match key {
                0..256 => (alone, one),
                _ => (seats[key as usize % 20], many),
            };
            let served = serve(&mut s, 40_000, seat_of);
            let (of_one, all) = (served[&alone], served.values().sum::<i64>());
            let share = of_one as f64 / all as f64;
            assert!((0.48..0.52).contains(&share), "{one} against {many}: {share}");
            let of_many: Vec<i64> = seats.iter().map(|seat| served[seat]).collect();
            let (least, most) = (of_many.iter().min().unwrap(), of_many.iter().max().unwrap());
            assert!(least * 2 > *most - QUANTUM, "{one} against {many}: {of_many:?}");
        }
    }

    #[test]
    fn turns_are_short_while_several_users_have_them() {
        let mut s = Schedule::default();
        let (one, two) = (s.join(UserId(1)), s.join(UserId(2)));
        assert_eq!(s.begin_round(Time(1)), MIDDLE_QUANTUM);
        s.push(one, 1);
        assert_eq!(s.pop(), Some(1));
        assert!(!s.is_shared());
        s.push(two, 2);
        assert_eq!(s.pop(), Some(2));
        let ms = |n: u64| Time(1 + n * 1_000_000);
        assert_eq!(s.begin_round(Time(2)), 2 * SHORT_QUANTUM);
        // Others wait as long as a few of his requests take.
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
        // Alone again.
        assert_eq!(s.begin_round(ms(2)), MIDDLE_QUANTUM);
        assert!(!s.is_shared());
        s.leave(two);
        assert_eq!(s.begin_round(ms(3)), QUANTUM);
    }

    #[test]
    fn who_had_a_turn_beside_others_rests_for_as_long_as_it_took() {
        let us = |n: u64| Time(1_000_000 + n * 1000);
        let mut s = Schedule::default();
        let (one, two) = (s.join(UserId(1)), s.join(UserId(2)));
        // Alone nobody rests.
        s.begin_round(us(0));
        s.push(one, 1);
        assert_eq!(s.pop(), Some(1));
        s.turn_over(us(0), us(20));
        s.set_now(us(20));
        s.push(one, 1);
        assert_eq!(s.pop(), Some(1));
        // Now another comes.
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
        // Who does not rest has his turn meanwhile.
        s.push(two, 2);
        assert_eq!((s.pop(), s.is_resting()), (Some(2), false));
        s.turn_over(us(80), us(81));
        s.set_now(us(81));
        assert_eq!(s.pop(), Some(1));
        // An interruption is not his, and nobody rests for who has been away for long.
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
    fn who_owes_repays_a_turn_at_a_time_beside_those_who_rest() {
        let us = |n: u64| Time(1_000_000 + n * 1000);
        let mut s = Schedule::default();
        let (one, two, debtor) = (s.join(UserId(1)), s.join(UserId(2)), s.join(UserId(3)));
        s.set_now(us(0));
        for (seat, key) in [(one, 1), (two, 2)] {
            s.push(seat, key);
            assert_eq!(s.pop(), Some(key));
            s.turn_over(us(0), us(50));
        }
        s.push(one, 1);
        s.push(two, 2);
        // The last in the queue, who leaves it with his last payment.
        s.charge(debtor, 3 * MIDDLE_QUANTUM + 1);
        for owes in [true, false, false, false] {
            assert_eq!((s.pop(), s.is_resting()), (None, true));
            assert_eq!(s.owes(debtor), owes);
        }
        s.set_now(us(100));
        assert_eq!((s.pop(), s.pop(), s.pop()), (Some(1), Some(2), None));
    }

    #[test]
    fn what_is_overdrawn_is_repaid_and_no_longer_looked_at_until_then() {
        let mut s = Schedule::default();
        let (debtor, other) = (s.join(UserId(1)), s.join(UserId(2)));
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
        // Who has nothing ready repays as well, and keeps nobody busy.
        assert!(s.is_empty());
        s.charge(debtor, i64::MAX / 2);
        assert!(s.owes(debtor) && s.is_empty());
        assert_eq!(s.pop(), None);
        assert!(!s.owes(debtor));
    }

    #[test]
    fn a_closed_session_is_not_served_and_a_seat_is_used_again() {
        let mut s = Schedule::default();
        let (one, two) = (s.join(UserId(1)), s.join(UserId(2)));
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
