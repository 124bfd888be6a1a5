//! Reads the text of a configuration file with limited memory and, for a daemon, without blocking.
//!
//! The path may refer to any file: opening a FIFO could block the reader, and `/dev/zero` has no
//! end. So [`read`] opens the file without blocking and requires a regular file of limited size.
//! [`read_or_wait`] accepts pipes too.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use super::error::ConfigError;

/// Maximum size of a configuration file in bytes.
pub(super) const MAX_BYTES: u64 = 1 << 20;

/// Reads a regular file.
pub(super) fn read(path: &Path) -> Result<String, ConfigError> {
    open(path).and_then(|file| bounded(file, MAX_BYTES)).map_err(|error| failed(path, error))
}

/// Reads a file or a pipe. For a pipe it waits for the writer.
pub(super) fn read_or_wait(path: &Path) -> Result<String, ConfigError> {
    let opened = File::open(path);
    opened.and_then(|file| bounded(file, MAX_BYTES)).map_err(|error| failed(path, error))
}

fn failed(path: &Path, error: io::Error) -> ConfigError {
    ConfigError::Read { file: path.to_owned(), error }
}

fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    // The cast fits: open(2) takes the flags as an `int`.
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other(format!("it is {}, not a regular file", name_of(kind))))
    }
}

fn name_of(kind: FileType) -> &'static str {
    if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_block_device() {
        "a block device"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a directory"
    }
}

/// Reads a file to its end. Fails if it has more than `most` bytes.
fn bounded(file: impl Read, most: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    // One byte more shows that the file is too large, even if its stated size is wrong.
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let why = format!("it has more than {most} bytes (1 MiB), the maximum");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let why = format!("it is not UTF-8 text: byte {at} is invalid");
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(path: &Path) -> String {
        read(path).map_or_else(|error| error.to_string(), |text| panic!("{} bytes", text.len()))
    }

    #[test]
    fn only_a_regular_file_is_read() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let fifo = dir.path().join("fifo");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).unwrap_or_else(|e| panic!("{e}"));
        let socket = dir.path().join("socket");
        let _bound =
            std::os::unix::net::UnixListener::bind(&socket).unwrap_or_else(|e| panic!("{e}"));
        for (path, why) in [
            (fifo.as_path(), "it is a FIFO, not a regular file"),
            (dir.path(), "it is a directory, not a regular file"),
            (Path::new("/dev/zero"), "it is a character device, not a regular file"),
            (socket.as_path(), "No such device or address"),
        ] {
            let said = said(path);
            assert!(said.contains(&path.display().to_string()) && said.contains(why), "{said}");
        }
    }

    #[test]
    fn file_size_is_limited() {
        let dir = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let path = dir.path().join("large");
        let write = |bytes: &[u8]| std::fs::write(&path, bytes).unwrap_or_else(|e| panic!("{e}"));
        write(&vec![b'\n'; MAX_BYTES as usize]);
        assert_eq!(read(&path).map(|text| text.len() as u64).ok(), Some(MAX_BYTES));
        write(&vec![b'\n'; MAX_BYTES as usize + 1]);
        assert!(said(&path).contains("it has more than 1048576 bytes (1 MiB)"), "{}", said(&path));
        assert!(read_or_wait(&path).is_err());
        write(b"# \xff");
        assert!(said(&path).contains("it is not UTF-8 text: byte 2"), "{}", said(&path));
    }
}
