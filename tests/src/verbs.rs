//! libibverbs.so.1 and librdmacm.so.1 for programs that link to them, and the preload library that
//! shows them the devices in files.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use crate::{Daemon, copy_files, omit};

/// Returns the directory with the libraries under their SONAMEs, for the `LD_LIBRARY_PATH` of a
/// program that runs over `rnicd`.
///
/// Cargo builds no `cdylib` for the tests of a workspace, so this builds them once per test
/// executable, in the profile of the tests. That is quick if they are up to date.
///
/// # Panics
///
/// If the build fails.
pub fn directory() -> &'static Path {
    static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(build);
    &DIRECTORY
}

/// Copies the [`directory`] to a daemon's directory, where every user can read it. Other users may
/// have no access to the repository.
///
/// # Panics
///
/// If `cp` fails.
pub fn directory_for_all(daemon: &Daemon) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(daemon.dir(), open).expect("a directory of our own");
    let copy = daemon.dir().join("verbs");
    copy_files(directory(), &copy);
    copy
}

/// Builds a C program of the tests in this folder, with the headers of rdma-core and this project's
/// libraries. Without headers, reports an omission and returns `None`.
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
        .args(["libibverbs.so.1", "librdmacm.so.1"].map(|name| directory().join(name)))
        .status()
        .expect("a C compiler");
    assert!(built.success(), "{source} cannot be built");
    Some(program)
}

/// Returns a command that runs a C program over `daemon` with this project's libraries, without
/// logs.
pub fn command(program: &Path, daemon: &Daemon) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", directory());
    command.env("RNIC_SOCKET", daemon.socket()).env_remove("RNIC_LOG");
    command
}

fn build() -> PathBuf {
    // The path of the test is TARGET/PROFILE/deps/NAME.
    let test = std::env::current_exe().expect("the path of this test");
    let profile = test.ancestors().nth(2).expect("a profile directory");
    let target = profile.parent().expect("a target directory");
    let name = match profile.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(other) => other,
        None => panic!("{} is not where cargo puts tests", test.display()),
    };
    let built = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "-p", "rnic-verbs", "-p", "rnic-verbs-rdmacm"])
        .args(["-p", "rnic-verbs-preload"])
        .args(["--profile", name, "--target-dir"])
        .arg(target)
        .output()
        .expect("cargo started this test");
    let errors = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "the libraries cannot be built: {}\n{errors}", built.status);
    profile.join("verbs")
}
