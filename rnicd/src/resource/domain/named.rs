//! Named protection domains: the only objects that several sessions share.
//!
//! A domain exists while any session uses it. Each session owns its regions and QPs in it. This
//! module counts all of them, because the administrator limits the totals.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_abi::abi::control::{LimitRow, PdRow, Refusal};
use rnic_abi::types::{PdId, SessionId};

use crate::config::NamedPd;
use crate::resource::numbers::{Handle, Handles};
use crate::resource::policy::Policy;
use crate::resource::uses::{Use, Users};

/// All open named domains.
#[derive(Clone, Debug, Default)]
pub struct NamedPds(Arc<Mutex<BTreeMap<PdId, Domain>>>);

#[derive(Debug)]
struct Domain {
    name: String,
    sessions: BTreeSet<SessionId>,
    /// Regions of all sessions.
    mrs: Users,
    /// QPs of all sessions.
    qps: Users,
    /// Owned by no session, because the domain may outlive the first one.
    _handle: Handle,
}

/// A kind of object that a domain counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    Mr,
    Qp,
}

/// An object of a domain, counted until dropped.
pub type Membership = Use<std::sync::atomic::AtomicU32>;

/// A session's membership in an open domain. The domain is closed when the last one is dropped.
#[derive(Debug)]
pub struct Opened {
    pd: PdId,
    session: SessionId,
    domains: NamedPds,
}

impl NamedPds {
    /// Returns the handle of an open domain.
    pub fn find(&self, name: &str) -> Option<PdId> {
        find(&self.0.lock(), name)
    }

    /// Adds a session to a domain, which is opened if necessary.
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

    /// Counts one more object in a domain. Returns `None` for a private domain, which has no
    /// limits. The error reports the domain's limit.
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

    /// Returns the rows of open domains for administrators.
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

    /// Returns the number of distinct domains. `opened` is the sum over all sessions, in which a
    /// named domain is counted once per session.
    pub fn total(&self, opened: usize) -> usize {
        let again: usize = self.0.lock().values().map(|domain| domain.sessions.len() - 1).sum();
        opened.saturating_sub(again)
    }

    /// Returns the name of a named domain.
    pub fn name(&self, pd: PdId) -> Option<String> {
        self.0.lock().get(&pd).map(|domain| domain.name.clone())
    }

    /// Returns the limits and the usage of open domains.
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
