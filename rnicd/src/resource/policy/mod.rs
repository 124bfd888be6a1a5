//! The administrator's rules about clients: limits, administrators, trusted users, named protection
//! domains, and addresses to listen at and connect to.
//!
//! User and group names are resolved to IDs once, from `/etc/passwd` and `/etc/group`. A client is
//! identified only by the IDs that the kernel reports for its socket. This module has no state
//! other than the rules.

mod datagrams;
mod rights;
mod subjects;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rnic_abi::abi::control::Refusal;

use crate::config::{AddressRule, Config, Limits, NamedPd, Override, Subjects};
use crate::privilege::Names;
pub use rights::Rights;
use rights::Standing;
use subjects::{AllNames, Members};
pub use subjects::{Identity, Overflow};

/// Rules, with user and group names resolved to IDs.
#[derive(Debug)]
pub struct Policy {
    limits: Limits,
    overflow: Overflow,
    /// The user the daemon runs as.
    own_user: u32,
    admins: Members,
    users: Vec<Override>,
    /// Index in `users` of each user's rule.
    user_places: HashMap<u32, usize>,
    /// In the order of the file: the first match applies.
    groups: Vec<Override>,
    /// Index in `groups` of each group's rule.
    group_places: HashMap<u32, usize>,
    pds: Vec<(Members, NamedPd)>,
    listen: Vec<(Members, AddressRule)>,
    connect: Vec<(Members, AddressRule)>,
    unknown: Vec<String>,
}

impl Policy {
    /// Returns the rules of a configuration.
    pub fn new(config: &Config) -> Self {
        Policy::for_system(config, Overflow::of_this_system(), crate::privilege::own_user())
    }

    /// Returns the rules of a configuration for a daemon that runs as `own_user`.
    pub(super) fn for_system(config: &Config, overflow: Overflow, own_user: u32) -> Self {
        let names = AllNames::of_this_system();
        let mut unknown = Vec::new();
        let mut members = |subjects: &Subjects, rule: &str| {
            Members::look_up(subjects, &names, rule, &mut unknown)
        };
        let admins = members(&config.control.admins, "control.admins");
        let pds = config
            .pds
            .iter()
            .map(|pd| (members(&pd.who, &format!("pd.{}", pd.name)), pd.clone()))
            .collect();
        let mut addresses = |rules: &[AddressRule], name: &str| {
            rules.iter().map(|rule| (members(&rule.who, name), rule.clone())).collect()
        };
        let listen = addresses(&config.listen, "[[listen]]");
        let connect = addresses(&config.connect, "[[connect]]");
        let mut numbered = |rules: &[Override], kind: &str, names: &Names| {
            let mut known: Vec<Override> = Vec::new();
            let mut places = HashMap::new();
            for rule in rules {
                match subjects::number(rule.who(), names) {
                    None => {
                        unknown.push(format!("[[{kind}]]: {kind} {} does not exist", rule.who()))
                    }
                    Some(id) if places.contains_key(&id) => {
                        unknown.push(format!(
                            "[[{kind}]] {}: {kind} ID {id} already has a rule",
                            rule.who()
                        ));
                    }
                    Some(id) => {
                        places.insert(id, known.len());
                        known.push(rule.clone());
                    }
                }
            }
            (known, places)
        };
        let (users, user_places) = numbered(&config.users, "user", &names.users);
        let (groups, group_places) = numbered(&config.groups, "group", &names.groups);
        Policy {
            limits: config.limits.clone(),
            overflow,
            own_user,
            admins,
            users,
            user_places,
            groups,
            group_places,
            pds,
            listen,
            connect,
            unknown,
        }
    }

    /// Returns true if the daemon runs as the overflow user, which the kernel reports for all
    /// unmapped users of other user namespaces. Then no client counts as the daemon's own user.
    pub fn own_user_is_unknown(&self) -> bool {
        self.own_user == self.overflow.uid
    }

    /// Returns a message for each user or group in the rules that does not exist or has two rules.
    pub fn unknown(&self) -> &[String] {
        &self.unknown
    }

    /// Logs each of [`unknown`](Self::unknown), and a warning if the daemon runs as the overflow
    /// user.
    pub fn report_unknown(&self) {
        for problem in self.unknown.iter().take(MOST_LINES) {
            tracing::warn!("configuration: {problem}");
        }
        if let Some(more) = self.unknown.len().checked_sub(MOST_LINES).filter(|more| *more > 0) {
            tracing::warn!("configuration: {more} more problems with users or groups in rules");
        }
        if self.own_user_is_unknown() {
            tracing::warn!(
                "the daemon runs as the overflow user ({}): programs of this user cannot be \
                 distinguished from those of unmapped users, so both get the same rights",
                self.overflow.uid
            );
        }
    }

    /// Returns the rights of a client. For each key, the rule for the client's user takes
    /// precedence, then the first rule for one of its groups, then the default.
    pub fn rights(&self, who: &Identity) -> Arc<Rights> {
        let known = self.overflow.known(who);
        let (user, group) = self.overrides(known.as_ref());
        let own = known.is_some() && who.uid == self.own_user;
        let admin = who.uid == 0 || own || known.as_ref().is_some_and(|w| self.admins.contain(w));
        let standing = Standing { uid: who.uid, known: known.is_some(), own, admin };
        Arc::new(Rights::new(standing, &self.limits, user, group))
    }

    /// Returns the rule for a client's user, and the first rule for one of its groups.
    fn overrides(&self, known: Option<&Identity>) -> (Option<&Override>, Option<&Override>) {
        let Some(who) = known else { return (None, None) };
        let user = self.user_places.get(&who.uid).map(|at| &self.users[*at]);
        let first = who.gids.iter().filter_map(|gid| self.group_places.get(gid)).min();
        (user, first.map(|at| &self.groups[*at]))
    }

    /// Returns a named domain if this client may open it.
    pub fn named_pd(&self, who: &Identity, name: &str) -> Result<&NamedPd, Refusal> {
        let found = self.pds.iter().find(|(_, pd)| pd.name == name);
        let (members, pd) = found.ok_or_else(|| Refusal::NotAllowed {
            rule: "pd".to_owned(),
            what: format!("there is no [[pd]] named {:?}", shortened(name)),
        })?;
        if self.overflow.known(who).is_some_and(|w| members.contain(&w)) {
            Ok(pd)
        } else {
            Err(Refusal::NotAllowed {
                rule: format!("pd.{name}"),
                what: format!("open protection domain {name:?} as user {}", who.uid),
            })
        }
    }

    /// Returns the limits of a named domain if it is still configured.
    pub fn pd_limits(&self, name: &str) -> Option<&NamedPd> {
        self.pds.iter().map(|(_, pd)| pd).find(|pd| pd.name == name)
    }

    /// Returns an error if no rule allows the client to bind this address. For port 0 only the
    /// address is checked, because the kernel chooses the port later. Check again when the port is
    /// known.
    pub fn may_listen(&self, who: &Identity, address: SocketAddr) -> Result<(), Refusal> {
        let covers = |rule: &AddressRule| match address.port() {
            0 => rule.covers_host(address),
            _ => rule.covers(address),
        };
        self.check("listen", "bind", &self.listen, who, address, covers)
    }

    /// Returns true if a `[[listen]]` rule for this client lists the port explicitly, and not by
    /// `ports = "*"`.
    pub fn names_port(&self, who: &Identity, address: SocketAddr) -> bool {
        let known = self.overflow.known(who);
        self.listen.iter().any(|(members, rule)| {
            known.as_ref().is_some_and(|who| members.contain(who))
                && !rule.ports.are_all()
                && rule.covers(address)
        })
    }

    /// Returns an error if no rule allows the client to connect to this address.
    pub fn may_connect(&self, who: &Identity, address: SocketAddr) -> Result<(), Refusal> {
        self.check("connect", "connect to", &self.connect, who, address, |r| r.covers(address))
    }

    /// Returns an error if a client in another network namespace uses a local address (see
    /// `stays_on_host`) without `host_loopback`. Services there rely on being unreachable from
    /// elsewhere, and some answer any request (a cloud's metadata at 169.254.169.254). Without this
    /// check, a client in a namespace without interfaces could reach them through the daemon. A
    /// wildcard includes the loopback. `verb` is the operation in the error text.
    pub fn may_reach(
        &self,
        who: &Identity,
        verb: &str,
        address: SocketAddr,
    ) -> Result<(), Refusal> {
        if !who.foreign || !stays_on_host(address.ip()) {
            return Ok(());
        }
        let known = self.overflow.known(who);
        let (user, group) = self.overrides(known.as_ref());
        let allowed = user.and_then(|r| r.host_loopback).or(group.and_then(|r| r.host_loopback));
        match allowed {
            Some(true) => Ok(()),
            _ => Err(Refusal::NotAllowed {
                rule: "user.host_loopback".to_owned(),
                what: format!(
                    "{verb} {address} from another network namespace as user {}",
                    who.uid
                ),
            }),
        }
    }

    fn check(
        &self,
        rule: &str,
        verb: &str,
        rules: &[(Members, AddressRule)],
        who: &Identity,
        address: SocketAddr,
        covers: impl Fn(&AddressRule) -> bool,
    ) -> Result<(), Refusal> {
        let known = self.overflow.known(who);
        let allows = |(members, rule): &(Members, AddressRule)| {
            known.as_ref().is_some_and(|w| members.contain(w)) && covers(rule)
        };
        if rules.is_empty() || rules.iter().any(allows) {
            Ok(())
        } else {
            Err(Refusal::NotAllowed {
                rule: rule.to_owned(),
                what: format!("{verb} {address} as user {}", who.uid),
            })
        }
    }
}

/// Returns true if an address refers to this host or one of its links: loopback, link-local, and
/// the unspecified address (for `connect` the loopback, for `bind` all addresses).
fn stays_on_host(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(a) => a.is_loopback() || a.is_link_local() || a.is_unspecified(),
        IpAddr::V6(a) => a.is_loopback() || a.is_unicast_link_local() || a.is_unspecified(),
    }
}

/// Maximum number of log lines about rules without effect.
const MOST_LINES: usize = 50;

/// Truncates a client's text to fit a line.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests;
