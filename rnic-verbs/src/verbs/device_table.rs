//! The devices of the daemon and its GID table. Both change with the host's addresses and by
//! commands of administrators.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use rnic_client::{Context, DeviceRow, GidRow};

use crate::errno::Errno;

/// A copy of the daemon's tables. After a change, the next reader fetches them again.
pub(crate) struct DeviceTable {
    tables: RwLock<Arc<Tables>>,
    stale: AtomicBool,
}

/// The daemon's tables at one time.
#[derive(Default)]
pub(crate) struct Tables {
    /// The RoCE devices, then the iWARP device.
    pub(crate) devices: Vec<DeviceRow>,
    /// GID table of the daemon. A row with a zero GID is empty: its address no longer exists.
    pub(crate) gids: Vec<GidRow>,
}

impl Default for DeviceTable {
    fn default() -> Self {
        DeviceTable { tables: RwLock::default(), stale: AtomicBool::new(true) }
    }
}

impl DeviceTable {
    /// Marks the copy as outdated.
    pub(crate) fn invalidate(&self) {
        self.stale.store(true, Ordering::Release);
    }

    /// Returns the tables.
    pub(crate) fn tables(&self, context: &Context) -> Result<Arc<Tables>, Errno> {
        if self.stale.load(Ordering::Acquire) {
            // Other readers wait for the new tables here.
            let mut tables = self.tables.write();
            // Cleared before the requests to the daemon, so that a later change sets it again.
            if self.stale.swap(false, Ordering::AcqRel) {
                let fetched = context.device_unruled().and_then(|device| {
                    let gids = context.gids_unruled()?;
                    Ok(Tables { devices: device.devices, gids })
                });
                match fetched {
                    Ok(new) => *tables = Arc::new(new),
                    Err(error) => {
                        self.invalidate();
                        return Err(error.into());
                    }
                }
            }
        }
        Ok(self.tables.read().clone())
    }
}
