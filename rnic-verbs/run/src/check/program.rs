//! What matters of a program: whether the loader can and will give it our libraries, and whether
//! they have what it wants.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::served::{self, Obstacle, Refusal};
use super::{Kind, Ours, Report};
use crate::daemon::is_executable;
use crate::elf::{Elf, Import};
use crate::libraries::{PATH_VARIABLE, SONAMES, path_with};
use crate::loader::{Closure, Loader};

/// The file that is run by this name: itself if it has a slash, else the first in `PATH`.
pub fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Path::new(program).exists().then(|| program.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = std::env::split_paths(&path);
    folders.find_map(|folder| Some(folder.join(program)).filter(|file| is_executable(file)))
}

/// Why the libraries cannot serve a program, if that is known beforehand. What cannot be run, or
/// cannot be read, is for the kernel to refuse.
pub fn refusal(program: &OsStr) -> Option<Refusal> {
    let path = the_program(program, &mut Report::default())?;
    let elf = Elf::read(&path).ok();
    let kind = elf.and_then(|elf| served::kind(&elf).ok());
    let kind = kind.filter(|obstacle| !matches!(obstacle, Obstacle::NoLoader(_)));
    let obstacle = served::rights(&path).or(kind)?;
    Some(Refusal { path, obstacle })
}

/// Everything about a program.
pub(super) fn examine(program: &OsStr, ours: Option<&Ours>, report: &mut Report) {
    let Some(path) = the_program(program, report) else { return };
    let elf = match Elf::read(&path) {
        Ok(elf) => elf,
        Err(error) => return report.add(Kind::Problem, "program", error.to_string()),
    };
    if !is_loaded_by_glibc(&path, &elf, report) {
        return;
    }
    keeps_the_path(&path, report);
    if let Some(ours) = ours {
        let loader_path = path_with(&ours.folder, std::env::var_os(PATH_VARIABLE).as_deref());
        let closure = Loader::new(elf.target, &loader_path).closure(&path, &elf);
        gets_ours(&closure, ours, report);
        finds_its_symbols(&path, &elf, &closure, ours, report);
    }
}

/// The program itself: of a script its interpreter, and of that interpreter if it is a script.
fn the_program(program: &OsStr, report: &mut Report) -> Option<PathBuf> {
    let shown = program.display();
    let mut found = find(program);
    if found.is_none() {
        report.add(
            Kind::Problem,
            "program",
            format!("{shown}: not found, neither here nor in PATH"),
        );
    }
    for _ in 0..SCRIPTS {
        let path = found?;
        if !is_executable(&path) {
            let words = format!("{} is no file that this user may run", path.display());
            report.add(Kind::Problem, "program", words);
            return None;
        }
        let Some(interpreter) = interpreter(&path) else {
            report.add(Kind::Fine, "program", path.display().to_string());
            return Some(path);
        };
        let words = format!("{} is a script of {}", path.display(), interpreter.display());
        found = find(interpreter.as_os_str());
        match found {
            Some(_) => report.add(Kind::Fine, "program", words),
            None => report.add(Kind::Problem, "program", format!("{words}, which is not there")),
        }
    }
    report.add(Kind::Problem, "program", format!("{shown}: scripts of scripts without an end"));
    None
}

/// What runs a script: the program that its first line names, or that `env` will look for.
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

/// Only a program of this kind of machine that glibc's loader loads can have our libraries.
fn is_loaded_by_glibc(path: &Path, elf: &Elf, report: &mut Report) -> bool {
    match served::kind(elf) {
        Ok(obstacle) => {
            report.add(Kind::Problem, "loader", format!("{} {obstacle}", path.display()));
            return false;
        }
        Err(Some(loader)) => {
            let words = format!("dynamically linked, loaded by {}", loader.display());
            report.add(Kind::Fine, "loader", words);
        }
        Err(None) => report.add(Kind::Unknown, "loader", "it is a loader: what will it load?"),
    }
    true
}

/// A program that gets rights at its start is loaded without `LD_LIBRARY_PATH`.
fn keeps_the_path(path: &Path, report: &mut Report) {
    match served::rights(path) {
        None => report.add(Kind::Fine, "rights", "it gets none at its start"),
        Some(obstacle) => {
            report.add(Kind::Problem, "rights", format!("{} {obstacle}", path.display()));
        }
    }
}

/// Whether it uses our libraries, and would be given ours.
fn gets_ours(closure: &Closure, ours: &Ours, report: &mut Report) {
    let mut used = Vec::new();
    for name in SONAMES {
        let Some(loaded) = closure.libraries.get(name) else { continue };
        if loaded.path == ours.folder.join(name) {
            used.push(name);
        } else if let Some((rpath, owner)) = &loaded.by_rpath {
            let words = format!(
                "{} has the RPATH {rpath}, which the loader searches before {PATH_VARIABLE}, and \
                 there is {}; take it away (`patchelf --remove-rpath`)",
                owner.display(),
                loaded.path.display()
            );
            report.add(Kind::Problem, "libraries", words);
        } else {
            let path = loaded.path.display();
            report.add(Kind::Problem, "libraries", format!("it would be given {path}, not ours"));
        }
    }
    match used[..] {
        [] if SONAMES.iter().any(|name| closure.libraries.contains_key(*name)) => {}
        [] => report.add(
            Kind::Unknown,
            "libraries",
            "it is not linked against libibverbs or librdmacm; if it loads them itself (dlopen), \
             it is given ours",
        ),
        _ => report.add(Kind::Fine, "libraries", format!("it is given our {}", used.join(", "))),
    }
    for (name, by) in &closure.missing {
        let words = format!("{} needs {name}, which is not installed", by.display());
        report.add(Kind::Problem, "libraries", words);
    }
}

/// Distributions link programs so that one symbol that is missing keeps them from starting.
fn finds_its_symbols(
    path: &Path,
    program: &Elf,
    closure: &Closure,
    ours: &Ours,
    report: &mut Report,
) {
    let libraries = closure.libraries.values();
    let others = libraries.filter(|loaded| loaded.path.parent() != Some(&ours.folder));
    let all = others.map(|loaded| (loaded.path.as_path(), &loaded.elf));
    let mut wanted = 0;
    for (path, elf) in [(path, program)].into_iter().chain(all) {
        let imports =
            elf.imports.iter().filter_map(|import| Some((import, of_ours(import, ours)?)));
        let (there, missing): (Vec<_>, Vec<_>) = imports.partition(|(_, there)| *there);
        wanted += there.len();
        let missing: Vec<String> = missing.into_iter().map(|(import, _)| named(import)).collect();
        if !missing.is_empty() {
            let words = format!(
                "{} needs what rnicd's libraries do not have: {}; it will not start",
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
            format!("{wanted} that it needs of our libraries are there"),
        );
    }
}

/// Whether ours have an import, if it must come from them.
fn of_ours(import: &Import, ours: &Ours) -> Option<bool> {
    let number = SONAMES.iter().position(|name| import.library.as_deref() == Some(name))?;
    let key = (import.name.clone(), import.version.clone());
    (!import.weak).then(|| ours.files[number].exports.contains(&key))
}

fn named(import: &Import) -> String {
    format!("{}@{}", import.name, import.version.as_deref().unwrap_or_default())
}

/// How many scripts may run each other; the kernel allows five.
const SCRIPTS: usize = 6;
/// Bytes of a script that the kernel looks at.
const FIRST_LINE: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_of_a_script_names_who_runs_it() {
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
