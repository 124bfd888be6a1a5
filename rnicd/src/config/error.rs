//! Configuration errors with file, line, key and value, all derived from a byte offset.

use std::path::{Path, PathBuf};

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read configuration {file}: {error}")]
    Read {
        /// Path of the configuration file.
        file: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// A value is invalid.
    #[error("{file}:{line}:{column}: {key} = {value}: {why}")]
    Value {
        /// Path of the configuration file.
        file: PathBuf,
        /// Line in the file, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// Key with its section, like `limits.qps`.
        key: String,
        /// The value as written in the file.
        value: String,
        /// Description of the error.
        why: String,
    },
    /// A line is not TOML, or has an unknown section.
    #[error("{file}:{line}:{column}: {why}")]
    Line {
        /// Path of the configuration file.
        file: PathBuf,
        /// Line in the file, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// Description of the error.
        why: String,
    },
}

/// An error about the text at a byte offset.
#[derive(Debug)]
pub(super) struct Wrong {
    pub at: usize,
    pub why: String,
}

impl ConfigError {
    /// Returns an error about the text at byte `offset`.
    pub fn at(file: &Path, text: &str, offset: usize, why: impl Into<String>) -> Self {
        let file = file.to_owned();
        let offset = floor_char_boundary(text, offset);
        let line = text[..offset].matches('\n').count() + 1;
        let start = text[..offset].rfind('\n').map_or(0, |newline| newline + 1);
        let column = text[start..offset].chars().count() + 1;
        let why = why.into();
        match assignment_at(text, offset) {
            Some((key, value)) => ConfigError::Value { file, line, column, key, value, why },
            None => ConfigError::Line { file, line, column, why },
        }
    }
}

/// Returns key (with its section) and value of the assignment that contains `offset`.
fn assignment_at(text: &str, offset: usize) -> Option<(String, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let at = text[..offset].matches('\n').count();
    let mut key_value = None;
    let mut section = "";
    for line in lines[..lines.len().min(at + 1)].iter().rev() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').filter(|_| line.contains(']')) {
            // A line that starts with a bracket may instead continue an array. Those do not start
            // with a letter.
            let name = name.split(']').next().unwrap_or("").trim_start_matches('[').trim();
            if name.starts_with(|c: char| c.is_ascii_alphabetic()) {
                section = name;
                break;
            }
        }
        if key_value.is_none() && !line.starts_with('#') {
            key_value = line.split_once('=');
        }
    }
    let (key, value) = key_value?;
    let key = match section {
        "" => key.trim().to_owned(),
        section => format!("{section}.{}", key.trim()),
    };
    Some((key, without_comment(value).trim().chars().take(60).collect()))
}

fn without_comment(value: &str) -> &str {
    let mut quoted = false;
    for (i, c) in value.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '#' if !quoted => return &value[..i],
            _ => {}
        }
    }
    value
}

fn floor_char_boundary(text: &str, offset: usize) -> usize {
    let mut at = offset.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assignment_is_found_from_any_byte_of_it() {
        let text = "a = 1\n[limits]\n# qps = 3\nqps = \"x#y\" # many\nlist = [\n  1,\n]\n[é\n";
        let find = |needle: &str| assignment_at(text, text.find(needle).unwrap_or(0));
        let pair = |k: &str, v: &str| Some((k.to_owned(), v.to_owned()));
        assert_eq!(find("1\n[lim"), pair("a", "1"));
        assert_eq!(find("x#y"), pair("limits.qps", "\"x#y\""));
        assert_eq!(find("  1,"), pair("limits.list", "["));
        for offset in 0..text.len() + 3 {
            let _ = ConfigError::at(Path::new("f"), text, offset, "").to_string();
        }
    }
}
