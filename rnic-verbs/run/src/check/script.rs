//! Checks a script for commands that change or remove the loader's variables, which programs that
//! it starts inherit.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::{Kind, Report};
use crate::libraries::PATH_VARIABLE;
use crate::preload::LIST_VARIABLE;

/// Reports assignments to `LD_LIBRARY_PATH` and `LD_PRELOAD`, and commands that start programs
/// without these variables. Only the text is searched: whether
/// the script executes the commands is unknown.
pub(super) fn examine(path: &Path, report: &mut Report) {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LENGTH).read_to_end(&mut text));
    if read.is_err() {
        return;
    }
    let text = String::from_utf8_lossy(&text);
    if changes(&text, PATH_VARIABLE) {
        let words = format!(
            "it sets {PATH_VARIABLE}; programs that it starts get rnicd's libraries nevertheless, \
             by {LIST_VARIABLE}"
        );
        report.add(Kind::Fine, "script", words);
    }
    if changes(&text, LIST_VARIABLE) {
        let words = format!(
            "it sets {LIST_VARIABLE}; programs that it starts get rnicd's libraries and device \
             files only if the new value contains the old one \
             (`{LIST_VARIABLE}=LIBRARY:${LIST_VARIABLE}`)"
        );
        report.add(Kind::Unknown, "script", words);
    }
    if let Some(command) = without_environment(&text) {
        let words = format!(
            "it contains `{command}`, which removes {PATH_VARIABLE} and {LIST_VARIABLE}; programs \
             that it starts in this way do not find rnicd; for these, install rnicd for the whole \
             machine (`rnicctl system install`)"
        );
        report.add(Kind::Unknown, "script", words);
    }
}

/// Returns the first command in a line other than a comment that starts programs without the
/// environment of the script.
fn without_environment(text: &str) -> Option<&'static str> {
    let is_end = |c: char| c.is_whitespace() || ";|&()`\"'".contains(c);
    let lines = text.lines().map(str::trim_start).filter(|line| !line.starts_with('#'));
    lines.into_iter().find_map(|line| {
        let mut words = line.split(is_end).filter(|word| !word.is_empty()).peekable();
        while let Some(word) = words.next() {
            let argument = words.peek().copied().unwrap_or_default();
            match word.rsplit('/').next() {
                Some("sudo") => return Some("sudo"),
                Some("env") if ["-", "-i", "--ignore-environment"].contains(&argument) => {
                    return Some("env -i");
                }
                _ => {}
            }
        }
        None
    })
}

/// Returns true if a line other than a comment assigns to the variable or removes it.
fn changes(text: &str, variable: &str) -> bool {
    let lines = text.lines().map(str::trim_start).filter(|line| !line.starts_with('#'));
    let mut found = lines.flat_map(|line| line.match_indices(variable).map(move |at| (line, at.0)));
    found.any(|(line, at)| {
        let before = line[..at].trim_end();
        let after = &line[at + variable.len()..];
        after.starts_with('=') || before.ends_with("unset") || before.ends_with("setenv")
    })
}

/// Maximum number of bytes that are searched.
const LENGTH: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_are_found() {
        for text in [
            "#!/bin/sh\nLD_LIBRARY_PATH=/x prog",
            "export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH",
            "env LD_LIBRARY_PATH= prog",
            "unset LD_LIBRARY_PATH",
            "setenv LD_LIBRARY_PATH /x",
        ] {
            assert!(changes(text, PATH_VARIABLE), "{text}");
        }
        for text in ["", "echo $LD_LIBRARY_PATH", "# LD_LIBRARY_PATH=/x", "LD_PRELOAD=/x"] {
            assert!(!changes(text, PATH_VARIABLE), "{text}");
        }
    }
    #[test]
    fn commands_without_environment_are_found() {
        for (text, command) in [
            ("#!/bin/sh\nsudo -E ./test", Some("sudo")),
            ("x=$(/usr/bin/sudo id)", Some("sudo")),
            ("true && env -i PATH=$PATH ./test", Some("env -i")),
            ("/usr/bin/env - ./test", Some("env -i")),
            ("env A=b ./test; env", None),
            ("# sudo ./test\npseudo sudoers", None),
            ("#!/usr/bin/env -S A=b sh", None),
        ] {
            assert_eq!(without_environment(text), command, "{text}");
        }
    }
}
