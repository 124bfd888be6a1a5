//! The C functions of queue pairs.

use std::ffi::{c_int, c_uint};
use std::mem::offset_of;
use std::sync::Arc;

use rnic_client::{DeviceKind, Function, QpType};

use super::chain::{Chain, post};
use super::{QpBody, QpInitAttr, extended, qp};
use crate::c::*;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Kind, live, live_or_null, publish, withdraw, zeroed};
use crate::ffi::pointers::{In, InOut, Out, Place, get, set};
use crate::verbs::context::{check_same, context};
use crate::verbs::cq::cq;
use crate::verbs::pd::PdBody;
use crate::verbs::srq::SrqBody;

/// Creates a queue pair with the attributes that both C structures have. Writes back the granted
/// capacities.
fn make(
    pd: *mut ibv_pd,
    w: Place<ibv_qp_init_attr>,
    send_ops_flags: u64,
) -> Result<*mut ibv_qp, Errno> {
    let found = live::<Arc<PdBody>>(pd)?;
    let send_cq = cq(get!(w.send_cq))?;
    let recv_cq = cq(get!(w.recv_cq))?;
    let srq = live_or_null::<Arc<SrqBody>>(get!(w.srq))?;
    let qp_type = get!(w.qp_type);
    let kind = match (found.kind(), qp_type) {
        (DeviceKind::Iwarp, IBV_QPT_RC) => QpType::Iwarp,
        (DeviceKind::Roce, IBV_QPT_RC) => QpType::Rc,
        (DeviceKind::Roce, IBV_QPT_UC) => QpType::Uc,
        (DeviceKind::Roce, IBV_QPT_UD) => QpType::Ud,
        (device, _) => {
            // As in the kernel: a type that verbs does not define is invalid, not unsupported.
            let exists = VERBS_QP_TYPES.contains(&qp_type);
            let number = if exists { libc::EOPNOTSUPP } else { libc::EINVAL };
            let types = types(device);
            return Err(errno!(number, "qp_type {qp_type}: the {device} device has {types}"));
        }
    };
    let of = get!(found.context);
    check_same(Kind::Cq, get!(send_cq.cq_base.context), of)?;
    check_same(Kind::Cq, get!(recv_cq.cq_base.context), of)?;
    if let Some(srq) = srq {
        check_same(Kind::Srq, get!(srq.context), of)?;
    }
    let context = context(of)?;
    let parts = QpInitAttr {
        send_cq: Arc::clone(&send_cq),
        recv_cq: Arc::clone(&recv_cq),
        srq: srq.as_deref().cloned(),
        cap: get!(w.cap),
        signal_all: get!(w.sq_sig_all) != 0,
        is_extended: send_ops_flags != 0,
        kind,
    };
    let qp = QpBody::create(&found, parts)?;
    let mut head: ibv_qp_ex = zeroed();
    let base = &mut head.qp_base;
    base.context = of;
    base.qp_context = get!(w.qp_context);
    base.pd = pd;
    base.srq = get!(w.srq);
    base.send_cq = get!(w.send_cq);
    base.recv_cq = get!(w.recv_cq);
    base.handle = qp.id().0;
    base.qp_num = qp.id().0;
    // The state that programs expect of a new QP. ibv_query_qp returns the device's state.
    base.state = IBV_QPS_RESET;
    base.qp_type = qp_type;
    base.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    base.cond = libc::PTHREAD_COND_INITIALIZER;
    (context.operations().qp)(&mut head, send_ops_flags);
    let at: *mut ibv_qp = publish(head, qp.clone()).as_ptr().cast();
    qp.events.set_head(at);
    set!(w.cap = qp.granted());
    Ok(at)
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

pub(crate) fn create(
    pd: *mut ibv_pd,
    wanted: InOut<ibv_qp_init_attr>,
) -> Result<*mut ibv_qp, Errno> {
    make(pd, wanted.required("qp_init_attr")?, 0)
}

/// Like [`create`], with the extended structure.
pub(crate) fn create_ex(
    of: *mut ibv_context,
    wanted: InOut<ibv_qp_init_attr_ex>,
) -> Result<*mut ibv_qp, Errno> {
    const SERVED: u32 =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let w = wanted.required("qp_init_attr_ex")?;
    let mask = get!(w.comp_mask);
    let unknown = mask & !SERVED;
    if unknown != 0 {
        return Err(unsupported!("QP comp_mask {unknown:#x} is not supported"));
    }
    if mask & IBV_QP_INIT_ATTR_PD == 0 {
        return Err(invalid!("comp_mask lacks IBV_QP_INIT_ATTR_PD"));
    }
    // The device supports none of the flags.
    let has_flags = mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0;
    let create_flags = if has_flags { get!(w.create_flags) } else { 0 };
    if create_flags != 0 {
        return Err(unsupported!("QP create_flags {create_flags:#x} are not supported"));
    }
    let has_flags = mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0;
    let send_ops_flags = if has_flags { get!(w.send_ops_flags) } else { 0 };
    let unknown = send_ops_flags & !extended::served(get!(w.qp_type));
    if unknown != 0 {
        return Err(unsupported!("send_ops_flags {unknown:#x}: not supported by the QP type"));
    }
    let pd = get!(w.pd);
    let found = live::<Arc<PdBody>>(pd)?;
    check_same(Kind::Pd, get!(found.context), of)?;
    // SAFETY: the extended structure begins with the fields of the basic one.
    make(pd, unsafe { w.prefix() }, send_ops_flags)
}

pub(crate) fn destroy(of: *mut ibv_qp) -> Result<(), Errno> {
    qp(of)?.destroy();
    // SAFETY: no thread uses `of`, now or later (ibv_destroy_qp(3)).
    unsafe { withdraw::<Arc<QpBody>>(of.cast()) }.map(drop)
}

fn destroy_by_program(of: *mut ibv_qp) -> Result<(), Errno> {
    qp(of)?.admit(Function::DestroyQp)?;
    destroy(of)
}

fn modify(of: *mut ibv_qp, attr: In<ibv_qp_attr>, mask: c_int) -> Result<(), Errno> {
    let qp = qp(of)?;
    // SAFETY: every program's structure has the fields before `rate_limit`, and they are numbers.
    let attr = unsafe { attr.read_prefix("qp_attr", zeroed(), OLDEST_QP_ATTR) }?;
    qp.modify(&attr, mask)?;
    if mask & IBV_QP_STATE != 0 {
        set!(qp.qp_base.state = attr.qp_state);
    }
    Ok(())
}

fn query(
    of: *mut ibv_qp,
    attr: Out<ibv_qp_attr>,
    mask: c_int,
    init: Out<ibv_qp_init_attr>,
) -> Result<(), Errno> {
    let qp = qp(of)?;
    let queried = qp.query()?;
    // Programs compare this field with the state that they have set themselves.
    if mask & IBV_QP_STATE != 0 {
        set!(qp.qp_base.state = queried.qp_state);
    }
    init.write(ibv_qp_init_attr {
        qp_context: get!(qp.qp_base.qp_context),
        send_cq: get!(qp.qp_base.send_cq),
        recv_cq: get!(qp.qp_base.recv_cq),
        srq: get!(qp.qp_base.srq),
        cap: qp.granted(),
        qp_type: get!(qp.qp_base.qp_type),
        sq_sig_all: qp.signals_all().into(),
    });
    if let Ok(attr) = attr.required("attr") {
        // SAFETY: every program's structure has the fields before `rate_limit`.
        unsafe { attr.write_prefix(&queried, 0, OLDEST_QP_ATTR) };
    }
    Ok(())
}

/// Size of `ibv_qp_attr` in programs that were built before it got `rate_limit`, which the device
/// does not use.
pub(crate) const OLDEST_QP_ATTR: usize = offset_of!(ibv_qp_attr, rate_limit);

fn send(of: *mut ibv_qp, wr: Chain<ibv_send_wr>, bad: Out<*mut ibv_send_wr>) -> Result<(), Errno> {
    post(wr, bad, |wr| match qp(of) {
        Ok(qp) => qp.post_send(wr.with_ud_pd(qp.ud_pd())),
        Err(errno) => (0, Err(errno)),
    })
}

fn receive(
    of: *mut ibv_qp,
    wr: Chain<ibv_recv_wr>,
    bad: Out<*mut ibv_recv_wr>,
) -> Result<(), Errno> {
    post(wr, bad, |wr| match qp(of) {
        Ok(qp) => qp.post_receive(wr),
        Err(errno) => (0, Err(errno)),
    })
}

entry! {
    uncancelled ibv_create_qp(
        pd: *mut ibv_pd, wanted: InOut<ibv_qp_init_attr>,
    ) -> pointer<ibv_qp> = create;
    uncancelled create_qp_ex(
        of: *mut ibv_context, wanted: InOut<ibv_qp_init_attr_ex>,
    ) -> pointer<ibv_qp> = create_ex;
    uncancelled ibv_destroy_qp(of: *mut ibv_qp) -> status = destroy_by_program;
    plain ibv_modify_qp(of: *mut ibv_qp, attr: In<ibv_qp_attr>, mask: c_int) -> status = modify;
    plain ibv_query_qp(
        of: *mut ibv_qp, attr: Out<ibv_qp_attr>, mask: c_int, init: Out<ibv_qp_init_attr>,
    ) -> status = query;
    /// ibv_query_qp_data_in_order(3). Returns 0: the bytes of a message may be placed in any order,
    /// except for the last few.
    plain ibv_query_qp_data_in_order(
        of: *mut ibv_qp, opcode: c_uint, flags: u32,
    ) -> value<c_int> = |_, _, _| 0;
    plain post_send(
        of: *mut ibv_qp, wr: Chain<ibv_send_wr>, bad: Out<*mut ibv_send_wr>,
    ) -> status = send;
    plain post_recv(
        of: *mut ibv_qp, wr: Chain<ibv_recv_wr>, bad: Out<*mut ibv_recv_wr>,
    ) -> status = receive;
}
