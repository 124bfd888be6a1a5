//! Send requests that have been taken from the queue and not yet completed, in posting order.
//!
//! RFC 5040 section 5.5 rule 13: completions appear in the order in which the requests were posted,
//! so a Send behind an RDMA Read waits here for the Read. Every entry holds one reserved CQ slot.

use std::collections::VecDeque;

use crate::abi::queue::{SendOpcode, Sge};
use crate::device::qp::terminate_detail;
use crate::engine::numbers::count;
use crate::types::{CompletionOpcode, CompletionStatus, Msn, Stag, TerminateCode};

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Progress {
    /// Its bytes are still being produced.
    Sending,
    /// All produced; done when TCP has accepted this many bytes of the stream.
    Queued(u64),
    /// All sent; done when the peer has acknowledged it.
    Unacknowledged,
    /// Waits for the peer's response or for other workers.
    Waiting,
    /// Done, with this outcome.
    Done(CompletionStatus),
}

/// A send queue request that was taken and is not yet retired.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Request {
    pub wr_id: u64,
    pub opcode: CompletionOpcode,
    pub signaled: bool,
    pub byte_len: u32,
    /// Terminate code of a failure, as the completion shows it.
    pub detail: u32,
    /// Record of a failure that did not end the stream, or was not the first; else 0.
    pub diagnosis: u64,
    pub progress: Progress,
    /// Number of the Send, or Immediate Data, that it is: the peer blames it by that.
    pub msn: Option<Msn>,
    /// Where the Write that it is goes, and how long it is: the peer blames it by that.
    pub written: Option<(Stag, u64, u32)>,
}

impl Request {
    pub(in crate::engine) fn new(wr_id: u64, opcode: SendOpcode, signaled: bool) -> Self {
        Request {
            wr_id,
            opcode: opcode.completion(),
            signaled,
            byte_len: 0,
            detail: 0,
            diagnosis: 0,
            progress: Progress::Sending,
            msn: None,
            written: None,
        }
    }
}

/// A Read or an atomic operation that the peer has not answered.
#[derive(Clone, Debug)]
pub(in crate::engine) struct OutboundRequest {
    /// Its request; none for a Read that was only the first FPDU of a peer-to-peer stream.
    pub seq: Option<u64>,
    pub sink: Stag,
    pub to: u64,
    pub size: u32,
    /// Where its bytes go, if that is more than one element; the sink only names them to the peer.
    pub elements: Option<Box<[Sge]>>,
    pub received: u64,
    pub kind: ResponseKind,
}

/// What answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum ResponseKind {
    /// A Read Response.
    Read,
    /// A Read Response, with which the sink is invalidated.
    ReadInvalidate,
    /// An Atomic Response.
    Atomic,
    /// A Read Response of no bytes, which says that all before it was carried out.
    Acknowledgement,
}

/// Requests under way. Sequence numbers count a QP's requests from 0 and never wrap in practice.
#[derive(Default)]
pub(in crate::engine) struct InFlight {
    base: u64,
    /// The peer has acknowledged all before this one.
    acknowledged: u64,
    /// RDMA Writes begun since the stream began, modulo 2^32. Those in flight are the last of them.
    writes: u32,
    /// Number of the Write that the peer refuses, once it has been said.
    refused_write: Option<u32>,
    entries: VecDeque<Request>,
}

impl InFlight {
    pub(in crate::engine) fn push(&mut self, entry: Request) -> u64 {
        self.entries.push_back(entry);
        self.base + self.entries.len() as u64 - 1
    }

    /// The entry with this sequence number, unless it has completed.
    pub(in crate::engine) fn get_mut(&mut self, seq: u64) -> Option<&mut Request> {
        self.entries.get_mut(usize::try_from(seq.checked_sub(self.base)?).ok()?)
    }

    /// Ends a request in error; what is done already stays as it is.
    pub(in crate::engine) fn fail(
        &mut self,
        seq: u64,
        status: CompletionStatus,
        code: Option<TerminateCode>,
    ) {
        if let Some(entry) = self.get_mut(seq)
            && !matches!(entry.progress, Progress::Done(_))
        {
            entry.progress = Progress::Done(status);
            entry.detail = code.map_or(0, terminate_detail);
        }
    }

    /// Takes the oldest entry if it is done, given how much TCP has accepted.
    pub(in crate::engine) fn pop_done(
        &mut self,
        accepted: u64,
    ) -> Option<(Request, CompletionStatus)> {
        //= RDMAP-5.5-15
        let status = match self.entries.front()?.progress {
            //= DDP-5.4-1, RDMAP-5.5-9, RDMAP-5.5-14
            Progress::Queued(end) if accepted >= end => CompletionStatus::Success,
            Progress::Unacknowledged if self.base < self.acknowledged => CompletionStatus::Success,
            Progress::Done(status) => status,
            Progress::Queued(_)
            | Progress::Unacknowledged
            | Progress::Sending
            | Progress::Waiting => return None,
        };
        self.base += 1;
        self.entries.pop_front().map(|e| (e, status))
    }

    /// Marks everything that is not done as flushed.
    pub(in crate::engine) fn flush(&mut self, accepted: u64) {
        for (e, seq) in self.entries.iter_mut().zip(self.base..) {
            match e.progress {
                Progress::Done(_) => {}
                Progress::Queued(end) if accepted >= end => {}
                Progress::Unacknowledged if seq < self.acknowledged => {}
                Progress::Queued(_)
                | Progress::Unacknowledged
                | Progress::Sending
                | Progress::Waiting => {
                    //= DDP-3-3, RDMAP-5.4-8
                    e.progress = Progress::Done(CompletionStatus::WrFlush);
                }
            }
        }
    }

    /// What was being sent is done: by a stream that is gone, to a peer that acknowledges nothing.
    pub(in crate::engine) fn lose(&mut self) {
        for request in self.entries.iter_mut().rev() {
            match request.progress {
                Progress::Sending => request.progress = Progress::Queued(0),
                // What is before it was sent before.
                _ => break,
            }
        }
    }

    /// So many requests were done without ever being under way; none is.
    #[inline]
    pub(in crate::engine) fn pass(&mut self, requests: u32) {
        debug_assert!(self.entries.is_empty(), "nothing passes what is under way");
        self.base += u64::from(requests);
    }

    /// The peer has carried out all before this one.
    #[inline]
    pub(in crate::engine) fn acknowledge(&mut self, before: u64) {
        self.acknowledged = self.acknowledged.max(before);
    }

    /// The number that the next one will have.
    #[inline]
    pub(in crate::engine) fn end(&self) -> u64 {
        self.base + self.entries.len() as u64
    }

    /// The oldest.
    pub(in crate::engine) fn first(&self) -> Option<u64> {
        (!self.entries.is_empty()).then_some(self.base)
    }

    /// The oldest that is not done and takes a receive of the peer's.
    pub(in crate::engine) fn oldest_send(&self) -> Option<u64> {
        let undone = |r: &Request| !matches!(r.progress, Progress::Done(_));
        self.find(|request, seq| {
            request.msn.is_some() && undone(request) && seq >= self.acknowledged
        })
    }

    /// The Send, or Immediate Data, of this number.
    pub(in crate::engine) fn send_of(&self, msn: Msn) -> Option<u64> {
        self.find(|request, _| request.msn == Some(msn))
    }

    /// A stream begins: its Writes are numbered from 0.
    pub(in crate::engine) fn begin_stream(&mut self) {
        (self.writes, self.refused_write) = (0, None);
    }

    /// Notes where a Write goes that begins, and how long it is.
    #[inline]
    pub(in crate::engine) fn begin_write(&mut self, seq: u64, stag: Stag, to: u64, len: u32) {
        if let Some(request) = self.get_mut(seq) {
            request.written = Some((stag, to, len));
            self.writes = self.writes.wrapping_add(1);
        }
    }

    /// Notes the number of the Write that the peer is going to refuse.
    pub(in crate::engine) fn refuse_write(&mut self, number: u32) {
        self.refused_write = Some(number);
    }

    /// Returns the Write that is refused by this byte: the one whose number the peer has said, or
    /// else the oldest that is not acknowledged. Several may write the byte.
    pub(in crate::engine) fn write_to(&self, stag: Stag, to: u64) -> Option<u64> {
        let numbered = self.refused_write.and_then(|_| self.write_by(stag, to, self.refused_write));
        numbered.or_else(|| self.write_by(stag, to, None))
    }

    /// Returns the oldest unacknowledged Write of this byte, and of this number if there is one.
    fn write_by(&self, stag: Stag, to: u64, wanted: Option<u32>) -> Option<u64> {
        let is_write = |request: &&Request| request.written.is_some();
        let mut number =
            self.writes.wrapping_sub(count(self.entries.iter().filter(is_write).count()));
        self.find(|request, seq| {
            let Some((of, from, len)) = request.written else { return false };
            let own = number;
            number = number.wrapping_add(1);
            of == stag
                && to.wrapping_sub(from) < u64::from(len)
                && seq >= self.acknowledged
                && wanted.is_none_or(|wanted| own == wanted)
        })
    }

    fn find(&self, mut is_it: impl FnMut(&Request, u64) -> bool) -> Option<u64> {
        let mut all = self.entries.iter().zip(self.base..);
        all.find(|(request, seq)| is_it(request, *seq)).map(|(_, seq)| seq)
    }

    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(in crate::engine) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_send_behind_a_read_completes_after_it() {
        let mut l = InFlight::default();
        let read = l.push(Request::new(1, SendOpcode::Read, true));
        let send = l.push(Request::new(2, SendOpcode::Send, true));
        l.get_mut(read).unwrap().progress = Progress::Waiting;
        l.get_mut(send).unwrap().progress = Progress::Queued(100);
        assert!(l.pop_done(1000).is_none());
        l.get_mut(read).unwrap().progress = Progress::Done(CompletionStatus::Success);
        assert_eq!(l.pop_done(99).unwrap().0.wr_id, 1);
        assert!(l.pop_done(99).is_none());
        assert_eq!(l.pop_done(100).unwrap().0.wr_id, 2);
        assert!(l.get_mut(read).is_none());
        assert!(l.is_empty());
    }

    #[test]
    fn flush_spares_what_tcp_has_accepted() {
        let mut l = InFlight::default();
        for (wr_id, end) in [(1, 10), (2, 20)] {
            let seq = l.push(Request::new(wr_id, SendOpcode::Write, true));
            l.get_mut(seq).unwrap().progress = Progress::Queued(end);
        }
        l.flush(10);
        assert_eq!(l.pop_done(10).unwrap().1, CompletionStatus::Success);
        assert_eq!(l.pop_done(10).unwrap().1, CompletionStatus::WrFlush);
    }
}
