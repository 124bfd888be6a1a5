//! The first packet each way: fixed layouts, so that any two versions understand each other's.

use serde::{Deserialize, Serialize};

use crate::types::{SessionId, numbered};

/// First bytes of the first packet each way.
pub const HELLO_MAGIC: [u8; 8] = *b"rnicd\0\0\x01";
/// Bytes of both Hello packets.
pub const HELLO_LEN: usize = 32;

bitflags::bitflags! {
    /// Optional abilities of the daemon that a client may rely on.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(transparent)]
    pub struct Features: u64 {
        /// Connections between QPs of one daemon may take the direct path.
        const DIRECT_PATH = 1;
        /// The daemon cannot access this client's own memory. The client's library makes the copies
        /// ([`RequestBody::ServeCopies`](super::RequestBody::ServeCopies)).
        const LIBRARY_COPIES = 2;
    }
}

/// The client's first packet. Little-endian: magic 8, oldest ABI version 2, newest 2, spare 4,
/// wanted features 8, spare 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest ABI version the client speaks.
    pub min_version: u16,
    /// Newest ABI version the client speaks.
    pub max_version: u16,
    /// [`Features`] the client would use.
    pub features: u64,
}

impl Hello {
    /// The packet as the client sends it.
    pub fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut b = [0; HELLO_LEN];
        b[..8].copy_from_slice(&HELLO_MAGIC);
        b[8..10].copy_from_slice(&self.min_version.to_le_bytes());
        b[10..12].copy_from_slice(&self.max_version.to_le_bytes());
        b[16..24].copy_from_slice(&self.features.to_le_bytes());
        b
    }

    /// Reads a packet; `None` if it is no Hello.
    pub fn from_bytes(b: &[u8]) -> Option<Self> {
        let b: &[u8; HELLO_LEN] = b.try_into().ok()?;
        (b[..8] == HELLO_MAGIC).then(|| Hello {
            min_version: u16::from_le_bytes([b[8], b[9]]),
            max_version: u16::from_le_bytes([b[10], b[11]]),
            features: u64::from_le_bytes(b[16..24].try_into().unwrap_or([0; 8])),
        })
    }
}

numbered! {
    /// Why a Hello was answered as it was.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum HelloStatus: u32, from_u32 {
        /// Welcome. Descriptors: the first arena, the event channel, then one eventfd per worker.
        Ok = 0,
        /// No ABI version in common; `version` is the daemon's.
        Version = 1,
        /// The administrator's limit on sessions (`limits.sessions`) is reached.
        SessionLimit = 2,
        /// The daemon is stopping.
        Stopping = 3,
        /// The daemon lacks memory or descriptors for another session.
        Resources = 4,
        /// This user may not use this device.
        NotAllowed = 5,
        /// The limit on sessions of this user (`limits.user.sessions`) is reached.
        UserSessions = 6,
        /// An administrator has the daemon refuse everything new.
        Draining = 7,
        /// Too many clients of this user are connected that have said nothing yet.
        Silent = 8,
    }
}

/// The daemon's first packet. Little-endian: magic 8, status 4, version 2, workers 2, session 4,
/// bytes of the first arena 4, features 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// Numeric [`HelloStatus`].
    pub status: u32,
    /// ABI version in force.
    pub version: u16,
    /// Workers, hence doorbell pages and eventfds.
    pub workers: u16,
    /// Number of the session; 0 if `status` is not [`HelloStatus::Ok`].
    pub session: SessionId,
    /// Bytes of the first arena.
    pub arena_len: u32,
    /// [`Features`] of the daemon.
    pub features: u64,
}

impl HelloReply {
    /// The packet as the daemon sends it.
    pub fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut b = [0; HELLO_LEN];
        b[..8].copy_from_slice(&HELLO_MAGIC);
        b[8..12].copy_from_slice(&self.status.to_le_bytes());
        b[12..14].copy_from_slice(&self.version.to_le_bytes());
        b[14..16].copy_from_slice(&self.workers.to_le_bytes());
        b[16..20].copy_from_slice(&self.session.0.to_le_bytes());
        b[20..24].copy_from_slice(&self.arena_len.to_le_bytes());
        b[24..].copy_from_slice(&self.features.to_le_bytes());
        b
    }

    /// Reads a packet; `None` if it is no Hello reply.
    pub fn from_bytes(b: &[u8]) -> Option<Self> {
        let b: &[u8; HELLO_LEN] = b.try_into().ok()?;
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        (b[..8] == HELLO_MAGIC).then(|| HelloReply {
            status: u32_at(8),
            version: u16::from_le_bytes([b[12], b[13]]),
            workers: u16::from_le_bytes([b[14], b[15]]),
            session: SessionId(u32_at(16)),
            arena_len: u32_at(20),
            features: u64::from(u32_at(24)) | u64::from(u32_at(28)) << 32,
        })
    }
}
