//! libibverbs.so.1 and librdmacm.so.1 for programs that link to them, and the preload library that
//! shows them the devices in files.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Daemon, PATHS, Process, built, copy_files, omit, on_path};

/// `RNIC_DEVICES` for both default devices, the RoCE device first.
pub const BOTH_DEVICES: &str = "rnicd1,rnicd0";

/// Copies [`built::libraries`] to a daemon's directory, where every user can read it. Other users
/// may have no access to the repository.
///
/// # Panics
///
/// If `cp` fails.
pub fn directory_for_all(daemon: &Daemon) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(daemon.dir(), open).expect("a directory of our own");
    let copy = daemon.dir().join("verbs");
    copy_files(built::libraries(), &copy);
    copy
}

/// Builds a C program of the tests in `folder`, with the headers of rdma-core and this project's
/// libraries. Without the headers, reports a skipped test and returns `None`.
///
/// # Panics
///
/// If the build fails.
pub fn program(source: &str, folder: &Path) -> Option<PathBuf> {
    program_with(source, folder, &[])
}

/// Like [`program`], with compiler options.
///
/// # Panics
///
/// If the build fails.
pub fn program_with(source: &str, folder: &Path, options: &[&str]) -> Option<PathBuf> {
    if !Path::new("/usr/include/rdma/rdma_verbs.h").exists() {
        omit(&format!("no headers for {source} here: Debian package librdmacm-dev"));
        return None;
    }
    let program = folder.join("program");
    let built = Command::new("cc")
        .args(["-Wall", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .args(options)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source))
        .args(["libibverbs.so.1", "librdmacm.so.1"].map(|name| built::libraries().join(name)))
        .status()
        .expect("a C compiler");
    assert!(built.success(), "{source} cannot be built");
    Some(program)
}

/// Runs a part of a C program over each path, with a new daemon and the given devices. `config`
/// continues the table `[engine]` of the daemon's configuration.
///
/// # Panics
///
/// If the program does not print "done", or leaves objects behind.
pub fn run_part(source: &str, part: &str, config: &str, devices: &str) {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let Some(program) = program(source, folder.path()) else { return };
    for path in PATHS {
        let daemon = Daemon::start(&format!("{}{config}", on_path(path)));
        let mut command = command(&program, &daemon);
        command.arg(part).env("RNIC_DEVICES", devices);
        assert_eq!(Process::start(command).succeed(), ["done"], "{part}, {path}");
        daemon.is_empty();
    }
}

/// Returns a command that runs a C program over `daemon` with this project's libraries, without
/// logs. The program sees the RoCE device and the iWARP device.
pub fn command(program: &Path, daemon: &Daemon) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", built::libraries());
    command.env("RNIC_SOCKET", daemon.socket()).env_remove("RNIC_LOG");
    command.env("RNIC_DEVICES", BOTH_DEVICES);
    command
}
