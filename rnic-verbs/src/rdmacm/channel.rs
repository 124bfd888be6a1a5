//! Event channels (`rdma_create_event_channel(3)`).

use std::sync::Arc;

use rnic_client::Function;

use super::state::EventChannel;
use crate::c::rdma_event_channel;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Live, live, publish, withdraw};
use crate::verbs::device::Device;
use crate::verbs::session;

/// Creates a channel of a device.
pub(super) fn make(device: Arc<Device>) -> Result<*mut rdma_event_channel, Errno> {
    let channel = EventChannel::create(device)?;
    let head = rdma_event_channel { fd: channel.fd() };
    Ok(publish(head, channel).as_ptr())
}

/// Returns the channel of a C pointer.
pub(super) fn channel(of: *mut rdma_event_channel) -> Result<Live<Arc<EventChannel>>, Errno> {
    live(of)
}

/// Opens the device. Returns `ENODEV` on every failure.
pub(super) fn open_device() -> Result<Arc<Device>, Errno> {
    session::open().map_err(|errno| errno.with_number(libc::ENODEV))
}

fn create() -> Result<*mut rdma_event_channel, Errno> {
    let device = open_device()?;
    device.admit(Function::CreateEventChannel.call())?;
    make(device)
}

/// Destroys a channel. Does nothing for a null pointer.
pub(super) fn destroy(channel: *mut rdma_event_channel) -> Result<(), Errno> {
    if channel.is_null() {
        return Ok(());
    }
    // SAFETY: no thread uses `channel`, now or later (rdma_destroy_event_channel(3)).
    unsafe { withdraw::<Arc<EventChannel>>(channel) }.map(drop)
}

entry! {
    uncancelled rdma_create_event_channel() -> pointer<rdma_event_channel> = create;
    uncancelled rdma_destroy_event_channel(channel: *mut rdma_event_channel) -> nothing = destroy;
}
