//! A file that gets its name only when it is complete.
//!
//! If the file system supports `O_TMPFILE`, the file has no name until then, so that even `kill -9`
//! leaves nothing behind. Otherwise it has a name `.rnic-copy-...`, and is removed if the copy
//! fails, unless the process is killed. Callers check the final name.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use tempfile::{Builder, NamedTempFile};

use super::{CopyError, FileName};

/// A file being received. Dropping it removes the file.
pub(super) struct Incoming {
    folder: PathBuf,
    name: FileName,
    replace: bool,
    content: Content,
    /// Bytes written since the last sync.
    unsynced: u64,
}

enum Content {
    Nameless(File),
    Named(NamedTempFile),
}

impl Incoming {
    /// Creates a file in `folder` with the final name `name`. If a file of this name exists, it is
    /// later replaced if `replace` is true; otherwise creation fails.
    pub(super) fn create(folder: &Path, name: FileName, replace: bool) -> io::Result<Self> {
        let content = match nameless(folder) {
            Some(file) => Content::Nameless(file),
            None => Content::Named(builder().tempfile_in(folder)?),
        };
        Self::with(folder, name, replace, content)
    }

    fn with(folder: &Path, name: FileName, replace: bool, content: Content) -> io::Result<Self> {
        let incoming =
            Incoming { folder: folder.to_path_buf(), name, replace, content, unsynced: 0 };
        match incoming.path().symlink_metadata() {
            Ok(old) if !replace || old.is_dir() => Err(io::ErrorKind::AlreadyExists.into()),
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(incoming),
        }
    }

    /// Returns the final path of the file.
    pub(super) fn path(&self) -> PathBuf {
        self.folder.join(self.name.as_str())
    }

    /// Returns the free space of the file system in bytes.
    pub(super) fn room(&self) -> io::Result<u64> {
        let v = rustix::fs::statvfs(&self.folder)?;
        Ok(v.f_bavail.saturating_mul(v.f_frsize))
    }

    /// Appends bytes. Syncs from time to time, so that `commit` has little left to write while the
    /// sender waits.
    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file().write_all(bytes)?;
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= SYNC_EVERY {
            self.file().sync_data()?;
            self.unsynced = 0;
        }
        Ok(())
    }

    /// Syncs the file, then gives it its name.
    pub(super) fn commit(mut self) -> io::Result<()> {
        self.file().sync_all()?;
        let path = self.path();
        match self.content {
            Content::Nameless(file) if self.replace => {
                // linkat(2) cannot replace a file, so it needs a temporary name.
                builder()
                    .make_in(&self.folder, |p| link(&file, p))?
                    .into_temp_path()
                    .persist(&path)
                    .map_err(|e| e.error)?;
            }
            Content::Nameless(file) => link(&file, &path)?,
            Content::Named(file) if self.replace => {
                file.persist(&path).map_err(|e| e.error)?;
            }
            Content::Named(file) => {
                file.persist_noclobber(&path).map_err(|e| e.error)?;
            }
        }
        File::open(&self.folder)?.sync_all()
    }

    fn file(&mut self) -> &mut File {
        match &mut self.content {
            Content::Nameless(file) => file,
            Content::Named(file) => file.as_file_mut(),
        }
    }
}

/// Checks that files can be created in a folder, by creating a temporary file.
pub fn check_folder(folder: &Path) -> Result<(), CopyError> {
    let failed = |source| CopyError::Folder { folder: folder.to_path_buf(), source };
    if !std::fs::metadata(folder).map_err(failed)?.is_dir() {
        return Err(failed(io::ErrorKind::NotADirectory.into()));
    }
    match nameless(folder) {
        Some(_) => Ok(()),
        None => match builder().tempfile_in(folder) {
            Ok(_) => Ok(()),
            // Drops the error context, which contains the temporary name.
            Err(e) => Err(failed(e.raw_os_error().map_or(e, io::Error::from_raw_os_error))),
        },
    }
}

/// Creates a file without a name. Returns `None` if the system cannot create or link one.
fn nameless(folder: &Path) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(folder, flags, Mode::from_raw_mode(0o666)).ok()?);
    proc_path(&file).exists().then_some(file)
}

fn link(file: &File, path: &Path) -> io::Result<()> {
    Ok(rustix::fs::linkat(CWD, proc_path(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

/// Returns a path with which an unprivileged process can link a file without a name (open(2),
/// `O_TMPFILE`).
fn proc_path(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn builder() -> Builder<'static, 'static> {
    let mut builder = Builder::new();
    builder.prefix(".rnic-copy-");
    builder
}

/// Bytes between two syncs.
const SYNC_EVERY: u64 = 256 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> FileName {
        FileName::new("file").unwrap()
    }

    fn listing(folder: &Path) -> Vec<String> {
        let entries = folder.read_dir().unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Creates both kinds of content: without and with a temporary name.
    fn both(folder: &Path, replace: bool) -> Vec<io::Result<Incoming>> {
        let named = builder().tempfile_in(folder).unwrap();
        vec![
            Incoming::create(folder, name(), replace),
            Incoming::with(folder, name(), replace, Content::Named(named)),
        ]
    }

    #[test]
    fn a_file_gets_its_name_on_commit() {
        for i in 0..2 {
            let folder = tempfile::tempdir().unwrap();
            let mut incoming = both(folder.path(), false).swap_remove(i).unwrap();
            incoming.append(b"one").unwrap();
            incoming.append(b"two").unwrap();
            assert!(!incoming.path().exists());
            assert!(incoming.room().unwrap() > 0);
            incoming.commit().unwrap();
            assert_eq!(listing(folder.path()), ["file"]);
            assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"onetwo");
        }
    }

    #[test]
    fn an_aborted_copy_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        for incoming in both(folder.path(), false) {
            let mut incoming = incoming.unwrap();
            incoming.append(b"half").unwrap();
            drop(incoming);
        }
        assert!(listing(folder.path()).is_empty());
    }

    #[test]
    fn an_old_file_stays_unless_it_may_be_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"old").unwrap();
        for incoming in both(folder.path(), false) {
            let e = incoming.err().map(|e| e.kind());
            assert_eq!(e, Some(io::ErrorKind::AlreadyExists));
        }
        for i in 0..2 {
            std::fs::write(&path, b"old").unwrap();
            let mut incoming = both(folder.path(), true).swap_remove(i).unwrap();
            incoming.append(b"new").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"old");
            incoming.commit().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"new");
            assert_eq!(listing(folder.path()), ["file"]);
        }
    }

    #[test]
    fn a_file_created_in_between_is_kept() {
        for i in 0..2 {
            let folder = tempfile::tempdir().unwrap();
            let incoming = both(folder.path(), false).swap_remove(i).unwrap();
            std::fs::write(incoming.path(), b"other").unwrap();
            let e = incoming.commit().unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"other");
            assert_eq!(listing(folder.path()), ["file"]);
        }
    }

    #[test]
    fn links_are_not_followed_nor_folders_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        let target = outside.path().join("target");
        let path = folder.path().join("file");
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(Incoming::create(folder.path(), name(), false).is_err());
        let incoming = Incoming::create(folder.path(), name(), true).unwrap();
        incoming.commit().unwrap();
        assert!(!target.exists());
        assert!(path.symlink_metadata().unwrap().is_file());
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(Incoming::create(folder.path(), name(), true).is_err());
    }

    #[test]
    fn a_missing_folder_is_an_error_at_once() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Incoming::create(&folder.path().join("no"), name(), false).is_err());
    }
}
