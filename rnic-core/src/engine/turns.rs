//! The turns of queue pairs, in rounds.

use super::Engine;
use super::interface::Work;
use super::link::LinkTurn;
use super::qp::Qp;
use super::schedule::{PASS_COST, QUANTUM, TURN_COST};
use super::state::{EngineState, Peer};
use crate::types::{QpId, Time};

impl Engine {
    /// Begins a round: looks at the doorbells of sessions that rang lately. Whether any did.
    pub fn poll_doorbells(&mut self, now: Time) -> bool {
        let ended = self.begin_round(now);
        let mut rung = std::mem::take(&mut self.rung);
        let EngineState { doorbells, schedule, worker, .. } = &mut self.state;
        doorbells.scan(now, *worker, schedule, &mut rung);
        let any = !rung.is_empty() || ended;
        for key in rung.drain(..) {
            if let Some(qp) = self.qps.get_mut(key as usize).and_then(Option::as_mut) {
                self.state.wake(&mut qp.core);
            }
        }
        self.rung = rung;
        any
    }

    fn begin_round(&mut self, now: Time) -> bool {
        self.state.now = now;
        self.state.round = self.state.schedule.begin_round(now);
        self.end_dying()
    }

    /// The next QP whose turn needs the worker's hands. Turns that do not are taken here; while
    /// several users have turns, each is told. A round ends, by `None`, after so much work as
    /// others can wait for: then [`poll_doorbells`](Self::poll_doorbells) begins the next.
    pub fn poll_work(&mut self, now: Time) -> Option<Work> {
        self.state.now = now;
        self.state.schedule.set_now(now);
        while self.state.round > 0 {
            let key = self.state.schedule.pop()?;
            // It may have gone, and its key be another's by now.
            let Some(mut qp) = self.qps.get_mut(key as usize).and_then(Option::take) else {
                continue;
            };
            if !qp.core.turn.scheduled {
                self.qps[key as usize] = Some(qp);
                continue;
            }
            let turn = &mut qp.core.turn;
            turn.scheduled = false;
            // Its user repays what it overdraws, turn by turn; a QP that is alone would do so
            // twice.
            turn.deficit = (turn.deficit + QUANTUM).min(self.state.schedule.quantum());
            let work = self.take_turn(&mut qp);
            self.qps[key as usize] = Some(qp);
            self.deliver_pending();
            if work.is_some() {
                return work;
            }
            if self.state.schedule.is_shared() {
                return Some(Work::TurnTaken);
            }
        }
        None
    }

    /// The turn that [`poll_work`](Self::poll_work) spoke of last took from `began` until `now`.
    /// While several users have turns, its user has no other for as long: a share of the time is
    /// left to who is about to be ready, however much each turn takes.
    pub fn turn_over(&mut self, began: Time, now: Time) {
        self.state.schedule.turn_over(began, now);
    }

    /// Whether all who are ready rest, so that [`poll_work`](Self::poll_work) has nothing for now.
    pub fn is_resting(&self) -> bool {
        self.state.schedule.is_resting()
    }

    /// Turns taken so far, but for those in which a socket is only to be read.
    pub fn turns(&self) -> u64 {
        self.state.turns
    }

    /// Whether some QP waits for its turn.
    pub fn has_work(&self) -> bool {
        !self.state.schedule.is_empty()
    }

    /// Whether several users have had turns lately.
    pub fn is_shared(&self) -> bool {
        self.state.schedule.is_shared()
    }

    /// How many users have a session.
    pub fn users(&self) -> usize {
        self.state.schedule.users()
    }

    /// The turn of a QP that is about to be destroyed: what was posted before goes out as far as it
    /// can at once, as an adapter would have sent it by now. Its user pays for the turn as for any
    /// other, and has none if he has yet to repay earlier ones.
    pub fn take_last_turn(&mut self, id: QpId, now: Time) -> Option<Work> {
        self.state.now = now;
        let key = *self.by_id.get(&id)?;
        let mut qp = self.qps[key as usize].take()?;
        let turn = &mut qp.core.turn;
        turn.deficit = (turn.deficit + QUANTUM).min(self.state.schedule.quantum());
        let work = match turn.is_over() {
            true => None,
            false => {
                turn.wanted = true;
                self.take_turn(&mut qp)
            }
        };
        self.qps[key as usize] = Some(qp);
        self.deliver_pending();
        work
    }

    /// The turn of a QP that has just left the schedule.
    fn take_turn(&mut self, qp: &mut Box<Qp>) -> Option<Work> {
        if qp.core.turn.is_over() {
            // It has yet to repay earlier ones.
            self.state.round -= PASS_COST;
            self.state.line_up(&mut qp.core);
            return None;
        }
        let before = qp.core.turn.deficit;
        let mut work = None;
        if std::mem::take(&mut qp.core.turn.wanted) {
            self.state.turns += 1;
            qp.resume_flush(&mut self.state);
            qp.resume_receiving(&mut self.state);
            qp.read_unread(&mut self.state);
            match qp.link.turn() {
                LinkTurn::Idle => {}
                LinkTurn::Transmit => work = Some(Work::Transmit(qp.core.id)),
                LinkTurn::HandOver(peer) => self.hand_over(qp, peer),
                LinkTurn::FindNobody => qp.find_nobody(&mut self.state),
                LinkTurn::Datagrams => self.send_datagrams(qp),
            }
            qp.watch(&mut self.state);
        }
        let turn = &mut qp.core.turn;
        turn.deficit = turn.deficit.min(before - TURN_COST);
        if turn.readable {
            // One thing at a time, and what was read before comes first.
            if work.is_some() || qp.has_unread() || qp.core.turn.is_over() {
                self.state.line_up(&mut qp.core);
            } else {
                qp.core.turn.readable = false;
                work = Some(Work::Receive(qp.core.id));
            }
        }
        self.state.settle(&mut qp.core, before);
        work
    }

    /// One turn of a direct connection.
    pub(super) fn hand_over(&mut self, qp: &mut Box<Qp>, to: Peer) {
        if to.id == qp.core.id {
            qp.run_to_itself(&mut self.state);
        } else {
            let Some(place) = self.qps.get_mut(to.key as usize) else { return };
            // The QPs of a closed session answer nothing: its STags are gone, which must not look
            // like an error of the request. The end of the peer wakes this QP.
            let schedule = &self.state.schedule;
            let answers = |peer: &Qp| peer.core.id == to.id && schedule.is_open(peer.core.seat);
            let Some(mut peer) = place.take_if(|peer| answers(peer)) else { return };
            qp.run_direct(&mut peer, &mut self.state);
            self.qps[to.key as usize] = Some(peer);
        }
        if qp.core.turn.is_over() {
            self.state.wake(&mut qp.core);
        }
    }
}
