//! Commands of other packages that jobs run to set up RDMA: `modprobe`, `rmmod` and `rdma`.
//!
//! `rnicctl system install` creates links of these names to `rnicctl`, which calls [`by_name`].
//! `modprobe` and `rmmod` succeed for the modules that rnicd replaces (`modules`), and `rdma`
//! shows the daemon's devices and objects (`rdma`).

mod modules;
mod rdma;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs the command with the name of this process, if it is one of these.
pub fn by_name() -> Option<ExitCode> {
    let mut arguments = std::env::args_os();
    let name = arguments.next()?;
    let name = Path::new(&name).file_name()?.to_str()?.to_owned();
    let arguments: Vec<OsString> = arguments.collect();
    match name.as_str() {
        "modprobe" => Some(modules::modprobe(&arguments)),
        "rmmod" => Some(modules::rmmod(&arguments)),
        "rdma" => Some(rdma::main(&arguments)),
        _ => None,
    }
}

/// Returns the next program of a name in `PATH`, or in the usual folders, that is not of rnicd.
fn next_of_name(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    next_in(name, &path)
}

fn next_in(name: &str, path: &OsStr) -> Option<PathBuf> {
    let usual = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    let folders = std::env::split_paths(path).filter(|folder| folder.is_absolute()).chain(usual);
    // Any `rnicctl`, not only this file: two installations would run each other endlessly.
    let is_own = |program: &PathBuf| {
        program.canonicalize().is_ok_and(|real| real.file_name() == Some(OsStr::new("rnicctl")))
    };
    let programs = folders.map(|folder| folder.join(name));
    programs.into_iter().find(|program| is_executable(program) && !is_own(program))
}

fn is_executable(program: &Path) -> bool {
    program.is_file() && rustix::fs::access(program, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn other_installations_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a", "b", "c", "d"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        for name in ["a/rnicctl", "c/tool-of-test", "d/tool-of-test"] {
            std::fs::write(at(name), "").unwrap();
        }
        for name in ["a/rnicctl", "d/tool-of-test"] {
            let all = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(at(name), all).unwrap();
        }
        symlink("rnicctl", at("a/tool-of-test")).unwrap();
        symlink("../a/tool-of-test", at("b/tool-of-test")).unwrap();
        let path =
            |names: &[&str]| std::env::join_paths(names.iter().map(|name| at(name))).unwrap();
        // c has no right of execution.
        let found = next_in("tool-of-test", &path(&["a", "b", "c", "d"]));
        assert_eq!(found, Some(at("d/tool-of-test")));
        assert_eq!(next_in("tool-of-test", &path(&["a", "b", "c"])), None);
    }
}
