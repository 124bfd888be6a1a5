//! Requests from administrators that affect other users: draining, ending a connection, and adding
//! and removing devices.

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::*;
use rnic_core::engine::EngineCommand;

use super::qp::{QpPhase, wrong_state};
use super::{Answer, DeviceError, Manager, Outcome, find, refuse};
use crate::cm::ConnectFailure;
use crate::config::GidSource;

impl Manager {
    /// Starts or ends draining. A draining daemon refuses new objects. Existing objects are not
    /// affected.
    pub(super) fn drain(&mut self, id: SessionId, on: bool) -> Answer {
        self.check_admin(id, "drain")?;
        if self.draining != on {
            self.draining = on;
            self.cm.set_draining(on);
            tracing::info!(session = %id, draining = on, "draining changed");
            let text =
                if on { "new objects are refused" } else { "new objects are accepted again" };
            self.note("draining", Some(id), text.to_owned());
        }
        Outcome::done()
    }

    /// Ends a connection of any user. The QP stays, and its owner gets an event.
    pub(super) fn admin_disconnect(&mut self, id: SessionId, qp: QpId) -> Answer {
        self.check_admin(id, "disconnect a queue pair")?;
        let (owner, object) = self.qp_of(qp).ok_or_else(|| refuse::no_such("QP", qp.0))?;
        match object.phase {
            QpPhase::Bound(worker) => {
                self.workers.one(worker, EngineCommand::AdminDisconnect(qp));
            }
            QpPhase::Connecting(_) | QpPhase::Accepting(_) => {
                self.cancel_startup(qp);
                self.unreachable(qp, ConnectFailure::reset("ended by an administrator"));
            }
            QpPhase::Idle(_) | QpPhase::Leaving => {
                return Err(wrong_state(qp, object.phase.name(), "connecting or connected"));
            }
        }
        tracing::info!(session = %id, %owner, %qp, "disconnected by an administrator");
        let text = format!("QP {qp} was disconnected by an administrator");
        self.note("disconnected", Some(owner), text);
        Outcome::done()
    }

    /// Adds a RoCE device, and notifies all sessions.
    pub(super) fn add_device(&mut self, id: SessionId, name: String, interface: String) -> Answer {
        self.check_admin(id, "add a device")?;
        let source = match interface.as_str() {
            "" => GidSource::All,
            text => GidSource::parse(text).map_err(|why| refuse::invalid("interface", why))?,
        };
        let text = match &source {
            GidSource::All => format!("device {name} was added, with all interfaces"),
            source => format!("device {name} was added, on {source}"),
        };
        self.create_device(name, source).map_err(|error| match error {
            // The text omits the name, because the name may be long.
            DeviceError::BadName { why, .. } => refuse::invalid("name", why),
            error => refuse::invalid("device", error.to_string()),
        })?;
        self.devices_changed(id, text);
        Outcome::done()
    }

    /// Removes a RoCE device from the list. Existing QPs on the device continue to work.
    pub(super) fn remove_device(&mut self, id: SessionId, name: &str) -> Answer {
        self.check_admin(id, "remove a device")?;
        if name == self.config.device.name {
            return Err(refuse::invalid("name", "the iWARP device cannot be removed"));
        }
        if !self.delete_device(name) {
            return Err(refuse::invalid("name", "there is no such RoCE device"));
        }
        self.devices_changed(id, format!("device {name} was removed"));
        Outcome::done()
    }

    fn devices_changed(&mut self, id: SessionId, text: String) {
        tracing::info!(session = %id, "{text}");
        self.note("devices_changed", Some(id), text);
        self.announce_devices();
    }

    fn check_admin(&mut self, id: SessionId, verb: &str) -> Result<(), Refusal> {
        let client = &find(&mut self.sessions, id)?.client;
        if client.rights.admin {
            Ok(())
        } else {
            Err(Refusal::NotAllowed {
                rule: "control.admins".to_owned(),
                what: format!("{verb} as user {}", client.identity.uid),
            })
        }
    }
}
