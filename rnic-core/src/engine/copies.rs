//! Copies that a mover makes for this engine, by number.

use std::collections::HashMap;
use std::sync::Arc;

use super::deadlines::{Deadlines, Due};
use crate::device::Mover;
use crate::types::{QpId, Time};

/// Copies under way.
#[derive(Default)]
pub(super) struct CopyJobs {
    last: u64,
    open: HashMap<u64, CopyJob>,
}

/// A copy under way.
pub(super) struct CopyJob {
    pub qp: QpId,
    pub mover: Arc<Mover>,
    due: Time,
}

impl CopyJobs {
    /// A copy begins: its number.
    pub(super) fn open(
        &mut self,
        qp: QpId,
        mover: &Arc<Mover>,
        due: Time,
        deadlines: &mut Deadlines,
    ) -> u64 {
        self.last += 1;
        self.open.insert(self.last, CopyJob { qp, mover: mover.clone(), due });
        deadlines.set(due, Due::Copy(self.last));
        self.last
    }

    /// Forgets a copy, which is over or given up.
    pub(super) fn close(&mut self, id: u64, deadlines: &mut Deadlines) -> Option<CopyJob> {
        let job = self.open.remove(&id)?;
        deadlines.clear(job.due, Due::Copy(id));
        Some(job)
    }
}
