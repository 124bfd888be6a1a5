//! The profile of a daemon: device attributes that its devices report instead of rnicd's own.

use serde::{Deserialize, Serialize};

use super::device::DeviceKind;

/// Values of a profile other than the limits in [`DeviceAttributes`](super::DeviceAttributes),
/// which already respect the profile. A maximum is an upper bound: the library reports the lower of
/// this value and its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Name, or the path of the file.
    pub name: String,
    /// Kind of the devices that report these values.
    pub kind: DeviceKind,
    /// Firmware version; empty for the version of the daemon.
    pub fw_ver: String,
    /// `max_mr_size` in bytes.
    pub max_mr_size: u64,
    /// Page sizes that `page_size_cap` may contain.
    pub page_size_cap: u64,
    /// Flags that `device_cap_flags` may contain.
    pub device_cap_flags: u32,
    /// True if QPs support atomics and `atomic_cap` reports them.
    pub atomics: bool,
    /// `max_sge_rd`.
    pub max_sge_rd: u8,
    /// `max_srq_sge`.
    pub max_srq_sge: u8,
    /// `max_res_rd_atom`.
    pub max_res_rd_atom: u32,
    /// `max_ah`.
    pub max_ah: u32,
    /// Error number (`errno(3)`) of a request for more than `max_ah` address handles.
    pub max_ah_errno: u16,
    /// `local_ca_ack_delay`.
    pub local_ca_ack_delay: u8,
    /// `max_mtu` in bytes, a verbs MTU.
    pub max_mtu: u32,
    /// `active_mtu` in bytes, a verbs MTU.
    pub active_mtu: u32,
    /// `max_msg_sz` in bytes.
    pub max_msg_sz: u32,
    /// Minimum of `gid_tbl_len`; the entries beyond the host's GIDs are empty.
    pub gid_tbl_len: u32,
    /// True if each GID has two entries: RoCE v1, then RoCE v2.
    pub gid_v1: bool,
    /// `active_width`, as in `ibv_query_port(3)`.
    pub active_width: u8,
    /// `active_speed`, as in `ibv_query_port(3)`.
    pub active_speed: u8,
    /// True if a send that completes in a full CQ overruns it; otherwise the send queue waits.
    pub sends_overrun_cqs: bool,
}

impl Default for Profile {
    fn default() -> Self {
        Profile {
            name: "rnicd".to_owned(),
            kind: DeviceKind::Roce,
            fw_ver: String::new(),
            max_mr_size: u64::MAX,
            page_size_cap: u64::MAX,
            device_cap_flags: u32::MAX,
            atomics: true,
            max_sge_rd: u8::MAX,
            max_srq_sge: u8::MAX,
            max_res_rd_atom: u32::MAX,
            max_ah: u16::MAX.into(),
            // ENOMEM.
            max_ah_errno: 12,
            local_ca_ack_delay: 0,
            max_mtu: 4096,
            active_mtu: 4096,
            max_msg_sz: 1 << 30,
            gid_tbl_len: 1,
            gid_v1: false,
            // 4 lanes of 25 Gb/s. Programs only display the value.
            active_width: 2,
            active_speed: 32,
            sends_overrun_cqs: false,
        }
    }
}
