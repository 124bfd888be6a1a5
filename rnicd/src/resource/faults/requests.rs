//! Requests to set, clear and list rules.

use std::sync::Arc;

use rnic_abi::abi::control::{FaultRow, Refusal};
use rnic_abi::faults::{FaultName, FaultRule, Point, UserSelector};
use rnic_abi::types::*;
use rnic_core::device::ArmedFault;

use super::Rule;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::listing::page::Page;
use crate::resource::{Manager, find, refuse};

impl Manager {
    /// Sets the rules in `text`, all or none. `own` limits them to the session.
    pub(in crate::resource) fn set_faults(
        &mut self,
        id: SessionId,
        text: &str,
        own: bool,
        now: Time,
    ) -> Answer {
        let rules = FaultRule::parse_all(text)
            .map_err(|error| refuse::invalid("fault rule", error.to_string()))?;
        let mut named: Vec<FaultName> = Vec::new();
        let mut new = Vec::new();
        for rule in rules {
            let made = self.rule_of(id, rule, own, &named, now)?;
            named.push(made.name());
            new.push(made);
        }
        self.check_changes(&new)?;
        for rule in new {
            self.faults.last += 1;
            let number = self.faults.last;
            let (point, after) = (rule.armed.rule.point, rule.armed.rule.trigger.after);
            let text = format!("fault {}: {}", rule.name(), rule.armed.rule.text);
            tracing::debug!(session = %id, "{text}");
            self.note("fault_set", Some(id), text);
            self.faults.rules.insert(number, rule);
            match point {
                Point::Once | Point::Setting if !after.is_zero() => {
                    self.faults.due.insert((now.after(after), number));
                }
                Point::Once => self.strike(number, None, now),
                _ => {}
            }
        }
        self.faults.are_stale = true;
        self.refresh_stale_faults();
        Outcome::done()
    }

    /// Checks a rule and charges its owner. `named` are the names of other new rules.
    fn rule_of(
        &self,
        id: SessionId,
        rule: FaultRule,
        own: bool,
        named: &[FaultName],
        now: Time,
    ) -> Result<Rule, Refusal> {
        let session = self.sessions.get(&id).ok_or_else(|| refuse::no_such("session", id.0))?;
        let client = &session.client;
        let owner = client.identity.uid;
        self.check_change(&rule)?;
        let user = match rule.select.user {
            None => Some(owner),
            Some(UserSelector::Uid(uid)) => Some(uid),
            Some(UserSelector::Any) => None,
        };
        let is_own = user == Some(owner) && (own || client.account().is_some());
        if !is_own && !client.rights.admin {
            return Err(Refusal::NotAllowed {
                rule: "control.admins".to_owned(),
                what: format!("set a fault rule for other users as user {owner}"),
            });
        }
        // Names of rules for one session are unique only in that session: all processes of a job
        // may take the same rules from their environment.
        let only = own.then_some(id);
        let beside =
            |rule: &&Rule| rule.owner == owner && rule.session == only && rule.of_profile.is_none();
        let of_owner = self.faults.rules.values().filter(beside);
        let taken: Vec<_> = of_owner.map(Rule::name).chain(named.iter().copied()).collect();
        let name = match rule.name {
            Some(name) if taken.contains(&name) => {
                return Err(refuse::invalid("name", format!("there is already a fault {name}")));
            }
            Some(name) => name,
            None => unused_name(rule.action_name, &taken)?,
        };
        let charge = session.account.charge(Kind::Faults, 1)?;
        // Rules get their numbers in this order.
        let number = self.faults.last + 1 + named.len() as u64;
        let armed = ArmedFault::new(name, number, rule, now);
        Ok(Rule {
            armed: Arc::new(armed),
            owner,
            user,
            session: only,
            lasts: None,
            of_profile: None,
            _charge: Some(charge),
        })
    }

    /// Clears the rule with this name, or all rules. Only administrators can clear the rules of
    /// other users.
    pub(in crate::resource) fn clear_faults(
        &mut self,
        id: SessionId,
        name: Option<&str>,
        now: Time,
    ) -> Answer {
        let client = &find(&mut self.sessions, id)?.client;
        let uid = client.identity.uid;
        let admin = client.rights.admin;
        let known = client.account().is_some();
        let mine = |rule: &Rule| admin || rule.session == Some(id) || known && rule.owner == uid;
        let selected = |rule: &Rule| {
            let is_named = name.is_none_or(|n| rule.name().as_str() == n);
            mine(rule) && is_named && rule.of_profile.is_none()
        };
        let rules = self.faults.rules.iter().filter(|(_, rule)| selected(rule));
        let numbers: Vec<u64> = rules.map(|(number, _)| *number).collect();
        if let (Some(name), []) = (name, &*numbers) {
            return Err(refuse::invalid("name", format!("there is no fault {name:?}")));
        }
        for number in numbers {
            self.clear_fault(number, now);
        }
        self.faults.are_stale = true;
        self.refresh_stale_faults();
        Outcome::done()
    }

    /// Removes a rule and ends its lasting effect.
    fn clear_fault(&mut self, number: u64, now: Time) {
        self.end_effect(number, now);
        self.faults.due.retain(|(_, of)| *of != number);
        if let Some(rule) = self.faults.rules.remove(&number) {
            self.faults.past += rule.armed.counter.injected();
        }
    }

    /// Removes the rules of a session that ends.
    pub(in crate::resource) fn clear_faults_of(&mut self, id: SessionId, now: Time) {
        let of_session = self.faults.rules.iter().filter(|(_, rule)| rule.session == Some(id));
        let numbers: Vec<u64> = of_session.map(|(number, _)| *number).collect();
        for number in numbers {
            self.clear_fault(number, now);
        }
        self.end_delayed(id, now);
    }

    /// Returns the rules that the user of the session `own` has set, or without `own` the rules of
    /// all users.
    fn visible_faults(&self, own: Option<SessionId>) -> impl Iterator<Item = (&u64, &Rule)> {
        let uid = own.and_then(|id| self.sessions.get(&id)).map(|s| s.client.identity.uid);
        self.faults.rules.iter().filter(move |(_, rule)| {
            rule.of_profile.is_none() && uid.is_none_or(|uid| rule.owner == uid)
        })
    }

    /// Returns the number of rules that the user of the session `own` has set or that apply to this
    /// user, or without `own` the number of rules of all users.
    pub(in crate::resource) fn faults_in_force(&self, own: Option<SessionId>) -> u32 {
        let uid = own.and_then(|id| self.sessions.get(&id)).map(|s| s.client.identity.uid);
        let concerns = |rule: &Rule, uid| {
            let selects = rule.session.is_none() && rule.user.is_none_or(|user| user == uid);
            rule.owner == uid || selects
        };
        let rules =
            self.faults.rules.values().filter(|rule| {
                rule.of_profile.is_none() && uid.is_none_or(|uid| concerns(rule, uid))
            });
        u32::try_from(rules.count()).unwrap_or(u32::MAX)
    }

    /// Returns a page of [`visible_faults`](Self::visible_faults).
    pub(in crate::resource) fn fault_rows(
        &self,
        own: Option<SessionId>,
        from: u64,
    ) -> Page<FaultRow> {
        let total = self.visible_faults(own).count();
        let rows = self.visible_faults(own).filter(|(number, _)| **number >= from);
        Page::new(rows.map(|(number, rule)| (*number, rule)), total, row)
    }
}

fn row(rule: &Rule) -> FaultRow {
    let ArmedFault { name, rule: of, counter, .. } = &*rule.armed;
    FaultRow {
        name: name.to_string(),
        owner: rule.owner,
        session: rule.session,
        seen: counter.seen(),
        injected: counter.injected(),
        in_effect: rule.lasts.is_some(),
        rule: of.text.clone(),
    }
}

/// Returns the name of the action, with a number if it is taken.
fn unused_name(action: &str, taken: &[FaultName]) -> Result<FaultName, Refusal> {
    let names = (1..).map(|n| if n == 1 { action.to_owned() } else { format!("{action}-{n}") });
    let unused = names.map(|name| FaultName::parse(&name)).find(|name| match name {
        Ok(name) => !taken.contains(name),
        Err(_) => true,
    });
    let name = unused.unwrap_or_else(|| FaultName::parse(action));
    name.map_err(|why| refuse::invalid("name", why))
}
