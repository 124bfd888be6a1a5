//! The session of this process with the daemon.
//!
//! The session lives as long as any of its users: a device list, a context, an event channel or an
//! id. With fault rules of its own (`RNIC_FAULTS`) it lives as long as the process. A child created
//! by `fork` starts without a session, and must not use its parent's.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::c::ibv_device;
use crate::errno::Errno;
use crate::system;
use crate::verbs::adapter::Adapter;
use crate::verbs::device::Device;
use crate::verbs::event_thread;

static CURRENT: Mutex<Option<Current>> = Mutex::new(None);

struct Current {
    owner: u32,
    device: Weak<Device>,
    /// The session if it has rules of its own, which count the calls of the process.
    kept: Option<Arc<Device>>,
}

/// Returns the session of this process. Opens it if necessary.
pub(crate) fn open() -> Result<Arc<Device>, Errno> {
    let owner = std::process::id();
    let mut current = CURRENT.lock();
    if let Some(current) = &*current
        && current.owner == owner
        && let Some(device) = current.device.upgrade()
        && device.is_usable()
    {
        return Ok(device);
    }
    let device = Arc::new(Device::connect()?);
    // Before others can find the session: without the thread it gets no events.
    event_thread::listen(&device)?;
    let kept = system::variable(c"RNIC_FAULTS").map(|_| device.clone());
    let before = current.replace(Current { owner, device: Arc::downgrade(&device), kept });
    drop(current);
    if let Some(kept) = before.and_then(|before| before.kept) {
        // A forked child must not unmap the memory of its parent.
        if kept.is_ours() { drop(kept) } else { std::mem::forget(kept) }
    }
    Ok(device)
}

/// Returns the session and the device for a C pointer, if it belongs to the current session.
pub(crate) fn with_head(head: *const ibv_device) -> Option<(Arc<Device>, Arc<Adapter>)> {
    let device = CURRENT.lock().as_ref().and_then(|current| current.device.upgrade())?;
    let adapter = device.adapter_of(head)?;
    Some((device, adapter))
}
