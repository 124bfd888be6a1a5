//! Diagnoses of the control plane, and access to diagnoses and notes. Refusals, failed connections
//! and ended sessions are recorded in the same log as the workers' diagnoses. Important events also
//! become notes.

use std::time::Instant;

use rnic_abi::abi::control::*;
use rnic_abi::types::*;
use rnic_core::device::diagnoses::{OwnerFilter, StoredDiagnosis};

use super::notes::{MAX_TEXT, Note};
use super::reader::before;
use super::{ClockReading, Reader};
use crate::clock;
use crate::resource::answer::{Answer, Outcome, Refused};
use crate::resource::listing::page::Page;
use crate::resource::session::Client;
use crate::resource::{Manager, find, refuse};

impl Manager {
    /// Counts and records a refusal. Adds a note if a limit is reached.
    pub(in crate::resource) fn refused(
        &mut self,
        session: SessionId,
        asked: RequestInfo,
        refusal: Refusal,
        now: Time,
    ) -> Refused {
        let why = (DiagnosisKind::Refused, rule_of(&refusal));
        self.refused_by(session, asked, why, refusal, now)
    }

    /// Like [`refused`](Self::refused), with the kind and the rule of the diagnosis.
    pub(in crate::resource) fn refused_by(
        &mut self,
        session: SessionId,
        asked: RequestInfo,
        (kind, rule): (DiagnosisKind, String),
        refusal: Refusal,
        now: Time,
    ) -> Refused {
        self.records.refusals += 1;
        if let Some(session) = self.sessions.get_mut(&session) {
            session.refusals += 1;
            self.records.past.add_refusal(session.client.identity.uid);
        }
        let RequestInfo { name, qp, pd, offset, length, .. } = asked;
        let text = format!("{name}: {refusal}");
        let why = Diagnosis::new(session, kind, rule, text);
        let diagnosis_id =
            self.records.diagnoses.record(now, Diagnosis { qp, pd, offset, length, ..why });
        if let Refusal::Limit { .. } = refusal {
            let text = format!("{name}: {refusal} (why {diagnosis_id})");
            self.note("limit_reached", Some(session), text);
        }
        tracing::debug!(%session, verb = name, why = diagnosis_id, %refusal, "refused");
        Refused { refusal, diagnosis_id }
    }

    /// Records a failed connection. Returns the number of the diagnosis.
    pub(in crate::resource) fn connect_failed(
        &mut self,
        session: SessionId,
        qp: QpId,
        reason: &str,
    ) -> u64 {
        let rule = "RFC 5044 section 7.1: a connection needs TCP and the MPA frames of both sides";
        self.not_connected(session, qp, rule, reason)
    }

    /// Like [`connect_failed`](Self::connect_failed), with another rule.
    pub(in crate::resource) fn not_connected(
        &mut self,
        session: SessionId,
        qp: QpId,
        rule: &str,
        reason: &str,
    ) -> u64 {
        let pd = self.sessions.get(&session).and_then(|s| s.qps.get(&qp)).map(|qp| qp.pd);
        let why = Diagnosis::new(session, DiagnosisKind::Lost, rule, reason);
        let diagnosis_id =
            self.records.diagnoses.record(clock::now(), Diagnosis { qp: Some(qp), pd, ..why });
        let text = format!("QP {qp}: {reason} (why {diagnosis_id})");
        self.note("connect_failed", Some(session), text);
        diagnosis_id
    }

    /// Counts and records a client dropped for misbehaviour. Returns the number of the diagnosis, 0
    /// for a client without a session.
    pub fn misbehaved(&mut self, session: Option<SessionId>, how: &str, now: Time) -> u64 {
        self.records.misbehaved += 1;
        let Some(session) = session else { return 0 };
        let rule = "local contract: control messages and shared memory follow the ABI, or the \
                    session ends";
        let diagnosis_id = self
            .records
            .diagnoses
            .record(now, Diagnosis::new(session, DiagnosisKind::Ended, rule, how));
        let text = format!("session ended: {how} (why {diagnosis_id})");
        self.note("session_ended", Some(session), text);
        diagnosis_id
    }

    /// Adds a note about a session or the whole daemon. Notes above a session's rate limit are only
    /// counted.
    pub fn note(&mut self, kind: &'static str, session: Option<SessionId>, mut text: String) {
        self.records.notes.sequence += 1;
        let mut owner = None;
        if let Some(session) = session.and_then(|id| self.sessions.get_mut(&id)) {
            owner = session.client.account();
            match session.noted.count(Instant::now()) {
                None => return,
                Some(0) => {}
                Some(more) => text += &format!(" ({more} notes of this session were dropped)"),
            }
        }
        if text.len() > MAX_TEXT {
            let end = (0..=MAX_TEXT).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.truncate(end);
        }
        let sequence = self.records.notes.sequence;
        let record = EventRecord { sequence, time_ms: 0, session, kind: kind.to_owned(), text };
        tracing::debug!(kind, session = session.map(|s| s.0), text = record.text, "noted");
        let note = Note { time: clock::now(), owner, record };
        self.records.notes.records.insert(sequence, owner, note);
        if let Some(displaced) = self.records.notes.ring.push(owner, sequence) {
            self.records.notes.records.remove(displaced);
        }
    }

    /// Adds a note about a session at its first request that is not a query.
    pub(in crate::resource) fn note_opening(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id)
            && !std::mem::replace(&mut session.opening_noted, true)
        {
            let Client { pid, identity, command, .. } = &session.client;
            let text = format!("{command} (pid {pid}, uid {})", identity.uid);
            self.note("session_opened", Some(id), text);
        }
    }

    /// Adds a note with the reason why a session ends, if its start was noted.
    pub fn note_end(&mut self, id: SessionId, why: &str) {
        let Some(session) = self.sessions.get(&id).filter(|session| session.opening_noted) else {
            return;
        };
        let Client { pid, identity, command, .. } = &session.client;
        let text = format!("{command} (pid {pid}, uid {}): {why}", identity.uid);
        self.note("session_ended", Some(id), text);
    }

    pub(in crate::resource) fn why(&mut self, id: SessionId, number: u64) -> Answer {
        let reader = Reader::of(id, &find(&mut self.sessions, id)?.client);
        let kept = self
            .records
            .diagnoses
            .find(number)
            .filter(|kept| reader.may_read(kept.owner, Some(kept.record.session)));
        let Some(kept) = kept else {
            let handle = u32::try_from(number).unwrap_or(u32::MAX);
            return Err(refuse::no_such("diagnosis", handle));
        };
        let rows = Rows::Diagnoses(vec![diagnosis_reply(&kept, ClockReading::now())]);
        Outcome::now(ReplyBody::Rows { rows, total: 1, next: 0 })
    }

    pub(in crate::resource) fn list_diagnoses(
        &mut self,
        reader: Reader,
        from: u64,
    ) -> Page<Diagnosis> {
        let whose = reader.whose();
        // One more than a page holds, to find the start of the next page.
        let newest = self.records.diagnoses.newest(whose, before(from), PAGE_ROWS + 1);
        let wall = ClockReading::now();
        let keyed = newest.iter().map(|kept| (kept.record.id + 1, kept));
        Page::that_fits(keyed, self.records.diagnoses.kept(whose), |kept| {
            let readable = reader.may_read(kept.owner, Some(kept.record.session));
            readable.then(|| diagnosis_reply(kept, wall))
        })
    }

    pub(in crate::resource) fn list_events(&self, reader: Reader, from: u64) -> Page<EventRecord> {
        let owner = match reader.whose() {
            OwnerFilter::All => None,
            OwnerFilter::Of(owner) => Some(owner),
        };
        let newest = self.records.notes.records.newest(owner, before(from));
        let wall = ClockReading::now();
        let keyed = newest.map(|note| (note.record.sequence + 1, note));
        Page::that_fits(keyed, self.records.notes.records.len(owner), |note| {
            let readable = reader.may_read(note.owner, note.record.session);
            let time_ms = wall.at(note.time);
            readable.then(|| EventRecord { time_ms, ..note.record.clone() })
        })
    }
}

fn diagnosis_reply(kept: &StoredDiagnosis, wall: ClockReading) -> Diagnosis {
    Diagnosis { time_ms: wall.at(kept.time), ..kept.record.clone() }
}

/// Returns the rule that caused a refusal, for the diagnosis.
fn rule_of(refusal: &Refusal) -> String {
    match refusal {
        Refusal::Limit { key, .. } | Refusal::AboveMaximum { key, .. } => key.clone(),
        Refusal::NotAllowed { rule, .. } => rule.clone(),
        Refusal::Invalid { field, .. } => format!("field {field} of the request"),
        Refusal::NoSuchObject { .. } => "handles must be of the same session".to_owned(),
        Refusal::InUse { .. } => "objects in use cannot be destroyed".to_owned(),
        Refusal::WrongState { kind, needs, .. } => format!("state of the {kind}: {needs}"),
        Refusal::System { what, .. } => format!("operating system: {what}"),
        Refusal::Malformed { .. } => "layout of control messages".to_owned(),
        Refusal::Draining => "rnicctl drain".to_owned(),
        Refusal::AboveProfile { profile, key, .. } => format!("{key} of profile {profile}"),
    }
}
