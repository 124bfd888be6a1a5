//! The service of an id: its device, and the port space on that device.

use rnic_client::{DeviceKind, PortSpace};

use crate::c::*;
use crate::errno::Errno;

/// Service of an id. Each has ports of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// Connections of iWARP QPs (`RDMA_PS_TCP`).
    Iwarp,
    /// Connections of RC QPs (`RDMA_PS_TCP`), or of RC and UC QPs (`RDMA_PS_IB`), on a RoCE
    /// device.
    Rc(PortSpace),
    /// Lookups of UD QPs on a RoCE device (`RDMA_PS_UDP`).
    Ud,
}

impl Service {
    /// Returns the service of a port space for a program that sees the devices `visible`.
    /// `RDMA_PS_TCP` prefers the iWARP device.
    ///
    /// # Errors
    ///
    /// `EPROTONOSUPPORT` for a port space without a device; `EINVAL` for an unknown port space.
    pub(super) fn of(
        port_space: rdma_port_space,
        visible: &[DeviceKind],
    ) -> Result<Service, Errno> {
        let only_roce = !visible.is_empty() && !visible.contains(&DeviceKind::Iwarp);
        match port_space {
            RDMA_PS_TCP if only_roce => Ok(Service::Rc(PortSpace::Tcp)),
            RDMA_PS_TCP => Ok(Service::Iwarp),
            // Only RoCE devices have UD QPs.
            RDMA_PS_UDP => Ok(Service::Ud),
            RDMA_PS_IB if visible.contains(&DeviceKind::Roce) => Ok(Service::Rc(PortSpace::Ib)),
            RDMA_PS_IB => Err(errno!(
                libc::EPROTONOSUPPORT,
                "port space {port_space:#x} requires a RoCE device, which RNIC_DEVICES excludes"
            )),
            // Multicast.
            RDMA_PS_IPOIB => Err(errno!(
                libc::EPROTONOSUPPORT,
                "port space {port_space:#x}: only TCP, UDP and IB are supported"
            )),
            _ => Err(invalid!("{port_space:#x} is not a port space")),
        }
    }

    /// Returns the kind of device of the service.
    pub(super) fn device(self) -> DeviceKind {
        match self {
            Service::Iwarp => DeviceKind::Iwarp,
            Service::Rc(_) | Service::Ud => DeviceKind::Roce,
        }
    }

    /// Returns the QP type of a new id.
    pub(super) fn qp_type(self) -> ibv_qp_type {
        match self {
            Service::Iwarp | Service::Rc(_) => IBV_QPT_RC,
            Service::Ud => IBV_QPT_UD,
        }
    }

    /// Returns true if ids of the service can have UC QPs.
    pub(super) fn allows_uc(self) -> bool {
        self == Service::Rc(PortSpace::Ib)
    }

    /// Checks the type of a new QP of an id. Creating the QP checks it for the iWARP device.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the port space has QPs of another type.
    pub(super) fn check_qp_type(self, qp_type: ibv_qp_type) -> Result<(), Errno> {
        let has = match self {
            Service::Iwarp => return Ok(()),
            Service::Ud if qp_type != IBV_QPT_UD => "ids of RDMA_PS_UDP have UD QPs",
            Service::Rc(PortSpace::Ib) if !matches!(qp_type, IBV_QPT_RC | IBV_QPT_UC) => {
                "ids of RDMA_PS_IB have RC or UC QPs"
            }
            Service::Rc(PortSpace::Tcp) if qp_type != IBV_QPT_RC => {
                "ids of RDMA_PS_TCP have RC QPs"
            }
            Service::Ud | Service::Rc(_) => return Ok(()),
        };
        Err(invalid!("qp_type {qp_type}: {has}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_determine_the_service() {
        let [iwarp, roce] = [DeviceKind::Iwarp, DeviceKind::Roce];
        let of = |space, visible: &[DeviceKind]| {
            Service::of(space, visible).map_err(|errno| errno.number())
        };
        assert_eq!(of(RDMA_PS_TCP, &[roce, iwarp]), Ok(Service::Iwarp));
        assert_eq!(of(RDMA_PS_TCP, &[iwarp]), Ok(Service::Iwarp));
        assert_eq!(of(RDMA_PS_TCP, &[]), Ok(Service::Iwarp));
        assert_eq!(of(RDMA_PS_TCP, &[roce]), Ok(Service::Rc(PortSpace::Tcp)));
        assert_eq!(of(RDMA_PS_TCP, &[roce, roce]), Ok(Service::Rc(PortSpace::Tcp)));
        assert_eq!(of(RDMA_PS_IB, &[roce, iwarp]), Ok(Service::Rc(PortSpace::Ib)));
        assert_eq!(of(RDMA_PS_IB, &[iwarp]), Err(libc::EPROTONOSUPPORT));
        assert_eq!(of(RDMA_PS_UDP, &[iwarp]), Ok(Service::Ud));
        assert_eq!(of(RDMA_PS_IPOIB, &[roce]), Err(libc::EPROTONOSUPPORT));
        assert_eq!(of(1, &[roce]), Err(libc::EINVAL));
    }

    #[test]
    fn port_space_determines_the_qp_types() {
        let types = [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD];
        let of = |service: Service| types.map(|kind| service.check_qp_type(kind).is_ok());
        assert_eq!(of(Service::Rc(PortSpace::Tcp)), [true, false, false]);
        assert_eq!(of(Service::Rc(PortSpace::Ib)), [true, true, false]);
        assert_eq!(of(Service::Ud), [false, false, true]);
    }
}
