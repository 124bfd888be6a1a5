//! `[[user]]` and `[[group]]`: other limits and trust for some.

use std::collections::BTreeSet;

use super::checker::Checker;
use super::error::ConfigError;
use super::file_rules::OverrideTable;
use super::kind::Scope;
use super::limits::Values;
use super::subjects::Id;

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
    pub session: Values,
    /// Instead of `[limits.user]`.
    pub user: Values,
}

impl Checker<'_> {
    /// Validates all `[[user]]` or all `[[group]]` tables.
    pub(super) fn overrides(
        &self,
        tables: Vec<OverrideTable>,
    ) -> Result<Vec<Override>, ConfigError> {
        let mut seen = BTreeSet::new();
        let one = |table: OverrideTable| {
            let (at, who) = (table.who.span().start, table.who.into_inner());
            if !seen.insert(who.clone()) {
                return Err(self.wrong(at, format!("there are two rules for {who}")));
            }
            let session = self.values(Scope::Session, &table.session, true)?;
            let user = self.values(Scope::User, &table.user, true)?;
            let OverrideTable { trusted, sockets, host_loopback, .. } = table;
            Ok(Override { who, trusted, sockets, host_loopback, session, user })
        };
        tables.into_iter().map(one).collect()
    }
}
