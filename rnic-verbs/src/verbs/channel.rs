//! Completion channels (`ibv_create_comp_channel(3)`).

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use parking_lot::Mutex;
use rnic_client::{CompletionChannel, Function, LibraryCall};

use crate::c::{ibv_comp_channel, ibv_context, ibv_cq};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Foreign, Kind, live, publish, withdraw};
use crate::system;
use crate::verbs::context::{ContextBody, context};
use crate::verbs::device::Device;

/// A completion channel. The daemon writes events to its descriptor.
pub(crate) struct ChannelBody {
    device: Arc<Device>,
    channel: Arc<CompletionChannel>,
    /// Number of CQs that use the channel.
    cqs: AtomicI32,
    readers: Mutex<Readers>,
}

/// Threads that receive events, and the events that none of them may return.
#[derive(Default)]
struct Readers {
    /// Number of threads in recv(2). Stays too high if one of them is cancelled.
    receiving: u32,
    /// The socket may hold events of destroyed CQs.
    stale: bool,
}

impl Body for Arc<ChannelBody> {
    type Head = ibv_comp_channel;
    const KIND: Kind = Kind::CompletionChannel;
}

impl ChannelBody {
    pub(crate) fn create(context: &ContextBody) -> Result<Arc<ChannelBody>, Errno> {
        let device = context.device();
        let channel = device.context.create_completion_channel()?;
        // Programs expect ibv_get_cq_event to block until they change the mode of the descriptor.
        rustix::io::ioctl_fionbio(&channel, false)?;
        let channel = Arc::new(channel);
        device.created_channel(&channel, context.adapter());
        let cqs = AtomicI32::new(0);
        let readers = Mutex::default();
        Ok(Arc::new(ChannelBody { device: device.clone(), channel, cqs, readers }))
    }

    pub(crate) fn client(&self) -> &CompletionChannel {
        &self.channel
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.channel.as_raw_fd()
    }

    /// Adds `more` to the number of CQs.
    pub(crate) fn count(&self, more: i32) {
        self.cqs.fetch_add(more, Ordering::Relaxed);
    }

    /// Checks that no CQ uses the channel.
    ///
    /// # Errors
    ///
    /// `EBUSY` otherwise.
    pub(crate) fn check_unused(&self) -> Result<(), Errno> {
        match self.cqs.load(Ordering::Relaxed) {
            0 => Ok(()),
            n => Err(busy!("{n} completion queues use the channel")),
        }
    }

    /// Returns the pointer to the next CQ that has an event (`ibv_get_cq_event(3)`). Waits for it
    /// unless the descriptor is non-blocking.
    ///
    /// # Errors
    ///
    /// The error of a fault rule, the errors of `recv(2)`, and `EIO` if the channel is closed.
    pub(crate) fn next(&self) -> Result<Foreign<ibv_cq>, Errno> {
        self.device.admit(LibraryCall::GetCqEvent)?;
        loop {
            let mut record = [0; CompletionChannel::RECORD_LEN];
            self.readers.lock().receiving += 1;
            let received = system::receive_packet(self.fd(), &mut record, 0);
            self.has_received();
            let n = received?;
            // A socket that is shut down or has no peer returns an empty packet.
            let cq = CompletionChannel::parse_record(&record[..n])
                .ok_or_else(|| errno!(libc::EIO, "the completion channel is closed"))?;
            // Skips events of destroyed CQs. Destroying a CQ waits for events that are counted.
            if let Some(cq) = self.device.cqs.read().get(&cq).map(|cq| cq.hand_out_event()) {
                return Ok(cq);
            }
        }
    }

    fn has_received(&self) {
        let mut readers = self.readers.lock();
        readers.receiving -= 1;
        if readers.stale {
            self.drop_stale(&mut readers);
        }
    }

    /// Drops events of a CQ that has been destroyed, so that the descriptor is readable only if
    /// [`ChannelBody::next`] does not block.
    pub(crate) fn drop_events(&self) {
        let mut readers = self.readers.lock();
        readers.stale = true;
        self.drop_stale(&mut readers);
    }

    /// Drops events of destroyed CQs up to the next event of another CQ. Does nothing if a thread
    /// is in recv(2), which skips these events.
    fn drop_stale(&self, readers: &mut Readers) {
        let mut record = [0; CompletionChannel::RECORD_LEN];
        let mut receive = |flags| {
            let n = system::receive_packet(self.fd(), &mut record, flags | libc::MSG_DONTWAIT);
            n.ok().and_then(|n| CompletionChannel::parse_record(&record[..n]))
        };
        while readers.receiving == 0 {
            let Some(cq) = receive(libc::MSG_PEEK) else {
                readers.stale = false;
                return;
            };
            if self.device.cqs.read().contains_key(&cq) {
                return;
            }
            receive(0);
        }
    }
}

pub(crate) fn create(of: *mut ibv_context) -> Result<*mut ibv_comp_channel, Errno> {
    let channel = ChannelBody::create(&*context(of)?)?;
    let head = ibv_comp_channel { context: of, fd: channel.fd(), refcnt: 0 };
    Ok(publish(head, channel).as_ptr())
}

pub(crate) fn destroy(channel: *mut ibv_comp_channel) -> Result<(), Errno> {
    live::<Arc<ChannelBody>>(channel)?.check_unused()?;
    // SAFETY: no thread uses `channel`, now or later (ibv_destroy_comp_channel(3)).
    unsafe { withdraw::<Arc<ChannelBody>>(channel) }.map(drop)
}

fn destroy_by_program(channel: *mut ibv_comp_channel) -> Result<(), Errno> {
    let body = live::<Arc<ChannelBody>>(channel)?;
    body.device.admit(Function::DestroyCompChannel.call())?;
    destroy(channel)
}

entry! {
    uncancelled ibv_create_comp_channel(of: *mut ibv_context) -> pointer<ibv_comp_channel> = create;
    uncancelled ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> status = destroy_by_program;
}
