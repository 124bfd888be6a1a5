//! Shows the daemon's devices in `/sys/class` and `/dev` by mounts in a private mount namespace.
//!
//! This also works for a program that does not open files through the C library. No process can
//! create directories in `/sys`, and few can in `/dev`. If a directory of the tree is missing
//! there, a new file system is mounted over its parent. It contains bind mounts of all entries of
//! the parent, and the new directory. The new directories contain links into the daemon's tree,
//! which remain valid after the daemon is restarted.

use std::ffi::OsStr;
use std::fs::{self, DirEntry, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, mount, mount_bind, mount_bind_recursive, mount_change,
    mount_remount,
};
use rustix::process::{getegid, geteuid};
use rustix::thread::UnshareFlags;

/// Reason why the devices cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The daemon has no tree.
    #[error(
        "the daemon has no device files (its device.tree is \"off\", or its log contains the \
             reason); run the program without --mount"
    )]
    NoTree,
    /// The system refuses a namespace.
    #[error(
        "--mount: a user and mount namespace is refused: {what}: {error} ({refuser}); {WITHOUT}"
    )]
    NoNamespace {
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        error: io::Error,
        /// Probable reason for the refusal.
        refuser: String,
    },
    /// A system call in the new namespace failed.
    #[error("--mount: cannot {what} {}: {error} ({}); {WITHOUT}", path.display(), refuser(error))]
    System {
        /// The operation that failed, for display.
        what: &'static str,
        /// File of the operation.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// Source of the mounts over directories, as in `/proc/mounts`.
pub const SOURCE: &str = "rnic-run";
/// Alternative to `--mount`, for error messages.
const WITHOUT: &str = "without --mount, programs that use the C library see the same files";

/// Shows the devices of a tree to this process only: all device folders, and the other entries of
/// `view`, which is a part of the tree or all of it. The process must be single-threaded.
pub fn show(tree: &Path, view: &Path) -> Result<(), MountError> {
    enter_namespace()?;
    // Later mounts of the system still propagate to this namespace, but not in reverse.
    let propagation = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    let root = Path::new("/");
    mount_change(root, propagation).map_err(system("separate the mounts of", root))?;
    // The links in `class` point to `devices`, as in the kernel's tree.
    add(Path::new("/sys/devices"), &tree.join("devices"))?;
    add(Path::new("/sys/class"), &view.join("class"))?;
    add(Path::new("/dev"), &view.join("dev"))?;
    Ok(())
}

/// Moves this process to a new mount namespace. If it lacks the privilege for that, also moves it
/// to a new user namespace that maps its own user and group.
fn enter_namespace() -> Result<(), MountError> {
    let uid = geteuid().as_raw();
    let gid = getegid().as_raw();
    match unshare(UnshareFlags::NEWNS) {
        Err(Errno::PERM) => {}
        done => return done.map_err(refused("unshare(CLONE_NEWNS)")),
    }
    let both = UnshareFlags::NEWUSER | UnshareFlags::NEWNS;
    unshare(both).map_err(refused("unshare(CLONE_NEWUSER | CLONE_NEWNS)"))?;
    // The kernel requires `deny`, because dropping a group could otherwise grant access.
    for (what, path, text) in [
        ("writing setgroups", "/proc/self/setgroups", "deny".to_owned()),
        ("writing uid_map", "/proc/self/uid_map", format!("{uid} {uid} 1")),
        ("writing gid_map", "/proc/self/gid_map", format!("{gid} {gid} 1")),
    ] {
        fs::write(path, text).map_err(refused(what))?;
    }
    Ok(())
}

#[allow(unsafe_code)] // A safe use of a call that is otherwise unsafe.
fn unshare(flags: UnshareFlags) -> rustix::io::Result<()> {
    debug_assert!(!flags.contains(UnshareFlags::FILES));
    // SAFETY: the call must not unshare the descriptor table, and the flags do not include FILES.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Adds the directories of `ours` to the directory `place`.
fn add(place: &Path, ours: &Path) -> Result<(), MountError> {
    let folders = entries(ours)?;
    if folders.iter().all(|folder| place.join(folder.file_name()).is_dir()) {
        for folder in folders {
            let at = place.join(folder.file_name());
            cover(&at)?;
            link(&folder.path(), &at)?;
            close(&at)?;
        }
        return Ok(());
    }
    cover_and_keep(place, &folders)?;
    for folder in folders {
        let at = place.join(folder.file_name());
        fs::create_dir(&at).map_err(system("create", &at))?;
        link(&folder.path(), &at)?;
    }
    close(place)
}

/// Adds links to the directories of `ours` to the directory `place`, for all processes of this
/// mount namespace. Later entries of these directories appear too.
pub fn add_links(place: &Path, ours: &Path) -> Result<(), MountError> {
    let folders = entries(ours)?;
    cover_and_keep(place, &folders)?;
    for folder in folders {
        let at = place.join(folder.file_name());
        symlink(folder.path(), &at).map_err(system("create", &at))?;
    }
    close(place)
}

/// Covers a directory and makes its entries available again, except entries whose names are in
/// `folders`.
fn cover_and_keep(place: &Path, folders: &[DirEntry]) -> Result<(), MountError> {
    // Keeps the directory accessible after it is covered.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let before = rustix::fs::open(place, flags, Mode::empty()).map_err(system("open", place))?;
    let before = PathBuf::from(format!("/proc/self/fd/{}", before.as_raw_fd()));
    let kept = entries(&before)?;
    cover(place)?;
    let is_ours = |name: &OsStr| folders.iter().any(|folder| folder.file_name() == name);
    for entry in kept.iter().filter(|entry| !is_ours(&entry.file_name())) {
        let from = entry.path();
        let to = place.join(entry.file_name());
        match keep(entry, &to) {
            // The entry has been removed in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done.map_err(system("keep", &from))?,
        }
    }
    Ok(())
}

/// Mounts an empty file system over a directory.
fn cover(place: &Path) -> Result<(), MountError> {
    let data = c"mode=0755,size=1m";
    mount(SOURCE, place, "tmpfs", FLAGS, data).map_err(system("mount over", place))
}

/// Remounts a covered directory read-only.
fn close(place: &Path) -> Result<(), MountError> {
    let flags = FLAGS | MountFlags::BIND | MountFlags::RDONLY;
    mount_remount(place, flags, c"").map_err(system("remount", place))
}

/// Makes an entry of a covered directory available at `to`.
fn keep(entry: &DirEntry, to: &Path) -> io::Result<()> {
    let from = entry.path();
    let kind = entry.file_type()?;
    if kind.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if kind.is_dir() {
        fs::create_dir(to)?;
        // Recursive, because the kernel does not allow a bind mount to uncover other mounts.
        return Ok(mount_bind_recursive(from, to)?);
    }
    File::create(to)?;
    Ok(mount_bind(from, to)?)
}

/// Creates links in `place` to the entries of `folder`. Copies an entry that is itself a link.
fn link(folder: &Path, place: &Path) -> Result<(), MountError> {
    for entry in entries(folder)? {
        let to = fs::read_link(entry.path()).unwrap_or_else(|_| entry.path());
        let at = place.join(entry.file_name());
        symlink(to, &at).map_err(system("create", &at))?;
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<DirEntry>, MountError> {
    let read = fs::read_dir(folder).and_then(Iterator::collect);
    read.map_err(system("read", folder))
}

fn refused<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> MountError {
    move |error| {
        let error = error.into();
        MountError::NoNamespace { what, refuser: refuser(&error), error }
    }
}

fn system<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> MountError {
    let path = path.to_owned();
    move |error| MountError::System { what, path, error: error.into() }
}

/// Returns the setting that refuses namespaces if it can be read, otherwise probable reasons.
fn refuser(error: &io::Error) -> String {
    let setting = |name: &str| {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
    };
    let settings = SETTINGS.iter().filter(|(name, value)| setting(name) == *value);
    let settings: Vec<_> =
        settings.map(|(name, value)| format!("sysctl {name} is {value}")).collect();
    if !settings.is_empty() {
        return settings.join(", ");
    }
    match Errno::from_io_error(error) {
        Some(Errno::NOSPC) => "the limit user.max_user_namespaces is reached".to_owned(),
        Some(Errno::PERM | Errno::ACCESS) => {
            "possibly by a container's seccomp filter, a chroot or a security module".to_owned()
        }
        _ => "no setting is known to refuse this".to_owned(),
    }
}

/// Settings that refuse namespaces to users, with the values that do so.
const SETTINGS: [(&str, &str); 4] = [
    ("kernel.unprivileged_userns_clone", "0"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1"),
    ("user.max_user_namespaces", "0"),
    ("user.max_mnt_namespaces", "0"),
];
/// Flags of the file systems mounted over directories. Bind mounts in them have their own flags.
const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
