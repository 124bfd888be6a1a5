//! Words for a shell.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// A word that any POSIX shell reads as this text, whatever is in it.
pub fn quoted(text: &OsStr) -> std::ffi::OsString {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-+:,@%".contains(byte);
    let bytes = text.as_bytes();
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return text.to_owned();
    }
    let mut word = vec![b'\''];
    for byte in bytes {
        match byte {
            // Nothing is special between single quotes, so one of them can only stand outside.
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
    fn a_shell_reads_what_was_meant() {
        for text in ["/usr/lib/rnicd", "", "a b  c", "it's", "''", "$HOME `x` \\ \"", "a\nb", "*"] {
            let script = format!("printf %s {}", quoted(OsStr::new(text)).to_string_lossy());
            let output = std::process::Command::new("sh").arg("-c").arg(script).output();
            assert_eq!(output.map(|o| o.stdout).ok().as_deref(), Some(text.as_bytes()), "{text}");
        }
        assert_eq!(quoted(OsStr::new("/usr/lib:/x")), "/usr/lib:/x");
    }
}
