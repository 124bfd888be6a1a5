//! Another configuration while the daemon runs: what can change at once does, what cannot stays as
//! it was. Connections are not touched; what exists above a lowered limit stays.

use std::sync::Arc;

use super::{Manager, Policy, options};
use crate::config::{Change, Config, Device, Engine, Kind, changes};

/// What a reload came to.
#[derive(Debug)]
pub struct Reloaded {
    /// Keys whose new values are in force.
    pub changed: Vec<Change>,
    /// Keys whose new values wait for the next start.
    pub kept: Vec<Change>,
}

impl Manager {
    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes over a configuration.
    pub fn reload(&mut self, wanted: Config) -> Reloaded {
        let effective = with_what_stays(wanted.clone(), &self.config);
        let changed = changes(&self.config, &effective);
        let kept = changes(&effective, &wanted);
        self.capacity = self.capacity.with_limits_of(&effective);
        self.ledger.set_limits(&effective.limits, &self.capacity);
        self.policy = Policy::new(&effective);
        self.policy.report_unknown();
        self.cm.set_options(options::cm(&effective, &self.capacity));
        let workers = self.capacity.workers;
        self.copiers.set_deadline(effective.engine.copier_deadline);
        self.workers.set_options(&options::workers(&effective, workers).engine);
        self.config = Arc::new(effective);
        for session in self.sessions.values_mut() {
            let rights = self.policy.rights(&session.client.identity);
            (session.client.admin, session.client.trusted) = (rights.admin, rights.trusted);
            session.client.sockets = rights.sockets;
            self.cm.set_quota(session.id, self.capacity.quota(&rights));
            session.account.set_rights(&rights);
        }
        self.renew_datagram_rules();
        Reloaded { changed, kept }
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
