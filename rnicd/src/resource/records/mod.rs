//! What has happened: reasons on record, notable happenings, and what objects that are gone had
//! counted.
//!
//! The counters and records of what is there stand in the objects; who may read which record says
//! [`Reader`].

mod notes;
mod past;
mod reader;
mod requests;

use std::sync::Arc;

use rnic_core::device::{DiagnosisLog, QpShared};
use rnic_core::types::{QpType, SessionId};

use notes::Notes;
pub use notes::log_limit;
pub use past::{Done, METRICS, Past, Terminates, USERS};
pub use reader::{Reader, Wall};
pub use requests::Asked;

/// What the manager remembers of what has happened.
pub struct Records {
    /// Requests refused since the daemon started.
    refusals: u64,
    /// Sessions ended for misbehaviour.
    misbehaved: u64,
    /// Of queue pairs that are gone.
    terminates: Terminates,
    past: Past,
    /// Shared with the workers.
    diagnoses: Arc<DiagnosisLog>,
    notes: Notes,
}

impl Records {
    /// Nothing yet, and room for so many notes.
    pub fn new(diagnoses: Arc<DiagnosisLog>, most_notes: usize) -> Self {
        Records {
            refusals: 0,
            misbehaved: 0,
            terminates: Terminates::default(),
            past: Past::default(),
            diagnoses,
            notes: Notes::new(most_notes),
        }
    }

    /// A session of this user begins, which may leave so many diagnoses.
    pub fn open(&self, session: SessionId, user: Option<u32>, most: usize) {
        self.diagnoses.open(session, user, most);
    }

    /// A session is over; what it left is kept with that of others.
    pub fn end(&self, session: SessionId) {
        self.diagnoses.end(session);
    }

    /// A queue pair of this user is gone.
    pub fn add_qp(&mut self, uid: u32, kind: QpType, qp: &QpShared) {
        self.terminates.count(qp);
        self.past.add_qp(uid, kind, qp);
    }

    /// Requests refused so far.
    pub fn refusals(&self) -> u64 {
        self.refusals
    }

    /// Sessions ended for misbehaviour so far.
    pub fn misbehaved(&self) -> u64 {
        self.misbehaved
    }

    /// How queue pairs that are gone ended.
    pub fn terminates(&self) -> &Terminates {
        &self.terminates
    }

    /// What users did with objects that are gone.
    pub fn past(&self) -> &Past {
        &self.past
    }

    /// Notable happenings so far.
    pub fn noted(&self) -> u64 {
        self.notes.total()
    }

    /// Failures put on record so far.
    pub fn whys(&self) -> u64 {
        self.diagnoses.made()
    }
}
