//! Copying a file of any size to another process by RDMA Write.
//!
//! The receiver lends the sender a ring of chunks in registered memory. The sender writes each
//! chunk of the file into the next free place by RDMA Write and says so in a Send, which arrives
//! after it; the receiver appends the chunk to a file that has no name yet and gives the place back
//! in a Send. So memory is bounded by the ring, whatever the size of the file. At the end the
//! sender tells the SHA-256 of what it read; only if that of what was written is the same, and the
//! file is safe on the disk, does it get its name. [`send_file`] and [`receive_file`] do one copy
//! each; [`serve_one`] waits for one. `wire` has the messages, `incoming` the file without a name.
//!
//! The sender may write into the ring at any time. A chunk is therefore copied out once, and the
//! copy is both hashed and written: whatever the sender scribbles, the file is what was hashed.

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

pub use cli::main;
pub use incoming::check_folder;
pub use name::{FileName, NameError};
pub use receive::{receive_file, serve_one};
pub use send::send_file;
pub use wire::refusal;

/// Parameters of the sender.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// Name the file shall have at the receiver; `None` for the name it has here.
    pub name: Option<String>,
    /// Bytes per RDMA Write, at most; the receiver may want less. Default 1 MiB.
    pub chunk: u32,
    /// Chunks under way, at most; the receiver may want less. Default 16.
    pub chunks: u16,
    /// How long the receiver may be silent. Default 60 s.
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
    /// Whether a file of the same name is replaced. Default no: the copy is refused.
    pub replace: bool,
    /// Largest file accepted, in bytes. Default: what fits the disk.
    pub max_size: Option<u64>,
    /// Bytes per chunk, at most. Default 1 MiB.
    pub chunk: u32,
    /// Chunks of the ring, at most. A copy takes `chunk * chunks` bytes of shared memory and
    /// `chunk` more. Default 16.
    pub chunks: u16,
    /// How long the sender may be silent. Default 60 s.
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

/// How far a copy is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes the receiver has.
    pub done: u64,
    /// Bytes of the file.
    pub total: u64,
}

/// A copy that succeeded.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Name at the receiver.
    pub name: String,
    /// Address of the other side.
    pub peer: SocketAddr,
    /// Bytes of the file.
    pub bytes: u64,
    /// From the connection to the verdict, hashing and writing to the disk included.
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

/// Why a copy failed. The receiver then has no file of the name, or still the one it had before.
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
    #[error("{path} is no regular file", path = path.display())]
    NotRegular {
        /// Path of the file to send.
        path: PathBuf,
    },
    /// The file to send changed while it was copied.
    #[error("{path} {how} while it was copied", path = path.display())]
    Changed {
        /// Path of the file to send.
        path: PathBuf,
        /// How it changed, in words: it became longer or shorter.
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
    /// The folder takes no files.
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
    /// This receiver does not accept the file; the sender has been told.
    #[error("refused {name:?} of {peer}: {why}")]
    Refused {
        /// Address of the sender.
        peer: SocketAddr,
        /// Name of the file.
        name: String,
        /// What kept the file from being stored, in words.
        why: String,
    },
    /// The other side refused or gave up, and said why.
    #[error("{peer} says: {}", printable(why))]
    Peer {
        /// Address of the other side.
        peer: SocketAddr,
        /// Reason in the other side's words, which may hold any characters.
        why: String,
    },
    /// What arrived is not what was sent.
    #[error("SHA-256 was {sent} at {peer}, but here it is {arrived}: the copy was thrown away")]
    Digest {
        /// Address of the sender.
        peer: SocketAddr,
        /// The sender's digest.
        sent: Digest,
        /// The receiver's digest.
        arrived: Digest,
    },
    /// The receiver says that it has stored something else.
    #[error("{peer} stored a file of SHA-256 {stored}, but {sent} was sent")]
    StoredOther {
        /// Address of the receiver.
        peer: SocketAddr,
        /// The sender's digest.
        sent: Digest,
        /// The receiver's digest.
        stored: Digest,
    },
    /// The other side does not keep to the protocol of `rcopy`.
    #[error("{peer} does not keep to the protocol: {why}")]
    Protocol {
        /// Address of the other side.
        peer: SocketAddr,
        /// What the other side did, in words.
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
    /// What the other side is told of it: nothing if it cannot be told, or knows.
    fn for_peer(&self) -> Option<String> {
        match self {
            CopyError::Link(_) | CopyError::Peer { .. } | CopyError::StoredOther { .. } => None,
            // Where the file is, which errors may tell, is no business of the other side.
            CopyError::Read { source, .. } => Some(format!("cannot read it: {}", source.kind())),
            CopyError::Write { source, .. } | CopyError::Folder { source, .. } => {
                Some(format!("cannot write it: {}", source.kind()))
            }
            CopyError::NotRegular { .. } => Some("it is no regular file".to_owned()),
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

/// How long the other side may be silent, by default.
const PATIENCE: Duration = Duration::from_secs(60);
/// Largest chunk, in bytes: what one side may ask of the other's memory at a time.
const MAX_CHUNK: u32 = 64 << 20;
/// Most chunks of a ring.
const MAX_CHUNKS: u16 = 1024;
