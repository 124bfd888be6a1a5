//! Records of past events: diagnoses, notes, and counters of destroyed objects.
//!
//! Existing objects have their own counters. [`Reader`] decides which records a session may read.

mod notes;
mod reader;
mod requests;
mod totals;

use std::sync::Arc;

use rnic_core::device::DiagnosisLog;

use notes::Notes;
pub use notes::log_limit;
pub use reader::{ClockReading, Reader};
pub use totals::{Counters, METRICS, Totals, USERS};

/// The manager's records.
pub struct Records {
    /// Requests refused since the daemon started.
    pub refusals: u64,
    /// Misbehaving clients dropped, with or without a session.
    pub misbehaved: u64,
    /// Counters of destroyed objects.
    pub past: Totals,
    /// Shared with the workers.
    pub diagnoses: Arc<DiagnosisLog>,
    pub notes: Notes,
}

impl Records {
    /// Creates empty records, with room for `most_notes` notes.
    pub fn new(diagnoses: Arc<DiagnosisLog>, most_notes: usize) -> Self {
        let past = Totals::default();
        Records { refusals: 0, misbehaved: 0, past, diagnoses, notes: Notes::new(most_notes) }
    }
}
