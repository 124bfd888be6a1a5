//! The preloaded library that shows the daemon's devices in `/sys` and `/dev`, and its place in
//! `LD_PRELOAD`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// File name of the library, in the directory of the others.
const LIBRARY: &str = "librnic_preload.so";
/// Environment variable with the tree's path, for the library.
pub const TREE_VARIABLE: &str = "RNIC_TREE";
/// Environment variable with ld.so's preload list.
pub const LIST_VARIABLE: &str = "LD_PRELOAD";

/// Environment variable with the options of AddressSanitizer.
pub const SANITIZER_VARIABLE: &str = "ASAN_OPTIONS";
/// Permits a library that is loaded before AddressSanitizer's runtime. The sanitizer's functions
/// are still called, because this library passes its calls on to the next library.
const ANY_ORDER: &str = "verify_asan_link_order=0";

/// Returns the library if it exists and its path can be in `LD_PRELOAD`, whose entries are
/// separated by colons and white space.
pub fn library(folder: &Path) -> Option<PathBuf> {
    let path = folder.join(LIBRARY);
    let blank = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
    let is_valid = !path.as_os_str().as_bytes().iter().any(blank);
    Some(path).filter(|path| is_valid && path.exists())
}

/// Returns `LD_PRELOAD` with this library first.
pub fn list_with(library: &Path, list: Option<&OsStr>) -> OsString {
    let mut with = library.as_os_str().to_owned();
    let blank = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
    let others = list.unwrap_or_default().as_bytes().split(blank);
    for other in others.filter(|o| !o.is_empty() && *o != library.as_os_str().as_bytes()) {
        with.push(":");
        with.push(OsStr::from_bytes(other));
    }
    with
}

/// Returns AddressSanitizer's options with [`ANY_ORDER`] first. If an option occurs twice, the last
/// one applies, so the user's options win.
pub fn sanitizer_options(options: Option<&OsStr>) -> OsString {
    let mut with = OsString::from(ANY_ORDER);
    if let Some(other) = options.filter(|options| !options.is_empty() && *options != ANY_ORDER) {
        with.push(":");
        with.push(other);
    }
    with
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_sanitizer_options_win() {
        let with = |options: Option<&str>| sanitizer_options(options.map(OsStr::new));
        assert_eq!(with(None), ANY_ORDER);
        assert_eq!(with(Some("")), ANY_ORDER);
        assert_eq!(with(Some(ANY_ORDER)), ANY_ORDER);
        assert_eq!(with(Some("a=1:b=2")), "verify_asan_link_order=0:a=1:b=2");
    }

    #[test]
    fn previous_preloads_remain() {
        let with = |list: Option<&str>| list_with(Path::new("/ours.so"), list.map(OsStr::new));
        assert_eq!(with(None), "/ours.so");
        assert_eq!(with(Some("/a.so  /b.so:/ours.so")), "/ours.so:/a.so:/b.so");
    }

    #[test]
    fn folder_with_separator_has_no_preload() {
        let parent = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        for (name, has) in [("plain", true), ("with blank", false), ("with:colon", false)] {
            let folder = parent.path().join(name);
            std::fs::create_dir(&folder).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(library(&folder), None, "{name}");
            std::fs::write(folder.join(LIBRARY), "").unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(library(&folder).is_some(), has, "{name}");
        }
    }
}
