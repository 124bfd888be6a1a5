//! The tree on disk: creates it, replaces the tree of a daemon that has died, and removes it.
//!
//! Other users may be able to write to the parent folder, so links there are not followed, and only
//! a tree is removed. Inside the tree only the daemon writes. Everything is created relative to the
//! root's descriptor, even if another file has since replaced its path.

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

use super::layout::{Content, Entry};

/// Reason why a tree cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The path exists and is not a tree.
    #[error(
        "device.tree: {path} exists and is not a tree of rnicd; remove it or choose another path"
    )]
    NotATree {
        /// The existing path.
        path: PathBuf,
    },
    /// Another daemon uses the tree.
    #[error("device.tree: {path} belongs to a running daemon; choose another path")]
    Taken {
        /// Path of the tree.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("device.tree: cannot {what} {path}: {error}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// Its object.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// The root of a tree. The tree is removed on drop.
pub(super) struct Folder {
    root: PathBuf,
    /// The folder at `root`.
    dir: OwnedFd,
    /// Marks the folder as a tree. Its lock marks the tree as in use.
    _mark: File,
    /// Paths of all files and folders in the tree.
    paths: HashSet<PathBuf>,
    /// Files and folders in the tree, in the order of their creation.
    made: Vec<Made>,
}

/// A file or folder in the tree, by its path below the root.
struct Made {
    path: PathBuf,
    is_folder: bool,
}

/// Name of the file that marks a folder as a tree.
const MARK: &str = ".rnicd";

impl Folder {
    /// Creates the tree and all its entries.
    pub(super) fn make(root: PathBuf, entries: &[Entry]) -> Result<Self, TreeError> {
        remove_stale(&root)?;
        let dir = new_folder(CWD, &root).map_err(system("create", &root))?;
        let mark = PathBuf::from(MARK);
        let locked = new_file(&dir, &mark, "").and_then(|file| {
            flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            Ok(file)
        });
        let file = locked.map_err(|error| system("create", &root.join(MARK))(error))?;
        let paths = HashSet::from([mark.clone()]);
        let made = vec![Made { path: mark, is_folder: false }];
        let mut folder = Folder { root, dir, _mark: file, paths, made };
        for entry in entries {
            folder.add(entry)?;
        }
        Ok(folder)
    }

    pub(super) fn path(&self) -> &Path {
        &self.root
    }

    /// Creates an entry unless it already exists.
    pub(super) fn ensure(&mut self, entry: &Entry) -> Result<(), TreeError> {
        if self.has(Path::new(&entry.path)) { Ok(()) } else { self.add(entry) }
    }

    /// Returns true if the tree has this file or folder.
    pub(super) fn has(&self, path: &Path) -> bool {
        self.paths.contains(path)
    }

    /// Returns true if [`remove_others`](Self::remove_others) would remove anything.
    pub(super) fn has_others(&self, entries: &[Entry]) -> bool {
        let kept = with_folders(entries);
        self.made.iter().any(|made| !kept.contains(&*made.path))
    }

    /// Removes all files and folders except these entries and the folders that contain them.
    pub(super) fn remove_others(&mut self, entries: &[Entry]) {
        let kept = with_folders(entries);
        let removed: Vec<Made> =
            self.made.extract_if(.., |made| !kept.contains(&*made.path)).collect();
        for made in removed.iter().rev() {
            self.paths.remove(&made.path);
            self.unlink(made);
        }
    }

    fn unlink(&self, Made { path, is_folder }: &Made) {
        let flags = if *is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        // Only system calls that a confined thread may make. Missing files do not matter.
        let _ = unlinkat(&self.dir, path, flags);
    }

    fn add(&mut self, entry: &Entry) -> Result<(), TreeError> {
        let path = PathBuf::from(&entry.path);
        let is_folder = entry.what == Content::Folder;
        let above: Vec<&Path> = path.ancestors().skip(usize::from(!is_folder)).collect();
        // From the root down. The first ancestor is the root itself, with an empty path.
        for at in above.into_iter().rev().skip(1) {
            if !self.has(at) {
                new_folder(&self.dir, at).map_err(|error| self.cannot_make(at, error))?;
                self.record(at.to_owned(), true);
            }
        }
        match &entry.what {
            Content::File(text) => new_file(&self.dir, &path, text).map(drop),
            Content::Folder => return Ok(()),
            Content::Link(to) => symlinkat(to, &self.dir, &path).map_err(io::Error::from),
        }
        .map_err(|error| self.cannot_make(&path, error))?;
        self.record(path, false);
        Ok(())
    }

    fn record(&mut self, path: PathBuf, is_folder: bool) {
        self.paths.insert(path.clone());
        self.made.push(Made { path, is_folder });
    }

    fn cannot_make(&self, path: &Path, error: io::Error) -> TreeError {
        system("create", &self.root.join(path))(error)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        self.made.iter().rev().for_each(|made| self.unlink(made));
        let _ = unlinkat(CWD, &self.root, AtFlags::REMOVEDIR);
    }
}

/// Returns the paths of these entries, of the folders that contain them, and of the mark.
fn with_folders(entries: &[Entry]) -> HashSet<&Path> {
    let mut paths: HashSet<&Path> = HashSet::from([Path::new(MARK)]);
    paths.extend(entries.iter().flat_map(|entry| Path::new(&entry.path).ancestors()));
    paths
}

/// Removes the tree of a daemon that has died.
fn remove_stale(root: &Path) -> Result<(), TreeError> {
    let found = match fs::symlink_metadata(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(system("examine", root))?,
    };
    let no_tree = || TreeError::NotATree { path: root.to_owned() };
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
    // Follows no link, even if a link replaces a folder during the removal.
    fs::remove_dir_all(root).map_err(system("remove", root))
}

/// Creates a folder that all users may read, regardless of the umask. Sets its mode through its
/// descriptor, and only if this user owns it, because another folder may have taken its place.
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

/// Creates a file that all users may read.
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
        let file =
            |path: &str| Entry { path: path.to_owned(), what: Content::File("x\n".to_owned()) };
        let link = Entry { path: "class/c".to_owned(), what: Content::Link("../a/b".to_owned()) };
        vec![file("a/b/one"), file("a/two"), link]
    }

    fn make(root: &Path) -> Result<Folder, TreeError> {
        Folder::make(root.to_owned(), &entries())
    }

    #[test]
    fn tree_is_made_and_removed() {
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
    fn existing_entries_are_not_made_again() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("tree");
        let mut folder = make(&root).unwrap();
        let more = Entry { path: "a/three".to_owned(), what: Content::File("y\n".to_owned()) };
        for entry in entries().iter().chain([&more, &more]) {
            folder.ensure(entry).unwrap();
        }
        assert_eq!(fs::read_to_string(root.join("a/three")).unwrap(), "y\n");
        drop(folder);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn tree_of_a_dead_daemon_is_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("tree");
        let folder = make(&root).unwrap();
        fs::write(root.join("a/b/more"), "of a later version").unwrap();
        // Like the death of a process, which releases its locks and removes nothing.
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
    fn file_at_the_path_of_the_root_is_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("tree");
        let other = parent.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).unwrap();
        let mut folder = Folder::make(root.clone(), &[]).unwrap();
        // A link is at the path while the rest is created, and at the end.
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
    fn folder_behind_a_link_keeps_its_mode() {
        let parent = tempfile::tempdir().unwrap();
        let other = parent.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).unwrap();
        let link = parent.path().join("link");
        symlink(&other, &link).unwrap();
        // A link in the place of the folder is not followed.
        assert!(open_own(CWD, &link).is_err());
        assert_eq!(fs::metadata(&other).unwrap().permissions().mode() & 0o777, 0o700);
        open_own(CWD, &other).unwrap();
        assert_eq!(fs::metadata(&other).unwrap().permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn only_trees_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let root = parent.path().join("tree");
        let other = parent.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("kept"), "kept").unwrap();
        // A link, an unmarked folder, a file, and a folder with a link as its mark.
        symlink(&other, &root).unwrap();
        assert!(matches!(make(&root), Err(TreeError::NotATree { .. })));
        assert!(matches!(make(&other), Err(TreeError::NotATree { .. })));
        fs::remove_file(&root).unwrap();
        fs::write(&root, "").unwrap();
        assert!(matches!(make(&root), Err(TreeError::NotATree { .. })));
        fs::remove_file(&root).unwrap();
        fs::create_dir(&root).unwrap();
        symlink(other.join("kept"), root.join(MARK)).unwrap();
        assert!(matches!(make(&root), Err(TreeError::NotATree { .. })));
        assert_eq!(fs::read_to_string(other.join("kept")).unwrap(), "kept");
        let nowhere = make(&parent.path().join("no/such/folder"));
        assert!(nowhere.is_err_and(|e| e.to_string().starts_with("device.tree: cannot create")));
    }
}
