//! Contents of `device.tree`.

use std::path::Path;

use rnic_abi::types::QpType;

use crate::resource::Manager;
use crate::tree::{Facts, Port, Sums};

impl Manager {
    /// Returns the attributes of the devices.
    pub fn tree_facts(&self) -> Facts {
        let device = &self.config.device;
        let wired = &self.config.wired;
        let guid = self.guid.number();
        let iwarp = Port {
            name: device.name.clone(),
            roce: false,
            guid,
            vendor_id: device.vendor_id,
            part_id: device.vendor_part_id,
            hw_ver: device.hw_ver,
            gids: self.gids.iter().take(1).cloned().collect(),
        };
        let roce = Port {
            name: wired.name.clone(),
            roce: true,
            // The verbs library derives this GUID in the same way.
            guid: guid ^ 1,
            vendor_id: wired.vendor_id,
            part_id: wired.vendor_part_id,
            hw_ver: device.hw_ver,
            gids: self.gids.clone(),
        };
        Facts { version: env!("CARGO_PKG_VERSION").to_owned(), ports: [iwarp, roce] }
    }

    /// Sets the path of the tree, which the device query reports.
    pub fn set_tree(&mut self, path: Option<&Path>) {
        self.tree = path.map(Path::to_owned);
    }

    /// Returns the sums of the QP counters of each device since the start.
    pub fn sums(&self) -> [(&str, Sums); 2] {
        let mut sums = self.records.past.devices.clone();
        // QPs of sessions that are being closed are not in `Totals` yet.
        for session in self.sessions.values().chain(self.leaving.values()) {
            for qp in session.qps.values() {
                sums[usize::from(qp.kind != QpType::Iwarp)].add_qp(&qp.shared);
            }
        }
        let [iwarp, roce] = sums.map(|done| done.counters);
        [(&self.config.device.name, iwarp), (&self.config.wired.name, roce)]
    }
}
