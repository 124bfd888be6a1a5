//! `wired.devices`: the RoCE devices, by name or by a pattern for names.

use std::collections::BTreeMap;
use std::fmt;

use toml::Spanned;

use super::error::Wrong;
use super::values::check_name;

/// RoCE devices in the order of their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoceDevices {
    /// Interfaces by name, which may be a pattern.
    map: BTreeMap<String, Netdev>,
    /// Offset of the value in the file.
    at: usize,
}

/// Interfaces whose addresses are the GIDs of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Netdev {
    /// `"*"`: all interfaces. With a pattern for the name, each has a device of its own.
    All,
    /// One interface.
    Named(String),
}

impl RoceDevices {
    /// Returns one device for all interfaces.
    pub(super) fn one(name: &str) -> Self {
        RoceDevices { map: BTreeMap::from([(name.to_owned(), Netdev::All)]), at: 0 }
    }

    /// Checks the map of the file.
    pub(super) fn new(written: Spanned<BTreeMap<String, String>>) -> Result<Self, String> {
        let at = written.span().start;
        let written = written.into_inner();
        if written.len() > MAX_ROCE_DEVICES {
            return Err(format!("at most {MAX_ROCE_DEVICES} devices are possible"));
        }
        let mut map = BTreeMap::new();
        for (name, interface) in written {
            // Placeholders stand for valid parts of names.
            check_device(&device_name(&name, "x", 0)).map_err(|why| format!("{name:?} {why}"))?;
            let netdev = match interface.as_str() {
                "*" => Netdev::All,
                named => {
                    check_interface(named).map_err(|why| format!("{name}: {named:?} {why}"))?;
                    Netdev::Named(interface)
                }
            };
            map.insert(name, netdev);
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
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Netdev)> {
        self.map.iter().map(|(name, netdev)| (name.as_str(), netdev))
    }
}

impl fmt::Display for RoceDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> =
            self.map.iter().map(|(name, netdev)| format!("{name} = {netdev}")).collect();
        f.write_str(if all.is_empty() { "-" } else { "" })?;
        f.write_str(&all.join(", "))
    }
}

impl fmt::Display for Netdev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Netdev::All => "*",
            Netdev::Named(interface) => interface,
        })
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
pub fn check_interface(name: &str) -> Result<(), String> {
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && !"/:".contains(c);
    if (1..16).contains(&name.len()) && name.chars().all(plain) && ![".", ".."].contains(&name) {
        Ok(())
    } else {
        Err("is not the name of an interface, or \"*\" for all".to_owned())
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
            ("{ a = 1 }", "invalid type"),
            ("{ a = \"x\", a = \"y\" }", "duplicate key"),
            ("{ rnicd0 = \"*\" }", "rnicd0 is a RoCE device (wired.devices) and the iWARP device"),
            (&many, "at most 16 devices"),
        ] {
            let said = devices(map).map(|devices| devices.to_string());
            assert!(said.as_ref().is_err_and(|said| said.contains(why)), "{map}: {said:?}");
        }
    }
}
