//! Copies a file of any size to another process by RDMA Write.
//!
//! The receiver grants the sender a ring of chunks in registered memory. The sender writes each
//! chunk of the file into the next free slot of the ring by RDMA Write and announces it in a Send,
//! which arrives after the Write. The receiver appends the chunk to a file that has no name yet,
//! and returns the slot in a Send. So the ring limits the memory, whatever the size of the file. At
//! the end the sender transmits the SHA-256 of the bytes it has read. The file gets its name only
//! if the SHA-256 of the written bytes is the same and the file has been synced to the disk.
//! [`send_file`] and [`receive_file`] perform one copy each; [`serve_one`] waits for a sender.
//! `wire` defines the messages, `incoming` the file without a name.
//!
//! The sender can write into the ring at any time. So the receiver copies a chunk out once, and
//! both hashes and writes the copy: the file always has the content that was hashed.

mod cli;
mod incoming;
mod name;
mod receive;
mod send;
mod wire;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use rnic_client::Error;

use crate::cli::printable;
use crate::link::LinkError;

pub use cli::{command, main};
pub use incoming::check_folder;
pub use name::{FileName, NameError};
pub use receive::{receive_file, serve_one};
pub use send::send_file;
pub use wire::refusal;

/// Parameters of the sender.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// Name of the file at the receiver; `None` for the same name.
    pub name: Option<String>,
    /// Maximum bytes per RDMA Write; the receiver may require less. Default 1 MiB.
    pub chunk: u32,
    /// Maximum chunks in flight; the receiver may require less. Default 16.
    pub chunks: u16,
    /// Time without a message from the receiver before giving up. Default 60 s.
    pub patience: Duration,
}

impl Default for SendOptions {
    fn default() -> Self {
        SendOptions { name: None, chunk: 1 << 20, chunks: 16, patience: PATIENCE }
    }
}

/// Parameters of the receiver.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// Replaces a file of the same name. Default: false, which rejects the copy.
    pub replace: bool,
    /// Largest file accepted, in bytes. Default: the free space on the disk.
    pub max_size: Option<u64>,
    /// Maximum bytes per chunk. Default 1 MiB.
    pub chunk: u32,
    /// Maximum chunks of the ring. A copy needs `chunk * chunks` bytes of shared memory and another
    /// `chunk` bytes. Default 16.
    pub chunks: u16,
    /// Time without a message from the sender before giving up. Default 60 s.
    pub patience: Duration,
}

impl Default for ReceiveOptions {
    fn default() -> Self {
        ReceiveOptions {
            replace: false,
            max_size: None,
            chunk: 1 << 20,
            chunks: 16,
            patience: PATIENCE,
        }
    }
}

/// Progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes received by the receiver.
    pub done: u64,
    /// Size of the file in bytes.
    pub total: u64,
}

/// A successful copy.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Name at the receiver.
    pub name: String,
    /// Address of the other side.
    pub peer: SocketAddr,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Time from the connection to the result, including hashing and writing to the disk.
    pub seconds: f64,
    /// SHA-256, equal on both sides.
    pub sha256: Digest,
}

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// Why a copy failed. The receiver then has either no file of this name or the previous one.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The file to send could not be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// Path of the file to send.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file to send is a directory, device or pipe.
    #[error("{path} is not a regular file", path = path.display())]
    NotRegular {
        /// Path of the file to send.
        path: PathBuf,
    },
    /// The file to send changed while it was copied.
    #[error("{path} {how} while it was copied", path = path.display())]
    Changed {
        /// Path of the file to send.
        path: PathBuf,
        /// The change: the file became longer or shorter.
        how: &'static str,
    },
    /// The file could not be written at the receiver.
    #[error("cannot write {path}: {source}", path = path.display())]
    Write {
        /// Path of the file in the receiver's folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// No files can be created in the folder.
    #[error("cannot put files into {folder}: {source}", folder = folder.display())]
    Folder {
        /// Path of the folder.
        folder: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The name cannot be used at the receiver.
    #[error(transparent)]
    Name(#[from] NameError),
    /// This receiver rejected the file and informed the sender.
    #[error("rejected {name:?} from {peer}: {why}")]
    Refused {
        /// Address of the sender.
        peer: SocketAddr,
        /// Name of the file.
        name: String,
        /// Reason for the rejection.
        why: String,
    },
    /// The other side rejected the copy or gave up, with a reason.
    #[error("{peer} reports: {}", printable(why))]
    Peer {
        /// Address of the other side.
        peer: SocketAddr,
        /// Reason given by the other side; may contain any characters.
        why: String,
    },
    /// The received content differs from the sent content.
    #[error(
        "{peer} sent a file with SHA-256 {sent}, but {arrived} arrived: the copy was discarded"
    )]
    Digest {
        /// Address of the sender.
        peer: SocketAddr,
        /// The sender's digest.
        sent: Digest,
        /// The receiver's digest.
        arrived: Digest,
    },
    /// The receiver reports a different content.
    #[error("{peer} stored a file with SHA-256 {stored}, but {sent} was sent")]
    StoredOther {
        /// Address of the receiver.
        peer: SocketAddr,
        /// The sender's digest.
        sent: Digest,
        /// The receiver's digest.
        stored: Digest,
    },
    /// The other side violates the protocol of `rnic-copy`.
    #[error("{peer} violates the protocol: {why}")]
    Protocol {
        /// Address of the other side.
        peer: SocketAddr,
        /// Description of the violation.
        why: String,
    },
    /// The connection failed before the copy was over.
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl From<Error> for CopyError {
    fn from(e: Error) -> Self {
        CopyError::Link(e.into())
    }
}

impl CopyError {
    /// Returns the error text for the other side, or `None` if it cannot be sent or is known there.
    fn for_peer(&self) -> Option<String> {
        match self {
            CopyError::Link(_) | CopyError::Peer { .. } | CopyError::StoredOther { .. } => None,
            // The path of the file may be confidential, so it is omitted.
            CopyError::Read { source, .. } => Some(format!("cannot read it: {}", source.kind())),
            CopyError::Write { source, .. } | CopyError::Folder { source, .. } => {
                Some(format!("cannot write it: {}", source.kind()))
            }
            CopyError::NotRegular { .. } => Some("it is not a regular file".to_owned()),
            CopyError::Changed { how, .. } => Some(format!("the file {how} while it was copied")),
            CopyError::Name(e) => Some(e.to_string()),
            CopyError::Refused { name, why, .. } => Some(format!("{name:?} is refused: {why}")),
            CopyError::Digest { sent, arrived, .. } => {
                Some(format!("SHA-256 {sent} was sent, but {arrived} arrived"))
            }
            CopyError::Protocol { why, .. } => Some(format!("broken protocol: {why}")),
        }
    }
}

/// Default time without a message from the other side before giving up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum size of a chunk in bytes, to limit the memory that the other side can request.
const MAX_CHUNK: u32 = 64 << 20;
/// Maximum number of chunks of a ring.
const MAX_CHUNKS: u16 = 1024;
