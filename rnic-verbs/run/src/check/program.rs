//! Checks a program: whether the loader would load rnicd's libraries for it, and whether they
//! contain the symbols that it needs.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::obstacle::{self, Obstacle, Refusal};
use super::{Kind, OwnLibraries, Report, copies, script};
use crate::daemon::is_executable;
use crate::elf::{Elf, Import};
use crate::libraries::{PATH_VARIABLE, SONAMES, path_with};
use crate::loader::{Closure, Loader};

/// Returns the file that would be run for this name: the path itself if it contains a slash, else
/// the first match in `PATH`.
pub fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).exists().then(|| program.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&path);
    folders.find_map(|folder| Some(folder.join(program)).filter(|file| is_executable(file)))
}

/// Returns the reason why a program cannot use the libraries, if the check can determine it before
/// the program runs. Returns `None` for files that cannot be read or run, because exec reports
/// these errors.
pub fn refusal(program: &OsStr) -> Option<Refusal> {
    let path = resolve_scripts(program, &mut Report::default())?;
    let elf = Elf::read(&path).ok();
    let kind = elf.and_then(|elf| obstacle::kind(&elf).ok());
    let kind = kind.filter(|obstacle| !matches!(obstacle, Obstacle::NoLoader(_)));
    let obstacle = obstacle::rights(&path).or(kind)?;
    Some(Refusal { path, obstacle })
}

/// Performs all checks of a program.
pub(super) fn examine(program: &OsStr, ours: Option<&OwnLibraries>, report: &mut Report) {
    let Some(path) = resolve_scripts(program, report) else { return };
    let elf = match Elf::read(&path) {
        Ok(elf) => elf,
        Err(error) => return report.add(Kind::Problem, "program", error.to_string()),
    };
    if !is_loaded_by_glibc(&path, &elf, report) {
        return;
    }
    check_rights(&path, report);
    if let Some(ours) = ours {
        let loader_path = path_with(&ours.folder, std::env::var_os(PATH_VARIABLE).as_deref());
        let preloaded = ours.preloaded.clone().unwrap_or_default();
        let closure = Loader::new(elf.target, &loader_path, preloaded).closure(&path, &elf);
        check_libraries(&closure, ours, report);
        copies::examine(&path, &elf, &closure, ours, report);
        check_symbols(&path, &elf, &closure, ours, report);
    }
}

/// Returns the program itself; for a script, the program at the end of its chain of interpreters.
fn resolve_scripts(program: &OsStr, report: &mut Report) -> Option<PathBuf> {
    let shown = program.display();
    let mut found = find(program);
    if found.is_none() {
        report.add(
            Kind::Problem,
            "program",
            format!("{shown}: not found; a name without a slash must be in PATH"),
        );
    }
    for _ in 0..SCRIPTS {
        let path = found?;
        if !is_executable(&path) {
            let words = format!("{} is not a file that this user may run", path.display());
            report.add(Kind::Problem, "program", words);
            return None;
        }
        let Some(interpreter) = interpreter(&path) else {
            report.add(Kind::Fine, "program", path.display().to_string());
            return Some(path);
        };
        script::examine(&path, report);
        let words = format!("{} is a script of {}", path.display(), interpreter.display());
        found = find(interpreter.as_os_str());
        match found {
            Some(_) => report.add(Kind::Fine, "program", words),
            None => report.add(Kind::Problem, "program", format!("{words}, which is missing")),
        }
    }
    report.add(Kind::Problem, "program", format!("{shown}: too many nested scripts"));
    None
}

/// Returns the interpreter of a script: the program in its first line, or the program that `env`
/// would run.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    File::open(path).ok()?.take(FIRST_LINE).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let mut words = line.split(|byte| b" \t".contains(byte)).filter(|word| !word.is_empty());
    let first = Path::new(OsStr::from_bytes(words.next()?));
    let after_env = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
    match after_env {
        Some(program) if first.ends_with("env") => Some(OsStr::from_bytes(program).into()),
        _ => Some(first.to_owned()),
    }
}

/// Returns true if glibc's loader for this target machine loads the program. Otherwise the program
/// cannot use rnicd's libraries.
fn is_loaded_by_glibc(path: &Path, elf: &Elf, report: &mut Report) -> bool {
    match obstacle::kind(elf) {
        Ok(obstacle) => {
            report.add(Kind::Problem, "loader", format!("{} {obstacle}", path.display()));
            return false;
        }
        Err(Some(loader)) => {
            let words = format!("dynamically linked, loaded by {}", loader.display());
            report.add(Kind::Fine, "loader", words);
        }
        Err(None) => {
            let words = "it is a loader; the program that it will load is not checked";
            report.add(Kind::Unknown, "loader", words);
        }
    }
    true
}

/// Reports whether the program gains privileges at exec. The loader would then ignore
/// `LD_LIBRARY_PATH`.
fn check_rights(path: &Path, report: &mut Report) {
    match obstacle::rights(path) {
        None => report.add(Kind::Fine, "rights", "it gains none at exec"),
        Some(obstacle) => {
            report.add(Kind::Problem, "rights", format!("{} {obstacle}", path.display()));
        }
    }
}

/// Reports whether the program uses the libraries, and whether the loader would load rnicd's
/// libraries for it.
fn check_libraries(closure: &Closure, ours: &OwnLibraries, report: &mut Report) {
    let mut used = Vec::new();
    for name in SONAMES {
        let Some(loaded) = closure.libraries.get(name) else { continue };
        if loaded.path == ours.folder.join(name) {
            used.push(name);
        } else if let Some((rpath, owner)) = &loaded.by_rpath {
            let words = format!(
                "{} has the RPATH {rpath}, which the loader searches before {PATH_VARIABLE}, and \
                 finds {} there; remove the RPATH (`patchelf --remove-rpath`)",
                owner.display(),
                loaded.path.display()
            );
            report.add(Kind::Problem, "libraries", words);
        } else {
            let path = loaded.path.display();
            report.add(Kind::Problem, "libraries", format!("it would load {path}, not rnicd's"));
        }
    }
    match used[..] {
        [] if SONAMES.iter().any(|name| closure.libraries.contains_key(*name)) => {}
        [] => report.add(
            Kind::Unknown,
            "libraries",
            "it is not linked against libibverbs or librdmacm; if it loads them itself (dlopen), \
             under any path or name, it gets rnicd's",
        ),
        _ => report.add(Kind::Fine, "libraries", format!("it loads rnicd's {}", used.join(", "))),
    }
    for (name, by) in &closure.missing {
        let words = format!("{} needs {name}, which is not installed", by.display());
        report.add(Kind::Problem, "libraries", words);
    }
}

/// Reports missing symbols. Distributions link programs so that a single missing symbol prevents
/// them from starting.
fn check_symbols(
    path: &Path,
    program: &Elf,
    closure: &Closure,
    ours: &OwnLibraries,
    report: &mut Report,
) {
    let libraries = closure.libraries.values();
    let others = libraries.filter(|loaded| loaded.path.parent() != Some(&ours.folder));
    let all = others.map(|loaded| (loaded.path.as_path(), &loaded.elf));
    let mut wanted = 0;
    for (path, elf) in [(path, program)].into_iter().chain(all) {
        let imports =
            elf.imports.iter().filter_map(|import| Some((import, is_provided(import, ours)?)));
        let (there, missing): (Vec<_>, Vec<_>) = imports.partition(|(_, there)| *there);
        wanted += there.len();
        let missing: Vec<String> = missing.into_iter().map(|(import, _)| named(import)).collect();
        if !missing.is_empty() {
            let words = format!(
                "{} needs symbols that rnicd's libraries do not have: {}; it will not start",
                path.display(),
                missing.join(", ")
            );
            report.add(Kind::Problem, "symbols", words);
        }
    }
    if wanted > 0 {
        report.add(
            Kind::Fine,
            "symbols",
            format!("rnicd's libraries have {wanted} symbols that it needs"),
        );
    }
}

/// Returns true if rnicd's libraries contain the import; `None` if it may come from elsewhere.
fn is_provided(import: &Import, ours: &OwnLibraries) -> Option<bool> {
    let number = SONAMES.iter().position(|name| import.library.as_deref() == Some(name))?;
    let key = (import.name.clone(), import.version.clone());
    (!import.weak).then(|| ours.files[number].exports.contains(&key))
}

fn named(import: &Import) -> String {
    format!("{}@{}", import.name, import.version.as_deref().unwrap_or_default())
}

/// Maximum nesting of scripts; the kernel allows five.
const SCRIPTS: usize = 6;
/// Length of the start of a script that the kernel reads, in bytes.
const FIRST_LINE: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_interpreter_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap_or_else(|e| panic!("{e}"));
        let named = |text: &str| {
            std::fs::write(file.path(), text).unwrap_or_else(|e| panic!("{e}"));
            interpreter(file.path())
        };
        for (text, expected) in [
            ("#!/bin/sh\necho", Some("/bin/sh")),
            ("#! /bin/sh -e\n", Some("/bin/sh")),
            ("#!/usr/bin/env python3\n", Some("python3")),
            ("#!/usr/bin/env -S A=b python3 -u\n", Some("python3")),
            ("#!/usr/bin/env\n", Some("/usr/bin/env")),
            ("#!\n", None),
            ("\x7fELF", None),
            ("", None),
        ] {
            assert_eq!(named(text), expected.map(PathBuf::from), "{text:?}");
        }
    }
}
