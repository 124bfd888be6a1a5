//! Copies that copiers perform for this engine, by number.

use std::collections::HashMap;
use std::sync::Arc;

use super::deadlines::{Deadlines, Due};
use crate::device::Copier;
use rnic_abi::types::{QpId, Time};

#[derive(Default)]
pub(super) struct PendingCopies {
    last: u64,
    open: HashMap<u64, PendingCopy>,
}

/// A copy in progress.
pub(super) struct PendingCopy {
    pub qp: QpId,
    pub copier: Arc<Copier>,
    due: Time,
}

impl PendingCopies {
    /// Number of no copy.
    pub(super) const NONE: u64 = 0;

    /// Registers a copy that begins and returns its number.
    pub(super) fn open(
        &mut self,
        qp: QpId,
        copier: &Arc<Copier>,
        due: Time,
        deadlines: &mut Deadlines,
    ) -> u64 {
        self.last += 1;
        self.open.insert(self.last, PendingCopy { qp, copier: copier.clone(), due });
        deadlines.set(due, Due::Copy(self.last));
        self.last
    }

    /// Removes a copy that is done or has timed out.
    pub(super) fn close(&mut self, id: u64, deadlines: &mut Deadlines) -> Option<PendingCopy> {
        let job = self.open.remove(&id)?;
        deadlines.clear(job.due, Due::Copy(id));
        Some(job)
    }
}
