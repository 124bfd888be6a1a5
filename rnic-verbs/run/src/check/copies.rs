//! Checks for copies of rdma-core's libraries under another name, such as `libibverbs-1a2b3c.so.1`
//! of a Python wheel. The loader loads them beside rnicd's libraries, whose functions come first.

use std::path::Path;

use super::{Kind, OwnLibraries, Report};
use crate::elf::{Elf, Import};
use crate::libraries::SONAMES;
use crate::loader::Closure;

/// Reports the copies that a program loads, and imported functions that only a copy has.
pub(super) fn examine(
    path: &Path,
    program: &Elf,
    closure: &Closure,
    ours: &OwnLibraries,
    report: &mut Report,
) {
    let is_copy = |name: &str| original_of(name).is_some();
    for (name, copy) in closure.libraries.iter().filter(|(name, _)| is_copy(name)) {
        let shown = copy.path.display();
        if ours.preloaded.is_none() {
            let words = format!("it would call {shown}, not rnicd's libraries");
            report.add(Kind::Problem, "libraries", words);
            continue;
        }
        let words = format!(
            "it loads {shown} too, a copy of {}; rnicd's functions come before those of the copy",
            original_of(name).unwrap_or_default()
        );
        report.add(Kind::Fine, "libraries", words);
    }
    let libraries = closure.libraries.iter().filter(|(name, _)| !is_copy(name));
    let libraries = libraries.map(|(_, loaded)| (loaded.path.as_path(), &loaded.elf));
    for (path, elf) in [(path, program)].into_iter().chain(libraries) {
        let lacking = elf.imports.iter().filter(|import| is_lacking(import, ours));
        let lacking: Vec<&str> = lacking.map(|import| import.name.as_str()).collect();
        if !lacking.is_empty() {
            let words = format!(
                "{} needs functions that only its copy has: {}; they do not work with rnicd's \
                 devices",
                path.display(),
                lacking.join(", ")
            );
            report.add(Kind::Unknown, "symbols", words);
        }
    }
}

/// Returns true if an import is satisfied by a copy because rnicd's libraries lack it.
fn is_lacking(import: &Import, ours: &OwnLibraries) -> bool {
    let is_of_copy = import.library.as_deref().is_some_and(|name| original_of(name).is_some());
    // Functions for provider drivers, which are part of the copy.
    let is_private = import.version.as_deref().is_some_and(|version| version.contains("PRIVATE"));
    let is_ours = ours.files.iter().any(|file| {
        file.exports.iter().any(|(name, version)| {
            *name == import.name && (import.version.is_none() || *version == import.version)
        })
    });
    is_of_copy && !is_private && !import.weak && !is_ours
}

/// Returns the library of which a file with this name is a copy. `librnic_preload.so` has the same
/// rule for `dlopen(3)`.
fn original_of(name: &str) -> Option<&'static str> {
    SONAMES.into_iter().find(|soname| {
        let Some((stem, _)) = soname.split_once(".so") else { return false };
        let hash = name.strip_prefix(stem).and_then(|rest| rest.strip_prefix('-'));
        let Some((hash, version)) = hash.and_then(|rest| rest.split_once(".so")) else {
            return false;
        };
        let is_version = version.is_empty() || version.starts_with('.');
        is_version && hash.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_recognized_by_name() {
        let [verbs, cm] = SONAMES;
        assert_eq!(original_of("libibverbs-1a2b3c4d.so.1.14.44.0"), Some(verbs));
        assert_eq!(original_of("librdmacm-00ff.so"), Some(cm));
        for other in
            ["libibverbs.so.1", "libibverbs-rnicd.so", "libmlx5-00ff.so.1", "libibverbs-0.sox"]
        {
            assert_eq!(original_of(other), None, "{other}");
        }
    }
}
