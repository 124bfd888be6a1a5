//! The root of the system that is changed: `/`, or the directory of `--root`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
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

    /// Locks the root against other changes until the lock is dropped. Leaves nothing behind.
    ///
    /// The lock of the running system is a file that only root can open. Any user could lock the
    /// root directory itself.
    pub fn lock(&self) -> Result<Lock, SystemError> {
        let path = self.is_own().then(|| PathBuf::from(LOCK));
        loop {
            let lock = Lock::take(path.clone(), &self.0)?;
            if lock.is_current() {
                return Ok(lock);
            }
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

    /// Returns the place of a file whose content is read or changed. Unlike for [`at`](Self::at),
    /// the file itself must not be a link out of the root either.
    pub fn file(&self, path: &Path) -> Result<PathBuf, SystemError> {
        let place = self.at(path)?;
        if let (Ok(target), false) = (fs::read_link(&place), self.is_own()) {
            // A link to nothing would create a file at its target.
            let real = place.canonicalize().unwrap_or(target);
            if !real.starts_with(&self.0) {
                let root = self.0.clone();
                return Err(SystemError::LeadsOut { path: place, real, root });
            }
        }
        Ok(place)
    }

    /// Returns the place of a path without links to directories, so that two paths of one file are
    /// equal.
    pub fn real(&self, path: &Path) -> Result<PathBuf, SystemError> {
        let place = self.at(path)?;
        let real = place.ancestors().skip(1).find_map(|folder| {
            Some(folder.canonicalize().ok()?.join(place.strip_prefix(folder).ok()?))
        });
        Ok(real.unwrap_or(place))
    }
}

/// Lock file of the running system.
const LOCK: &str = "/run/rnicctl.lock";

/// A lock on a root.
#[derive(Debug)]
pub struct Lock {
    file: File,
    /// Lock file, removed at the end.
    path: Option<PathBuf>,
}

impl Lock {
    /// Locks `path`, or the directory `folder` without it.
    fn take(path: Option<PathBuf>, folder: &Path) -> Result<Self, SystemError> {
        let no_follow = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
        let mut options = OpenOptions::new();
        let file = match &path {
            Some(path) => options
                .write(true)
                .create(true)
                .mode(0o600)
                .custom_flags(no_follow)
                .open(path)
                .map_err(SystemError::at("cannot open", path))?,
            None => File::open(folder).map_err(SystemError::at("cannot open --root", folder))?,
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Lock { file, path }),
            Err(Errno::WOULDBLOCK) => Err(SystemError::Busy),
            Err(error) => Err(SystemError::at("cannot lock", folder)(error.into())),
        }
    }

    /// Returns false if another process has removed the file between its opening and the lock.
    fn is_current(&self) -> bool {
        let Some(path) = &self.path else { return true };
        let own = self.file.metadata().map(|own| (own.dev(), own.ino()));
        let there = fs::symlink_metadata(path).map(|there| (there.dev(), there.ino()));
        matches!((own, there), (Ok(own), Ok(there)) if own == there)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.is_current()
            && let Some(path) = &self.path
        {
            let _ = fs::remove_file(path);
        }
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
    fn lock_file_is_removed_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let take = || Lock::take(Some(path.clone()), folder.path());
        let lock = take().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(take(), Err(SystemError::Busy)));
        // As if another process had removed it after this one has opened it.
        fs::remove_file(&path).unwrap();
        assert!(!lock.is_current());
        let next = take().unwrap();
        drop(lock);
        assert!(path.exists() && next.is_current());
        drop(next);
        assert!(!path.exists());
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
        // The link itself may be replaced or removed, but not opened.
        assert!(place("/run").is_ok());
        symlink("/no-such-folder/x", folder.path().join("etc/nothing")).unwrap();
        for path in ["/run", "/etc/nothing"] {
            let error = root.file(Path::new(path)).unwrap_err();
            assert!(matches!(error, SystemError::LeadsOut { .. }), "{error}");
        }
        assert!(root.file(Path::new("/inside")).is_ok() && root.file(Path::new("/etc/x")).is_ok());
        let real = |path: &str| root.real(Path::new(path)).unwrap();
        assert_eq!(real("/inside/x/y"), real("/etc/x/y"));
        assert_ne!(real("/inside"), real("/etc"));
    }
}
