//! Event channels (`rdma_create_event_channel(3)`).

use std::os::fd::RawFd;
use std::sync::Arc;

use super::{Arrived, IdBody};
use crate::c;
use crate::device::Device;
use crate::errno::Errno;
use crate::event_queue::EventQueue;
use crate::object::{Body, Kind};

/// An event channel.
pub(crate) struct EventChannel {
    /// It lives as long as there is a channel.
    _device: Arc<Device>,
    queue: EventQueue<Arrived>,
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

    pub(super) fn push(&self, arrived: Arrived) {
        self.queue.push(arrived);
    }

    /// The next event, in the descriptor's own mode.
    pub(crate) fn next(&self) -> Result<Arrived, Errno> {
        Ok(self.queue.next(|arrived| arrived.id.unacknowledged.handed_out())?)
    }

    /// Returns true if an event of an id has not been fetched.
    pub(super) fn has(&self, id: &IdBody) -> bool {
        self.queue.count(|arrived| std::ptr::eq(&*arrived.id, id)) > 0
    }

    /// Number of connection requests of a listener that have not been fetched.
    pub(super) fn requests(&self, listener: &IdBody) -> usize {
        let asks = |a: &Arrived| a.request.is_some() && std::ptr::eq(&*a.id, listener);
        self.queue.count(asks)
    }

    /// Takes back what has not been fetched of an id.
    pub(super) fn take_back(&self, id: &IdBody) -> Vec<Arrived> {
        self.queue.take_back(|arrived| std::ptr::eq(&*arrived.id, id))
    }
}
