//! GIDs, address handles and path records. The iWARP device has one GID, formed from its IP
//! address, and supports no address handles.

use rnic_client::GRH_LEN;

use super::{ibv_context, ibv_pd};

/// ibv_query_gid(3). Both halves are in network byte order.
#[derive(Clone, Copy)]
#[repr(C)]
pub union ibv_gid {
    pub raw: [u8; 16],
    pub global: ibv_gid_global,
}

/// The two halves of an [`ibv_gid`], big-endian.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_gid_global {
    pub subnet_prefix: u64,
    pub interface_id: u64,
}

/// ibv_query_gid_ex(3), ibv_query_gid_table(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_gid_entry {
    pub gid: ibv_gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

/// ibv_create_ah(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_global_route {
    pub dgid: ibv_gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// ibv_create_ah(3).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// ibv_create_ah(3).
#[repr(C)]
pub struct ibv_ah {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub handle: u32,
}

/// GRH, which precedes the payload in the receive buffer of a UD QP. The library never accesses its
/// fields through this type.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_grh {
    pub bytes: [u8; GRH_LEN],
}

/// Path record of the InfiniBand subnet administrator (`<infiniband/sa.h>`).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_sa_path_rec {
    pub dgid: ibv_gid,
    pub sgid: ibv_gid,
    pub dlid: u16,
    pub slid: u16,
    pub raw_traffic: i32,
    pub flow_label: u32,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub reversible: i32,
    pub numb_path: u8,
    pub pkey: u16,
    pub sl: u8,
    pub mtu_selector: u8,
    pub mtu: u8,
    pub rate_selector: u8,
    pub rate: u8,
    pub packet_life_time_selector: u8,
    pub packet_life_time: u8,
    pub preference: u8,
}
