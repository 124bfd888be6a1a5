//! Finds the folder of the kernel in which a path starts, component by component.
//!
//! Only folders that contain an entry of the tree matter: `/`, `/sys`, `/sys/class`,
//! `/sys/devices`, `/dev`. None of them is a symbolic link, so `..` leads from an entry to its
//! parent.

/// Maximum length of the name of an entry.
const NAME: usize = 32;

/// A folder of the kernel, or an entry of the tree.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    Root,
    Sys,
    Class,
    Devices,
    Dev,
    /// An entry of `/sys/class` that belongs to the tree.
    TreeClass(Name),
    /// `/sys/devices/rnicd`, the target of the links in the entries of `/sys/class`.
    TreeDevices,
    /// `/dev/infiniband`.
    TreeDev,
}

/// Name of an entry of `/sys/class`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Name {
    bytes: [u8; NAME],
    length: usize,
}

impl Name {
    pub(crate) fn of(text: &[u8]) -> Option<Self> {
        let mut name = Name::default();
        text.iter().try_for_each(|byte| name.push(*byte))?;
        Some(name)
    }

    /// Appends a byte. Returns `None` if the name is then too long.
    pub(crate) fn push(&mut self, byte: u8) -> Option<()> {
        *self.bytes.get_mut(self.length)? = byte;
        self.length += 1;
        Some(())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Place {
    /// The folders that contain an entry of the tree, or a folder with such an entry.
    pub(crate) const FOLDERS: [Self; 5] =
        [Place::Root, Place::Sys, Place::Class, Place::Devices, Place::Dev];

    pub(crate) fn is_in_tree(&self) -> bool {
        matches!(self, Place::TreeClass(_) | Place::TreeDevices | Place::TreeDev)
    }

    /// Returns the entry of this name, if it belongs to the tree or contains such an entry.
    pub(crate) fn entry(&self, name: &Name) -> Option<Self> {
        match (self, name.bytes()) {
            (Place::Root, b"sys") => Some(Place::Sys),
            (Place::Root, b"dev") => Some(Place::Dev),
            (Place::Sys, b"class") => Some(Place::Class),
            (Place::Sys, b"devices") => Some(Place::Devices),
            // Also matches `infiniband_verbs` and similar.
            (Place::Class, other) if other.starts_with(b"infiniband") => {
                Some(Place::TreeClass(*name))
            }
            (Place::Devices, b"rnicd") => Some(Place::TreeDevices),
            (Place::Dev, b"infiniband") => Some(Place::TreeDev),
            _ => None,
        }
    }

    pub(crate) fn parent(&self) -> Self {
        match self {
            Place::Root | Place::Sys | Place::Dev => Place::Root,
            Place::Class | Place::Devices => Place::Sys,
            Place::TreeClass(_) => Place::Class,
            Place::TreeDevices => Place::Devices,
            Place::TreeDev => Place::Dev,
        }
    }

    /// Returns the path of a folder, or the path of an entry below the tree's root without the
    /// entry's name.
    pub(crate) fn path(&self) -> &'static [u8] {
        match self {
            Place::Root => b"/",
            Place::Sys => b"/sys",
            Place::Class => b"/sys/class",
            Place::Devices => b"/sys/devices",
            Place::Dev => b"/dev",
            Place::TreeClass(_) => b"/class/",
            Place::TreeDevices => b"/devices/rnicd",
            Place::TreeDev => b"/dev/infiniband",
        }
    }
}

/// The position after the components of a path that have been followed so far.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub(crate) place: Place,
    /// Number of folders between the place and the position.
    pub(crate) below: usize,
    /// True if the path has left the tree.
    pub(crate) has_left: bool,
}

impl Position {
    pub(crate) fn root() -> Self {
        Position { place: Place::Root, below: 0, has_left: false }
    }

    /// Descends into a folder of a path without symbolic links.
    pub(crate) fn descend(&mut self, name: &[u8]) {
        let entry = Name::of(name).and_then(|name| self.place.entry(&name));
        match entry.filter(|_| self.below == 0) {
            Some(place) => self.place = place,
            None => self.below += 1,
        }
    }

    /// Follows a component of a path. Returns false at a component that this module cannot
    /// follow, because it may be a link.
    pub(crate) fn follow(&mut self, name: Option<&Name>) -> bool {
        match name.map(Name::bytes) {
            Some(b".") => true,
            Some(b"..") => {
                if self.below > 0 {
                    self.below -= 1;
                } else {
                    self.has_left |= self.place.is_in_tree();
                    self.place = self.place.parent();
                }
                true
            }
            _ => {
                let entry = name.and_then(|name| self.place.entry(name));
                match entry.filter(|_| self.below == 0) {
                    Some(place) => self.place = place,
                    None => return false,
                }
                true
            }
        }
    }
}
