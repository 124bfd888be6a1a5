//! Reasons of the control plane, and who may read which: refusals, failed connections and sessions
//! that were ended leave *why* records in the log that the workers write to as well.
//!
//! Administrators read everything. Others read what sessions of their own user left: whoever can
//! run a program as a user can debug that user's processes anyway, and `rnicctl` is always another
//! session than the one it is asked about.

use std::time::{SystemTime, UNIX_EPOCH};

use rnic_core::abi::control::*;
use rnic_core::device::why::{Kept, Whose, Why};
use rnic_core::types::*;

use super::page::page_that_fits;
use super::session::Client;
use super::{Answer, Given, Manager, find};
use crate::clock;

/// A refusal with the number of its record.
#[derive(Debug)]
pub struct Refused {
    /// What was refused, and why.
    pub refusal: Refusal,
    /// The record.
    pub why_id: u64,
}

/// What a request was about, for the record of its refusal.
#[derive(Clone, Copy)]
pub struct Asked {
    verb: &'static str,
    qp: Option<QpId>,
    pd: Option<PdId>,
    offset: Option<u64>,
    length: Option<u64>,
}

impl Asked {
    /// Looks at a request before it is carried out.
    pub fn of(body: &RequestBody) -> Self {
        use RequestBody as R;
        let asked = Asked { verb: body.name(), qp: None, pd: None, offset: None, length: None };
        match body {
            R::ClosePd { pd } | R::AllocWindow { pd, .. } => Asked { pd: Some(*pd), ..asked },
            R::CreateQp(request) => Asked { pd: Some(request.pd), ..asked },
            R::CreateSrq(request) => Asked { pd: Some(request.pd), ..asked },
            R::RegMr { pd, length, iova, .. } => {
                let (offset, length) = (Some(*iova), Some(*length));
                Asked { pd: Some(*pd), offset, length, ..asked }
            }
            R::AddSegment { length, .. } | R::ReserveSegment { length } => {
                Asked { length: Some(*length), ..asked }
            }
            R::QpToError { qp }
            | R::DestroyQp { qp }
            | R::QueryQp { qp }
            | R::Accept { qp, .. }
            | R::Connect { qp, .. }
            | R::Disconnect { qp, .. }
            | R::ConnectOver { qp, .. }
            | R::AdminDisconnect { qp } => Asked { qp: Some(*qp), ..asked },
            _ => asked,
        }
    }
}

impl Manager {
    /// Records a refusal.
    pub(super) fn refused(
        &mut self,
        session: SessionId,
        asked: Asked,
        refusal: Refusal,
        now: Time,
    ) -> Refused {
        self.refusals += 1;
        if let Some(session) = self.sessions.get_mut(&session) {
            session.refusals += 1;
            self.past.add_refusal(session.client.identity.uid);
        }
        let Asked { verb, qp, pd, offset, length } = asked;
        let text = format!("{verb}: {refusal}");
        let why = Why::new(session, WhyKind::Refused, rule_of(&refusal), text);
        let why_id = self.why.record(now, Why { qp, pd, offset, length, ..why });
        if let Refusal::Limit { .. } = refusal {
            let text = format!("{verb}: {refusal} (why {why_id})");
            self.note("limit_reached", Some(session), text);
        }
        tracing::debug!(%session, verb, why = why_id, %refusal, "refused");
        Refused { refusal, why_id }
    }

    /// Records that a connection did not come about; the record's number.
    pub(super) fn connect_failed(&mut self, session: SessionId, qp: QpId, reason: &str) -> u64 {
        let rule = "RFC 5044 section 7.1: a connection is TCP and the MPA frames of both sides";
        let pd = self.sessions.get(&session).and_then(|s| s.qps.get(&qp)).map(|qp| qp.pd);
        let why = Why::new(session, WhyKind::Lost, rule, reason);
        let why_id = self.why.record(clock::now(), Why { qp: Some(qp), pd, ..why });
        let text = format!("QP {qp}: {reason} (why {why_id})");
        self.note("connect_failed", Some(session), text);
        why_id
    }

    /// Counts and records that a session is ended for misbehaviour; the record's number, 0 for a
    /// client that had no session yet.
    pub fn misbehaved(&mut self, session: Option<SessionId>, how: &str, now: Time) -> u64 {
        self.misbehaved += 1;
        let Some(session) = session else { return 0 };
        let rule = "local contract: control messages and shared memory follow the ABI, or the \
                    session ends";
        let why_id = self.why.record(now, Why::new(session, WhyKind::Ended, rule, how));
        let text = format!("session ended: {how} (why {why_id})");
        self.note("session_ended", Some(session), text);
        why_id
    }

    pub(super) fn why(&mut self, id: SessionId, number: u64) -> Answer {
        let reader = Reader::of(id, &find(&mut self.sessions, id)?.client);
        let kept = self
            .why
            .find(number)
            .filter(|kept| reader.may_read(kept.owner, Some(kept.record.session)));
        let Some(kept) = kept else {
            let handle = u32::try_from(number).unwrap_or(u32::MAX);
            return Err(super::refuse::no_such("why record", handle));
        };
        let rows = Rows::Whys(vec![told(&kept, Wall::now())]);
        Given::now(ReplyBody::Rows { rows, total: 1, next: 0 })
    }

    pub(super) fn whys(&mut self, reader: Reader, from: u64) -> (Rows, u32, u64) {
        let whose = reader.whose();
        // One more than a page shows, to know where the next one begins.
        let newest = self.why.newest(whose, before(from), PAGE_ROWS + 1);
        let wall = Wall::now();
        let keyed = newest.iter().map(|kept| (kept.record.id + 1, kept));
        let (rows, next) = page_that_fits(keyed, |kept| {
            let readable = reader.may_read(kept.owner, Some(kept.record.session));
            readable.then(|| told(kept, wall))
        });
        let total = u32::try_from(self.why.kept(whose)).unwrap_or(u32::MAX);
        (Rows::Whys(rows), total, next)
    }
}

/// Records below this number stand on the page that begins there.
pub fn before(from: u64) -> u64 {
    if from == 0 { u64::MAX } else { from }
}

/// Who reads records.
#[derive(Clone, Copy)]
pub struct Reader {
    session: SessionId,
    /// Its user, if the kernel could name him here.
    account: Option<u32>,
    admin: bool,
}

impl Reader {
    pub fn of(session: SessionId, client: &Client) -> Self {
        Reader { session, account: client.account(), admin: client.admin }
    }

    /// Whether a record of this user and session is theirs to read. Whom the kernel cannot name
    /// sees what his session left: others whom it cannot name need not be the same user.
    pub fn may_read(self, owner: Option<u32>, session: Option<SessionId>) -> bool {
        match (self.admin, self.account) {
            (true, _) => true,
            (false, Some(_)) => owner == self.account,
            (false, None) => owner.is_none() && session == Some(self.session),
        }
    }

    /// Among whose records his are.
    pub fn whose(self) -> Whose {
        if self.admin { Whose::All } else { Whose::Of(self.account) }
    }

    /// The session whose objects alone it sees, unless it sees everybody's.
    pub fn own(self) -> Option<SessionId> {
        (!self.admin).then_some(self.session)
    }
}

/// The two clocks at one instant: records are kept by the one and told by the other.
#[derive(Clone, Copy)]
pub struct Wall {
    now: Time,
    ms: u64,
}

impl Wall {
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Wall { now: clock::now(), ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) }
    }

    /// Milliseconds since 1970.
    pub fn at(self, time: Time) -> u64 {
        let ago = self.now.since(time).as_millis();
        self.ms.saturating_sub(u64::try_from(ago).unwrap_or(u64::MAX))
    }
}

fn told(kept: &Kept, wall: Wall) -> WhyRecord {
    WhyRecord { time_ms: wall.at(kept.time), ..kept.record.clone() }
}

/// What decided.
fn rule_of(refusal: &Refusal) -> String {
    match refusal {
        Refusal::Limit { key, .. } | Refusal::AboveMaximum { key, .. } => key.clone(),
        Refusal::NotAllowed { rule, .. } => rule.clone(),
        Refusal::Invalid { field, .. } => format!("field {field} of the request"),
        Refusal::NoSuchObject { .. } => "handles name objects of one's own session".to_owned(),
        Refusal::InUse { .. } => "objects are kept as long as others use them".to_owned(),
        Refusal::WrongState { kind, needs, .. } => format!("state of the {kind}: {needs}"),
        Refusal::Unsupported { .. } => "abilities of this daemon".to_owned(),
        Refusal::System { what, .. } => format!("operating system: {what}"),
        Refusal::Malformed { .. } => "layout of control messages".to_owned(),
        Refusal::Draining => "rnicctl drain".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(session: u32, account: Option<u32>, admin: bool) -> Reader {
        Reader { session: SessionId(session), account, admin }
    }

    #[test]
    fn records_are_for_their_user_and_for_administrators() {
        let (owner, session) = (Some(1000), Some(SessionId(3)));
        assert!(reader(3, Some(1000), false).may_read(owner, session));
        assert!(reader(4, Some(1000), false).may_read(owner, session), "rnicctl of the same user");
        assert!(!reader(4, Some(1001), false).may_read(owner, session));
        assert!(
            !reader(3, Some(1001), false).may_read(None, session),
            "an earlier session's number"
        );
        assert!(reader(9, Some(0), true).may_read(owner, session));
        assert!(reader(9, Some(0), true).may_read(None, None));
        // Two whom the kernel cannot name need not be one user.
        assert!(reader(3, None, false).may_read(None, session));
        assert!(!reader(4, None, false).may_read(None, session));
        assert!(!reader(3, None, false).may_read(owner, session));
        assert!(!reader(4, Some(1000), false).may_read(None, None));
    }
}
