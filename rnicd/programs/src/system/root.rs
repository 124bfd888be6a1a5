//! The root of the system that is changed: `/`, or the directory of `--root`.

use std::fs::File;
use std::io;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::SystemError;

/// A root directory. Paths in the manifest and in file contents are relative to it.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Root {
    /// Opens a root. The directory must exist.
    pub fn open(path: &Path) -> Result<Self, SystemError> {
        let whole = path.canonicalize().map_err(SystemError::at("cannot open --root", path))?;
        Ok(Root(whole))
    }

    /// Returns true for the root of the running system.
    pub fn is_own(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// Returns the directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Locks the root against other changes until the file is closed. Leaves nothing behind.
    pub fn lock(&self) -> Result<File, SystemError> {
        let folder = File::open(&self.0).map_err(SystemError::at("cannot open --root", &self.0))?;
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(folder),
            Err(Errno::WOULDBLOCK) => Err(SystemError::Busy),
            Err(error) => Err(SystemError::at("cannot lock", &self.0)(error.into())),
        }
    }

    /// Returns the place of an absolute path of this system.
    ///
    /// # Errors
    ///
    /// If a symbolic link in the path leads out of the root. Such a link, for example an absolute
    /// one in an unpacked image, would lead into the running system.
    pub fn at(&self, path: &Path) -> Result<PathBuf, SystemError> {
        let parts = path.components().filter(|part| matches!(part, Component::Normal(_)));
        let place = self.0.join(parts.collect::<PathBuf>());
        let mut above = place.parent();
        while let Some(folder) = above.filter(|folder| *folder != self.0) {
            match folder.canonicalize() {
                Ok(real) if real.starts_with(&self.0) => break,
                Ok(real) => {
                    let path = folder.to_owned();
                    return Err(SystemError::LeadsOut { path, real, root: self.0.clone() });
                }
                // Not created yet, or a link to nothing, below which nothing can be created.
                Err(error) if error.kind() == io::ErrorKind::NotFound => above = folder.parent(),
                Err(error) => return Err(SystemError::at("cannot resolve", folder)(error)),
            }
        }
        Ok(place)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_one_process_changes_a_root() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let lock = root.lock().unwrap();
        assert!(matches!(root.lock(), Err(SystemError::Busy)));
        drop(lock);
        assert!(root.lock().is_ok());
    }

    #[test]
    fn links_out_of_the_root_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("etc")).unwrap();
        symlink("/tmp", folder.path().join("run")).unwrap();
        symlink("etc", folder.path().join("inside")).unwrap();
        let root = Root::open(folder.path()).unwrap();
        assert!(!root.is_own() && Root::open(Path::new("/")).unwrap().is_own());
        let place = |path: &str| root.at(Path::new(path));
        assert_eq!(place("/etc/x/y").unwrap(), root.path().join("etc/x/y"));
        assert_eq!(place("/inside/x").unwrap(), root.path().join("inside/x"));
        let error = place("/run/rnicd/rnicd.pid").unwrap_err();
        assert!(matches!(error, SystemError::LeadsOut { .. }), "{error}");
        // The link itself may be replaced or removed.
        assert!(place("/run").is_ok());
    }
}
