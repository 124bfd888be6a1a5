//! The files of the tree, as in the kernel's `/sys/class` and `/dev`.
//!
//! Each device has a folder below `devices`, with the attributes of a PCI device. `class` contains
//! links into these folders. Programs resolve `class/infiniband/NAME` and read the attributes of
//! the device from its parent folders. `views` contains the same links for some of the devices.

use std::collections::BTreeSet;
use std::fmt::Write;

use rnic_abi::abi::control::GidRow;
use rnic_abi::types::Gid;

use super::counters::{self, Sums, port_folder};
use super::view;

/// A file or a link of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Path below the root.
    pub path: String,
    pub what: Content,
}

/// Content of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A file with this text.
    File(String),
    /// A symbolic link with this target.
    Link(String),
    /// An empty folder.
    Folder,
}

/// Attributes of the daemon and its devices, for the tree.
pub struct Facts {
    /// GUID of the daemon, as a number in host byte order.
    pub image_guid: u64,
    /// All devices.
    pub ports: Vec<Port>,
}

/// Attributes of one device, which has one port.
pub struct Port {
    /// Device name.
    pub name: String,
    /// True for a RoCE device.
    pub roce: bool,
    /// Node GUID, as a number in host byte order.
    pub guid: u64,
    /// Vendor ID (24-bit OUI).
    pub vendor_id: u32,
    /// Part ID of the vendor.
    pub part_id: u32,
    /// Hardware version.
    pub hw_ver: u32,
    /// Firmware version.
    pub fw_ver: String,
    /// `active_width` and `active_speed` of `ibv_query_port(3)`.
    pub link: (u8, u8),
    /// Number of its `uverbs` file.
    pub uverbs: u32,
    /// GID table.
    pub gids: Vec<GidRow>,
    /// A fault rule has taken the port down for all users of this daemon.
    pub down: bool,
    /// Entry 0 of the P_Key table.
    pub p_key: u16,
    /// True if the files show each GID twice: as RoCE v1 and as RoCE v2.
    pub gid_v1: bool,
}

/// Returns all entries except folders.
pub(super) fn entries(facts: &Facts) -> Vec<Entry> {
    let shared = [
        file("class/infiniband_verbs/abi_version", "6"),
        // The tools of infiniband-diags read this file first.
        file("class/infiniband_mad/abi_version", "5"),
        // Programs and device plugins check that it exists. Only librdmacm opens it, and rnicd's
        // does not.
        link("dev/infiniband/rdma_cm", "/dev/null"),
    ];
    let devices: Vec<Vec<Entry>> = facts.ports.iter().map(|port| device(port, facts)).collect();
    let mut all = shared.to_vec();
    for (port, own) in facts.ports.iter().zip(&devices) {
        all.append(&mut view::of(&port.name, shared.iter().chain(own)));
    }
    let names = facts.ports.iter().map(|port| &*port.name);
    all.append(&mut view::of_sets(&shared, names.zip(&devices).collect()));
    let roce = facts.ports.iter().zip(&devices).filter(|(port, _)| port.roce);
    let roce = roce.flat_map(|(_, own)| own);
    all.append(&mut view::of(view::ROCE, shared.iter().chain(roce)));
    all.extend(devices.into_iter().flatten());
    all
}

/// Returns the entries of one device.
fn device(port: &Port, facts: &Facts) -> Vec<Entry> {
    let mut all = Vec::new();
    let name = &port.name;
    let number = port.uverbs;
    let at = format!("devices/rnicd/{name}");
    let node = format!("{at}/infiniband/{name}");
    // Attributes of a PCI device.
    for (what, value) in [
        ("vendor", format!("{:#06x}", port.vendor_id & 0xFFFF)),
        ("device", format!("{:#06x}", port.part_id & 0xFFFF)),
        ("class", "0x020000".to_owned()),
        ("numa_node", "-1".to_owned()),
    ] {
        all.push(file(&format!("{at}/{what}"), &value));
    }
    for (what, value) in [
        ("node_type", if port.roce { "1: CA" } else { "4: RNIC" }.to_owned()),
        ("node_guid", guid_text(port.guid)),
        ("sys_image_guid", guid_text(facts.image_guid)),
        ("node_desc", "rnicd".to_owned()),
        ("fw_ver", port.fw_ver.clone()),
        ("hw_rev", format!("{:#x}", port.hw_ver)),
        ("hca_type", "rnicd".to_owned()),
        ("board_id", "rnicd".to_owned()),
    ] {
        all.push(file(&format!("{node}/{what}"), &value));
    }
    all.push(link(&format!("{node}/device"), "../.."));
    all.push(link(&format!("class/infiniband/{name}"), &format!("../../{node}")));

    let uverbs = format!("uverbs{number}");
    let verbs = format!("{at}/infiniband_verbs/{uverbs}");
    all.push(file(&format!("{verbs}/ibdev"), name));
    all.push(file(&format!("{verbs}/abi_version"), "1"));
    // Device number that the kernel uses for uverbs devices.
    all.push(file(&format!("{verbs}/dev"), &format!("231:{}", 192 + number)));
    all.push(link(&format!("{verbs}/device"), "../.."));
    all.push(link(&format!("class/infiniband_verbs/{uverbs}"), &format!("../../{verbs}")));
    // Some programs check that the file is readable and writable. None reads or writes it.
    all.push(link(&format!("dev/infiniband/{uverbs}"), "/dev/null"));

    let at = port_folder(name);
    for (what, value) in [
        ("link_layer", "Ethernet"),
        ("lid", "0x0"),
        ("lid_mask_count", "0"),
        ("sm_lid", "0x0"),
        ("sm_sl", "0"),
        ("cap_mask", "0x04010000"),
    ] {
        all.push(file(&format!("{at}/{what}"), value));
    }
    all.extend(files_of_port(port));
    for (path, value) in counters::files(name, &Sums::default()) {
        let path = path.to_string_lossy().into_owned();
        all.push(Entry { path, what: Content::File(value) });
    }
    all
}

/// Returns the entries that change with a device: the attributes of its port, its interfaces, and
/// the files of its GID table. An empty entry of the table has a zero GID, no type and no
/// interface.
fn files_of_port(port: &Port) -> impl Iterator<Item = Entry> {
    let name = &port.name;
    let at = port_folder(name);
    let interfaces: BTreeSet<&str> = port
        .gids
        .iter()
        .map(|row| row.interface.as_str())
        .filter(|name| !name.is_empty())
        .collect();
    let (state, phys_state) =
        if port.down { ("1: DOWN", "3: Disabled") } else { ("4: ACTIVE", "5: LinkUp") };
    let states = [
        ("state", state.to_owned()),
        ("phys_state", phys_state.to_owned()),
        ("rate", rate(port.link)),
        ("pkeys/0", format!("{:#06x}", port.p_key)),
    ];
    let states = states.map(|(what, value)| file(&format!("{at}/{what}"), &value));
    let first = port.gids.iter().map(|row| row.interface.as_str()).find(|name| !name.is_empty());
    let parent = format!("devices/rnicd/{name}/infiniband/{name}/parent");
    let parent = file(&parent, first.unwrap_or_default());
    let folders = interfaces.into_iter().map(move |interface| Entry {
        path: format!("devices/rnicd/{name}/net/{interface}"),
        what: Content::Folder,
    });
    let kinds: &[&str] = if port.gid_v1 { &["IB/RoCE v1", "RoCE v2"] } else { &["RoCE v2"] };
    let rows = port.gids.iter().flat_map(move |row| kinds.iter().map(move |kind| (row, *kind)));
    let gids = rows.enumerate().flat_map(move |(index, (row, kind))| {
        let kind = if row.gid.is_zero() { "" } else { kind };
        let type_file = file(&format!("{at}/gid_attrs/types/{index}"), kind);
        [
            Some(file(&format!("{at}/gids/{index}"), &gid_text(row.gid))),
            port.roce.then_some(type_file),
            Some(file(&format!("{at}/gid_attrs/ndevs/{index}"), &row.interface)),
        ]
        .into_iter()
        .flatten()
    });
    folders.chain([parent]).chain(states).chain(gids)
}

/// Returns the entries of all devices that depend on addresses.
pub(super) fn files_of_addresses(facts: &Facts) -> impl Iterator<Item = Entry> {
    facts.ports.iter().flat_map(files_of_port)
}

/// Returns the rate of a link in the kernel's format, "100 Gb/sec (4X EDR)".
fn rate((width, speed): (u8, u8)) -> String {
    let lanes = match width {
        1 => 1,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 4,
    };
    // In units of 0.1 Gb/s.
    let (lane, name) = match speed {
        1 => (25, "SDR"),
        2 => (50, "DDR"),
        4 => (100, "QDR"),
        8 => (100, "FDR10"),
        16 => (140, "FDR"),
        64 => (500, "HDR"),
        128 => (1000, "NDR"),
        _ => (250, "EDR"),
    };
    let rate = lane * lanes;
    let tenths = if rate % 10 == 0 { String::new() } else { format!(".{}", rate % 10) };
    format!("{}{tenths} Gb/sec ({lanes}X {name})", rate / 10)
}

fn file(path: &str, line: &str) -> Entry {
    Entry { path: path.to_owned(), what: Content::File(format!("{line}\n")) }
}

fn link(path: &str, to: &str) -> Entry {
    Entry { path: path.to_owned(), what: Content::Link(to.to_owned()) }
}

/// Formats a GUID as four groups of four hex digits.
fn guid_text(guid: u64) -> String {
    let [a, b, c, d] = [48, 32, 16, 0].map(|shift| (guid >> shift) & 0xFFFF);
    format!("{a:04x}:{b:04x}:{c:04x}:{d:04x}")
}

/// Formats a GID as eight groups of four hex digits.
fn gid_text(gid: Gid) -> String {
    let mut text = String::new();
    for (at, pair) in gid.0.chunks(2).enumerate() {
        let between = if at == 0 { "" } else { ":" };
        // Writing to a string does not fail.
        let _ = write!(text, "{between}{:02x}{:02x}", pair[0], pair[1]);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn guids_and_gids_have_the_kernels_format() {
        assert_eq!(guid_text(0x0200_5e00_5301_0001), "0200:5e00:5301:0001");
        let gid = Gid::from(std::net::IpAddr::from(Ipv4Addr::new(192, 0, 2, 7)));
        assert_eq!(gid_text(gid), "0000:0000:0000:0000:0000:ffff:c000:0207");
    }

    #[test]
    fn rates_have_the_kernels_format() {
        assert_eq!(rate((2, 32)), "100 Gb/sec (4X EDR)");
        assert_eq!(rate((16, 64)), "100 Gb/sec (2X HDR)");
        assert_eq!(rate((1, 1)), "2.5 Gb/sec (1X SDR)");
    }

    #[test]
    fn each_gid_has_a_v1_and_a_v2_entry() {
        let mut port = ports().remove(1);
        port.gids = vec![GidRow {
            gid: Gid::from(std::net::IpAddr::from(Ipv4Addr::new(192, 0, 2, 7))),
            interface: "eth0".to_owned(),
            interface_index: 2,
            mtu: 1500,
        }];
        port.gid_v1 = true;
        let files: Vec<Entry> = files_of_port(&port).collect();
        let text = |path: &str| files.iter().find(|entry| entry.path.ends_with(path));
        let text = |path| text(path).map(|entry| entry.what.clone());
        let file = |line: &str| Some(Content::File(format!("{line}\n")));
        assert_eq!(text("types/0"), file("IB/RoCE v1"));
        assert_eq!(text("types/1"), file("RoCE v2"));
        assert_eq!(text("gids/0"), text("gids/1"));
        assert_eq!(text("types/2"), None);
    }

    #[test]
    fn views_have_one_device_or_the_roce_devices() {
        let all = entries(&Facts { image_guid: 1, ports: ports() });
        let view = |name| {
            let view = all.iter().filter_map(|entry| entry.path.strip_prefix(name));
            let mut view: Vec<&str> = view.collect();
            view.sort_unstable();
            view
        };
        let expected = [
            "class/infiniband/rnicd1",
            "class/infiniband_mad/abi_version",
            "class/infiniband_verbs/abi_version",
            "class/infiniband_verbs/uverbs0",
            "dev/infiniband/rdma_cm",
            "dev/infiniband/uverbs0",
            "devices",
        ];
        assert_eq!(view("views/rnicd1/"), expected);
        assert_eq!(view("views/.roce/"), expected);
    }

    #[test]
    fn sets_of_few_devices_have_views() {
        let names = |count: u32| {
            let port = |n| Port { name: format!("d{n}"), uverbs: n, ..ports().remove(1) };
            let all =
                entries(&Facts { image_guid: 1, ports: (0..count).rev().map(port).collect() });
            let views = all.iter().filter_map(|entry| entry.path.strip_prefix("views/"));
            let devices = views.filter_map(|path| path.split_once("/class/infiniband/"));
            let mut found: Vec<_> = devices
                .filter(|(view, _)| view.contains(','))
                .map(|(view, _)| view.to_owned())
                .collect();
            found.sort_unstable();
            found
        };
        assert_eq!(names(2), ["d0,d1"; 2]);
        assert_eq!(names(3).len(), 3 * 2 + 3);
        assert_eq!(names(5).len(), 5 * 16 - 5);
        assert_eq!(names(6), [""; 0]);
    }

    fn ports() -> Vec<Port> {
        let port = |name: &str, roce| Port {
            name: name.to_owned(),
            roce,
            guid: 1,
            vendor_id: 0x02_524e,
            part_id: 0,
            hw_ver: 0,
            fw_ver: "1".to_owned(),
            link: (2, 32),
            uverbs: u32::from(!roce),
            gids: Vec::new(),
            down: false,
            p_key: 0xffff,
            gid_v1: false,
        };
        vec![port("rnicd0", false), port("rnicd1", true)]
    }

    #[test]
    fn links_have_existing_targets() {
        let all = entries(&Facts { image_guid: 1, ports: ports() });
        let mut links = 0;
        for Entry { path, what } in &all {
            let Content::Link(to) = what else { continue };
            links += 1;
            if to.starts_with('/') {
                assert_eq!(to, "/dev/null");
                continue;
            }
            let mut at: Vec<&str> = path.split('/').collect();
            at.pop();
            // The folder `devices` of a view is a link to the real one.
            if at.len() > 2 && at[0] == "views" {
                at.drain(..2);
            }
            for part in to.split('/') {
                match part {
                    ".." => drop(at.pop()),
                    part => at.push(part),
                }
            }
            let folder = format!("{}/", at.join("/"));
            assert!(all.iter().any(|entry| entry.path.starts_with(&folder)), "{path} -> {to}");
        }
        assert_eq!(links, 2 * 12 + 10);
    }
}
