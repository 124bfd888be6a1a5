//! Additions to a container that has the device.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rnic_run::environment::Environment;
use rnic_run::libraries::{self, LibrariesError, PATH_VARIABLE};

use crate::api::{ContainerAllocateResponse, Mount};
use crate::daemon::{Daemon, Serving};

/// Directory of the socket in containers. The libraries accept a daemon of another user only if
/// that user owns this directory.
pub const FOLDER: &str = "/run/rnicd";
/// Directory of the libraries in containers.
pub const LIBRARIES: &str = "/usr/lib/rnicd";

/// Returns the mounts and environment variables of a container. They do not depend on its number of
/// devices.
pub fn allocation(
    daemon: &Daemon,
    serving: &Serving,
    folder: &Path,
) -> Result<ContainerAllocateResponse, LibrariesError> {
    let folder = libraries::folder(Some(folder))?;
    let inside = |path: &Path| {
        let path = path.strip_prefix(daemon.folder()).ok()?;
        Some(Path::new(FOLDER).join(path))
    };
    let environment = Environment {
        libraries: &folder,
        libraries_in_program: Path::new(LIBRARIES),
        socket: inside(daemon.socket()).map(PathBuf::into_os_string),
        tree: serving.tree.as_deref().and_then(inside),
        devices: (!daemon.devices().is_empty()).then(|| daemon.devices().join(",").into()),
    };
    // These variables replace the image's, which are unknown here. LD_PRELOAD alone is sufficient
    // and rarely set by images, so LD_LIBRARY_PATH, which many images set, is omitted.
    let variables = environment.variables(|_| None);
    let variables = variables.into_iter().filter(|(name, _)| *name != PATH_VARIABLE);
    let text = |value: OsString| value.to_string_lossy().into_owned();
    Ok(ContainerAllocateResponse {
        envs: variables.map(|(name, value)| (name.to_owned(), text(value))).collect(),
        mounts: vec![mount(daemon.folder(), FOLDER), mount(&folder, LIBRARIES)],
    })
}

/// Returns a read-only mount of a directory. Programs can still connect to sockets in the
/// directory.
fn mount(from: &Path, to: &str) -> Mount {
    Mount {
        container_path: to.to_owned(),
        host_path: from.to_string_lossy().into_owned(),
        read_only: true,
    }
}
