//! Folders and files like the kernel's for RDMA devices in `/sys` and `/dev`, for programs that
//! read them in addition to calling verbs, and for exporters of counters.
//!
//! `layout` lists the files, `view` those of some devices alone, `counters` the files that change,
//! and `folder` creates and removes the tree.
//!
//! The daemon creates the tree when it starts and removes it when it ends. If a daemon was killed,
//! the next one replaces its tree. Readers need no right to use the daemon, as with the kernel's
//! files: a user with access to the folder can read every file.

mod counters;
mod folder;
mod layout;
mod view;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

pub use counters::Sums;
use folder::Folder;
pub use folder::TreeError;
use layout::Content;
pub use layout::{Facts, Port};

use crate::config::{Seccomp, TreeAt};
use crate::metrics::Writer;

/// The tree of a daemon. It is removed on drop.
pub struct Tree {
    /// Declared before `folder`, so that the writer finishes before the folder is removed.
    writer: Writer,
    folder: Folder,
    /// Last content of the files that change.
    shown: HashMap<PathBuf, String>,
    /// New content of the files that depend on addresses, once these have changed.
    files: Vec<(PathBuf, String)>,
}

/// Reason why the tree cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartTreeError {
    /// The tree cannot be created.
    #[error(transparent)]
    Folder(#[from] TreeError),
    /// The thread that writes the files cannot start.
    #[error("cannot start the writer thread of the device tree: {0}")]
    Thread(io::Error),
}

impl Tree {
    /// Creates the tree at the configured path. Returns `None` if the configuration disables it, or
    /// if it cannot be created at the default path beside the socket, which is logged.
    pub fn start(
        at: &TreeAt,
        socket: &Path,
        facts: &Facts,
        seccomp: Seccomp,
    ) -> Result<Option<Self>, StartTreeError> {
        let (path, wanted) = match at {
            TreeAt::Off => return Ok(None),
            TreeAt::Path(path) => (path.clone(), true),
            TreeAt::BesideSocket => (default_path(socket), false),
        };
        let folder = match Folder::make(path, &layout::entries(facts)) {
            Ok(folder) => folder,
            Err(error) if wanted => return Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, "cannot create the device tree; set device.tree");
                return Ok(None);
            }
        };
        let writer = Writer::start("rnicd-tree", seccomp).map_err(StartTreeError::Thread)?;
        Ok(Some(Tree { writer, folder, shown: HashMap::new(), files: Vec::new() }))
    }

    /// Returns the path of the root.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Creates the entries of new devices and addresses, removes those of removed ones, and sets
    /// the content of files for the next [`show`](Self::show). An entry that cannot be created is
    /// logged and left out.
    pub fn update(&mut self, facts: &Facts) {
        let entries = layout::entries(facts);
        if self.folder.has_others(&entries) {
            // A file that the writer replaces during the removal would remain, with its folder.
            self.writer.flush();
        }
        self.folder.remove_others(&entries);
        for entry in &entries {
            if let Err(error) = self.folder.ensure(entry) {
                tracing::warn!(%error, "cannot create an entry of the device tree");
            }
        }
        let files = layout::files_of_addresses(facts).filter_map(|entry| match entry.what {
            Content::File(text) => Some((PathBuf::from(entry.path), text)),
            Content::Folder | Content::Link(_) => None,
        });
        self.files = files.filter(|(path, _)| self.folder.has(path)).collect();
        self.shown.retain(|path, _| self.folder.has(path));
    }

    /// Writes the changed sums and tables to their files.
    pub fn show(&mut self, devices: &[(String, Sums)]) {
        let counters = devices.iter().flat_map(|(name, sums)| counters::files(name, sums));
        let mut changed: Vec<_> = counters.chain(self.files.iter().cloned()).collect();
        changed
            .retain(|(file, value)| self.folder.has(file) && self.shown.get(file) != Some(value));
        if changed.is_empty() {
            return;
        }
        let pages = changed.iter().map(|(file, value)| (self.path().join(file), value.clone()));
        if self.writer.write(pages.collect()) {
            self.shown.extend(changed);
        }
    }
}

/// Returns the default path of the tree, beside the socket.
fn default_path(socket: &Path) -> PathBuf {
    let mut path: OsString = socket.into();
    path.push(".tree");
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_waits_for_the_writer() {
        let parent = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let at = TreeAt::Path(parent.path().join("tree"));
        let facts = |devices: u32| Facts {
            image_guid: 1,
            ports: (0..devices)
                .map(|n| Port {
                    name: format!("rxe{n}"),
                    roce: true,
                    guid: 1,
                    vendor_id: 0,
                    part_id: 0,
                    hw_ver: 0,
                    fw_ver: "1".to_owned(),
                    link: (2, 32),
                    uverbs: n,
                    gids: Vec::new(),
                    down: false,
                    p_key: 0xffff,
                    gid_v1: false,
                })
                .collect(),
        };
        let tree = Tree::start(&at, Path::new("s"), &facts(1), Seccomp::Off);
        let mut tree = tree.unwrap_or_else(|e| panic!("{e}")).expect("a tree");
        for round in 0..20 {
            tree.update(&facts(8));
            let sums = Sums { bytes_sent: 4 + round * 4, bytes_received: 4, ..Sums::default() };
            let sums: Vec<_> = (0..8).map(|n| (format!("rxe{n}"), sums)).collect();
            tree.show(&sums);
            tree.update(&facts(1));
            let folder = tree.path().join("devices/rnicd");
            let left = std::fs::read_dir(folder).map(Iterator::count).ok();
            assert_eq!(left, Some(1), "round {round}");
        }
    }
}
