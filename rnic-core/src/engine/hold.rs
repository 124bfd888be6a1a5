//! A stream whose incoming direction stands still, for one of two reasons at a time. Either a Send
//! found no receive and its QP was made to hold it (RFC 5041 section 7.1 lets a receiver end the stream
//! at once; to wait instead is ours, and costs the peer only what TCP's flow control costs it anyway);
//! or a mover is writing the bytes of a segment (`moving`). A Send that was held may, with its
//! receive, go on to wait for a mover.
//!
//! *Over TCP* a segment without a receive has been verified and is kept with what was read behind it,
//! of a segment that is being written only the latter; the socket is not read again, so everything
//! else stays in the kernel and the peer's window closes. A QP that [may pause](Qp::may_pause) reads
//! so little at a time that what is kept never exceeds one FPDU of the largest size; only at its first
//! job for a mover a QP has not known that it would, and keeps what it has read. A reset is seen all the same, because the worker passes on the socket's error
//! ([`Engine::socket_failed`](super::Engine::socket_failed)); a FIN is in its place behind the bytes,
//! and waits with them. *By the direct path* nothing is kept: the sender's QP takes no turn at this one
//! until it is woken. What it does besides sending is deferred where TCP would deliver it in its place
//! behind a segment that has left ([`Qp::defer`]).
//!
//! The other direction goes on. But a Read Response to this QP is behind the message that is held, so
//! an application that posts its next receive only after a Read is done waits for itself; it is warned
//! once.
//!
//! A pause ends in one of three ways, each by [`Qp::lift`]: what is awaited has come
//! ([`Qp::resume`], [`Qp::moved`]), the deadline has passed ([`Qp::held_too_long`]), or the stream has
//! ended; only a mover's answer is awaited even then, because it writes where a flushed receive is.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::moving::Landing;
use super::qp::{Link, Qp};
use super::reason::Reason;
use super::reason::Trouble;
use super::receives::{Receives, tell};
use super::schedule::Key;
use super::{Delivery, Output, Shard};
use crate::ddp::Header;
use crate::device::Srq;
use crate::device::srq::{Place, Turn, Waiter};
use crate::shm::queue::ReceiveEntry;
use crate::stream::inbound::SendKind;
use crate::stream::{Fault, terminate};
use crate::types::Time;

/// A stream whose incoming direction stands still.
pub(super) struct Pause {
    /// What it waits for.
    pub(super) awaits: Awaits,
    /// Over TCP: the ULPDU that lacks a receive, then what was read and not looked at.
    pub(super) bytes: Vec<u8>,
}

/// What a stream waits for.
pub(super) enum Awaits {
    /// A mover, which writes a segment.
    Mover(Landing),
    /// A receive for this segment.
    Receive {
        segment: Segment,
        /// In the queue of those who wait for a shared receive queue.
        place: Option<Place>,
        until: Time,
    },
}

/// The segment that found no receive.
pub(super) enum Segment {
    /// It stands in front of the bytes that are kept: so many, with the payload from here on.
    Received { ulpdu: usize, payload: usize, kind: SendKind, mo: u32, last: bool },
    /// The other QP of the direct path has it: its header, and its bytes.
    AtPeer { header: Header, len: u16 },
}

/// Deadlines of pauses. They are apart from those of phases: a stream can have one of each.
#[derive(Default)]
pub(super) struct Holds(BTreeSet<(Time, Key)>);

impl Holds {
    pub(super) fn next(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    pub(super) fn pop_due(&mut self, now: Time) -> Option<Key> {
        let (at, key) = *self.0.first()?;
        (at <= now).then(|| {
            self.0.pop_first();
            key
        })
    }
}

impl Qp {
    /// Whether the incoming direction may have to stand still: then little is read at a time.
    pub(super) fn may_pause(&self) -> bool {
        self.hold.is_some() || self.paced
    }

    /// Whether the incoming direction stands still: nothing may be read, nothing handed over.
    pub(super) fn is_paused(&self) -> bool {
        self.pause.is_some()
    }

    /// There is no receive for this segment, `ulpdu` if it came over TCP: takes one that has been
    /// posted by now (true), or pauses until one is.
    ///
    /// Asks the client to ring *before* the last look at the queue; the fence argument stands at
    /// [`ReceiveProducer::waits`](crate::shm::queue::ReceiveProducer::waits). The bell is this QP's
    /// for its own queue, and leads to [`Qp::resume`] by its next turn; for a shared queue it is
    /// that queue's, and leads there by [`Srq::ready`].
    pub(super) fn await_receive(
        &mut self,
        shard: &mut Shard,
        segment: Segment,
        ulpdu: &[u8],
    ) -> Result<bool, Trouble> {
        let Some(deadline) = self.hold else {
            return Err(Reason::NoReceive { held: false }.into());
        };
        let waiter = Waiter { qp: self.id, worker: shard.worker, key: self.key };
        let place = match &mut self.rq {
            Receives::Own(rq) => {
                rq.set_waits(shard.worker);
                let found = rq.look();
                if !matches!(found, Ok(0)) {
                    rq.clear_waits(shard.worker);
                    found.map_err(Trouble::BadQueue)?;
                    return self.take_in(Turn::AtOnce, shard.now, &mut shard.outputs);
                }
                None
            }
            Receives::Shared(srq) => {
                let mut entry = ReceiveEntry::default();
                let (got, notices) =
                    srq.take_or_wait(waiter, shard.now, &mut entry).map_err(Trouble::BadSrq)?;
                match got {
                    Ok(got) => {
                        tell(srq, notices, &mut shard.outputs);
                        return self.got(got, entry);
                    }
                    Err(place) => {
                        shard.sessions.hold(self.seat, srq);
                        Some(place)
                    }
                }
            }
        };
        self.warn_of_read(shard);
        let until = shard.now.after(deadline);
        shard.holds.0.insert((until, self.key));
        let awaits = Awaits::Receive { segment, place, until };
        self.pause = Some(Box::new(Pause { awaits, bytes: ulpdu.to_vec() }));
        Ok(false)
    }

    /// Keeps bytes that were read behind the segment for which the stream stands still.
    pub(super) fn keep_unread(&mut self, bytes: &[u8]) {
        if let Some(pause) = &mut self.pause {
            pause.bytes.extend_from_slice(bytes);
        }
    }

    /// Goes on if what is awaited has come. Called in each turn; costs nothing unless paused.
    pub(super) fn resume(&mut self, shard: &mut Shard) {
        let Some(pause) = &self.pause else { return };
        let Awaits::Receive { place, .. } = &pause.awaits else { return };
        let turn = place.map_or(Turn::AtOnce, Turn::Waited);
        match self.take_in(turn, shard.now, &mut shard.outputs) {
            Ok(false) => self.warn_of_read(shard),
            Ok(true) => self.go_on(shard),
            Err(trouble) => {
                let Some(pause) = self.lift(shard) else { return };
                self.take_to_no_avail(shard);
                self.segment_failed(shard, trouble, |fault| pause.refusal(fault));
            }
        }
    }

    /// There is a receive: places the segment, then handles what was read behind it.
    fn go_on(&mut self, shard: &mut Shard) {
        let Some(pause) = self.lift(shard) else { return };
        let Awaits::Receive { segment, .. } = &pause.awaits else { return };
        let Segment::Received { ulpdu, payload, kind, mo, last } = *segment else { return };
        let arrived = &pause.bytes[..ulpdu];
        if let Err(trouble) = self.send_arrived(shard, kind, mo, arrived, payload, last) {
            self.segment_failed(shard, trouble, |fault| pause.refusal(fault));
        }
        self.read_later(shard, pause.bytes, ulpdu);
    }

    /// The deadline of a pause has passed: the message has found no receive after all.
    pub(super) fn held_too_long(&mut self, shard: &mut Shard) {
        self.warn_of_read(shard);
        let Some(pause) = self.lift(shard) else { return };
        self.take_to_no_avail(shard);
        let reason = Reason::NoReceive { held: true };
        let fault = reason.fault();
        self.terminate(shard, fault.code, Some(pause.refusal(fault)), reason);
    }

    /// The segment that was held fails: the peer of a direct connection is rid of it, as it would
    /// have been long before with TCP between them.
    fn take_to_no_avail(&self, shard: &mut Shard) {
        if let Link::Direct(peer) = &self.link {
            shard.deliver(*peer, Delivery::SegmentTaken);
        }
    }

    /// An application that waits for a Read before it posts a receive waits for itself: says so once.
    fn warn_of_read(&mut self, shard: &mut Shard) {
        let reads = self.reads.iter().any(|read| read.seq.is_some());
        if !reads || std::mem::replace(&mut self.warned_of_read, true) {
            return;
        }
        let text = format!(
            "QP {} holds a message for want of a receive while a Read of its own is outstanding; \
             the response is behind that message",
            self.id
        );
        shard.outputs.push_back(Output::Warning { session: self.session, text });
    }

    /// Ends a pause, if there is one: nobody waits any more, and the stream moves again.
    pub(super) fn lift(&mut self, shard: &mut Shard) -> Option<Box<Pause>> {
        let pause = self.pause.take()?;
        if let Awaits::Receive { place, until, .. } = &pause.awaits {
            shard.holds.0.remove(&(*until, self.key));
            match (&mut self.rq, place) {
                (Receives::Own(rq), _) => rq.clear_waits(shard.worker),
                (Receives::Shared(srq), Some(place)) => {
                    let workers = srq.leave(*place);
                    shard.sessions.release(self.seat, srq);
                    shard.receives_freed(srq, workers);
                }
                (Receives::Shared(_), None) => {}
            }
        }
        match &self.link {
            Link::Tcp(_) => shard.outputs.push_back(Output::ReadAgain(self.id)),
            Link::Direct(peer) => shard.awakened.push(*peer),
            Link::None => {}
        }
        Some(pause)
    }
}

#[cfg(test)]
impl super::Engine {
    /// Bytes kept of streams that stand still.
    pub(super) fn kept_bytes(&self) -> usize {
        self.qps.iter().flatten().filter_map(|qp| qp.pause.as_ref()).map(|p| p.bytes.len()).sum()
    }
}

impl Pause {
    /// The Terminate for a fault of the segment in progress.
    pub(super) fn refusal(&self, fault: Fault) -> Vec<u8> {
        match &self.awaits {
            Awaits::Mover(landing) => landing.refusal(fault),
            Awaits::Receive { segment: Segment::Received { ulpdu, .. }, .. } => {
                terminate::build(fault, &self.bytes[..*ulpdu], None)
            }
            Awaits::Receive { segment: Segment::AtPeer { header, len }, .. } => {
                terminate::build_from_header(fault, *len, header, None)
            }
        }
    }
}

impl Shard {
    /// Receives of a shared queue are to be had by others than those who were called: tells the
    /// workers in the set.
    pub(super) fn receives_freed(&mut self, srq: &Arc<Srq>, workers: u64) {
        let ours = 1 << (self.worker % u64::BITS);
        if workers & ours != 0 {
            self.receives_posted(srq);
        }
        if workers & !ours != 0 {
            let srq = srq.clone();
            self.outputs.push_back(Output::ReceivesFreed { srq, workers: workers & !ours });
        }
    }

    /// Wakes the QPs that may take a receive of a shared queue.
    pub(super) fn receives_posted(&mut self, srq: &Srq) {
        self.sessions.receives_posted(srq, self.worker, &mut self.schedule);
    }
}
