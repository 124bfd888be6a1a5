//! Attributes of QPs of the RoCE device, as in `ibv_modify_qp(3)`.

use serde::{Deserialize, Serialize};

use crate::types::*;

/// New state or attributes of a QP of the RoCE device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QpChange {
    /// RC or UC QP from Idle to Rtr.
    ReadyToReceive(Wiring),
    /// To Rts from Rtr, Sqd or Sqe. In Rts: changes its attributes.
    ReadyToSend(Sending),
    /// To Sqd from Rts. The QP completes the requests it has started, then reports
    /// [`SendQueueDrained`](super::Event::SendQueueDrained).
    DrainSendQueue,
    /// To Idle from any state. Drops all posted requests without completions, ends the connection
    /// and resets both queues to their first entry. The client must not access the queues between
    /// the request and the reply.
    Reset,
    /// Changes the peer's access rights; in Rtr and later states.
    Rights(Access),
    /// Changes the minimum RNR NAK timer; in Rtr and later states.
    MinRnrTimer(u8),
    /// [UD](QpType::Ud) QP from Idle to Rtr. It receives datagrams with this Q_Key.
    /// `ReadyToSend` moves it to Rts and uses only [`sq_psn`](Sending::sq_psn).
    ReceiveDatagrams {
        /// The Q_Key.
        q_key: u32,
    },
    /// Changes the Q_Key; in Rtr and later states.
    QKey(u32),
}

impl QpChange {
    /// Returns true if the change moves the QP to Rtr, in which it starts to receive.
    pub fn starts_receiving(&self) -> bool {
        matches!(self, QpChange::ReadyToReceive(_) | QpChange::ReceiveDatagrams { .. })
    }
}

/// Attributes for the transition to Rtr (`IBV_QPS_RTR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wiring {
    /// Own GID, which must be in the device's GID table.
    pub local: Gid,
    /// The peer's GID.
    pub remote: Gid,
    /// The peer's QP number.
    pub remote_qp: QpId,
    /// Expected PSN of the peer's first packet, 24 bits. Never sent; must equal the peer's
    /// [`Sending::sq_psn`].
    pub rq_psn: u32,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096. Does not limit segments, but must equal the
    /// peer's (`wired.compare`).
    pub path_mtu: u16,
    /// Minimum time that the peer waits after an RNR NAK, coded as in the IBTA specification,
    /// volume 1, section 9.7.5.2.8: 0 to 31, where 1 is 10 us and 0 is 655 ms.
    pub min_rnr_timer: u8,
    /// Maximum outstanding RDMA Reads and atomic operations of the peer.
    pub ird: u16,
    /// The peer's access rights: `REMOTE_WRITE`, `REMOTE_READ`, `REMOTE_ATOMIC`.
    pub rights: Access,
}

/// Attributes for the transition to Rts (`IBV_QPS_RTS`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sending {
    /// PSN of the first packet, 24 bits; see [`Wiring::rq_psn`].
    pub sq_psn: u32,
    /// ACK timeout: 4.096 us times 2 to the power of this value; 0 disables it.
    pub timeout: u8,
    /// Retries after an ACK timeout, 0 to 7.
    pub retry_count: u8,
    /// Retries after an RNR NAK, 0 to 6; 7 means no limit.
    pub rnr_retry: u8,
    /// Maximum outstanding RDMA Reads and atomic operations.
    pub ord: u16,
}

/// Entry of the GID table. A removed address leaves an entry with a zero GID, so that the other
/// entries keep their index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GidRow {
    /// GID, derived from the address.
    pub gid: Gid,
    /// Name of the network interface that has the address.
    pub interface: String,
    /// Index of that interface (`if_nametoindex(3)`).
    pub interface_index: u32,
    /// MTU of that interface: the maximum size of an IP packet in bytes.
    pub mtu: u32,
}

impl GidRow {
    /// Returns the path MTU in bytes: 256, 512, 1024, 2048 or 4096. It is the largest whose
    /// packets, with all RoCE v2 headers, fit the interface's MTU, but at least 256.
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

/// Size of the longest headers (IPv6, UDP and RoCE v2) and the ICRC, in bytes.
const HEADERS: u32 = 40 + 8 + 12 + 16 + 4;
