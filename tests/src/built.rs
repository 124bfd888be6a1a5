//! The programs and libraries of this repository, as a user builds them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Returns the path of a program.
///
/// # Panics
///
/// If the build fails, no such program was built, or its path is not UTF-8.
#[must_use]
pub fn program(name: &str) -> String {
    let path = existing(FOLDER.join(name)).into_os_string();
    path.into_string().expect("a path in UTF-8")
}

/// Returns the path of an example of a library.
///
/// # Panics
///
/// If the build fails, or no such example was built.
#[must_use]
pub fn example(name: &str) -> PathBuf {
    existing(FOLDER.join("examples").join(name))
}

/// Returns the directory with the C libraries under their SONAMEs, for the `LD_LIBRARY_PATH` of a
/// program that runs over `rnicd`.
///
/// # Panics
///
/// If the build fails.
#[must_use]
pub fn libraries() -> PathBuf {
    existing(FOLDER.join("verbs"))
}

/// Returns cargo's output directory for the profile of this test.
///
/// # Panics
///
/// If this test is not in cargo's directory for tests.
#[must_use]
pub fn profile() -> PathBuf {
    // The path of the test is TARGET/PROFILE/deps/NAME.
    let test = std::env::current_exe().expect("the path of this test");
    test.ancestors().nth(2).expect("a profile directory").to_owned()
}

/// `RNIC_BIN`, or the directory of [`profile`] after a build.
static FOLDER: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::var_os("RNIC_BIN").map_or_else(build, PathBuf::from));

fn existing(path: PathBuf) -> PathBuf {
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// Builds everything, because cargo builds neither programs nor C libraries of other packages for a
/// test. A build that is up to date takes little time.
fn build() -> PathBuf {
    let profile = profile();
    let target = profile.parent().expect("a target directory");
    let name = match profile.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(other) => other,
        None => panic!("{} is not where cargo puts tests", profile.display()),
    };
    // With benches, dependencies have the features that they have in tests: nothing is built twice.
    let built = Command::new(env!("CARGO"))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .args(["build", "--quiet", "--workspace", "--lib", "--bins", "--examples", "--benches"])
        .args(["--profile", name, "--target-dir"])
        .arg(target)
        .output()
        .expect("cargo started this test");
    let errors = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "the programs cannot be built: {}\n{errors}", built.status);
    profile
}
