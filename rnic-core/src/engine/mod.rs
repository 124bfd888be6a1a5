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
//! by a mover), `complete` (to the CQ), `teardown` (ends), `why` (reasons in words), `record` (kept).

mod bare;
mod bind;
mod charge;
mod complete;
mod direct;
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
mod why;

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

use crate::device::cq::CqFault;
use crate::device::memory::Unreachable;
use crate::device::mover::Moved;
use crate::device::srq::SrqFault;
use crate::device::{Cq, Mover, Srq, StagChange, StagEntry, StagTable, Window};
use crate::shm::doorbell::DoorbellScanner;
use crate::stream::startup::{Negotiated, Role};
use crate::types::{AddressPair, CqId, QpId, SessionId, SrqId, Stag, Time};
use charge::Charges;
use hold::Holds;
use moving::Jobs;
use partial::{Buffers, Owner};
use qp::{Link, Phase, Qp};
use schedule::{Key, QUANTUM, Schedule};
use session::Sessions;
use tcp::{RX_SLAB, TX_SLAB, TcpLink};
use teardown::Timers;
use why::Reason;

/// The engine of one worker.
pub struct Engine {
    qps: Vec<Option<Box<Qp>>>,
    free: Vec<Key>,
    by_id: HashMap<QpId, Key>,
    shard: Shard,
    tx_slab: Box<[u8]>,
    rx_slab: Box<[u8]>,
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
    /// CQs that died, with QPs of this engine still to be ended.
    dead_cqs: Vec<CqId>,
    /// The same of shared receive queues.
    dead_srqs: Vec<SrqId>,
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
    /// Puts a QP into the schedule.
    fn wake(&mut self, qp: &mut Qp) {
        if !qp.scheduled {
            qp.scheduled = true;
            self.schedule.push(qp.session, qp.key);
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
                dead_cqs: Vec::new(),
                dead_srqs: Vec::new(),
            },
            tx_slab: vec![0; TX_SLAB].into_boxed_slice(),
            rx_slab: vec![0; RX_SLAB].into_boxed_slice(),
            rung: Vec::new(),
        }
    }

    // -----------------------------------------------------------------------------------------
    // Commands of the resource manager

    /// Starts to serve a session's doorbells.
    pub fn attach_session(&mut self, session: SessionId, scanner: DoorbellScanner, now: Time) {
        self.shard.sessions.attach(session, scanner, now);
    }

    /// Ends a session: its STags are off, its connections are aborted, nothing completes any more.
    pub fn detach_session(&mut self, session: SessionId, now: Time) {
        self.shard.now = now;
        self.shard.stags.revoke_session(session);
        let gone: Vec<QpId> =
            self.qps.iter().flatten().filter(|q| q.session == session).map(|q| q.id).collect();
        for qp in gone {
            self.destroy(qp, now);
        }
        self.shard.sessions.detach(session);
        self.shard.schedule.drop_session(session);
    }

    /// Adds a region.
    pub fn install_stag(&mut self, entry: StagEntry) {
        self.shard.stags.install(entry);
    }

    /// Removes a region. When this has returned, no octet of it will be read or written.
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
        self.with(qp, |qp, shard| qp.stags_changed(shard));
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
        let Negotiated { role, revision, ird, ord, private_data, mut leftover, .. } = negotiated;
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
            qp.consume(shard, &mut leftover);
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
                let last = farewell.map(|octets| Output::Farewell { qp: id, octets });
                shard.outputs.extend(last);
                shard.outputs.push_back(Output::Close { qp: id, reset });
            }
            (Link::None, _) => {}
        }
        shard.stags.unbind_all_of(id);
        shard.timers.set(&mut qp, None);
        if qp.scheduled {
            shard.schedule.remove(qp.session, key);
        }
        let cqs = [&*qp.send_cq, &*qp.recv_cq];
        shard.sessions.unroute(qp.session, qp.doorbell, cqs, shard.worker, key);
        // Slots of requests that will never complete must not shrink a CQ that lives on.
        let held = qp.slots + qp.ledger.len() as u32;
        shard.unreserve(&qp.send_cq, held);
        self.free.push(key);
        self.deliver_pending();
    }

    // -----------------------------------------------------------------------------------------
    // What happened

    /// Looks at the doorbells of sessions that rang lately; whether any did.
    pub fn scan(&mut self, now: Time) -> bool {
        self.shard.now = now;
        let mut rung = std::mem::take(&mut self.rung);
        self.shard.sessions.scan(now, self.shard.worker, &mut rung);
        let any = !rung.is_empty();
        for key in rung.drain(..) {
            if let Some(qp) = self.qps.get_mut(key as usize).and_then(Option::as_mut) {
                self.shard.wake(qp);
            }
        }
        self.rung = rung;
        any
    }

    /// A session's eventfd fired: its doorbells are scanned again.
    pub fn rang(&mut self, session: SessionId, now: Time) {
        self.shard.sessions.rang(session, now);
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

    /// A QP's socket takes octets again.
    pub fn writable(&mut self, qp: QpId) {
        self.with(qp, |qp, shard| {
            if let Link::Tcp(tcp) = &mut qp.link
                && std::mem::take(&mut tcp.blocked)
            {
                shard.wake(qp);
            }
        });
    }

    /// Deadlines up to `now` have passed.
    pub fn handle_timeout(&mut self, now: Time) {
        self.shard.now = now;
        while let Some(key) = self.shard.timers.pop_due(now) {
            self.with_key(key, |qp, shard| qp.deadline_passed(shard));
        }
        while let Some(key) = self.shard.holds.pop_due(now) {
            self.with_key(key, |qp, shard| qp.held_too_long(shard));
        }
        while let Some(key) = self.shard.buffers.pop_due(now) {
            self.with_key(key, |qp, shard| qp.look_for_stall(shard));
        }
        while let Some(id) = self.shard.jobs.pop_due(now) {
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

    /// The next QP whose turn needs the worker's hands. Turns that do not are taken here.
    pub fn next_work(&mut self, now: Time) -> Option<Work> {
        self.shard.now = now;
        // Bounds, so that a busy direct path cannot keep the worker from its sockets and commands.
        let mut budget = DIRECT_BUDGET;
        for _ in 0..TURNS_PER_CALL {
            if budget <= 0 {
                return None;
            }
            let key = self.shard.schedule.pop()?;
            let Some(mut qp) = self.qps.get_mut(key as usize).and_then(Option::take) else {
                continue;
            };
            qp.scheduled = false;
            qp.deficit = (qp.deficit + QUANTUM).min(QUANTUM);
            let mut transmit = None;
            qp.resume_flush(&mut self.shard);
            qp.resume(&mut self.shard);
            match &qp.link {
                Link::None => {}
                // A blocked one waits for `writable`.
                Link::Tcp(tcp) if tcp.blocked => {}
                Link::Tcp(_) => transmit = Some(Work::Transmit(qp.id)),
                Link::Direct(peer) => {
                    let (peer, before) = (*peer, qp.deficit);
                    self.turn_direct(&mut qp, peer);
                    budget -= before - qp.deficit;
                }
            }
            self.qps[key as usize] = Some(qp);
            self.deliver_pending();
            if transmit.is_some() {
                return transmit;
            }
        }
        None
    }

    /// Whether some QP waits for its turn.
    pub fn has_work(&self) -> bool {
        !self.shard.schedule.is_empty()
    }

    /// The next thing to carry out for the engine.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.shard.outputs.pop_front()
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
        self.shard.sessions.prepare_sleep()
    }

    /// QPs this engine owns.
    pub fn qp_count(&self) -> usize {
        self.by_id.len()
    }

    // -----------------------------------------------------------------------------------------

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
        let mut qp = Box::new(Qp::new(key, config));
        qp.link = link;
        self.by_id.insert(qp.id, key);
        self.shard.sessions.route(qp.session, qp.doorbell, key);
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
        let result = f(qp, &mut self.shard);
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
                    qp.delivered(shard, &delivery);
                }
            } else if let Some(key) = shard.awakened.pop() {
                if let Some(qp) = qps.get_mut(key as usize).and_then(Option::as_mut) {
                    shard.wake(qp);
                }
            } else if let Some(cq) = shard.dead_cqs.pop() {
                for qp in qps.iter_mut().flatten() {
                    if qp.send_cq.id() == cq || qp.recv_cq.id() == cq {
                        qp.fail_locally(shard, complete::CQ_IS_DEAD, Reason::Cq(cq, CqFault::Dead));
                    }
                }
            } else if let Some(srq) = shard.dead_srqs.pop() {
                for qp in qps.iter_mut().flatten() {
                    if qp.rq.shared().is_some_and(|of| of.id() == srq) {
                        let reason = Reason::Srq(srq, SrqFault::Dead);
                        qp.fail_locally(shard, receives::SRQ_IS_DEAD, reason);
                    }
                }
            } else {
                return;
            }
        }
    }
}

/// Turns of direct connections between two looks at the sockets, and octets moved in them.
const TURNS_PER_CALL: usize = 64;
const DIRECT_BUDGET: i64 = 4 * QUANTUM;
