//! Limits of a device: those of the daemon, or those of the kernel's rxe where they are lower.

use rnic_client::{DeviceAttributes, DeviceKind, Profile};

/// Limits of a device, as queries report them and new objects must obey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Requests of a send or receive queue (`max_qp_wr`).
    pub(crate) wr: u32,
    /// Receives of an SRQ (`max_srq_wr`).
    pub(crate) srq_wr: u32,
    /// SGEs of a request (`max_sge`).
    pub(crate) sge: u8,
    /// SGEs of a receive of an SRQ (`max_srq_sge`).
    pub(crate) srq_sge: u8,
    /// Entries of a CQ (`max_cqe`).
    pub(crate) cqe: u32,
    /// Bytes of inline data of a request (`max_inline_data`).
    pub(crate) inline: u16,
    /// Address handles of the process (`max_ah`).
    pub(crate) ah: u32,
    /// Outstanding Reads and atomics of the peer (`max_qp_rd_atom`).
    pub(crate) ird: u16,
    /// Outstanding Reads and atomics (`max_qp_init_rd_atom`).
    pub(crate) ord: u16,
    /// `local_ca_ack_delay`.
    pub(crate) ack_delay: u8,
    /// Minimum length of the GID table; the entries beyond the host's GIDs are empty.
    pub(crate) gids: u32,
}

impl Limits {
    /// Returns the limits of a device of this kind.
    pub(crate) fn of(has: &DeviceAttributes, kind: DeviceKind) -> Self {
        let own = Limits {
            wr: has.max_wr_depth,
            srq_wr: has.max_srq_wr,
            sge: has.max_sge,
            srq_sge: has.max_sge,
            cqe: has.max_cq_entries,
            inline: has.max_inline,
            ah: u16::MAX.into(),
            ird: has.max_ird,
            ord: has.max_ord,
            ack_delay: 0,
            gids: 1,
        };
        match (kind, has.profile) {
            (DeviceKind::Iwarp, _) | (_, Profile::Rnicd) => own,
            (DeviceKind::Roce, Profile::Rxe) => Limits {
                wr: own.wr.min(RXE.wr),
                srq_wr: own.srq_wr.min(RXE.srq_wr),
                sge: own.sge.min(RXE.sge),
                srq_sge: own.srq_sge.min(RXE.srq_sge),
                cqe: own.cqe.min(RXE.cqe),
                inline: own.inline.min(RXE.inline),
                ah: own.ah.min(RXE.ah),
                ird: own.ird.min(RXE.ird),
                ord: own.ord.min(RXE.ord),
                ack_delay: RXE.ack_delay,
                gids: RXE.gids,
            },
        }
    }
}

/// Limits of rxe in Linux 6.6 (`drivers/infiniband/sw/rxe/rxe_param.h`). Its maxima of objects are
/// 2^20, above those of the daemon.
const RXE: Limits = Limits {
    wr: 1 << 20,
    srq_wr: 1 << 20,
    sge: 32,
    srq_sge: 27,
    cqe: (1 << 15) - 1,
    inline: 512,
    ah: (1 << 15) - 1,
    ird: 128,
    ord: 128,
    ack_delay: 15,
    gids: 1024,
};
