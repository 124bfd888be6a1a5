//! Send requests that were taken from the queue and have not completed yet, in posting order.
//!
//! Completions appear in the order in which the requests were posted (RFC 5040 section 5.5 rule
//! 13), so a Send after an RDMA Read waits here for the Read. Signaled entries hold one reserved CQ
//! slot each. An unsignaled entry needs a slot only if it fails.

use std::collections::VecDeque;

use crate::device::qp::terminate_detail;
use crate::engine::numbers::count;
use rnic_abi::abi::queue::{SendOpcode, Sge};
use rnic_abi::types::{CompletionOpcode, CompletionStatus, Msn, Stag, TerminateCode};

/// Progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Progress {
    /// Segments are still being produced.
    Sending,
    /// All segments are produced. Done when TCP has accepted this many bytes of the stream.
    Queued(u64),
    /// All segments are sent. Done when the peer has acknowledged the request.
    Unacknowledged,
    /// Waits for the peer's response or for other workers.
    Waiting,
    /// Done, with this outcome.
    Done(CompletionStatus),
}

/// A send request that was taken and has not been retired.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Request {
    pub wr_id: u64,
    pub opcode: CompletionOpcode,
    pub signaled: bool,
    /// A CQ slot is reserved for the completion.
    pub has_slot: bool,
    pub byte_len: u32,
    /// Terminate code of a failure, for the completion.
    pub detail: u32,
    /// ID of the diagnosis of this request's own failure, or 0 if there is none.
    pub diagnosis: u64,
    pub progress: Progress,
    /// MSN of a Send or of Immediate Data, which identifies it in a Terminate of the peer.
    pub msn: Option<Msn>,
    /// STag, offset and length of a Write, which identify it in a Terminate of the peer.
    pub written: Option<(Stag, u64, u32)>,
}

impl Request {
    pub(in crate::engine) fn new(wr_id: u64, opcode: SendOpcode, signaled: bool) -> Self {
        Request {
            wr_id,
            opcode: opcode.completion(),
            signaled,
            has_slot: false,
            byte_len: 0,
            detail: 0,
            diagnosis: 0,
            progress: Progress::Sending,
            msn: None,
            written: None,
        }
    }
}

/// A Read or atomic operation that the peer has not answered.
#[derive(Clone, Debug)]
pub(in crate::engine) struct OutboundRequest {
    /// Sequence number of its entry in [`InFlight`]. `None` for an acknowledgement request or an
    /// RTR.
    pub seq: Option<u64>,
    pub sink: Stag,
    pub to: u64,
    pub size: u32,
    /// SGEs of a Read that has more than one. Its response is scattered to them, and the peer only
    /// echoes `sink` and `to`.
    pub elements: Option<Box<[Sge]>>,
    pub received: u64,
    pub kind: ResponseKind,
}

/// Kind of response that a request awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum ResponseKind {
    /// A Read Response.
    Read,
    /// A Read Response, after which the sink is invalidated.
    ReadInvalidate,
    /// An Atomic Response.
    Atomic,
    /// A zero-length Read Response, which acknowledges all earlier requests.
    Acknowledgement,
}

/// Requests in flight. Sequence numbers count a QP's requests from 0 and never wrap in practice.
#[derive(Default)]
pub(in crate::engine) struct InFlight {
    base: u64,
    /// The peer has acknowledged all requests before this one.
    acknowledged: u64,
    /// RDMA Writes begun since the stream began, modulo 2^32. The Writes in flight have the highest
    /// numbers.
    writes: u32,
    /// Number of the Write that the peer refuses, from the notice that precedes its Terminate.
    refused_write: Option<u32>,
    entries: VecDeque<Request>,
}

impl InFlight {
    pub(in crate::engine) fn push(&mut self, entry: Request) -> u64 {
        self.entries.push_back(entry);
        self.base + self.entries.len() as u64 - 1
    }

    /// Returns the entry with this sequence number, unless it has completed.
    pub(in crate::engine) fn get_mut(&mut self, seq: u64) -> Option<&mut Request> {
        self.entries.get_mut(usize::try_from(seq.checked_sub(self.base)?).ok()?)
    }

    /// Fails a request, unless it is done.
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

    /// Returns the oldest entry if it is done, given the number of bytes that TCP has accepted.
    pub(in crate::engine) fn first_done(
        &self,
        accepted: u64,
    ) -> Option<(&Request, CompletionStatus)> {
        //= RDMAP-5.5-15
        let first = self.entries.front()?;
        let status = match first.progress {
            //= DDP-5.4-1, RDMAP-5.5-9, RDMAP-5.5-14
            Progress::Queued(end) if accepted >= end => CompletionStatus::Success,
            Progress::Unacknowledged if self.base < self.acknowledged => CompletionStatus::Success,
            Progress::Done(status) => status,
            Progress::Queued(_)
            | Progress::Unacknowledged
            | Progress::Sending
            | Progress::Waiting => return None,
        };
        Some((first, status))
    }

    /// Removes the oldest entry, which is done.
    pub(in crate::engine) fn drop_first(&mut self) {
        self.base += u64::from(self.entries.pop_front().is_some());
    }

    /// Marks every request that is not done as flushed.
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

    /// Marks requests in progress as sent, so that they complete. A UC request completes without an
    /// acknowledgement, even if its stream has ended.
    pub(in crate::engine) fn complete_sending(&mut self) {
        for request in self.entries.iter_mut().rev() {
            match request.progress {
                Progress::Sending => request.progress = Progress::Queued(0),
                // Earlier requests have been sent.
                _ => break,
            }
        }
    }

    /// Skips the sequence numbers of requests that completed without being pushed. No request may
    /// be in flight.
    #[inline]
    pub(in crate::engine) fn skip_completed(&mut self, requests: u32) {
        debug_assert!(self.entries.is_empty(), "requests complete in order");
        self.base += u64::from(requests);
    }

    /// Records that the peer has executed all requests before this one.
    #[inline]
    pub(in crate::engine) fn acknowledge(&mut self, before: u64) {
        self.acknowledged = self.acknowledged.max(before);
    }

    /// Returns the sequence number of the next request.
    #[inline]
    pub(in crate::engine) fn end(&self) -> u64 {
        self.base + self.entries.len() as u64
    }

    /// Returns the oldest request.
    pub(in crate::engine) fn first(&self) -> Option<u64> {
        (!self.entries.is_empty()).then_some(self.base)
    }

    /// Returns the oldest request that is not done and consumes a receive of the peer.
    pub(in crate::engine) fn oldest_send(&self) -> Option<u64> {
        let undone = |r: &Request| !matches!(r.progress, Progress::Done(_));
        self.find(|request, seq| {
            request.msn.is_some() && undone(request) && seq >= self.acknowledged
        })
    }

    /// Returns the unacknowledged Send, or Immediate Data, with this MSN.
    pub(in crate::engine) fn send_of(&self, msn: Msn) -> Option<u64> {
        let acknowledged = usize::try_from(self.acknowledged.saturating_sub(self.base)).ok()?;
        let mut others = self.entries.iter().zip(self.base..).skip(acknowledged);
        others.find(|(request, _)| request.msn == Some(msn)).map(|(_, seq)| seq)
    }

    /// Begins a stream and numbers its Writes from 0.
    pub(in crate::engine) fn begin_stream(&mut self) {
        self.writes = 0;
        self.refused_write = None;
    }

    /// Records the target and length of a Write that begins, and counts it.
    #[inline]
    pub(in crate::engine) fn begin_write(&mut self, seq: u64, stag: Stag, to: u64, len: u32) {
        if let Some(request) = self.get_mut(seq) {
            request.written = Some((stag, to, len));
            self.writes = self.writes.wrapping_add(1);
        }
    }

    /// Records the number of the Write that the peer's next Terminate refuses.
    pub(in crate::engine) fn refuse_write(&mut self, number: u32) {
        self.refused_write = Some(number);
    }

    /// Returns the Write to this byte that the peer refuses: the Write with the number from its
    /// notice, or else the oldest unacknowledged Write. Several Writes may target the byte.
    pub(in crate::engine) fn write_to(&self, stag: Stag, to: u64) -> Option<u64> {
        let numbered = self.refused_write.and_then(|_| self.write_by(stag, to, self.refused_write));
        numbered.or_else(|| self.write_by(stag, to, None))
    }

    /// Returns the oldest unacknowledged Write to this byte, with number `wanted` if it is set.
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

    /// Returns the number of CQ slots that the entries hold.
    pub(in crate::engine) fn slots(&self) -> u32 {
        count(self.entries.iter().filter(|request| request.has_slot).count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pop_done(l: &mut InFlight, accepted: u64) -> Option<(u64, CompletionStatus)> {
        let (request, status) = l.first_done(accepted)?;
        let wr_id = request.wr_id;
        l.drop_first();
        Some((wr_id, status))
    }

    #[test]
    fn send_after_read_completes_in_order() {
        let mut l = InFlight::default();
        let read = l.push(Request::new(1, SendOpcode::Read, true));
        let send = l.push(Request::new(2, SendOpcode::Send, true));
        l.get_mut(read).unwrap().progress = Progress::Waiting;
        l.get_mut(send).unwrap().progress = Progress::Queued(100);
        assert!(pop_done(&mut l, 1000).is_none());
        l.get_mut(read).unwrap().progress = Progress::Done(CompletionStatus::Success);
        assert_eq!(pop_done(&mut l, 99).unwrap().0, 1);
        assert!(pop_done(&mut l, 99).is_none());
        assert_eq!(pop_done(&mut l, 100).unwrap().0, 2);
        assert!(l.get_mut(read).is_none());
        assert!(l.is_empty());
    }

    /// A peer that repeats the notice about a Send must not restart the clock each time.
    #[test]
    fn an_acknowledged_send_is_not_found() {
        let mut l = InFlight::default();
        l.push(Request::new(1, SendOpcode::Read, true));
        for msn in [7, 8] {
            let seq = l.push(Request::new(2, SendOpcode::Send, true));
            l.get_mut(seq).unwrap().msn = Some(Msn(msn));
        }
        assert_eq!(l.send_of(Msn(7)), Some(1));
        l.acknowledge(2);
        assert_eq!([l.send_of(Msn(7)), l.send_of(Msn(8))], [None, Some(2)]);
    }

    #[test]
    fn flush_spares_accepted_requests() {
        let mut l = InFlight::default();
        for (wr_id, end) in [(1, 10), (2, 20)] {
            let seq = l.push(Request::new(wr_id, SendOpcode::Write, true));
            l.get_mut(seq).unwrap().progress = Progress::Queued(end);
        }
        l.flush(10);
        assert_eq!(pop_done(&mut l, 10).unwrap().1, CompletionStatus::Success);
        assert_eq!(pop_done(&mut l, 10).unwrap().1, CompletionStatus::WrFlush);
    }
}
