//! Another configuration while the daemon runs: what can change at once does, what cannot stays as
//! it was. Connections are not touched; what exists above a lowered limit stays.
//!
//! [`Reload::prepare`] does all that grows with the file, on a thread that no client waits for.
//! [`Manager::reload`] takes its result over in bounded time, and sessions get their new rights
//! some at a time, each before anything else that it asks for.

use std::sync::Arc;

use rnic_core::types::SessionId;

use super::{Manager, Policy, options};
use crate::config::{Change, Config, Device, Engine, Kind, changes, warnings};

/// A configuration that has been checked, ready to be taken over.
pub struct Reload {
    /// The configuration that will be in force.
    pub config: Arc<Config>,
    policy: Policy,
    /// Keys whose new values will be in force.
    pub changed: Vec<Change>,
    /// Keys whose new values wait for the next start.
    pub kept: Vec<Change>,
    /// Contradictions within it, in sentences.
    pub warnings: Vec<String>,
}

impl Reload {
    /// Compares a configuration with the one in force and looks up the names in its rules.
    pub fn prepare(wanted: Config, running: &Config) -> Self {
        let effective = with_what_stays(wanted.clone(), running);
        Reload {
            changed: changes(running, &effective),
            kept: changes(&effective, &wanted),
            warnings: warnings(&effective),
            policy: Policy::new(&effective),
            config: Arc::new(effective),
        }
    }
}

/// What a reload has replaced. Dropping it takes time that grows with the file it came from.
pub struct Replaced {
    _config: Arc<Config>,
    _policy: Policy,
    _changes: [Vec<Change>; 2],
    _warnings: Vec<String>,
}

impl Manager {
    /// The configuration in force.
    pub fn config(&self) -> &Arc<Config> {
        &self.config
    }

    /// Takes over a configuration. Sessions get their rights by [`Manager::renew_rights`].
    pub fn reload(&mut self, reload: Reload) -> Replaced {
        let Reload { config, policy, changed, kept, warnings } = reload;
        self.capacity = self.capacity.with_limits_of(&config);
        self.ledger.set_limits(&config.limits, &self.capacity);
        self.cm.set_options(options::cm(&config, &self.capacity));
        let workers = self.capacity.workers;
        self.workers.set_options(&options::workers(&config, workers).engine);
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

    /// Gives one of the sessions that have earlier ones the rights of the configuration in force.
    pub fn renew_rights(&mut self) {
        if let Some(id) = self.outdated.pop_first() {
            self.renew_rights_of(id);
        }
    }

    /// Gives a session the rights of the configuration in force, if it has earlier ones.
    pub(super) fn renew_outdated(&mut self, id: SessionId) {
        if self.outdated.remove(&id) {
            self.renew_rights_of(id);
        }
    }

    fn renew_rights_of(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let rights = self.policy.rights(&session.client.identity);
        (session.client.admin, session.client.trusted) = (rights.admin, rights.trusted);
        session.client.sockets = rights.sockets;
        self.cm.set_quota(session.id, self.capacity.quota(&rights));
        session.account.set_rights(&rights);
        self.renew_datagram_rules(id);
    }
}

/// `wanted`, except for what only a start can change.
fn with_what_stays(mut wanted: Config, running: &Config) -> Config {
    // Programs that have asked what the device is are not told again.
    wanted.wired = running.wired.clone();
    wanted.device = Device { addresses: wanted.device.addresses, ..running.device.clone() };
    // Listeners are called by the ports that were asked for.
    wanted.ports.clone_from(&running.ports);
    wanted.control.socket.clone_from(&running.control.socket);
    wanted.control.mode = running.control.mode;
    wanted.control.group.clone_from(&running.control.group);
    wanted.control.user.clone_from(&running.control.user);
    wanted.control.seccomp = running.control.seccomp;
    let Engine { workers, loopback, spins, yield_for, .. } = running.engine;
    wanted.engine = Engine { workers, loopback, spins, yield_for, ..wanted.engine };
    for kind in [Kind::Diagnoses, Kind::EventRecords] {
        wanted.limits.device.put(kind, running.limits.device.of(kind));
    }
    wanted
}
