//! Limits of a device: the daemon's limits, and the values of its profile.

use rnic_client::{DeviceAttributes, DeviceKind, Profile};

/// Limits of a device, as queries report them. The daemon enforces the limits of objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Receives of an SRQ (`max_srq_wr`).
    pub(crate) srq_wr: u32,
    /// SGEs of a Read (`max_sge_rd`).
    pub(crate) sge_rd: u8,
    /// Outstanding Reads and atomics of all peers (`max_res_rd_atom`).
    pub(crate) res_rd_atom: u32,
    /// Other values.
    pub(crate) profile: Profile,
}

impl Limits {
    /// Returns the limits of a device of this kind.
    pub(crate) fn of(has: &DeviceAttributes, kind: DeviceKind) -> Self {
        let profile = if has.profile.kind == kind {
            has.profile.clone()
        } else {
            // The profile describes the other kind of device, but the daemon enforces its limits
            // for all devices.
            let max_srq_sge = has.profile.max_srq_sge;
            Profile { kind, max_srq_sge, ..Profile::default() }
        };
        let sge_rd = match kind {
            // RFC 5040 section 5.2: one sink for each Read.
            DeviceKind::Iwarp => 1,
            DeviceKind::Roce => has.max_sge,
        };
        Limits {
            srq_wr: if has.max_srqs == 0 { 0 } else { has.max_srq_wr },
            sge_rd: sge_rd.min(profile.max_sge_rd),
            res_rd_atom: u32::from(has.max_ird)
                .saturating_mul(has.max_qps)
                .min(profile.max_res_rd_atom),
            profile,
        }
    }
}
