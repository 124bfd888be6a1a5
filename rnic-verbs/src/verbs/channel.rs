//! Completion channels (`ibv_create_comp_channel(3)`).

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rnic_client::CompletionChannel;

use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::{Body, Kind};
use crate::system;
use crate::verbs::context::ContextBody;
use crate::verbs::cq::CqBody;
use crate::verbs::device::Device;

/// A completion channel. The daemon writes events to its descriptor.
pub(crate) struct ChannelBody {
    device: Arc<Device>,
    channel: CompletionChannel,
    /// Number of CQs that use it.
    cqs: AtomicI32,
}

impl Body for Arc<ChannelBody> {
    type Head = c::ibv_comp_channel;
    const KIND: Kind = Kind::CompletionChannel;
}

impl ChannelBody {
    pub(crate) fn create(context: &ContextBody) -> Result<Arc<ChannelBody>, Errno> {
        let device = context.device();
        let channel = device.context.create_completion_channel()?;
        // Programs expect ibv_get_cq_event to block until they change the mode of the descriptor.
        rustix::io::ioctl_fionbio(&channel, false)?;
        Ok(Arc::new(ChannelBody { device: device.clone(), channel, cqs: AtomicI32::new(0) }))
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

    /// Checks that no CQ uses it.
    ///
    /// # Errors
    ///
    /// `EBUSY` otherwise.
    pub(crate) fn check_unused(&self) -> Result<(), Errno> {
        match self.cqs.load(Ordering::Relaxed) {
            0 => Ok(()),
            n => Err(Errno::busy(format_args!("{n} completion queues use the channel"))),
        }
    }

    /// Returns the next CQ that has an event (`ibv_get_cq_event(3)`). Waits for it unless the
    /// descriptor is non-blocking.
    pub(crate) fn next(&self) -> Result<Arc<CqBody>, Errno> {
        loop {
            let mut record = [0; CompletionChannel::RECORD_LEN];
            let n = system::receive_packet(self.fd(), &mut record)?;
            // A socket without a peer returns an empty packet.
            let cq = CompletionChannel::parse_record(&record[..n]).ok_or_else(|| {
                Errno::new(libc::EIO, format_args!("the daemon has closed the completion channel"))
            })?;
            // Skips events of destroyed CQs. Destroying a CQ waits for events that are counted.
            let counted = |cq: &Arc<CqBody>| {
                cq.completion_events.handed_out();
                cq.clone()
            };
            if let Some(cq) = self.device.with_cq(cq, counted) {
                return Ok(cq);
            }
        }
    }
}
