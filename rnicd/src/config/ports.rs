//! `[ports]`: RDMA ports that use a different TCP port.
//!
//! An RDMA adapter has its own ports: a program may listen on TCP port 3260 and on RDMA port 3260.
//! Here both are TCP ports and would collide. A mapped RDMA port uses a different TCP port.
//! Programs, rules and lists always use the RDMA port.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;

/// TCP port of each RDMA port: the same number, unless the map contains a different one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortMap {
    /// TCP ports by RDMA port. No TCP port occurs twice or is an RDMA port of the map.
    tcp: BTreeMap<u16, u16>,
}

impl PortMap {
    /// Checks the map of the file. Its keys are texts, because TOML has no numbers as keys.
    pub(super) fn new(map: BTreeMap<String, u16>) -> Result<Self, String> {
        let mut tcp = BTreeMap::new();
        let mut taken = BTreeSet::new();
        for (key, port) in map {
            let rdma = key.parse::<u16>().ok().filter(|rdma| *rdma != 0);
            let rdma = rdma.ok_or_else(|| format!("{key:?} is not a port from 1 to 65535"))?;
            if port == 0 {
                return Err(format!("RDMA port {key} needs a TCP port from 1 to 65535, not 0"));
            }
            if !taken.insert(port) {
                return Err(format!("two RDMA ports cannot both use TCP port {port}"));
            }
            tcp.insert(rdma, port);
        }
        match tcp.values().find(|port| tcp.contains_key(port)) {
            Some(port) => {
                Err(format!("{port} is an RDMA port of the map and cannot be a TCP port"))
            }
            None => Ok(PortMap { tcp }),
        }
    }

    /// Converts an address with an RDMA port to the address with the TCP port.
    pub fn tcp_address(&self, named: SocketAddr) -> SocketAddr {
        with_port(named, self.tcp.get(&named.port()).copied())
    }

    /// Converts an address with a TCP port to the address with the RDMA port.
    pub fn named(&self, tcp_address: SocketAddr) -> SocketAddr {
        let mut all = self.tcp.iter();
        let named = all.find(|(_, tcp)| **tcp == tcp_address.port()).map(|(rdma, _)| *rdma);
        with_port(tcp_address, named)
    }
}

impl fmt::Display for PortMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> =
            self.tcp.iter().map(|(rdma, tcp)| format!("{rdma} -> {tcp}")).collect();
        f.write_str(if pairs.is_empty() { "-" } else { "" })?;
        f.write_str(&pairs.join(", "))
    }
}

fn with_port(mut address: SocketAddr, port: Option<u16>) -> SocketAddr {
    if let Some(port) = port {
        address.set_port(port);
    }
    address
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    fn ports(map: &str) -> Result<super::PortMap, String> {
        let text = format!("[ports]\nmap = {map}\n");
        let config = Config::parse(std::path::Path::new("t"), &text);
        config.map(|config| config.ports.map).map_err(|e| e.to_string())
    }

    #[test]
    fn mapped_ports_convert_both_ways() {
        let map = ports("{ 3260 = 13260, \"7\" = 10007 }").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(map.to_string(), "7 -> 10007, 3260 -> 13260");
        for (named, tcp_address) in [
            ("[::1]:3260", "[::1]:13260"),
            ("10.0.0.1:7", "10.0.0.1:10007"),
            ("1.2.3.4:9", "1.2.3.4:9"),
        ] {
            let address = |text: &str| text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            let named = address(named);
            let tcp_address = address(tcp_address);
            assert_eq!((map.tcp_address(named), map.named(tcp_address)), (tcp_address, named));
        }
        let none = "0.0.0.0:0".parse().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(map.tcp_address(none), none);
        assert_eq!(ports("{}").map(|map| map.to_string()).as_deref(), Ok("-"));
    }

    #[test]
    fn ambiguous_port_maps_are_refused() {
        for (map, why) in [
            ("{ 0 = 5 }", "\"0\" is not a port"),
            ("{ x = 5 }", "\"x\" is not a port"),
            ("{ 65536 = 5 }", "\"65536\" is not a port"),
            ("{ 5 = 0 }", "RDMA port 5 needs a TCP port"),
            ("{ 5 = 5 }", "5 is an RDMA port of the map"),
            ("{ 5 = 6, 6 = 7 }", "6 is an RDMA port of the map"),
            ("{ 5 = 7, 6 = 7 }", "cannot both use TCP port 7"),
            ("{ 5 = 70000 }", "70000"),
        ] {
            let said = ports(map).map(|map| map.to_string());
            assert!(said.as_ref().is_err_and(|said| said.contains(why)), "{map}: {said:?}");
        }
    }
}
