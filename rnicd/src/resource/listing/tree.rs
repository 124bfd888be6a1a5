//! Contents of `device.tree`.

use std::path::Path;

use rnic_abi::abi::control::{DeviceKind, NO_GID};
use rnic_abi::types::QpType;

use crate::resource::faults::Viewer;
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
                // The iWARP device has one GID, of the first address.
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

    /// Returns the sums of the QP counters of each device since the start. Those of a RoCE device
    /// are the sums of all RoCE devices, because the daemon does not know the device of a QP.
    pub fn sums(&self) -> Vec<(String, Sums)> {
        let mut sums = self.records.past.devices.clone();
        // QPs of sessions that are being closed are not in `Totals` yet.
        for session in self.sessions.values().chain(self.leaving.values()) {
            for qp in session.qps.values() {
                sums[usize::from(qp.kind != QpType::Iwarp)].add_qp(&qp.shared);
            }
        }
        let [iwarp, roce] = sums.map(|done| done.counters);
        let rows = self.device_rows().into_iter();
        let of = |kind| if kind == DeviceKind::Roce { roce } else { iwarp };
        rows.map(|row| (row.name, of(row.kind))).collect()
    }
}
