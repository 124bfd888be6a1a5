//! Protection domains, memory regions and memory windows.

use std::ptr;

use libc::{c_int, c_uint, c_void, size_t};

use super::ibv_context;

pub type ibv_mw_type = c_uint;

/// ibv_alloc_pd(3).
#[repr(C)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

/// ibv_reg_mr(3).
#[repr(C)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: size_t,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// ibv_alloc_buf(3). Programs do not read it.
#[repr(C)]
pub struct ibv_buf {
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub size: size_t,
}

/// ibv_reg_mr_ex(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_mr_init_attr {
    pub length: size_t,
    pub access: c_int,
    pub comp_mask: u64,
    pub iova: u64,
    pub addr: *mut c_void,
    pub fd: c_int,
    pub fd_offset: u64,
    pub dmah: *mut c_void,
    pub buf: *mut ibv_buf,
}

impl Default for ibv_mr_init_attr {
    fn default() -> Self {
        ibv_mr_init_attr {
            length: 0,
            access: 0,
            comp_mask: 0,
            iova: 0,
            addr: ptr::null_mut(),
            fd: 0,
            fd_offset: 0,
            dmah: ptr::null_mut(),
            buf: ptr::null_mut(),
        }
    }
}

/// ibv_alloc_mw(3).
#[repr(C)]
pub struct ibv_mw {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub rkey: u32,
    pub handle: u32,
    pub type_: ibv_mw_type,
}

/// ibv_bind_mw(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_mw_bind_info {
    pub mr: *mut ibv_mr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: c_uint,
}

/// ibv_bind_mw(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_mw_bind {
    pub wr_id: u64,
    pub send_flags: c_uint,
    pub bind_info: ibv_mw_bind_info,
}
