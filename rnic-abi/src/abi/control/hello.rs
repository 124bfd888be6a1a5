//! First packet in each direction. Its layout is fixed, so every version can decode it.

use serde::{Deserialize, Serialize};

use crate::types::{SessionId, numbered};

/// First bytes of the first packet in each direction.
pub const HELLO_MAGIC: [u8; 8] = *b"rnicd\0\0\x01";
/// Size of both Hello packets, in bytes.
pub const HELLO_LEN: usize = 32;

bitflags::bitflags! {
    /// Optional features of the daemon.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(transparent)]
    pub struct Features: u64 {
        /// Connections between QPs of the same daemon may take the direct path.
        const DIRECT_PATH = 1;
        /// The daemon cannot access this client's own memory, so the client's library copies data
        /// to and from it ([`RequestBody::ServeCopies`](super::RequestBody::ServeCopies)).
        const LIBRARY_COPIES = 2;
    }
}

/// The client's first packet. Fields in order, little-endian: magic (8 bytes), oldest ABI version
/// u16, newest u16, reserved u32, requested features u64, reserved u64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest ABI version the client supports.
    pub min_version: u16,
    /// Newest ABI version the client supports.
    pub max_version: u16,
    /// [`Features`] that the client supports.
    pub features: u64,
}

impl Hello {
    /// Encodes the packet.
    pub fn to_bytes(self) -> [u8; HELLO_LEN] {
        let mut b = [0; HELLO_LEN];
        b[..8].copy_from_slice(&HELLO_MAGIC);
        b[8..10].copy_from_slice(&self.min_version.to_le_bytes());
        b[10..12].copy_from_slice(&self.max_version.to_le_bytes());
        b[16..24].copy_from_slice(&self.features.to_le_bytes());
        b
    }

    /// Decodes a packet. Returns `None` if it is not a Hello.
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
    /// Result of a Hello.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum HelloStatus: u32, from_u32 {
        /// Accepted. Descriptors: the first arena, the event channel, then an eventfd per worker.
        Ok = 0,
        /// No common ABI version; `version` is the daemon's.
        Version = 1,
        /// The administrator's limit on sessions (`limits.sessions`) is reached.
        SessionLimit = 2,
        /// The daemon is stopping.
        Stopping = 3,
        /// The daemon lacks memory or file descriptors for another session.
        Resources = 4,
        /// This user may not use this device.
        NotAllowed = 5,
        /// The limit on sessions of this user (`limits.user.sessions`) is reached.
        UserSessions = 6,
        /// The daemon is draining and accepts no new sessions.
        Draining = 7,
        /// Too many connections of this user have not sent a Hello yet.
        TooManyUnauthenticated = 8,
    }
}

/// The daemon's first packet. Fields in order, little-endian: magic (8 bytes), status u32, version
/// u16, workers u16, session u32, size of the first arena u32, features u64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloReply {
    /// Numeric [`HelloStatus`].
    pub status: u32,
    /// Selected ABI version; the daemon's own with [`HelloStatus::Version`].
    pub version: u16,
    /// Number of workers, which is also the number of doorbell pages and of eventfds.
    pub workers: u16,
    /// Number of the session; 0 if `status` is not [`HelloStatus::Ok`].
    pub session: SessionId,
    /// Size of the first arena in bytes.
    pub arena_len: u32,
    /// [`Features`] of the daemon.
    pub features: u64,
}

impl HelloReply {
    /// Encodes the packet.
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

    /// Decodes a packet. Returns `None` if it is not a Hello reply.
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
