//! `[[user]]` and `[[group]]`: other limits and trust for some.

use std::collections::BTreeSet;

use super::checker::Checker;
use super::error::ConfigError;
use super::file_rules::OverrideTable;
use super::limits::{
    MAX_CLOSING, MAX_MOVERS, MAX_RATE, MAX_READS_TOTAL, MAX_SESSIONS, MAX_WHY, TotalsPatch,
};
use super::people::Id;

/// What one rule changes. Keys that it does not set stay as they are without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The user, or the group of which it speaks.
    pub who: Id,
    /// Whether the daemon may copy in the user's own address space by itself.
    pub trusted: Option<bool>,
    /// Whether the user may pass TCP sockets of its own.
    pub sockets: Option<bool>,
    /// Whether the user's programs in other network namespaces may use the loopback and link-local
    /// addresses of the daemon's.
    pub host_loopback: Option<bool>,
    /// Instead of `[limits.session]`.
    pub session: SessionPatch,
    /// Instead of `[limits.user]`.
    pub user: UserPatch,
}

/// Keys of `[limits.session]` that a rule sets.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SessionPatch {
    /// Totals.
    pub totals: TotalsPatch,
    /// *Why* records of one session.
    pub why: Option<u32>,
}

/// Keys of `[limits.user]` that a rule sets.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct UserPatch {
    /// Totals.
    pub totals: TotalsPatch,
    /// Sessions.
    pub sessions: Option<u32>,
    /// Connections in start-up of the user's listeners and programs.
    pub half_open: Option<u32>,
    /// Connections taken for the user's listeners per second.
    pub accepts_per_second: Option<u32>,
    /// Connections that the user begins per second.
    pub connections_per_second: Option<u32>,
    /// Inbound reads of all QPs together.
    pub ird: Option<u32>,
    /// Outbound reads of all QPs together.
    pub ord: Option<u32>,
    /// Processes that copy for the user's attached clients.
    pub movers: Option<u32>,
    /// Times per second that the user's clients ask for one.
    pub attachments_per_second: Option<u32>,
    /// Descriptors of the user's clients that wait to be closed.
    pub closing: Option<u32>,
}

impl Checker<'_> {
    /// Validates all `[[user]]` or all `[[group]]` tables.
    pub(super) fn overrides(
        &self,
        tables: Vec<OverrideTable>,
    ) -> Result<Vec<Override>, ConfigError> {
        let mut seen = BTreeSet::new();
        let one = |mut table: OverrideTable| {
            let (at, who) = (table.who.span().start, table.who.into_inner());
            if !seen.insert(who.clone()) {
                return Err(self.wrong(at, format!("there are two rules for {who}")));
            }
            let session = SessionPatch {
                totals: self.totals(table.session.totals(), true)?,
                why: self.optional_number(table.session.why, 0..=MAX_WHY)?,
            };
            let u = &mut table.user;
            let user = UserPatch {
                totals: self.totals(u.totals(), false)?,
                sessions: self.optional_number(u.sessions.take(), 0..=MAX_SESSIONS)?,
                half_open: self.optional_number(u.half_open.take(), 1..=1 << 20)?,
                accepts_per_second: self
                    .optional_number(u.accepts_per_second.take(), 1..=MAX_RATE)?,
                connections_per_second: self
                    .optional_number(u.connections_per_second.take(), 1..=MAX_RATE)?,
                ird: self.optional_number(u.ird.take(), 0..=MAX_READS_TOTAL)?,
                ord: self.optional_number(u.ord.take(), 0..=MAX_READS_TOTAL)?,
                movers: self.optional_number(u.movers.take(), 0..=MAX_MOVERS)?,
                attachments_per_second: self
                    .optional_number(u.attachments_per_second.take(), 1..=MAX_RATE)?,
                closing: self.optional_number(u.closing.take(), 1..=MAX_CLOSING)?,
            };
            let OverrideTable { trusted, sockets, host_loopback, .. } = table;
            Ok(Override { who, trusted, sockets, host_loopback, session, user })
        };
        tables.into_iter().map(one).collect()
    }
}
