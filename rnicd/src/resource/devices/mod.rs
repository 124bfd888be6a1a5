//! The RoCE devices. A device has a name, a GUID and its own GID table: a selection of the daemon's
//! table, with the addresses of one interface or of all interfaces. The indices of both tables are
//! stable.

mod manage;

use rnic_abi::abi::control::GidRow;

use super::gids;
use crate::config::{Guid, MAX_ROCE_DEVICES, Netdev};

/// A RoCE device.
#[derive(Debug)]
pub(super) struct RoceDevice {
    name: String,
    /// Interface whose addresses are the GIDs.
    netdev: Netdev,
    guid: Guid,
    /// Number of the `uverbs` file. The iWARP device has 0.
    uverbs: u32,
    /// GID table of the device. Entries keep their index.
    gids: Vec<GidRow>,
}

/// Reason why a device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The name is taken.
    #[error("there is already a device {0}")]
    NameTaken(String),
    /// The name is invalid.
    #[error("device {name:?}: the name {why}")]
    BadName {
        /// The name.
        name: String,
        /// Reason.
        why: String,
    },
    /// The interface does not exist.
    #[error(
        "device {name}: there is no network interface {interface:?}; interfaces with addresses: \
         {known}"
    )]
    NoInterface {
        /// Name of the device.
        name: String,
        /// Name of the interface.
        interface: String,
        /// Interfaces with addresses.
        known: String,
    },
    /// There are too many devices.
    #[error("device {0}: there are already {MAX_ROCE_DEVICES} RoCE devices, the maximum")]
    TooMany(String),
}

/// A device that a pattern has created for an interface.
#[derive(Debug)]
struct ByPattern {
    pattern: String,
    interface: String,
    name: String,
}

impl RoceDevice {
    /// Updates the GID table of the device. `table` is the daemon's table. `now` has the current
    /// addresses in the order in which they get indices.
    fn follow(&mut self, table: &[GidRow], now: &[GidRow]) {
        let has = |gid| table.iter().any(|row| row.gid == gid);
        let now = now.iter().filter(|row| has(row.gid));
        let now = now.filter(|row| match &self.netdev {
            Netdev::All => true,
            Netdev::Named(interface) => row.interface == *interface,
        });
        gids::update(&mut self.gids, now.cloned().collect());
    }

    /// Returns the interface of the device, or an empty name for all.
    pub(in crate::resource) fn interface(&self) -> &str {
        match &self.netdev {
            Netdev::All => "",
            Netdev::Named(interface) => interface,
        }
    }
}

/// The RoCE devices of the daemon.
#[derive(Debug, Default)]
pub(super) struct RoceDevices {
    /// In the order of their creation.
    list: Vec<RoceDevice>,
    /// Devices that patterns have created, including those that an administrator has removed.
    by_pattern: Vec<ByPattern>,
    /// The addresses of the host, as rows of a GID table, in the order in which they get indices.
    pub(super) addresses: Vec<GidRow>,
    /// The device tree must be updated.
    changed: bool,
    /// Last logged reason why the device of an interface could not be created.
    problem: String,
}

impl RoceDevices {
    /// Creates an empty list for a host with these addresses.
    pub(in crate::resource) fn new(addresses: Vec<GidRow>) -> Self {
        RoceDevices { addresses, ..RoceDevices::default() }
    }
}
