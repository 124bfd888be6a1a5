//! Rights of one client, with the configuration keys that define them.

use crate::config::{Kind, Limits, Override};

/// Relation of a client to the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// User id of the client.
    pub uid: u32,
    /// True if the user id is unique: not the overflow id, which different users may share.
    pub known: bool,
    /// True if the client is the user the daemon runs as.
    pub own: bool,
    /// True if the client may list all users' objects, drain, and disconnect.
    pub admin: bool,
}

/// Rights of one client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    /// User id of the client.
    pub uid: u32,
    /// True if the user id is unique: not the overflow id, which different users may share.
    pub known: bool,
    /// True if the client is the user the daemon runs as.
    pub own: bool,
    /// True if the client may list all users' objects, drain, and disconnect.
    pub admin: bool,
    /// True if the daemon itself may copy data to and from the client's attached memory.
    pub trusted: bool,
    /// True if the client may pass its own TCP sockets.
    pub sockets: bool,
    session: [(u64, RuleSource); Kind::COUNT],
    user: [(u64, RuleSource); Kind::COUNT],
    user_rule: String,
    group_rule: String,
}

/// Part of the configuration that sets a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RuleSource {
    Default,
    User,
    Group,
}

impl Rights {
    /// Applies the rules to the defaults.
    pub fn new(
        standing: Standing,
        limits: &Limits,
        user: Option<&Override>,
        group: Option<&Override>,
    ) -> Self {
        let session = Kind::ALL.map(|kind| {
            let of = |rule: &Override| rule.session.set(kind);
            choose(user.and_then(of), group.and_then(of), limits.session.of(kind))
        });
        let of_user = Kind::ALL.map(|kind| {
            let of = |rule: &Override| rule.user.set(kind);
            choose(user.and_then(of), group.and_then(of), limits.user.of(kind))
        });
        let trusted = |rule: &Override| rule.trusted;
        let sockets = |rule: &Override| rule.sockets;
        let name = |rule: Option<&Override>| rule.map(|r| r.who().to_string()).unwrap_or_default();
        let Standing { uid, known, own, admin } = standing;
        Rights {
            uid,
            known,
            own,
            admin,
            trusted: choose(user.and_then(trusted), group.and_then(trusted), false).0,
            sockets: choose(user.and_then(sockets), group.and_then(sockets), false).0,
            session,
            user: of_user,
            user_rule: name(user),
            group_rule: name(group),
        }
    }

    /// Returns the limit of a session.
    pub fn session_limit(&self, kind: Kind) -> u64 {
        self.session[kind as usize].0
    }

    /// Returns the limit of all sessions of the user.
    pub fn user_limit(&self, kind: Kind) -> u64 {
        self.user[kind as usize].0
    }

    /// Returns the limit of a session, saturated to `u32`.
    pub fn session_count(&self, kind: Kind) -> u32 {
        u32::try_from(self.session_limit(kind)).unwrap_or(u32::MAX)
    }

    /// Returns the limit of all sessions of the user, saturated to `u32`.
    pub fn user_count(&self, kind: Kind) -> u32 {
        u32::try_from(self.user_limit(kind)).unwrap_or(u32::MAX)
    }

    /// Returns the key that limits a session.
    pub fn session_key(&self, kind: Kind) -> String {
        self.named(self.session[kind as usize].1, "session", kind.key(), "")
    }

    /// Returns the key that limits the user.
    pub fn user_key(&self, kind: Kind) -> String {
        let whose = format!(" (user {})", self.uid);
        self.named(self.user[kind as usize].1, "user", kind.key(), &whose)
    }

    fn named(&self, source: RuleSource, section: &str, key: &str, whose: &str) -> String {
        match source {
            RuleSource::Default => format!("limits.{section}.{key}{whose}"),
            // The rule is about this user, so the suffix would repeat it.
            RuleSource::User => format!("user.{}.{section}.{key}", self.user_rule),
            RuleSource::Group => format!("group.{}.{section}.{key}{whose}", self.group_rule),
        }
    }
}

fn choose<T>(user: Option<T>, group: Option<T>, default: T) -> (T, RuleSource) {
    match (user, group) {
        (Some(value), _) => (value, RuleSource::User),
        (None, Some(value)) => (value, RuleSource::Group),
        (None, None) => (default, RuleSource::Default),
    }
}
