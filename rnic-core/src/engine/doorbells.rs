//! Doorbells: which session rang for which QP, CQ or shared receive queue.
//!
//! A session that rang lately is polled; one that has been silent for [`POLL_FOR`] is told to use
//! its eventfd and is not looked at again until that fires. So a thousand idle clients cost
//! nothing.
//!
//! What a scan looks at and finds is bounded for each user: of a user with many sessions it visits
//! some, the next scan the next. QPs that wait for room in a CQ or for a receive may be thousands
//! for one ring; they are woken some at a time.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::qp_core::QpCore;
use super::schedule::{Key, REQUEST_COST, STEP_COST, Schedule, SessionSlot};
use crate::abi::queue::doorbell;
use crate::device::{Cq, Srq};
use crate::shm::doorbell::DoorbellScanner;
use crate::types::{SessionId, Time, UserId};

/// How long a session is polled after it last rang.
const POLL_FOR: Duration = Duration::from_micros(200);
/// Sessions of a user that a scan visits.
const SESSIONS_PER_SCAN: usize = 8;
/// QPs of a user after which a scan looks for no more.
const ENOUGH: usize = 64;

/// A session's doorbell page on this worker.
struct Session {
    id: SessionId,
    scanner: DoorbellScanner,
    /// QP by doorbell index.
    targets: Vec<Option<Key>>,
    /// QPs that wait for room in the CQ with this doorbell index.
    full: HashMap<u32, FullCq>,
    /// Shared receive queues by doorbell index, with the number of QPs that wait for a receive.
    awaited: HashMap<u32, (Arc<Srq>, u32)>,
    /// When it rang last, while it is polled.
    rang: Option<Time>,
}

/// A CQ without room.
struct FullCq {
    cq: Arc<Cq>,
    qps: BTreeSet<Key>,
}

impl FullCq {
    /// Its QPs may try again; those that fail will ask again to be woken.
    fn release(self, worker: u32, late: &mut VecDeque<Key>) {
        self.cq.stop_waiting(worker);
        late.extend(self.qps);
    }
}

/// What is to be looked at of a user.
struct Watched {
    user: UserId,
    /// Sessions that are polled, those first that have waited longest.
    polled: VecDeque<SessionSlot>,
    /// QPs that may have got what they waited for, and are still to be woken.
    late: VecDeque<Key>,
}

/// The doorbells of all sessions attached to this worker.
#[derive(Default)]
pub(super) struct Doorbells {
    seats: Vec<Option<Session>>,
    by_id: HashMap<SessionId, SessionSlot>,
    /// Users of whom something is to be looked at.
    watched: Vec<Watched>,
}

impl Doorbells {
    pub(super) fn attach(
        &mut self,
        id: SessionId,
        user: UserId,
        seat: SessionSlot,
        scanner: DoorbellScanner,
        now: Time,
    ) {
        let session = Session {
            id,
            scanner,
            targets: Vec::new(),
            full: HashMap::new(),
            awaited: HashMap::new(),
            rang: Some(now),
        };
        if self.seats.len() <= seat.index() {
            self.seats.resize_with(seat.index() + 1, || None);
        }
        self.seats[seat.index()] = Some(session);
        self.by_id.insert(id, seat);
        self.watch(user).polled.push_back(seat);
    }

    /// What is watched of a user.
    fn watch(&mut self, user: UserId) -> &mut Watched {
        let at = self.watched.iter().position(|w| w.user == user).unwrap_or_else(|| {
            self.watched.push(Watched { user, polled: VecDeque::new(), late: VecDeque::new() });
            self.watched.len() - 1
        });
        &mut self.watched[at]
    }

    /// Looks at a session's doorbells no longer.
    pub(super) fn close(&mut self, seat: SessionSlot) {
        for watched in &mut self.watched {
            watched.polled.retain(|s| *s != seat);
        }
    }

    pub(super) fn detach(&mut self, seat: SessionSlot) {
        self.close(seat);
        if let Some(s) = self.seats.get_mut(seat.index()).and_then(Option::take) {
            self.by_id.remove(&s.id);
        }
    }

    /// The seat of a session.
    pub(super) fn seat(&self, id: SessionId) -> SessionSlot {
        self.by_id.get(&id).copied().unwrap_or(SessionSlot::NONE)
    }

    /// The QP with this doorbell index, if there is one; `None` behind the last index.
    pub(super) fn target(&self, seat: SessionSlot, index: usize) -> Option<Option<Key>> {
        self.seats.get(seat.index())?.as_ref()?.targets.get(index).copied()
    }

    fn at(&mut self, seat: SessionSlot) -> Option<&mut Session> {
        self.seats.get_mut(seat.index())?.as_mut()
    }

    /// Routes a doorbell index to a QP.
    pub(super) fn route(&mut self, seat: SessionSlot, index: u32, key: Key) {
        if let Some(s) = self.at(seat)
            && index < doorbell::INDICES
        {
            let at = index as usize;
            if s.targets.len() <= at {
                s.targets.resize(at + 1, None);
            }
            s.targets[at] = Some(key);
        }
    }

    /// Forgets a QP, with the CQs it may wait for. A CQ for which it alone has waited is forgotten
    /// as well: it may go next, and its doorbell index and its memory belong to something else
    /// then.
    pub(super) fn unroute(&mut self, qp: &QpCore, worker: u32) {
        if let Some(s) = self.at(qp.seat) {
            if let Some(t) = s.targets.get_mut(qp.doorbell as usize) {
                *t = None;
            }
            for cq in [&qp.send_cq, &qp.recv_cq] {
                if let Some(full) = s.full.get_mut(&cq.doorbell()) {
                    full.qps.remove(&qp.key);
                    if full.qps.is_empty() {
                        s.full.remove(&cq.doorbell());
                        cq.stop_waiting(worker);
                    }
                }
            }
        }
    }

    /// Remembers that a QP waits for room in a CQ.
    pub(super) fn await_space(&mut self, seat: SessionSlot, cq: &Arc<Cq>, key: Key) {
        if let Some(s) = self.at(seat) {
            let new = || FullCq { cq: cq.clone(), qps: BTreeSet::new() };
            s.full.entry(cq.doorbell()).or_insert_with(new).qps.insert(key);
        }
    }

    /// A CQ has room again, by no doing of its client: the next scans wake who waits for it.
    pub(super) fn space_freed(&mut self, cq: &Cq, worker: u32, schedule: &Schedule) {
        let seat = self.seat(cq.session());
        let full = self.at(seat).and_then(|s| s.full.remove(&cq.doorbell()));
        if let (Some(full), Some(user)) = (full, schedule.user(seat)) {
            full.release(worker, &mut self.watch(user).late);
        }
    }

    /// Remembers that a QP waits for a receive of a shared queue.
    pub(super) fn await_receive(&mut self, seat: SessionSlot, srq: &Arc<Srq>) {
        if let Some(s) = self.at(seat) {
            s.awaited.entry(srq.doorbell()).or_insert_with(|| (srq.clone(), 0)).1 += 1;
        }
    }

    /// A QP waits no longer.
    pub(super) fn stop_awaiting(&mut self, seat: SessionSlot, srq: &Srq) {
        if let Some(s) = self.at(seat)
            && let Some((_, waiting)) = s.awaited.get_mut(&srq.doorbell())
        {
            *waiting -= 1;
            if *waiting == 0 {
                s.awaited.remove(&srq.doorbell());
            }
        }
    }

    /// Receives of a shared queue may be had: the next scans wake the QPs they are for.
    pub(super) fn receives_posted(&mut self, srq: &Srq, worker: u32, schedule: &mut Schedule) {
        let seat = self.seat(srq.session());
        if let Some(user) = schedule.user(seat) {
            let late = &mut self.watch(user).late;
            let steps = srq.ready(worker, |key| late.push_back(key));
            schedule.charge(seat, steps * STEP_COST);
        }
    }

    /// The session's eventfd fired: poll it again.
    pub(super) fn rang(&mut self, id: SessionId, now: Time, schedule: &Schedule) {
        let seat = self.seat(id);
        let Some(s) = self.at(seat) else { return };
        if s.rang.replace(now).is_none() {
            s.scanner.awake();
            if let Some(user) = schedule.user(seat) {
                self.watch(user).polled.push_back(seat);
            }
        }
    }

    /// Collects QPs that rang, whose CQ has room again, or whose shared receive queue has a receive
    /// for them, into `ready`. What is left, the next scans find.
    pub(super) fn scan(
        &mut self,
        now: Time,
        worker: u32,
        schedule: &mut Schedule,
        ready: &mut Vec<Key>,
    ) {
        let Doorbells { seats, watched, .. } = self;
        let mut at = 0;
        while let Some(Watched { polled, late, .. }) = watched.get_mut(at) {
            let enough = ready.len() + ENOUGH;
            for _ in 0..polled.len().min(SESSIONS_PER_SCAN) {
                let Some(seat) = polled.pop_front() else { break };
                let Some(s) = seats.get_mut(seat.index()).and_then(Option::as_mut) else {
                    continue;
                };
                if schedule.owes(seat) || ready.len() >= enough {
                    polled.push_front(seat);
                    break;
                }
                let Session { scanner, targets, full, awaited, rang, .. } = s;
                let mut steps = 0;
                let any = scanner.scan(|index| {
                    if let Some(Some(key)) = targets.get(index as usize) {
                        ready.push(*key);
                    } else if !full.is_empty()
                        && let Some(full) = full.remove(&index)
                    {
                        full.release(worker, late);
                    } else if let Some((srq, _)) = awaited.get(&index) {
                        steps += REQUEST_COST / STEP_COST;
                        steps += srq.ready(worker, |key| late.push_back(key));
                    }
                });
                if steps > 0 {
                    schedule.charge(seat, steps * STEP_COST);
                }
                if any {
                    *rang = Some(now);
                }
                // An interval that began in the future (a clock of tests) is an interval of zero.
                let silent = rang.is_none_or(|at| now.since(at) > POLL_FOR);
                if silent && scanner.prepare_sleep() {
                    *rang = None;
                } else {
                    polled.push_back(seat);
                }
            }
            let some = late.len().min(enough.saturating_sub(ready.len()));
            ready.extend(late.drain(..some));
            if polled.is_empty() && late.is_empty() {
                watched.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Puts every polled session to sleep; false if one has rung in the meantime, or somebody is
    /// still to be woken.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        let Doorbells { seats, watched, .. } = self;
        watched.retain_mut(|Watched { polled, late, .. }| {
            polled.retain(|seat| {
                let Some(s) = seats.get_mut(seat.index()).and_then(Option::as_mut) else {
                    return false;
                };
                let asleep = s.scanner.prepare_sleep();
                if asleep {
                    s.rang = None;
                }
                !asleep
            });
            !polled.is_empty() || !late.is_empty()
        });
        watched.is_empty()
    }
}
