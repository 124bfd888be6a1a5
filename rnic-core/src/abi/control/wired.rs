//! Queue pairs that programs wire by hand: what `ibv_modify_qp(3)` tells of them.

use serde::{Deserialize, Serialize};

use crate::types::*;

/// A change of a queue pair that is wired by hand, or of what it was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QpChange {
    /// To Rtr: from Idle.
    ReadyToReceive(Wiring),
    /// To Rts: from Rtr or Sqd; in Rts, what is different from now on.
    ReadyToSend(Sending),
    /// To Sqd: from Rts. What has begun is finished, and
    /// [`SendQueueDrained`](super::Event::SendQueueDrained) says when.
    DrainSendQueue,
    /// To Idle, from any state: what was posted is gone without a completion, the connection ends,
    /// and both queues begin at their first entry again. From the request until its answer the
    /// client touches neither.
    Reset,
    /// Other rights of the peer; in Rtr and later.
    Rights(Access),
    /// Another minimum RNR NAK timer; in Rtr and later.
    MinRnrTimer(u8),
    /// Of a queue pair of [datagrams](QpType::Datagrams), to Rtr: from Idle. It takes datagrams in
    /// that have this Q_Key. To Rts it goes by `ReadyToSend`, of which only
    /// [`sq_psn`](Sending::sq_psn) counts.
    ReceiveDatagrams {
        /// The key.
        q_key: u32,
    },
    /// Another Q_Key; in Rtr and later.
    QKey(u32),
}

/// What a queue pair is told when it becomes ready to receive (`IBV_QPS_RTR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wiring {
    /// The GID that it is reached by, one of the device's.
    pub local: Gid,
    /// The peer's GID.
    pub remote: Gid,
    /// The peer's number.
    pub remote_qp: QpId,
    /// PSN of the first packet that the peer would send, 24 bits. It is on no wire; the peer's
    /// [`Sending::sq_psn`] must be the same.
    pub rq_psn: u32,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096. Does not limit segments; both ends must
    /// name the same (`wired.compare`).
    pub path_mtu: u16,
    /// Code of the time that the peer is to wait for a receive before it tries once more (IBTA
    /// specification, volume 1, section 9.7.5.2.8): 0 to 31, where 1 is 10 us and 0 is 655 ms.
    pub min_rnr_timer: u8,
    /// Requests of the peer's that may await a response.
    pub ird: u16,
    /// What the peer may do to memory: `REMOTE_WRITE`, `REMOTE_READ`, `REMOTE_ATOMIC`.
    pub rights: Access,
}

/// What a queue pair is told when it becomes ready to send (`IBV_QPS_RTS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sending {
    /// PSN of the first packet that it would send, 24 bits; see [`Wiring::rq_psn`].
    pub sq_psn: u32,
    /// Code of the time that an acknowledgement is waited for: 4.096 us times 2 to the power of
    /// this; 0 is for ever.
    pub timeout: u8,
    /// How often it is tried once more without an acknowledgement, 0 to 7.
    pub retry_count: u8,
    /// How often it is tried once more where the peer has no receive, 0 to 6; 7 is for ever.
    pub rnr_retry: u8,
    /// Requests that may await a response.
    pub ord: u16,
}

/// One entry of the device's table of GIDs. An address that goes leaves an empty entry, with a zero
/// GID, so that the others keep their index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GidRow {
    /// Its address.
    pub gid: Gid,
    /// Name of the network interface that has the address.
    pub interface: String,
    /// Index of that interface (`if_nametoindex(3)`).
    pub interface_index: u32,
    /// Bytes of an IP packet on that interface, at most.
    pub mtu: u32,
}

impl GidRow {
    /// Bytes of data in a packet of RoCE v2 on that interface: the largest path MTU (256, 512,
    /// 1024, 2048 or 4096) that fits with the headers.
    pub fn path_mtu(&self) -> u32 {
        match self.mtu.saturating_sub(HEADERS) {
            4096.. => 4096,
            2048.. => 2048,
            1024.. => 1024,
            512.. => 512,
            _ => 256,
        }
    }
}

/// Bytes of the headers of IPv6, UDP and RoCE v2 (the longest ones), and of the checksum.
const HEADERS: u32 = 40 + 8 + 12 + 16 + 4;
