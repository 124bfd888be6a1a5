//! Rules: `[[user]]`, `[[group]]`, `[[pd]]`, `[[listen]]` and `[[connect]]`, with the sentences for
//! `check-config` and for the log of a reload.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

use serde::Deserialize;
use toml::Spanned;

use super::addresses::{Network, Ports};
use super::error::Wrong;
use super::kind::{Kind, Scope};
use super::limits::{self, Limits, Values, amount};
use super::section::in_range;
use super::subjects::{Id, Subjects};
use super::values::check_name;

/// `[[user]]` or `[[group]]`: different limits and rights. Keys that are not set change nothing.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Override {
    who: Spanned<Id>,
    /// Workers may copy from and to the user's attached memory themselves.
    pub trusted: Option<bool>,
    /// The user may pass its own TCP sockets.
    pub sockets: Option<bool>,
    /// The user's programs in other network namespaces may use the daemon's loopback and link-local
    /// addresses.
    pub host_loopback: Option<bool>,
    /// Values that replace `[limits.session]`.
    #[serde(default = "Values::none", deserialize_with = "limits::of_session")]
    pub session: Values,
    /// Values that replace `[limits.user]`.
    #[serde(default = "Values::none", deserialize_with = "limits::of_user")]
    pub user: Values,
}

impl Override {
    /// Returns the user or group to which the rule applies.
    pub fn who(&self) -> &Id {
        self.who.get_ref()
    }

    /// Returns each right with the predicates that state it.
    pub(super) fn rights(&self) -> [(Option<bool>, &'static str, &'static str); 3] {
        let Override { who: _, trusted, sockets, host_loopback, session: _, user: _ } = self;
        [
            (
                *trusted,
                "is trusted: the daemon itself copies from and to attached memory",
                "is not trusted",
            ),
            (*sockets, "may pass its own TCP sockets", "may not pass TCP sockets"),
            (
                *host_loopback,
                "may use the daemon's loopback and link-local addresses from other network \
                 namespaces",
                "may not use the daemon's loopback and link-local addresses from other network \
                 namespaces",
            ),
        ]
    }

    /// Describes the rule's changes.
    pub(super) fn sentences(&self, kind: &str, limits: &Limits) -> Vec<String> {
        let who = self.who();
        let (one, each) = match kind {
            "user" => (format!("user {who}"), format!("User {who}")),
            _ => (format!("group {who}"), format!("Each member of group {who}")),
        };
        let mut lines = Vec::new();
        let of_session = differences(&limits.session, &self.session);
        let of_user = differences(&limits.user, &self.user);
        if !of_session.is_empty() {
            lines.push(format!("Sessions of {one} may have {}.", of_session.join(", ")));
        }
        if !of_user.is_empty() {
            lines.push(format!("{each} may have {} in all sessions together.", of_user.join(", ")));
        }
        for (right, granted, denied) in self.rights() {
            let Some(right) = right else { continue };
            lines.push(format!("{each} {}.", if right { granted } else { denied }));
        }
        if lines.is_empty() {
            lines.push(format!("{each} has the default limits and rights."));
        }
        lines
    }
}

/// Requires that each user, or each group, has at most one rule.
pub(super) fn check_overrides(rules: &[Override]) -> Result<(), Wrong> {
    let mut seen = BTreeSet::new();
    match rules.iter().find(|rule| !seen.insert(rule.who())) {
        Some(rule) => {
            let why = format!("there are two rules for {}", rule.who());
            Err(Wrong { at: rule.who.span().start, why })
        }
        None => Ok(()),
    }
}

/// Returns the values that a rule changes.
fn differences(without: &Values, rule: &Values) -> Vec<String> {
    let changed = rule.each().map(|(kind, is)| (kind, without.of(kind), is));
    changed
        .filter(|(_, was, is)| was != is)
        .map(|(kind, was, is)| {
            let was = amount(kind, was);
            let is = amount(kind, is);
            format!("{} = {is} (instead of {was})", kind.key())
        })
        .collect()
}

/// `[[pd]]` in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PdTable {
    name: Spanned<String>,
    #[serde(default)]
    users: Vec<Id>,
    #[serde(default)]
    groups: Vec<Id>,
    max_sessions: Option<Spanned<u32>>,
    mrs: Option<Spanned<u32>>,
    qps: Option<Spanned<u32>>,
}

/// `[[pd]]`: a protection domain that sessions may share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPd {
    /// Name by which programs open it.
    pub name: String,
    /// Users that may open it.
    pub who: Subjects,
    /// Maximum sessions that have it open; by default only the limits of sessions apply.
    pub max_sessions: Option<u32>,
    /// Maximum memory regions in it, of all sessions; by default only the sessions' own limits
    /// apply.
    pub mrs: Option<u32>,
    /// Maximum QPs in it, of all sessions; by default only the sessions' own limits apply.
    pub qps: Option<u32>,
}

impl NamedPd {
    pub(super) fn sentence(&self) -> String {
        let NamedPd { name, who, max_sessions, mrs, qps } = self;
        let limits: Vec<String> =
            [("sessions", max_sessions), ("regions", mrs), ("queue pairs", qps)]
                .into_iter()
                .filter_map(|(what, limit)| Some(format!("{} {what}", (*limit)?)))
                .collect();
        let within = if limits.is_empty() {
            "within the limits of their sessions".to_owned()
        } else {
            format!("with at most {}", limits.join(", "))
        };
        format!("{} may share the protection domain {name:?}, {within}.", capital(who))
    }
}

/// Checks all `[[pd]]` tables.
pub(super) fn named_pds(tables: Vec<PdTable>) -> Result<Vec<NamedPd>, Wrong> {
    let mut names = BTreeSet::new();
    let check = |PdTable { name, users, groups, max_sessions, mrs, qps }| {
        let at = name.span().start;
        let name = name.into_inner();
        check_name(&name).map_err(|why| Wrong { at, why })?;
        if !names.insert(name.clone()) {
            return Err(Wrong { at, why: format!("there are two [[pd]] named {name:?}") });
        }
        let who = Subjects { everyone: false, users, groups };
        if who.is_empty() {
            let why = "no user may open it: add users or groups".to_owned();
            return Err(Wrong { at, why });
        }
        let max_sessions = within(max_sessions, 1..=65_535)?;
        let mrs = within(mrs, of_device(Kind::Mrs))?;
        let qps = within(qps, of_device(Kind::Qps))?;
        Ok(NamedPd { name, who, max_sessions, mrs, qps })
    };
    tables.into_iter().map(check).collect()
}

fn within(limit: Option<Spanned<u32>>, range: RangeInclusive<u32>) -> Result<Option<u32>, Wrong> {
    let Some(limit) = limit else { return Ok(None) };
    in_range(limit.get_ref(), &range).map_err(|why| Wrong { at: limit.span().start, why })?;
    Ok(Some(limit.into_inner()))
}

/// Returns the device's range for a kind.
fn of_device(kind: Kind) -> RangeInclusive<u32> {
    let (least, most) = kind.range(Scope::Device);
    // The table limits counts of objects to 32 bits.
    least as u32..=most as u32
}

/// `[[listen]]` in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ListenTable {
    who: Subjects,
    address: Network,
    #[serde(default)]
    ports: Ports,
}

/// `[[connect]]` in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConnectTable {
    who: Subjects,
    network: Network,
    #[serde(default)]
    ports: Ports,
}

/// `[[listen]]` or `[[connect]]`: allows some users to use some addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressRule {
    /// Users and groups that the rule permits.
    pub who: Subjects,
    /// Addresses that they may use.
    pub network: Network,
    /// Ports of these addresses.
    pub ports: Ports,
}

impl AddressRule {
    /// Returns true if the rule covers this address and port. The user is not checked.
    pub fn covers(&self, address: SocketAddr) -> bool {
        self.network.contains(address.ip()) && self.ports.contains(address.port())
    }

    /// Returns true if the rule covers this IP address, with any port.
    pub fn covers_host(&self, address: SocketAddr) -> bool {
        self.network.contains(address.ip())
    }

    pub(super) fn sentence(&self, verb: &str) -> String {
        format!("{} may {verb} {self}.", capital(&self.who))
    }
}

impl fmt::Display for AddressRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AddressRule { who: _, network, ports } = self;
        write!(f, "{network}, {ports}")
    }
}

impl From<ListenTable> for AddressRule {
    fn from(ListenTable { who, address: network, ports }: ListenTable) -> Self {
        AddressRule { who, network, ports }
    }
}

impl From<ConnectTable> for AddressRule {
    fn from(ConnectTable { who, network, ports }: ConnectTable) -> Self {
        AddressRule { who, network, ports }
    }
}

/// Formats subjects for the start of a sentence.
fn capital(who: &Subjects) -> String {
    let text = who.to_string();
    match text.as_str() {
        "every user" => "Every user".to_owned(),
        "no user" => "No user".to_owned(),
        _ => text,
    }
}
