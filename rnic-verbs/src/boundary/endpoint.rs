//! Endpoints: an id with all that it takes (`rdma_create_ep(3)`).

use std::ffi::c_int;

use crate::c::*;
use crate::errno::{Errno, minus_one};
use crate::object::Foreign;
use crate::system;

use super::argument;
use super::connections::{self, bind, create_qp, resolve_address};
use super::events::completed;
use super::id::{self, Endpoint, shown};

/// rdma_create_ep(3).
pub(crate) unsafe extern "C" fn rdma_create_ep(
    to: *mut *mut rdma_cm_id,
    found: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> c_int {
    // What it waits for is there at once.
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    minus_one(unsafe { create(found, pd, wanted).map(|id| to.write(id)) })
}

unsafe fn create(
    found: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: as the module says.
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
    // SAFETY: as the module says.
    unsafe {
        bind(id, found.ai_src_addr)?;
        // Bound to a device, the id has its default domain.
        if !pd.is_null() {
            (*id).pd = pd;
        }
        let endpoint = wanted.as_mut().map(|w| {
            // The one that there is, whatever the program has said.
            w.qp_type = (*id).qp_type;
            Endpoint { pd: Foreign(pd), wanted: *w }
        });
        *shown(id)?.endpoint.lock() = endpoint;
    }
    Ok(())
}

unsafe fn connect_to(
    id: *mut rdma_cm_id,
    found: &rdma_addrinfo,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        resolve_address(id, found.ai_src_addr, found.ai_dst_addr)?;
        completed(id, |of| of.resolve_route())?;
        let data = connections::data(found.ai_connect, found.ai_connect_len);
        shown(id)?.id.set_connect_data(data);
        if !wanted.is_null() {
            // As above.
            (*wanted).qp_type = (*id).qp_type;
            create_qp(id, pd, wanted)?;
        }
    }
    Ok(())
}

/// rdma_destroy_ep(3).
pub(crate) unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        if let Err(errno) = shown(id) {
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
