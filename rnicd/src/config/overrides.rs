//! `[[user]]` and `[[group]]`: different limits and rights for users and groups.

use std::collections::BTreeSet;

use super::checker::Checker;
use super::error::ConfigError;
use super::file_rules::OverrideTable;
use super::kind::Scope;
use super::limits::Values;
use super::subjects::Id;

/// Changes of one rule. Keys that it does not set keep their values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The user or group that it applies to.
    pub who: Id,
    /// Workers may copy from and to the user's attached memory themselves.
    pub trusted: Option<bool>,
    /// The user may pass its own TCP sockets.
    pub sockets: Option<bool>,
    /// The user's programs in other network namespaces may use the daemon's loopback and link-local
    /// addresses.
    pub host_loopback: Option<bool>,
    /// Values that replace `[limits.session]`.
    pub session: Values,
    /// Values that replace `[limits.user]`.
    pub user: Values,
}

impl Checker<'_> {
    /// Checks all `[[user]]` or all `[[group]]` tables.
    pub(super) fn overrides(
        &self,
        tables: Vec<OverrideTable>,
    ) -> Result<Vec<Override>, ConfigError> {
        let mut seen = BTreeSet::new();
        let one = |table: OverrideTable| {
            let at = table.who.span().start;
            let who = table.who.into_inner();
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
