//! Address handles (`ibv_create_ah(3)`): destinations of datagrams.
//!
//! Only the RoCE device has a GID table for address handles. Some programs create a handle merely
//! to check that one of their GIDs is usable.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rnic_client::{Function, GRH_LEN, Gid, GidRow, LibraryCall, PdId, Profile, route_of};

use crate::c::{self, ibv_ah, ibv_ah_attr, ibv_context, ibv_grh, ibv_pd, ibv_wc};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, OfContext, live, publish, withdraw, zeroed};
use crate::ffi::pointers::{In, Out, get};
use crate::verbs::adapter::Gids;
use crate::verbs::context::context;
use crate::verbs::device::PORT;
use crate::verbs::pd::{PdBody, PdUser};

/// An address handle. It exists in the library only, not in the daemon.
pub(crate) struct AhBody {
    pd: PdUser,
    route: Route,
}

/// Route of a datagram.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Route {
    /// Index of the source GID in the daemon's table.
    pub(crate) source: u16,
    pub(crate) gid: Gid,
}

impl Drop for AhBody {
    fn drop(&mut self) {
        self.pd.device().ahs.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Body for AhBody {
    type Head = ibv_ah;
    const KIND: Kind = Kind::Ah;
}

// SAFETY: the head begins with its context.
unsafe impl OfContext for AhBody {}

impl AhBody {
    /// Creates a handle in a PD of a device with these GIDs.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no GIDs; `EINVAL` if the attributes have no GRH, or an
    /// invalid port or source GID; the profile's `max_ah_errno` if the process has too many
    /// handles.
    pub(crate) fn new(pd: PdUser, attributes: &ibv_ah_attr, gids: &Gids) -> Result<AhBody, Errno> {
        if gids.is_empty() {
            return Err(unsupported!("address handles: the device has no GID to send from"));
        }
        check_route(attributes, gids)?;
        pd.device().admit(LibraryCall::CreateAh { pd: pd.client().id() })?;
        let Destination { source, gid } = destination(attributes);
        let ahs = &pd.device().ahs;
        let &Profile { max_ah: most, max_ah_errno, .. } = &pd.adapter().limits().profile;
        let one_more = |n| (n < most).then_some(n + 1);
        if ahs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err() {
            return Err(errno!(
                max_ah_errno.into(),
                "the process already has {most} address handles, the maximum (max_ah)"
            ));
        }
        Ok(AhBody { pd, route: Route { source: gids.to_daemon(source), gid } })
    }

    /// Returns the route for a queue pair in this PD.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the handle belongs to another PD.
    pub(crate) fn route(&self, pd: PdId) -> Result<Route, Errno> {
        if self.pd.client().id() == pd {
            return Ok(self.route);
        }
        Err(invalid!("the address handle is not in the PD of the QP"))
    }
}

/// The GIDs of an address vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Destination {
    /// Index of the source GID in the table of the device.
    pub(crate) source: u8,
    pub(crate) gid: Gid,
}

/// Returns the GIDs in the attributes.
pub(crate) fn destination(attributes: &ibv_ah_attr) -> Destination {
    let grh = &attributes.grh;
    // SAFETY: both members of the union are 16 bytes that may have any value.
    Destination { source: grh.sgid_index, gid: Gid(unsafe { grh.dgid.raw }) }
}

/// Returns the attributes of a handle to the sender of a datagram with this GRH
/// (`ibv_init_ah_from_wc(3)`).
///
/// # Errors
///
/// `EINVAL` if the header is invalid, or if its destination GID is not in `gids`.
pub(crate) fn back_to_sender(
    header: &[u8; GRH_LEN],
    gids: &[GidRow],
) -> Result<ibv_ah_attr, Errno> {
    let none = || invalid!("the GRH is neither an IPv4 nor an IPv6 header");
    let (from, to) = route_of(header).ok_or_else(none)?;
    let foreign = || invalid!("the GRH has a destination GID of another host");
    let own = gids.iter().position(|row| row.gid == to).ok_or_else(foreign)?;
    attributes_to(u16::try_from(own).unwrap_or(u16::MAX), from)
}

/// Returns the attributes of a handle from the device's GID with this index to another GID.
pub(crate) fn attributes_to(source: u16, gid: Gid) -> Result<ibv_ah_attr, Errno> {
    let mut attributes: ibv_ah_attr = zeroed();
    attributes.grh.dgid = c::ibv_gid { raw: gid.0 };
    attributes.grh.sgid_index = u8::try_from(source)
        .map_err(|_| invalid!("GID index {source} does not fit grh.sgid_index (at most 255)"))?;
    attributes.grh.hop_limit = u8::MAX;
    attributes.is_global = 1;
    attributes.port_num = PORT;
    Ok(attributes)
}

/// Checks the address of a peer. On Ethernet it needs a GRH and a source GID.
///
/// # Errors
///
/// `EINVAL` if a packet cannot be sent to it.
pub(crate) fn check_route(attributes: &ibv_ah_attr, gids: &[GidRow]) -> Result<(), Errno> {
    let port = attributes.port_num;
    let index = attributes.grh.sgid_index;
    if attributes.is_global == 0 {
        return Err(invalid!("ah_attr.is_global is 0: RoCE needs a GRH with a GID"));
    }
    if port != PORT {
        return Err(invalid!("ah_attr.port_num {port}: the device has only port {PORT}"));
    }
    if usize::from(index) >= gids.len() {
        let count = gids.len();
        return Err(invalid!("grh.sgid_index {index}: the GID table has {count} entries"));
    }
    if gids[usize::from(index)].gid.is_zero() {
        return Err(invalid!("grh.sgid_index {index}: the entry is empty"));
    }
    // As in the kernel, which finds no route in this case.
    let from = gids[usize::from(index)].gid.address();
    let to = destination(attributes).gid.address();
    if from.is_ipv4() != to.is_ipv4() {
        return Err(invalid!(
            "grh.sgid_index {index} is {from}, but grh.dgid is {to}: the address families differ"
        ));
    }
    Ok(())
}

fn create(pd: *mut ibv_pd, attr: In<ibv_ah_attr>) -> Result<*mut ibv_ah, Errno> {
    create_to(pd, &attr.read("attr")?)
}

fn create_to(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<*mut ibv_ah, Errno> {
    let found = live::<Arc<PdBody>>(pd)?;
    let of = get!(found.context);
    let ah = AhBody::new(found.user(), attr, &context(of)?.gids())?;
    Ok(publish(ibv_ah { context: of, pd, handle: 0 }, ah).as_ptr())
}

fn init_from_wc(
    of: *mut ibv_context,
    port: u8,
    wc: In<ibv_wc>,
    grh: In<ibv_grh>,
    attr: Out<ibv_ah_attr>,
) -> Result<(), Errno> {
    let found = attributes_of(of, port, wc, grh)?;
    let attr = attr.required("ah_attr")?;
    context(of)?.device().admit(Function::InitAhFromWc.call())?;
    attr.write(found);
    Ok(())
}

fn create_from_wc(
    pd: *mut ibv_pd,
    wc: In<ibv_wc>,
    grh: In<ibv_grh>,
    port: u8,
) -> Result<*mut ibv_ah, Errno> {
    let found = live::<Arc<PdBody>>(pd)?;
    create_to(pd, &attributes_of(get!(found.context), port, wc, grh)?)
}

/// Returns the attributes of a handle to the sender of a completed receive.
fn attributes_of(
    of: *mut ibv_context,
    port: u8,
    wc: In<ibv_wc>,
    grh: In<ibv_grh>,
) -> Result<ibv_ah_attr, Errno> {
    if wc.read("wc")?.wc_flags & c::IBV_WC_GRH == 0 {
        return Err(invalid!("the completion has no GRH (IBV_WC_GRH)"));
    }
    if port != PORT {
        return Err(invalid!("port {port}: the device has only port {PORT}"));
    }
    let context = context(of)?;
    back_to_sender(&grh.read("grh")?.bytes, &context.gids())
}

fn destroy(ah: *mut ibv_ah) -> Result<(), Errno> {
    live::<AhBody>(ah)?.pd.admit(Function::DestroyAh)?;
    // SAFETY: no thread uses `ah`, now or later (ibv_destroy_ah(3)).
    unsafe { withdraw::<AhBody>(ah) }.map(drop)
}

entry! {
    uncancelled ibv_create_ah(pd: *mut ibv_pd, attr: In<ibv_ah_attr>) -> pointer<ibv_ah> = create;
    /// ibv_init_ah_from_wc(3). Unlike most of libibverbs, it fails with -1 and `errno`.
    uncancelled ibv_init_ah_from_wc(
        of: *mut ibv_context, port: u8, wc: In<ibv_wc>, grh: In<ibv_grh>, attr: Out<ibv_ah_attr>,
    ) -> minus_one = init_from_wc;
    uncancelled ibv_create_ah_from_wc(
        pd: *mut ibv_pd, wc: In<ibv_wc>, grh: In<ibv_grh>, port: u8,
    ) -> pointer<ibv_ah> = create_from_wc;
    uncancelled ibv_destroy_ah(ah: *mut ibv_ah) -> status = destroy;
}
