//! The GID table of the RoCE device, which follows the addresses of the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use rnic_client::{Context, GidRow};

use crate::errno::Errno;

/// A copy of the daemon's table. It is read again after a change, by the next reader.
pub(crate) struct GidTable {
    rows: RwLock<Arc<[GidRow]>>,
    stale: AtomicBool,
}

impl Default for GidTable {
    fn default() -> Self {
        GidTable { rows: RwLock::new(Arc::new([])), stale: AtomicBool::new(true) }
    }
}

impl GidTable {
    /// The table has changed.
    pub(crate) fn invalidate(&self) {
        self.stale.store(true, Ordering::Release);
    }

    /// The rows by index. A row with a zero GID is an empty entry, of an address that has gone.
    pub(crate) fn rows(&self, context: &Context) -> Result<Arc<[GidRow]>, Errno> {
        if self.stale.load(Ordering::Acquire) {
            // Other readers wait here for the new rows.
            let mut rows = self.rows.write();
            // Cleared before the daemon is asked, so that a change in between is seen next time.
            if self.stale.swap(false, Ordering::AcqRel) {
                match context.gids() {
                    Ok(new) => *rows = new.into(),
                    Err(error) => {
                        self.invalidate();
                        return Err(error.into());
                    }
                }
            }
        }
        Ok(self.rows.read().clone())
    }
}
