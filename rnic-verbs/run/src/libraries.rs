//! Where our libraries are, and the loader's path with them in front.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// What programs of the C verbs API are linked against.
pub const SONAMES: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];
/// Environment variable that names the folder.
pub const FOLDER_VARIABLE: &str = "RNIC_VERBS_DIR";
/// Environment variable of the program loader.
pub const PATH_VARIABLE: &str = "LD_LIBRARY_PATH";

/// Why the libraries cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LibrariesError {
    /// The folder that was named lacks one.
    #[error("{} has no {missing}; name the folder with both by {by}", folder.display())]
    NotThere {
        /// The folder.
        folder: PathBuf,
        /// What it lacks.
        missing: &'static str,
        /// Who named it.
        by: &'static str,
    },
    /// None of the usual folders has both.
    #[error(
        "libibverbs.so.1 and librdmacm.so.1 of rnicd are not in {}; build them, or name their \
         folder by --lib-dir or RNIC_VERBS_DIR",
        among(tried)
    )]
    Nowhere {
        /// Where they were looked for.
        tried: Vec<PathBuf>,
    },
    /// The loader would take the path for two.
    #[error("{} has a colon or a semicolon in it, which {PATH_VARIABLE} cannot name; move or link \
             the folder", folder.display())]
    Unspeakable {
        /// The folder.
        folder: PathBuf,
    },
    /// The system says nothing about where we are.
    #[error("cannot find out where {what} is: {error}")]
    System {
        /// The path.
        what: String,
        /// The system's error.
        error: std::io::Error,
    },
}

/// The folder with both libraries: the one that was named, else the first of the usual ones, as an
/// absolute path.
pub fn folder(named: Option<&Path>) -> Result<PathBuf, LibrariesError> {
    let variable = std::env::var_os(FOLDER_VARIABLE).filter(|value| !value.is_empty());
    let by_variable = variable.as_deref().map(|folder| (Path::new(folder), FOLDER_VARIABLE));
    let folder = match named.map(|folder| (folder, "--lib-dir")).or(by_variable) {
        Some((folder, by)) => match lacks(folder) {
            None => folder.to_owned(),
            Some(missing) => {
                return Err(LibrariesError::NotThere { folder: folder.to_owned(), missing, by });
            }
        },
        None => {
            let tried = usual();
            let found = tried.iter().find(|folder| lacks(folder).is_none()).cloned();
            found.ok_or(LibrariesError::Nowhere { tried })?
        }
    };
    let folder = std::path::absolute(&folder).map_err(|error| {
        let what = folder.display().to_string();
        LibrariesError::System { what, error }
    })?;
    match folder.as_os_str().as_bytes().iter().any(|byte| b":;".contains(byte)) {
        true => Err(LibrariesError::Unspeakable { folder }),
        false => Ok(folder),
    }
}

/// Where the libraries usually are: beside this program, as it was built or as it was installed.
fn usual() -> Vec<PathBuf> {
    let own = std::env::current_exe().ok();
    let own = own.as_deref().and_then(Path::parent);
    let beside = own.map(|own| [own.join("verbs"), own.join("../lib/rnicd")]);
    beside.into_iter().flatten().chain([PathBuf::from("/usr/lib/rnicd")]).collect()
}

/// The library that a folder has not.
fn lacks(folder: &Path) -> Option<&'static str> {
    SONAMES.into_iter().find(|name| !folder.join(name).exists())
}

fn among(tried: &[PathBuf]) -> String {
    let tried: Vec<String> = tried.iter().map(|path| path.display().to_string()).collect();
    tried.join(", ")
}

/// The loader's path as it is, with our folder before all others.
pub fn path_with(folder: &Path, path: Option<&OsStr>) -> OsString {
    let mut with = folder.as_os_str().to_owned();
    // An empty entry would be the program's current folder.
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
    fn our_folder_is_the_first_and_there_once() {
        let with = |path: Option<&str>| path_with(Path::new("/ours"), path.map(OsStr::new));
        assert_eq!(with(None), "/ours");
        assert_eq!(with(Some("")), "/ours");
        assert_eq!(with(Some("/a:/b")), "/ours:/a:/b");
        assert_eq!(with(Some("/a::/ours:")), "/ours:/a");
    }

    #[test]
    fn a_folder_needs_both_and_a_name_that_the_loader_can_read() {
        let temporary = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let odd = temporary.path().join("a:b");
        std::fs::create_dir(&odd).unwrap_or_else(|e| panic!("{e}"));
        for name in SONAMES {
            let error = folder(Some(&odd));
            assert!(
                matches!(error, Err(LibrariesError::NotThere { missing, .. }) if missing == name)
            );
            std::fs::write(odd.join(name), "").unwrap_or_else(|e| panic!("{e}"));
        }
        assert!(matches!(folder(Some(&odd)), Err(LibrariesError::Unspeakable { .. })));
        let plain = temporary.path().join("plain");
        std::fs::rename(&odd, &plain).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(folder(Some(&plain)).ok(), Some(plain));
    }
}
