//! Named protection domains: the only objects that several sessions may hold.
//!
//! A domain comes into being when the first session opens it and goes when the last one has let go
//! of it. Each session keeps its own regions and queue pairs in it; here stands how many there are
//! together, because the administrator limits that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_core::abi::control::{LimitRow, PdRow, Refusal};
use rnic_core::types::{PdId, SessionId};

use crate::config::NamedPd;
use crate::resource::numbers::{Handle, Handles};
use crate::resource::policy::Policy;
use crate::resource::uses::{Use, Users};

/// The named domains that somebody has open.
#[derive(Clone, Debug, Default)]
pub struct NamedPds(Arc<Mutex<BTreeMap<PdId, Domain>>>);

#[derive(Debug)]
struct Domain {
    name: String,
    sessions: BTreeSet<SessionId>,
    /// Regions in it, of all sessions together.
    mrs: Users,
    /// The same of queue pairs.
    qps: Users,
    /// It belongs to no session: the domain may outlive the one that opened it first.
    _handle: Handle,
}

/// What is counted in a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    Mr,
    Qp,
}

/// One of them, counted as long as this is there.
pub type Membership = Use<std::sync::atomic::AtomicU32>;

/// A session has a domain open as long as this is there. The domain goes with the last.
#[derive(Debug)]
pub struct Opened {
    pd: PdId,
    session: SessionId,
    domains: NamedPds,
}

impl NamedPds {
    /// The handle of a domain that is open.
    pub fn find(&self, name: &str) -> Option<PdId> {
        find(&self.0.lock(), name)
    }

    /// Lets a session in, under a fresh handle if the domain is not open yet.
    pub fn join(
        &self,
        rule: &NamedPd,
        session: SessionId,
        handles: &Handles,
    ) -> Result<(PdId, Opened), Refusal> {
        let open = &mut *self.0.lock();
        let found = find(open, &rule.name);
        let sessions = found.map_or(0, |pd| open[&pd].sessions.len());
        check(rule, "max_sessions", rule.max_sessions, sessions)?;
        let pd = found.unwrap_or_else(|| {
            let handle = handles.allocate(SessionId(0));
            let pd = PdId(handle.number());
            let domain = Domain {
                name: rule.name.clone(),
                sessions: BTreeSet::new(),
                mrs: Users::default(),
                qps: Users::default(),
                _handle: handle,
            };
            open.insert(pd, domain);
            pd
        });
        if let Some(domain) = open.get_mut(&pd) {
            domain.sessions.insert(session);
        }
        Ok((pd, Opened { pd, session, domains: self.clone() }))
    }

    /// Counts one more in a domain, or names the domain's limit that forbids it. Private domains
    /// have none.
    pub fn enter(
        &self,
        policy: &Policy,
        pd: PdId,
        what: Member,
    ) -> Result<Option<Membership>, Refusal> {
        let open = self.0.lock();
        let Some(domain) = open.get(&pd) else { return Ok(None) };
        let rule = policy.pd_limits(&domain.name).ok_or_else(|| Refusal::NotAllowed {
            rule: "pd".to_owned(),
            what: format!("there is no [[pd]] named {:?} any more", domain.name),
        })?;
        let (members, key, limit) = match what {
            Member::Mr => (&domain.mrs, "mrs", rule.mrs),
            Member::Qp => (&domain.qps, "qps", rule.qps),
        };
        check(rule, key, limit, members.count() as usize)?;
        Ok(Some(members.add()))
    }

    /// Open domains as administrators see them.
    pub fn rows(&self) -> Vec<PdRow> {
        let row = |(pd, domain): (&PdId, &Domain)| PdRow {
            pd: *pd,
            name: Some(domain.name.clone()),
            session: None,
            sessions: u32::try_from(domain.sessions.len()).unwrap_or(u32::MAX),
            mrs: domain.mrs.count(),
            qps: domain.qps.count(),
        };
        self.0.lock().iter().map(row).collect()
    }

    /// How many domains there are, if sessions together have so many open: a named one counts once.
    pub fn total(&self, opened: u32) -> u32 {
        let again: usize = self.0.lock().values().map(|domain| domain.sessions.len() - 1).sum();
        opened.saturating_sub(u32::try_from(again).unwrap_or(u32::MAX))
    }

    /// The name of a domain.
    pub fn name(&self, pd: PdId) -> Option<String> {
        self.0.lock().get(&pd).map(|domain| domain.name.clone())
    }

    /// The limits of open domains with what is in use.
    pub fn limit_rows(&self, policy: &Policy) -> Vec<LimitRow> {
        let mut rows = Vec::new();
        for Domain { name, sessions, mrs, qps, .. } in self.0.lock().values() {
            let Some(rule) = policy.pd_limits(name) else { continue };
            for (key, limit, used) in [
                ("max_sessions", rule.max_sessions, sessions.len() as u64),
                ("mrs", rule.mrs, mrs.count().into()),
                ("qps", rule.qps, qps.count().into()),
            ] {
                let Some(limit) = limit else { continue };
                rows.push(LimitRow {
                    key: format!("pd.{name}.{key}"),
                    scope: format!("pd {name}"),
                    limit: limit.into(),
                    used,
                });
            }
        }
        rows
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let open = &mut *self.domains.0.lock();
        let Some(domain) = open.get_mut(&self.pd) else { return };
        domain.sessions.remove(&self.session);
        if domain.sessions.is_empty() {
            open.remove(&self.pd);
        }
    }
}

fn find(open: &BTreeMap<PdId, Domain>, name: &str) -> Option<PdId> {
    open.iter().find(|(_, domain)| domain.name == name).map(|(pd, _)| *pd)
}

fn check(rule: &NamedPd, key: &str, limit: Option<u32>, used: usize) -> Result<(), Refusal> {
    match limit {
        Some(limit) if used >= limit as usize => Err(Refusal::Limit {
            key: format!("pd.{}.{key}", rule.name),
            limit: limit.into(),
            used: used as u64,
            wanted: 1,
        }),
        _ => Ok(()),
    }
}
