//! The library that shows programs the daemon's devices in `/sys` and `/dev`, and the loader's list
//! with it in front.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Its name, in the folder of the others.
const LIBRARY: &str = "librnic_preload.so";
/// Environment variable that names the tree to it.
pub const TREE_VARIABLE: &str = "RNIC_TREE";
/// Environment variable of the program loader.
pub const LIST_VARIABLE: &str = "LD_PRELOAD";

/// Environment variable with the options of AddressSanitizer.
pub const SANITIZER_VARIABLE: &str = "ASAN_OPTIONS";
/// Keeps AddressSanitizer from refusing a library that is loaded before its runtime. Its functions
/// are still called: ours pass their calls on to the next library.
const ANY_ORDER: &str = "verify_asan_link_order=0";

/// The library, if it is there and the loader can be told of it: its list is separated by blanks,
/// too.
pub fn library(folder: &Path) -> Option<PathBuf> {
    let path = folder.join(LIBRARY);
    let blank = |byte: &u8| byte.is_ascii_whitespace() || *byte == b':';
    let speakable = !path.as_os_str().as_bytes().iter().any(blank);
    Some(path).filter(|path| speakable && path.exists())
}

/// The loader's list as it is, with this library before all others.
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

/// The options of AddressSanitizer with ours before all others: the last one of a name counts.
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
    fn options_of_the_user_count_more_than_ours() {
        let with = |options: Option<&str>| sanitizer_options(options.map(OsStr::new));
        assert_eq!(with(None), ANY_ORDER);
        assert_eq!(with(Some("")), ANY_ORDER);
        assert_eq!(with(Some(ANY_ORDER)), ANY_ORDER);
        assert_eq!(with(Some("a=1:b=2")), "verify_asan_link_order=0:a=1:b=2");
    }

    #[test]
    fn what_was_preloaded_before_stays() {
        let with = |list: Option<&str>| list_with(Path::new("/ours.so"), list.map(OsStr::new));
        assert_eq!(with(None), "/ours.so");
        assert_eq!(with(Some("/a.so  /b.so:/ours.so")), "/ours.so:/a.so:/b.so");
    }

    #[test]
    fn a_folder_that_the_loader_cannot_be_told_of_has_none() {
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
