//! Named protection domains: the only objects that several sessions may hold.
//!
//! A domain comes into being when the first session opens it and goes when the last one has let go
//! of it. Each session keeps its own regions and queue pairs in it; here stands how many there are
//! together, because the administrator limits that.

use std::collections::{BTreeMap, BTreeSet};

use rnic_core::abi::control::{LimitRow, PdRow, Refusal};
use rnic_core::types::{PdId, SessionId};

use super::policy::Policy;
use super::session::Pd;
use crate::config::NamedPd;

/// The named domains that somebody has open.
#[derive(Debug, Default)]
pub struct NamedPds {
    open: BTreeMap<PdId, Shared>,
}

#[derive(Debug)]
struct Shared {
    name: String,
    sessions: BTreeSet<SessionId>,
    mrs: u32,
    qps: u32,
}

/// What is counted in a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// A memory region.
    Mr,
    /// A queue pair.
    Qp,
}

impl NamedPds {
    /// The handle of a domain that is open.
    pub fn find(&self, name: &str) -> Option<PdId> {
        self.open.iter().find(|(_, shared)| shared.name == name).map(|(pd, _)| *pd)
    }

    /// Lets a session in, under `fresh` if the domain is not open yet.
    pub fn join(
        &mut self,
        rule: &NamedPd,
        session: SessionId,
        fresh: impl FnOnce() -> PdId,
    ) -> Result<PdId, Refusal> {
        let found = self.find(&rule.name);
        let sessions = found.map_or(0, |pd| self.open[&pd].sessions.len());
        check(rule, "max_sessions", rule.max_sessions, sessions)?;
        let pd = found.unwrap_or_else(fresh);
        let shared = self.open.entry(pd).or_insert_with(|| Shared {
            name: rule.name.clone(),
            sessions: BTreeSet::new(),
            mrs: 0,
            qps: 0,
        });
        shared.sessions.insert(session);
        Ok(pd)
    }

    /// A session lets go, with whatever it still has in it; true if the domain is gone.
    pub fn leave(&mut self, pd: PdId, session: SessionId, own: &Pd) -> bool {
        let Some(shared) = self.open.get_mut(&pd) else { return false };
        shared.mrs = shared.mrs.saturating_sub(own.mrs);
        shared.qps = shared.qps.saturating_sub(own.qps);
        shared.sessions.remove(&session);
        let gone = shared.sessions.is_empty();
        if gone {
            self.open.remove(&pd);
        }
        gone
    }

    /// Counts one more in a domain, or names the domain's limit that forbids it. Private domains
    /// have none.
    pub fn charge(&mut self, policy: &Policy, pd: PdId, what: Member) -> Result<(), Refusal> {
        let Some(shared) = self.open.get_mut(&pd) else { return Ok(()) };
        let rule = policy.pd_limits(&shared.name).ok_or_else(|| Refusal::NotAllowed {
            rule: "pd".to_owned(),
            what: format!("there is no [[pd]] named {:?} any more", shared.name),
        })?;
        let (count, key, limit) = match what {
            Member::Mr => (&mut shared.mrs, "mrs", rule.mrs),
            Member::Qp => (&mut shared.qps, "qps", rule.qps),
        };
        check(rule, key, limit, *count as usize)?;
        *count += 1;
        Ok(())
    }

    /// Undoes [`charge`](Self::charge).
    pub fn credit(&mut self, pd: PdId, what: Member) {
        if let Some(shared) = self.open.get_mut(&pd) {
            let count = match what {
                Member::Mr => &mut shared.mrs,
                Member::Qp => &mut shared.qps,
            };
            *count = count.saturating_sub(1);
        }
    }

    /// Open domains as administrators see them.
    pub fn rows(&self) -> impl Iterator<Item = PdRow> {
        self.open.iter().map(|(pd, shared)| PdRow {
            pd: *pd,
            name: Some(shared.name.clone()),
            session: None,
            sessions: u32::try_from(shared.sessions.len()).unwrap_or(u32::MAX),
            mrs: shared.mrs,
            qps: shared.qps,
        })
    }

    /// How many domains there are, if sessions together have so many open: a named one counts once.
    pub fn total(&self, opened: u32) -> u32 {
        let again: usize = self.open.values().map(|shared| shared.sessions.len() - 1).sum();
        opened.saturating_sub(u32::try_from(again).unwrap_or(u32::MAX))
    }

    /// The name of a domain.
    pub fn name(&self, pd: PdId) -> Option<&str> {
        self.open.get(&pd).map(|shared| shared.name.as_str())
    }

    /// The limits of open domains with what is in use.
    pub fn limit_rows(&self, policy: &Policy) -> Vec<LimitRow> {
        let mut rows = Vec::new();
        for shared in self.open.values() {
            let Some(rule) = policy.pd_limits(&shared.name) else { continue };
            let sessions = shared.sessions.len() as u64;
            for (key, limit, used) in [
                ("max_sessions", rule.max_sessions, sessions),
                ("mrs", rule.mrs, shared.mrs.into()),
                ("qps", rule.qps, shared.qps.into()),
            ] {
                let Some(limit) = limit else { continue };
                rows.push(LimitRow {
                    key: format!("pd.{}.{key}", shared.name),
                    scope: format!("pd {}", shared.name),
                    limit: limit.into(),
                    used,
                });
            }
        }
        rows
    }
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
