//! Folders and files like those that the kernel shows of RDMA devices in `/sys` and `/dev`, for
//! programs that look there besides calling verbs, and for exporters of counters.
//!
//! `layout` says what there is, `counters` what of it changes, `folder` makes it and takes it away.
//!
//! It is built when the daemon starts and is gone when that ends in order; what a daemon that
//! was killed has left, the next one replaces. Readers need no right to use the daemon, as with the
//! kernel's: every file may be read by everybody who may enter the folder that it is in.

mod counters;
mod folder;
mod layout;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

pub use counters::Sums;
use folder::Folder;
pub use folder::TreeError;
use layout::What;
pub use layout::{Facts, Port};

use crate::config::{Seccomp, TreeAt};
use crate::metrics::Writer;

/// The tree of a daemon. It is removed with this.
pub struct Tree {
    /// Before the folder, so that what it is writing is complete when the folder is removed.
    writer: Writer,
    folder: Folder,
    /// What stands in the files that change.
    shown: HashMap<PathBuf, String>,
    /// What is to stand in those of the GID tables, once a table has changed.
    gids: Vec<(PathBuf, String)>,
}

/// Why there is no tree.
#[derive(Debug, thiserror::Error)]
pub enum StartTreeError {
    /// It could not be made.
    #[error(transparent)]
    Folder(#[from] TreeError),
    /// The thread that writes it could not be started.
    #[error("cannot start the writer of the tree: {0}")]
    Thread(io::Error),
}

impl Tree {
    /// Makes it where the configuration says: none if it says so, or if the place beside the socket
    /// that is taken otherwise cannot be had, which is logged.
    pub fn start(
        at: &TreeAt,
        socket: &Path,
        facts: &Facts,
        seccomp: Seccomp,
    ) -> Result<Option<Self>, StartTreeError> {
        let (path, wanted) = match at {
            TreeAt::Nowhere => return Ok(None),
            TreeAt::Path(path) => (path.clone(), true),
            TreeAt::BesideSocket => (beside(socket), false),
        };
        let folder = match Folder::make(path, &layout::entries(facts)) {
            Ok(folder) => folder,
            Err(error) if wanted => return Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, "no tree of the devices (device.tree)");
                return Ok(None);
            }
        };
        let writer = Writer::start("rnicd-tree", seccomp).map_err(StartTreeError::Thread)?;
        Ok(Some(Tree { writer, folder, shown: HashMap::new(), gids: Vec::new() }))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Shows other GID tables from the next [`show`](Self::show) on. A file that cannot be made is
    /// logged and left out.
    pub fn set_gids(&mut self, facts: &Facts) {
        self.gids.clear();
        for entry in layout::all_gid_files(facts) {
            match (self.folder.ensure(&entry), entry.what) {
                (Ok(()), What::File(text)) => self.gids.push((entry.path.into(), text)),
                (Err(error), _) => tracing::warn!(%error, "a GID is not shown"),
                (Ok(()), What::Link(_)) => {}
            }
        }
    }

    /// Has it show these sums and the GID tables, as far as they are not shown.
    pub fn show(&mut self, devices: [(&str, Sums); 2]) {
        let counters = devices.iter().flat_map(|(name, sums)| counters::files(name, sums));
        let mut changed: Vec<_> = counters.chain(self.gids.iter().cloned()).collect();
        changed.retain(|(file, value)| self.shown.get(file) != Some(value));
        if changed.is_empty() {
            return;
        }
        let pages = changed.iter().map(|(file, value)| (self.path().join(file), value.clone()));
        if self.writer.write(pages.collect()) {
            self.shown.extend(changed);
        }
    }
}

/// Beside a socket, under its name.
fn beside(socket: &Path) -> PathBuf {
    let mut path: OsString = socket.into();
    path.push(".tree");
    path.into()
}
