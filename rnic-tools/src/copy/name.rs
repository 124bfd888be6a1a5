//! File names that a peer may choose.

use std::fmt;

/// A name that stays within its folder: a single component, not hidden, printable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName(String);

/// Why a name was rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name {name:?} cannot be used: it {why}")]
pub struct NameError {
    /// The name, truncated to 255 bytes.
    pub name: String,
    /// The problem.
    pub why: &'static str,
}

impl FileName {
    /// Maximum length in bytes: the limit of Linux file systems, and of the field in the message.
    pub const MAX: usize = 255;

    /// Checks that a name is a single visible file name: no slash, no leading dot, no control
    /// characters, at most [`Self::MAX`] bytes.
    pub fn new(name: &str) -> Result<Self, NameError> {
        let why = if name.is_empty() {
            "is empty"
        } else if name.len() > Self::MAX {
            "is longer than 255 bytes"
        } else if name.contains('/') {
            "has a slash"
        } else if name.starts_with('.') {
            "begins with a dot"
        } else if name.chars().any(char::is_control) {
            "has control characters"
        } else {
            return Ok(FileName(name.to_owned()));
        };
        let cut = name.floor_char_boundary_at(Self::MAX);
        Err(NameError { name: cut.to_owned(), why })
    }

    /// Checks a name from a message.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, NameError> {
        match std::str::from_utf8(bytes) {
            Ok(name) => Self::new(name),
            Err(_) => {
                let name = String::from_utf8_lossy(bytes);
                let name = name.floor_char_boundary_at(Self::MAX).to_owned();
                Err(NameError { name, why: "is not UTF-8" })
            }
        }
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Truncation of text at a character boundary.
pub(super) trait Cut {
    fn floor_char_boundary_at(&self, bytes: usize) -> &str;
}

impl Cut for str {
    fn floor_char_boundary_at(&self, bytes: usize) -> &str {
        let mut end = self.len().min(bytes);
        while !self.is_char_boundary(end) {
            end -= 1;
        }
        &self[..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordinary_names_are_accepted() {
        for name in ["a", "a.txt", "two words", "grüße", "a..b", "-rf", &"x".repeat(255)] {
            assert_eq!(FileName::new(name).map(|n| n.to_string()), Ok(name.to_owned()));
        }
    }

    #[test]
    fn unsafe_names_are_refused() {
        for name in [
            "",
            ".",
            "..",
            "/",
            "/etc/passwd",
            "a/b",
            "../a",
            "a/",
            ".bashrc",
            "a\0b",
            "a\nb",
            "\x1b[2J",
            "a\u{85}b",
            &"x".repeat(256),
        ] {
            assert!(FileName::new(name).is_err(), "{name:?}");
        }
        assert_eq!(FileName::from_bytes(b"a\xFF").unwrap_err().why, "is not UTF-8");
    }

    #[test]
    fn cutting_never_splits_a_character() {
        let long = "ä".repeat(300);
        let e = FileName::new(&long).unwrap_err();
        assert_eq!(e.name, "ä".repeat(127));
        assert_eq!("äb".floor_char_boundary_at(0), "");
        assert_eq!("äb".floor_char_boundary_at(1), "");
        assert_eq!("äb".floor_char_boundary_at(9), "äb");
    }
}
