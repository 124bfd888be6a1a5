//! Binding, resolving, listening, connecting, and the queue pairs of ids.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use libc::sockaddr;

use crate::c::*;
use crate::errno::{Errno, minus_one, pointer};
use crate::ffi::handles::{Body, Kind, live, publish, withdraw, zeroed};
use crate::rdmacm::{ConnectParams, IdBody, Phase};
use crate::system;
use crate::verbs::device::{Device, KINDS};
use crate::verbs::device_filter;
use crate::verbs::pd::PdBody;

use crate::ffi::pointers::argument_mut;
use crate::ffi::socket_address as addresses;
use crate::rdmacm::events::{self, completed};
use crate::rdmacm::id::entry::{CmIdBody, cm_id, context_of, default_pd, show_addresses};
use crate::verbs::context::entry::check_same;
use crate::verbs::cq::entry as cq;
use crate::verbs::qp::entry as qp;
use crate::verbs::srq::entry as srq;

/// rdma_bind_addr(3).
pub(crate) unsafe extern "C" fn rdma_bind_addr(
    id: *mut rdma_cm_id,
    address: *mut sockaddr,
) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `bind` has the contract of this function.
    minus_one(unsafe { bind(id, address) })
}

pub(crate) unsafe fn bind(id: *mut rdma_cm_id, address: *const sockaddr) -> Result<(), Errno> {
    // SAFETY: `cm_id` finds `id`, which the caller does not destroy during the call. `address` is
    // null or valid (rdma_bind_addr(3)).
    unsafe {
        let found = cm_id(id)?;
        found.id.bind(addresses::read(address).ok_or_else(no_address)?)?;
        show_addresses(id, &found.id)
    }
}

fn no_address() -> Errno {
    Errno::invalid(format_args!("the address is null, or its family is not AF_INET or AF_INET6"))
}

/// rdma_resolve_addr(3). The result is available at once, so the timeout is not used.
pub(crate) unsafe extern "C-unwind" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut sockaddr,
    peer: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    // SAFETY: `resolve_address` has the contract of this function.
    minus_one(unsafe { resolve_address(id, source, peer) })
}

pub(crate) unsafe fn resolve_address(
    id: *mut rdma_cm_id,
    source: *const sockaddr,
    peer: *const sockaddr,
) -> Result<(), Errno> {
    // SAFETY: `completed` and `cm_id` have the contract of this function, and `source` and `peer`
    // are null or valid addresses (rdma_resolve_addr(3)).
    unsafe {
        cm_id(id)?;
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
    // SAFETY: `completed` has the contract of this function.
    minus_one(unsafe { completed(id, |of| of.resolve_route()) })
}

/// rdma_listen(3).
pub(crate) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: `cm_id` finds `id`, which is not destroyed during the call (rdma_listen(3)).
    unsafe {
        let listens = cm_id(id).and_then(|found| {
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
    // SAFETY: `completed` finds `id`, which is live while the closure runs, and `parameters` is
    // null or valid (rdma_connect(3)).
    unsafe {
        minus_one(completed(id, |of| {
            adopt_qp(id, of);
            of.connect(wanted(parameters))
        }))
    }
}

/// rdma_accept(3).
pub(crate) unsafe extern "C-unwind" fn rdma_accept(
    id: *mut rdma_cm_id,
    parameters: *mut rdma_conn_param,
) -> c_int {
    // SAFETY: `cm_id` finds `id`, which the caller does not destroy before an event follows.
    // `parameters` is null or valid (rdma_accept(3)).
    unsafe {
        let accept = |of: &Arc<IdBody>| {
            adopt_qp(id, of);
            of.accept(&wanted(parameters))
        };
        minus_one(cm_id(id).and_then(|found| {
            if found.id.is_ud() {
                // No event follows.
                accept(&found.id).map(|()| decided(id, found))
            } else {
                completed(id, accept)
            }
        }))
    }
}

/// Acknowledges the event that `rdma_get_request(3)` has left in a synchronous id. Otherwise the
/// listener could not be destroyed.
unsafe fn decided(id: *mut rdma_cm_id, of: &CmIdBody) {
    if of.is_synchronous() {
        // SAFETY: callers have found `id` with `cm_id`, and it is not destroyed during the call.
        unsafe { events::acknowledge_own(id) }
    }
}

/// Makes `id->qp` the QP of the id, even if the program set the field itself.
unsafe fn adopt_qp(id: *mut rdma_cm_id, of: &IdBody) {
    // SAFETY: `id` is live in all callers, and its QP is not destroyed during the call.
    if let Ok(found) = unsafe { qp::qp((*id).qp) } {
        of.set_qp(found);
    }
}

/// Returns the parameters of a connection. A null pointer requests the maximum number of Reads.
unsafe fn wanted(parameters: *const rdma_conn_param) -> ConnectParams {
    // SAFETY: `parameters` is null or points to an `rdma_conn_param` (rdma_connect(3)).
    let Some(parameters) = (unsafe { parameters.as_ref() }) else {
        return ConnectParams::default();
    };
    let reads = |n: u8| (n != RDMA_MAX_RESP_RES).then_some(u16::from(n));
    // SAFETY: `private_data` is null or points to `private_data_len` bytes (rdma_connect(3)).
    let private_data = unsafe { data(parameters.private_data, parameters.private_data_len.into()) };
    ConnectParams {
        private_data: private_data.to_vec(),
        inbound: reads(parameters.responder_resources),
        outbound: reads(parameters.initiator_depth),
        qp: Some(rnic_client::QpId(parameters.qp_num)),
    }
}

pub(crate) unsafe fn data<'a>(from: *const c_void, length: usize) -> &'a [u8] {
    if from.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: `from` is not null, so it points to `length` bytes, which do not change while the
    // result is in use.
    unsafe { std::slice::from_raw_parts(from.cast(), length) }
}

/// rdma_reject(3).
pub(crate) unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    length: u8,
) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `cm_id` finds `id`, which the caller does not destroy during the call. `private_data`
    // is null or points to `length` bytes (rdma_reject(3)).
    unsafe {
        minus_one(cm_id(id).and_then(|found| {
            found.id.reject(data(private_data, length.into()))?;
            decided(id, found);
            Ok(())
        }))
    }
}

/// rdma_disconnect(3). Queues no event for an id with an undecided request, for a UD id, or after
/// the program has fetched the event for the end of the connection.
pub(crate) unsafe extern "C-unwind" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller does not destroy `id` before an event follows, or, if none follows, during
    // the call (rdma_disconnect(3)).
    unsafe {
        match cm_id(id) {
            Ok(found) if found.id.phase() == Phase::Undecided => minus_one(found.id.disconnect()),
            Ok(found) if found.id.phase() == Phase::Ended && !found.id.has_events() => 0,
            Ok(found) if found.id.is_ud() => minus_one(found.id.disconnect()),
            _ => minus_one(completed(id, |of| of.disconnect())),
        }
    }
}

/// rdma_establish(3).
pub(crate) unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the caller does not destroy `id` during the call (rdma_establish(3)).
    minus_one(unsafe { cm_id(id) }.and_then(|s| {
        // SAFETY: `cm_id` has found `id`.
        if unsafe { (*id).qp.is_null() } {
            s.id.establish()
        } else {
            Err(Errno::invalid(format_args!("rdma_establish: the id has a queue pair of its own")))
        }
    }))
}

/// rdma_notify(3). Does nothing: the daemon has already handled the event. As in the kernel, the
/// call fails for an id that neither listens nor has begun to connect.
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, _event: ibv_event_type) -> c_int {
    // SAFETY: the caller does not destroy `id` during the call (rdma_notify(3)).
    let notified = unsafe { of_device(id) }.and_then(|found| match found.id.phase() {
        phase @ (Phase::Idle | Phase::Bound | Phase::AddressResolved | Phase::RouteResolved) => {
            Err(Errno::invalid(format_args!("rdma_notify of an id in phase {phase:?}")))
        }
        Phase::Listening
        | Phase::Undecided
        | Phase::Connecting
        | Phase::Connected
        | Phase::Ended => Ok(()),
    });
    minus_one(notified)
}

/// rdma_init_qp_attr(3). On the iWARP device, the connection sets up the QP and the attributes have
/// no effect.
pub(crate) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attributes: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: the caller does not destroy `id` during the call, and `attributes` and `mask` are
    // null or valid (rdma_init_qp_attr(3)).
    unsafe {
        minus_one(of_device(id).and_then(|found| {
            let attr = argument_mut(attributes, "qp_attr")?;
            let mask = argument_mut(mask, "qp_attr_mask")?;
            let state = attr.qp_state;
            *attr = zeroed();
            attr.qp_state = state;
            *mask = if found.id.is_ud() {
                ud_attributes(attr)?
            } else {
                connection_attributes(attr, &found.id)?
            };
            Ok(())
        }))
    }
}

/// Fills in the attributes of an iWARP QP that was created without the id. Returns their mask.
fn connection_attributes(to: &mut ibv_qp_attr, id: &IdBody) -> Result<c_int, Errno> {
    to.port_num = crate::verbs::context::PORT;
    to.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    match to.qp_state {
        IBV_QPS_INIT => Ok(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT),
        IBV_QPS_RTR | IBV_QPS_RTS => {
            if to.qp_state == IBV_QPS_RTR && !id.knows_qp() {
                id.device().ids.count_rtr_attrs();
            }
            Ok(IBV_QP_STATE | IBV_QP_ACCESS_FLAGS)
        }
        state => Err(no_transition(state)),
    }
}

fn no_transition(state: ibv_qp_state) -> Errno {
    Errno::invalid(format_args!("qp_state {state}: rdma_init_qp_attr supports INIT, RTR and RTS"))
}

/// rdma_set_option(3).
pub(crate) unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: usize,
) -> c_int {
    // SAFETY: the caller does not destroy `id` during the call, and `value` points to `length`
    // bytes (rdma_set_option(3)), which each arm compares with the size of its option.
    let done = unsafe {
        cm_id(id).and_then(|found| match (level, name, length) {
            _ if value.is_null() => {
                Err(Errno::new(libc::EFAULT, format_args!("rdma_set_option: optval is null")))
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, 4) => {
                found.id.set_family_only(*value.cast::<c_int>() != 0)
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1) if found.id.is_ud() => {
                Err(Errno::invalid(format_args!("a UD QP has no acknowledgement timeout")))
            }
            // The host's TCP settings determine the timeout. `ibv_query_qp(3)` reports this value.
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1) => {
                found.id.set_ack_timeout(*value.cast::<u8>());
                Ok(())
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 4) => {
                found.id.set_reuses_address(*value.cast::<c_int>() != 0)
            }
            // The host's settings determine the TOS as well.
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
                let reason = format_args!("option {name} of level {level} is not supported");
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
    let _guard = system::uncancelled();
    // SAFETY: `create_qp` has the contract of this function.
    minus_one(unsafe { create_qp(id, pd, wanted) })
}

pub(crate) unsafe fn create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    // SAFETY: `check_type` finds `id`. `wanted` is null or valid, and the caller destroys neither
    // `id`, `pd` nor the queues in `wanted` during the call (rdma_create_qp(3)).
    unsafe {
        let w = argument_mut(wanted, "qp_init_attr")?;
        check_type(id, w.qp_type)?;
        let asked = (w.send_cq, w.recv_cq, w.srq);
        let made = prepare(id, pd, &mut w.send_cq, &mut w.recv_cq, &w.cap, &mut w.srq);
        let made = made.and_then(|pd| {
            let made = qp::create(pd, wanted).inspect_err(|_| destroy_cqs(id))?;
            set_qp(id, pd, made)
        });
        made.inspect_err(|_| {
            // The program may retry with the same structure, and the CQs created here are gone.
            ((*wanted).send_cq, (*wanted).recv_cq, (*wanted).srq) = asked;
        })
    }
}

/// rdma_create_qp_ex(3).
pub(crate) unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    wanted: *mut ibv_qp_init_attr_ex,
) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: `create_qp_ex` has the contract of this function.
    minus_one(unsafe { create_qp_ex(id, wanted) })
}

unsafe fn create_qp_ex(id: *mut rdma_cm_id, wanted: *mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    // SAFETY: `check_type` finds `id` and `prepare` finds `pd`. `wanted` is null or valid, and the
    // caller destroys neither `id` nor its objects during the call (rdma_create_qp_ex(3)).
    unsafe {
        let w = argument_mut(wanted, "qp_init_attr")?;
        check_type(id, w.qp_type)?;
        let named = if w.comp_mask & IBV_QP_INIT_ATTR_PD != 0 { w.pd } else { null_mut() };
        let asked = (w.send_cq, w.recv_cq, w.srq);
        let made = prepare(id, named, &mut w.send_cq, &mut w.recv_cq, &w.cap, &mut w.srq);
        let made = made.and_then(|pd| {
            (*wanted).pd = pd;
            (*wanted).comp_mask |= IBV_QP_INIT_ATTR_PD;
            let made = qp::create_ex((*pd).context, wanted).inspect_err(|_| destroy_cqs(id))?;
            set_qp(id, pd, made)
        });
        made.inspect_err(|_| {
            ((*wanted).send_cq, (*wanted).recv_cq, (*wanted).srq) = asked;
        })
    }
}

/// Refuses QP types other than UD for ids of `RDMA_PS_UDP`.
unsafe fn check_type(id: *mut rdma_cm_id, wanted: ibv_qp_type) -> Result<(), Errno> {
    // SAFETY: the caller does not destroy `id` during the call.
    let found = unsafe { cm_id(id) }?;
    if found.id.is_ud() && wanted != IBV_QPT_UD {
        let reason = format_args!("qp_type {wanted}: ids of RDMA_PS_UDP have UD QPs");
        return Err(Errno::invalid(reason));
    }
    Ok(())
}

/// Returns the PD for a new QP of an id, and sets the missing CQs and SRQ. Creates each missing CQ
/// with its own channel and stores it in the id.
unsafe fn prepare(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    send_cq: &mut *mut ibv_cq,
    recv_cq: &mut *mut ibv_cq,
    cap: &ibv_qp_cap,
    srq: &mut *mut ibv_srq,
) -> Result<*mut ibv_pd, Errno> {
    // SAFETY: `of_device` finds `id` and `live` finds `pd` before they are followed, and the caller
    // destroys neither during the call.
    unsafe {
        let found = of_device(id)?;
        if !(*id).qp.is_null() {
            return Err(Errno::invalid(format_args!("the id already has a queue pair")));
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
    // SAFETY: `context` is never closed (`context_of`), and no other thread has the new channel.
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

/// Destroys the completion queues that the library has created for an id.
unsafe fn destroy_cqs(id: *mut rdma_cm_id) {
    // SAFETY: callers have found `id` with `cm_id`, and no other thread uses the CQs that `prepare`
    // created for it, now or later.
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

unsafe fn set_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, made: *mut ibv_qp) -> Result<(), Errno> {
    // SAFETY: `cm_id` finds `id`, which the caller does not destroy during the call, and no other
    // thread has `made` yet.
    unsafe {
        let found = cm_id(id)?;
        if found.id.is_ud() {
            to_rts(made).inspect_err(|_| {
                qp::ibv_destroy_qp(made);
                destroy_cqs(id);
            })?;
        } else {
            // As after the transition to INIT of a QP that is created without an id.
            (*made).state = IBV_QPS_INIT;
        }
        (*id).pd = pd;
        (*id).qp = made;
        let body = qp::qp(made)?;
        found.id.set_qp(body);
    }
    Ok(())
}

/// Moves a UD QP through all states up to RTS, so that it is usable at once.
unsafe fn to_rts(made: *mut ibv_qp) -> Result<(), Errno> {
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        let mut attributes: ibv_qp_attr = zeroed();
        attributes.qp_state = state;
        let mask = ud_attributes(&mut attributes)?;
        // SAFETY: `qp::qp` finds `made`, which no other thread has yet.
        unsafe {
            let found = qp::qp(made)?;
            found.modify(&attributes, mask)?;
            (*made).state = state;
        }
    }
    Ok(())
}

/// Fills in the attributes of a UD QP for the transition to `qp_state`. Returns their mask.
fn ud_attributes(to: &mut ibv_qp_attr) -> Result<c_int, Errno> {
    to.port_num = crate::verbs::context::PORT;
    to.qkey = RDMA_UDP_QKEY;
    match to.qp_state {
        IBV_QPS_INIT => Ok(IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
        IBV_QPS_RTR => Ok(IBV_QP_STATE),
        IBV_QPS_RTS => Ok(IBV_QP_STATE | IBV_QP_SQ_PSN),
        state => Err(no_transition(state)),
    }
}

/// rdma_destroy_qp(3).
pub(crate) unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    let _guard = system::uncancelled();
    // SAFETY: `cm_id` finds `id`, and no other thread uses its QP or CQs, now or later
    // (rdma_destroy_qp(3)).
    unsafe {
        let found = match cm_id(id) {
            Ok(found) => found,
            Err(errno) => return errno.log(),
        };
        let made = std::mem::replace(&mut (*id).qp, null_mut());
        if !made.is_null() {
            qp::ibv_destroy_qp(made);
            found.id.clear_qp();
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
    let _guard = system::uncancelled();
    // SAFETY: `pd_for_srq` finds `id`, and the caller destroys neither `id` nor `pd` during the
    // call. `wanted` is null or valid (rdma_create_srq(3)).
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
    let _guard = system::uncancelled();
    // SAFETY: `wanted` is null or valid (rdma_create_srq_ex(3)). `pd_for_srq` finds `id`, and the
    // caller destroys neither `id` nor the PD during the call.
    unsafe {
        let made = argument_mut(wanted, "srq_init_attr").and_then(|w| {
            if w.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 {
                let reason = format_args!("comp_mask lacks IBV_SRQ_INIT_ATTR_TYPE");
                return Err(Errno::invalid(reason));
            }
            let named = if w.comp_mask & IBV_SRQ_INIT_ATTR_PD != 0 { w.pd } else { null_mut() };
            let pd = pd_for_srq(id, named)?;
            w.pd = pd;
            w.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
            srq::make_ex(wanted).map(|made| (pd, made))
        });
        minus_one(made.map(|made| ((*id).pd, (*id).srq) = made))
    }
}

/// Returns the body of an id that is bound to a device.
unsafe fn of_device<'a>(id: *mut rdma_cm_id) -> Result<&'a CmIdBody, Errno> {
    // SAFETY: `cm_id` finds `id`, which the caller does not destroy while the result is in use.
    unsafe {
        let found = cm_id(id)?;
        if (*id).verbs.is_null() {
            return Err(Errno::invalid(format_args!("the id is not bound to a device yet")));
        }
        Ok(found)
    }
}

/// Returns the PD for an SRQ of an id: `named`, or the id's, or the default PD of the device.
unsafe fn pd_for_srq(id: *mut rdma_cm_id, named: *mut ibv_pd) -> Result<*mut ibv_pd, Errno> {
    // SAFETY: `of_device` finds `id` and `live` finds `named` before they are followed, and the
    // caller destroys neither during the call.
    unsafe {
        let found = of_device(id)?;
        if !(*id).srq.is_null() {
            return Err(Errno::invalid(format_args!("the id already has a shared receive queue")));
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
    let _guard = system::uncancelled();
    // SAFETY: `cm_id` finds `id`, and no other thread uses its SRQ, now or later
    // (rdma_destroy_srq(3)).
    unsafe {
        if let Err(errno) = cm_id(id) {
            return errno.log();
        }
        let made = std::mem::replace(&mut (*id).srq, null_mut());
        if !made.is_null() {
            srq::ibv_destroy_srq(made);
        }
    }
}

/// rdma_get_src_port(3), in network byte order.
pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: `cm_id` finds `id`, which is not destroyed during the call (rdma_get_src_port(3)).
    unsafe { cm_id(id).map_or(0, |_| port(&(*id).route.addr.src)) }
}

/// rdma_get_dst_port(3), in network byte order.
pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: `cm_id` finds `id`, which is not destroyed during the call (rdma_get_dst_port(3)).
    unsafe { cm_id(id).map_or(0, |_| port(&(*id).route.addr.dst)) }
}

unsafe fn port(of: &rdma_sockaddr) -> u16 {
    // SAFETY: `of` is zero or an address, and the union has room for each family.
    unsafe { addresses::read(&of.addr) }.map_or(0, |address| address.port().to_be())
}

/// rdma_get_devices(3).
pub(crate) unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let _guard = system::uncancelled();
    let mut list: Contexts = [null_mut(); KINDS.len() + 1];
    let found = list_devices(&mut list);
    if !count.is_null() {
        // SAFETY: `count` is not null, so it points to an `int` (rdma_get_devices(3)).
        unsafe { *count = found.as_ref().map_or(0, |found| *found as c_int) };
    }
    pointer(found.map(|_| publish(list, ContextList).as_ptr().cast()))
}

/// Fills in the contexts of the devices that the program may see, in the order of
/// `ibv_get_device_list`. Returns their number.
fn list_devices(list: &mut Contexts) -> Result<usize, Errno> {
    let device = Device::open()?;
    let kinds = device_filter::kinds(&device);
    for (place, kind) in list.iter_mut().zip(&kinds) {
        *place = context_of(&device, *kind)?;
    }
    match kinds.len() {
        0 => {
            let reason = format_args!("no device matches RNIC_DEVICES");
            Err(Errno::new(libc::ENODEV, reason))
        }
        n => Ok(n),
    }
}

/// The list that `rdma_get_devices` returns, null-terminated.
type Contexts = [*mut ibv_context; KINDS.len() + 1];

/// Body of such a list. The head holds all the data.
struct ContextList;

impl Body for ContextList {
    type Head = Contexts;
    const KIND: Kind = Kind::ContextList;
}

/// rdma_free_devices(3).
pub(crate) unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    if !list.is_null() {
        // SAFETY: no other thread uses `list`, now or later (rdma_free_devices(3)).
        let withdrawn = unsafe { withdraw::<ContextList>(list.cast()) };
        withdrawn.map_or_else(|errno| errno.log(), drop);
    }
}

/// rdma_get_request(3).
pub(crate) unsafe extern "C-unwind" fn rdma_get_request(
    listener: *mut rdma_cm_id,
    to: *mut *mut rdma_cm_id,
) -> c_int {
    // SAFETY: `get_request` has the contract of this function, and `to` has room for a pointer
    // (rdma_get_request(3)).
    minus_one(unsafe { get_request(listener).map(|id| to.write(id)) })
}

unsafe fn get_request(listener: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: `cm_id` finds `listener`, and the caller destroys neither it nor the objects of its
    // endpoint during the call. No other thread has `event` or its new id yet.
    unsafe {
        let found = cm_id(listener)?;
        if !found.is_synchronous() {
            let reason = format_args!("rdma_get_request: the id has an event channel");
            return Err(Errno::invalid(reason));
        }
        events::acknowledge_own(listener);
        let event = events::fetch((*listener).channel)?;
        let _guard = system::uncancelled();
        if (*event).status != 0 || (*event).event != RDMA_CM_EVENT_CONNECT_REQUEST {
            let kind = (*event).event;
            let status = (*event).status;
            events::rdma_ack_cm_event(event);
            return Err(match status {
                0 => Errno::invalid(format_args!("event {kind} is not a connection request")),
                _ => events::failed_event(kind, status),
            });
        }
        let id = (*event).id;
        let endpoint = found.endpoint.lock().as_ref().map(|e| (e.pd, e.wanted));
        if let Some((pd, mut wanted)) = endpoint
            && let Err(errno) = create_qp(id, pd.0, &mut wanted)
        {
            events::rdma_ack_cm_event(event);
            crate::rdmacm::id::entry::rdma_destroy_id(id);
            return Err(errno);
        }
        (*id).event = event;
        Ok(id)
    }
}
