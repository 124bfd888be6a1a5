//! The GID table of the daemon, with an entry for every address of this host that programs may use.
//! Each RoCE device shows a selection of it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use if_addrs::Interface;
use rnic_abi::abi::control::GidRow;
use rnic_abi::types::Gid;
use rnic_core::engine::{DatagramPort, PortChanges};

use crate::config::{Config, GidLayout, Loopback};

/// Returns the GID table for these interfaces, or for the configured addresses. Addresses that
/// other hosts can reach come first, IPv4 before IPv6, and loopback addresses last. A profile may
/// have the kernel's order, with link-local GIDs. `of_devices` are addresses that devices name.
pub fn table(config: &Config, of_devices: &[IpAddr], found: &[Interface]) -> Vec<GidRow> {
    let named = &config.device.addresses;
    let addresses: Vec<IpAddr> = if named.is_empty() {
        let aliases = of_devices.iter().copied().filter(|ip| is_alias(*ip, found));
        found.iter().map(Interface::ip).filter(|ip| can_be_gid(*ip)).chain(aliases).collect()
    } else {
        named.clone()
    };
    let is_kernels = config.wired.profile.keys.gid_layout != GidLayout::Addresses;
    let mut rows = BTreeMap::new();
    for address in addresses {
        // All of 127.0.0.0/8 belongs to the loopback interface.
        let has_it = |i: &&Interface| i.ip() == address || address.is_loopback() && i.is_loopback();
        let row = row(address, found.iter().find(has_it));
        let rank = if is_kernels {
            kernel_rank(&row, found)
        } else {
            (address.is_loopback(), address.is_ipv6().into(), row.interface_index)
        };
        rows.insert((rank, row.gid), row);
    }
    if is_kernels {
        for row in link_local_rows(named, found) {
            // Interfaces may have the same link-local address. The first one keeps it.
            if rows.values().all(|other| other.gid != row.gid) {
                rows.insert((kernel_rank(&row, found), row.gid), row);
            }
        }
        if rows.len() > MOST {
            // Other hosts cannot reach an interface that has only a link-local address.
            let has_others = |row: &GidRow| {
                rows.values().any(|o| o.interface == row.interface && !is_link_local(o.gid))
            };
            let kept = rows.iter().filter(|(_, row)| has_others(row));
            rows = kept.map(|(rank, row)| (*rank, row.clone())).collect();
        }
    }
    rows.into_values().take(MOST).collect()
}

/// Returns true for an address of 127.0.0.0/8, all of which belongs to the loopback interface.
pub fn is_alias(address: IpAddr, found: &[Interface]) -> bool {
    address.is_ipv4() && address.is_loopback() && found.iter().any(Interface::is_loopback)
}

fn row(address: IpAddr, interface: Option<&Interface>) -> GidRow {
    let name = interface.map_or("", |i| &i.name);
    GidRow {
        gid: Gid::from(address),
        interface: name.to_owned(),
        interface_index: interface.and_then(|i| i.index).unwrap_or(0),
        mtu: mtu(name),
    }
}

/// Returns the sort key of a row. Sorts by interface, loopback last, and within an interface as the
/// kernel does: link-local, then IPv4, then IPv6.
fn kernel_rank(row: &GidRow, found: &[Interface]) -> (bool, u32, u32) {
    let address = row.gid.address();
    let is_loopback = found.iter().any(|i| i.name == row.interface && i.is_loopback());
    let class = if is_link_local(row.gid) { 0 } else { 1 + u32::from(address.is_ipv6()) };
    (is_loopback || address.is_loopback(), row.interface_index, class)
}

/// Returns a row with a link-local GID for each interface: its first link-local address, or an
/// address derived from its MAC address, which is valid only within the daemon. If `named` is not
/// empty, only interfaces with one of these addresses have a row.
fn link_local_rows(named: &[IpAddr], found: &[Interface]) -> Vec<GidRow> {
    let mut rows: Vec<GidRow> = Vec::new();
    for interface in found {
        let of_it = || found.iter().filter(|i| i.name == interface.name);
        let is_named = named.is_empty() || of_it().any(|i| named.contains(&i.ip()));
        if !is_named || rows.iter().any(|row| row.interface == interface.name) {
            continue;
        }
        let own = of_it().map(Interface::ip).find(|ip| is_link_local(Gid::from(*ip)));
        let own = own.filter(|ip| named.is_empty() || named.contains(ip));
        let address = own.unwrap_or_else(|| eui_64(mac(interface)).into());
        rows.push(row(address, Some(interface)));
    }
    rows
}

/// Returns the link-local GIDs that are not addresses of this host, and are valid only within the
/// daemon.
pub fn internal(rows: &[GidRow], found: &[Interface]) -> Vec<Gid> {
    let is_own = |gid: Gid| found.iter().any(|i| i.ip() == gid.address());
    let link_local = rows.iter().map(|row| row.gid).filter(|gid| is_link_local(*gid));
    link_local.filter(|gid| !is_own(*gid)).collect()
}

/// Returns true for an IPv6 link-local address.
pub fn is_link_local(gid: Gid) -> bool {
    matches!(gid.address(), IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Returns the MAC address of an interface. If it cannot be read, returns the interface index, or
/// zero for a loopback interface.
fn mac(interface: &Interface) -> [u8; 6] {
    let index = if interface.is_loopback() { 0 } else { interface.index.unwrap_or(0) };
    let [_, _, high, low] = index.to_be_bytes();
    let path = format!("/sys/class/net/{}/address", interface.name);
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let bytes: Vec<u8> =
        text.trim().split(':').filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes.try_into().unwrap_or([0, 0, 0, 0, high, low])
}

/// Returns the link-local address with the modified EUI-64 of a MAC address (RFC 4291, appendix A).
fn eui_64([a, b, c, d, e, f]: [u8; 6]) -> Ipv6Addr {
    let of = |high, low| u16::from_be_bytes([high, low]);
    Ipv6Addr::new(0xfe80, 0, 0, 0, of(a ^ 2, b), of(c, 0xff), of(0xfe, d), of(e, f))
}

/// Updates `table`. Entries keep their index: the entry of a removed address becomes empty, and a
/// new address takes the first empty entry.
pub fn update(table: &mut Vec<GidRow>, now: Vec<GidRow>) {
    for row in table.iter_mut() {
        match now.iter().find(|new| new.gid == row.gid) {
            Some(new) => row.clone_from(new),
            None => *row = empty(),
        }
    }
    for new in now {
        if table.iter().any(|row| row.gid == new.gid) {
            continue;
        }
        match table.iter().position(|row| row.gid.is_zero()) {
            Some(index) => table[index] = new,
            None if table.len() < MOST => table.push(new),
            None => {}
        }
    }
}

/// Returns an empty entry.
pub fn empty() -> GidRow {
    GidRow { gid: Gid::default(), interface: String::new(), interface_index: 0, mtu: 0 }
}

/// Returns the device's parameters for UD QPs: GIDs, MTU, UDP port and loopback path.
pub fn datagram_port(
    gids: &[GidRow],
    without_socket: &[Gid],
    udp: u16,
    loopback: Loopback,
) -> Arc<DatagramPort> {
    let taken = gids.iter().filter(|row| !row.gid.is_zero());
    Arc::new(DatagramPort {
        gids: gids.iter().map(|row| row.gid).collect(),
        mtu: taken.map(GidRow::path_mtu).min().unwrap_or(0),
        udp,
        direct: loopback == Loopback::Direct,
        internal: without_socket.to_vec(),
        changes: PortChanges::default(),
    })
}

/// Returns true if this address can be a GID in every layout. A link-local address does not
/// identify a host without the interface. The kernel's layout adds one for each interface
/// ([`link_local_rows`]).
fn can_be_gid(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    }
}

/// Returns the MTU of an interface in bytes, or [`UNKNOWN_MTU`].
fn mtu(interface: &str) -> u32 {
    let text = std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu"));
    text.ok().and_then(|mtu| mtu.trim().parse().ok()).unwrap_or(UNKNOWN_MTU)
}

/// Maximum number of entries. The table must fit in one control message.
pub const MOST: usize = 64;

/// MTU of Ethernet in bytes, assumed for an interface whose MTU cannot be read.
const UNKNOWN_MTU: u32 = 1500;

#[cfg(test)]
mod tests {
    use if_addrs::{IfAddr, IfOperStatus, Ifv4Addr, Ifv6Addr};

    use super::*;

    fn row(last: u8) -> GidRow {
        GidRow { gid: Gid::from(IpAddr::from([192, 0, 2, last])), mtu: 1500, ..empty() }
    }

    #[test]
    fn configured_addresses_are_the_table() {
        let mut config = Config::default();
        assert_eq!(table(&config, &[], &[]), []);
        let addresses: [IpAddr; 3] =
            [[127, 0, 0, 1].into(), [0, 0, 0, 0, 0, 0, 0, 1].into(), [192, 0, 2, 1].into()];
        config.device.addresses = addresses.to_vec();
        let gids: Vec<Gid> = table(&config, &[], &[]).iter().map(|row| row.gid).collect();
        let [loopback, loopback_v6, other] = addresses.map(Gid::from);
        assert_eq!(gids, [other, loopback, loopback_v6]);
    }

    #[test]
    fn loopback_has_all_of_its_prefix() {
        let named: [IpAddr; 2] = [[127, 0, 0, 9].into(), [192, 0, 2, 9].into()];
        let shown = |config: &Config, found: &[Interface]| -> Vec<String> {
            let rows = table(config, &named, found);
            rows.iter().map(|row| format!("{} {}", row.gid.address(), row.interface)).collect()
        };
        let mut config = Config::default();
        let found = [interface("no-such-lo", 1, "127.0.0.1")];
        assert_eq!(shown(&config, &found), ["127.0.0.1 no-such-lo", "127.0.0.9 no-such-lo"]);
        assert_eq!(shown(&config, &[interface("no-such-a", 2, "192.0.2.1")]).len(), 1);
        config.device.addresses = vec!["127.0.0.1".parse().unwrap()];
        assert_eq!(shown(&config, &found), ["127.0.0.1 no-such-lo"]);
    }

    fn interface(name: &str, index: u32, ip: &str) -> Interface {
        let addr = match ip.parse().unwrap() {
            IpAddr::V4(ip) => {
                IfAddr::V4(Ifv4Addr { ip, netmask: ip, prefixlen: 32, broadcast: None })
            }
            IpAddr::V6(ip) => {
                IfAddr::V6(Ifv6Addr { ip, netmask: ip, prefixlen: 128, broadcast: None })
            }
        };
        Interface {
            name: name.to_owned(),
            addr,
            index: Some(index),
            oper_status: IfOperStatus::Up,
            is_p2p: false,
        }
    }

    #[test]
    fn kernel_has_link_local_then_ipv4() {
        let mut config = Config::default();
        config.wired.profile.keys.gid_layout = GidLayout::Kernel;
        let found = [
            interface("no-such-lo", 1, "127.0.0.1"),
            interface("no-such-lo", 1, "::1"),
            interface("no-such-a", 3, "2001:db8::1"),
            interface("no-such-a", 3, "192.0.2.1"),
            interface("no-such-b", 2, "fe80::7"),
            interface("no-such-b", 2, "192.0.2.2"),
        ];
        let rows = table(&config, &[], &found);
        let shown: Vec<String> = rows.iter().map(|row| row.gid.address().to_string()).collect();
        let expected = [
            "fe80::7",
            "192.0.2.2",
            // The MAC address cannot be read.
            "fe80::200:ff:fe00:3",
            "192.0.2.1",
            "2001:db8::1",
            "fe80::200:ff:fe00:0",
            "127.0.0.1",
            "::1",
        ];
        assert_eq!(shown, expected);
        assert_eq!(internal(&rows, &found), [rows[2].gid, rows[5].gid]);
        assert_eq!(rows[2].interface, "no-such-a");
        config.device.addresses = vec!["192.0.2.1".parse().unwrap()];
        let shown: Vec<_> =
            table(&config, &[], &found).iter().map(|row| row.gid.address()).collect();
        assert_eq!(shown, [rows[2].gid.address(), rows[3].gid.address()]);
    }

    #[test]
    fn indices_are_stable() {
        let mut table = vec![row(1), row(2), row(3)];
        update(&mut table, vec![row(1), row(3)]);
        assert_eq!(table, [row(1), empty(), row(3)]);
        // The first empty entry is reused, then the table grows.
        update(&mut table, vec![row(4), row(5), row(3), row(1)]);
        assert_eq!(table, [row(1), row(4), row(3), row(5)]);
        let wider = GidRow { mtu: 9000, ..row(4) };
        update(&mut table, vec![row(1), wider.clone(), row(3), row(5)]);
        assert_eq!(table[1], wider);
    }

    #[test]
    fn the_table_is_bounded() {
        let mut table = Vec::new();
        update(&mut table, (0..=255).map(row).collect());
        assert_eq!(table.len(), MOST);
        update(&mut table, Vec::new());
        assert_eq!(table, vec![empty(); MOST]);
    }

    #[test]
    fn empty_entries_have_no_mtu() {
        let port = datagram_port(&[empty(), row(1)], &[], 4791, Loopback::Direct);
        assert_eq!((port.mtu, port.gids.len()), (1024, 2));
    }
}
