//! Reload of the configuration. New values of keys that can change at run time take effect. Other
//! keys keep their values. Connections are not affected, and objects above a lowered limit stay.
//!
//! [`Reload::prepare`] does all work that grows with the file, on a thread that no client waits
//! for. [`Manager::reload`] applies its result in bounded time. Sessions get their new rights one
//! by one, each before its next request.

use std::sync::Arc;

use rnic_abi::types::SessionId;
use rnic_core::engine::EngineCommand;

use super::{Manager, Policy, options};
use crate::config::{Change, Config, changes, warnings};

/// A checked configuration, ready to be applied.
pub struct Reload {
    /// The configuration that will be in force.
    pub config: Arc<Config>,
    policy: Policy,
    /// Keys with new values that take effect.
    pub changed: Vec<Change>,
    /// Keys with new values that need a restart.
    pub kept: Vec<Change>,
    /// Contradictions in the configuration, as sentences.
    pub warnings: Vec<String>,
}

impl Reload {
    /// Compares a configuration with the running one and looks up the names in its rules.
    pub fn prepare(wanted: Config, running: &Config) -> Self {
        let mut effective = wanted.clone();
        effective.keep_at_start(running);
        Reload {
            changed: changes(running, &effective),
            kept: changes(&effective, &wanted),
            warnings: warnings(&effective),
            policy: Policy::new(&effective),
            config: Arc::new(effective),
        }
    }
}

/// Data replaced by a reload. The time to drop it grows with the file.
pub struct Replaced {
    _config: Arc<Config>,
    _policy: Policy,
    _changes: [Vec<Change>; 2],
    _warnings: Vec<String>,
}

impl Manager {
    /// Returns the configuration in force.
    pub fn config(&self) -> &Arc<Config> {
        &self.config
    }

    /// Applies a configuration. [`Manager::renew_rights`] updates the sessions.
    pub fn reload(&mut self, reload: Reload) -> Replaced {
        let Reload { config, policy, changed, kept, warnings } = reload;
        self.capacity = self.capacity.with_limits_of(&config);
        self.ledger.set_limits(&config, &self.capacity);
        self.cm.set_options(options::cm(&config, &self.capacity));
        let workers = self.capacity.workers;
        let options = options::workers(&config, workers).engine;
        self.workers.all(|| EngineCommand::SetOptions(options.clone()));
        let config = std::mem::replace(&mut self.config, config);
        let policy = std::mem::replace(&mut self.policy, policy);
        self.policy.report_unknown();
        self.outdated = self.sessions.keys().copied().collect();
        Replaced {
            _config: config,
            _policy: policy,
            _changes: [changed, kept],
            _warnings: warnings,
        }
    }

    /// Returns true if sessions have the rights of an earlier configuration.
    pub fn has_outdated_rights(&self) -> bool {
        !self.outdated.is_empty()
    }

    /// Updates the rights of one session to the configuration in force.
    pub fn renew_rights(&mut self) {
        if let Some(id) = self.outdated.pop_first() {
            self.renew_rights_of(id);
        }
    }

    /// Updates the rights of this session, if they are outdated.
    pub(super) fn renew_outdated(&mut self, id: SessionId) {
        if self.outdated.remove(&id) {
            self.renew_rights_of(id);
        }
    }

    fn renew_rights_of(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let rights = self.policy.rights(&session.client.identity);
        self.cm.set_quota(session.id, self.capacity.quota(&rights));
        session.account.set_rights(&rights);
        session.client.rights = rights;
        self.renew_datagram_rules(id);
    }
}
