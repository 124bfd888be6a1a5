//! Shows the devices in `/sys/class` by a mount, and in `/dev` by a link (`--mount`).

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use rnic_run::mount::{MountError, SOURCE, add_links};
use rnic_run::preload;
use rustix::mount::{UnmountFlags, unmount};

use super::SystemError;
use super::manifest::{Item, ItemKind, Manifest};
use super::service::TREE;

/// The directory that a mount covers, because the kernel creates no directories there.
const CLASS: &str = "/sys/class";
/// Directory of the device files.
pub const DEV: &str = "/dev/infiniband";

/// Returns the target of the link at [`DEV`].
pub fn dev_target() -> std::path::PathBuf {
    view().join("dev/infiniband")
}

/// Returns the part of the tree with the RoCE devices.
fn view() -> std::path::PathBuf {
    preload::view(Path::new(TREE), None)
}

/// Returns the record of the mount.
pub fn item() -> Item {
    Item { path: CLASS.into(), kind: ItemKind::Mount }
}

/// Shows the devices, if the manifest contains the mount and it does not exist, for example after
/// a restart of the container. The daemon must be running.
pub fn show(manifest: &Manifest) -> Result<(), SystemError> {
    if manifest.item(Path::new(CLASS)).is_none() {
        return Ok(());
    }
    if !is_mounted() {
        let shown = add_links(Path::new(CLASS), &view().join("class"));
        shown.map_err(|error| {
            // Some of it may have been done.
            let _ = hide();
            SystemError::NotMounted(text(&error))
        })?;
    }
    let is_recorded = manifest.item(Path::new(DEV)).is_some();
    if is_recorded && fs::symlink_metadata(DEV).is_err() {
        symlink(dev_target(), DEV).map_err(SystemError::at("cannot create", Path::new(DEV)))?;
    }
    Ok(())
}

/// Removes the mount, if it exists.
pub fn hide() -> Result<(), SystemError> {
    while is_mounted() {
        unmount(CLASS, UnmountFlags::DETACH)
            .map_err(|error| SystemError::at("cannot unmount", Path::new(CLASS))(error.into()))?;
    }
    Ok(())
}

/// Returns true if the uppermost mount of the directory is of rnicd.
pub fn is_mounted() -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    is_ours(&mounts)
}

fn is_ours(mounts: &str) -> bool {
    let of_class = |line: &&str| line.split(' ').nth(1) == Some(CLASS);
    let last = mounts.lines().rfind(of_class);
    last.is_some_and(|line| line.split(' ').next() == Some(SOURCE))
}

/// Returns the message of a failed mount, with the usual reason for a refusal.
fn text(error: &MountError) -> String {
    match error {
        MountError::System { what, path, error } => {
            let why = match error.kind() {
                io::ErrorKind::PermissionDenied => " (the container may lack CAP_SYS_ADMIN)",
                _ => "",
            };
            format!("cannot {what} {}: {error}{why}", path.display())
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_uppermost_own_mount_counts() {
        let sysfs = "sysfs /sys sysfs rw 0 0\n";
        let own = "rnic-run /sys/class tmpfs ro 0 0\nsysfs /sys/class/net sysfs rw 0 0\n";
        let other = "none /sys/class tmpfs rw 0 0\n";
        assert!(!is_ours(sysfs) && is_ours(&[sysfs, own].concat()));
        assert!(!is_ours(&[sysfs, own, other].concat()));
    }
}
