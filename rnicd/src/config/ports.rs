//! `[ports]`: RDMA ports that are other ports of TCP.
//!
//! A card has ports of its own: a program may listen on TCP port 3260 and on RDMA port 3260. Here
//! both are TCP, so that the second would be in use. What the map names is another port on the
//! wire; programs, rules and lists have the RDMA port throughout.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;

use super::checker::Checker;
use super::error::ConfigError;
use super::file;

/// Which TCP port an RDMA port is; the same one unless the map says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortMap {
    /// RDMA ports with their TCP ports. None is there on both sides, so that an address has one
    /// meaning.
    tcp: BTreeMap<u16, u16>,
}

impl PortMap {
    /// The address on the wire of one that a program names.
    pub fn on_wire(&self, named: SocketAddr) -> SocketAddr {
        with_port(named, self.tcp.get(&named.port()).copied())
    }

    /// The address that programs name, of one on the wire.
    pub fn named(&self, on_wire: SocketAddr) -> SocketAddr {
        let mut all = self.tcp.iter();
        let named = all.find(|(_, tcp)| **tcp == on_wire.port()).map(|(rdma, _)| *rdma);
        with_port(on_wire, named)
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

impl Checker<'_> {
    /// Checks `[ports]`.
    pub(super) fn ports(&self, s: file::PortsSection) -> Result<PortMap, ConfigError> {
        let tcp = self.checked(s.map, BTreeMap::new(), |map| parsed(map).map(drop))?;
        Ok(PortMap { tcp: parsed(&tcp).unwrap_or_default() })
    }
}

/// The map with numbers for keys, which TOML does not have.
fn parsed(map: &BTreeMap<String, u16>) -> Result<BTreeMap<u16, u16>, String> {
    let mut tcp = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for (key, port) in map {
        let rdma = key.parse::<u16>().ok().filter(|rdma| *rdma != 0);
        let rdma = rdma.ok_or_else(|| format!("{key:?} is no port from 1 to 65535"))?;
        if *port == 0 {
            return Err(format!("{key} has no port of TCP: 0 is none"));
        }
        if !taken.insert(*port) {
            return Err(format!("two RDMA ports cannot both be TCP port {port}"));
        }
        tcp.insert(rdma, *port);
    }
    match tcp.values().find(|port| tcp.contains_key(port)) {
        Some(port) => Err(format!("{port} is an RDMA port of the map, and cannot be a TCP port")),
        None => Ok(tcp),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    fn ports(map: &str) -> Result<super::PortMap, String> {
        let text = format!("[ports]\nmap = {map}\n");
        let config = Config::parse(std::path::Path::new("t"), &text);
        config.map(|config| config.ports).map_err(|e| e.to_string())
    }

    #[test]
    fn what_the_map_names_is_another_port_on_the_wire_and_back() {
        let map = ports("{ 3260 = 13260, \"7\" = 10007 }").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(map.to_string(), "7 -> 10007, 3260 -> 13260");
        for (named, on_wire) in [
            ("[::1]:3260", "[::1]:13260"),
            ("10.0.0.1:7", "10.0.0.1:10007"),
            ("1.2.3.4:9", "1.2.3.4:9"),
        ] {
            let address = |text: &str| text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
            let (named, on_wire) = (address(named), address(on_wire));
            assert_eq!((map.on_wire(named), map.named(on_wire)), (on_wire, named));
        }
        let none = "0.0.0.0:0".parse().unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(map.on_wire(none), none);
        assert_eq!(ports("{}").map(|map| map.to_string()).as_deref(), Ok("-"));
    }

    #[test]
    fn maps_with_two_meanings_are_refused() {
        for (map, why) in [
            ("{ 0 = 5 }", "\"0\" is no port"),
            ("{ x = 5 }", "\"x\" is no port"),
            ("{ 65536 = 5 }", "\"65536\" is no port"),
            ("{ 5 = 0 }", "5 has no port of TCP"),
            ("{ 5 = 5 }", "5 is an RDMA port of the map"),
            ("{ 5 = 6, 6 = 7 }", "6 is an RDMA port of the map"),
            ("{ 5 = 7, 6 = 7 }", "cannot both be TCP port 7"),
            ("{ 5 = 70000 }", "70000"),
        ] {
            let said = ports(map).map(|map| map.to_string());
            assert!(said.as_ref().is_err_and(|said| said.contains(why)), "{map}: {said:?}");
        }
    }
}
