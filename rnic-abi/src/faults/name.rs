//! Names of rules.

use std::fmt;

/// Name of a rule: 1 to 24 letters, digits, `-`, `_` and `.`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FaultName {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl FaultName {
    /// Maximum length in bytes.
    pub const MAX: usize = 24;

    /// Parses a name. The error states the permitted characters.
    pub fn parse(text: &str) -> Result<Self, String> {
        let permitted = |c: u8| c.is_ascii_alphanumeric() || b"-_.".contains(&c);
        if text.is_empty() || text.len() > Self::MAX || !text.bytes().all(permitted) {
            let most = Self::MAX;
            return Err(format!("a name has 1 to {most} letters, digits, '-', '_' and '.'"));
        }
        let mut bytes = [0; Self::MAX];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        let len = u8::try_from(text.len()).unwrap_or_default();
        Ok(FaultName { bytes, len })
    }

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        // A parsed name is ASCII.
        std::str::from_utf8(&self.bytes[..self.len.into()]).unwrap_or_default()
    }
}

impl fmt::Display for FaultName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for FaultName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}
