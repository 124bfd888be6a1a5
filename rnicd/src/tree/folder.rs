//! The tree on disk: made anew, replaced where a daemon that is gone has left one, and removed.
//!
//! Its parent may be a folder in which others write, too: nothing there is followed that might be a
//! link, and nothing is removed that is not a tree. Inside, only the daemon writes: everything is
//! made relative to the descriptor of the root, whatever takes the place of its path.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Mode, OFlags, fchmod, flock, fstat, mkdirat, openat, symlinkat,
    unlinkat,
};
use rustix::io::Errno;

use super::layout::{Entry, What};

/// Why a tree could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// Something else lies there.
    #[error(
        "device.tree: {path} exists and is no tree of a daemon; remove it or name another path"
    )]
    NoTree {
        /// Path at which it lies.
        path: PathBuf,
    },
    /// Another daemon has it.
    #[error("device.tree: {path} belongs to a running daemon; name another path")]
    Taken {
        /// Path of the tree.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("device.tree: cannot {what} {path}: {error}")]
    System {
        /// What was to be done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// The root of a tree, which is removed with this.
pub(super) struct Folder {
    root: PathBuf,
    /// The folder at `root`.
    dir: OwnedFd,
    /// Says that it is a tree, and by its lock that it is in use.
    _mark: File,
    /// Folders in it.
    folders: HashSet<PathBuf>,
    /// What is in it, in the order in which it was made.
    made: Vec<Made>,
}

/// Something in the tree, by its path below the root.
struct Made {
    path: PathBuf,
    is_folder: bool,
}

/// Name of the file that says that a folder is a tree.
const MARK: &str = ".rnicd";

impl Folder {
    /// Makes it and all that is in it.
    pub(super) fn make(root: PathBuf, entries: &[Entry]) -> Result<Self, TreeError> {
        remove_stale(&root)?;
        let dir = new_folder(CWD, &root).map_err(system("make", &root))?;
        let mark = PathBuf::from(MARK);
        let locked = new_file(&dir, &mark, "").and_then(|file| {
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            Ok(file)
        });
        let file = locked.map_err(|error| system("make", &root.join(MARK))(error))?;
        let made = vec![Made { path: mark, is_folder: false }];
        let mut folder = Folder { root, dir, _mark: file, folders: HashSet::new(), made };
        for entry in entries {
            folder.add(entry)?;
        }
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        &self.root
    }

    /// Makes an entry, unless it was made before.
    pub(super) fn ensure(&mut self, entry: &Entry) -> Result<(), TreeError> {
        let path = Path::new(&entry.path);
        if self.made.iter().any(|made| made.path == path) {
            return Ok(());
        }
        self.add(entry)
    }

    fn add(&mut self, entry: &Entry) -> Result<(), TreeError> {
        let path = PathBuf::from(&entry.path);
        let above: Vec<&Path> = path.ancestors().skip(1).collect();
        // From the root down, whose own path below itself is empty.
        for at in above.into_iter().rev().skip(1) {
            if self.folders.insert(at.to_owned()) {
                new_folder(&self.dir, at).map_err(|error| self.cannot_make(at, error))?;
                self.made.push(Made { path: at.to_owned(), is_folder: true });
            }
        }
        match &entry.what {
            What::File(text) => new_file(&self.dir, &path, text).map(drop),
            What::Link(to) => symlinkat(to, &self.dir, &path).map_err(io::Error::from),
        }
        .map_err(|error| self.cannot_make(&path, error))?;
        self.made.push(Made { path, is_folder: false });
        Ok(())
    }

    fn cannot_make(&self, path: &Path, error: io::Error) -> TreeError {
        system("make", &self.root.join(path))(error)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // With calls that a confined thread may make. What somebody else removed is gone as well.
        for Made { path, is_folder } in self.made.iter().rev() {
            let flags = if *is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            let _ = unlinkat(&self.dir, path, flags);
        }
        let _ = unlinkat(CWD, &self.root, AtFlags::REMOVEDIR);
    }
}

/// Removes what a daemon that is gone has left.
fn remove_stale(root: &Path) -> Result<(), TreeError> {
    let found = match fs::symlink_metadata(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(system("look at", root))?,
    };
    let no_tree = || TreeError::NoTree { path: root.to_owned() };
    if !found.is_dir() {
        return Err(no_tree());
    }
    let mark = root.join(MARK);
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&mark);
    let mark = opened.map_err(|_| no_tree())?;
    match flock(&mark, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(TreeError::Taken { path: root.to_owned() }),
        Err(error) => return Err(system("lock", root)(error.into())),
    }
    // It follows no link, not even one that takes a folder's place meanwhile.
    fs::remove_dir_all(root).map_err(system("remove", root))
}

/// Makes a folder that everybody may look into, whatever the umask is. Its mode is changed by its
/// descriptor, and only if the folder is this user's: something else may lie at the path by then.
fn new_folder(below: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    mkdirat(below.as_fd(), path, Mode::from_raw_mode(0o755))?;
    open_own(below, path)
}

fn open_own(below: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = openat(below, path, flags, Mode::empty())?;
    let found = fstat(&folder)?;
    if found.st_uid != rustix::process::geteuid().as_raw() {
        return Err(io::Error::other("it has been replaced"));
    }
    if found.st_mode & 0o7777 != 0o755 {
        fchmod(&folder, Mode::from_raw_mode(0o755))?;
    }
    Ok(folder)
}

/// Makes a file that everybody may read.
fn new_file(below: impl AsFd, path: &Path, text: &str) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o644);
    let mut file = File::from(openat(below, path, flags, mode)?);
    fchmod(&file, mode)?;
    file.write_all(text.as_bytes())?;
    Ok(file)
}

fn system<'p>(what: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> TreeError + 'p {
    move |error| TreeError::System { what, path: path.to_owned(), error }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn entries() -> Vec<Entry> {
        let file = |path: &str| Entry { path: path.to_owned(), what: What::File("x\n".to_owned()) };
        let link = Entry { path: "class/c".to_owned(), what: What::Link("../a/b".to_owned()) };
        vec![file("a/b/one"), file("a/two"), link]
    }

    fn make(root: &Path) -> Result<Folder, TreeError> {
        Folder::make(root.to_owned(), &entries())
    }

    #[test]
    fn it_is_made_and_nothing_is_left_of_it() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("tree");
        let folder = make(&root).unwrap();
        assert_eq!(fs::read_to_string(root.join("class/c/one")).unwrap(), "x\n");
        let mode = |path: &str| fs::metadata(root.join(path)).unwrap().permissions().mode();
        assert_eq!((mode("a") & 0o777, mode("a/two") & 0o777), (0o755, 0o644));
        assert!(matches!(make(&root), Err(TreeError::Taken { .. })));
        drop(folder);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_was_made_before_is_not_made_again() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("tree");
        let mut folder = make(&root).unwrap();
        let more = Entry { path: "a/three".to_owned(), what: What::File("y\n".to_owned()) };
        for entry in entries().iter().chain([&more, &more]) {
            folder.ensure(entry).unwrap();
        }
        assert_eq!(fs::read_to_string(root.join("a/three")).unwrap(), "y\n");
        drop(folder);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn one_that_was_left_is_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("tree");
        let folder = make(&root).unwrap();
        fs::write(root.join("a/b/more"), "of a later version").unwrap();
        // As a process that is killed lets go of its locks, and of nothing else.
        let Folder { _mark, made, root, .. } = &folder;
        flock(_mark, FlockOperation::Unlock).unwrap();
        assert!(made.len() > 3);
        let again = make(root).unwrap();
        assert!(!root.join("a/b/more").exists());
        std::mem::forget(folder);
        drop(again);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_takes_its_place_is_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("tree");
        let other = parent.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).unwrap();
        let mut folder = Folder::make(root.clone(), &[]).unwrap();
        // Another folder lies at the path by the time the rest is made, and at the end.
        fs::rename(&root, parent.path().join("moved")).unwrap();
        symlink(&other, &root).unwrap();
        for entry in entries() {
            folder.add(&entry).unwrap();
        }
        assert_eq!(fs::read_dir(&other).unwrap().count(), 0);
        assert!(parent.path().join("moved/a/b/one").exists());
        drop(folder);
        assert_eq!(fs::metadata(&other).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(fs::read_dir(parent.path().join("moved")).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_of_somebody_else_keeps_its_mode() {
        let parent = tempfile::tempdir().unwrap();
        let other = parent.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).unwrap();
        let link = parent.path().join("link");
        symlink(&other, &link).unwrap();
        // A link where the folder was made is not followed.
        assert!(open_own(CWD, &link).is_err());
        assert_eq!(fs::metadata(&other).unwrap().permissions().mode() & 0o777, 0o700);
        open_own(CWD, &other).unwrap();
        assert_eq!(fs::metadata(&other).unwrap().permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn nothing_else_is_removed_or_followed() {
        let parent = tempfile::tempdir().unwrap();
        let (root, other) = (parent.path().join("tree"), parent.path().join("other"));
        fs::create_dir(&other).unwrap();
        fs::write(other.join("kept"), "kept").unwrap();
        // Somebody's folder, a link to it, a file; a folder whose mark is a link.
        symlink(&other, &root).unwrap();
        assert!(matches!(make(&root), Err(TreeError::NoTree { .. })));
        assert!(matches!(make(&other), Err(TreeError::NoTree { .. })));
        fs::remove_file(&root).unwrap();
        fs::write(&root, "").unwrap();
        assert!(matches!(make(&root), Err(TreeError::NoTree { .. })));
        fs::remove_file(&root).unwrap();
        fs::create_dir(&root).unwrap();
        symlink(other.join("kept"), root.join(MARK)).unwrap();
        assert!(matches!(make(&root), Err(TreeError::NoTree { .. })));
        assert_eq!(fs::read_to_string(other.join("kept")).unwrap(), "kept");
        let nowhere = make(&parent.path().join("no/such/folder"));
        assert!(nowhere.is_err_and(|e| e.to_string().starts_with("device.tree: cannot make")));
    }
}
