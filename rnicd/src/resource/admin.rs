//! What administrators may do to everybody: refuse everything new, end a connection.

use rnic_core::abi::control::{QpChange, Refusal, RequestBody};
use rnic_core::types::*;

use super::qp::{QpPhase, wrong_state};
use super::{Answer, Manager, Outcome, find, refuse};
use crate::cm::NoConnection;

impl Manager {
    /// Refuses everything new from now on, or takes it again. What exists goes on.
    pub(super) fn drain(&mut self, id: SessionId, on: bool) -> Answer {
        self.check_admin(id, "drain")?;
        if self.draining != on {
            self.draining = on;
            self.cm.set_draining(on);
            tracing::info!(session = %id, draining = on, "draining changed");
            let text = if on { "nothing new is taken" } else { "new things are taken again" };
            self.note("draining", Some(id), text.to_owned());
        }
        Outcome::done()
    }

    /// Ends a connection, whoever owns it. Its QP stays with its owner, in Error, and the owner is
    /// told.
    pub(super) fn admin_disconnect(&mut self, id: SessionId, qp: QpId) -> Answer {
        self.check_admin(id, "disconnect a queue pair")?;
        let (owner, object) = self.qp_of(qp).ok_or_else(|| refuse::no_such("QP", qp.0))?;
        match object.phase {
            QpPhase::Bound(worker) => self.workers.admin_disconnect(worker, qp),
            QpPhase::Connecting(_) | QpPhase::Accepting(_) => {
                self.cm.cancel(qp);
                self.unreachable(qp, NoConnection::reset("ended by an administrator"));
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

    /// Refuses what makes something new while draining.
    pub(super) fn check_draining(&self, body: &RequestBody) -> Result<(), Refusal> {
        match self.draining && makes_something(body) {
            true => Err(Refusal::Draining),
            false => Ok(()),
        }
    }

    fn check_admin(&mut self, id: SessionId, verb: &str) -> Result<(), Refusal> {
        let client = &find(&mut self.sessions, id)?.client;
        match client.admin {
            true => Ok(()),
            false => Err(Refusal::NotAllowed {
                rule: "control.admins".to_owned(),
                what: format!("{verb} as user {}", client.identity.uid),
            }),
        }
    }
}

fn makes_something(body: &RequestBody) -> bool {
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
        // What was reserved before.
        | R::FillSharedBuffer { .. }
        // What exists goes on, as it needs to.
        | R::ResizeCq { .. } => false,
        R::ModifyQp { change, .. } => {
            matches!(change, QpChange::ReadyToReceive(_) | QpChange::ReceiveDatagrams { .. })
        }
    }
}
