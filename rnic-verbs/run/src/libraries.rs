//! Finds rnicd's libraries and puts them first in the loader's path.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Libraries that programs of the C verbs API are linked against.
pub const SONAMES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
/// Environment variable with the directory of the libraries.
pub const FOLDER_VARIABLE: &str = "RNIC_VERBS_DIR";
/// Environment variable with the program loader's path.
pub const PATH_VARIABLE: &str = "LD_LIBRARY_PATH";

/// Reason why the libraries cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LibrariesError {
    /// The specified directory lacks a library.
    #[error("{} has no {missing}; set {by} to the folder with both libraries", folder.display())]
    MissingLibrary {
        /// The directory.
        folder: PathBuf,
        /// The missing library.
        missing: &'static str,
        /// The option or variable that specified the directory.
        by: &'static str,
    },
    /// None of the usual directories has both libraries.
    #[error(
        "libibverbs.so.1 and librdmacm.so.1 of rnicd are not in {}; build them, or specify their \
         folder with --lib-dir or RNIC_VERBS_DIR",
        among(tried)
    )]
    NotFound {
        /// Directories that were searched.
        tried: Vec<PathBuf>,
    },
    /// The loader would split the path.
    #[error("{} contains a colon or a semicolon, which {PATH_VARIABLE} does not permit; move or \
             link the folder", folder.display())]
    InvalidPath {
        /// The directory.
        folder: PathBuf,
    },
    /// The absolute path cannot be determined.
    #[error("cannot find the absolute path of {what}: {error}")]
    System {
        /// The path.
        what: String,
        /// The system's error.
        error: std::io::Error,
    },
}

/// Returns the absolute path of the directory with both libraries: the specified one, else the
/// first of the usual directories that contains both.
pub fn folder(named: Option<&Path>) -> Result<PathBuf, LibrariesError> {
    let variable = std::env::var_os(FOLDER_VARIABLE).filter(|value| !value.is_empty());
    let by_variable = variable.as_deref().map(|folder| (Path::new(folder), FOLDER_VARIABLE));
    let folder = match named.map(|folder| (folder, "--lib-dir")).or(by_variable) {
        Some((folder, by)) => match missing_library(folder) {
            None => folder.to_owned(),
            Some(missing) => {
                return Err(LibrariesError::MissingLibrary {
                    folder: folder.to_owned(),
                    missing,
                    by,
                });
            }
        },
        None => {
            let tried = default_folders();
            let found = tried.iter().find(|folder| missing_library(folder).is_none()).cloned();
            found.ok_or(LibrariesError::NotFound { tried })?
        }
    };
    let folder = std::path::absolute(&folder).map_err(|error| {
        let what = folder.display().to_string();
        LibrariesError::System { what, error }
    })?;
    if folder.as_os_str().as_bytes().iter().any(|byte| b":;".contains(byte)) {
        Err(LibrariesError::InvalidPath { folder })
    } else {
        Ok(folder)
    }
}

/// Returns the usual directories: beside this program, as built or as installed, then system-wide.
fn default_folders() -> Vec<PathBuf> {
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(Path::parent);
    let beside = own.map(|own| [own.join("verbs"), own.join("../lib/rnicd")]);
    beside.into_iter().flatten().chain([PathBuf::from("/usr/lib/rnicd")]).collect()
}

/// Returns the first library that a directory lacks.
fn missing_library(folder: &Path) -> Option<&'static str> {
    SONAMES.into_iter().find(|name| !folder.join(name).exists())
}

fn among(tried: &[PathBuf]) -> String {
    let tried: Vec<String> = tried.iter().map(|path| path.display().to_string()).collect();
    tried.join(", ")
}

/// Returns the loader's path with rnicd's directory first.
pub fn path_with(folder: &Path, path: Option<&OsStr>) -> OsString {
    let mut with = folder.as_os_str().to_owned();
    // Skips empty entries, which would mean the program's working directory.
    let others = path.unwrap_or_default().as_bytes().split(|byte| *byte == b':');
    for other in others.filter(|other| !other.is_empty() && *other != folder.as_os_str().as_bytes())
    {
        with.push(":");
        with.push(OsStr::from_bytes(other));
    }
    with
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_folder_is_first_and_unique() {
        let with = |path: Option<&str>| path_with(Path::new("/ours"), path.map(OsStr::new));
        assert_eq!(with(None), "/ours");
        assert_eq!(with(Some("")), "/ours");
        assert_eq!(with(Some("/a:/b")), "/ours:/a:/b");
        assert_eq!(with(Some("/a::/ours:")), "/ours:/a");
    }

    #[test]
    fn folder_needs_both_libraries_and_valid_name() {
        let temporary = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let odd = temporary.path().join("a:b");
        std::fs::create_dir(&odd).unwrap_or_else(|e| panic!("{e}"));
        for name in SONAMES {
            let error = folder(Some(&odd));
            assert!(
                matches!(error, Err(LibrariesError::MissingLibrary { missing, .. }) if missing == name)
            );
            std::fs::write(odd.join(name), "").unwrap_or_else(|e| panic!("{e}"));
        }
        assert!(matches!(folder(Some(&odd)), Err(LibrariesError::InvalidPath { .. })));
        let plain = temporary.path().join("plain");
        std::fs::rename(&odd, &plain).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(folder(Some(&plain)).ok(), Some(plain));
    }
}
