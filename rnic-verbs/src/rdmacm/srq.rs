//! The shared receive queue of an id (`rdma_create_srq(3)`).

use std::ptr::null_mut;
use std::sync::Arc;

use rnic_client::Function;

use super::id::{CmIdBody, cm_id, of_device};
use crate::c::*;
use crate::errno::{self, Errno};
use crate::ffi::entry::entry;
use crate::ffi::handles::{Kind, Live, live};
use crate::ffi::pointers::{InOut, get, set};
use crate::verbs::context::check_same;
use crate::verbs::open::{default_context, default_pd};
use crate::verbs::pd::PdBody;
use crate::verbs::srq;

fn create(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    wanted: InOut<ibv_srq_init_attr>,
) -> Result<(), Errno> {
    let id = of_device(id)?;
    id.admit(Function::CreateIdSrq)?;
    let pd = pd_for_srq(id, pd)?;
    set_srq(id, pd, srq::create(pd, wanted)?);
    Ok(())
}

fn create_ex(id: *mut rdma_cm_id, wanted: InOut<ibv_srq_init_attr_ex>) -> Result<(), Errno> {
    let w = wanted.required("srq_init_attr")?;
    let mask = get!(w.comp_mask);
    if mask & IBV_SRQ_INIT_ATTR_TYPE == 0 {
        return Err(invalid!("comp_mask lacks IBV_SRQ_INIT_ATTR_TYPE"));
    }
    let named = if mask & IBV_SRQ_INIT_ATTR_PD != 0 { get!(w.pd) } else { null_mut() };
    let id = of_device(id)?;
    id.admit(Function::CreateIdSrq)?;
    let pd = pd_for_srq(id, named)?;
    set!(w.pd = pd);
    set!(w.comp_mask = mask | IBV_SRQ_INIT_ATTR_PD);
    set_srq(id, pd, srq::create_ex(wanted)?);
    Ok(())
}

fn set_srq(id: Live<CmIdBody>, pd: *mut ibv_pd, made: *mut ibv_srq) {
    set!(id.pd = pd);
    set!(id.srq = made);
}

/// Returns the PD for an SRQ of an id: `named`, or the id's, or the default PD of the device.
fn pd_for_srq(id: Live<CmIdBody>, named: *mut ibv_pd) -> Result<*mut ibv_pd, Errno> {
    if !get!(id.srq).is_null() {
        return Err(invalid!("the id already has a shared receive queue"));
    }
    if named.is_null() {
        let own = get!(id.pd);
        return if own.is_null() { default_pd(&id.id.device, &id.id.adapter()?) } else { Ok(own) };
    }
    let found = live::<Arc<PdBody>>(named)?;
    let of = default_context(&id.id.device, &id.id.adapter()?)?;
    check_same(Kind::Pd, get!(found.context), of)?;
    Ok(named)
}

pub(super) fn destroy(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let id = cm_id(id)?;
    let made = get!(id.srq);
    set!(id.srq = null_mut());
    if !made.is_null() {
        errno::nothing(srq::destroy(made));
    }
    Ok(())
}

entry! {
    uncancelled rdma_create_srq(
        id: *mut rdma_cm_id, pd: *mut ibv_pd, wanted: InOut<ibv_srq_init_attr>,
    ) -> minus_one = create;
    uncancelled rdma_create_srq_ex(id: *mut rdma_cm_id, wanted: InOut<ibv_srq_init_attr_ex>)
        -> minus_one = create_ex;
    uncancelled rdma_destroy_srq(id: *mut rdma_cm_id) -> nothing = destroy;
}
