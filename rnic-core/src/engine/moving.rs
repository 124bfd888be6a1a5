//! Memory that only a mover may touch: jobs, and the QPs that wait for them.
//!
//! A QP has at most one job per direction. What it has to send is brought to private memory first
//! ([`Stage`]) and sent from there; what arrived is handed over, and what follows from its being
//! placed ([`After`]) waits for the answer ([`Landing`]), with everything behind it: the stream pauses
//! (`hold`). Other QPs go on.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use arrayvec::ArrayVec;

use super::hold::{Awaits, Pause};
use super::message::{Gather, GatherFault, Message};
use super::qp::{Link, Qp};
use super::reason::Reason;
use super::reason::Trouble;
use super::{Delivery, Output, Shard};
use crate::ddp::MAX_HEADER_LEN;
use crate::device::memory::{MemoryFault, Payload, Target, Unreachable};
use crate::device::mover::{MAX_MOVE, MoveJob, Moved, Mover, Pieces, Way};
use crate::shm::attached::CopyEnd;
use crate::stream::inbound::SendKind;
use crate::stream::{Fault, terminate};
use crate::types::{CompletionStatus, QpId, SessionId, Time};

/// Jobs under way, by number.
#[derive(Default)]
pub(super) struct Jobs {
    last: u64,
    open: HashMap<u64, Job>,
    /// All take equally long at most, so the oldest is due first. May name jobs that are over.
    due: VecDeque<(Time, u64)>,
}

/// A job under way.
pub(super) struct Job {
    pub qp: QpId,
    pub mover: Arc<Mover>,
}

impl Jobs {
    /// When the oldest is due.
    pub(super) fn next(&self) -> Option<Time> {
        self.due.front().map(|(at, _)| *at)
    }

    /// A job that is due, by number.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<u64> {
        let (at, id) = *self.due.front()?;
        (at <= now).then(|| {
            self.due.pop_front();
            id
        })
    }

    /// Forgets a job.
    pub(super) fn close(&mut self, id: u64) -> Option<Job> {
        let job = self.open.remove(&id);
        while let Some((_, oldest)) = self.due.front()
            && !self.open.contains_key(oldest)
        {
            self.due.pop_front();
        }
        job
    }
}

impl Shard {
    fn begin_move(&mut self, qp: QpId, mover: &Arc<Mover>, pieces: Pieces, way: Way) -> u64 {
        self.jobs.last += 1;
        let id = self.jobs.last;
        self.jobs.open.insert(id, Job { qp, mover: mover.clone() });
        self.jobs.due.push_back((self.now.after(self.options.mover_deadline), id));
        mover.begin(self.worker);
        let job = MoveJob { id, mover: mover.clone(), pieces, way };
        self.outputs.push_back(Output::Move(job));
        id
    }
}

/// Bytes of the message in progress that are at hand, or on their way.
#[derive(Default)]
pub(super) struct Stage {
    /// The job that brings them.
    job: Option<u64>,
    /// Whose memory they are of.
    owner: Option<SessionId>,
    /// Where in the message they begin.
    from: u32,
    bytes: Vec<u8>,
    /// Where among them those of the mover go.
    holes: Vec<(usize, usize)>,
}

impl Stage {
    /// Puts the bytes at hand in place of memory that only a mover reaches.
    pub(super) fn fill_in<'t>(
        &'t self,
        message: &Message,
        len: u32,
        memory: &mut Gather<'t>,
    ) -> Result<(), GatherFault> {
        let Some(moved) = memory.iter().find(|target| target.mover().is_some()) else {
            return Ok(());
        };
        let owner = moved.owner();
        let at_hand = message.sent.checked_sub(self.from).and_then(|from| {
            let from = from as usize;
            self.bytes.get(from..from + len as usize).filter(|_| self.job.is_none())
        });
        let bytes = at_hand.ok_or(GatherFault::Unstaged)?;
        memory.clear();
        memory.push(Target::private(owner, bytes));
        Ok(())
    }
}

/// A segment whose bytes a mover is writing, and what follows when it has.
pub(super) struct Landing {
    /// Its number.
    job: u64,
    mover: Arc<Mover>,
    after: After,
    len: usize,
    /// The segment's header and length, should it have to go back.
    header: ArrayVec<u8, MAX_HEADER_LEN>,
    segment_len: u16,
    /// What the other end of a direct connection has done since.
    deferred: Vec<Delivery>,
}

/// What follows when a segment has been placed.
#[derive(Clone, Copy, Debug)]
pub(super) enum After {
    /// Nothing.
    Write,
    /// A read of ours has got these bytes; its last ones, perhaps.
    Response { last: bool },
    /// A part of a Send at this offset.
    Send { kind: SendKind, mo: u32, last: bool, total: Option<u32> },
}

/// Whether a segment has been placed.
pub(super) enum Placed {
    /// All of it.
    Done,
    /// The rest by a mover.
    Moving(Box<Writing>),
}

/// Bytes for a mover to write.
pub(super) struct Writing {
    mover: Arc<Mover>,
    pieces: Pieces,
    bytes: Vec<u8>,
    tail_last: bool,
}

impl Writing {
    /// Adds the bytes of `payload` from `from` on that go to `target`, which `mover` reaches.
    pub(super) fn add(
        writing: Option<Box<Writing>>,
        (mover, address): (&Arc<Mover>, u64),
        payload: &Payload<'_>,
        from: usize,
        len: usize,
        tail_last: bool,
    ) -> Result<Box<Writing>, MemoryFault> {
        let mut writing = writing.unwrap_or_else(|| {
            Box::new(Writing {
                mover: mover.clone(),
                pieces: Pieces::new(),
                bytes: Vec::with_capacity(payload.len()),
                tail_last,
            })
        });
        let at = writing.bytes.len();
        writing.bytes.resize(at + len, 0);
        payload.read(from, &mut writing.bytes[at..])?;
        // As many as a list has elements, which are all of one session's one address space.
        writing.pieces.push((address, len as u32));
        Ok(writing)
    }
}

impl Qp {
    /// Has a mover bring the next bytes of the message in progress.
    pub(super) fn stage(&mut self, shard: &mut Shard) {
        let Some(message) = &self.message else { return };
        if self.stage.job.is_some() {
            return;
        }
        let len = (message.total - message.sent).min(MAX_MOVE as u32);
        let mut memory = Gather::new();
        let (arena, list) = (self.sq.mapping(), self.elements.as_slice());
        let gathered =
            message.gather(len, self.principal(), &shard.stags, arena, list, &mut memory);
        if let Err(fault) = gathered {
            drop(memory);
            return self.gather_failed(fault, shard);
        }
        let (mut bytes, mut holes) = (vec![0; len as usize], Vec::new());
        let (mut pieces, mut who) = (Pieces::new(), None);
        let (mut at, mut failed) = (0, None);
        for target in &memory {
            let end = at + target.len();
            match target.mover() {
                Some((mover, address)) => {
                    who = Some(mover.clone());
                    pieces.push((address, target.len() as u32));
                    holes.push((at, end));
                }
                None => failed = failed.or(target.read(0, &mut bytes[at..end]).err()),
            }
            at = end;
        }
        drop(memory);
        let from = message.sent;
        if let Some(fault) = failed {
            return self.memory_failed(fault, shard);
        }
        let Some(mover) = who else { return };
        let job = shard.begin_move(self.id, &mover, pieces, Way::Out);
        let owner = Some(mover.session());
        self.stage = Stage { job: Some(job), owner, from, bytes, holes };
    }

    /// What follows from a segment's having been placed, now or when it is. `header` and
    /// `segment_len` are the segment's own.
    pub(super) fn follow(
        &mut self,
        shard: &mut Shard,
        placed: Placed,
        after: After,
        len: usize,
        (header, segment_len): (&[u8], u16),
    ) -> Result<(), Trouble> {
        let writing = match placed {
            Placed::Done => return self.placed(shard, after, len),
            Placed::Moving(writing) => writing,
        };
        let Writing { mover, pieces, bytes, tail_last } = *writing;
        let way = Way::In { bytes, tail_last };
        let job = shard.begin_move(self.id, &mover, pieces, way);
        let header = header.iter().copied().take(MAX_HEADER_LEN).collect();
        let deferred = Vec::new();
        let landing = Landing { job, mover, after, len, header, segment_len, deferred };
        self.paced = true;
        self.pause = Some(Box::new(Pause { awaits: Awaits::Mover(landing), bytes: Vec::new() }));
        Ok(())
    }

    /// A mover has answered.
    pub(super) fn moved(&mut self, shard: &mut Shard, job: u64, result: Moved) {
        if self.stage.job == Some(job) {
            self.staged(shard, result);
        } else if let Some(pause) = &self.pause
            && let Awaits::Mover(landing) = &pause.awaits
            && landing.job == job
        {
            self.landed(shard, result);
        }
        // Otherwise what it was for has ended meanwhile.
    }

    fn staged(&mut self, shard: &mut Shard, result: Moved) {
        let mut stage = std::mem::take(&mut self.stage);
        let owner = stage.owner.unwrap_or(self.session);
        let wanted: usize = stage.holes.iter().map(|(from, to)| to - from).sum();
        let cause = match result {
            Ok(bytes) if bytes.len() == wanted => {
                let mut rest = &bytes[..];
                for (from, to) in stage.holes.drain(..) {
                    let (now, later) = rest.split_at(to - from);
                    stage.bytes[from..to].copy_from_slice(now);
                    rest = later;
                }
                stage.job = None;
                self.stage = stage;
                return shard.wake(self);
            }
            Ok(_) => Unreachable::Unmapped,
            Err(cause) => cause,
        };
        if self.message.is_some() {
            self.memory_failed(MemoryFault { owner, cause, end: CopyEnd::Source }, shard);
            shard.wake(self);
        }
    }

    fn landed(&mut self, shard: &mut Shard, result: Moved) {
        let Some(mut pause) = self.lift(shard) else { return };
        let Awaits::Mover(landing) = &mut pause.awaits else { return };
        let (after, len) = (landing.after, landing.len);
        if self.phase.flushes() {
            // The stream has ended meanwhile.
            return self.flush(shard);
        }
        let outcome = match result {
            Ok(_) => self.placed(shard, after, len),
            Err(cause) => {
                let owner = landing.mover.session();
                let fault = MemoryFault { owner, cause, end: CopyEnd::Sink };
                Err(self.not_placed(after, fault))
            }
        };
        let deferred = std::mem::take(&mut landing.deferred);
        if let Err(trouble) = outcome {
            self.segment_failed(shard, trouble, |fault| pause.refusal(fault));
        }
        // By the direct path, or over TCP.
        for delivery in deferred {
            self.delivered(shard, &delivery);
        }
        self.read_later(shard, pause.bytes, 0);
    }

    /// Whether a mover is writing a segment.
    pub(super) fn is_landing(&self) -> bool {
        self.pause.as_ref().is_some_and(|pause| matches!(pause.awaits, Awaits::Mover(_)))
    }

    /// What it means that a segment's bytes could not be written.
    pub(super) fn not_placed(&mut self, after: After, fault: MemoryFault) -> Trouble {
        match (after, fault.cause, fault.end) {
            (After::Send { .. }, Unreachable::Unmapped | Unreachable::Detached, CopyEnd::Sink) => {
                return Trouble::BadReceive(Some(fault), Reason::Memory(fault));
            }
            (After::Response { .. }, _, CopyEnd::Sink) => {
                if let Some(seq) = self.reads.front().and_then(|read| read.seq) {
                    let code = crate::rdmap::codes::DDP_LOCAL_CATASTROPHIC;
                    self.ledger.fail(seq, CompletionStatus::LocalAccess, Some(code));
                }
            }
            _ => {}
        }
        Trouble::Memory(fault)
    }

    /// Something that the other end of a direct connection did: whether it has its place behind a
    /// segment that a mover is writing, and is kept there.
    pub(super) fn defer(&mut self, delivery: Delivery) -> Result<(), Delivery> {
        let behind = matches!(delivery, Delivery::Terminate(_) | Delivery::Fin);
        let Some(pause) = self.pause.as_mut().filter(|_| behind) else { return Err(delivery) };
        let Awaits::Mover(landing) = &mut pause.awaits else { return Err(delivery) };
        if matches!(delivery, Delivery::Terminate(_)) {
            // Who terminates is gone, and its key may soon be another QP's.
            self.link = Link::None;
        }
        landing.deferred.push(delivery);
        Ok(())
    }

    /// The peer of `self` has invalidated an STag: nothing is sent any more that a mover has read, or
    /// may yet read, by way of it. (What it writes is over: it stood before this in the stream.)
    pub(super) fn unstage(&mut self) {
        self.stage = Stage::default();
    }
}

impl Landing {
    /// The Terminate for a fault of the segment.
    pub(super) fn refusal(&self, fault: Fault) -> Vec<u8> {
        terminate::build_from_bytes(fault, self.segment_len, &self.header, None)
    }
}
