//! Work requests.

use libc::{c_int, c_uint, c_void, size_t};

use super::{ibv_ah, ibv_mw, ibv_mw_bind_info};

pub type ibv_wr_opcode = c_uint;

/// ibv_post_send(3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// ibv_wr_set_inline_data_list(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_data_buf {
    pub addr: *mut c_void,
    pub length: size_t,
}

/// ibv_post_recv(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

/// ibv_post_send(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: ibv_wr_opcode,
    pub send_flags: c_uint,
    /// Big-endian. A union with `invalidate_rkey`, which is in host order; `opcode` selects the
    /// member.
    pub imm_data: u32,
    pub wr: ibv_send_wr_wr,
    pub qp_type: ibv_send_wr_qp_type,
    /// A union with the smaller structure for TCP segmentation offload, which an RNIC does not
    /// offer.
    pub bind_mw: ibv_send_wr_bind_mw,
}

/// `ibv_send_wr.wr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_send_wr_wr {
    pub rdma: ibv_send_wr_rdma,
    pub atomic: ibv_send_wr_atomic,
    pub ud: ibv_send_wr_ud,
}

/// `ibv_send_wr.wr.rdma`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_rdma {
    pub remote_addr: u64,
    pub rkey: u32,
}

/// `ibv_send_wr.wr.atomic`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_atomic {
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub rkey: u32,
}

/// `ibv_send_wr.wr.ud`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_ud {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// `ibv_send_wr.qp_type`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_qp_type {
    pub xrc_remote_srqn: u32,
}

/// `ibv_send_wr.bind_mw`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_send_wr_bind_mw {
    pub mw: *mut ibv_mw,
    pub rkey: u32,
    pub bind_info: ibv_mw_bind_info,
}
