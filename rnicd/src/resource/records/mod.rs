//! Records of past events: diagnoses, notes, and counters of destroyed objects.
//!
//! Existing objects have their own counters and records. [`Reader`] decides which records a session
//! may read.

mod notes;
mod reader;
mod requests;
mod totals;

use std::sync::Arc;

use rnic_abi::types::{QpType, SessionId};
use rnic_core::device::{DiagnosisLog, QpShared};

use notes::Notes;
pub use notes::log_limit;
pub use reader::{ClockReading, Reader};
pub use totals::{Counters, METRICS, Terminates, Totals, USERS};

/// The manager's records.
pub struct Records {
    /// Requests refused since the daemon started.
    refusals: u64,
    /// Sessions ended for misbehaviour.
    misbehaved: u64,
    /// Terminates of destroyed QPs.
    terminates: Terminates,
    past: Totals,
    /// Shared with the workers.
    diagnoses: Arc<DiagnosisLog>,
    notes: Notes,
}

impl Records {
    /// Creates empty records, with room for `most_notes` notes.
    pub fn new(diagnoses: Arc<DiagnosisLog>, most_notes: usize) -> Self {
        Records {
            refusals: 0,
            misbehaved: 0,
            terminates: Terminates::default(),
            past: Totals::default(),
            diagnoses,
            notes: Notes::new(most_notes),
        }
    }

    /// Opens the records of a session of this user, with at most `most` diagnoses.
    pub fn open(&self, session: SessionId, user: Option<u32>, most: usize) {
        self.diagnoses.open(session, user, most);
    }

    /// Ends the records of a session. Its diagnoses are kept with those of other ended sessions.
    pub fn end(&self, session: SessionId) {
        self.diagnoses.end(session);
    }

    /// Adds the counters of a destroyed QP of this user.
    pub fn add_qp(&mut self, uid: u32, kind: QpType, qp: &QpShared) {
        self.terminates.count(qp);
        self.past.add_qp(uid, kind, qp);
    }

    /// Returns the number of refused requests.
    pub fn refusals(&self) -> u64 {
        self.refusals
    }

    /// Returns the number of sessions ended for misbehaviour.
    pub fn misbehaved(&self) -> u64 {
        self.misbehaved
    }

    /// Returns the Terminates of destroyed QPs.
    pub fn terminates(&self) -> &Terminates {
        &self.terminates
    }

    /// Returns the counters of destroyed objects.
    pub fn past(&self) -> &Totals {
        &self.past
    }

    /// Returns the number of notes since the start.
    pub fn noted(&self) -> u64 {
        self.notes.total()
    }

    /// Returns the number of diagnoses since the start.
    pub fn diagnosis_count(&self) -> u64 {
        self.diagnoses.made()
    }
}
