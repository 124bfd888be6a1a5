//! Endpoints: an id with its queue pair and other resources (`rdma_create_ep(3)`).

use std::ptr::null_mut;

use rnic_client::Function;

use super::channel::open_device;
use super::id::{self, Endpoint, cm_id};
use super::resolve::{bind, resolve_address, resolve_route};
use super::{qp, srq};
use crate::c::*;
use crate::errno::{self, Errno};
use crate::ffi::entry::entry;
use crate::ffi::handles::Foreign;
use crate::ffi::pointers::{Argument as _, In, InOut, Out, bytes, get, set};
use crate::ffi::socket_address::Address;

fn create(
    to: Out<*mut rdma_cm_id>,
    found: In<rdma_addrinfo>,
    pd: *mut ibv_pd,
    wanted: InOut<ibv_qp_init_attr>,
) -> Result<(), Errno> {
    let to = to.required("id")?;
    let found = found.read("res")?;
    let space = found.ai_port_space.cast_unsigned();
    let device = open_device()?;
    device.admit(Function::CreateEp.call())?;
    let id = id::create(&device, null_mut(), null_mut(), space)?;
    let body = cm_id(id)?;
    if found.ai_qp_type.cast_unsigned() == IBV_QPT_UC && body.id.service.allows_uc() {
        set!(body.qp_type = IBV_QPT_UC);
    }
    let filled = match found.ai_flags & RAI_PASSIVE {
        0 => connect_to(id, &found, pd, wanted),
        _ => listen_on(id, &found, pd, wanted),
    };
    filled.inspect_err(|_| errno::nothing(id::destroy(id)))?;
    to.write(id);
    Ok(())
}

fn listen_on(
    id: *mut rdma_cm_id,
    found: &rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: InOut<ibv_qp_init_attr>,
) -> Result<(), Errno> {
    // SAFETY: the address is null or valid (rdma_create_ep(3)).
    bind(id, unsafe { Address::from_c(found.ai_src_addr) })?;
    let id = cm_id(id)?;
    // Binding to a device has set the default PD.
    if !pd.is_null() {
        set!(id.pd = pd);
    }
    *id.endpoint.lock() = wanted.optional().map(|w| {
        // The type of the id overrides the type that the program has requested.
        set!(w.qp_type = get!(id.qp_type));
        Endpoint { pd: Foreign(pd), wanted: w.read() }
    });
    Ok(())
}

fn connect_to(
    id: *mut rdma_cm_id,
    found: &rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: InOut<ibv_qp_init_attr>,
) -> Result<(), Errno> {
    // SAFETY: the addresses are null or valid, and `ai_connect` is null or points to
    // `ai_connect_len` bytes (rdma_create_ep(3)).
    let (source, peer, data) = unsafe {
        (
            Address::from_c(found.ai_src_addr),
            Address::from_c(found.ai_dst_addr),
            bytes(found.ai_connect, found.ai_connect_len),
        )
    };
    resolve_address(id, source, peer)?;
    resolve_route(id)?;
    let body = cm_id(id)?;
    body.id.set_connect_data(data);
    if let Some(w) = wanted.optional() {
        // As in `listen_on`.
        set!(w.qp_type = get!(body.qp_type));
        qp::create(id, pd, wanted)?;
    }
    Ok(())
}

fn destroy(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let found = cm_id(id)?;
    if !get!(found.qp).is_null() {
        qp::destroy(id)?;
    }
    srq::destroy(id)?;
    id::destroy(id)
}

entry! {
    /// rdma_create_ep(3). Not a cancellation point: its waits end at once, unless a fault rule
    /// delays them.
    uncancelled rdma_create_ep(
        to: Out<*mut rdma_cm_id>, found: In<rdma_addrinfo>, pd: *mut ibv_pd,
        wanted: InOut<ibv_qp_init_attr>,
    ) -> minus_one = create;
    uncancelled rdma_destroy_ep(id: *mut rdma_cm_id) -> nothing = destroy;
}
