//! Requests to open and close protection domains, and lists of them.

use rnic_abi::abi::control::{PdRow, ReplyBody};
use rnic_abi::types::*;

use super::Pd;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::listing::page::{self, Page, key};
use crate::resource::{Manager, find, refuse};

impl Manager {
    pub(in crate::resource) fn open_pd(&mut self, id: SessionId, name: Option<&str>) -> Answer {
        if let Some(name) = name {
            return self.open_named_pd(id, name);
        }
        let session = find(&mut self.sessions, id)?;
        let charge = session.account.charge(Kind::Pds, 1)?;
        let handle = self.handles.pds.allocate(id);
        let pd = PdId(handle.number());
        session.pds.insert(pd, Pd::private(handle, charge));
        Outcome::now(ReplyBody::Pd { pd })
    }

    fn open_named_pd(&mut self, id: SessionId, name: &str) -> Answer {
        let session = find(&mut self.sessions, id)?;
        //= DDP-8.3.2-3, RDMAP-8.1.2-3
        let rule = self.policy.named_pd(&session.client.identity, name)?;
        if let Some(pd) = self.named_pds.find(name)
            && let Some(object) = session.pds.get_mut(&pd)
        {
            object.reopened = object.reopened.saturating_add(1);
            return Outcome::now(ReplyBody::Pd { pd });
        }
        let charge = session.account.charge(Kind::Pds, 1)?;
        let (pd, opened) = self.named_pds.join(rule, id, &self.handles.pds)?;
        session.pds.insert(pd, Pd::named(opened, charge));
        Outcome::now(ReplyBody::Pd { pd })
    }

    pub(in crate::resource) fn close_pd(&mut self, id: SessionId, pd: PdId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let object = session.pd(pd)?;
        if object.reopened > 0 {
            object.reopened -= 1;
            return Outcome::done();
        }
        let Pd { mrs, qps, windows, srqs, .. } = object;
        let users = [(mrs, "MRs"), (qps, "QPs"), (windows, "windows"), (srqs, "SRQs")];
        let users = users.map(|(users, kind)| (users.count(), kind));
        let users = users.iter().filter(|(n, _)| *n > 0).map(|(n, kind)| format!("{n} {kind}"));
        let users: Vec<String> = users.collect();
        if !users.is_empty() {
            return Err(refuse::in_use("PD", pd.0, users.join(", ")));
        }
        session.pds.remove(&pd);
        Outcome::done()
    }

    /// Returns a page of all open domains, or of one session's domains with its own usage.
    pub(in crate::resource) fn pd_rows(&self, own: Option<SessionId>, from: u64) -> Page<PdRow> {
        // No session has number 0, so named domains come first.
        let named = own.is_none().then(|| self.named_pds.rows()).into_iter().flatten();
        let named = named.map(|row| (key(SessionId(0), row.pd.0), row));
        let sessions = || page::sessions(&self.sessions, own, from);
        let private = page::objects(sessions(), from, |s| &s.pds, PdId, |pd| pd.0);
        let private = private.filter_map(|(key, (session, pd, object))| {
            let name = self.named_pds.name(pd);
            // Without `own`, named domains are listed above, with totals.
            (name.is_none() || own.is_some()).then(|| {
                let session = name.is_none().then_some(session.id);
                let mrs = object.mrs.count();
                let qps = object.qps.count();
                (key, PdRow { pd, session, name, sessions: 1, mrs, qps })
            })
        });
        let counted = page::count(page::sessions(&self.sessions, own, 0), |s| &s.pds);
        let total = match own {
            Some(_) => counted,
            None => self.named_pds.total(counted),
        };
        Page::new(named.filter(|(key, _)| *key >= from).chain(private), total, |row| row)
    }
}
