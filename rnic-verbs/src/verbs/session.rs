//! The session of this process with the daemon.
//!
//! The session lives as long as any of its users: a device list, a context, an event channel or an
//! id. A child created by `fork` starts without a session, and must not use its parent's.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::c::ibv_device;
use crate::errno::Errno;
use crate::verbs::adapter::Adapter;
use crate::verbs::device::Device;
use crate::verbs::event_thread;

static CURRENT: Mutex<Option<(u32, Weak<Device>)>> = Mutex::new(None);

/// Returns the session of this process. Opens it if necessary.
pub(crate) fn open() -> Result<Arc<Device>, Errno> {
    let owner = std::process::id();
    let mut current = CURRENT.lock();
    if let Some((of, device)) = &*current
        && *of == owner
        && let Some(device) = device.upgrade()
        && device.is_usable()
    {
        return Ok(device);
    }
    let device = Arc::new(Device::connect()?);
    *current = Some((owner, Arc::downgrade(&device)));
    drop(current);
    event_thread::listen(&device)?;
    Ok(device)
}

/// Returns the session and the device for a C pointer, if it belongs to the current session.
pub(crate) fn with_head(head: *const ibv_device) -> Option<(Arc<Device>, Arc<Adapter>)> {
    let device = CURRENT.lock().as_ref().and_then(|(_, device)| device.upgrade())?;
    let adapter = device.adapter_of(head)?;
    Some((device, adapter))
}
