//! Replies of the daemon.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::device::DeviceRow;
use super::listing::{QpRow, Rows, SrqRow, StatusInfo};
use super::profile::Profile;
use super::qp_attr::GidRow;
use super::refusal::Refusal;
use crate::abi::queue::QueueShape;
use crate::types::*;

/// Reply to a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// ID of the request.
    pub id: u32,
    /// Result, or reason for the refusal.
    pub result: Result<ReplyBody, Refusal>,
    /// Diagnosis of the refusal; 0 for none.
    pub diagnosis_id: u64,
}

/// Location of a queue. If it is in a [`NewArena`], the reply carries the arena's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueLocation {
    /// Arena number; 0 for the arena of the Hello reply.
    pub arena: u32,
    /// Offset of the queue header in the arena, in bytes.
    pub offset: u32,
    /// Granted capacity and stride, at least those requested.
    pub shape: QueueShape,
}

/// An arena that the client has not mapped yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewArena {
    /// Arena number in this session, from 1.
    pub arena: u32,
    /// Size of the arena in bytes, a multiple of the page size.
    pub length: u32,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplyBody {
    /// Success without a result.
    Done,
    /// Identity and limits of the device.
    Device(DeviceAttributes),
    /// A protection domain was opened.
    Pd {
        /// Handle of the domain.
        pd: PdId,
    },
    /// A new shared buffer.
    SharedBuffer {
        /// Handle of the shared buffer.
        buffer: SharedBufferId,
    },
    /// A region was registered.
    Mr {
        /// Handle of the region.
        mr: MrId,
        /// Its STag, both local and remote key.
        stag: Stag,
    },
    /// A completion channel was created; the reply carries its descriptor.
    Channel {
        /// Handle of the channel.
        channel: ChannelId,
    },
    /// A completion queue was created or has moved.
    Cq {
        /// Handle of the CQ.
        cq: CqId,
        /// Location of the ring.
        queue: QueueLocation,
        /// New arena, if any; the reply carries its descriptor.
        new_arena: Option<NewArena>,
    },
    /// A queue pair was created.
    Qp {
        /// Its handle and number.
        qp: QpId,
        /// Location of its send queue.
        sq: QueueLocation,
        /// Location of its receive queue; `None` if it uses a shared one.
        rq: Option<QueueLocation>,
        /// New arena, if any; the reply carries its descriptor.
        new_arena: Option<NewArena>,
    },
    /// State and counters of a QP.
    QpInfo(QpRow),
    /// An address was bound.
    Listener {
        /// Handle of the bound address.
        listener: ListenerId,
        /// The address with its port.
        #[serde(with = "address")]
        address: SocketAddr,
    },
    /// Status of the whole daemon.
    Status(StatusInfo),
    /// A page of rows.
    Rows {
        /// Rows of this page, of the requested kind.
        rows: Rows,
        /// Number of rows on all pages.
        total: u32,
        /// Start of the next page, for `from` of the next `List`; 0 if this is the last page.
        next: u64,
    },
    /// A window was allocated.
    Window {
        /// Handle of the window.
        window: MwId,
        /// Its first STag, which gives no access until the window is bound.
        stag: Stag,
    },
    /// A shared receive queue was created.
    Srq {
        /// Handle of the SRQ.
        srq: SrqId,
        /// Location of the ring.
        queue: QueueLocation,
        /// New arena, if any; the reply carries its descriptor.
        new_arena: Option<NewArena>,
    },
    /// State and counters of a shared receive queue.
    SrqInfo(SrqRow),
    /// The GID table, by index.
    Gids(Vec<GidRow>),
    /// A worker's copy queue was created.
    Copies {
        /// Location of the queue.
        queue: QueueLocation,
        /// New arena, if any; the reply carries its descriptor.
        new_arena: Option<NewArena>,
    },
    /// A fault rule has replaced the call by an event, which follows.
    EventFollows,
    /// A fault rule repeats or loses the event of [`CmEvent`](super::LibraryCall::CmEvent).
    Events {
        /// Number of times that the program gets the event.
        count: u8,
    },
}

/// Identity of the device and limits of this session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceAttributes {
    /// Name of the iWARP device.
    pub name: String,
    /// Version of the daemon.
    pub version: String,
    /// Maximum queue pairs of this session: the lowest session, user or device limit.
    pub max_qps: u32,
    /// Maximum outstanding requests per queue.
    pub max_wr_depth: u32,
    /// Maximum SGEs per request.
    pub max_sge: u8,
    /// Maximum inline bytes per request.
    pub max_inline: u16,
    /// Maximum completion queues, as for `max_qps`.
    pub max_cqs: u32,
    /// Maximum entries per completion queue.
    pub max_cq_entries: u32,
    /// Maximum memory regions, as for `max_qps`.
    pub max_mrs: u32,
    /// Maximum shared memory, in bytes.
    pub max_shared_bytes: u64,
    /// Maximum protection domains, as for `max_qps`.
    pub max_pds: u32,
    /// Maximum inbound reads per QP.
    pub max_ird: u16,
    /// Maximum outbound reads per QP.
    pub max_ord: u16,
    /// True if connections between QPs of this daemon take the direct path.
    pub direct_path: bool,
    /// Maximum memory windows, as for `max_qps`.
    pub max_windows: u32,
    /// Maximum shared receive queues.
    pub max_srqs: u32,
    /// Hardware version, from the configuration.
    pub hw_ver: u32,
    /// GUID of the daemon, which is that of the iWARP device.
    pub guid: u64,
    /// Maximum receives per shared receive queue.
    pub max_srq_wr: u32,
    /// Maximum pending connection requests per listener.
    pub max_backlog: u32,
    /// All devices: the RoCE devices, then the iWARP device.
    pub devices: Vec<DeviceRow>,
    /// Directory with files for all devices in the layout of `/sys` and `/dev`; empty if there is
    /// none.
    pub tree: String,
    /// Profile of the devices.
    pub profile: Profile,
}
