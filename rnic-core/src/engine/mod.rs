//! The engine: the one place where wire and device meet.
//!
//! An [`Engine`] owns the queue pairs of one worker for life, a copy of the STag table, and nothing
//! that waits. The worker tells it what happened (`receive`, `writable`, `scan`, `handle_timeout`),
//! carries out what it asks for (`next_work`, `transmit`, `poll_output`, `next_timeout`) and passes on
//! the commands of the resource manager, which are authorised already. It never reads a clock, opens a
//! socket or blocks, so two engines run back to back in a test under virtual time.
//!
//! One file per hop: `post` (send queue to message; `bind` for what changes STags instead), `message`
//! (segmentation), `tx` (to TCP; `bare` without a copy), `direct` (to another QP), `rx` (from TCP),
//! `receives` (a buffer for a message), `hold` (or a wait for one), `place` (into memory; `moving`
//! by a mover), `complete` (to the CQ), `teardown` (ends), `reason` (what was wrong), `diagnosis` (in
//! words), `record` (kept).

mod bare;
mod bind;
mod charge;
mod complete;
mod diagnosis;
mod direct;
mod dying;
mod failure;
mod hold;
mod interface;
mod ledger;
mod message;
mod moving;
mod partial;
mod place;
mod post;
mod qp;
mod reason;
mod receives;
mod record;
mod rx;
mod schedule;
mod session;
mod tcp;
mod teardown;
#[cfg(test)]
mod tests;
mod tx;
mod unread;

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

pub use charge::HoldLimits;
pub use interface::{EngineOptions, Output, Receive, Transmit, Work};
pub use partial::PartialLimits;
pub use qp::QpConfig;
pub use receives::Receives;
pub use tcp::{MulpduPolicy, TxBatch};

use crate::device::memory::Unreachable;
use crate::device::mover::Moved;
use crate::device::{Cq, Mover, Srq, StagChange, StagEntry, StagTable, Window};
use crate::shm::doorbell::DoorbellScanner;
use crate::stream::startup::{Negotiated, Role};
use crate::types::{AddressPair, QpId, SessionId, Stag, Time, UserId};
use bind::Changes;
use charge::Charges;
use dying::{Dying, Ending};
use hold::Holds;
use moving::Jobs;
use partial::{Buffers, Owner};
use qp::{Link, Phase, Qp};
use schedule::{Key, MOST_OWED, PASS_COST, QUANTUM, Schedule, TURN_COST};
use session::Sessions;
use tcp::{RX_SLAB, TX_SLAB, TcpLink};
use teardown::Timers;
use unread::Slabs;

/// The engine of one worker.
pub struct Engine {
    qps: Vec<Option<Box<Qp>>>,
    free: Vec<Key>,
    by_id: HashMap<QpId, Key>,
    shard: Shard,
    tx_slab: Box<[u8]>,
    rx_slab: Vec<u8>,
    rung: Vec<Key>,
}

/// What all QPs of an engine share. It is apart from them so that a QP and this can be borrowed at
/// the same time.
struct Shard {
    worker: u32,
    now: Time,
    options: EngineOptions,
    stags: StagTable,
    sessions: Sessions,
    schedule: Schedule,
    timers: Timers,
    holds: Holds,
    jobs: Jobs,
    buffers: Buffers,
    /// Bytes that TCP has not taken.
    unsent: Charges,
    outputs: VecDeque<Output>,
    deliveries: VecDeque<(Key, Delivery)>,
    /// QPs that waited for a CQ slot, a receive or the other end of a direct connection, and may try
    /// again.
    awakened: Vec<Key>,
    /// Queues that died, with QPs of this engine still to be ended.
    dying: VecDeque<Dying>,
    /// Sessions that were closed, with QPs still to be ended.
    ending: VecDeque<Ending>,
    changes: Changes,
    slabs: Slabs,
    /// What may still be done in this round.
    round: i64,
    turns: u64,
}

/// What one QP does to another besides moving data.
enum Delivery {
    /// By the direct path.
    Terminate(Vec<u8>),
    /// The segment at hand has been taken, to no avail: a Terminate follows.
    SegmentTaken,
    Fin,
    Reset,
    /// It has to make room.
    Lost(String),
}

impl Shard {
    /// Puts a QP into the schedule, for a turn.
    fn wake(&mut self, qp: &mut Qp) {
        qp.wants_turn = true;
        self.line_up(qp);
    }

    /// A QP stands in the schedule, if its session has turns.
    fn line_up(&mut self, qp: &mut Qp) {
        if !qp.scheduled {
            qp.scheduled = self.schedule.push(qp.seat, qp.key);
        }
    }

    /// Has a QP's session and user pay for what it has done since its deficit was `before`.
    fn settle(&mut self, qp: &mut Qp, before: i64) {
        let cost = before - qp.deficit;
        if cost > 0 {
            self.schedule.charge(qp.seat, cost);
            self.round -= cost;
            qp.deficit = qp.deficit.max(-MOST_OWED);
        }
    }

    fn deliver(&mut self, to: Key, delivery: Delivery) {
        self.deliveries.push_back((to, delivery));
    }
}

impl Engine {
    /// An engine without sessions.
    pub fn new(options: EngineOptions) -> Self {
        let buffers = Buffers::new(options.partial);
        let unsent = Charges::new(options.unsent, tx::UNSENT);
        Engine {
            qps: Vec::new(),
            free: Vec::new(),
            by_id: HashMap::new(),
            shard: Shard {
                worker: options.worker,
                now: Time(0),
                options,
                stags: StagTable::default(),
                sessions: Sessions::default(),
                schedule: Schedule::default(),
                timers: Timers::default(),
                holds: Holds::default(),
                buffers,
                unsent,
                jobs: Jobs::default(),
                outputs: VecDeque::new(),
                deliveries: VecDeque::new(),
                awakened: Vec::new(),
                dying: VecDeque::new(),
                ending: VecDeque::new(),
                changes: Changes::default(),
                slabs: Slabs::default(),
                round: QUANTUM,
                turns: 0,
            },
            tx_slab: vec![0; TX_SLAB].into_boxed_slice(),
            rx_slab: vec![0; RX_SLAB],
            rung: Vec::new(),
        }
    }

    // -----------------------------------------------------------------------------------------
    // Commands of the resource manager

    /// Starts to serve a session's doorbells. Its QPs take turns with those of other sessions of this
    /// user, and all of them with those of other users.
    pub fn attach_session(
        &mut self,
        session: SessionId,
        user: UserId,
        scanner: DoorbellScanner,
        now: Time,
    ) {
        let seat = self.shard.schedule.join(user);
        self.shard.sessions.attach(session, user, seat, scanner, now);
    }

    /// Adds a region.
    pub fn install_stag(&mut self, entry: StagEntry) {
        self.shard.stags.install(entry);
    }

    /// Removes a region. When this has returned, no byte of it will be read or written.
    pub fn revoke_stag(&mut self, stag: Stag) {
        self.shard.stags.revoke(stag);
    }

    /// Makes a window known, so that QPs can bind it.
    pub fn add_window(&mut self, window: Arc<Window>) {
        self.shard.stags.add_window(window);
    }

    /// Forgets a window. When this has returned, nothing is reached through it.
    pub fn remove_window(&mut self, window: &Window) {
        self.shard.stags.remove_window(window);
    }

    /// Carries out a change that a QP of this or another worker asked for.
    pub fn change_stags(&mut self, change: &StagChange) {
        self.shard.stags.change(change);
    }

    /// Every worker has carried out the change that this QP asked for; it asks for one at a time.
    pub fn stags_changed(&mut self, qp: QpId, now: Time) {
        self.shard.now = now;
        let user = self.shard.changes.answered(qp);
        self.with(qp, |qp, shard| qp.stags_changed(shard));
        // Others may have waited for this one. Who waits no longer has had his turn.
        while let Some(next) = user.and_then(|user| self.shard.changes.next(user)) {
            self.with(next, |qp, shard| qp.ask_at_last(shard));
        }
    }

    /// Another worker has freed slots of a CQ ([`Output::SpaceFreed`]).
    pub fn space_freed(&mut self, cq: &Cq, now: Time) {
        self.shard.now = now;
        self.shard.space_freed(cq);
        self.deliver_pending();
    }

    /// Receives of a shared queue may be taken by QPs of this worker ([`Output::ReceivesFreed`]).
    pub fn receives_posted(&mut self, srq: &Srq, now: Time) {
        self.shard.now = now;
        self.shard.receives_posted(srq);
        self.deliver_pending();
    }

    /// Connects a QP by a TCP connection that has been through MPA start-up.
    #[expect(clippy::boxed_local, reason = "it travels boxed, because commands are moved often")]
    pub fn bind_tcp(
        &mut self,
        config: Box<QpConfig>,
        negotiated: Negotiated,
        addresses: AddressPair,
        now: Time,
    ) {
        self.shard.now = now;
        let id = config.qp;
        let link = Box::new(TcpLink::new(&negotiated));
        self.insert(*config, Link::Tcp(link));
        let Negotiated { role, revision, ird, ord, private_data, leftover, .. } = negotiated;
        self.with(id, |qp, shard| {
            qp.addresses = Some(addresses);
            qp.revision = revision;
            (qp.ird, qp.ord) = (ird, ord);
            match role {
                Role::Initiator { .. } => {
                    qp.enter(Phase::Open);
                    qp.announce(shard, private_data);
                }
                Role::Responder { .. } => {
                    qp.enter(Phase::Quiet);
                    let deadline = now.after(shard.options.first_fpdu_deadline);
                    shard.timers.set(qp, Some(deadline));
                }
            }
            qp.read_later(shard, leftover, 0);
            shard.wake(qp);
        });
    }

    /// Connects two QPs with each other by the direct path.
    pub fn bind_direct(
        &mut self,
        active: (Box<QpConfig>, Negotiated, AddressPair),
        passive: (Box<QpConfig>, Negotiated, AddressPair),
        now: Time,
    ) {
        self.shard.now = now;
        let ids = [active.0.qp, passive.0.qp];
        let mut ends = Vec::with_capacity(2);
        for (config, negotiated, addresses) in [active, passive] {
            let key = self.insert(*config, Link::None);
            ends.push((key, negotiated, addresses));
        }
        let keys = [ends[0].0, ends[1].0];
        for ((_, negotiated, addresses), (peer, id)) in
            ends.into_iter().zip([(keys[1], ids[0]), (keys[0], ids[1])])
        {
            self.with(id, |qp, shard| {
                qp.link = Link::Direct(peer);
                qp.addresses = Some(addresses);
                qp.revision = negotiated.revision;
                (qp.ird, qp.ord) = (negotiated.ird, negotiated.ord);
                qp.enter(Phase::Open);
                let private_data = match negotiated.role {
                    Role::Initiator { .. } => negotiated.private_data,
                    Role::Responder { .. } => Vec::new(),
                };
                qp.announce(shard, private_data);
                shard.wake(qp);
            });
        }
    }

    /// Takes over a QP that is in Error without ever having been connected, to flush it.
    #[expect(clippy::boxed_local, reason = "as for the others")]
    pub fn bind_dead(&mut self, config: Box<QpConfig>, now: Time) {
        self.shard.now = now;
        let id = config.qp;
        self.insert(*config, Link::None);
        self.with(id, |qp, shard| {
            qp.enter(Phase::Dead);
            qp.why = qp.shared.why.load(Relaxed);
            qp.flush(shard);
        });
    }

    /// Ends a connection, in order or at once.
    pub fn disconnect(&mut self, qp: QpId, abort: bool, now: Time) {
        self.shard.now = now;
        self.with(qp, |qp, shard| qp.disconnect(shard, abort));
    }

    /// Moves a QP to Error: its connection is aborted, everything posted is flushed.
    pub fn to_error(&mut self, qp: QpId, now: Time) {
        self.disconnect(qp, true, now);
    }

    /// Ends a QP's connection for reasons of its administrator: with a Terminate where the stream
    /// allows one, else with a reset. The QP stays in Error, and everything posted is flushed.
    pub fn expel(&mut self, qp: QpId, now: Time) {
        self.shard.now = now;
        self.with(qp, |qp, shard| qp.expel(shard));
    }

    /// Takes other deadlines and another policy of FPDU sizes from now on. Deadlines that run are
    /// not touched; the worker's number stays, and so does the log of reasons, which others read.
    pub fn set_options(&mut self, options: EngineOptions) {
        let (worker, why) = (self.shard.options.worker, self.shard.options.why.clone());
        self.shard.buffers.set_limits(options.partial);
        self.shard.unsent.set_limits(options.unsent);
        self.shard.options = EngineOptions { worker, why, ..options };
    }

    /// Forgets a QP. Its peer is told by a Terminate where the stream allows it, else by a reset;
    /// nothing of it completes any more.
    pub fn destroy(&mut self, id: QpId, now: Time) {
        self.shard.now = now;
        let Some(key) = self.by_id.remove(&id) else { return };
        let Some(mut qp) = self.qps[key as usize].take() else { return };
        let shard = &mut self.shard;
        qp.lift(shard);
        let farewell = qp.farewell();
        let reset = farewell.is_none();
        if let Link::Tcp(tcp) = &mut qp.link {
            shard.buffers.give(&mut tcp.partial, Owner { key, session: qp.session });
            shard.unsent.release(&mut tcp.held, qp.session);
        }
        if !reset {
            qp.destroyed(shard);
        }
        match (&qp.link, farewell) {
            (Link::Direct(peer), Some(payload)) => {
                shard.deliver(*peer, Delivery::Terminate(payload));
            }
            (Link::Direct(peer), None) => shard.deliver(*peer, Delivery::Reset),
            (Link::Tcp(_), farewell) => {
                let last = farewell.map(|bytes| Output::Farewell { qp: id, bytes });
                shard.outputs.extend(last);
                shard.outputs.push_back(Output::Close { qp: id, reset });
            }
            (Link::None, _) => {}
        }
        shard.stags.unbind_all_of(id);
        shard.timers.set(&mut qp, None);
        let cqs = [&*qp.send_cq, &*qp.recv_cq];
        shard.sessions.unroute(qp.seat, qp.doorbell, cqs, shard.worker, key);
        // Slots of requests that will never complete must not shrink a CQ that lives on.
        let held = qp.slots + qp.ledger.len() as u32;
        shard.unreserve(&qp.send_cq, held);
        self.free.push(key);
        self.deliver_pending();
    }

    // -----------------------------------------------------------------------------------------
    // What happened

    /// Begins a round: looks at the doorbells of sessions that rang lately. Whether any did.
    pub fn scan(&mut self, now: Time) -> bool {
        let ended = self.begin_round(now);
        let mut rung = std::mem::take(&mut self.rung);
        let Shard { sessions, schedule, worker, .. } = &mut self.shard;
        sessions.scan(now, *worker, schedule, &mut rung);
        let any = !rung.is_empty() || ended;
        for key in rung.drain(..) {
            if let Some(qp) = self.qps.get_mut(key as usize).and_then(Option::as_mut) {
                self.shard.wake(qp);
            }
        }
        self.rung = rung;
        any
    }

    fn begin_round(&mut self, now: Time) -> bool {
        self.shard.now = now;
        self.shard.round = self.shard.schedule.begin_round(now);
        self.end_dying()
    }

    /// A session's eventfd fired: its doorbells are scanned again.
    pub fn rang(&mut self, session: SessionId, now: Time) {
        self.shard.sessions.rang(session, now, &self.shard.schedule);
    }

    /// A QP's socket may have something: it is read when it is the QP's turn
    /// ([`Work::Receive`]).
    pub fn readable(&mut self, qp: QpId) {
        self.with(qp, |qp, shard| {
            qp.readable = true;
            shard.line_up(qp);
        });
    }

    /// Reads from a QP's socket by `recv` (an end of stream is `Ok(0)`) and handles what came.
    pub fn receive(
        &mut self,
        qp: QpId,
        now: Time,
        recv: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> Receive {
        self.shard.now = now;
        let mut slab = std::mem::take(&mut self.rx_slab);
        let outcome = self.with(qp, |qp, shard| qp.receive_tcp(shard, &mut slab, recv));
        self.rx_slab = slab;
        outcome.unwrap_or(Receive::Closed)
    }

    /// The socket of a QP that [is paused](Receive::Paused) has failed.
    pub fn socket_failed(&mut self, qp: QpId, error: &io::Error, now: Time) {
        self.shard.now = now;
        self.with(qp, |qp, shard| qp.lost(shard, &failure::in_words("receiving", error)));
    }

    /// Sends what a QP has to send by `send`, one call. `emss` is the connection's effective MSS.
    pub fn transmit(
        &mut self,
        qp: QpId,
        now: Time,
        emss: usize,
        send: impl FnOnce(&TxBatch<'_>) -> io::Result<usize>,
    ) -> Transmit {
        self.shard.now = now;
        let mut slab = std::mem::take(&mut self.tx_slab);
        let outcome = self.with(qp, |qp, shard| {
            let outcome = qp.transmit_tcp(shard, &mut slab, emss, send);
            if outcome == Transmit::More {
                shard.wake(qp);
            }
            outcome
        });
        self.tx_slab = slab;
        outcome.unwrap_or(Transmit::Idle)
    }

    /// A mover has answered a job of this engine, or is gone. Jobs of one mover are answered in the
    /// order in which they came.
    pub fn moved(&mut self, mover: &Mover, job: u64, result: Moved, now: Time) {
        self.shard.now = now;
        mover.over(self.shard.worker);
        // It may have been given up meanwhile.
        if let Some(job_of) = self.shard.jobs.close(job) {
            self.with(job_of.qp, |qp, shard| qp.moved(shard, job, result));
        }
    }

    /// A QP's socket takes bytes again.
    pub fn writable(&mut self, qp: QpId) {
        self.with(qp, |qp, shard| {
            if let Link::Tcp(tcp) = &mut qp.link
                && std::mem::take(&mut tcp.blocked)
            {
                shard.wake(qp);
            }
        });
    }

    /// Deadlines up to `now` have passed. Those of many QPs are handled some at a time, the others when
    /// this is called again.
    pub fn handle_timeout(&mut self, now: Time) {
        self.shard.now = now;
        for _ in 0..DEADLINES {
            let Some(key) = self.shard.timers.pop_due(now) else { break };
            self.with_key(key, |qp, shard| qp.deadline_passed(shard));
        }
        for _ in 0..DEADLINES {
            let Some(key) = self.shard.holds.pop_due(now) else { break };
            self.with_key(key, |qp, shard| qp.held_too_long(shard));
        }
        for _ in 0..DEADLINES {
            let Some(key) = self.shard.buffers.pop_due(now) else { break };
            self.with_key(key, |qp, shard| qp.look_for_stall(shard));
        }
        for _ in 0..DEADLINES {
            let Some(id) = self.shard.jobs.pop_due(now) else { break };
            let Some(job) = self.shard.jobs.close(id) else { continue };
            let span = self.shard.options.mover_deadline.as_secs_f32();
            let why = format!("a copy of attached memory did not return in {span} s");
            let session = job.mover.session();
            self.shard.outputs.push_back(Output::Misbehaved { session, why });
            let gone = Err(Unreachable::Detached);
            self.with(job.qp, |qp, shard| qp.moved(shard, id, gone));
        }
    }

    // -----------------------------------------------------------------------------------------
    // What to carry out

    /// The next QP whose turn needs the worker's hands. Turns that do not are taken here; while several
    /// users have turns, each is told. A round ends, by `None`, after so much work as others can wait
    /// for: then [`scan`](Self::scan) begins the next.
    pub fn next_work(&mut self, now: Time) -> Option<Work> {
        self.shard.now = now;
        self.shard.schedule.set_now(now);
        while self.shard.round > 0 {
            let key = self.shard.schedule.pop()?;
            // It may have gone, and its key be another's by now.
            let Some(mut qp) = self.qps.get_mut(key as usize).and_then(Option::take) else {
                continue;
            };
            if !qp.scheduled {
                self.qps[key as usize] = Some(qp);
                continue;
            }
            qp.scheduled = false;
            // Its user repays what it overdraws, turn by turn; a QP that is alone would do so twice.
            qp.deficit = (qp.deficit + QUANTUM).min(self.shard.schedule.quantum());
            let work = self.take_turn(&mut qp);
            self.qps[key as usize] = Some(qp);
            self.deliver_pending();
            if work.is_some() {
                return work;
            }
            if self.shard.schedule.is_shared() {
                return Some(Work::TurnTaken);
            }
        }
        None
    }

    /// The turn that [`next_work`](Self::next_work) spoke of last took from `began` until `now`. While
    /// several users have turns, its user has no other for as long: a share of the time is left to who
    /// is about to be ready, however much each turn takes.
    pub fn turn_over(&mut self, began: Time, now: Time) {
        self.shard.schedule.turn_over(began, now);
    }

    /// Whether all who are ready rest, so that [`next_work`](Self::next_work) has nothing for now.
    pub fn is_resting(&self) -> bool {
        self.shard.schedule.is_resting()
    }

    /// Turns taken so far, but for those in which a socket is only to be read.
    pub fn turns(&self) -> u64 {
        self.shard.turns
    }

    /// Whether some QP waits for its turn.
    pub fn has_work(&self) -> bool {
        !self.shard.schedule.is_empty()
    }

    /// Whether several users have had turns lately.
    pub fn is_shared(&self) -> bool {
        self.shard.schedule.is_shared()
    }

    /// How many users have a session.
    pub fn users(&self) -> usize {
        self.shard.schedule.users()
    }

    /// The next thing to carry out for the engine.
    pub fn poll_output(&mut self) -> Option<Output> {
        let output = self.shard.outputs.pop_front();
        if let Some(Output::Notify(cq)) = &output {
            cq.send_notice();
        }
        output
    }

    /// When [`Engine::handle_timeout`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        let Shard { timers, holds, jobs, buffers, .. } = &self.shard;
        let all = [timers.next(), holds.next(), jobs.next(), buffers.next_look()];
        all.into_iter().flatten().min()
    }

    /// Before the worker sleeps: from now on clients write their eventfd. False if one rang in the
    /// meantime: scan again.
    pub fn prepare_sleep(&mut self) -> bool {
        self.shard.dying.is_empty()
            && self.shard.ending.is_empty()
            && self.shard.sessions.prepare_sleep()
    }

    /// QPs this engine owns.
    pub fn qp_count(&self) -> usize {
        self.by_id.len()
    }

    // -----------------------------------------------------------------------------------------

    /// The turn of a QP that has just left the schedule.
    fn take_turn(&mut self, qp: &mut Box<Qp>) -> Option<Work> {
        if qp.deficit <= 0 {
            // It has yet to repay earlier ones.
            self.shard.round -= PASS_COST;
            self.shard.line_up(qp);
            return None;
        }
        let before = qp.deficit;
        let mut work = None;
        if std::mem::take(&mut qp.wants_turn) {
            self.shard.turns += 1;
            qp.resume_flush(&mut self.shard);
            qp.resume(&mut self.shard);
            qp.read_on(&mut self.shard);
            match &qp.link {
                Link::None => {}
                // A blocked one waits for `writable`, a broken one for the end of what came.
                Link::Tcp(tcp) if tcp.blocked || tcp.broken.is_some() => {}
                Link::Tcp(_) => work = Some(Work::Transmit(qp.id)),
                Link::Direct(peer) => {
                    let peer = *peer;
                    self.turn_direct(qp, peer);
                }
            }
        }
        qp.deficit = qp.deficit.min(before - TURN_COST);
        if qp.readable {
            // One thing at a time, and what was read before comes first.
            if work.is_some() || qp.has_unread() || qp.deficit <= 0 {
                self.shard.line_up(qp);
            } else {
                qp.readable = false;
                work = Some(Work::Receive(qp.id));
            }
        }
        self.shard.settle(qp, before);
        work
    }

    /// One turn of a direct connection.
    fn turn_direct(&mut self, qp: &mut Box<Qp>, peer_key: Key) {
        let Some(mut peer) = self.qps.get_mut(peer_key as usize).and_then(Option::take) else {
            return;
        };
        qp.run_direct(&mut peer, &mut self.shard);
        if qp.deficit <= 0 {
            self.shard.wake(qp);
        }
        self.qps[peer_key as usize] = Some(peer);
    }

    fn insert(&mut self, config: QpConfig, link: Link) -> Key {
        let key = self.free.pop().unwrap_or_else(|| {
            self.qps.push(None);
            (self.qps.len() - 1) as Key
        });
        let seat = self.shard.sessions.seat(config.session);
        let mut qp = Box::new(Qp::new(key, seat, config));
        qp.link = link;
        self.by_id.insert(qp.id, key);
        self.shard.sessions.route(seat, qp.doorbell, key);
        // Posting rang nothing before this; from now on it does, and the caller scans both rings once.
        qp.sq.queue().set_worker(self.shard.worker);
        if let Receives::Own(rq) = &qp.rq {
            rq.queue().set_worker(self.shard.worker);
        }
        self.qps[key as usize] = Some(qp);
        key
    }

    fn with<R>(&mut self, id: QpId, f: impl FnOnce(&mut Qp, &mut Shard) -> R) -> Option<R> {
        let key = *self.by_id.get(&id)?;
        self.with_key(key, f)
    }

    fn with_key<R>(&mut self, key: Key, f: impl FnOnce(&mut Qp, &mut Shard) -> R) -> Option<R> {
        let qp = self.qps.get_mut(key as usize)?.as_mut()?;
        let before = qp.deficit;
        let result = f(qp, &mut self.shard);
        self.shard.settle(qp, before);
        self.deliver_pending();
        Some(result)
    }

    /// Carries out what QPs did to each other: by the direct path, or by way of a CQ they share.
    fn deliver_pending(&mut self) {
        let Engine { qps, shard, .. } = self;
        loop {
            if let Some((key, delivery)) = shard.deliveries.pop_front() {
                if let Some(qp) = qps.get_mut(key as usize).and_then(Option::as_mut)
                    && let Err(delivery) = qp.defer(delivery)
                {
                    let before = qp.deficit;
                    qp.delivered(shard, &delivery);
                    shard.settle(qp, before);
                }
            } else if let Some(key) = shard.awakened.pop() {
                if let Some(qp) = qps.get_mut(key as usize).and_then(Option::as_mut) {
                    shard.wake(qp);
                }
            } else {
                return;
            }
        }
    }
}

/// Deadlines of each kind that are handled in one call.
const DEADLINES: usize = 16;
