//! Requests from administrators that affect other users: draining, and ending a connection.

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::*;
use rnic_core::engine::EngineCommand;

use super::qp::{QpPhase, wrong_state};
use super::{Answer, Manager, Outcome, find, refuse};
use crate::cm::ConnectFailure;

impl Manager {
    /// Starts or ends draining, which refuses new objects. Existing objects are not affected.
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

    /// Ends a connection of any user. The QP stays with its owner, which gets an event.
    pub(super) fn admin_disconnect(&mut self, id: SessionId, qp: QpId) -> Answer {
        self.check_admin(id, "disconnect a queue pair")?;
        let (owner, object) = self.qp_of(qp).ok_or_else(|| refuse::no_such("QP", qp.0))?;
        match object.phase {
            QpPhase::Bound(worker) => {
                self.workers.one(worker, EngineCommand::AdminDisconnect(qp));
            }
            QpPhase::Connecting(_) | QpPhase::Accepting(_) => {
                self.cm.cancel(qp);
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
