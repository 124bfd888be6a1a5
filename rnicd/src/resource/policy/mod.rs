//! The administrator's rules, ready to be asked: which limits a client has, whether it is an
//! administrator or trusted, which named domains it may open, where it may listen and connect.
//!
//! StagKind become numbers here, once, from `/etc/passwd` and `/etc/group`; a client is known only
//! by the numbers that the kernel gives for its socket. The manager asks; nothing here counts.

mod datagrams;
mod rights;
mod subjects;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rnic_core::abi::control::Refusal;

use crate::config::{AddressRule, Config, Limits, NamedPd, Override, Subjects};
use crate::privilege::Names;
pub use rights::Rights;
use rights::Standing;
use subjects::{AllNames, Members};
pub use subjects::{Identity, Overflow};

/// Rules with their names looked up.
#[derive(Debug)]
pub struct Policy {
    limits: Limits,
    overflow: Overflow,
    /// The user the daemon runs as.
    own_user: u32,
    admins: Members,
    users: Vec<Override>,
    /// Where in `users` the rule about a user is.
    user_places: HashMap<u32, usize>,
    /// In the order of the file: the first that matches counts.
    groups: Vec<Override>,
    /// Where in `groups` the rule about a group is.
    group_places: HashMap<u32, usize>,
    pds: Vec<(Members, NamedPd)>,
    listen: Vec<(Members, AddressRule)>,
    connect: Vec<(Members, AddressRule)>,
    unknown: Vec<String>,
}

impl Policy {
    /// The rules of a configuration.
    pub fn new(config: &Config) -> Self {
        Policy::for_system(config, Overflow::of_this_system(), crate::privilege::own_user())
    }

    /// The rules of a configuration for a daemon that runs as `own_user`.
    pub(super) fn for_system(config: &Config, overflow: Overflow, own_user: u32) -> Self {
        let names = AllNames::of_this_system();
        let mut unknown = Vec::new();
        let mut members = |subjects: &Subjects, rule: &str| {
            Members::look_up(subjects, &names, rule, &mut unknown)
        };
        let addresses =
            |rules: &[AddressRule],
             rule: &str,
             members: &mut dyn FnMut(&Subjects, &str) -> Members| {
                rules.iter().map(|r| (members(&r.who, rule), r.clone())).collect::<Vec<_>>()
            };
        let admins = members(&config.control.admins, "control.admins");
        let pds = config
            .pds
            .iter()
            .map(|pd| (members(&pd.who, &format!("pd.{}", pd.name)), pd.clone()))
            .collect();
        let listen = addresses(&config.listen, "[[listen]]", &mut members);
        let connect = addresses(&config.connect, "[[connect]]", &mut members);
        let mut numbered = |rules: &[Override], kind: &str, names: &Names| {
            let mut known: Vec<Override> = Vec::new();
            let mut places = HashMap::new();
            for rule in rules {
                match subjects::number(&rule.who, names) {
                    None => {
                        unknown.push(format!("[[{kind}]] names {}, who does not exist", rule.who))
                    }
                    Some(id) if places.contains_key(&id) => {
                        unknown.push(format!(
                            "[[{kind}]] {} is {id}, for whom there is a rule already",
                            rule.who
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

    /// Whether the daemon runs as a user whom the kernel cannot tell from those it cannot name:
    /// then nobody is taken for the daemon's own user.
    pub fn own_user_is_unknown(&self) -> bool {
        self.own_user == self.overflow.uid
    }

    /// Users and groups that rules name and that do not exist here, in sentences.
    pub fn unknown(&self) -> &[String] {
        &self.unknown
    }

    /// Logs each of [`unknown`](Self::unknown), and that the daemon runs as the overflow user if it
    /// does.
    pub fn report_unknown(&self) {
        for problem in self.unknown.iter().take(MOST_LINES) {
            tracing::warn!("configuration: {problem}");
        }
        if let Some(more) = self.unknown.len().checked_sub(MOST_LINES).filter(|more| *more > 0) {
            tracing::warn!("configuration: {more} more rules name users or groups like these");
        }
        if self.own_user_is_unknown() {
            tracing::warn!(
                "the daemon runs as the overflow user ({}): its own user's programs cannot be told \
                 from those of users whom the kernel cannot name, and are trusted no more than they",
                self.overflow.uid
            );
        }
    }

    /// What a client may have: its user's rule counts first, then the first rule that matches one
    /// of its groups, then the defaults; key by key.
    pub fn rights(&self, who: &Identity) -> Arc<Rights> {
        let known = self.overflow.known(who);
        let (user, group) = self.overrides(known.as_ref());
        let own = known.is_some() && who.uid == self.own_user;
        let admin = who.uid == 0 || own || known.as_ref().is_some_and(|w| self.admins.contain(w));
        let standing = Standing { uid: who.uid, known: known.is_some(), own, admin };
        Arc::new(Rights::new(standing, &self.limits, user, group))
    }

    /// The rule about a client's user, and the first about one of its groups.
    fn overrides(&self, known: Option<&Identity>) -> (Option<&Override>, Option<&Override>) {
        let Some(who) = known else { return (None, None) };
        let user = self.user_places.get(&who.uid).map(|at| &self.users[*at]);
        let first = who.gids.iter().filter_map(|gid| self.group_places.get(gid)).min();
        (user, first.map(|at| &self.groups[*at]))
    }

    /// A named domain, if this client may open it.
    pub fn named_pd(&self, who: &Identity, name: &str) -> Result<&NamedPd, Refusal> {
        let found = self.pds.iter().find(|(_, pd)| pd.name == name);
        let (members, pd) = found.ok_or_else(|| Refusal::NotAllowed {
            rule: "pd".to_owned(),
            what: format!("there is no [[pd]] named {:?}", shortened(name)),
        })?;
        match self.overflow.known(who).is_some_and(|w| members.contain(&w)) {
            true => Ok(pd),
            false => Err(Refusal::NotAllowed {
                rule: format!("pd.{name}"),
                what: format!("open protection domain {name:?} as user {}", who.uid),
            }),
        }
    }

    /// The limits of a named domain, if it is still configured.
    pub fn pd_limits(&self, name: &str) -> Option<&NamedPd> {
        self.pds.iter().map(|(_, pd)| pd).find(|pd| pd.name == name)
    }

    /// Refuses to bind an address that no rule allows. The kernel chooses port 0 later, so that is
    /// a question of the address alone; ask again when the port is known.
    pub fn may_listen(&self, who: &Identity, address: SocketAddr) -> Result<(), Refusal> {
        let covers = |rule: &AddressRule| match address.port() {
            0 => rule.covers_host(address),
            _ => rule.covers(address),
        };
        self.check("listen", "bind", &self.listen, who, address, covers)
    }

    /// Returns true if a `[[listen]]` rule for this client names the port; `ports = "*"` names
    /// none.
    pub fn names_port(&self, who: &Identity, address: SocketAddr) -> bool {
        let known = self.overflow.known(who);
        self.listen.iter().any(|(members, rule)| {
            known.as_ref().is_some_and(|who| members.contain(who))
                && !rule.ports.are_all()
                && rule.covers(address)
        })
    }

    /// Refuses to connect to an address that no rule allows.
    pub fn may_connect(&self, who: &Identity, address: SocketAddr) -> Result<(), Refusal> {
        self.check("connect", "connect to", &self.connect, who, address, |r| r.covers(address))
    }

    /// Refuses addresses that do not leave the daemon's host to clients of other network
    /// namespaces: what listens there counts on being reached from nowhere else, and some of it
    /// answers to anybody who gets that far (a cloud's metadata at 169.254.169.254). A client in a
    /// namespace without interfaces would otherwise have the daemon go where it cannot go itself. A
    /// wildcard includes the loopback. `verb` says what the client wants.
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
        match rules.is_empty() || rules.iter().any(allows) {
            true => Ok(()),
            false => Err(Refusal::NotAllowed {
                rule: rule.to_owned(),
                what: format!("{verb} {address} as user {}", who.uid),
            }),
        }
    }
}

/// Whether an address means this host, or a link of it, to whoever uses it: loopback, link-local,
/// and the unspecified address, which a connect takes for the loopback and a bind for all.
fn stays_on_host(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(a) => a.is_loopback() || a.is_link_local() || a.is_unspecified(),
        IpAddr::V6(a) => a.is_loopback() || a.is_unicast_link_local() || a.is_unspecified(),
    }
}

/// Lines of the log about rules without effect.
const MOST_LINES: usize = 50;

/// A client's words, so that they fit a line.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests;
