//! Address handles (`ibv_create_ah(3)`): where datagrams would go.
//!
//! Only the device whose queue pairs are wired by hand has GIDs that could be named, and no queue
//! pair sends datagrams yet: programs make a handle to find out whether a GID of theirs is usable.

use rnic_client::GidRow;

use crate::c;
use crate::context::PORT;
use crate::errno::Errno;
use crate::object::Body;
use crate::pd::PdUser;

/// An address handle. The library's own: the device knows nothing of it.
pub(crate) struct AhBody {
    _pd: PdUser,
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
            true => Ok(AhBody { _pd: pd }),
            false => Err(Errno::INVALID),
        }
    }
}

/// Whether a packet could be sent so: over Ethernet it needs a route header, and a source.
pub(crate) fn is_route(attributes: &c::ibv_ah_attr, gids: &[GidRow]) -> bool {
    attributes.is_global != 0
        && attributes.port_num == PORT
        && usize::from(attributes.grh.sgid_index) < gids.len()
}
