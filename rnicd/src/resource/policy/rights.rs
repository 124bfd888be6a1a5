//! What one client may have, and which key of the configuration says so.

use super::super::kind::{Kind, UNLIMITED};
use crate::config::{Limits, Override};

/// Who a client is to the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its user.
    pub uid: u32,
    /// Whether the kernel could name him: if not, others with the same number need not be he.
    pub known: bool,
    /// Whether he is the user the daemon runs as.
    pub own: bool,
    /// Whether it sees everybody's objects and may drain and disconnect.
    pub admin: bool,
}

/// What one client may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rights {
    /// Its user.
    pub uid: u32,
    /// Whether the kernel could name him: if not, others with the same number need not be he.
    pub known: bool,
    /// Whether he is the user the daemon runs as.
    pub own: bool,
    /// Whether it sees everybody's objects and may drain and disconnect.
    pub admin: bool,
    /// Whether the daemon itself may copy in its attached memory.
    pub trusted: bool,
    /// Whether it may pass TCP sockets of its own.
    pub sockets: bool,
    /// *Why* records of each of its sessions.
    pub why_records: u32,
    /// Connections in start-up of the user's listeners and programs.
    pub half_open: u32,
    /// Connections that are taken for the user's listeners per second.
    pub accepts_per_second: u32,
    /// Connections that the user begins per second.
    pub connections_per_second: u32,
    /// Times per second that the user's clients ask for a mover.
    pub attachments_per_second: u32,
    /// Descriptors of the user's clients that wait to be closed.
    pub closing: u32,
    attachments_source: Source,
    closing_source: Source,
    half_open_source: Source,
    rate_source: Source,
    session: [(u64, Source); Kind::COUNT],
    user: [(u64, Source); Kind::COUNT],
    user_rule: String,
    group_rule: String,
}

/// Which part of the configuration set a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Default,
    User,
    Group,
}

impl Rights {
    /// The defaults with what rules set.
    pub fn new(
        standing: Standing,
        limits: &Limits,
        user: Option<&Override>,
        group: Option<&Override>,
    ) -> Self {
        let session = Kind::ALL.map(|kind| {
            let of = |rule: &Override| kind.of_patch(&rule.session.totals);
            let default = kind.of_totals(&limits.session).unwrap_or(UNLIMITED);
            choose(user.and_then(of), group.and_then(of), default)
        });
        let of_user = Kind::ALL.map(|kind| {
            let of = |rule: &Override| kind.of_user_patch(&rule.user);
            choose(user.and_then(of), group.and_then(of), kind.of_user(&limits.user))
        });
        let rate = |rule: &Override| rule.user.connections_per_second;
        let accepts = |rule: &Override| rule.user.accepts_per_second;
        let half_open = |rule: &Override| rule.user.half_open;
        let why = |rule: &Override| rule.session.why;
        let trusted = |rule: &Override| rule.trusted;
        let sockets = |rule: &Override| rule.sockets;
        let (connections_per_second, rate_source) =
            choose(user.and_then(rate), group.and_then(rate), limits.user.connections_per_second);
        let accepts_per_second =
            choose(user.and_then(accepts), group.and_then(accepts), limits.user.accepts_per_second)
                .0;
        let (half_open, half_open_source) =
            choose(user.and_then(half_open), group.and_then(half_open), limits.user.half_open);
        let attachments = |rule: &Override| rule.user.attachments_per_second;
        let (attachments_per_second, attachments_source) = choose(
            user.and_then(attachments),
            group.and_then(attachments),
            limits.user.attachments_per_second,
        );
        let closing = |rule: &Override| rule.user.closing;
        let (closing, closing_source) =
            choose(user.and_then(closing), group.and_then(closing), limits.user.closing);
        let name = |rule: Option<&Override>| rule.map(|r| r.who.to_string()).unwrap_or_default();
        let Standing { uid, known, own, admin } = standing;
        Rights {
            uid,
            known,
            own,
            admin,
            trusted: choose(user.and_then(trusted), group.and_then(trusted), false).0,
            sockets: choose(user.and_then(sockets), group.and_then(sockets), false).0,
            why_records: choose(user.and_then(why), group.and_then(why), limits.why_records).0,
            half_open,
            half_open_source,
            accepts_per_second,
            connections_per_second,
            rate_source,
            attachments_per_second,
            attachments_source,
            closing,
            closing_source,
            session,
            user: of_user,
            user_rule: name(user),
            group_rule: name(group),
        }
    }

    /// The limit of a session.
    pub fn session_limit(&self, kind: Kind) -> u64 {
        self.session[kind as usize].0
    }

    /// The limit of all sessions of the user.
    pub fn user_limit(&self, kind: Kind) -> u64 {
        self.user[kind as usize].0
    }

    /// The key that limits a session.
    pub fn session_key(&self, kind: Kind) -> String {
        self.named(self.session[kind as usize].1, "session", kind.key(), "")
    }

    /// The key that limits the user.
    pub fn user_key(&self, kind: Kind) -> String {
        let whose = format!(" (user {})", self.uid);
        self.named(self.user[kind as usize].1, "user", kind.key(), &whose)
    }

    /// The key that limits the user's half-open connections.
    pub fn half_open_key(&self) -> String {
        let whose = format!(" (user {})", self.uid);
        self.named(self.half_open_source, "user", "half_open", &whose)
    }

    /// The key that limits how often the user connects.
    pub fn rate_key(&self) -> String {
        let whose = format!(" (user {})", self.uid);
        self.named(self.rate_source, "user", "connections_per_second", &whose)
    }

    /// The key that limits how often the user asks for movers.
    pub fn attachments_key(&self) -> String {
        let whose = format!(" (user {})", self.uid);
        self.named(self.attachments_source, "user", "attachments_per_second", &whose)
    }

    /// The key that limits the descriptors of the user's clients that wait to be closed.
    pub fn closing_key(&self) -> String {
        let whose = format!(" (user {})", self.uid);
        self.named(self.closing_source, "user", "closing", &whose)
    }

    fn named(&self, source: Source, section: &str, key: &str, whose: &str) -> String {
        match source {
            Source::Default => format!("limits.{section}.{key}{whose}"),
            // The rule is about this very user.
            Source::User => format!("user.{}.{section}.{key}", self.user_rule),
            Source::Group => format!("group.{}.{section}.{key}{whose}", self.group_rule),
        }
    }
}

fn choose<T>(user: Option<T>, group: Option<T>, default: T) -> (T, Source) {
    match (user, group) {
        (Some(value), _) => (value, Source::User),
        (None, Some(value)) => (value, Source::Group),
        (None, None) => (default, Source::Default),
    }
}
