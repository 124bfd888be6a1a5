//! Notable happenings, for whoever watches the daemon: a fixed ring that no user can fill alone.

use std::time::{Duration, Instant};

use rnic_core::abi::control::{EventRecord, Rows};
use rnic_core::device::records::{FairRing, Records};
use rnic_core::device::why::Whose;
use rnic_core::types::{SessionId, Time};

use super::Manager;
use super::page::page_that_fits;
use super::why::{Reader, Wall, before};
use crate::clock;
use crate::log::Damper;

/// Bytes of a text; a longer one is cut.
const MAX_TEXT: usize = 500;

/// What happened lately.
pub struct Notes {
    sequence: u64,
    records: Records<Option<u32>, Note>,
    ring: FairRing<Option<u32>, u64>,
}

struct Note {
    time: Time,
    owner: Option<u32>,
    record: EventRecord,
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

impl Manager {
    /// Notes a happening of this kind, concerning a session or the whole daemon. What one session
    /// causes in great number is counted and mostly not kept.
    pub fn note(&mut self, kind: &'static str, session: Option<SessionId>, mut text: String) {
        self.notes.sequence += 1;
        let mut owner = None;
        if let Some(session) = session.and_then(|id| self.sessions.get_mut(&id)) {
            owner = session.client.account();
            match session.noted.count(Instant::now()) {
                None => return,
                Some(0) => {}
                Some(more) => text += &format!(" ({more} more of this session were not kept)"),
            }
        }
        if text.len() > MAX_TEXT {
            let end = (0..=MAX_TEXT).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.truncate(end);
        }
        let sequence = self.notes.sequence;
        let record = EventRecord { sequence, time_ms: 0, session, kind: kind.to_owned(), text };
        tracing::debug!(kind, session = session.map(|s| s.0), text = record.text, "noted");
        let note = Note { time: clock::now(), owner, record };
        self.notes.records.insert(sequence, owner, note);
        if let Some(displaced) = self.notes.ring.push(owner, sequence) {
            self.notes.records.remove(displaced);
        }
    }

    pub(super) fn list_events(&self, reader: Reader, from: u64) -> (Rows, u32, u64) {
        let owner = match reader.whose() {
            Whose::All => None,
            Whose::Of(owner) => Some(owner),
        };
        let newest = self.notes.records.newest(owner, before(from));
        let wall = Wall::now();
        let keyed = newest.map(|note| (note.record.sequence + 1, note));
        let (rows, next) = page_that_fits(keyed, |note| {
            let readable = reader.may_read(note.owner, note.record.session);
            let time_ms = wall.at(note.time);
            readable.then(|| EventRecord { time_ms, ..note.record.clone() })
        });
        let total = u32::try_from(self.notes.records.len(owner)).unwrap_or(u32::MAX);
        (Rows::Events(rows), total, next)
    }
}

/// How much of what a session causes is kept.
pub fn damper() -> Damper {
    Damper::new(32, Duration::from_secs(10))
}
