//! The RoCE devices. A device has a name, a GUID and its own GID table: a selection of the daemon's
//! table, with the addresses of one interface or of all interfaces, or a list of addresses. The
//! indices of both tables are stable.

mod manage;

use std::net::IpAddr;

use if_addrs::Interface;
use rnic_abi::abi::control::GidRow;
use rnic_abi::types::Gid;

use super::gids::{self, MOST};
use crate::config::{Config, GidSource, Guid, MAX_ROCE_DEVICES};

/// A RoCE device.
#[derive(Debug)]
pub(super) struct RoceDevice {
    name: String,
    source: GidSource,
    /// The interface, that of the first address found, or an empty name for all. It identifies the
    /// device, so it never changes.
    interface: String,
    guid: Guid,
    /// Number of the `uverbs` file.
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
    /// The daemon does not use the address.
    #[error(
        "device {name}: {address} is no address of this host, or programs may not use it \
         (device.addresses)"
    )]
    NoAddress {
        /// Name of the device.
        name: String,
        /// The address.
        address: IpAddr,
    },
    /// Another device has the address.
    #[error("device {name}: {other} has the address {address}")]
    AddressTaken {
        /// Name of the device.
        name: String,
        /// Name of the other device.
        other: String,
        /// The address.
        address: IpAddr,
    },
    /// The GID table has no room for the addresses.
    #[error("device {0}: its addresses exceed the {MOST} entries of the daemon's GID table")]
    NoRoom(String),
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
        let now = self.own_rows(table, now);
        // A device with addresses has the interface of the last one.
        if let GidSource::Addresses(_) = self.source
            && let Some(row) = now.last()
        {
            self.interface.clone_from(&row.interface);
        }
        gids::update(&mut self.gids, now);
    }

    /// Returns the rows of `now` that are in the daemon's table and belong to the device.
    fn own_rows(&self, table: &[GidRow], now: &[GidRow]) -> Vec<GidRow> {
        let has = |gid| table.iter().any(|row| row.gid == gid);
        let now = now.iter().filter(|row| has(row.gid));
        match &self.source {
            GidSource::All => now.cloned().collect(),
            GidSource::Named(interface) => {
                now.filter(|row| row.interface == *interface).cloned().collect()
            }
            GidSource::Addresses(addresses) => {
                let now: Vec<&GidRow> = now.collect();
                let row = |ip: &IpAddr| now.iter().find(|row| row.gid == Gid::from(*ip));
                let own: Vec<&GidRow> = addresses.iter().filter_map(row).copied().collect();
                let has = |name: &str| own.iter().any(|row| row.interface == name);
                // The kernel's layout begins with the link-local GID of the interface.
                let first = now.iter().filter(|r| gids::is_link_local(r.gid) && has(&r.interface));
                first.chain(&own).map(|row| (*row).clone()).collect()
            }
        }
    }
}

/// The RoCE devices of the daemon.
#[derive(Debug, Default)]
pub(super) struct RoceDevices {
    /// In the order of their creation.
    list: Vec<RoceDevice>,
    /// Number of the `uverbs` file of the iWARP device: 0 if the profile describes this device,
    /// else the number after those of the configured RoCE devices. `None` until these exist.
    iwarp_uverbs: Option<u32>,
    /// Devices that patterns have created, including those that an administrator has removed.
    by_pattern: Vec<ByPattern>,
    /// The addresses of the host, as rows of a GID table, in the order in which they get indices.
    pub(super) addresses: Vec<GidRow>,
    /// The addresses of the host at the last read.
    pub(super) interfaces: Vec<Interface>,
    /// Addresses of 127.0.0.0/8 of devices, including removed devices, which programs may still
    /// use.
    pub(super) named: Vec<IpAddr>,
    /// The device tree must be updated.
    changed: bool,
    /// Last logged reason why the device of an interface could not be created.
    problem: String,
}

impl RoceDevices {
    /// Creates an empty list for a host with these addresses. `named` are the configured addresses
    /// of devices.
    pub(in crate::resource) fn new(
        config: &Config,
        interfaces: Vec<Interface>,
        named: Vec<IpAddr>,
    ) -> Self {
        let addresses = gids::table(config, &named, &interfaces);
        RoceDevices { addresses, interfaces, named, ..RoceDevices::default() }
    }

    /// Returns the lowest number that no `uverbs` file has.
    fn unused_uverbs(&self) -> u32 {
        let is_used = |n: u32| {
            self.iwarp_uverbs == Some(n) || self.list.iter().any(|device| device.uverbs == n)
        };
        (0..).find(|n| !is_used(*n)).unwrap_or_default()
    }
}
