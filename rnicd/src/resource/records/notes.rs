//! Notable happenings, for whoever watches the daemon: a fixed ring that no user can fill alone.

use std::time::Duration;

use rnic_core::abi::control::EventRecord;
use rnic_core::device::records::{FairRing, Records};
use rnic_core::types::Time;

use crate::log::RateLimitedLog;

/// Bytes of a text; a longer one is cut.
pub(super) const MAX_TEXT: usize = 500;

/// Notable happenings, of which the oldest make room for new ones.
pub struct Notes {
    pub(super) sequence: u64,
    pub(super) records: Records<Option<u32>, Note>,
    pub(super) ring: FairRing<Option<u32>, u64>,
}

pub(super) struct Note {
    pub(super) time: Time,
    pub(super) owner: Option<u32>,
    pub(super) record: EventRecord,
}

impl Notes {
    /// Nothing yet, and room for so many.
    pub fn new(most: usize) -> Self {
        Notes { sequence: 0, records: Records::default(), ring: FairRing::new(most) }
    }

    /// How many there were since the start.
    pub fn total(&self) -> u64 {
        self.sequence
    }
}

/// How much of what a session causes is kept.
pub fn log_limit() -> RateLimitedLog {
    RateLimitedLog::new(32, Duration::from_secs(10))
}
