//! Event channels (`rdma_create_event_channel(3)`).

use std::os::fd::RawFd;
use std::sync::Arc;

use super::{CmEvent, IdBody};
use crate::c;
use crate::errno::Errno;
use crate::event_queue::EventQueue;
use crate::ffi::handles::{Body, Kind};
use crate::verbs::device::Device;

/// An event channel.
pub(crate) struct EventChannel {
    /// Keeps the device open.
    _device: Arc<Device>,
    queue: EventQueue<CmEvent>,
}

impl Body for Arc<EventChannel> {
    type Head = c::rdma_event_channel;
    const KIND: Kind = Kind::EventChannel;
}

impl EventChannel {
    pub(crate) fn create(device: Arc<Device>) -> Result<Arc<EventChannel>, Errno> {
        Ok(Arc::new(EventChannel { _device: device, queue: EventQueue::new()? }))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.queue.fd()
    }

    pub(super) fn push(&self, arrived: CmEvent) {
        self.queue.push(arrived);
    }

    /// Returns the next event. Waits for it unless the descriptor is non-blocking.
    pub(crate) fn next(&self) -> Result<CmEvent, Errno> {
        Ok(self.queue.next(|arrived| arrived.id.unacknowledged.handed_out())?)
    }

    /// Returns true if an event of the id waits to be fetched.
    pub(super) fn has(&self, id: &IdBody) -> bool {
        self.queue.count(|arrived| std::ptr::eq(&*arrived.id, id)) > 0
    }

    /// Returns the number of connection requests of a listener that wait to be fetched.
    pub(super) fn requests(&self, listener: &IdBody) -> usize {
        let asks = |a: &CmEvent| a.request.is_some() && std::ptr::eq(&*a.id, listener);
        self.queue.count(asks)
    }

    /// Removes and returns the events of an id that wait to be fetched.
    pub(super) fn take_back(&self, id: &IdBody) -> Vec<CmEvent> {
        self.queue.take_back(|arrived| std::ptr::eq(&*arrived.id, id))
    }
}
