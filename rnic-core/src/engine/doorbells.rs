//! Doorbells of sessions, which ring for QPs, CQs and SRQs.
//!
//! A session that rang recently is polled. A session that has been silent for [`POLL_FOR`] switches
//! to its eventfd and is not polled until the eventfd fires, so idle clients cost nothing.
//!
//! Each scan limits the sessions that it visits and the QPs that it finds for each user, and the
//! next scan continues with the user's next session. Thousands of QPs may wait for room in one CQ
//! or for receives of one SRQ, so each scan wakes only some of them.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::qp_core::QpCore;
use super::schedule::{Key, REQUEST_COST, STEP_COST, Schedule, SessionSlot};
use crate::device::{Cq, Srq};
use rnic_abi::abi::queue::doorbell;
use rnic_abi::shm::doorbell::DoorbellScanner;
use rnic_abi::types::{SessionId, Time, UserId};

/// Time for which a session is polled after it last rang.
const POLL_FOR: Duration = Duration::from_micros(200);
/// Sessions of a user that one scan visits.
const SESSIONS_PER_SCAN: usize = 8;
/// QPs of a user after which a scan visits no more of its sessions.
const MAX_READY: usize = 64;

/// A session's doorbell page on this worker.
struct Session {
    id: SessionId,
    scanner: DoorbellScanner,
    /// QPs by doorbell index.
    targets: Vec<Option<Key>>,
    /// Full CQs by doorbell index, with the QPs that wait for room.
    full: HashMap<u32, FullCq>,
    /// SRQs by doorbell index, with the number of QPs that wait for a receive.
    awaited: HashMap<u32, (Arc<Srq>, u32)>,
    /// Time of the last ring, or `None` if the session is not polled.
    rang: Option<Time>,
}

/// A full CQ.
struct FullCq {
    cq: Arc<Cq>,
    qps: BTreeSet<Key>,
}

impl FullCq {
    /// Queues the QPs that wait here for wake-up. A QP that still finds no room waits again.
    fn release(self, worker: u32, to_wake: &mut VecDeque<Key>) {
        self.cq.stop_waiting(worker);
        to_wake.extend(self.qps);
    }
}

/// Polled sessions and QPs to be woken of one user.
struct Watched {
    user: UserId,
    /// Polled sessions, longest unvisited first.
    polled: VecDeque<SessionSlot>,
    /// QPs still to be woken, because the slot or receive that they wait for may be available.
    to_wake: VecDeque<Key>,
}

/// The doorbells of all sessions attached to this worker.
#[derive(Default)]
pub(super) struct Doorbells {
    slots: Vec<Option<Session>>,
    by_id: HashMap<SessionId, SessionSlot>,
    /// Users with polled sessions or QPs to be woken.
    watched: Vec<Watched>,
}

impl Doorbells {
    pub(super) fn attach(
        &mut self,
        id: SessionId,
        user: UserId,
        slot: SessionSlot,
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
        if self.slots.len() <= slot.index() {
            self.slots.resize_with(slot.index() + 1, || None);
        }
        self.slots[slot.index()] = Some(session);
        self.by_id.insert(id, slot);
        self.watch(user).polled.push_back(slot);
    }

    /// Returns the watched state of a user, and adds it if it is missing.
    fn watch(&mut self, user: UserId) -> &mut Watched {
        let at = self.watched.iter().position(|w| w.user == user).unwrap_or_else(|| {
            self.watched.push(Watched { user, polled: VecDeque::new(), to_wake: VecDeque::new() });
            self.watched.len() - 1
        });
        &mut self.watched[at]
    }

    /// Stops polling the doorbells of a session.
    pub(super) fn close(&mut self, slot: SessionSlot) {
        for watched in &mut self.watched {
            watched.polled.retain(|s| *s != slot);
        }
    }

    pub(super) fn detach(&mut self, slot: SessionSlot) {
        self.close(slot);
        if let Some(s) = self.slots.get_mut(slot.index()).and_then(Option::take) {
            self.by_id.remove(&s.id);
        }
    }

    /// Returns the slot of a session, or [`SessionSlot::NONE`] if it is not attached.
    pub(super) fn slot(&self, id: SessionId) -> SessionSlot {
        self.by_id.get(&id).copied().unwrap_or(SessionSlot::NONE)
    }

    /// Returns the QP, if any, with this doorbell index, or the outer `None` beyond the last index.
    pub(super) fn target(&self, slot: SessionSlot, index: usize) -> Option<Option<Key>> {
        self.slots.get(slot.index())?.as_ref()?.targets.get(index).copied()
    }

    fn at(&mut self, slot: SessionSlot) -> Option<&mut Session> {
        self.slots.get_mut(slot.index())?.as_mut()
    }

    /// Routes a doorbell index to a QP.
    pub(super) fn route(&mut self, slot: SessionSlot, index: u32, key: Key) {
        if let Some(s) = self.at(slot)
            && index < doorbell::INDICES
        {
            let at = index as usize;
            if s.targets.len() <= at {
                s.targets.resize(at + 1, None);
            }
            s.targets[at] = Some(key);
        }
    }

    /// Removes a QP and its waits for CQ space. A CQ without other waiters is removed too, because
    /// it may be destroyed next and its doorbell index and memory reused.
    pub(super) fn unroute(&mut self, qp: &QpCore, worker: u32) {
        if let Some(s) = self.at(qp.slot) {
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

    /// Registers a QP that waits for room in a CQ.
    pub(super) fn await_space(&mut self, slot: SessionSlot, cq: &Arc<Cq>, key: Key) {
        if let Some(s) = self.at(slot) {
            let new = || FullCq { cq: cq.clone(), qps: BTreeSet::new() };
            s.full.entry(cq.doorbell()).or_insert_with(new).qps.insert(key);
        }
    }

    /// Wakes the QPs that wait for a CQ in which the daemon, not the client, has freed slots. The
    /// next scans return them.
    pub(super) fn space_freed(&mut self, cq: &Cq, worker: u32, schedule: &Schedule) {
        let slot = self.slot(cq.session());
        let full = self.at(slot).and_then(|s| s.full.remove(&cq.doorbell()));
        if let (Some(full), Some(user)) = (full, schedule.user(slot)) {
            full.release(worker, &mut self.watch(user).to_wake);
        }
    }

    /// Registers a QP that waits for a receive of an SRQ.
    pub(super) fn await_receive(&mut self, slot: SessionSlot, srq: &Arc<Srq>) {
        if let Some(s) = self.at(slot) {
            s.awaited.entry(srq.doorbell()).or_insert_with(|| (srq.clone(), 0)).1 += 1;
        }
    }

    /// Removes a QP that waited for a receive of an SRQ.
    pub(super) fn stop_awaiting(&mut self, slot: SessionSlot, srq: &Srq) {
        if let Some(s) = self.at(slot)
            && let Some((_, waiting)) = s.awaited.get_mut(&srq.doorbell())
        {
            *waiting -= 1;
            if *waiting == 0 {
                s.awaited.remove(&srq.doorbell());
            }
        }
    }

    /// Wakes the QPs for which an SRQ has receives. The next scans return them.
    pub(super) fn receives_posted(&mut self, srq: &Srq, worker: u32, schedule: &mut Schedule) {
        let slot = self.slot(srq.session());
        if let Some(user) = schedule.user(slot) {
            let to_wake = &mut self.watch(user).to_wake;
            let steps = srq.ready(worker, |key| to_wake.push_back(key));
            schedule.charge(slot, steps * STEP_COST);
        }
    }

    /// Resumes polling a session after its eventfd fired.
    pub(super) fn rang(&mut self, id: SessionId, now: Time, schedule: &Schedule) {
        let slot = self.slot(id);
        let Some(s) = self.at(slot) else { return };
        if s.rang.replace(now).is_none() {
            s.scanner.awake();
            if let Some(user) = schedule.user(slot) {
                self.watch(user).polled.push_back(slot);
            }
        }
    }

    /// Collects into `ready` the QPs that rang, or that may now get a CQ slot or a receive of an
    /// SRQ. The next scans return the rest.
    pub(super) fn scan(
        &mut self,
        now: Time,
        worker: u32,
        schedule: &mut Schedule,
        ready: &mut Vec<Key>,
    ) {
        let Doorbells { slots, watched, .. } = self;
        let mut at = 0;
        while let Some(Watched { polled, to_wake, .. }) = watched.get_mut(at) {
            let enough = ready.len() + MAX_READY;
            for _ in 0..polled.len().min(SESSIONS_PER_SCAN) {
                let Some(slot) = polled.pop_front() else { break };
                let Some(s) = slots.get_mut(slot.index()).and_then(Option::as_mut) else {
                    continue;
                };
                if schedule.owes(slot) || ready.len() >= enough {
                    polled.push_front(slot);
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
                        full.release(worker, to_wake);
                    } else if let Some((srq, _)) = awaited.get(&index) {
                        steps += REQUEST_COST / STEP_COST;
                        steps += srq.ready(worker, |key| to_wake.push_back(key));
                    }
                });
                if steps > 0 {
                    schedule.charge(slot, steps * STEP_COST);
                }
                if any {
                    *rang = Some(now);
                }
                // A time in the future (the clock of a test) counts as now.
                let silent = rang.is_none_or(|at| now.since(at) > POLL_FOR);
                if silent && scanner.prepare_sleep() {
                    *rang = None;
                } else {
                    polled.push_back(slot);
                }
            }
            let some = to_wake.len().min(enough.saturating_sub(ready.len()));
            ready.extend(to_wake.drain(..some));
            if polled.is_empty() && to_wake.is_empty() {
                watched.swap_remove(at);
            } else {
                at += 1;
            }
        }
    }

    /// Switches every polled session to its eventfd. Returns false if one has rung since, or if QPs
    /// are still to be woken.
    pub(super) fn prepare_sleep(&mut self) -> bool {
        let Doorbells { slots, watched, .. } = self;
        watched.retain_mut(|Watched { polled, to_wake, .. }| {
            polled.retain(|slot| {
                let Some(s) = slots.get_mut(slot.index()).and_then(Option::as_mut) else {
                    return false;
                };
                let asleep = s.scanner.prepare_sleep();
                if asleep {
                    s.rang = None;
                }
                !asleep
            });
            !polled.is_empty() || !to_wake.is_empty()
        });
        watched.is_empty()
    }
}
