//! Address handles (`ibv_create_ah(3)`): where datagrams go.
//!
//! Only the device whose queue pairs are wired by hand has GIDs that can be named. Programs also
//! make a handle to find out whether a GID of theirs is usable.

use rnic_client::{GRH_LEN, Gid, GidRow, PdId, route_of};

use crate::c;
use crate::context::PORT;
use crate::errno::Errno;
use crate::object::{Body, Kind, zeroed};
use crate::pd::PdUser;

/// An address handle. The library's own: the device knows nothing of it.
pub(crate) struct AhBody {
    pd: PdUser,
    route: Route,
}

/// From which port of the device to which other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Route {
    /// Index of the device's GID.
    pub(crate) source: u16,
    pub(crate) gid: Gid,
}

impl Body for AhBody {
    type Head = c::ibv_ah;
    const KIND: Kind = Kind::Ah;
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
            let reason = format_args!("address handles: the device has no GID to send from");
            return Err(Errno::unsupported(reason));
        }
        check_route(attributes, gids)?;
        Ok(AhBody { pd, route: route(attributes) })
    }
}

impl AhBody {
    /// Its route, for a queue pair in this domain.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the handle is in another one.
    pub(crate) fn route(&self, pd: PdId) -> Result<Route, Errno> {
        if self.pd.client().id() == pd {
            return Ok(self.route);
        }
        Err(Errno::invalid(format_args!("the address handle is in another PD than the QP")))
    }
}

/// The route that attributes name.
pub(crate) fn route(attributes: &c::ibv_ah_attr) -> Route {
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
    let none = || Errno::invalid(format_args!("the GRH is neither an IPv4 nor an IPv6 header"));
    let (from, to) = route_of(header).ok_or_else(none)?;
    let foreign = || Errno::invalid(format_args!("the GRH is to a GID that the device lacks"));
    let own = gids.iter().position(|row| row.gid == to).ok_or_else(foreign)?;
    attributes_to(u16::try_from(own).unwrap_or(u16::MAX), from)
}

/// The attributes of a handle from the device's GID of this index to another one.
pub(crate) fn attributes_to(source: u16, gid: Gid) -> Result<c::ibv_ah_attr, Errno> {
    let mut attributes: c::ibv_ah_attr = zeroed();
    attributes.grh.dgid = c::ibv_gid { raw: gid.0 };
    attributes.grh.sgid_index = u8::try_from(source).map_err(|_| {
        Errno::invalid(format_args!("GID index {source} does not fit grh.sgid_index (255)"))
    })?;
    attributes.grh.hop_limit = u8::MAX;
    (attributes.is_global, attributes.port_num) = (1, PORT);
    Ok(attributes)
}

/// Checks the address of a peer: over Ethernet it needs a GRH and a source GID.
///
/// # Errors
///
/// `EINVAL` if a packet cannot be sent to it.
pub(crate) fn check_route(attributes: &c::ibv_ah_attr, gids: &[GidRow]) -> Result<(), Errno> {
    let (port, index) = (attributes.port_num, attributes.grh.sgid_index);
    if attributes.is_global == 0 {
        let reason = format_args!("ah_attr.is_global is 0: RoCE needs a GRH with a GID");
        return Err(Errno::invalid(reason));
    }
    if port != PORT {
        let reason = format_args!("ah_attr.port_num {port}: the device has port {PORT} only");
        return Err(Errno::invalid(reason));
    }
    if usize::from(index) >= gids.len() {
        let count = gids.len();
        let reason = format_args!("grh.sgid_index {index}: the GID table has {count} entries");
        return Err(Errno::invalid(reason));
    }
    if gids[usize::from(index)].gid.is_zero() {
        let reason = format_args!("grh.sgid_index {index}: the entry is empty");
        return Err(Errno::invalid(reason));
    }
    Ok(())
}
