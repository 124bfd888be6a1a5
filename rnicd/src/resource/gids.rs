//! The GID table of the daemon, with an entry for every address of this host that programs may use.
//! Each RoCE device shows a selection of it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use if_addrs::Interface;
use rnic_abi::abi::control::GidRow;
use rnic_abi::types::Gid;
use rnic_core::engine::DatagramPort;

use crate::config::{Config, Loopback};

/// Returns the GID table for these interfaces, or for the configured addresses. Addresses that
/// other hosts can reach come first, IPv4 before IPv6, and loopback addresses last.
pub fn table(config: &Config, found: &[Interface]) -> Vec<GidRow> {
    let named = &config.device.addresses;
    let addresses: Vec<IpAddr> = if named.is_empty() {
        found.iter().map(Interface::ip).filter(|ip| can_be_gid(*ip)).collect()
    } else {
        named.clone()
    };
    let mut rows = BTreeMap::new();
    for address in addresses {
        // All of 127.0.0.0/8 belongs to the loopback interface.
        let has_it = |i: &&Interface| i.ip() == address || address.is_loopback() && i.is_loopback();
        let interface = found.iter().find(has_it);
        let name = interface.map_or("", |i| &i.name);
        let row = GidRow {
            gid: Gid::from(address),
            interface: name.to_owned(),
            interface_index: interface.and_then(|i| i.index).unwrap_or(0),
            mtu: mtu(name),
        };
        let rank = (address.is_loopback(), address.is_ipv6(), row.interface_index);
        rows.insert((rank, row.gid), row);
    }
    rows.into_values().take(MOST).collect()
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

fn empty() -> GidRow {
    GidRow { gid: Gid::default(), interface: String::new(), interface_index: 0, mtu: 0 }
}

/// Returns the device's parameters for UD QPs: GIDs, MTU, UDP port and loopback path.
pub fn datagram_port(gids: &[GidRow], udp: u16, loopback: Loopback) -> Arc<DatagramPort> {
    let taken = gids.iter().filter(|row| !row.gid.is_zero());
    Arc::new(DatagramPort {
        gids: gids.iter().map(|row| row.gid).collect(),
        mtu: taken.map(GidRow::path_mtu).min().unwrap_or(0),
        udp,
        direct: loopback == Loopback::Direct,
    })
}

/// Returns true if this address can be a GID. A link-local address identifies no host without its
/// interface.
fn can_be_gid(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    }
}

/// Returns the MTU of an interface in bytes, or [`UNKNOWN_MTU`].
fn mtu(interface: &str) -> u32 {
    let said = std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu"));
    said.ok().and_then(|mtu| mtu.trim().parse().ok()).unwrap_or(UNKNOWN_MTU)
}

/// Maximum number of entries. The table must fit in one control message.
const MOST: usize = 64;

/// Assumed MTU if it cannot be read: that of Ethernet, in bytes.
const UNKNOWN_MTU: u32 = 1500;

#[cfg(test)]
mod tests {
    use super::*;

    fn row(last: u8) -> GidRow {
        GidRow { gid: Gid::from(IpAddr::from([192, 0, 2, last])), mtu: 1500, ..empty() }
    }

    #[test]
    fn configured_addresses_are_the_table() {
        let mut config = Config::default();
        assert_eq!(table(&config, &[]), []);
        let addresses: [IpAddr; 3] =
            [[127, 0, 0, 1].into(), [0, 0, 0, 0, 0, 0, 0, 1].into(), [192, 0, 2, 1].into()];
        config.device.addresses = addresses.to_vec();
        let gids: Vec<Gid> = table(&config, &[]).iter().map(|row| row.gid).collect();
        let [loopback, loopback_v6, other] = addresses.map(Gid::from);
        assert_eq!(gids, [other, loopback, loopback_v6]);
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
        let port = datagram_port(&[empty(), row(1)], 4791, Loopback::Direct);
        assert_eq!((port.mtu, port.gids.len()), (1024, 2));
    }
}
