//! Endpoints: an id with its queue pair and other resources (`rdma_create_ep(3)`).

use std::ffi::c_int;

use crate::c::*;
use crate::errno::{Errno, minus_one};
use crate::ffi::handles::Foreign;
use crate::system;

use crate::ffi::pointers::argument;
use crate::rdmacm::connections::{self, bind, create_qp, resolve_address};
use crate::rdmacm::events::completed;
use crate::rdmacm::id::entry::{self as id, Endpoint, cm_id};

/// rdma_create_ep(3).
pub(crate) unsafe extern "C" fn rdma_create_ep(
    to: *mut *mut rdma_cm_id,
    found: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> c_int {
    // Not a cancellation point: its waits end at once.
    let _guard = system::uncancelled();
    // SAFETY: `create` has the contract of this function, and `to` has room for a pointer
    // (rdma_create_ep(3)).
    minus_one(unsafe { create(found, pd, wanted).map(|id| to.write(id)) })
}

unsafe fn create(
    found: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: `found` and `wanted` are null or valid, the caller does not destroy `pd` during the
    // call (rdma_create_ep(3)), and no other thread has `id` yet.
    unsafe {
        let found = argument(found, "res")?;
        let space = found.ai_port_space.cast_unsigned();
        let id = id::create(std::ptr::null_mut(), std::ptr::null_mut(), space)?;
        let filled = match found.ai_flags & RAI_PASSIVE {
            0 => connect_to(id, found, pd, wanted),
            _ => listen_on(id, found, pd, wanted),
        };
        if let Err(errno) = filled {
            id::rdma_destroy_id(id);
            return Err(errno);
        }
        Ok(id)
    }
}

unsafe fn listen_on(
    id: *mut rdma_cm_id,
    found: &rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: no other thread has `id` yet, and `wanted` and the address in `found` are null or
    // valid (rdma_create_ep(3)).
    unsafe {
        bind(id, found.ai_src_addr)?;
        // Binding to a device has set the default PD.
        if !pd.is_null() {
            (*id).pd = pd;
        }
        let endpoint = wanted.as_mut().map(|w| {
            // The id's own type, whatever the program has requested.
            w.qp_type = (*id).qp_type;
            Endpoint { pd: Foreign(pd), wanted: *w }
        });
        *cm_id(id)?.endpoint.lock() = endpoint;
    }
    Ok(())
}

unsafe fn connect_to(
    id: *mut rdma_cm_id,
    found: &rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: no other thread has `id` yet. The pointers in `found` and `wanted` are null or valid,
    // and the caller does not destroy `pd` during the call (rdma_create_ep(3)).
    unsafe {
        resolve_address(id, found.ai_src_addr, found.ai_dst_addr)?;
        completed(id, |of| of.resolve_route())?;
        let data = connections::data(found.ai_connect, found.ai_connect_len);
        cm_id(id)?.id.set_connect_data(data);
        if !wanted.is_null() {
            // As in `listen_on`.
            (*wanted).qp_type = (*id).qp_type;
            create_qp(id, pd, wanted)?;
        }
    }
    Ok(())
}

/// rdma_destroy_ep(3).
pub(crate) unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    let _guard = system::uncancelled();
    // SAFETY: `cm_id` finds `id`, and no other thread uses it, its QP or its SRQ, now or later
    // (rdma_destroy_ep(3)).
    unsafe {
        if let Err(errno) = cm_id(id) {
            return errno.log();
        }
        if !(*id).qp.is_null() {
            connections::rdma_destroy_qp(id);
        }
        if !(*id).srq.is_null() {
            connections::rdma_destroy_srq(id);
        }
        id::rdma_destroy_id(id);
    }
}
