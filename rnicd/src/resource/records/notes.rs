//! Notes of important events, for administrators: a bounded ring that no single user can fill.

use std::time::Duration;

use rnic_abi::abi::control::EventRecord;
use rnic_abi::types::Time;
use rnic_core::device::records::{FairRing, Records};

use crate::log::RateLimitedLog;

/// Maximum length of a text in bytes. Longer texts are truncated.
pub(super) const MAX_TEXT: usize = 500;

/// Notes. If the ring is full, a new note displaces the oldest note of the user with the most
/// notes.
pub struct Notes {
    /// Number of notes since the start, dropped ones included.
    pub sequence: u64,
    pub(super) records: Records<Option<u32>, Note>,
    pub(super) ring: FairRing<Option<u32>, u64>,
}

pub(super) struct Note {
    pub(super) time: Time,
    pub(super) owner: Option<u32>,
    pub(super) record: EventRecord,
}

impl Notes {
    /// Creates an empty ring with room for `most` notes.
    pub fn new(most: usize) -> Self {
        Notes { sequence: 0, records: Records::default(), ring: FairRing::new(most) }
    }
}

/// Rate limit of the notes that one session causes.
pub fn log_limit() -> RateLimitedLog {
    RateLimitedLog::new(32, Duration::from_secs(10))
}
