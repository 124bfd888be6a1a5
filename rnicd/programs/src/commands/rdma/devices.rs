//! Devices as the daemon's device files show them.

use std::fs;
use std::path::{Path, PathBuf};

use rnic_client::Context;

use super::Failure;
use super::output::{Object, Style};

/// A device with one port.
#[derive(Clone, Debug)]
pub struct Device {
    /// Number of its `uverbs` file.
    pub index: u64,
    pub name: String,
    /// Directory of its attributes.
    folder: PathBuf,
}

/// Returns the devices that programs see in this environment, in the order of their numbers.
pub fn of(context: &Context) -> Result<Vec<Device>, Failure> {
    let wanted = std::env::var("RNIC_DEVICES").unwrap_or_default();
    let mut devices = all(context)?;
    devices.retain(|device| device.is_visible(&wanted));
    Ok(devices)
}

/// Returns all devices of a daemon, in the order of their numbers.
pub fn all(context: &Context) -> Result<Vec<Device>, Failure> {
    let tree = context.device_unruled()?.tree;
    if tree.is_empty() {
        return Err("the daemon has no device files (its device.tree is \"off\", or its log \
                    contains the reason)"
            .into());
    }
    read(Path::new(&tree))
}

fn read(tree: &Path) -> Result<Vec<Device>, Failure> {
    let class = tree.join("class/infiniband");
    let cannot = |error| format!("cannot read {}: {error}", class.display());
    let mut devices = Vec::new();
    for entry in fs::read_dir(&class).map_err(cannot)? {
        let name = entry.map_err(cannot)?.file_name().to_string_lossy().into_owned();
        devices.push(Device { index: index(tree, &name), folder: class.join(&name), name });
    }
    devices.sort_by_key(|device| device.index);
    Ok(devices)
}

/// Returns the number of the `uverbs` file of a device.
fn index(tree: &Path, name: &str) -> u64 {
    let verbs = fs::read_dir(tree.join("class/infiniband_verbs"));
    let found = verbs.into_iter().flatten().flatten().find_map(|entry| {
        let number = entry.file_name().to_str()?.strip_prefix("uverbs")?.parse().ok()?;
        let device = fs::read_to_string(entry.path().join("ibdev")).ok()?;
        (device.trim() == name).then_some(number)
    });
    found.unwrap_or(u64::MAX)
}

impl Device {
    /// Returns true for the name of the device, alone or with its port.
    pub fn is_named(&self, word: &str) -> bool {
        let port = word.strip_prefix(&self.name);
        matches!(port, Some("" | "/" | "/1"))
    }

    /// Returns true if programs see the device with this value of `RNIC_DEVICES`: the libraries
    /// show the devices in the list, or the RoCE devices if the list is empty.
    fn is_visible(&self, list: &str) -> bool {
        let mut names = list.split(',').map(str::trim);
        if list.trim().is_empty() { self.is_roce() } else { names.any(|name| name == self.name) }
    }

    /// Returns true for a RoCE device.
    pub fn is_roce(&self) -> bool {
        self.attribute("node_type").starts_with("1:")
    }

    fn attribute(&self, name: &str) -> String {
        let text = fs::read_to_string(self.folder.join(name)).unwrap_or_default();
        text.trim_end().to_owned()
    }

    /// Returns the part of an attribute after its number ("4: ACTIVE").
    fn word(&self, name: &str) -> String {
        let text = self.attribute(name);
        text.split_once(": ").map_or_else(String::new, |(_, word)| word.to_owned())
    }

    /// Returns the interface of the first GID that is not of the loopback interface, or that one.
    fn netdev(&self) -> Option<String> {
        let folder = self.folder.join("ports/1/gid_attrs/ndevs");
        let mut rows: Vec<(u32, String)> = fs::read_dir(&folder)
            .ok()?
            .flatten()
            .filter_map(|entry| {
                let row = entry.file_name().to_str()?.parse().ok()?;
                let name = fs::read_to_string(entry.path()).ok()?.trim().to_owned();
                (!name.is_empty()).then_some((row, name))
            })
            .collect();
        rows.sort();
        let first = rows.iter().find(|(_, name)| name != "lo").or(rows.first());
        first.map(|(_, name)| name.clone())
    }

    /// Returns an object that begins with `link NAME/1`.
    pub fn link(&self) -> Object {
        Object::default()
            .json("ifindex", self.index)
            .field("ifname", self.name.as_str(), format!("link {}/1 ", self.name))
            .json("port", 1)
    }

    /// Returns an object that begins with `dev NAME`.
    pub fn dev(&self) -> Object {
        Object::default().json("ifindex", self.index).field(
            "ifname",
            self.name.as_str(),
            format!("dev {} ", self.name),
        )
    }

    /// Returns an object that begins with `INDEX: NAME:`.
    pub fn head(&self) -> Object {
        Object::default().field("ifindex", self.index, format!("{}: ", self.index)).field(
            "ifname",
            self.name.as_str(),
            format!("{}: ", self.name),
        )
    }

    /// Returns the line of `rdma link`.
    pub fn as_link(&self, style: &Style) -> Object {
        let physical = self.attribute("ports/1/phys_state");
        let physical = match physical.split(':').next().unwrap_or_default() {
            "1" => "SLEEP",
            "2" => "POLLING",
            "3" => "DISABLED",
            "4" => "ARMED",
            "5" => "LINK_UP",
            "6" => "LINK_ERROR_RECOVER",
            _ => "UNKNOWN",
        };
        let object =
            self.link().text("state", &self.word("ports/1/state")).text("physical_state", physical);
        let Some(netdev) = self.netdev() else { return object };
        let index = fs::read_to_string(format!("/sys/class/net/{netdev}/ifindex"));
        let index = index.ok().and_then(|text| text.trim().parse::<u64>().ok());
        let object = object.text("netdev", &netdev);
        match index {
            Some(index) if style.details => object.number("netdev_index", index),
            Some(index) => object.json("netdev_index", index),
            None => object,
        }
    }

    /// Returns the line of `rdma dev`.
    pub fn as_dev(&self) -> Object {
        let protocol = if self.is_roce() { "roce" } else { "iw" };
        self.head()
            .text("node_type", &self.word("node_type").to_lowercase())
            .text("protocol", protocol)
            .text("fw", &self.attribute("fw_ver"))
            .text("node_guid", &self.attribute("node_guid"))
            .text("sys_image_guid", &self.attribute("sys_image_guid"))
    }

    /// Returns the line of `rdma statistic`.
    pub fn as_statistic(&self) -> Object {
        let mut object = Object::default()
            .field("ifname", self.name.as_str(), format!("link {}/1 ", self.name))
            .json("port", 1);
        for name in COUNTERS {
            let value = self.attribute(&format!("ports/1/hw_counters/{name}"));
            if let Ok(value) = value.parse() {
                object = object.number(name, value);
            }
        }
        object
    }
}

/// Files in `hw_counters` that `rdma statistic` shows.
const COUNTERS: [&str; 2] = ["rx_read_requests", "iwInRdmaReads"];

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Creates the files of a device.
    fn device(tree: &Path, number: u32, name: &str, node_type: &str, interfaces: &[&str]) {
        let node = tree.join(format!("devices/rnicd/{name}/infiniband/{name}"));
        let verbs = tree.join(format!("class/infiniband_verbs/uverbs{number}"));
        for folder in [
            node.join("ports/1/gid_attrs/ndevs"),
            node.join("ports/1/hw_counters"),
            verbs.clone(),
            tree.join("class/infiniband"),
        ] {
            fs::create_dir_all(folder).unwrap();
        }
        for (file, text) in [
            ("node_type", node_type),
            ("fw_ver", "0.1.0"),
            ("node_guid", "0200:5e00:5301:0001"),
            ("sys_image_guid", "0200:5e00:5301:0000"),
            ("ports/1/state", "4: ACTIVE"),
            ("ports/1/phys_state", "5: LinkUp"),
            ("ports/1/hw_counters/rx_read_requests", "7"),
        ] {
            fs::write(node.join(file), format!("{text}\n")).unwrap();
        }
        for (row, interface) in interfaces.iter().enumerate() {
            let file = node.join(format!("ports/1/gid_attrs/ndevs/{row}"));
            fs::write(file, format!("{interface}\n")).unwrap();
        }
        fs::write(verbs.join("ibdev"), format!("{name}\n")).unwrap();
        let link = format!("../../devices/rnicd/{name}/infiniband/{name}");
        symlink(link, tree.join("class/infiniband").join(name)).unwrap();
    }

    #[test]
    fn devices_are_shown_as_by_iproute2() {
        let tree = tempfile::tempdir().unwrap();
        device(tree.path(), 1, "rxe0", "1: CA", &["lo", "", "rnic-none9"]);
        device(tree.path(), 0, "siw0", "4: RNIC", &[]);
        let devices = read(tree.path()).unwrap();
        let text = |objects: Vec<Object>| super::super::output::format(&objects, &Style::default());
        let links = devices.iter().map(|device| device.as_link(&Style::default())).collect();
        assert_eq!(
            text(links),
            "link siw0/1 state ACTIVE physical_state LINK_UP \n\
             link rxe0/1 state ACTIVE physical_state LINK_UP netdev rnic-none9 \n"
        );
        assert_eq!(
            text(vec![devices[1].as_dev()]),
            "1: rxe0: node_type ca protocol roce fw 0.1.0 node_guid 0200:5e00:5301:0001 \
             sys_image_guid 0200:5e00:5301:0000 \n"
        );
        assert_eq!(text(vec![devices[1].as_statistic()]), "link rxe0/1 rx_read_requests 7 \n");
        for (word, named) in
            [("rxe0", true), ("rxe0/", true), ("rxe0/1", true), ("rxe0/2", false), ("rxe01", false)]
        {
            assert_eq!(devices[1].is_named(word), named, "{word}");
        }
    }

    #[test]
    fn devices_are_those_of_programs() {
        let tree = tempfile::tempdir().unwrap();
        for (number, name, node_type) in
            [(0, "siw0", "4: RNIC"), (1, "rxe0", "1: CA"), (2, "rxe1", "1: CA")]
        {
            device(tree.path(), number, name, node_type, &[]);
        }
        let devices = read(tree.path()).unwrap();
        for (list, visible) in [
            ("", vec!["rxe0", "rxe1"]),
            (" ", vec!["rxe0", "rxe1"]),
            ("siw0", vec!["siw0"]),
            ("rxe1, siw0", vec!["siw0", "rxe1"]),
            ("rxe", vec![]),
        ] {
            let found = devices.iter().filter(|device| device.is_visible(list));
            assert!(found.map(|device| &device.name).eq(&visible), "{list:?}");
        }
    }

    #[test]
    fn missing_tree_is_an_error() {
        let error = read(Path::new("/nonexistent")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read /nonexistent/class/infiniband"), "{error}");
    }
}
