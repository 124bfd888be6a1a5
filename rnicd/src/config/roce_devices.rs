//! `wired.devices`: the RoCE devices, by name or by a pattern for names.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use serde::Deserialize;
use toml::Spanned;

use super::error::Wrong;
use super::values::check_name;

/// RoCE devices in the order of their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoceDevices {
    /// GIDs by name, which may be a pattern.
    map: BTreeMap<String, GidSource>,
    /// Offset of the value in the file.
    at: usize,
}

/// Addresses that are the GIDs of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GidSource {
    /// `"*"`: those of all interfaces. With a pattern for the name, each has a device of its own.
    All,
    /// Those of one interface.
    Named(String),
    /// These, at least one, in the order of their GIDs.
    Addresses(Vec<IpAddr>),
}

/// A value of the map.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "needs an interface, \"*\", an address or a list of addresses")]
pub(super) enum Written {
    One(String),
    List(Vec<String>),
}

impl RoceDevices {
    /// Returns one device for all interfaces.
    pub(super) fn one(name: &str) -> Self {
        RoceDevices { map: BTreeMap::from([(name.to_owned(), GidSource::All)]), at: 0 }
    }

    /// Checks the map of the file.
    pub(super) fn new(written: Spanned<BTreeMap<String, Written>>) -> Result<Self, String> {
        let at = written.span().start;
        let written = written.into_inner();
        if written.len() > MAX_ROCE_DEVICES {
            return Err(format!("at most {MAX_ROCE_DEVICES} devices are possible"));
        }
        let mut map = BTreeMap::new();
        for (name, written) in written {
            // Placeholders stand for valid parts of names.
            check_device(&device_name(&name, "x", 0)).map_err(|why| format!("{name:?} {why}"))?;
            let source = match written {
                Written::One(text) => {
                    GidSource::parse(&text).map_err(|why| format!("{name}: {text:?} {why}"))?
                }
                Written::List(list) => {
                    let list = list.iter().map(String::as_str);
                    let all: Result<Vec<_>, _> = list
                        .map(|text| address(text).map_err(|e| format!("{text:?} {e}")))
                        .collect();
                    let all = all.and_then(|all| GidSource::at(all).map_err(str::to_owned));
                    all.map_err(|why| format!("{name}: {why}"))?
                }
            };
            if matches!(source, GidSource::Addresses(_)) && name.contains("{netdev}") {
                return Err(format!("{name:?}: {{netdev}} needs an interface, not addresses"));
            }
            for address in source.addresses() {
                let has = |(_, other): &(&String, &GidSource)| other.addresses().contains(address);
                if let Some((other, _)) = map.iter().find(has) {
                    return Err(format!("{other} and {name} have the address {address}"));
                }
            }
            map.insert(name, source);
        }
        Ok(RoceDevices { map, at })
    }

    /// Returns an error if a device has the name of the iWARP device.
    pub(super) fn check_against(&self, iwarp: &str) -> Result<(), Wrong> {
        if self.map.contains_key(iwarp) {
            let why = format!(
                "{iwarp} is a RoCE device (wired.devices) and the iWARP device (device.name)"
            );
            return Err(Wrong { at: self.at, why });
        }
        Ok(())
    }

    /// Returns the names, which may be patterns, and the interfaces.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &GidSource)> {
        self.map.iter().map(|(name, source)| (name.as_str(), source))
    }
}

impl GidSource {
    /// Reads an interface, `"*"`, or addresses that are separated by commas.
    ///
    /// # Errors
    ///
    /// The reason why the text is none of these.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "*" {
            return Ok(GidSource::All);
        }
        if text.split(',').any(|part| part.parse::<IpAddr>().is_ok()) {
            let all = text.split(',').map(address).collect::<Result<_, _>>()?;
            return GidSource::at(all).map_err(str::to_owned);
        }
        check_interface(text)?;
        Ok(GidSource::Named(text.to_owned()))
    }

    /// Checks a list of addresses.
    fn at(addresses: Vec<IpAddr>) -> Result<Self, &'static str> {
        let mut once = addresses.clone();
        once.sort_unstable();
        once.dedup();
        if addresses.is_empty() {
            Err("the list has no addresses")
        } else if once.len() < addresses.len() {
            Err("the list has an address twice")
        } else {
            Ok(GidSource::Addresses(addresses))
        }
    }

    /// Returns the interface, or an empty name for all interfaces and for addresses.
    pub fn interface(&self) -> &str {
        if let GidSource::Named(interface) = self { interface } else { "" }
    }

    /// Returns the addresses, or none for interfaces.
    pub fn addresses(&self) -> &[IpAddr] {
        if let GidSource::Addresses(all) = self { all } else { &[] }
    }
}

/// Reads an address of a host.
fn address(text: &str) -> Result<IpAddr, String> {
    let address: IpAddr = text.parse().map_err(|_| "is not an address".to_owned())?;
    let address = address.to_canonical();
    let is_link_local = match address {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if is_link_local || address.is_unspecified() || address.is_multicast() {
        return Err("does not identify a host".to_owned());
    }
    Ok(address)
}

impl fmt::Display for RoceDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> =
            self.map.iter().map(|(name, source)| format!("{name} = {source}")).collect();
        f.write_str(if all.is_empty() { "-" } else { "" })?;
        f.write_str(&all.join(", "))
    }
}

impl fmt::Display for GidSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GidSource::All => f.write_str("*"),
            GidSource::Named(interface) => f.write_str(interface),
            GidSource::Addresses(all) => {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                f.write_str(&all.join(" "))
            }
        }
    }
}

/// Returns the name of a device by a pattern: of the device of this interface, with this number.
pub fn device_name(pattern: &str, interface: &str, number: usize) -> String {
    pattern.replace("{n}", &number.to_string()).replace("{netdev}", interface)
}

/// Checks the name of a device. It must fit `ibv_device::name` with a terminating zero, and be the
/// name of a folder.
pub fn check_device(name: &str) -> Result<(), String> {
    if name.len() < 64 && check_name(name).is_ok() && !name.starts_with('.') {
        Ok(())
    } else {
        Err("must be 1 to 63 letters, digits, '-', '_' or '.', not beginning with '.'".to_owned())
    }
}

/// Checks the name of an interface by the kernel's rules.
fn check_interface(name: &str) -> Result<(), String> {
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && !"/:".contains(c);
    if (1..16).contains(&name.len()) && name.chars().all(plain) && ![".", ".."].contains(&name) {
        Ok(())
    } else {
        Err("is not the name of an interface, an address, or \"*\" for all interfaces".to_owned())
    }
}

/// Maximum number of RoCE devices. Their description must fit one control message.
pub const MAX_ROCE_DEVICES: usize = 16;

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn devices(map: &str) -> Result<RoceDevices, String> {
        let text = format!("[wired]\ndevices = {map}\n");
        let config = Config::parse(std::path::Path::new("t"), &text);
        config.map(|config| config.wired.roce_devices()).map_err(|e| e.to_string())
    }

    #[test]
    fn devices_are_read_and_shown() {
        let shown = |map| devices(map).map(|devices| devices.to_string());
        let all = "rxe0 = *, rxe_{netdev} = eth0.7, {n} = *";
        assert_eq!(
            shown("{ \"{n}\" = \"*\", rxe0 = \"*\", \"rxe_{netdev}\" = \"eth0.7\" }"),
            Ok(all.to_owned())
        );
        assert_eq!(shown("{}"), Ok("-".to_owned()));
        assert_eq!(
            shown("{ b = [\"127.0.0.2\", \"fd00::1\"], a = \"::ffff:127.0.0.1\" }"),
            Ok("a = 127.0.0.1, b = 127.0.0.2 fd00::1".to_owned())
        );
        assert_eq!(Config::default().wired.roce_devices().to_string(), "rnicd1 = *");
        let rxe = Config::parse(std::path::Path::new("t"), "[wired]\nprofile = \"rxe\"\n");
        assert_eq!(
            rxe.map(|rxe| rxe.wired.roce_devices().to_string()).ok().as_deref(),
            Some("rxe0 = *")
        );
        assert_eq!(device_name("rxe_{netdev}_{n}", "eth0", 3), "rxe_eth0_3");
    }

    #[test]
    fn wrong_devices_are_refused() {
        let long = format!("{{ {} = \"*\" }}", "x".repeat(64));
        let many: Vec<String> = (0..17).map(|n| format!("d{n} = \"*\"")).collect();
        let many = format!("{{ {} }}", many.join(", "));
        for (map, why) in [
            ("{ \"a b\" = \"*\" }", "\"a b\" must be 1 to 63 letters"),
            ("{ \"..\" = \"*\" }", "\"..\" must be 1 to 63 letters"),
            ("{ \"{x}\" = \"*\" }", "\"{x}\" must be 1 to 63 letters"),
            (&long, "must be 1 to 63 letters"),
            ("{ a = \"\" }", "a: \"\" is not the name of an interface"),
            ("{ a = \"../x\" }", "a: \"../x\" is not the name of an interface"),
            ("{ a = \"interface_16_cha\" }", "is not the name of an interface"),
            ("{ a = 1 }", "needs an interface, \"*\", an address or a list of addresses"),
            ("{ a = [] }", "a: the list has no addresses"),
            ("{ a = [\"::1\", \"*\"] }", "a: \"*\" is not an address"),
            ("{ a = [\"::1\", \"lo\"] }", "a: \"lo\" is not an address"),
            ("{ a = [\"::1\", \"0::1\"] }", "a: the list has an address twice"),
            ("{ a = \"::1\", b = [\"::2\", \"::1\"] }", "a and b have the address ::1"),
            ("{ a = \"fe80::1\" }", "a: \"fe80::1\" does not identify a host"),
            ("{ a = [\"0.0.0.0\"] }", "a: \"0.0.0.0\" does not identify a host"),
            ("{ \"{netdev}\" = \"::1\" }", "{netdev} needs an interface, not addresses"),
            ("{ a = \"x\", a = \"y\" }", "duplicate key"),
            ("{ rnicd0 = \"*\" }", "rnicd0 is a RoCE device (wired.devices) and the iWARP device"),
            (&many, "at most 16 devices"),
        ] {
            let said = devices(map).map(|devices| devices.to_string());
            assert!(said.as_ref().is_err_and(|said| said.contains(why)), "{map}: {said:?}");
        }
    }
}
