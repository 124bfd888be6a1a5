//! What the tree of the devices shows.

use std::path::Path;

use rnic_core::types::QpType;

use crate::resource::Manager;
use crate::tree::{Facts, Port, Sums};

impl Manager {
    /// What does not change.
    pub fn tree_facts(&self) -> Facts {
        let (device, wired) = (&self.config.device, &self.config.wired);
        let guid = self.guid.number();
        let connects = Port {
            name: device.name.clone(),
            wired: false,
            guid,
            vendor_id: device.vendor_id,
            part_id: device.vendor_part_id,
            hw_ver: device.hw_ver,
            gids: self.gids.iter().take(1).cloned().collect(),
        };
        let by_hand = Port {
            name: wired.name.clone(),
            wired: true,
            // As the library tells them apart.
            guid: guid ^ 1,
            vendor_id: wired.vendor_id,
            part_id: wired.vendor_part_id,
            hw_ver: device.hw_ver,
            gids: self.gids.clone(),
        };
        Facts { version: env!("CARGO_PKG_VERSION").to_owned(), ports: [connects, by_hand] }
    }

    /// Programs are told where it is.
    pub fn set_tree(&mut self, path: Option<&Path>) {
        self.tree = path.map(Path::to_owned);
    }

    /// What the queue pairs of each device have counted since the start.
    pub fn sums(&self) -> [(&str, Sums); 2] {
        let mut sums = self.records.past().devices.clone();
        // Those that are being taken down have not been added to the past yet.
        for session in self.sessions.values().chain(self.leaving.values()) {
            for qp in session.qps.values() {
                sums[usize::from(qp.kind != QpType::Connected)].add_qp(&qp.shared);
            }
        }
        let [connects, by_hand] = sums.map(|done| done.counters());
        [(&self.config.device.name, connects), (&self.config.wired.name, by_hand)]
    }
}
