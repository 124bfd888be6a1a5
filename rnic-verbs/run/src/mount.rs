//! The daemon's devices in `/sys/class` and `/dev` for this process and what it becomes, whether
//! that calls the C library or not: in a mount namespace of its own.
//!
//! Nobody can make a folder in `/sys`, and few in `/dev`. So where a folder of ours is not there, a
//! new file system is mounted over its parent, with all that the parent had, each entry bound, and
//! ours beside it. What ours hold are links into the daemon's tree, which lead to a daemon that is
//! started again, too.

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

/// Why nothing is shown.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// There is nothing to show.
    #[error(
        "the daemon has no files of its devices (its device.tree is \"off\", or its log says \
             why); run it without --mount"
    )]
    NoTree,
    /// There is no namespace to be had.
    #[error(
        "--mount: a user and mount namespace is refused: {what}: {error} ({refuser}); {WITHOUT}"
    )]
    NoNamespace {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        error: io::Error,
        /// Who refuses it, as far as that can be known.
        refuser: String,
    },
    /// There is one, and something in it is refused.
    #[error("--mount: cannot {what} {}: {error} ({}); {WITHOUT}", path.display(), refuser(error))]
    System {
        /// What was tried, in words.
        what: &'static str,
        /// The file it was about.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// What can be done.
const WITHOUT: &str = "without --mount, programs that call the C library are shown the same files";

/// Shows this process, and it alone, what is in a tree. It must have one thread.
pub fn show(tree: &Path) -> Result<(), MountError> {
    separate()?;
    // What the system mounts from now on comes here, too, and nothing goes there.
    let propagation = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    let root = Path::new("/");
    mount_change(root, propagation).map_err(system("separate the mounts of", root))?;
    // The links in `class` lead to `devices`, as the kernel's.
    for (place, ours) in [("/sys/devices", "devices"), ("/sys/class", "class"), ("/dev", "dev")] {
        add(Path::new(place), &tree.join(ours))?;
    }
    Ok(())
}

/// Gives this process a mount namespace of its own, and where that takes rights that it has not, a
/// user namespace with its own user and group in it.
fn separate() -> Result<(), MountError> {
    let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
    match unshare(UnshareFlags::NEWNS) {
        Err(Errno::PERM) => {}
        done => return done.map_err(refused("unshare(CLONE_NEWNS)")),
    }
    let both = UnshareFlags::NEWUSER | UnshareFlags::NEWNS;
    unshare(both).map_err(refused("unshare(CLONE_NEWUSER | CLONE_NEWNS)"))?;
    // Only who cannot leave groups that refuse him something may map his own.
    for (what, path, text) in [
        ("writing setgroups", "/proc/self/setgroups", "deny".to_owned()),
        ("writing uid_map", "/proc/self/uid_map", format!("{uid} {uid} 1")),
        ("writing gid_map", "/proc/self/gid_map", format!("{gid} {gid} 1")),
    ] {
        fs::write(path, text).map_err(refused(what))?;
    }
    Ok(())
}

#[allow(unsafe_code)] // A call whose other uses are unsafe.
fn unshare(flags: UnshareFlags) -> rustix::io::Result<()> {
    debug_assert!(!flags.contains(UnshareFlags::FILES));
    // SAFETY: the table of descriptors stays as it is and stays shared.
    unsafe { rustix::thread::unshare_unsafe(flags) }
}

/// Puts the folders of `ours` into the folder `place`.
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
    // Leads to what will be covered.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let before = rustix::fs::open(place, flags, Mode::empty()).map_err(system("open", place))?;
    let before = PathBuf::from(format!("/proc/self/fd/{}", before.as_raw_fd()));
    let kept = entries(&before)?;
    cover(place)?;
    let is_ours = |name: &OsStr| folders.iter().any(|folder| folder.file_name() == name);
    for entry in kept.iter().filter(|entry| !is_ours(&entry.file_name())) {
        let (from, to) = (entry.path(), place.join(entry.file_name()));
        match keep(entry, &to) {
            // It is gone since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            done => done.map_err(system("keep", &from))?,
        }
    }
    for folder in folders {
        let at = place.join(folder.file_name());
        fs::create_dir(&at).map_err(system("make", &at))?;
        link(&folder.path(), &at)?;
    }
    close(place)
}

/// Mounts an empty file system over a folder.
fn cover(place: &Path) -> Result<(), MountError> {
    let data = c"mode=0755,size=1m";
    mount("rnic-run", place, "tmpfs", FLAGS, data).map_err(system("mount over", place))
}

/// Lets nobody write to it any more.
fn close(place: &Path) -> Result<(), MountError> {
    let flags = FLAGS | MountFlags::BIND | MountFlags::RDONLY;
    mount_remount(place, flags, c"").map_err(system("close", place))
}

/// Has an entry of a covered folder at its place again.
fn keep(entry: &DirEntry, to: &Path) -> io::Result<()> {
    let (from, kind) = (entry.path(), entry.file_type()?);
    if kind.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if kind.is_dir() {
        fs::create_dir(to)?;
        // What is mounted in it may not be uncovered.
        return Ok(mount_bind_recursive(from, to)?);
    }
    File::create(to)?;
    Ok(mount_bind(from, to)?)
}

/// Has the entries of a folder of the tree in another one: links as they are, others by links.
fn link(folder: &Path, from: &Path) -> Result<(), MountError> {
    for entry in entries(folder)? {
        let to = fs::read_link(entry.path()).unwrap_or_else(|_| entry.path());
        let at = from.join(entry.file_name());
        symlink(to, &at).map_err(system("make", &at))?;
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

/// Who refuses namespaces here: a setting that can be read, else who may be.
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
        Some(Errno::NOSPC) => "as many as user.max_user_namespaces allows are there".to_owned(),
        Some(Errno::PERM | Errno::ACCESS) => {
            "a container's seccomp filter, a chroot or a security module may do that".to_owned()
        }
        _ => "no setting is known to do that".to_owned(),
    }
}

/// Settings that refuse namespaces to users, and their values then.
const SETTINGS: [(&str, &str); 4] = [
    ("kernel.unprivileged_userns_clone", "0"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1"),
    ("user.max_user_namespaces", "0"),
    ("user.max_mnt_namespaces", "0"),
];
/// Of what is mounted over folders; the files in it are others'.
const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
