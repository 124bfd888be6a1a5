//! Lists of protection domains and of limits.

use rnic_core::abi::control::{LimitRow, PdRow};
use rnic_core::types::SessionId;

use super::Manager;
use super::kind::{Kind, UNLIMITED};
use super::session::Session;

impl Manager {
    /// Open domains: every one, or those of one session with what it has in them.
    pub(super) fn pd_rows(&self, own: Option<SessionId>) -> Vec<PdRow> {
        let mut rows = Vec::new();
        if own.is_none() {
            rows.extend(self.named_pds.rows());
        }
        for session in self.sessions.values().filter(|s| own.is_none_or(|own| own == s.id)) {
            for (pd, object) in &session.pds {
                let name = self.named_pds.name(*pd).map(str::to_owned);
                // Shared ones stand above with everybody's share.
                if name.is_some() && own.is_none() {
                    continue;
                }
                rows.push(PdRow {
                    pd: *pd,
                    session: name.is_none().then_some(session.id),
                    name,
                    sessions: 1,
                    mrs: object.mrs,
                    qps: object.qps,
                });
            }
        }
        rows
    }

    /// Limits and how much of each is in use: of the device, of domains, of users and of sessions;
    /// or of one session and its user.
    pub(super) fn limit_rows(&self, own: Option<SessionId>) -> Vec<LimitRow> {
        let mut rows: Vec<LimitRow> = Vec::new();
        if own.is_none() {
            rows.extend(self.ledger.device_rows());
            rows.push(LimitRow {
                key: self.capacity.half_open_key(self.config.limits.half_open),
                scope: "device".to_owned(),
                limit: self.capacity.half_open.into(),
                used: self.cm.startups() as u64,
            });
            rows.extend(self.named_pds.limit_rows(&self.policy));
        }
        let visible = || self.sessions.values().filter(|s| own.is_none_or(|own| own == s.id));
        let mut users: Vec<u32> = Vec::new();
        for Session { counts, .. } in visible() {
            if !users.contains(&counts.rights.uid) {
                users.push(counts.rights.uid);
                let rights = &counts.rights;
                rows.extend(self.ledger.user_rows(rights));
                let quota = self.capacity.quota(rights);
                rows.push(LimitRow {
                    key: quota.half_open_key,
                    scope: format!("user {}", rights.uid),
                    limit: quota.half_open.into(),
                    used: self.cm.startups_of(rights.uid) as u64,
                });
            }
        }
        for session in visible() {
            let rights = &session.counts.rights;
            let limited = |kind: &Kind| rights.session_limit(*kind) != UNLIMITED;
            rows.extend(Kind::ALL.into_iter().filter(limited).map(|kind| LimitRow {
                key: rights.session_key(kind),
                scope: format!("session {}", session.id),
                limit: rights.session_limit(kind),
                used: session.counts.of(kind),
            }));
        }
        rows
    }
}
