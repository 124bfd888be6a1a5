//! Names of files that a peer may choose.

use std::fmt;

/// A name that stays in its folder: one component, not hidden, printable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName(String);

/// Why a name was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name {name:?} cannot be used: it {why}")]
pub struct NameError {
    /// The name, cut to 255 bytes.
    pub name: String,
    /// What is wrong with it.
    pub why: &'static str,
}

impl FileName {
    /// Most bytes: what Linux file systems take, and what fits the field on the wire.
    pub const MAX: usize = 255;

    /// Takes a name that is a single file name: no slash, no leading dot, at most [`Self::MAX`]
    /// bytes.
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

    /// Checks a name of the wire.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, NameError> {
        match std::str::from_utf8(bytes) {
            Ok(name) => Self::new(name),
            Err(_) => {
                let name = String::from_utf8_lossy(bytes);
                let name = name.floor_char_boundary_at(Self::MAX).to_owned();
                Err(NameError { name, why: "is no UTF-8" })
            }
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The longest start of a text within some bytes that cuts no character.
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
    fn ordinary_names_are_taken_as_they_are() {
        for name in ["a", "a.txt", "two words", "grüße", "a..b", "-rf", &"x".repeat(255)] {
            assert_eq!(FileName::new(name).map(|n| n.to_string()), Ok(name.to_owned()));
        }
    }

    #[test]
    fn names_cannot_leave_the_folder_or_hide_or_trick_a_terminal() {
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
        assert_eq!(FileName::from_bytes(b"a\xFF").unwrap_err().why, "is no UTF-8");
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
