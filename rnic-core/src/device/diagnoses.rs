//! Diagnoses: stored reasons for refusals, failures and losses.
//!
//! All workers and the resource manager share one log. Successful requests do not use it. A failure
//! adds a record, and the completion or reply contains the number of the record. Memory is bounded:
//! there is a ring for each session, so that a session can evict only its own records, and one ring
//! for all sessions that have ended, which evicts from the owner with the most records. Workers
//! lock the log when a request fails, so no caller may hold the lock for longer than a record or a
//! page takes. The caller checks the permission to read a record, and provides the time.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::records::{FairRing, Records};
use rnic_abi::abi::control::Diagnosis;
use rnic_abi::types::{SessionId, Time};

/// Maximum number of records per session for flushes that the session itself caused.
pub const ROUTINE_RECORDS: usize = 16;
/// Default number of records of ended sessions ([`DiagnosisLog::set_ended_capacity`] changes it).
const ENDED_RECORDS: usize = 1024;
/// Maximum length of a rule in bytes. Longer rules are truncated.
pub const MAX_RULE: usize = 200;
/// Maximum length of a text in bytes. Longer texts are truncated.
pub const MAX_TEXT: usize = 500;

/// A stored record.
#[derive(Debug)]
pub struct StoredDiagnosis {
    /// Time of the record on the caller's clock.
    pub time: Time,
    /// Account of its session, as passed to [`DiagnosisLog::open`]; `None` if the session was not
    /// known.
    pub owner: Option<u32>,
    /// The record. Its `time_ms` is 0, and the reader must set it.
    pub record: Diagnosis,
}

/// The log. See the module's documentation.
#[derive(Debug, Default)]
pub struct DiagnosisLog {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Number of the newest record, 0 before the first.
    last: u64,
    /// All records, by number and by owner.
    records: Records<Owner, Arc<StoredDiagnosis>>,
    sessions: HashMap<SessionId, Rings>,
    ended: FairRing<Owner, u64>,
}

/// An account; `None` if it is unknown.
type Owner = Option<u32>;

/// Numbers of a session's records, oldest first.
#[derive(Debug)]
struct Rings {
    owner: Owner,
    /// Maximum number of records of faults.
    most: usize,
    faults: VecDeque<u64>,
    routine: VecDeque<u64>,
}

/// Selects records by owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerFilter {
    /// Records of all owners.
    All,
    /// Records of sessions that were opened for this account; `None` if it is unknown.
    Of(Option<u32>),
}

impl OwnerFilter {
    fn owner(self) -> Option<Owner> {
        match self {
            OwnerFilter::All => None,
            OwnerFilter::Of(owner) => Some(owner),
        }
    }
}

impl DiagnosisLog {
    /// Sets the number of records of ended sessions to keep, at least 1. Must be called before any
    /// session ends.
    pub fn set_ended_capacity(&self, most: usize) {
        self.inner.lock().ended = FairRing::new(most);
    }

    /// Opens a session that acts for `owner` and keeps at most `most` records of faults. Memory is
    /// used for records only when a request fails.
    pub fn open(&self, session: SessionId, owner: Option<u32>, most: usize) {
        let rings = Rings { owner, most, faults: VecDeque::new(), routine: VecDeque::new() };
        let old = self.inner.lock().sessions.insert(session, rings);
        debug_assert!(old.is_none(), "session {session} was opened twice");
    }

    /// Adds a record. Returns its number, which is never 0 and never reused.
    pub fn record(&self, now: Time, record: Diagnosis) -> u64 {
        self.make(now, record, false)
    }

    /// Like [`record`](Self::record), for frequent failures that the session itself causes. Such
    /// records evict only other routine records.
    pub fn record_routine(&self, now: Time, record: Diagnosis) -> u64 {
        self.make(now, record, true)
    }

    fn make(&self, now: Time, mut record: Diagnosis, routine: bool) -> u64 {
        cut(&mut record.rule, MAX_RULE);
        cut(&mut record.text, MAX_TEXT);
        let session = record.session;
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.last += 1;
        record.id = inner.last;
        let id = record.id;
        let (owner, displaced) = match inner.sessions.get_mut(&session) {
            Some(rings) => (rings.owner, rings.push(id, routine)),
            // The session has ended, but a worker does not know it yet.
            None => (None, inner.ended.push(None, id)),
        };
        inner.records.insert(id, owner, Arc::new(StoredDiagnosis { time: now, owner, record }));
        if let Some(displaced) = displaced {
            inner.records.remove(displaced);
        }
        id
    }

    /// Moves the records of an ended session to the ring of ended sessions.
    pub fn end(&self, session: SessionId) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let Some(Rings { owner, faults, routine, .. }) = inner.sessions.remove(&session) else {
            return;
        };
        for id in routine.into_iter().chain(faults) {
            if let Some(displaced) = inner.ended.push(owner, id) {
                inner.records.remove(displaced);
            }
        }
    }

    /// Returns the record with this number, unless it was evicted.
    pub fn find(&self, id: u64) -> Option<Arc<StoredDiagnosis>> {
        self.inner.lock().records.get(id).cloned()
    }

    /// Returns at most `most` records with numbers below `before`, newest first.
    pub fn newest(
        &self,
        filter: OwnerFilter,
        before: u64,
        most: usize,
    ) -> Vec<Arc<StoredDiagnosis>> {
        self.inner.lock().records.newest(filter.owner(), before).take(most).cloned().collect()
    }

    /// Returns the number of records added so far.
    pub fn made(&self) -> u64 {
        self.inner.lock().last
    }

    /// Returns the number of stored records that the filter selects.
    pub fn kept(&self, filter: OwnerFilter) -> usize {
        self.inner.lock().records.len(filter.owner())
    }
}

impl Rings {
    /// Adds a record. Returns the evicted record, which may be the new one.
    fn push(&mut self, id: u64, routine: bool) -> Option<u64> {
        let (ring, most) = if routine {
            (&mut self.routine, self.most.min(ROUTINE_RECORDS))
        } else {
            (&mut self.faults, self.most)
        };
        ring.push_back(id);
        if ring.len() > most { ring.pop_front() } else { None }
    }
}

impl Default for Inner {
    fn default() -> Self {
        Inner {
            last: 0,
            records: Records::default(),
            sessions: HashMap::new(),
            ended: FairRing::new(ENDED_RECORDS),
        }
    }
}

/// Truncates a text to at most `most` bytes, at a character boundary.
fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        let mut end = most.saturating_sub('…'.len_utf8());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    // A text that was formatted in pieces may have twice the capacity that it needs.
    text.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;
    use rnic_abi::abi::control::DiagnosisKind;

    fn refused(session: u32, text: &str) -> Diagnosis {
        Diagnosis::new(SessionId(session), DiagnosisKind::Refused, "a rule", text)
    }

    const SESSION_RECORDS: usize = 64;

    fn texts(log: &DiagnosisLog, session: u32) -> Vec<String> {
        let all = log.newest(OwnerFilter::All, u64::MAX, usize::MAX);
        let of = all.iter().filter(|kept| kept.record.session == SessionId(session));
        of.map(|kept| kept.record.text.clone()).collect()
    }

    #[test]
    fn records_are_numbered_from_1() {
        let log = DiagnosisLog::default();
        log.open(SessionId(1), Some(1000), SESSION_RECORDS);
        assert_eq!(log.record(Time(5), refused(1, "first")), 1);
        assert_eq!(log.record(Time(6), refused(1, "second")), 2);
        let found = log.find(1).map(|k| (k.time, k.owner, k.record.text.clone()));
        assert_eq!(found, Some((Time(5), Some(1000), "first".to_owned())));
        assert!(log.find(0).is_none() && log.find(3).is_none());
        assert_eq!(texts(&log, 1), ["second", "first"]);
    }

    #[test]
    fn a_session_evicts_only_its_own_records() {
        let log = DiagnosisLog::default();
        log.open(SessionId(1), Some(1), SESSION_RECORDS);
        log.open(SessionId(2), Some(2), SESSION_RECORDS);
        let kept = log.record(Time(0), refused(1, "kept"));
        for n in 0..10_000 {
            assert_eq!(log.record(Time(0), refused(2, "flood")), kept + 1 + n);
        }
        assert!(log.find(kept).is_some());
        assert_eq!(log.kept(OwnerFilter::All), 1 + SESSION_RECORDS);
        assert_eq!(log.made(), 10_001);
    }

    #[test]
    fn routine_records_do_not_evict_faults() {
        let log = DiagnosisLog::default();
        log.open(SessionId(1), Some(1), SESSION_RECORDS);
        let fault = log.record(Time(0), refused(1, "fault"));
        for _ in 0..1000 {
            log.record_routine(Time(0), refused(1, "flushed"));
        }
        assert!(log.find(fault).is_some());
        assert_eq!(log.kept(OwnerFilter::All), 1 + ROUTINE_RECORDS);
    }

    #[test]
    fn records_survive_floods_of_other_owners() {
        let log = DiagnosisLog::default();
        log.open(SessionId(1), Some(1), SESSION_RECORDS);
        let kept = log.record(Time(0), refused(1, "kept"));
        log.end(SessionId(1));
        // Another owner opens session after session and fails in each.
        for session in 2..200 {
            log.open(SessionId(session), Some(2), SESSION_RECORDS);
            for _ in 0..100 {
                log.record(Time(0), refused(session, "flood"));
            }
            log.end(SessionId(session));
        }
        assert_eq!(log.kept(OwnerFilter::All), ENDED_RECORDS);
        assert_eq!(log.find(kept).map(|k| k.owner), Some(Some(1)));
        // The newest records of the flood remain.
        assert!(log.find(log.made()).is_some());
        assert!(log.find(kept + 1).is_none());
    }

    #[test]
    fn records_of_unknown_sessions_are_kept() {
        let log = DiagnosisLog::default();
        for _ in 0..2 * ENDED_RECORDS {
            log.record(Time(0), refused(7, "late"));
        }
        assert_eq!(log.kept(OwnerFilter::All), ENDED_RECORDS);
        assert_eq!(log.find(log.made()).map(|k| k.owner), Some(None));
    }

    /// A reader of an owner's records sees only those, page by page.
    #[test]
    fn pages_contain_only_the_owners_records() {
        let log = DiagnosisLog::default();
        for session in 1..=100 {
            log.open(SessionId(session), Some(session % 2), SESSION_RECORDS);
            log.record(Time(0), refused(session, "r"));
        }
        // Half of the sessions have ended. Their records are in another ring, in the same order.
        (1..=50).for_each(|session| log.end(SessionId(session)));
        log.record(Time(0), refused(1, "late"));
        let page = |filter, before| -> Vec<u64> {
            let page = log.newest(filter, before, 30);
            page.iter().map(|kept| kept.record.id).collect()
        };
        let first = page(OwnerFilter::Of(Some(1)), u64::MAX);
        assert!(first.iter().copied().eq((41..=99).rev().step_by(2)), "{first:?}");
        let second = page(OwnerFilter::Of(Some(1)), 41);
        assert!(second.iter().copied().eq((1..=39).rev().step_by(2)), "{second:?}");
        assert!(page(OwnerFilter::Of(Some(1)), 1).is_empty());
        assert_eq!(page(OwnerFilter::Of(None), u64::MAX), [101]);
        assert!(page(OwnerFilter::All, u64::MAX).into_iter().eq((72..=101).rev()));
        let kept = [OwnerFilter::All, OwnerFilter::Of(Some(0)), OwnerFilter::Of(Some(7))]
            .map(|filter| log.kept(filter));
        assert_eq!(kept, [101, 50, 0]);
    }

    #[test]
    fn a_text_of_maximum_length_is_not_cut() {
        for (len, whole) in [(MAX_TEXT, true), (MAX_TEXT + 1, false)] {
            let mut text = "x".repeat(len);
            cut(&mut text, MAX_TEXT);
            assert_eq!((text.len(), !text.ends_with('…')), (MAX_TEXT, whole));
        }
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let log = DiagnosisLog::default();
        let id = log.record(Time(0), refused(1, &"ä".repeat(400)));
        let text = log.find(id).map(|k| k.record.text.clone()).unwrap_or_default();
        assert!(text.len() <= MAX_TEXT && text.ends_with("ä…"), "{}", text.len());
    }

    #[test]
    fn record_limits_are_configurable() {
        let log = DiagnosisLog::default();
        log.set_ended_capacity(3);
        for (session, most) in [(1, 0), (2, 2)] {
            log.open(SessionId(session), Some(1), most);
            for n in 0..5 {
                let why = refused(session, "t");
                let id = match n % 2 {
                    0 => log.record_routine(Time(0), why),
                    _ => log.record(Time(0), why),
                };
                assert_ne!(id, 0);
            }
        }
        assert_eq!(log.kept(OwnerFilter::All), 4);
        log.end(SessionId(2));
        assert_eq!(log.kept(OwnerFilter::All), 3);
    }
}
