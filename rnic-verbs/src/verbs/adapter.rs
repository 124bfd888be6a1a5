//! A device of the daemon, as `ibv_get_device_list(3)` returns it.

use std::ffi::c_char;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rnic_client::{DeviceAttributes, DeviceKind, DeviceRow, Gid, GidRow, NO_GID};

use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::{Foreign, Kind, add, remove, zeroed};
use crate::verbs::device_table::Tables;
use crate::verbs::limits::Limits;

/// A device. It stays usable after the daemon has removed it.
pub(crate) struct Adapter {
    row: DeviceRow,
    limits: Limits,
    block: Box<DeviceBlock>,
    /// Default objects for ids.
    pub(crate) defaults: Defaults,
    /// GID table of the device, and the daemon's tables from which it was made.
    gids: Mutex<Option<(Arc<Tables>, Arc<Gids>)>>,
    /// The device was unplugged. A later device of the same name is a different device.
    unplugged: AtomicBool,
}

/// Default objects of one device, for programs that use ids without creating their own. Null until
/// first used.
pub(crate) struct Defaults {
    pub(crate) context: Mutex<Foreign<c::ibv_context>>,
    pub(crate) pd: Mutex<Foreign<c::ibv_pd>>,
}

/// The C structure of a device, followed by padding. Provider libraries recognise their own devices
/// by a pointer at offset 664, after the structure, and read it for any device. The padding makes
/// it readable, and zeros match no provider.
#[repr(C, align(32))]
struct DeviceBlock {
    device: c::ibv_device,
    padding: [u64; 16],
}

// SAFETY: the block holds numbers, characters and null pointers, and is not written after
// construction.
unsafe impl Send for DeviceBlock {}
// SAFETY: as above.
unsafe impl Sync for DeviceBlock {}

impl Adapter {
    /// Creates a device of a daemon.
    pub(crate) fn new(row: DeviceRow, of: &DeviceAttributes) -> Arc<Adapter> {
        let limits = Limits::of(of, row.kind);
        let block = Box::new(DeviceBlock { device: head(&row, &of.tree), padding: [0; 16] });
        let defaults =
            Defaults { context: Mutex::new(Foreign::NULL), pd: Mutex::new(Foreign::NULL) };
        let adapter = Arc::new(Adapter {
            row,
            limits,
            block,
            defaults,
            gids: Mutex::default(),
            unplugged: AtomicBool::new(false),
        });
        add(Kind::Device, adapter.head().0.addr());
        adapter
    }

    /// Returns true if this row of the daemon describes the device.
    pub(crate) fn is(&self, row: &DeviceRow) -> bool {
        let own = &self.row;
        !self.is_unplugged()
            && (&own.name, own.uverbs, &own.interface) == (&row.name, row.uverbs, &row.interface)
    }

    /// Records that the device was unplugged.
    pub(crate) fn unplug(&self) {
        self.unplugged.store(true, Ordering::Release);
    }

    pub(crate) fn is_unplugged(&self) -> bool {
        self.unplugged.load(Ordering::Acquire)
    }

    /// Checks that the device is present.
    ///
    /// # Errors
    ///
    /// `EIO` if it was unplugged. The kernel's uverbs returns the same error for all verbs that do
    /// not destroy an object.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Errno> {
        if !self.is_unplugged() {
            return Ok(());
        }
        Err(errno!(libc::EIO, "device {} was removed", self.row.name))
    }

    pub(crate) fn name(&self) -> &str {
        &self.row.name
    }

    pub(crate) fn kind(&self) -> DeviceKind {
        self.row.kind
    }

    /// Returns true if the addresses of only one interface are GIDs of the device.
    pub(crate) fn has_one_interface(&self) -> bool {
        !self.row.interface.is_empty()
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the description of the device when the library first saw it.
    pub(crate) fn row(&self) -> &DeviceRow {
        &self.row
    }

    /// Returns the 64-bit GUID, in network byte order.
    pub(crate) fn guid(&self) -> u64 {
        self.row.guid.to_be()
    }

    /// Returns the C structure.
    pub(crate) fn head(&self) -> Foreign<c::ibv_device> {
        Foreign(std::ptr::from_ref(&self.block.device).cast_mut())
    }

    /// Returns the GID table of the device. If the daemon has removed the device, returns the last
    /// table, without GIDs that the daemon no longer has.
    pub(crate) fn gids(&self, tables: &Arc<Tables>) -> Arc<Gids> {
        let mut known = self.gids.lock();
        let row = tables.devices.iter().find(|row| self.is(row));
        let of_daemon = match (&*known, row) {
            (Some((of, gids)), _) if Arc::ptr_eq(of, tables) => return gids.clone(),
            (_, Some(row)) => row.gids.clone(),
            (Some((_, last)), None) => last.remaining(&tables.gids),
            (None, None) => self.row.gids.clone(),
        };
        let has_v1 = self.limits.profile.gid_v1;
        let gids = Arc::new(Gids::new(&of_daemon, &tables.gids, has_v1));
        *known = Some((tables.clone(), gids.clone()));
        gids
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        remove(Kind::Device, self.head().0.addr());
    }
}

/// The GID table of a device.
#[derive(Default)]
pub(crate) struct Gids {
    /// A row with a zero GID is empty.
    rows: Vec<GidRow>,
    /// Index of each row in the daemon's table, or [`NO_GID`].
    of_daemon: Vec<u16>,
    /// Each GID of the daemon has two rows: RoCE v1, then RoCE v2.
    has_v1: bool,
}

impl Gids {
    fn new(of_daemon: &[u16], table: &[GidRow], has_v1: bool) -> Self {
        let rows = if has_v1 { 2 } else { 1 };
        let of_daemon: Vec<u16> =
            of_daemon.iter().flat_map(|index| std::iter::repeat_n(*index, rows)).collect();
        let row = |index: &u16| table.get(usize::from(*index)).cloned().unwrap_or_else(empty_gid);
        Gids { rows: of_daemon.iter().map(row).collect(), of_daemon, has_v1 }
    }

    /// Returns true if the GID with this index is a RoCE v1 GID. QPs treat it like the RoCE v2 GID
    /// that follows it.
    pub(crate) fn is_v1(&self, index: u32) -> bool {
        self.has_v1 && index.is_multiple_of(2)
    }

    /// Returns the indices in the daemon's table. An index with another GID in `table` is empty.
    fn remaining(&self, table: &[GidRow]) -> Vec<u16> {
        let same = |index: u16, row: &GidRow| {
            table.get(usize::from(index)).is_some_and(|now| now.gid == row.gid)
        };
        let all = self.of_daemon.iter().zip(&self.rows).step_by(if self.has_v1 { 2 } else { 1 });
        all.map(|(index, row)| if same(*index, row) { *index } else { NO_GID }).collect()
    }

    /// Returns the index in the daemon's table of the GID with this index.
    pub(crate) fn to_daemon(&self, index: u8) -> u16 {
        self.of_daemon.get(usize::from(index)).copied().unwrap_or(NO_GID)
    }

    /// Returns the index of the GID that has this index in the daemon's table. If the GID has two
    /// indices, returns the index of the RoCE v2 GID.
    pub(crate) fn of_daemon(&self, index: u16) -> Option<u16> {
        let at = self.of_daemon.iter().rposition(|own| *own == index && index != NO_GID)?;
        u16::try_from(at).ok()
    }
}

/// Returns an empty entry of a GID table.
pub(crate) fn empty_gid() -> GidRow {
    GidRow { gid: Gid::default(), interface: String::new(), interface_index: 0, mtu: 0 }
}

impl std::ops::Deref for Gids {
    type Target = [GidRow];

    fn deref(&self) -> &[GidRow] {
        &self.rows
    }
}

fn head(row: &DeviceRow, tree: &str) -> c::ibv_device {
    let mut device: c::ibv_device = zeroed();
    (device.node_type, device.transport_type) = match row.kind {
        DeviceKind::Iwarp => (c::IBV_NODE_RNIC, c::IBV_TRANSPORT_IWARP),
        DeviceKind::Roce => (c::IBV_NODE_CA, c::IBV_TRANSPORT_IB),
    };
    // The file names follow the kernel's `uverbs` devices.
    let name = &row.name;
    let file = format!("uverbs{}", row.uverbs);
    copy_name(&mut device.name, name);
    copy_name(&mut device.dev_name, &file);
    let tree = if tree.is_empty() { "/sys" } else { tree };
    copy_name(&mut device.dev_path, &format!("{tree}/class/infiniband_verbs/{file}"));
    copy_name(&mut device.ibdev_path, &format!("{tree}/class/infiniband/{name}"));
    device
}

/// Copies a name into a C field. Truncates it if necessary, so that a zero byte ends it.
pub(crate) fn copy_name(field: &mut [c_char], name: &str) {
    let bytes = name.bytes().take(field.len().saturating_sub(1));
    for (to, from) in field.iter_mut().zip(bytes) {
        *to = from as c_char;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::IpAddr;

    use rnic_client::Profile;

    use super::*;

    fn gid_row(last: u8) -> GidRow {
        let gid = Gid::from(IpAddr::from([192, 0, 2, last]));
        GidRow { gid, interface: "eth0".to_owned(), interface_index: 2, mtu: 1500 }
    }

    fn row(gids: Vec<u16>) -> DeviceRow {
        DeviceRow {
            name: "rxe0".to_owned(),
            kind: DeviceKind::Roce,
            guid: 1,
            vendor_id: 0,
            vendor_part_id: 0,
            interface: "eth0".to_owned(),
            uverbs: 1,
            gids,
            port_down: false,
            p_key: 0xffff,
            active_width: 2,
            active_speed: 32,
        }
    }

    /// Returns the attributes of a daemon with large limits.
    pub(crate) fn attributes() -> DeviceAttributes {
        DeviceAttributes {
            name: String::new(),
            version: String::new(),
            max_qps: 1,
            max_wr_depth: 1 << 16,
            max_sge: 16,
            max_inline: 4096,
            max_cqs: 1,
            max_cq_entries: 1 << 18,
            max_mrs: 1,
            max_shared_bytes: 1,
            max_pds: 1,
            max_ird: 128,
            max_ord: 128,
            direct_path: true,
            max_windows: 1,
            max_srqs: 1,
            hw_ver: 0,
            guid: 1,
            max_srq_wr: 1 << 16,
            max_backlog: 1,
            devices: Vec::new(),
            tree: String::new(),
            profile: Profile::default(),
        }
    }

    #[test]
    fn profile_is_shown_by_its_devices_only() {
        let profile = Profile {
            max_sge_rd: 3,
            max_ah: 7,
            gid_tbl_len: 1024,
            max_srq_sge: 2,
            ..Profile::default()
        };
        let has = DeviceAttributes { profile: profile.clone(), max_srqs: 0, ..attributes() };
        let roce = Limits::of(&has, DeviceKind::Roce);
        assert_eq!((roce.sge_rd, roce.srq_wr, &roce.profile), (3, 0, &profile));
        let iwarp = Limits::of(&has, DeviceKind::Iwarp);
        assert_eq!((iwarp.sge_rd, iwarp.profile.gid_tbl_len), (1, 1));
        // The daemon checks the limits of objects, whatever device creates them.
        assert_eq!(iwarp.profile.max_srq_sge, 2);
    }

    #[test]
    fn each_gid_has_a_v1_and_a_v2_index() {
        let has = DeviceAttributes {
            profile: Profile { gid_v1: true, ..Profile::default() },
            ..attributes()
        };
        let adapter = Adapter::new(row(Vec::new()), &has);
        let gids: Vec<GidRow> = (0..4).map(gid_row).collect();
        let devices = vec![row(vec![3, NO_GID, 1])];
        let shown = adapter.gids(&Arc::new(Tables { devices, gids: gids.clone() }));
        assert_eq!((&shown[0], &shown[1], &shown[5]), (&gids[3], &gids[3], &gids[1]));
        assert_eq!([0, 1, 4].map(|n| shown.is_v1(n)), [true, false, true]);
        assert_eq!([0, 1, 2].map(|n| shown.to_daemon(n)), [3, 3, NO_GID]);
        assert_eq!([3, 1].map(|n| shown.of_daemon(n)), [Some(1), Some(5)]);
        // A removed device keeps its indices.
        let after = adapter.gids(&Arc::new(Tables { devices: Vec::new(), gids }));
        assert_eq!((after.len(), after.to_daemon(5)), (6, 1));
    }

    #[test]
    fn device_selects_rows_of_the_daemon() {
        let adapter = Adapter::new(row(Vec::new()), &attributes());
        let gids: Vec<GidRow> = (0..4).map(gid_row).collect();
        let devices = vec![row(vec![3, NO_GID, 1])];
        let tables = Arc::new(Tables { devices, gids: gids.clone() });
        let shown = adapter.gids(&tables);
        assert_eq!((&shown[0], &shown[2]), (&gids[3], &gids[1]));
        assert!(shown[1].gid.is_zero());
        assert_eq!(
            (shown.to_daemon(0), shown.to_daemon(1), shown.to_daemon(9)),
            (3, NO_GID, NO_GID)
        );
        assert_eq!([3, 1, 0, NO_GID].map(|n| shown.of_daemon(n)), [Some(0), Some(2), None, None]);
        // A removed device keeps its indices, but gets no new GID.
        let mut gids = gids;
        gids[1] = gid_row(9);
        let after = adapter.gids(&Arc::new(Tables { devices: Vec::new(), gids }));
        assert_eq!([0, 2].map(|n| after.to_daemon(n)), [3, NO_GID]);
        assert!(after[2].gid.is_zero());
    }
}
