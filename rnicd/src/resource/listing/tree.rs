//! Contents of `device.tree`.

use std::path::Path;

use rnic_abi::abi::control::{DeviceKind, GidRow, NO_GID};

use crate::resource::faults::Viewer;
use crate::resource::qp::Qp;
use crate::resource::{Manager, gids};
use crate::tree::{Facts, Port, Sums};

impl Manager {
    /// Returns the attributes of the devices.
    pub fn tree_facts(&self) -> Facts {
        let ports = self.devices_seen_by(Viewer::Files).into_iter().map(|row| {
            let roce = row.kind == DeviceKind::Roce;
            let gids = if roce {
                let own = self.gids_of(&row.name).iter().zip(&row.gids);
                own.map(|(own, index)| if *index == NO_GID { gids::empty() } else { own.clone() })
                    .collect()
            } else {
                // The iWARP device shows one GID, the first of the table.
                self.gids.iter().take(1).cloned().collect()
            };
            let profile = self.config.shown_profile(row.kind);
            let version = env!("CARGO_PKG_VERSION");
            Port {
                roce,
                guid: row.guid,
                vendor_id: row.vendor_id,
                part_id: row.vendor_part_id,
                hw_ver: self.config.hw_ver(),
                fw_ver: if profile.fw_ver.is_empty() { version.to_owned() } else { profile.fw_ver },
                link: (row.active_width, row.active_speed),
                uverbs: row.uverbs,
                gids,
                down: row.port_down,
                p_key: row.p_key,
                gid_v1: profile.gid_v1,
                name: row.name,
            }
        });
        Facts { image_guid: self.guid.number(), ports: ports.collect() }
    }

    /// Sets the path of the tree, which the device query reports.
    pub fn set_tree(&mut self, path: Option<&Path>) {
        self.tree = path.map(Path::to_owned);
    }

    /// Returns the sums of the QP counters of each device since the start.
    pub fn sums(&self) -> Vec<(String, Sums)> {
        let past = &self.records.past.devices;
        let of_past = |name: &str| past.get(name).cloned().unwrap_or_default();
        let mut sums: Vec<_> = self.device_names().map(|name| (name, of_past(name))).collect();
        // QPs of sessions that are being closed are not in `Totals` yet.
        for session in self.sessions.values().chain(self.leaving.values()) {
            for qp in session.qps.values() {
                let device = self.device_of(qp);
                if let Some((_, sum)) = sums.iter_mut().find(|(name, _)| *name == device) {
                    sum.add_qp(&qp.shared);
                }
            }
        }
        sums.into_iter().map(|(name, sum)| (name.to_owned(), sum.counters)).collect()
    }

    /// Returns the name of a QP's device, or an empty name if the device does not exist. If the
    /// program has not named the device, the QP belongs to the first device that has its GID, or
    /// else to the first device of its kind.
    pub(in crate::resource) fn device_of(&self, qp: &Qp) -> &str {
        if !qp.device.is_empty() {
            return self.device_names().find(|name| *name == qp.device).unwrap_or_default();
        }
        if !qp.kind.is_roce() {
            return &self.config.device.name;
        }
        let local = qp.rc.as_ref().map(|rc| rc.wiring.local);
        let has_gid = |gids: &[GidRow]| gids.iter().any(|row| Some(row.gid) == local);
        let with_gid = self.roce_gids().find(|(_, gids)| has_gid(gids));
        with_gid.or_else(|| self.roce_gids().next()).map_or("", |(name, _)| name)
    }

    /// Returns the names of all devices, the iWARP device first.
    fn device_names(&self) -> impl Iterator<Item = &str> {
        let roce = self.roce_gids().map(|(name, _)| name);
        std::iter::once(&*self.config.device.name).chain(roce)
    }

    /// Moves the counters of removed devices to the entry for QPs without a device.
    pub(in crate::resource) fn forget_removed_devices(&mut self) {
        let names: Vec<_> = self.device_names().map(str::to_owned).collect();
        self.records.past.retain_devices(|name| names.iter().any(|known| known == name));
    }
}
