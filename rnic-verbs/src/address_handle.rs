//! Address handles (`ibv_create_ah(3)`): where datagrams go.
//!
//! Only the device whose queue pairs are wired by hand has GIDs that can be named. Programs also
//! make a handle to find out whether a GID of theirs is usable.

use rnic_client::{GRH_LEN, Gid, GidRow, route_of};

use crate::c;
use crate::context::PORT;
use crate::errno::Errno;
use crate::object::{Body, zeroed};
use crate::pd::PdUser;

/// An address handle. The library's own: the device knows nothing of it.
pub(crate) struct AhBody {
    _pd: PdUser,
    route: Route,
}

/// From which port of the device to which other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    /// Index of the device's GID.
    pub(crate) source: u16,
    pub(crate) gid: Gid,
}

impl Body for AhBody {
    type Head = c::ibv_ah;
}

impl AhBody {
    /// A handle in a domain of a device with these GIDs.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has none; `EINVAL` if the attributes name no port, or no GID.
    pub(crate) fn new(
        pd: PdUser,
        attributes: &c::ibv_ah_attr,
        gids: &[GidRow],
    ) -> Result<AhBody, Errno> {
        if gids.is_empty() {
            return Err(Errno::UNSUPPORTED);
        }
        match is_route(attributes, gids) {
            true => Ok(AhBody { _pd: pd, route: route(attributes) }),
            false => Err(Errno::INVALID),
        }
    }
}

impl AhBody {
    pub(crate) fn route(&self) -> Route {
        self.route
    }
}

fn route(attributes: &c::ibv_ah_attr) -> Route {
    let grh = &attributes.grh;
    // SAFETY: both members of the union are 16 bytes that may have any value.
    Route { source: grh.sgid_index.into(), gid: Gid(unsafe { grh.dgid.raw }) }
}

/// The attributes of a handle to the sender of the datagram with these bytes before its data
/// (`ibv_init_ah_from_wc(3)`).
///
/// # Errors
///
/// `EINVAL` if the bytes are no header, or one to a GID that is none of the device's.
pub(crate) fn back_to_sender(
    header: &[u8; GRH_LEN],
    gids: &[GidRow],
) -> Result<c::ibv_ah_attr, Errno> {
    let (from, to) = route_of(header).ok_or(Errno::INVALID)?;
    let own = gids.iter().position(|row| row.gid == to).ok_or(Errno::INVALID)?;
    attributes_to(u16::try_from(own).map_err(|_| Errno::INVALID)?, from)
}

/// The attributes of a handle from the device's GID of this index to another one.
pub(crate) fn attributes_to(source: u16, gid: Gid) -> Result<c::ibv_ah_attr, Errno> {
    let mut attributes: c::ibv_ah_attr = zeroed();
    attributes.grh.dgid = c::ibv_gid { raw: gid.0 };
    attributes.grh.sgid_index = u8::try_from(source).map_err(|_| Errno::INVALID)?;
    attributes.grh.hop_limit = u8::MAX;
    (attributes.is_global, attributes.port_num) = (1, PORT);
    Ok(attributes)
}

/// Whether a packet could be sent so: over Ethernet it needs a route header, and a source.
pub(crate) fn is_route(attributes: &c::ibv_ah_attr, gids: &[GidRow]) -> bool {
    attributes.is_global != 0
        && attributes.port_num == PORT
        && gids.get(usize::from(attributes.grh.sgid_index)).is_some_and(|row| !row.gid.is_zero())
}
