//! The queue pair of an id, with its completion queues (`rdma_create_qp(3)`).

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use rnic_client::Function;

use super::id::{CmIdBody, cm_id, of_device};
use super::rc_attr::no_transition;
use super::service::Service;
use super::state::IdBody;
use crate::c::*;
use crate::errno::{self, Errno};
use crate::ffi::entry::entry;
use crate::ffi::handles::{Kind, Live, live, zeroed};
use crate::ffi::pointers::{Fields, InOut, Out, Place, get, set};
use crate::verbs::channel;
use crate::verbs::context::check_same;
use crate::verbs::cq::entry as cq;
use crate::verbs::device::PORT;
use crate::verbs::open::{default_context, default_pd};
use crate::verbs::pd::PdBody;
use crate::verbs::qp::{QpBody, entry as verbs_qp, qp};
use crate::verbs::registry::ConnectionManager as _;

pub(super) fn create(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    wanted: InOut<ibv_qp_init_attr>,
) -> Result<(), Errno> {
    let w = wanted.required("qp_init_attr")?;
    create_with(id, pd, w, |pd| verbs_qp::create(pd, wanted))
}

fn create_by_program(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    wanted: InOut<ibv_qp_init_attr>,
) -> Result<(), Errno> {
    cm_id(id)?.admit(Function::CreateIdQp)?;
    create(id, pd, wanted)
}

fn create_ex(id: *mut rdma_cm_id, wanted: InOut<ibv_qp_init_attr_ex>) -> Result<(), Errno> {
    let w = wanted.required("qp_init_attr")?;
    cm_id(id)?.admit(Function::CreateIdQp)?;
    let named = get!(w.comp_mask) & IBV_QP_INIT_ATTR_PD != 0;
    let pd = if named { get!(w.pd) } else { null_mut() };
    // SAFETY: the extended structure begins with the fields of the basic one.
    let basic = unsafe { w.prefix() };
    create_with(id, pd, basic, |pd| {
        set!(w.pd = pd);
        set!(w.comp_mask = get!(w.comp_mask) | IBV_QP_INIT_ATTR_PD);
        let found = live::<Arc<PdBody>>(pd)?;
        verbs_qp::create_ex(get!(found.context), wanted)
    })
}

/// Sets the missing queues in `w`, and creates the queue pair with `make`.
fn create_with(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    w: Place<ibv_qp_init_attr>,
    make: impl FnOnce(*mut ibv_pd) -> Result<*mut ibv_qp, Errno>,
) -> Result<(), Errno> {
    let kind = get!(w.qp_type);
    cm_id(id)?.id.service.check_qp_type(kind)?;
    let id = of_device(id)?;
    let send_cq = get!(w.send_cq);
    let recv_cq = get!(w.recv_cq);
    let srq = get!(w.srq);
    let made = prepare(id, pd, w).and_then(|pd| {
        let made = make(pd).inspect_err(|_| destroy_cqs(id))?;
        set_qp(id, pd, made)
    });
    made.inspect_err(|_| {
        // The CQs created here have been destroyed, and the program may retry with the same
        // structure.
        set!(w.send_cq = send_cq);
        set!(w.recv_cq = recv_cq);
        set!(w.srq = srq);
    })
}

/// Returns the PD for a new QP of an id, and sets the missing CQs and SRQ. Creates each missing CQ
/// with its own channel and stores it in the id.
fn prepare(
    id: Live<CmIdBody>,
    pd: *mut ibv_pd,
    w: Place<ibv_qp_init_attr>,
) -> Result<*mut ibv_pd, Errno> {
    if !get!(id.qp).is_null() {
        return Err(invalid!("the id already has a queue pair"));
    }
    let adapter = id.id.adapter()?;
    let pd = match (pd.is_null(), get!(id.pd).is_null()) {
        (false, _) => pd,
        (true, false) => get!(id.pd),
        (true, true) => default_pd(&id.id.device, &adapter)?,
    };
    let context = default_context(&id.id.device, &adapter)?;
    let found = live::<Arc<PdBody>>(pd)?;
    check_same(Kind::Pd, get!(found.context), context)?;
    let cap = get!(w.cap);
    let program = Fields::at(&id).cast();
    if get!(w.send_cq).is_null() {
        let (channel, cq) = make_cq(context, cap.max_send_wr, program)?;
        set!(id.send_cq_channel = channel);
        set!(id.send_cq = cq);
        set!(w.send_cq = cq);
    }
    if get!(w.recv_cq).is_null() {
        let made = make_cq(context, cap.max_recv_wr, program);
        let (channel, cq) = made.inspect_err(|_| destroy_cqs(id))?;
        set!(id.recv_cq_channel = channel);
        set!(id.recv_cq = cq);
        set!(w.recv_cq = cq);
    }
    if get!(w.srq).is_null() {
        set!(w.srq = get!(id.srq));
    }
    Ok(pd)
}

fn make_cq(
    context: *mut ibv_context,
    entries: u32,
    program: *mut c_void,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), Errno> {
    let channel = channel::create(context)?;
    let made = cq::create(context, entries.max(1), program, channel, 0);
    let made = made.inspect_err(|_| errno::nothing(channel::destroy(channel)))?;
    Ok((channel, made.cast()))
}

/// Destroys the completion queues that the library has created for an id.
fn destroy_cqs(id: Live<CmIdBody>) {
    let send = (get!(id.send_cq), get!(id.send_cq_channel));
    set!(id.send_cq = null_mut());
    set!(id.send_cq_channel = null_mut());
    let recv = (get!(id.recv_cq), get!(id.recv_cq_channel));
    set!(id.recv_cq = null_mut());
    set!(id.recv_cq_channel = null_mut());
    for (made, channel) in [send, recv] {
        if !made.is_null() {
            errno::nothing(cq::destroy(made));
        }
        if !channel.is_null() {
            errno::nothing(channel::destroy(channel));
        }
    }
}

fn set_qp(id: Live<CmIdBody>, pd: *mut ibv_pd, made: *mut ibv_qp) -> Result<(), Errno> {
    let body = qp(made)?;
    let moved = match id.id.service {
        Service::Iwarp => Ok(()),
        Service::Rc(_) => id.id.move_qp(&body, IBV_QPS_INIT),
        Service::Ud => to_rts(body),
    };
    moved.inspect_err(|_| {
        errno::nothing(verbs_qp::destroy(made));
        destroy_cqs(id);
    })?;
    if !id.id.is_ud() {
        // An iWARP QP is in INIT when it is created.
        set!(body.qp_base.state = IBV_QPS_INIT);
    }
    set!(id.pd = pd);
    set!(id.qp = made);
    id.id.set_qp(&body);
    Ok(())
}

/// Writes the state of an id's own QP to its C structure. The library has moved the QP without
/// `ibv_modify_qp(3)`.
pub(super) fn show_state(id: Live<CmIdBody>, state: ibv_qp_state) {
    if let Ok(qp) = qp(get!(id.qp)) {
        set!(qp.qp_base.state = state);
    }
}

/// Moves a UD QP through all states up to RTS, so that it is usable at once.
fn to_rts(made: Live<Arc<QpBody>>) -> Result<(), Errno> {
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = state;
        let mask = ud_attributes(&mut attributes)?;
        made.modify(&attributes, mask)?;
        set!(made.qp_base.state = state);
    }
    Ok(())
}

pub(super) fn destroy(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let id = cm_id(id)?;
    let made = get!(id.qp);
    set!(id.qp = null_mut());
    if !made.is_null() {
        errno::nothing(verbs_qp::destroy(made));
        id.id.clear_qp();
    }
    destroy_cqs(id);
    Ok(())
}

/// Fills in the attributes for the transition of a QP that was created without the id to
/// `qp_state`. On the iWARP device, the connection sets up the QP and the attributes have no
/// effect.
fn init_attributes(
    id: *mut rdma_cm_id,
    attr: InOut<ibv_qp_attr>,
    mask: Out<c_int>,
) -> Result<(), Errno> {
    let found = of_device(id)?;
    let attr = attr.required("qp_attr")?;
    let to_mask = mask.required("qp_attr_mask")?;
    found.admit(Function::InitQpAttr)?;
    let mut filled: ibv_qp_attr = zeroed();
    filled.qp_state = get!(attr.qp_state);
    let mask = match found.id.service {
        Service::Iwarp => connection_attributes(&mut filled, &found.id),
        Service::Rc(_) => {
            let is_uc = get!(found.qp_type) == IBV_QPT_UC;
            found.id.rc_attributes(&mut filled, is_uc)
        }
        Service::Ud => ud_attributes(&mut filled),
    };
    // SAFETY: every program's structure has the fields before `rate_limit`.
    unsafe { attr.write_prefix(&filled, verbs_qp::OLDEST_QP_ATTR) };
    to_mask.write(mask?);
    Ok(())
}

/// Fills in the attributes of an iWARP QP that was created without the id. Returns their mask.
fn connection_attributes(to: &mut ibv_qp_attr, id: &IdBody) -> Result<c_int, Errno> {
    to.port_num = PORT;
    to.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    match to.qp_state {
        IBV_QPS_INIT => Ok(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT),
        IBV_QPS_RTR | IBV_QPS_RTS => {
            if to.qp_state == IBV_QPS_RTR && !id.knows_qp() {
                id.ids().count_rtr_attrs();
            }
            Ok(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS)
        }
        state => Err(no_transition(state)),
    }
}

/// Fills in the attributes of a UD QP for the transition to `qp_state`. Returns their mask.
fn ud_attributes(to: &mut ibv_qp_attr) -> Result<c_int, Errno> {
    to.port_num = PORT;
    to.qkey = RDMA_UDP_QKEY;
    match to.qp_state {
        IBV_QPS_INIT => Ok(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
        IBV_QPS_RTR => Ok(IBV_QP_STATE),
        IBV_QPS_RTS => Ok(IBV_QP_STATE | IBV_QP_SQ_PSN),
        state => Err(no_transition(state)),
    }
}

entry! {
    uncancelled rdma_create_qp(
        id: *mut rdma_cm_id, pd: *mut ibv_pd, wanted: InOut<ibv_qp_init_attr>,
    ) -> minus_one = create_by_program;
    uncancelled rdma_create_qp_ex(id: *mut rdma_cm_id, wanted: InOut<ibv_qp_init_attr_ex>)
        -> minus_one = create_ex;
    uncancelled rdma_destroy_qp(id: *mut rdma_cm_id) -> nothing = destroy;
    plain rdma_init_qp_attr(
        id: *mut rdma_cm_id, attr: InOut<ibv_qp_attr>, mask: Out<c_int>,
    ) -> minus_one = init_attributes;
}
