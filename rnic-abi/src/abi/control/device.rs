//! The devices of the daemon.

use serde::{Deserialize, Serialize};

/// A device, as programs see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceRow {
    /// Name, unique among the devices of the daemon.
    pub name: String,
    /// Kind of its QPs.
    pub kind: DeviceKind,
    /// Unique EUI-64 as a number, first byte most significant. Neither 32-bit half is zero.
    pub guid: u64,
    /// Vendor ID, from the configuration; 0 for none.
    pub vendor_id: u32,
    /// Part ID, from the configuration; 0 for none.
    pub vendor_part_id: u32,
    /// Interface whose addresses are the GIDs of the device; empty for all interfaces.
    pub interface: String,
    /// Number of its `uverbs` file, unique among the devices of the daemon.
    pub uverbs: u32,
    /// The GID table of the device: for each index the index in the daemon's table, which
    /// [`QueryGids`](super::RequestBody::QueryGids) returns, or [`NO_GID`] for an empty entry. The
    /// iWARP device has none.
    pub gids: Vec<u16>,
    /// A fault rule has taken the port down.
    pub port_down: bool,
    /// Entry 0 of the P_Key table, the only one.
    pub p_key: u16,
    /// `active_width` of `ibv_query_port(3)`.
    pub active_width: u8,
    /// `active_speed` of `ibv_query_port(3)`.
    pub active_speed: u8,
}

/// Marks an empty entry in [`DeviceRow::gids`].
pub const NO_GID: u16 = u16::MAX;

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    /// QPs that connect by MPA.
    Iwarp,
    /// RC, UC and UD QPs.
    Roce,
}

impl std::fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DeviceKind::Iwarp => "iWARP",
            DeviceKind::Roce => "RoCE",
        })
    }
}
