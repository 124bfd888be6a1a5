//! What the daemon answers.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::listing::{QpRow, Rows, SrqRow, StatusInfo};
use super::refusal::Refusal;
use super::wired::GidRow;
use crate::abi::queue::QueueShape;
use crate::types::*;

/// Answer to one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Id of the request.
    pub id: u32,
    /// What was done, or why not.
    pub result: Result<ReplyBody, Refusal>,
    /// The diagnosis of a refusal; 0 if there is none.
    pub diagnosis_id: u64,
}

/// Where a queue stands. With `new_arena` set, the reply carries that arena's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueLocation {
    /// Arena number; the one that came with Hello is 0.
    pub arena: u32,
    /// Bytes from its start to the queue header.
    pub offset: u32,
    /// Capacity and stride as granted: at least what was asked for.
    pub shape: QueueShape,
}

/// An arena that the client has not mapped yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewArena {
    /// Number of the arena in this session, from 1.
    pub arena: u32,
    /// Bytes of the arena, a multiple of the page size.
    pub length: u32,
}

/// What was done, by request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReplyBody {
    /// The request was carried out and has no result.
    Done,
    /// Identity and limits of the device.
    Device(DeviceAttributes),
    /// A protection domain was opened.
    Pd {
        /// Handle of the domain.
        pd: PdId,
    },
    /// A shared buffer was mapped.
    SharedBuffer {
        /// Handle of the shared buffer.
        buffer: SharedBufferId,
    },
    /// A region was registered.
    Mr {
        /// Handle of the region.
        mr: MrId,
        /// Its STag: local and remote key alike.
        stag: Stag,
    },
    /// A completion channel was made; its descriptor is with this reply.
    Channel {
        /// Handle of the channel.
        channel: ChannelId,
    },
    /// A completion queue was made or has moved.
    Cq {
        /// Handle of the CQ.
        cq: CqId,
        /// Place of the ring in an arena.
        queue: QueueLocation,
        /// The descriptor with this reply, if there is one.
        new_arena: Option<NewArena>,
    },
    /// A queue pair was made.
    Qp {
        /// Its handle and number.
        qp: QpId,
        /// Place of its send queue.
        sq: QueueLocation,
        /// Its receive queue; none if it takes its receives from a shared one.
        rq: Option<QueueLocation>,
        /// The descriptor with this reply, if there is one.
        new_arena: Option<NewArena>,
    },
    /// State and counters of a QP.
    QpInfo(QpRow),
    /// An address was bound.
    Listener {
        /// Handle of the bound address.
        listener: ListenerId,
        /// The address with the port that was chosen.
        #[serde(with = "address")]
        address: SocketAddr,
    },
    /// Whole-daemon figures.
    Status(StatusInfo),
    /// A page of objects.
    Rows {
        /// Rows of this page, all of the kind that was asked for.
        rows: Rows,
        /// How many there are in all.
        total: u32,
        /// Where the next page begins; 0 if this is the last.
        next: u64,
    },
    /// A window was made.
    Window {
        /// Handle of the window.
        window: MwId,
        /// Its first STag, which gives access to nothing until the window is bound.
        stag: Stag,
    },
    /// A shared receive queue was made.
    Srq {
        /// Handle of the SRQ.
        srq: SrqId,
        /// Place of the ring in an arena.
        queue: QueueLocation,
        /// The descriptor with this reply, if there is one.
        new_arena: Option<NewArena>,
    },
    /// State and counters of a shared receive queue.
    SrqInfo(SrqRow),
    /// The table of GIDs, by index.
    Gids(Vec<GidRow>),
    /// Answer to `ServeCopies`.
    Copies {
        /// Location of the queue of copy jobs.
        queue: QueueLocation,
        /// The descriptor with this reply, if there is one.
        new_arena: Option<NewArena>,
    },
}

/// What the device is and allows this session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceAttributes {
    /// Name from the configuration.
    pub name: String,
    /// Version of the daemon.
    pub version: String,
    /// Most queue pairs of this session: the least of its own, its user's and the device's limit.
    pub max_qps: u32,
    /// Most outstanding requests per queue.
    pub max_wr_depth: u32,
    /// Most elements per request.
    pub max_sge: u8,
    /// Most inline bytes per request.
    pub max_inline: u16,
    /// Most completion queues, as for `max_qps`.
    pub max_cqs: u32,
    /// Most entries per completion queue.
    pub max_cq_entries: u32,
    /// Most memory regions, as for `max_qps`.
    pub max_mrs: u32,
    /// Most shared memory, in bytes.
    pub max_shared_bytes: u64,
    /// Most protection domains, as for `max_qps`.
    pub max_pds: u32,
    /// Most inbound reads per QP.
    pub max_ird: u16,
    /// Most outbound reads per QP.
    pub max_ord: u16,
    /// Whether connections inside this daemon take the direct path.
    pub direct_path: bool,
    /// Most memory windows, as for `max_qps`.
    pub max_windows: u32,
    /// Most shared receive queues.
    pub max_srqs: u32,
    /// Who made the device, as the configuration has it; 0 for nobody in particular.
    pub vendor_id: u32,
    /// Which device of its maker it is; 0 for none in particular.
    pub vendor_part_id: u32,
    /// Version of the hardware, as the configuration has it.
    pub hw_ver: u32,
    /// Tells devices apart: an EUI-64, its first byte the most significant one. Neither half is
    /// zero.
    pub guid: u64,
    /// Most receives of a shared receive queue.
    pub max_srq_wr: u32,
    /// Most undecided connection requests of a listener.
    pub max_backlog: u32,
    /// Name of the device whose queue pairs are wired by hand.
    pub wired_name: String,
    /// Who is said to have made that device.
    pub wired_vendor_id: u32,
    /// Which device of its maker it is said to be.
    pub wired_part_id: u32,
    /// Folder in which both devices are shown in files, as the kernel shows its own in `/sys` and
    /// `/dev`; empty if there is none.
    pub tree: String,
}
