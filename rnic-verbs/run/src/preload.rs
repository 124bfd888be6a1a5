//! The preloaded libraries and their place in `LD_PRELOAD`: `librnic_preload.so`, which shows the
//! daemon's devices in `/sys` and `/dev`, and rnicd's libibverbs and librdmacm.
//!
//! The loader uses a preloaded library for each `DT_NEEDED` and `dlopen(3)` of its SONAME, so a
//! `DT_RPATH` and a new value of `LD_LIBRARY_PATH` have no effect. The functions of a preloaded
//! library also come before those of a copy under another name.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::libraries::SONAMES;

/// File name of the library that shows devices, in the directory of the other libraries.
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

/// Returns the libraries in order, without those that do not exist in `folder`, as paths below
/// `place`, where the program finds this directory. Returns `None` if these paths cannot be in
/// `LD_PRELOAD`, whose entries are separated by colons and white space.
pub fn libraries(folder: &Path, place: &Path) -> Option<Vec<PathBuf>> {
    if place.as_os_str().as_bytes().iter().any(is_separator) {
        return None;
    }
    let names = [LIBRARY].into_iter().chain(SONAMES);
    let names = names.filter(|name| folder.join(name).exists());
    Some(names.map(|name| place.join(name)).collect())
}

fn is_separator(byte: &u8) -> bool {
    byte.is_ascii_whitespace() || *byte == b':'
}

/// Returns `LD_PRELOAD` with these libraries first.
pub fn list_with(libraries: &[PathBuf], list: Option<&OsStr>) -> OsString {
    let is_ours = |other: &&[u8]| libraries.iter().any(|own| own.as_os_str().as_bytes() == *other);
    let others = list.unwrap_or_default().as_bytes().split(is_separator);
    let others = others.filter(|other| !other.is_empty() && !is_ours(other));
    let own = libraries.iter().map(|library| library.as_os_str().as_bytes());
    let all: Vec<&[u8]> = own.chain(others).collect();
    OsStr::from_bytes(&all.join(&b':')).to_owned()
}

/// Returns the part of a tree with the files of the devices in a list, or of the RoCE devices if
/// there is no list. Returns the whole tree if it has no part for this set of devices.
/// `librnic_preload.so` has the same rule.
pub fn view(tree: &Path, devices: Option<&OsStr>) -> PathBuf {
    let list = devices.unwrap_or_default().as_bytes();
    let names = list.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    let names: BTreeSet<&[u8]> = names.filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        return tree.join("views/.roce");
    }
    if names.iter().any(|name| name[0] == b'.' || name.contains(&b'/')) {
        return tree.to_owned();
    }
    let joined = names.iter().copied().collect::<Vec<_>>().join(&b',');
    let view = tree.join("views").join(OsStr::from_bytes(&joined));
    if names.len() == 1 || view.exists() { view } else { tree.to_owned() }
}

/// Returns AddressSanitizer's options with `ANY_ORDER` first. If an option occurs twice, the last
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
        let own = ["/ours.so", "/verbs.so"].map(PathBuf::from);
        let with = |list: Option<&str>| list_with(&own, list.map(OsStr::new));
        assert_eq!(with(None), "/ours.so:/verbs.so");
        assert_eq!(with(Some("/a.so  /b.so:/ours.so")), "/ours.so:/verbs.so:/a.so:/b.so");
    }

    #[test]
    fn folder_with_separator_has_no_preload() {
        let parent = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        for (name, has) in [("plain", true), ("with blank", false), ("with:colon", false)] {
            let folder = parent.path().join(name);
            std::fs::create_dir(&folder).unwrap_or_else(|e| panic!("{e}"));
            let none = has.then(Vec::new);
            assert_eq!(libraries(&folder, &folder), none, "{name}");
            for library in ["librdmacm.so.1", LIBRARY] {
                std::fs::write(folder.join(library), "").unwrap_or_else(|e| panic!("{e}"));
            }
            let all = [LIBRARY, "librdmacm.so.1"].map(|library| folder.join(library));
            assert_eq!(libraries(&folder, &folder), has.then(|| all.to_vec()), "{name}");
        }
    }

    #[test]
    fn view_is_for_several_devices() {
        let tree = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let of = |names: &str| view(tree.path(), Some(OsStr::new(names)));
        assert_eq!(of("b,a"), tree.path());
        std::fs::create_dir_all(tree.path().join("views/a,b")).unwrap_or_else(|e| panic!("{e}"));
        for list in ["a,b", " b, a,", "b,a,b"] {
            assert_eq!(of(list), tree.path().join("views/a,b"), "{list:?}");
        }
        assert_eq!(of("a,b,c"), tree.path());
        assert_eq!(of("a,a"), tree.path().join("views/a"));
    }

    #[test]
    fn view_is_for_one_device_or_the_roce_devices() {
        let of = |names: Option<&str>| view(Path::new("/t"), names.map(OsStr::new));
        for whole in ["a,b", "../x", ".."] {
            assert_eq!(of(Some(whole)), Path::new("/t"), "{whole:?}");
        }
        for default in [None, Some(""), Some(" ")] {
            assert_eq!(of(default), Path::new("/t/views/.roce"), "{default:?}");
        }
        assert_eq!(of(Some(" rnicd1 ")), Path::new("/t/views/rnicd1"));
    }
}
