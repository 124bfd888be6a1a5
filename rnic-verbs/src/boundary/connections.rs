//! Binding, resolving, listening, connecting, and queue pairs of ids.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use libc::sockaddr;

use crate::c::*;
use crate::cm::{ConnectWanted, IdBody, Phase};
use crate::device::{Device, KINDS};
use crate::errno::{Errno, minus_one, pointer};
use crate::object::{Body, Kind, live, publish, withdraw, zeroed};
use crate::pd::PdBody;
use crate::{system, visible};

use super::context::check_same;
use super::events::{self, completed};
use super::id::{IdShown, context_of, default_pd, show_addresses, shown};
use super::{addresses, argument_mut, cq, qp, srq};

/// rdma_bind_addr(3).
pub(crate) unsafe extern "C" fn rdma_bind_addr(
    id: *mut rdma_cm_id,
    address: *mut sockaddr,
) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    minus_one(unsafe { bind(id, address) })
}

pub(super) unsafe fn bind(id: *mut rdma_cm_id, address: *const sockaddr) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = shown(id)?;
        found.id.bind(addresses::read(address).ok_or_else(no_address)?)?;
        show_addresses(id, &found.id)
    }
}

fn no_address() -> Errno {
    Errno::invalid(format_args!("the address is null, or its family is not AF_INET or AF_INET6"))
}

/// rdma_resolve_addr(3). The answer is there at once, so no time can pass.
pub(crate) unsafe extern "C-unwind" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut sockaddr,
    peer: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: as the module says.
    minus_one(unsafe { resolve_address(id, source, peer) })
}

pub(super) unsafe fn resolve_address(
    id: *mut rdma_cm_id,
    source: *const sockaddr,
    peer: *const sockaddr,
) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        shown(id)?;
        let peer = addresses::read(peer).ok_or_else(no_address)?;
        let from = addresses::read(source);
        if from.is_none() && !source.is_null() {
            return Err(no_address());
        }
        completed(id, |of| of.resolve_address(from, peer))
    }
}

/// rdma_resolve_route(3).
pub(crate) unsafe extern "C-unwind" fn rdma_resolve_route(
    id: *mut rdma_cm_id,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: as the module says.
    minus_one(unsafe { completed(id, |of| of.resolve_route()) })
}

/// rdma_listen(3).
pub(crate) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let listens = shown(id).and_then(|found| {
            found.id.listen(backlog)?;
            show_addresses(id, &found.id)
        });
        minus_one(listens)
    }
}

/// rdma_connect(3).
pub(crate) unsafe extern "C-unwind" fn rdma_connect(
    id: *mut rdma_cm_id,
    parameters: *mut rdma_conn_param,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        minus_one(completed(id, |of| {
            has_what_it_shows(id, of);
            of.connect(wanted(parameters))
        }))
    }
}

/// rdma_accept(3).
pub(crate) unsafe extern "C-unwind" fn rdma_accept(
    id: *mut rdma_cm_id,
    parameters: *mut rdma_conn_param,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let accept = |of: &Arc<IdBody>| {
            has_what_it_shows(id, of);
            of.accept(&wanted(parameters))
        };
        minus_one(shown(id).and_then(|found| match found.id.is_of_datagrams() {
            // No event follows.
            true => accept(&found.id).map(|()| decided(id, found)),
            false => completed(id, accept),
        }))
    }
}

/// Acknowledges the request that `rdma_get_request(3)` left in a synchronous id: the listener
/// cannot be destroyed before.
unsafe fn decided(id: *mut rdma_cm_id, of: &IdShown) {
    if of.is_synchronous() {
        // SAFETY: as the module says.
        unsafe { events::acknowledge_own(id) }
    }
}

/// The queue pair that an id shows is its own, whoever put it there.
unsafe fn has_what_it_shows(id: *mut rdma_cm_id, of: &IdBody) {
    // SAFETY: as the module says.
    if let Ok(shown) = unsafe { qp::qp((*id).qp) } {
        of.has_qp(shown);
    }
}

/// What a program wants of a connection; without parameters, as much as possible.
unsafe fn wanted(parameters: *const rdma_conn_param) -> ConnectWanted {
    // SAFETY: as the module says.
    let Some(parameters) = (unsafe { parameters.as_ref() }) else {
        return ConnectWanted::default();
    };
    let reads = |n: u8| (n != RDMA_MAX_RESP_RES).then_some(u16::from(n));
    // SAFETY: as the module says.
    let private_data = unsafe { data(parameters.private_data, parameters.private_data_len.into()) };
    ConnectWanted {
        private_data: private_data.to_vec(),
        inbound: reads(parameters.responder_resources),
        outbound: reads(parameters.initiator_depth),
        qp: Some(rnic_client::QpId(parameters.qp_num)),
    }
}

pub(super) unsafe fn data<'a>(from: *const c_void, length: usize) -> &'a [u8] {
    if from.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: as the module says.
    unsafe { std::slice::from_raw_parts(from.cast(), length) }
}

/// rdma_reject(3).
pub(crate) unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    length: u8,
) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        minus_one(shown(id).and_then(|found| {
            found.id.reject(data(private_data, length.into()))?;
            decided(id, found);
            Ok(())
        }))
    }
}

/// rdma_disconnect(3). No event follows for an undecided request, nor for a connection whose end
/// the program has seen.
pub(crate) unsafe extern "C-unwind" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        match shown(id) {
            Ok(found) if found.id.phase() == Phase::Asked => minus_one(found.id.disconnect()),
            Ok(found) if found.id.phase() == Phase::Ended && !found.id.has_events() => 0,
            Ok(found) if found.id.is_of_datagrams() => minus_one(found.id.disconnect()),
            _ => minus_one(completed(id, |of| of.disconnect())),
        }
    }
}

/// rdma_establish(3).
pub(crate) unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: as the module says.
    minus_one(unsafe { shown(id) }.and_then(|s| {
        // SAFETY: as the module says.
        match unsafe { (*id).qp.is_null() } {
            true => s.id.establish(),
            false => Err(Errno::invalid(format_args!("the id has a queue pair, and moves it"))),
        }
    }))
}

/// rdma_notify(3): the daemon has seen the event before the program. As in the kernel, an id that
/// neither listens nor has begun to connect gets none.
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, _event: ibv_event_type) -> c_int {
    // SAFETY: as the module says.
    let notified = unsafe { of_device(id) }.and_then(|found| match found.id.phase() {
        phase @ (Phase::Idle | Phase::Bound | Phase::AddressResolved | Phase::RouteResolved) => {
            Err(Errno::invalid(format_args!("rdma_notify of an id in phase {phase:?}")))
        }
        Phase::Listening | Phase::Asked | Phase::Connecting | Phase::Connected | Phase::Ended => {
            Ok(())
        }
    });
    minus_one(notified)
}

/// rdma_init_qp_attr(3): the connection does what the attributes would say.
pub(crate) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attributes: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        minus_one(of_device(id).and_then(|found| {
            let says = argument_mut(attributes, "qp_attr")?;
            let mask = argument_mut(mask, "qp_attr_mask")?;
            let state = says.qp_state;
            *says = zeroed();
            says.qp_state = state;
            *mask = match found.id.is_of_datagrams() {
                true => datagram_attributes(says)?,
                false => connection_attributes(says, &found.id)?,
            };
            Ok(())
        }))
    }
}

/// Fills in the attributes of an iWARP QP that the program made without its id. Returns their mask.
fn connection_attributes(to: &mut ibv_qp_attr, id: &IdBody) -> Result<c_int, Errno> {
    to.port_num = crate::context::PORT;
    to.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    match to.qp_state {
        IBV_QPS_INIT => Ok(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT),
        IBV_QPS_RTR | IBV_QPS_RTS => {
            if to.qp_state == IBV_QPS_RTR && !id.knows_qp() {
                id.device().ids.gives_attributes();
            }
            Ok(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS)
        }
        state => Err(no_step(state)),
    }
}

fn no_step(state: ibv_qp_state) -> Errno {
    Errno::invalid(format_args!("qp_state {state}: rdma_init_qp_attr knows INIT, RTR and RTS"))
}

/// rdma_set_option(3).
pub(crate) unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: usize,
) -> c_int {
    // SAFETY: as the module says.
    let done = unsafe {
        shown(id).and_then(|found| match (level, name, length) {
            _ if value.is_null() => {
                Err(Errno::new(libc::EFAULT, format_args!("rdma_set_option: optval is null")))
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, 4) => {
                found.id.set_family_only(*value.cast::<c_int>() != 0)
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1) if found.id.is_of_datagrams() => {
                Err(Errno::invalid(format_args!("a UD QP waits for no acknowledgements")))
            }
            // How TCP waits for acknowledgements is the administrator's to say. A program sees what
            // it said.
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1) => {
                found.id.set_ack_timeout(*value.cast::<u8>());
                Ok(())
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 4) => {
                found.id.set_reuses_address(*value.cast::<c_int>() != 0)
            }
            // So is how it marks its packets.
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 1) => Ok(()),
            (
                RDMA_OPTION_ID,
                RDMA_OPTION_ID_AFONLY
                | RDMA_OPTION_ID_ACK_TIMEOUT
                | RDMA_OPTION_ID_REUSEADDR
                | RDMA_OPTION_ID_TOS,
                _,
            ) => Err(Errno::invalid(format_args!("option {name}: wrong optlen {length}"))),
            (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, _)
                if length == 0 || !length.is_multiple_of(PATH_DATA_LEN) =>
            {
                let reason = format_args!("RDMA_OPTION_IB_PATH: wrong optlen {length}");
                Err(Errno::invalid(reason))
            }
            _ => {
                let reason = format_args!("no option {name} of level {level} with {length} bytes");
                Err(Errno::new(libc::ENOSYS, reason))
            }
        })
    };
    minus_one(done)
}

/// Bytes of a `struct ibv_path_data`.
const PATH_DATA_LEN: usize = 72;

/// rdma_create_qp(3).
pub(crate) unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    minus_one(unsafe { create_qp(id, pd, wanted) })
}

pub(super) unsafe fn create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        let w = argument_mut(wanted, "qp_init_attr")?;
        check_type(id, w.qp_type)?;
        let asked = (w.send_cq, w.recv_cq, w.srq);
        let made = prepare(id, pd, (&mut w.send_cq, &mut w.recv_cq), &w.cap, &mut w.srq);
        let made = made.and_then(|pd| {
            let made = qp::create(pd, wanted).inspect_err(|_| destroy_cqs(id))?;
            has_qp(id, pd, made)
        });
        made.inspect_err(|_| {
            // The program may try for less with it, and what was made is gone.
            ((*wanted).send_cq, (*wanted).recv_cq, (*wanted).srq) = asked;
        })
    }
}

/// rdma_create_qp_ex(3).
pub(crate) unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    wanted: *mut ibv_qp_init_attr_ex,
) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    minus_one(unsafe { create_qp_ex(id, wanted) })
}

unsafe fn create_qp_ex(id: *mut rdma_cm_id, wanted: *mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        let w = argument_mut(wanted, "qp_init_attr")?;
        check_type(id, w.qp_type)?;
        let named = if w.comp_mask & IBV_QP_INIT_ATTR_PD != 0 { w.pd } else { null_mut() };
        let asked = (w.send_cq, w.recv_cq, w.srq);
        let made = prepare(id, named, (&mut w.send_cq, &mut w.recv_cq), &w.cap, &mut w.srq);
        let made = made.and_then(|pd| {
            ((*wanted).pd, (*wanted).comp_mask) = (pd, (*wanted).comp_mask | IBV_QP_INIT_ATTR_PD);
            let made = qp::create_ex((*pd).context, wanted).inspect_err(|_| destroy_cqs(id))?;
            has_qp(id, pd, made)
        });
        made.inspect_err(|_| {
            ((*wanted).send_cq, (*wanted).recv_cq, (*wanted).srq) = asked;
        })
    }
}

/// Refuses a queue pair of another type than the id's where those are datagrams.
unsafe fn check_type(id: *mut rdma_cm_id, wanted: ibv_qp_type) -> Result<(), Errno> {
    // SAFETY: as the module says.
    match unsafe { shown(id) }?.id.is_of_datagrams() && wanted != IBV_QPT_UD {
        true => {
            let reason = format_args!("qp_type {wanted}: ids of RDMA_PS_UDP have UD queue pairs");
            Err(Errno::invalid(reason))
        }
        false => Ok(()),
    }
}

/// Makes what is missing for a queue pair of an id, and shows it in the id: a domain, completion
/// queues with channels of their own.
unsafe fn prepare(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    (send_cq, recv_cq): (&mut *mut ibv_cq, &mut *mut ibv_cq),
    cap: &ibv_qp_cap,
    srq: &mut *mut ibv_srq,
) -> Result<*mut ibv_pd, Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = of_device(id)?;
        if !(*id).qp.is_null() {
            return Err(Errno::invalid(format_args!("the id has a queue pair already")));
        }
        let pd = match (pd.is_null(), (*id).pd.is_null()) {
            (false, _) => pd,
            (true, false) => (*id).pd,
            (true, true) => default_pd(found.id.device(), found.id.kind())?,
        };
        let context = context_of(found.id.device(), found.id.kind())?;
        live::<Arc<PdBody>>(pd)?;
        check_same(Kind::Pd, (*pd).context, context)?;
        if send_cq.is_null() {
            let made = make_cq(context, cap.max_send_wr, id)?;
            ((*id).send_cq_channel, (*id).send_cq) = made;
            *send_cq = made.1;
        }
        if recv_cq.is_null() {
            let made = make_cq(context, cap.max_recv_wr, id).inspect_err(|_| destroy_cqs(id))?;
            ((*id).recv_cq_channel, (*id).recv_cq) = made;
            *recv_cq = made.1;
        }
        if srq.is_null() {
            *srq = (*id).srq;
        }
        Ok(pd)
    }
}

unsafe fn make_cq(
    context: *mut ibv_context,
    entries: u32,
    id: *mut rdma_cm_id,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), Errno> {
    // SAFETY: as the module says.
    unsafe {
        let channel = cq::make_channel(context)?;
        match cq::make_cq(context, entries.max(1), id.cast(), channel, 0) {
            Ok(made) => Ok((channel, made.cast())),
            Err(errno) => {
                cq::ibv_destroy_comp_channel(channel);
                Err(errno)
            }
        }
    }
}

/// Destroys the completion queues that were made for an id.
unsafe fn destroy_cqs(id: *mut rdma_cm_id) {
    // SAFETY: as the module says.
    unsafe {
        for (channel, made) in [
            (&mut (*id).send_cq_channel, &mut (*id).send_cq),
            (&mut (*id).recv_cq_channel, &mut (*id).recv_cq),
        ] {
            let made = std::mem::replace(made, null_mut());
            if !made.is_null() {
                cq::ibv_destroy_cq(made);
            }
            let channel = std::mem::replace(channel, null_mut());
            if !channel.is_null() {
                cq::ibv_destroy_comp_channel(channel);
            }
        }
    }
}

unsafe fn has_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, made: *mut ibv_qp) -> Result<(), Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = shown(id)?;
        if found.id.is_of_datagrams() {
            to_rts(made).inspect_err(|_| {
                qp::ibv_destroy_qp(made);
                destroy_cqs(id);
            })?;
        } else {
            // As after the first step of those who make theirs without an id.
            (*made).state = IBV_QPS_INIT;
        }
        (*id).pd = pd;
        (*id).qp = made;
        let body = qp::qp(made)?;
        found.id.has_qp(body);
    }
    Ok(())
}

/// Moves a queue pair of datagrams through all its states: it is ready once it has been made.
unsafe fn to_rts(made: *mut ibv_qp) -> Result<(), Errno> {
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = state;
        let mask = datagram_attributes(&mut attributes)?;
        // SAFETY: as the module says.
        unsafe {
            let found = qp::qp(made)?;
            found.modify(&attributes, mask)?;
            (*made).state = state;
        }
    }
    Ok(())
}

/// Fills in what a queue pair of datagrams is to be told on its way to the state that the
/// attributes have; which ones they are.
fn datagram_attributes(to: &mut ibv_qp_attr) -> Result<c_int, Errno> {
    (to.port_num, to.qkey) = (crate::context::PORT, RDMA_UDP_QKEY);
    match to.qp_state {
        IBV_QPS_INIT => Ok(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
        IBV_QPS_RTR => Ok(IBV_QP_STATE),
        IBV_QPS_RTS => Ok(IBV_QP_STATE | IBV_QP_SQ_PSN),
        state => Err(no_step(state)),
    }
}

/// rdma_destroy_qp(3).
pub(crate) unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        let found = match shown(id) {
            Ok(found) => found,
            Err(errno) => return errno.log(),
        };
        let made = std::mem::replace(&mut (*id).qp, null_mut());
        if !made.is_null() {
            qp::ibv_destroy_qp(made);
            found.id.loses_qp();
        }
        destroy_cqs(id);
    }
}

/// rdma_create_srq(3).
pub(crate) unsafe extern "C" fn rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    wanted: *mut ibv_srq_init_attr,
) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        let made = pd_for_srq(id, pd).and_then(|pd| srq::make(pd, wanted).map(|made| (pd, made)));
        minus_one(made.map(|made| ((*id).pd, (*id).srq) = made))
    }
}

/// rdma_create_srq_ex(3).
pub(crate) unsafe extern "C" fn rdma_create_srq_ex(
    id: *mut rdma_cm_id,
    wanted: *mut ibv_srq_init_attr_ex,
) -> c_int {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        let made = argument_mut(wanted, "srq_init_attr").and_then(|w| {
            if w.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 {
                let reason = format_args!("comp_mask lacks IBV_SRQ_INIT_ATTR_TYPE");
                return Err(Errno::invalid(reason));
            }
            let named = if w.comp_mask & IBV_SRQ_INIT_ATTR_PD != 0 { w.pd } else { null_mut() };
            let pd = pd_for_srq(id, named)?;
            (w.pd, w.comp_mask) = (pd, w.comp_mask | IBV_SRQ_INIT_ATTR_PD);
            srq::make_ex(wanted).map(|made| (pd, made))
        });
        minus_one(made.map(|made| ((*id).pd, (*id).srq) = made))
    }
}

/// What stands behind an id that is bound to a device.
unsafe fn of_device<'a>(id: *mut rdma_cm_id) -> Result<&'a IdShown, Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = shown(id)?;
        match (*id).verbs.is_null() {
            true => Err(Errno::invalid(format_args!("the id is not bound to a device yet"))),
            false => Ok(found),
        }
    }
}

/// The domain for an SRQ of an id: the one that is named, or the id's, or the device's.
unsafe fn pd_for_srq(id: *mut rdma_cm_id, named: *mut ibv_pd) -> Result<*mut ibv_pd, Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = of_device(id)?;
        if !(*id).srq.is_null() {
            return Err(Errno::invalid(format_args!("the id has a shared receive queue already")));
        }
        match (named.is_null(), (*id).pd.is_null()) {
            (false, _) => {
                live::<Arc<PdBody>>(named)?;
                let of = context_of(found.id.device(), found.id.kind())?;
                check_same(Kind::Pd, (*named).context, of)?;
                Ok(named)
            }
            (true, false) => Ok((*id).pd),
            (true, true) => default_pd(found.id.device(), found.id.kind()),
        }
    }
}

/// rdma_destroy_srq(3).
pub(crate) unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    unsafe {
        if let Err(errno) = shown(id) {
            return errno.log();
        }
        let made = std::mem::replace(&mut (*id).srq, null_mut());
        if !made.is_null() {
            srq::ibv_destroy_srq(made);
        }
    }
}

/// rdma_get_src_port(3): in network byte order.
pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: as the module says.
    unsafe { shown(id).map_or(0, |_| port(&(*id).route.addr.src)) }
}

/// rdma_get_dst_port(3): in network byte order.
pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: as the module says.
    unsafe { shown(id).map_or(0, |_| port(&(*id).route.addr.dst)) }
}

unsafe fn port(of: &rdma_sockaddr) -> u16 {
    // SAFETY: as the module says.
    unsafe { addresses::read(&of.addr) }.map_or(0, |address| address.port().to_be())
}

/// rdma_get_devices(3).
pub(crate) unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let _whole = system::uncancelled();
    let mut list: Contexts = [null_mut(); KINDS.len() + 1];
    let found = list_devices(&mut list);
    if !count.is_null() {
        // SAFETY: as the module says.
        unsafe { *count = found.as_ref().map_or(0, |found| *found as c_int) };
    }
    pointer(found.map(|_| publish(list, ContextList).as_ptr().cast()))
}

/// Fills in the contexts of the devices that the program is to see, as `ibv_get_device_list` has
/// them: how many there are.
fn list_devices(list: &mut Contexts) -> Result<usize, Errno> {
    let device = Device::open()?;
    let kinds = visible::kinds(&device);
    for (place, kind) in list.iter_mut().zip(&kinds) {
        *place = context_of(&device, *kind)?;
    }
    match kinds.len() {
        0 => {
            let reason = format_args!("RNIC_DEVICES names no device that exists");
            Err(Errno::new(libc::ENODEV, reason))
        }
        n => Ok(n),
    }
}

/// The list that `rdma_get_devices` returns, null-terminated.
type Contexts = [*mut ibv_context; KINDS.len() + 1];

/// Marks such lists as objects of C: all they have is in the head.
struct ContextList;

impl Body for ContextList {
    type Head = Contexts;
    const KIND: Kind = Kind::ContextList;
}

/// rdma_free_devices(3).
pub(crate) unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    if !list.is_null() {
        // SAFETY: as the module says.
        let withdrawn = unsafe { withdraw::<ContextList>(list.cast()) };
        withdrawn.map_or_else(|errno| errno.log(), drop);
    }
}

/// rdma_get_request(3).
pub(crate) unsafe extern "C-unwind" fn rdma_get_request(
    listener: *mut rdma_cm_id,
    to: *mut *mut rdma_cm_id,
) -> c_int {
    // SAFETY: as the module says.
    minus_one(unsafe { get_request(listener).map(|id| to.write(id)) })
}

unsafe fn get_request(listener: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: as the module says.
    unsafe {
        let found = shown(listener)?;
        if !found.is_synchronous() {
            let reason = format_args!("rdma_get_request: the id has an event channel");
            return Err(Errno::invalid(reason));
        }
        events::acknowledge_own(listener);
        let event = events::fetch((*listener).channel)?;
        let _whole = system::uncancelled();
        if (*event).status != 0 || (*event).event != RDMA_CM_EVENT_CONNECT_REQUEST {
            let (kind, status) = ((*event).event, (*event).status);
            events::rdma_ack_cm_event(event);
            return Err(match status {
                0 => Errno::invalid(format_args!("event {kind} is no connection request")),
                _ => events::failed_event(kind, status),
            });
        }
        let id = (*event).id;
        let endpoint = found.endpoint.lock().as_ref().map(|e| (e.pd, e.wanted));
        if let Some((pd, mut wanted)) = endpoint
            && let Err(errno) = create_qp(id, pd.0, &mut wanted)
        {
            events::rdma_ack_cm_event(event);
            super::id::rdma_destroy_id(id);
            return Err(errno);
        }
        (*id).event = event;
        Ok(id)
    }
}
