//! Diagnoses: the reasons of refusals, failures and losses, kept for those who ask.
//!
//! One log is shared by all workers and the resource manager. It is asked for nothing on the way to
//! success: who fails makes a record, and names it by number in a completion or a reply. Memory is
//! fixed: a ring for each session, so that one session can displace only its own records, and a
//! ring of the device for sessions that have ended, in which the owner with the most records gives
//! way. Workers take the log's lock when something fails, so nobody holds it for longer than a
//! record or a page takes. Who may read which record is decided by the caller. Clocks are the
//! caller's too.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use super::records::{FairRing, Records};
use crate::abi::control::Diagnosis;
use crate::types::{SessionId, Time};

/// Most records that each session keeps of flushes its own doing brought about.
pub const ROUTINE_RECORDS: usize = 16;
/// Records kept of sessions that have ended, unless [`DiagnosisLog::keep_of_ended`] says otherwise.
const ENDED_RECORDS: usize = 1024;
/// Bytes of a rule; a longer one is cut.
pub const MAX_RULE: usize = 200;
/// Bytes of a text; a longer one is cut.
pub const MAX_TEXT: usize = 500;

/// A record as it is kept.
#[derive(Debug)]
pub struct KeptDiagnosis {
    /// When it was made, by the caller's clock.
    pub time: Time,
    /// The account its session was opened for, as [`DiagnosisLog::open`] was told; none if it was
    /// told of no such session.
    pub owner: Option<u32>,
    /// The record; its `time_ms` is 0, for the reader to fill in.
    pub record: Diagnosis,
}

/// All records. See the module's documentation.
#[derive(Debug, Default)]
pub struct DiagnosisLog {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Number of the newest record; 0 before the first.
    last: u64,
    /// All records, by number and by owner.
    records: Records<Owner, Arc<KeptDiagnosis>>,
    sessions: HashMap<SessionId, Rings>,
    ended: FairRing<Owner, u64>,
}

/// An account, if it is known.
type Owner = Option<u32>;

/// Numbers of a session's records, oldest first.
#[derive(Debug)]
struct Rings {
    owner: Owner,
    /// How many faults are kept.
    most: usize,
    faults: VecDeque<u64>,
    routine: VecDeque<u64>,
}

/// Whose records are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Everybody's.
    All,
    /// Those of sessions that were opened for this account, or for none that is known.
    Of(Option<u32>),
}

impl Whose {
    fn owner(self) -> Option<Owner> {
        match self {
            Whose::All => None,
            Whose::Of(owner) => Some(owner),
        }
    }
}

impl DiagnosisLog {
    /// Keeps so many records of sessions that have ended, at least 1. To be said before there are
    /// any.
    pub fn keep_of_ended(&self, most: usize) {
        self.inner.lock().ended = FairRing::new(most);
    }

    /// Prepares for a session that acts for `owner`, if that is known, and keeps at most `most`
    /// records of faults. It costs memory only when something fails.
    pub fn open(&self, session: SessionId, owner: Option<u32>, most: usize) {
        let rings = Rings { owner, most, faults: VecDeque::new(), routine: VecDeque::new() };
        let old = self.inner.lock().sessions.insert(session, rings);
        debug_assert!(old.is_none(), "session {session} was opened twice");
    }

    /// Makes a record; its number, which is never 0 and never given again.
    pub fn record(&self, now: Time, record: Diagnosis) -> u64 {
        self.make(now, record, false)
    }

    /// The same of what the session's own doing brings about all the time: such records displace
    /// only their like.
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
            // The session has ended, but not yet for every worker.
            None => (None, inner.ended.push(None, id)),
        };
        inner.records.insert(id, owner, Arc::new(KeptDiagnosis { time: now, owner, record }));
        if let Some(displaced) = displaced {
            inner.records.remove(displaced);
        }
        id
    }

    /// A session has ended: its records go to the ring of the device.
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

    /// The record with this number, unless newer ones have displaced it.
    pub fn find(&self, id: u64) -> Option<Arc<KeptDiagnosis>> {
        self.inner.lock().records.get(id).cloned()
    }

    /// At most `most` records with numbers below `before`, newest first.
    pub fn newest(&self, whose: Whose, before: u64, most: usize) -> Vec<Arc<KeptDiagnosis>> {
        self.inner.lock().records.newest(whose.owner(), before).take(most).cloned().collect()
    }

    /// Records made so far.
    pub fn made(&self) -> u64 {
        self.inner.lock().last
    }

    /// Records that are kept now, of those asked for.
    pub fn kept(&self, whose: Whose) -> usize {
        self.inner.lock().records.len(whose.owner())
    }
}

impl Rings {
    /// Adds a record; returns the one that makes room for it, which may be the new one itself.
    fn push(&mut self, id: u64, routine: bool) -> Option<u64> {
        let (ring, most) = match routine {
            true => (&mut self.routine, self.most.min(ROUTINE_RECORDS)),
            false => (&mut self.faults, self.most),
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

/// Cuts a text to at most `most` bytes, between characters.
fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        let mut end = most.saturating_sub('…'.len_utf8());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    // What was formatted in pieces may hold twice what it needs.
    text.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::control::DiagnosisKind;

    fn refused(session: u32, text: &str) -> Diagnosis {
        Diagnosis::new(SessionId(session), DiagnosisKind::Refused, "a rule", text)
    }

    const SESSION_RECORDS: usize = 64;

    fn texts(log: &DiagnosisLog, session: u32) -> Vec<String> {
        let all = log.newest(Whose::All, u64::MAX, usize::MAX);
        let of = all.iter().filter(|kept| kept.record.session == SessionId(session));
        of.map(|kept| kept.record.text.clone()).collect()
    }

    #[test]
    fn records_are_numbered_from_1_and_found_by_number() {
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
    fn a_session_displaces_its_own_records_only() {
        let log = DiagnosisLog::default();
        log.open(SessionId(1), Some(1), SESSION_RECORDS);
        log.open(SessionId(2), Some(2), SESSION_RECORDS);
        let kept = log.record(Time(0), refused(1, "kept"));
        for n in 0..10_000 {
            assert_eq!(log.record(Time(0), refused(2, "flood")), kept + 1 + n);
        }
        assert!(log.find(kept).is_some());
        assert_eq!(log.kept(Whose::All), 1 + SESSION_RECORDS);
        assert_eq!(log.made(), 10_001);
    }

    #[test]
    fn what_happens_all_the_time_does_not_displace_faults() {
        let log = DiagnosisLog::default();
        log.open(SessionId(1), Some(1), SESSION_RECORDS);
        let fault = log.record(Time(0), refused(1, "fault"));
        for _ in 0..1000 {
            log.record_routine(Time(0), refused(1, "flushed"));
        }
        assert!(log.find(fault).is_some());
        assert_eq!(log.kept(Whose::All), 1 + ROUTINE_RECORDS);
    }

    #[test]
    fn records_outlive_their_session_and_floods_of_others() {
        let log = DiagnosisLog::default();
        log.open(SessionId(1), Some(1), SESSION_RECORDS);
        let kept = log.record(Time(0), refused(1, "kept"));
        log.end(SessionId(1));
        // Another owner opens session after session to fail in.
        for session in 2..200 {
            log.open(SessionId(session), Some(2), SESSION_RECORDS);
            for _ in 0..100 {
                log.record(Time(0), refused(session, "flood"));
            }
            log.end(SessionId(session));
        }
        assert_eq!(log.kept(Whose::All), ENDED_RECORDS);
        assert_eq!(log.find(kept).map(|k| k.owner), Some(Some(1)));
        // The newest of the flood are those that are left.
        assert!(log.find(log.made()).is_some());
        assert!(log.find(kept + 1).is_none());
    }

    #[test]
    fn a_record_of_a_session_that_is_gone_is_kept_for_administrators() {
        let log = DiagnosisLog::default();
        for _ in 0..2 * ENDED_RECORDS {
            log.record(Time(0), refused(7, "late"));
        }
        assert_eq!(log.kept(Whose::All), ENDED_RECORDS);
        assert_eq!(log.find(log.made()).map(|k| k.owner), Some(None));
    }

    /// Who asks for his own looks at none of others', and in pages.
    #[test]
    fn pages_are_of_the_askers_own_records() {
        let log = DiagnosisLog::default();
        for session in 1..=100 {
            log.open(SessionId(session), Some(session % 2), SESSION_RECORDS);
            log.record(Time(0), refused(session, "r"));
        }
        // Half of the sessions are over: their records stand elsewhere, in the same order.
        (1..=50).for_each(|session| log.end(SessionId(session)));
        log.record(Time(0), refused(1, "late"));
        let page = |whose, before| -> Vec<u64> {
            let page = log.newest(whose, before, 30);
            page.iter().map(|kept| kept.record.id).collect()
        };
        let first = page(Whose::Of(Some(1)), u64::MAX);
        assert!(first.iter().copied().eq((41..=99).rev().step_by(2)), "{first:?}");
        let second = page(Whose::Of(Some(1)), 41);
        assert!(second.iter().copied().eq((1..=39).rev().step_by(2)), "{second:?}");
        assert!(page(Whose::Of(Some(1)), 1).is_empty());
        assert_eq!(page(Whose::Of(None), u64::MAX), [101]);
        assert!(page(Whose::All, u64::MAX).into_iter().eq((72..=101).rev()));
        let kept =
            [Whose::All, Whose::Of(Some(0)), Whose::Of(Some(7))].map(|whose| log.kept(whose));
        assert_eq!(kept, [101, 50, 0]);
    }

    #[test]
    fn a_text_that_fits_exactly_is_whole() {
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
    fn as_many_are_kept_as_was_said() {
        let log = DiagnosisLog::default();
        log.keep_of_ended(3);
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
        assert_eq!(log.kept(Whose::All), 4);
        log.end(SessionId(2));
        assert_eq!(log.kept(Whose::All), 3);
    }
}
