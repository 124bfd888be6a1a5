//! Queue pairs.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use rnic_client::QpType;

use crate::c::*;
use crate::device::DeviceKind;
use crate::errno::{Errno, pointer, status};
use crate::object::{Foreign, Kind, live, live_or_null, publish, withdraw, zeroed};
use crate::pd::PdBody;
use crate::qp::{QpBody, QpWanted};
use crate::srq::SrqBody;
use crate::system;

use super::context::check_same;
use super::cq::cq;
use super::qp_ex;
use super::work::{Chain, nth_receive, nth_send};
use super::{argument, argument_mut};

/// What a queue pair is to be, in either form that C has for it.
pub(super) struct Attributes {
    pub(super) program: *mut c_void,
    pub(super) pd: *mut ibv_pd,
    pub(super) send_cq: *mut ibv_cq,
    pub(super) recv_cq: *mut ibv_cq,
    pub(super) srq: *mut ibv_srq,
    pub(super) cap: ibv_qp_cap,
    pub(super) kind: ibv_qp_type,
    pub(super) signal_all: bool,
    pub(super) send_ops_flags: u64,
}

/// Makes a queue pair; returns what it can hold as well.
pub(super) unsafe fn make(wanted: &Attributes) -> Result<(*mut ibv_qp, ibv_qp_cap), Errno> {
    // SAFETY: as the module says.
    let pd = unsafe { live::<Arc<PdBody>>(wanted.pd)? };
    // SAFETY: as the module says.
    let send_cq = unsafe { cq(wanted.send_cq)? };
    // SAFETY: as the module says.
    let recv_cq = unsafe { cq(wanted.recv_cq)? };
    // SAFETY: as the module says.
    let srq = unsafe { live_or_null::<Arc<SrqBody>>(wanted.srq)? };
    let kind = match (pd.kind(), wanted.kind) {
        (DeviceKind::Iwarp, IBV_QPT_RC) => QpType::Connected,
        (DeviceKind::Roce, IBV_QPT_RC) => QpType::Wired,
        (DeviceKind::Roce, IBV_QPT_UC) => QpType::WiredUnreliable,
        (DeviceKind::Roce, IBV_QPT_UD) => QpType::Datagrams,
        (device, kind) => {
            let reason = format_args!("qp_type {kind}: the {device} device has {}", types(device));
            // As the kernel: a type that no device has is invalid.
            return Err(match OTHER_TYPES.contains(&kind) {
                true => Errno::unsupported(reason),
                false => Errno::invalid(reason),
            });
        }
    };
    // SAFETY: as the module says.
    unsafe {
        let of = (*wanted.pd).context;
        check_same(Kind::Cq, (*wanted.send_cq).context, of)?;
        check_same(Kind::Cq, (*wanted.recv_cq).context, of)?;
        if srq.is_some() {
            check_same(Kind::Srq, (*wanted.srq).context, of)?;
        }
    }
    let parts = QpWanted {
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
    // SAFETY: as the module says.
    base.context = unsafe { (*wanted.pd).context };
    (base.qp_context, base.pd, base.srq) = (wanted.program, wanted.pd, wanted.srq);
    (base.send_cq, base.recv_cq) = (wanted.send_cq, wanted.recv_cq);
    (base.handle, base.qp_num) = (qp.id().0, qp.id().0);
    // What it has just been made with: where an RNIC begins, it says when it is asked.
    (base.state, base.qp_type) = (IBV_QPS_RESET, wanted.kind);
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    qp_ex::operations(&mut head, wanted.send_ops_flags);
    let at: *mut ibv_qp = publish(head, qp.clone()).as_ptr().cast();
    qp.published(Foreign(at));
    Ok((at, qp.granted()))
}

/// The types of queue pairs that other devices have as well.
const OTHER_TYPES: [ibv_qp_type; 7] = [
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

/// The queue pair that C names.
pub(super) unsafe fn qp<'a>(qp: *mut ibv_qp) -> Result<&'a Arc<QpBody>, Errno> {
    // SAFETY: as the module says; every queue pair is the head of an extended one.
    unsafe { live::<Arc<QpBody>>(qp.cast()) }
}

/// ibv_create_qp(3).
pub(crate) unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { create(pd, wanted) })
}

/// As [`ibv_create_qp`], and writes back what was granted.
pub(super) unsafe fn create(
    pd: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: as the module says.
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
pub(super) unsafe extern "C" fn create_qp_ex(
    of: *mut ibv_context,
    wanted: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
    pointer(unsafe { create_ex(of, wanted) })
}

/// As [`create_qp_ex`].
pub(super) unsafe fn create_ex(
    of: *mut ibv_context,
    wanted: *mut ibv_qp_init_attr_ex,
) -> Result<*mut ibv_qp, Errno> {
    const SERVED: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    // SAFETY: as the module says.
    unsafe {
        let wanted = argument_mut(wanted, "qp_init_attr_ex")?;
        let unknown = wanted.comp_mask & !SERVED;
        if unknown != 0 {
            let reason = format_args!("comp_mask {unknown:#x} of a queue pair");
            return Err(Errno::unsupported(reason));
        }
        if wanted.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
            return Err(Errno::invalid(format_args!("comp_mask lacks IBV_QP_INIT_ATTR_PD")));
        }
        // There are flags for what other kinds of queue pairs can do; none is ours.
        if wanted.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && wanted.create_flags != 0 {
            let reason = format_args!("create_flags {:#x} of a queue pair", wanted.create_flags);
            return Err(Errno::unsupported(reason));
        }
        let has_flags = wanted.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
        let send_ops_flags = if has_flags { wanted.send_ops_flags } else { 0 };
        let unknown = send_ops_flags & !qp_ex::served(wanted.qp_type);
        if unknown != 0 {
            let reason = format_args!("send_ops_flags {unknown:#x}: not of this type of QP");
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
    let _whole = system::uncancelled();
    // SAFETY: as the module says.
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
    // SAFETY: as the module says.
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
    // SAFETY: as the module says.
    unsafe {
        let queried = qp(of).and_then(|found| Ok((found, found.query()?)));
        let (found, says) = match queried {
            Ok(queried) => queried,
            Err(errno) => return errno.report(),
        };
        // Programs compare the field with the state that they have set themselves.
        if mask & IBV_QP_STATE != 0 {
            (*of).state = says.qp_state;
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
            attributes.write(says);
        }
    }
    0
}

/// ibv_query_qp_data_in_order(3): the bytes of a message may be placed in any order but for the
/// last few.
pub(crate) unsafe extern "C" fn ibv_query_qp_data_in_order(
    _of: *mut ibv_qp,
    _opcode: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// ibv_post_send(3).
pub(super) unsafe extern "C" fn post_send(
    of: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let (posted, result) = match qp(of) {
            Ok(qp) => {
                let chain = Chain::<ibv_send_wr>::new(wr).with_datagrams(qp.sends_datagrams());
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
pub(super) unsafe extern "C" fn post_recv(
    of: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the module says.
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
