//! The manifest: the items of an installation, which `uninstall` removes.

use std::fs;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::SystemError;
use super::root::Root;

/// Path of the manifest.
pub const MANIFEST: &str = "/var/lib/rnicd/installed";

/// An installation and its items, in the order of their creation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the programs.
    pub version: String,
    /// Folder above `bin` and `lib`.
    pub prefix: PathBuf,
    /// False while an installation runs, and after a killed installation.
    pub complete: bool,
    /// The created items.
    pub items: Vec<Item>,
}

/// A change to the system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Absolute path, below the root.
    pub path: PathBuf,
    /// Its kind.
    pub kind: ItemKind,
}

/// Kind of an item, with the values that its removal needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ItemKind {
    /// A directory, removed if it is empty.
    Folder,
    /// A file with one of these SHA-256 digests: two while an installation replaces it.
    File {
        /// Digests in hexadecimal.
        sha256: Vec<String>,
    },
    /// A symbolic link.
    Link {
        /// Its target.
        to: PathBuf,
    },
    /// A line at the end of a file of the system.
    Line {
        /// The line, without its newline.
        line: String,
        /// True if the file ended without a newline, which was added.
        newline: bool,
        /// True if the file did not exist.
        created: bool,
    },
    /// A file that the daemon or `ldconfig` writes.
    Output,
    /// A mount that covers a directory.
    Mount,
}

impl Item {
    /// Returns the place of the item in a root.
    pub fn place(&self, root: &Root) -> Result<PathBuf, SystemError> {
        match self.kind {
            ItemKind::Line { .. } => root.file(&self.path),
            _ => root.at(&self.path),
        }
    }
}

impl Manifest {
    /// Reads the manifest of a root. Returns `None` if nothing is installed.
    pub fn read(root: &Root) -> Result<Option<Self>, SystemError> {
        let place = root.file(Path::new(MANIFEST))?;
        let text = match fs::read(&place) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(SystemError::at("cannot read", &place))?,
        };
        let manifest = serde_json::from_slice(&text)
            .map_err(|error| SystemError::at("cannot parse", &place)(error.into()))?;
        Ok(Some(manifest))
    }

    /// Replaces the manifest of a root. A reader sees the old one or the new one.
    pub fn write(&self, root: &Root) -> Result<(), SystemError> {
        let place = root.at(Path::new(MANIFEST))?;
        let new = place.with_extension("new");
        let mut text = serde_json::to_vec_pretty(self)
            .map_err(|error| SystemError::at("cannot write", &place)(error.into()))?;
        text.push(b'\n');
        let write = || {
            // A new file, because an existing one may be a link out of the root.
            match fs::remove_file(&new) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed?,
            }
            let mut file = fs::File::create_new(&new)?;
            file.write_all(&text)?;
            file.set_permissions(Permissions::from_mode(0o644))?;
            file.sync_all()?;
            fs::rename(&new, &place)
        };
        write().map_err(SystemError::at("cannot write", &place))
    }

    /// Returns the item at a path.
    pub fn item(&self, path: &Path) -> Option<&Item> {
        self.items.iter().find(|item| item.path == path)
    }
}
