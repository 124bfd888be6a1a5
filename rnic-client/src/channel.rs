//! Completion channels: a descriptor that says which CQ has something new.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_core::abi::control::{ReplyBody, RequestBody};
use rnic_core::abi::queue::{CHANNEL_RECORD_LEN, ChannelRecord};
use rnic_core::types::{ChannelId, CqId};

use crate::error::Error;
use crate::inbox::{Inbox, Sleep, deadline};
use crate::session::{Session, unexpected};

/// Where the completion events of one or several CQs arrive (`ibv_create_comp_channel(3)`).
///
/// A CQ writes one record when a completion comes after [`Cq::arm`](crate::Cq::arm). Its descriptor
/// ([`AsFd`]) is readable while records wait in the kernel, for `poll(2)` and its kin. Never read
/// from it: call [`CompletionChannel::recv`] with a timeout of zero until it returns `None`. A
/// program that sleeps on the descriptor should not call [`Cq::wait`](crate::Cq::wait) on CQs of
/// this channel: `wait` reads records for all of them, which then no longer show here.
///
/// Clones are the same channel; the daemon destroys it when the last clone and the last CQ on it
/// have been dropped.
#[derive(Clone)]
pub struct CompletionChannel {
    pub(crate) inner: Arc<ChannelInner>,
}

pub(crate) struct ChannelInner {
    pub(crate) session: Arc<Session>,
    pub(crate) id: ChannelId,
    inbox: Inbox<Records>,
}

/// Completion events that have arrived.
#[derive(Default)]
struct Records {
    /// Per CQ of the channel, how many have come: what sleepers in `wait` look at.
    counts: HashMap<CqId, u64>,
    /// CQs with an event that `recv` has not returned yet, each once.
    unread: VecDeque<CqId>,
}

impl CompletionChannel {
    pub(crate) fn create(session: &Arc<Session>) -> Result<CompletionChannel, Error> {
        match session.request_with(RequestBody::CreateChannel, None)? {
            (ReplyBody::Channel { channel: id }, Some(socket)) => {
                let records = Records::default();
                // Who drains a channel is rid of stray records, and misses none that it needs.
                let sleep = Sleep::Recv;
                let inbox = Inbox::new(socket, CHANNEL_RECORD_LEN, records, Records::sort, sleep);
                let session = session.clone();
                Ok(CompletionChannel { inner: Arc::new(ChannelInner { session, id, inbox }) })
            }
            (ReplyBody::Channel { .. }, None) => {
                Err(Error::protocol("a completion channel without its descriptor"))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Its handle in the daemon.
    pub fn id(&self) -> ChannelId {
        self.inner.id
    }

    /// A CQ that had a completion since it was armed, or `None` when `timeout` is over (`None`
    /// waits as long as it takes); compare `ibv_get_cq_event(3)`. Nothing needs acknowledging.
    ///
    /// The caller arms the CQ again and *then* polls it until it is empty, or an event may be lost
    /// between the two (`ibv_req_notify_cq(3)`). A CQ may be empty when its turn comes.
    pub fn recv(&self, timeout: Option<Duration>) -> Result<Option<CqId>, Error> {
        self.inner.session.check_owner()?;
        self.inner.inbox.wait(deadline(timeout), |records| records.unread.pop_front())
    }
}

impl CompletionChannel {
    /// Bytes of a record, as they arrive on the descriptor.
    pub const RECORD_LEN: usize = CHANNEL_RECORD_LEN;

    /// The CQ that a record names: for programs that read the descriptor themselves, one record
    /// with each `recv(2)`, because they are interrupted by signals or have threads cancelled
    /// there. Either this or [`recv`](Self::recv) is to be used on a channel, since each takes the
    /// records of all its CQs; the CQ may have been destroyed since.
    pub fn parse_record(record: &[u8]) -> Option<CqId> {
        ChannelRecord::from_bytes(record).map(|record| CqId(record.cq))
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl AsFd for ChannelInner {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inbox.as_fd()
    }
}

impl AsRawFd for CompletionChannel {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl ChannelInner {
    /// Starts counting events of a CQ.
    pub(crate) fn attach(&self, cq: CqId) {
        self.inbox.with(|records| records.counts.insert(cq, 0));
    }

    /// Stops counting events of a CQ, and drops those that are unread.
    pub(crate) fn detach(&self, cq: CqId) {
        self.inbox.with(|records| {
            records.counts.remove(&cq);
            records.unread.retain(|c| *c != cq);
        });
    }

    /// Events of this CQ that have been read so far.
    pub(crate) fn count(&self, cq: CqId) -> u64 {
        self.inbox.peek(|records| records.count(cq))
    }

    /// Reads what has already arrived.
    pub(crate) fn drain(&self) -> Result<(), Error> {
        self.inbox.drain()
    }

    /// Sleeps until this CQ has had more than `count` events; `false` if `deadline` came first.
    pub(crate) fn wait_beyond(
        &self,
        cq: CqId,
        count: u64,
        deadline: Option<Instant>,
    ) -> Result<bool, Error> {
        Ok(self.inbox.wait(deadline, |records| records.take_beyond(cq, count))?.is_some())
    }

    /// As [`wait_beyond`](Self::wait_beyond), for a task.
    #[cfg(feature = "tokio")]
    pub(crate) async fn task_wait_beyond(&self, cq: CqId, count: u64) -> Result<(), Error> {
        crate::tasks::taken(&self.inbox, |records| records.take_beyond(cq, count)).await
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // A session that has ended has destroyed it already.
        let _ = self.session.command(RequestBody::DestroyChannel { channel: self.id });
    }
}

impl Records {
    fn sort(&mut self, packet: &[u8]) -> Result<(), Error> {
        let record = ChannelRecord::from_bytes(packet)
            .ok_or_else(|| Error::protocol("a malformed completion channel record"))?;
        let cq = CqId(record.cq);
        // The event of a CQ that has been destroyed meanwhile concerns nobody.
        if let Some(count) = self.counts.get_mut(&cq) {
            *count += 1;
            if !self.unread.contains(&cq) {
                self.unread.push_back(cq);
            }
        }
        Ok(())
    }

    /// Whether this CQ has had more than `count` events, which are then nobody else's.
    fn take_beyond(&mut self, cq: CqId, count: u64) -> Option<()> {
        let more = self.count(cq) > count;
        if more {
            self.unread.retain(|c| *c != cq);
        }
        more.then_some(())
    }

    fn count(&self, cq: CqId) -> u64 {
        self.counts.get(&cq).copied().unwrap_or(0)
    }
}
