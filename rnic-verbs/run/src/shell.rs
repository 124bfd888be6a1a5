//! Quoting for a shell.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Returns a word that any POSIX shell reads as this text.
pub fn quote(text: &OsStr) -> std::ffi::OsString {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+:,@%".contains(byte);
    let bytes = text.as_bytes();
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return text.to_owned();
    }
    let mut word = vec![b'\''];
    for byte in bytes {
        match byte {
            // A single quote cannot be escaped inside single quotes, so it is put outside.
            b'\'' => word.extend(br"'\''"),
            byte => word.push(*byte),
        }
    }
    word.push(b'\'');
    std::ffi::OsString::from_vec(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_reads_quoted_text() {
        for text in ["/usr/lib/rnicd", "", "a b  c", "it's", "''", "$HOME `x` \\ \"", "a\nb", "*"] {
            let script = format!("printf %s {}", quote(OsStr::new(text)).to_string_lossy());
            let output = std::process::Command::new("sh").arg("-c").arg(script).output();
            assert_eq!(output.map(|o| o.stdout).ok().as_deref(), Some(text.as_bytes()), "{text}");
        }
        assert_eq!(quote(OsStr::new("/usr/lib:/x")), "/usr/lib:/x");
    }
}
