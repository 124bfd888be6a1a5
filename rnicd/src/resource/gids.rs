//! The table of GIDs: one for every address of this host that programs may use.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use rnic_core::abi::control::GidRow;
use rnic_core::engine::DatagramPort;
use rnic_core::types::Gid;

use crate::config::{Config, Loopback};

/// The table as the interfaces are now, or as the configuration has it. Addresses that others reach
/// come first, IPv4 before IPv6; those of the loopback are last. Threads that are confined cannot
/// ask for it.
pub fn table(config: &Config) -> Vec<GidRow> {
    let found = if_addrs::get_if_addrs().unwrap_or_default();
    let named = &config.device.addresses;
    let addresses: Vec<IpAddr> = match named.is_empty() {
        true => found.iter().map(if_addrs::Interface::ip).filter(|ip| names_a_host(*ip)).collect(),
        false => named.clone(),
    };
    let mut rows = BTreeMap::new();
    for address in addresses {
        // The whole of 127.0.0.0/8 is the loopback's.
        let has_it = |i: &&if_addrs::Interface| {
            i.ip() == address || address.is_loopback() && i.is_loopback()
        };
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

/// The ports of the device, as datagrams use them.
pub fn datagram_port(gids: &[GidRow], udp: u16, loopback: Loopback) -> Arc<DatagramPort> {
    Arc::new(DatagramPort {
        gids: gids.iter().map(|row| row.gid).collect(),
        mtu: gids.iter().map(GidRow::path_mtu).min().unwrap_or(0),
        udp,
        direct: loopback == Loopback::Direct,
    })
}

/// Whether an address can be a port's: link-local ones name no host without an interface.
fn names_a_host(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    }
}

/// Bytes of a packet on an interface.
fn mtu(interface: &str) -> u32 {
    let said = std::fs::read_to_string(format!("/sys/class/net/{interface}/mtu"));
    said.ok().and_then(|mtu| mtu.trim().parse().ok()).unwrap_or(UNKNOWN_MTU)
}

/// Entries of the table, which has to fit a message.
const MOST: usize = 64;

/// That of Ethernet.
const UNKNOWN_MTU: u32 = 1500;
