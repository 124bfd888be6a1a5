//! The GID table of the RoCE device, which follows the host's addresses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;
use rnic_client::{Context, GidRow};

use crate::errno::Errno;

/// A copy of the daemon's table. After a change, the next reader fetches it again.
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
    /// Marks the copy as outdated.
    pub(crate) fn invalidate(&self) {
        self.stale.store(true, Ordering::Release);
    }

    /// Returns the rows by index. A row with a zero GID is empty: its address no longer exists.
    pub(crate) fn rows(&self, context: &Context) -> Result<Arc<[GidRow]>, Errno> {
        if self.stale.load(Ordering::Acquire) {
            // Other readers wait for the new rows here.
            let mut rows = self.rows.write();
            // Cleared before the request to the daemon, so that a later change sets it again.
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
