//! Completion channels: a descriptor for the completion events of CQs.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::{LibraryCall, ReplyBody, RequestBody};
use rnic_abi::abi::queue::{CHANNEL_RECORD_LEN, ChannelRecord};
use rnic_abi::types::{ChannelId, CqId};

use crate::error::Error;
use crate::inbox::{Inbox, Sleep, deadline};
use crate::session::{Session, unexpected};

/// A channel for the completion events of one or more CQs (`ibv_create_comp_channel(3)`).
///
/// A CQ writes one record for the first completion after [`Cq::arm`](crate::Cq::arm). The channel's
/// descriptor ([`AsFd`]), for `poll(2)`, is readable while records wait in the kernel. Unless all
/// its records go through [`parse_record`](Self::parse_record), do not read from it: call
/// [`recv`](Self::recv) with a timeout of zero until it returns `None`. A program that sleeps on
/// the descriptor should not call [`Cq::wait`](crate::Cq::wait) on CQs of this channel: `wait` also
/// reads the records of other CQs, and then the descriptor is not readable for them.
///
/// Clones refer to the same channel. The daemon destroys it when the last clone and the last CQ on
/// it have been dropped.
#[derive(Clone)]
pub struct CompletionChannel {
    pub(crate) inner: Arc<ChannelInner>,
}

pub(crate) struct ChannelInner {
    pub(crate) session: Arc<Session>,
    pub(crate) id: ChannelId,
    inbox: Inbox<Records>,
}

/// Completion events that have been read from the socket.
#[derive(Default)]
struct Records {
    /// Number of events so far per CQ of the channel, for threads that sleep in `wait`.
    counts: HashMap<CqId, u64>,
    /// CQs with an event that `recv` has not returned yet, each at most once.
    unread: VecDeque<CqId>,
}

impl CompletionChannel {
    pub(crate) fn create(session: &Arc<Session>) -> Result<CompletionChannel, Error> {
        match session.request_with(RequestBody::CreateChannel, None)? {
            (ReplyBody::Channel { channel: id }, Some(socket)) => {
                let records = Records::default();
                // `drain` is only used to remove stray records, so it may miss one.
                let sleep = Sleep::Recv;
                let inbox =
                    Inbox::new(socket, CHANNEL_RECORD_LEN, records, Records::handle_packet, sleep);
                let session = session.clone();
                Ok(CompletionChannel { inner: Arc::new(ChannelInner { session, id, inbox }) })
            }
            (ReplyBody::Channel { .. }, None) => {
                Err(Error::protocol("a completion channel without its descriptor"))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Returns the channel's handle in the daemon.
    pub fn id(&self) -> ChannelId {
        self.inner.id
    }

    /// Returns a CQ that sent an event because it was armed, or `None` after `timeout` (`None`: no
    /// timeout); compare `ibv_get_cq_event(3)`. Events need no acknowledgement.
    ///
    /// The caller must arm the CQ again and *then* poll it until it is empty. Otherwise a
    /// completion between the two causes no event (`ibv_req_notify_cq(3)`). The returned CQ may be
    /// empty.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] if a fault rule fails the call. No event is lost.
    pub fn recv(&self, timeout: Option<Duration>) -> Result<Option<CqId>, Error> {
        self.inner.session.check_owner()?;
        self.inner.session.admit(LibraryCall::GetCqEvent)?;
        self.inner.inbox.wait(deadline(timeout), |records| records.unread.pop_front())
    }
}

impl CompletionChannel {
    /// Length of a record on the descriptor, in bytes.
    pub const RECORD_LEN: usize = CHANNEL_RECORD_LEN;

    /// Returns the CQ of a record. For programs that must call `recv(2)` themselves (one record per
    /// call), so that a signal or `pthread_cancel(3)` can interrupt it. Use either `recv(2)` or
    /// [`recv`](Self::recv) on a channel, because each consumes the records of all its CQs. The CQ
    /// may have been destroyed since the record was sent. Returns `None` if the record is
    /// malformed.
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
    /// Starts counting the events of a CQ.
    pub(crate) fn attach(&self, cq: CqId) {
        self.inbox.with(|records| records.counts.insert(cq, 0));
    }

    /// Stops counting the events of a CQ and discards its unread events.
    pub(crate) fn detach(&self, cq: CqId) {
        self.inbox.with(|records| {
            records.counts.remove(&cq);
            records.unread.retain(|c| *c != cq);
        });
    }

    /// Returns the number of events of a CQ read so far.
    pub(crate) fn count(&self, cq: CqId) -> u64 {
        self.inbox.peek(|records| records.count(cq))
    }

    /// Reads all events that have arrived.
    pub(crate) fn drain(&self) -> Result<(), Error> {
        self.inbox.drain()
    }

    /// Sleeps until more than `count` events of a CQ have been read. Returns false if `deadline`
    /// passes first.
    pub(crate) fn wait_beyond(
        &self,
        cq: CqId,
        count: u64,
        deadline: Option<Instant>,
    ) -> Result<bool, Error> {
        Ok(self.inbox.wait(deadline, |records| records.take_beyond(cq, count))?.is_some())
    }

    /// Same as [`wait_beyond`](Self::wait_beyond), for a task.
    #[cfg(feature = "tokio")]
    pub(crate) async fn task_wait_beyond(&self, cq: CqId, count: u64) -> Result<(), Error> {
        self.inbox.wait_in_task(|records| records.take_beyond(cq, count)).await
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // If the session has ended, the channel is destroyed already.
        let _ = self.session.command(RequestBody::DestroyChannel { channel: self.id });
    }
}

impl Records {
    fn handle_packet(&mut self, packet: &[u8]) -> Result<(), Error> {
        let record = ChannelRecord::from_bytes(packet)
            .ok_or_else(|| Error::protocol("a malformed completion channel record"))?;
        let cq = CqId(record.cq);
        // Ignores events of CQs that no longer exist.
        if let Some(count) = self.counts.get_mut(&cq) {
            *count += 1;
            if !self.unread.contains(&cq) {
                self.unread.push_back(cq);
            }
        }
        Ok(())
    }

    /// Returns `Some` if more than `count` events of a CQ have been read, and marks them as
    /// returned.
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
