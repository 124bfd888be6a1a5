//! Requests of administrators that affect other users: draining, and ending a connection.

use rnic_abi::abi::control::{QpChange, Refusal, RequestBody};
use rnic_abi::types::*;

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

    /// Ends a connection of any user. Its QP stays in Error with its owner, which gets an event.
    pub(super) fn admin_disconnect(&mut self, id: SessionId, qp: QpId) -> Answer {
        self.check_admin(id, "disconnect a queue pair")?;
        let (owner, object) = self.qp_of(qp).ok_or_else(|| refuse::no_such("QP", qp.0))?;
        match object.phase {
            QpPhase::Bound(worker) => self.workers.admin_disconnect(worker, qp),
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

    /// Refuses requests that create objects while draining.
    pub(super) fn check_draining(&self, body: &RequestBody) -> Result<(), Refusal> {
        if self.draining && creates_objects(body) { Err(Refusal::Draining) } else { Ok(()) }
    }

    fn check_admin(&mut self, id: SessionId, verb: &str) -> Result<(), Refusal> {
        let client = &find(&mut self.sessions, id)?.client;
        if client.admin {
            Ok(())
        } else {
            Err(Refusal::NotAllowed {
                rule: "control.admins".to_owned(),
                what: format!("{verb} as user {}", client.identity.uid),
            })
        }
    }
}

fn creates_objects(body: &RequestBody) -> bool {
    use RequestBody as R;
    match body {
        R::OpenPd { .. }
        | R::AddSharedBuffer { .. }
        | R::ReserveSharedBuffer { .. }
        | R::RegMr(_)
        | R::CreateChannel
        | R::CreateCq { .. }
        | R::CreateQp(_)
        | R::Bind { .. }
        | R::BindDatagrams { .. }
        | R::Listen { .. }
        | R::Accept { .. }
        | R::Connect { .. }
        | R::AllocWindow { .. }
        | R::CreateSrq(_)
        | R::AttachMemory
        | R::ServeCopies { .. }
        | R::ConnectOver { .. }
        | R::ServeOver { .. } => true,
        R::QueryDevice
        | R::QueryGids
        | R::ClosePd { .. }
        | R::RemoveSharedBuffer { .. }
        | R::DeregMr { .. }
        | R::ReregMr { .. }
        | R::DestroyChannel { .. }
        | R::DestroyCq { .. }
        | R::QpToError { .. }
        | R::DestroyQp { .. }
        | R::QueryQp { .. }
        | R::CloseListener { .. }
        | R::Reject { .. }
        | R::Disconnect { .. }
        | R::SetContext { .. }
        | R::Status
        | R::List { .. }
        | R::DeallocWindow { .. }
        | R::ArmSrq { .. }
        | R::QuerySrq { .. }
        | R::DestroySrq { .. }
        | R::AdminDisconnect { .. }
        | R::Drain { .. }
        | R::Diagnosis { .. }
        // The buffer exists: it was reserved earlier.
        | R::FillSharedBuffer { .. }
        // Existing objects stay fully usable.
        | R::ResizeCq { .. } => false,
        R::ModifyQp { change, .. } => {
            matches!(change, QpChange::ReadyToReceive(_) | QpChange::ReceiveDatagrams { .. })
        }
    }
}
