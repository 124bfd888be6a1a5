//! Queue pairs.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use rnic_client::QpType;

use crate::c::*;
use crate::errno::{Errno, pointer, status};
use crate::ffi::handles::{Foreign, Kind, live, live_or_null, publish, withdraw, zeroed};
use crate::system;
use crate::verbs::device::DeviceKind;
use crate::verbs::pd::PdBody;
use crate::verbs::qp::{QpBody, QpInitAttr};
use crate::verbs::srq::SrqBody;

use crate::ffi::pointers::{argument, argument_mut};
use crate::verbs::context::entry::check_same;
use crate::verbs::cq::entry::cq;
use crate::verbs::qp::chain::{Chain, nth_receive, nth_send};
use crate::verbs::qp::extended as qp_ex;

/// Attributes of a new queue pair, from either of the two C structures.
pub(crate) struct Attributes {
    pub(crate) program: *mut c_void,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) kind: ibv_qp_type,
    pub(crate) signal_all: bool,
    pub(crate) send_ops_flags: u64,
}

/// Creates a queue pair. Returns it and its capacities.
pub(crate) unsafe fn make(wanted: &Attributes) -> Result<(*mut ibv_qp, ibv_qp_cap), Errno> {
    // SAFETY: the caller does not destroy the PD during the call.
    let pd = unsafe { live::<Arc<PdBody>>(wanted.pd)? };
    // SAFETY: the caller does not destroy the send CQ during the call.
    let send_cq = unsafe { cq(wanted.send_cq)? };
    // SAFETY: the caller does not destroy the receive CQ during the call.
    let recv_cq = unsafe { cq(wanted.recv_cq)? };
    // SAFETY: the SRQ is null, or the caller does not destroy it during the call.
    let srq = unsafe { live_or_null::<Arc<SrqBody>>(wanted.srq)? };
    let kind = match (pd.kind(), wanted.kind) {
        (DeviceKind::Iwarp, IBV_QPT_RC) => QpType::Iwarp,
        (DeviceKind::Roce, IBV_QPT_RC) => QpType::Rc,
        (DeviceKind::Roce, IBV_QPT_UC) => QpType::Uc,
        (DeviceKind::Roce, IBV_QPT_UD) => QpType::Ud,
        (device, kind) => {
            let reason = format_args!("qp_type {kind}: the {device} device has {}", types(device));
            // As in the kernel: a type that verbs does not define is invalid, not unsupported.
            return Err(if VERBS_QP_TYPES.contains(&kind) {
                Errno::unsupported(reason)
            } else {
                Errno::invalid(reason)
            });
        }
    };
    // SAFETY: `live` has found the PD, `cq` both CQs, and `live_or_null` the SRQ if there is one.
    unsafe {
        let of = (*wanted.pd).context;
        check_same(Kind::Cq, (*wanted.send_cq).context, of)?;
        check_same(Kind::Cq, (*wanted.recv_cq).context, of)?;
        if srq.is_some() {
            check_same(Kind::Srq, (*wanted.srq).context, of)?;
        }
    }
    let parts = QpInitAttr {
        send_cq: send_cq.clone(),
        recv_cq: recv_cq.clone(),
        srq: srq.cloned(),
        cap: wanted.cap,
        signal_all: wanted.signal_all,
        is_extended: wanted.send_ops_flags != 0,
        kind,
    };
    let qp = QpBody::create(pd, parts)?;
    let mut head: ibv_qp_ex = zeroed();
    let base = &mut head.qp_base;
    // SAFETY: `live` has found the PD.
    base.context = unsafe { (*wanted.pd).context };
    base.qp_context = wanted.program;
    base.pd = wanted.pd;
    base.srq = wanted.srq;
    base.send_cq = wanted.send_cq;
    base.recv_cq = wanted.recv_cq;
    base.handle = qp.id().0;
    base.qp_num = qp.id().0;
    // The state that programs expect of a new QP. ibv_query_qp returns the device's state.
    base.state = IBV_QPS_RESET;
    base.qp_type = wanted.kind;
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    qp_ex::operations(&mut head, wanted.send_ops_flags);
    let at: *mut ibv_qp = publish(head, qp.clone()).as_ptr().cast();
    qp.set_head(Foreign(at));
    Ok((at, qp.granted()))
}

/// QP types that exist in verbs.
const VERBS_QP_TYPES: [ibv_qp_type; 7] = [
    IBV_QPT_RC,
    IBV_QPT_UC,
    IBV_QPT_UD,
    IBV_QPT_RAW_PACKET,
    IBV_QPT_XRC_SEND,
    IBV_QPT_XRC_RECV,
    IBV_QPT_DRIVER,
];

fn types(device: DeviceKind) -> &'static str {
    match device {
        DeviceKind::Iwarp => "RC only",
        DeviceKind::Roce => "RC, UC and UD",
    }
}

/// Returns the queue pair of a C pointer.
pub(crate) unsafe fn qp<'a>(qp: *mut ibv_qp) -> Result<&'a Arc<QpBody>, Errno> {
    // SAFETY: each QP is an `ibv_qp_ex`, and it is not destroyed while the result is in use.
    unsafe { live::<Arc<QpBody>>(qp.cast()) }
}

/// ibv_create_qp(3).
pub(crate) unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    let _guard = system::uncancelled();
    // SAFETY: `create` has the contract of this function.
    pointer(unsafe { create(pd, wanted) })
}

/// Like [`ibv_create_qp`]. Writes back the granted capacities.
pub(crate) unsafe fn create(
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: `wanted` is null or valid, and the caller destroys neither `pd` nor the queues in
    // `wanted` during the call (ibv_create_qp(3)).
    unsafe {
        let wanted = argument_mut(wanted, "qp_init_attr")?;
        let (made, granted) = make(&Attributes {
            program: wanted.qp_context,
            send_ops_flags: 0,
            pd,
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            srq: wanted.srq,
            cap: wanted.cap,
            kind: wanted.qp_type,
            signal_all: wanted.sq_sig_all != 0,
        })?;
        wanted.cap = granted;
        Ok(made)
    }
}

/// ibv_create_qp_ex(3).
pub(crate) unsafe extern "C" fn create_qp_ex(
    of: *mut ibv_context,
    wanted: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    let _guard = system::uncancelled();
    // SAFETY: `create_ex` has the contract of this function.
    pointer(unsafe { create_ex(of, wanted) })
}

/// Like [`create_qp_ex`].
pub(crate) unsafe fn create_ex(
    of: *mut ibv_context,
    wanted: *mut ibv_qp_init_attr_ex,
) -> Result<*mut ibv_qp, Errno> {
    const SERVED: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    // SAFETY: `wanted` is null or valid, and `live` finds its PD before it is followed. The caller
    // destroys no object in `wanted` during the call (ibv_create_qp_ex(3)).
    unsafe {
        let wanted = argument_mut(wanted, "qp_init_attr_ex")?;
        let unknown = wanted.comp_mask & !SERVED;
        if unknown != 0 {
            let reason = format_args!("QP comp_mask {unknown:#x} is not supported");
            return Err(Errno::unsupported(reason));
        }
        if wanted.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
            return Err(Errno::invalid(format_args!("comp_mask lacks IBV_QP_INIT_ATTR_PD")));
        }
        // The device supports none of the flags.
        if wanted.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && wanted.create_flags != 0 {
            let reason =
                format_args!("QP create_flags {:#x} are not supported", wanted.create_flags);
            return Err(Errno::unsupported(reason));
        }
        let has_flags = wanted.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
        let send_ops_flags = if has_flags { wanted.send_ops_flags } else { 0 };
        let unknown = send_ops_flags & !qp_ex::served(wanted.qp_type);
        if unknown != 0 {
            let reason = format_args!("send_ops_flags {unknown:#x}: not supported by the QP type");
            return Err(Errno::unsupported(reason));
        }
        live::<Arc<PdBody>>(wanted.pd)?;
        check_same(Kind::Pd, (*wanted.pd).context, of)?;
        let (made, granted) = make(&Attributes {
            program: wanted.qp_context,
            send_ops_flags,
            pd: wanted.pd,
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            srq: wanted.srq,
            cap: wanted.cap,
            kind: wanted.qp_type,
            signal_all: wanted.sq_sig_all != 0,
        })?;
        wanted.cap = granted;
        Ok(made)
    }
}

/// ibv_destroy_qp(3).
pub(crate) unsafe extern "C" fn ibv_destroy_qp(of: *mut ibv_qp) -> c_int {
    let _guard = system::uncancelled();
    // SAFETY: no other thread uses `of`, now or later (ibv_destroy_qp(3)).
    status(unsafe {
        qp(of)
            .map(|found| found.destroy())
            .and_then(|()| withdraw::<Arc<QpBody>>(of.cast()))
            .map(drop)
    })
}

/// ibv_modify_qp(3).
pub(crate) unsafe extern "C" fn ibv_modify_qp(
    of: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: `qp` finds `of`, which the caller does not destroy during the call. `attributes` is
    // null or valid (ibv_modify_qp(3)).
    unsafe {
        status(qp(of).and_then(|found| {
            let attributes = argument(attributes, "qp_attr")?;
            found.modify(attributes, mask)?;
            if mask & IBV_QP_STATE != 0 {
                (*of).state = attributes.qp_state;
            }
            Ok(())
        }))
    }
}

/// ibv_query_qp(3).
pub(crate) unsafe extern "C" fn ibv_query_qp(
    of: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: `qp` finds `of`, which the caller does not destroy during the call. `attributes` and
    // `init` are null or have room for their structures (ibv_query_qp(3)).
    unsafe {
        let queried = qp(of).and_then(|found| Ok((found, found.query()?)));
        let (found, attr) = match queried {
            Ok(queried) => queried,
            Err(errno) => return errno.report(),
        };
        // Programs compare this field with the state that they have set themselves.
        if mask & IBV_QP_STATE != 0 {
            (*of).state = attr.qp_state;
        }
        if !init.is_null() {
            init.write(ibv_qp_init_attr {
                qp_context: (*of).qp_context,
                send_cq: (*of).send_cq,
                recv_cq: (*of).recv_cq,
                srq: (*of).srq,
                cap: found.granted(),
                qp_type: (*of).qp_type,
                sq_sig_all: found.signals_all().into(),
            });
        }
        if !attributes.is_null() {
            attributes.write(attr);
        }
    }
    0
}

/// ibv_query_qp_data_in_order(3). Returns 0: the bytes of a message may be placed in any order, but
/// the last few of them last.
pub(crate) unsafe extern "C" fn ibv_query_qp_data_in_order(
    _of: *mut ibv_qp,
    _opcode: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// ibv_post_send(3).
pub(crate) unsafe extern "C" fn post_send(
    of: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller does not destroy `of` during the call, `wr` is a chain that `Chain::new`
    // accepts, and `bad` is null or has room for a pointer (ibv_post_send(3)).
    unsafe {
        let (posted, result) = match qp(of) {
            Ok(qp) => {
                let chain = Chain::<ibv_send_wr>::new(wr).with_ud_pd(qp.ud_pd());
                qp.post_send(chain)
            }
            Err(errno) => (0, Err(errno)),
        };
        if result.is_err() && !bad.is_null() {
            *bad = nth_send(wr, posted);
        }
        status(result)
    }
}

/// ibv_post_recv(3).
pub(crate) unsafe extern "C" fn post_recv(
    of: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller does not destroy `of` during the call, `wr` is a chain that `Chain::new`
    // accepts, and `bad` is null or has room for a pointer (ibv_post_recv(3)).
    unsafe {
        let (posted, result) = match qp(of) {
            Ok(qp) => qp.post_receive(Chain::<ibv_recv_wr>::new(wr)),
            Err(errno) => (0, Err(errno)),
        };
        if result.is_err() && !bad.is_null() {
            *bad = nth_receive(wr, posted);
        }
        status(result)
    }
}
