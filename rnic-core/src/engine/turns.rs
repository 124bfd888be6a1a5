//! Rounds, and the turns of QPs in them.

use super::Engine;
use super::interface::Work;
use super::link::LinkTurn;
use super::qp::Qp;
use super::schedule::{PASS_COST, QUANTUM, TURN_COST};
use super::state::{EngineState, Peer};
use rnic_abi::types::{QpId, Time};

impl Engine {
    /// Begins a round and scans the doorbells of sessions that rang recently. Returns true if there
    /// is work.
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
        self.end_dead_queue()
    }

    /// Takes the turns of the next QPs, and returns the next turn that needs a call by the worker.
    /// While several users have turns, returns after each turn. Returns `None` at the end of the
    /// round, which is short enough for other work of the worker.
    /// [`poll_doorbells`](Self::poll_doorbells) then begins the next round.
    pub fn poll_work(&mut self, now: Time) -> Option<Work> {
        self.state.now = now;
        self.state.schedule.set_now(now);
        while self.state.round > 0 {
            let key = self.state.schedule.pop()?;
            // The QP may have been destroyed, and its key reused.
            let Some(mut qp) = self.qps.get_mut(key as usize).and_then(Option::take) else {
                continue;
            };
            if !qp.core.turn.scheduled {
                self.qps[key as usize] = Some(qp);
                continue;
            }
            let turn = &mut qp.core.turn;
            turn.scheduled = false;
            // The QP is credited a full `QUANTUM`, because its user repays overdrawn turns.
            // Otherwise a single busy QP would repay twice.
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

    /// Ends the last turn of [`poll_work`](Self::poll_work), which took from `began` until `now`.
    /// While several users have turns, the user then rests for as long as the turn took, so that
    /// users that become ready soon get their share regardless of the length of turns.
    pub fn turn_over(&mut self, began: Time, now: Time) {
        self.state.schedule.turn_over(began, now);
    }

    /// Returns true if all users with work are resting, so that [`poll_work`](Self::poll_work) has
    /// none for now.
    pub fn is_resting(&self) -> bool {
        self.state.schedule.is_resting()
    }

    /// Returns the number of turns taken, excluding turns that only read a socket.
    pub fn turns(&self) -> u64 {
        self.state.turns
    }

    /// Returns true if a QP waits for its turn.
    pub fn has_work(&self) -> bool {
        !self.state.schedule.is_empty()
    }

    /// Returns true if several users have had turns lately.
    pub fn is_shared(&self) -> bool {
        self.state.schedule.is_shared()
    }

    /// Returns the number of users with a session.
    pub fn users(&self) -> usize {
        self.state.schedule.users()
    }

    /// Takes a turn of a QP at once: its last one before it is destroyed or moves to Error, so that
    /// posted requests are sent as far as possible, as a RoCE adapter would have done by now. The
    /// user is charged for the turn as for any other. A QP that must still repay earlier turns has
    /// to wait for the next one.
    pub fn take_turn_now(&mut self, id: QpId, now: Time) -> Option<Work> {
        self.state.now = now;
        let key = *self.by_id.get(&id)?;
        let mut qp = self.qps[key as usize].take()?;
        let turn = &mut qp.core.turn;
        turn.deficit = (turn.deficit + QUANTUM).min(self.state.schedule.quantum());
        turn.wanted = true;
        let work = self.take_turn(&mut qp);
        self.qps[key as usize] = Some(qp);
        self.deliver_pending();
        work
    }

    /// Takes the turn of a QP that has just left the schedule.
    fn take_turn(&mut self, qp: &mut Box<Qp>) -> Option<Work> {
        if qp.core.turn.is_over() {
            // The QP must still repay earlier turns.
            self.state.round -= PASS_COST;
            self.state.enqueue(&mut qp.core);
            return None;
        }
        if qp.is_stopped() {
            self.state.round -= PASS_COST;
            qp.watch(&mut self.state);
            return None;
        }
        let before = qp.core.turn.deficit;
        let mut work = None;
        if std::mem::take(&mut qp.core.turn.wanted) {
            self.state.turns += 1;
            qp.resume_flush(&mut self.state);
            qp.resume_receiving(&mut self.state);
            qp.read_unread(&mut self.state);
            if qp.emulation.is_some() {
                qp.deliver_arrivals(&mut self.state);
            }
            match qp.link.turn() {
                LinkTurn::Idle => {}
                LinkTurn::Transmit => work = Some(Work::Transmit(qp.core.id)),
                LinkTurn::HandOver(peer) => self.hand_over(qp, peer),
                LinkTurn::PeerGone => qp.peer_gone(&mut self.state),
                LinkTurn::Datagrams => self.send_datagrams(qp),
            }
            qp.watch(&mut self.state);
            if work.is_none() {
                qp.settle_emulation(&mut self.state);
                if qp.core.moves_to_error.is_some() {
                    qp.end_if_sent(&mut self.state);
                }
            }
        }
        let turn = &mut qp.core.turn;
        turn.deficit = turn.deficit.min(before - TURN_COST);
        if turn.readable {
            // One action per turn. Bytes that were read earlier come first.
            if work.is_some() || qp.has_unread() || qp.core.turn.is_over() {
                self.state.enqueue(&mut qp.core);
            } else {
                qp.core.turn.readable = false;
                work = Some(Work::Receive(qp.core.id));
            }
        }
        self.state.settle(&mut qp.core, before);
        work
    }

    /// Takes one turn of a direct connection.
    pub(super) fn hand_over(&mut self, qp: &mut Box<Qp>, to: Peer) {
        if to.id == qp.core.id {
            qp.run_loopback(&mut self.state);
        } else {
            let Some(place) = self.qps.get_mut(to.key as usize) else { return };
            // The QPs of a closed session do not respond: their STags are revoked, which the peer
            // must not see as an error of its request. The destruction of the peer wakes this QP.
            let schedule = &self.state.schedule;
            let answers = |peer: &Qp| peer.core.id == to.id && schedule.is_open(peer.core.slot);
            let Some(mut peer) = place.take_if(|peer| answers(peer)) else { return };
            qp.core.peer_stopped = peer.core.stopped.filter(|_| peer.is_stopped());
            if qp.core.peer_stopped.is_none() {
                qp.run_direct(&mut peer, &mut self.state);
            }
            self.qps[to.key as usize] = Some(peer);
        }
        if qp.core.turn.is_over() {
            self.state.wake(&mut qp.core);
        }
    }
}
