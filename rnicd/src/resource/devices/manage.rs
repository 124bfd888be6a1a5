//! Creates and removes devices, and updates their GID tables when the host's addresses change.

use std::net::IpAddr;
use std::path::Path;

use rnic_abi::abi::control::{DeviceKind, DeviceRow, Event, GidRow, NO_GID};
use rnic_abi::roce::p_key::DEFAULT_P_KEY;
use rnic_abi::types::Gid;

use super::{ByPattern, DeviceError, RoceDevice};
use crate::config::{GidSource, Guid, MAX_ROCE_DEVICES, check_device, device_name};
use crate::resource::{Manager, gids};

impl Manager {
    /// Creates the configured devices.
    ///
    /// # Errors
    ///
    /// The first device that cannot be created, and why.
    pub fn create_devices(&mut self) -> Result<(), DeviceError> {
        let devices = self.config.wired.roce_devices();
        // Programs see the devices that the profile describes, so these come first.
        if self.config.wired.profile.keys.transport == DeviceKind::Iwarp {
            self.devices.iwarp_uverbs = Some(0);
        }
        for (pattern, source) in devices.iter() {
            if !each_interface(pattern, source) {
                self.create_device(device_name(pattern, source.interface(), 0), source.clone())?;
            }
        }
        self.try_create_devices_of_interfaces();
        let unused = self.devices.unused_uverbs();
        self.devices.iwarp_uverbs.get_or_insert(unused);
        Ok(())
    }

    /// Creates the devices of patterns for interfaces that have no such device yet. Logs the first
    /// error, unless the previous call had the same error. An error does not stop the daemon,
    /// because it depends on the number and the names of the host's interfaces.
    fn try_create_devices_of_interfaces(&mut self) {
        let Err(error) = self.create_devices_of_interfaces() else { return };
        let problem = error.to_string();
        if self.devices.problem != problem {
            tracing::warn!("{problem} (wired.devices)");
        }
        self.devices.problem = problem;
    }

    /// Creates the devices of patterns for interfaces that have no such device yet.
    ///
    /// # Errors
    ///
    /// The first device that cannot be created, and why. The others are created.
    fn create_devices_of_interfaces(&mut self) -> Result<(), DeviceError> {
        let devices = self.config.wired.roce_devices();
        let mut result = Ok(());
        for (pattern, source) in devices.iter() {
            if !each_interface(pattern, source) {
                continue;
            }
            for interface in self.interfaces() {
                let mut by_pattern = self.devices.by_pattern.iter();
                if by_pattern.any(|of| of.pattern == pattern && of.interface == interface) {
                    continue;
                }
                let name = self.unused_name(pattern, &interface);
                match self.create_device(name.clone(), GidSource::Named(interface.clone())) {
                    Ok(()) => {
                        let pattern = pattern.to_owned();
                        self.devices.by_pattern.push(ByPattern { pattern, interface, name });
                    }
                    Err(error) => result = result.and(Err(error)),
                }
            }
        }
        result
    }

    /// Returns the name of the next device of a pattern. Skips names that an administrator has
    /// given to other devices.
    fn unused_name(&self, pattern: &str, interface: &str) -> String {
        let has = |name: &String| self.devices.list.iter().any(|device| device.name == *name);
        let first = self.devices.by_pattern.iter().filter(|of| of.pattern == pattern).count();
        let mut names =
            (first..=first + MAX_ROCE_DEVICES).map(|n| device_name(pattern, interface, n));
        let taken = device_name(pattern, interface, first);
        names.find(|name| !has(name)).unwrap_or(taken)
    }

    /// Creates a device with the lowest unused `uverbs` number.
    pub(in crate::resource) fn create_device(
        &mut self,
        name: String,
        source: GidSource,
    ) -> Result<(), DeviceError> {
        check_device(&name).map_err(|why| DeviceError::BadName { name: name.clone(), why })?;
        let devices = &self.devices.list;
        if self.config.device.name == name || devices.iter().any(|device| device.name == name) {
            return Err(DeviceError::NameTaken(name));
        }
        if devices.len() >= MAX_ROCE_DEVICES {
            return Err(DeviceError::TooMany(name));
        }
        if let GidSource::Named(interface) = &source
            && !self.has_interface(interface)
        {
            let interface = interface.clone();
            return Err(DeviceError::NoInterface {
                name,
                interface,
                known: self.interfaces().join(", "),
            });
        }
        for &address in source.addresses() {
            let has = |device: &&RoceDevice| device.source.addresses().contains(&address);
            if let Some(other) = devices.iter().find(has) {
                let other = other.name.clone();
                return Err(DeviceError::AddressTaken { name, other, address });
            }
            if !self.has_address(address) {
                return Err(DeviceError::NoAddress { name, address });
            }
        }
        let has_gid = |ip: &&IpAddr| self.has_gid(Gid::from(**ip));
        let new = source.addresses().iter().filter(|ip| !has_gid(ip)).count();
        if self.gid_count() + new > gids::MOST {
            return Err(DeviceError::NoRoom(name));
        }
        let uverbs = self.devices.unused_uverbs();
        let guid = Guid::derived(&name, &self.guid.number().to_be_bytes());
        let interface = source.interface().to_owned();
        let named = &mut self.devices.named;
        let before = named.len();
        for address in source.addresses() {
            if !named.contains(address) && gids::is_alias(*address, &self.devices.interfaces) {
                named.push(*address);
            }
        }
        let has_more = named.len() > before;
        let mut device = RoceDevice { name, source, interface, guid, uverbs, gids: Vec::new() };
        device.follow(&self.gids, &self.devices.addresses);
        self.devices.list.push(device);
        if has_more {
            self.update_gids();
        }
        Ok(())
    }

    /// Removes the devices of patterns whose interfaces no longer exist, as the kernel's rxe does.
    /// Returns true if it has removed a device. An interface that is added again gets a new device.
    pub(in crate::resource) fn remove_devices_of_lost_interfaces(&mut self) -> bool {
        let by_pattern = std::mem::take(&mut self.devices.by_pattern);
        let (kept, lost): (Vec<_>, Vec<_>) =
            by_pattern.into_iter().partition(|of| self.has_interface(&of.interface));
        self.devices.by_pattern = kept;
        let devices = &mut self.devices.list;
        let before = devices.len();
        devices.retain(|device| {
            let is = |of: &ByPattern| of.name == device.name && of.interface == device.interface;
            !lost.iter().any(is)
        });
        before != devices.len()
    }

    /// Updates the GID tables of all devices, and creates the devices of new interfaces. Returns
    /// true if there are new devices.
    pub(in crate::resource) fn devices_follow(&mut self) -> bool {
        let devices = &mut self.devices;
        for device in &mut devices.list {
            device.follow(&self.gids, &devices.addresses);
        }
        let before = devices.list.len();
        self.try_create_devices_of_interfaces();
        before != self.devices.list.len()
    }

    /// Removes a device from the list. Returns false if there is no such RoCE device.
    pub(in crate::resource) fn delete_device(&mut self, name: &str) -> bool {
        let devices = &mut self.devices.list;
        let before = devices.len();
        devices.retain(|device| device.name != name);
        devices.len() < before
    }

    /// Returns true if devices were added or removed since the last call.
    pub fn take_changed_devices(&mut self) -> bool {
        std::mem::take(&mut self.devices.changed)
    }

    /// Requests an update of the device tree after a change of a device or its port.
    pub(in crate::resource) fn port_changed(&mut self) {
        self.devices.changed = true;
    }

    /// Notifies all sessions of a changed list of devices.
    pub(in crate::resource) fn announce_devices(&mut self) {
        self.devices.changed = true;
        self.forget_removed_devices();
        for session in self.sessions.values() {
            session.tell(&Event::DevicesChanged);
        }
    }

    /// Returns all devices: the RoCE devices in the order of their creation, then the iWARP device.
    pub(in crate::resource) fn device_rows(&self) -> Vec<DeviceRow> {
        let config = &self.config;
        let of_daemon = |row: &GidRow| {
            let found = self.gids.iter().position(|own| own.gid == row.gid && !row.gid.is_zero());
            found.and_then(|index| u16::try_from(index).ok()).unwrap_or(NO_GID)
        };
        let of_roce = config.shown_profile(DeviceKind::Roce);
        let of_iwarp = config.shown_profile(DeviceKind::Iwarp);
        let roce = self.devices.list.iter().map(|device| DeviceRow {
            name: device.name.clone(),
            kind: DeviceKind::Roce,
            guid: device.guid.number(),
            vendor_id: config.vendor_id(DeviceKind::Roce),
            vendor_part_id: config.vendor_part_id(DeviceKind::Roce),
            interface: device.interface.clone(),
            uverbs: device.uverbs,
            gids: device.gids.iter().map(of_daemon).collect(),
            port_down: false,
            p_key: DEFAULT_P_KEY,
            active_width: of_roce.active_width,
            active_speed: of_roce.active_speed,
        });
        let iwarp = DeviceRow {
            name: config.device.name.clone(),
            kind: DeviceKind::Iwarp,
            guid: self.guid.number(),
            vendor_id: config.vendor_id(DeviceKind::Iwarp),
            vendor_part_id: config.vendor_part_id(DeviceKind::Iwarp),
            interface: String::new(),
            uverbs: self.devices.iwarp_uverbs.unwrap_or_default(),
            gids: Vec::new(),
            port_down: false,
            p_key: DEFAULT_P_KEY,
            active_width: of_iwarp.active_width,
            active_speed: of_iwarp.active_speed,
        };
        roce.chain([iwarp]).collect()
    }

    /// Returns the names and GID tables of the RoCE devices.
    pub(in crate::resource) fn roce_gids(&self) -> impl Iterator<Item = (&str, &[GidRow])> {
        self.devices.list.iter().map(|device| (&*device.name, &*device.gids))
    }

    /// Returns the GID table of a device.
    pub(in crate::resource) fn gids_of(&self, name: &str) -> &[GidRow] {
        let device = self.devices.list.iter().find(|device| device.name == name);
        device.map_or(&[], |device| &device.gids)
    }

    /// Returns the interfaces that have addresses other than link-local ones, in the order of the
    /// GID table.
    fn interfaces(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for GidRow { gid, interface, .. } in &self.devices.addresses {
            if !gids::is_link_local(*gid) && !interface.is_empty() && !all.contains(interface) {
                all.push(interface.clone());
            }
        }
        all
    }

    /// Returns true if the host has this interface, with or without addresses.
    fn has_interface(&self, name: &str) -> bool {
        self.devices.addresses.iter().any(|row| row.interface == name)
            || Path::new("/sys/class/net").join(name).is_dir()
            // Without the list of addresses, the daemon cannot check the name.
            || !self.gids_problem.is_empty()
    }

    /// Returns true if an address can be a GID of this daemon.
    fn has_address(&self, address: IpAddr) -> bool {
        let table = &self.devices.addresses;
        table.iter().any(|row| row.gid == Gid::from(address))
            || self.config.device.addresses.is_empty()
                && gids::is_alias(address, &self.devices.interfaces)
            || !self.gids_problem.is_empty()
    }
}

/// Returns true if each interface has a device by this pattern.
fn each_interface(pattern: &str, source: &GidSource) -> bool {
    *source == GidSource::All && (pattern.contains("{n}") || pattern.contains("{netdev}"))
}
