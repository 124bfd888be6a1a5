//! State and attributes (`ibv_modify_qp(3)`, `ibv_query_qp(3)`).

use std::sync::atomic::Ordering;

use rnic_client::{Function, QpState};

use super::QpBody;
use super::iwarp_states::DeviceAction;
use super::roce_states::{Allowed, RoceStates};
use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::zeroed;
use crate::verbs::context::mtu_code;
use crate::verbs::cq::CqBody;
use crate::verbs::device::PORT;

/// Attributes that [`QpBody::send_changes`] passes to the device.
const CHANGES: i32 = c::IBV_QP_ACCESS_FLAGS | c::IBV_QP_QKEY | c::IBV_QP_MIN_RNR_TIMER;

impl QpBody {
    /// Changes attributes and state (`ibv_modify_qp(3)`).
    pub(crate) fn modify(&self, attributes: &c::ibv_qp_attr, mask: i32) -> Result<(), Errno> {
        self.try_modify(attributes, mask).map_err(|errno| errno.of(&format!("QP {}", self.id())))
    }

    fn try_modify(&self, attributes: &c::ibv_qp_attr, mask: i32) -> Result<(), Errno> {
        self.adapter.check()?;
        if let Some(roce) = &self.roce {
            return self.modify_roce(&mut roce.lock(), attributes, mask);
        }
        self.modify_iwarp(attributes, mask)
    }

    /// Returns true if the program or the library has moved a QP of the RoCE device to ERR.
    pub(crate) fn is_in_error(&self) -> bool {
        self.roce.as_ref().is_some_and(|roce| roce.lock().state() == c::IBV_QPS_ERR)
    }

    /// Modifies a QP of the iWARP device.
    fn modify_iwarp(&self, attributes: &c::ibv_qp_attr, mask: i32) -> Result<(), Errno> {
        let ids = self.device.connections();
        let mut states = self.states.lock();
        let known = states.by_attributes || ids.is_some_and(|ids| ids.holds_qp(self.id()));
        let to_rtr = mask & c::IBV_QP_STATE != 0 && attributes.qp_state == c::IBV_QPS_RTR;
        let by_attributes = ids.filter(|ids| to_rtr && !known && ids.uncount_rtr_attrs());
        let taken = by_attributes.is_some();
        let mut next = *states;
        let modified = next.modify(attributes, mask, known || taken).and_then(|action| {
            match action {
                DeviceAction::Nothing => self.admit(Function::ModifyQp)?,
                DeviceAction::ToError => self.qp.to_error()?,
                DeviceAction::Disconnect => self.qp.disconnect()?,
            }
            Ok(())
        });
        match &modified {
            Ok(()) => {
                *states = next;
                states.by_attributes |= taken;
                if matches!(states.state, c::IBV_QPS_RTS | c::IBV_QPS_ERR) {
                    self.may_send.store(true, Ordering::Relaxed);
                }
            }
            // The attributes of the id are not used yet: they are for another QP, or for a later
            // call.
            Err(_) => {
                if let Some(ids) = by_attributes {
                    ids.count_rtr_attrs();
                }
            }
        }
        modified
    }

    /// Modifies a QP of the RoCE device.
    fn modify_roce(
        &self,
        states: &mut RoceStates,
        attributes: &c::ibv_qp_attr,
        mask: i32,
    ) -> Result<(), Errno> {
        // A fault of its CQ or SRQ can also move a QP that is not in RTR yet. The daemon then
        // refuses RTR, so the four changes of a new connection need one query instead of four.
        if !matches!(states.state(), c::IBV_QPS_RESET | c::IBV_QPS_INIT) {
            states.follow(self.qp.query_unruled()?.state);
        }
        let max_ird = self.device.attributes.max_ird;
        let max_ord = self.device.attributes.max_ord;
        let gids = self.adapter.gids(&self.device.tables()?);
        let max_mtu = mtu_code(self.adapter.limits().profile.max_mtu);
        let allowed = Allowed { gids: &gids, max_ird, max_ord, max_mtu };
        let next = states.after(attributes, mask, &allowed)?;
        // Must precede draining: the event can arrive before this function returns.
        self.notify_when_drained.store(next.attr().en_sqd_async_notify != 0, Ordering::Release);
        match (states.state(), next.state()) {
            (_, c::IBV_QPS_RESET) => {
                CqBody::drop_with_reset([&self.send_cq, &self.recv_cq], self.id(), || {
                    let mut sends = self.sends.lock();
                    let mut receives = self.receives.lock();
                    self.qp.reset()?;
                    sends.clear();
                    receives.clear();
                    Ok(())
                })?;
            }
            (from, c::IBV_QPS_ERR) if from != c::IBV_QPS_ERR => self.qp.to_error()?,
            (c::IBV_QPS_INIT, c::IBV_QPS_RTR) if self.is_ud => {
                self.qp.receive_datagrams(next.attr().qkey)?;
            }
            (c::IBV_QPS_INIT, c::IBV_QPS_RTR) => self.qp.to_rtr(&next.wiring(&gids)?)?,
            (from, c::IBV_QPS_RTS) if from != c::IBV_QPS_RTS => {
                self.send_changes(&next, mask)?;
                self.qp.to_rts(&next.sending())?;
            }
            (c::IBV_QPS_RTS, c::IBV_QPS_SQD) => {
                self.draining.store(true, Ordering::Release);
                self.qp.drain_send_queue()?;
            }
            (c::IBV_QPS_RTS | c::IBV_QPS_SQD, _) if mask & CHANGES != 0 => {
                self.send_changes(&next, mask)?;
            }
            // Here the daemon gets no request for which it would evaluate the rules.
            _ => self.admit(Function::ModifyQp)?,
        }
        *states = next;
        Ok(())
    }

    /// Passes changed attributes to the device, for transitions after RTR.
    fn send_changes(&self, next: &RoceStates, mask: i32) -> Result<(), Errno> {
        if mask & c::IBV_QP_ACCESS_FLAGS != 0 {
            self.qp.set_rights(next.rights())?;
        }
        if mask & c::IBV_QP_QKEY != 0 {
            self.qp.set_q_key(next.attr().qkey)?;
        }
        if mask & c::IBV_QP_MIN_RNR_TIMER != 0 {
            self.qp.set_min_rnr_timer(next.attr().min_rnr_timer)?;
        }
        Ok(())
    }

    /// Returns state, attributes and capacities (`ibv_query_qp(3)`).
    pub(crate) fn query(&self) -> Result<c::ibv_qp_attr, Errno> {
        self.adapter.check()?;
        self.admit(Function::QueryQp)?;
        let row = self.qp.query_unruled()?;
        if let Some(roce) = &self.roce {
            let mut states = *roce.lock();
            states.follow(row.state);
            let mut attr = states.attr();
            attr.cur_qp_state = attr.qp_state;
            attr.cap = self.granted;
            let drains = self.draining.load(Ordering::Acquire);
            attr.sq_draining = u8::from(attr.qp_state == c::IBV_QPS_SQD && drains);
            return Ok(attr);
        }
        let states = *self.states.lock();
        let mut attr: c::ibv_qp_attr = zeroed();
        attr.qp_state = match row.state {
            // In these states, the program's own state is more precise.
            QpState::Idle | QpState::Rtr | QpState::Sqd | QpState::Sqe => states.state,
            QpState::Rts => c::IBV_QPS_RTS,
            QpState::Closing => c::IBV_QPS_SQD,
            QpState::Terminate | QpState::Error => c::IBV_QPS_ERR,
        };
        attr.cur_qp_state = attr.qp_state;
        attr.qp_access_flags = states.access;
        attr.min_rnr_timer = states.min_rnr_timer;
        attr.timeout = states.timeout;
        attr.cap = self.granted;
        attr.path_mtu = crate::net::IWARP_MTU;
        attr.port_num = PORT;
        let granted = |granted: u16, asked: u8| match granted {
            0 => asked,
            granted => u8::try_from(granted).unwrap_or(u8::MAX),
        };
        attr.max_dest_rd_atomic = granted(row.ird, states.inbound_reads);
        attr.max_rd_atomic = granted(row.ord, states.outbound_reads);
        Ok(attr)
    }
}
