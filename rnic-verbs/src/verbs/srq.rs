//! Shared receive queues (`ibv_create_srq(3)`).

use std::ffi::c_int;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_client::{Completion, Function, RecvRequest, Srq, SrqId, SrqOptions};
use slab::Slab;

use crate::c::{self, *};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, OfContext, live, publish, withdraw};
use crate::ffi::pointers::{Argument as _, In, InOut, Out, get, set};
use crate::verbs::async_events::ObjectEvents;
use crate::verbs::context::{ContextBody, context};
use crate::verbs::device::Device;
use crate::verbs::pd::{PdBody, PdUser};
use crate::verbs::qp::chain::{Chain, post};
use crate::verbs::qp::work::{ReceiveWork, elements};
use crate::verbs::registry::{AnyQp, AnySrq};

/// A shared receive queue.
pub(crate) struct SrqBody {
    device: Arc<Device>,
    srq: Srq,
    pd: PdUser,
    max_sge: u8,
    pub(crate) events: ObjectEvents<ibv_srq>,
    /// `wr_id`s of outstanding receives. They may complete in any order.
    wr_ids: Mutex<Slab<u64>>,
}

impl Body for Arc<SrqBody> {
    type Head = ibv_srq;
    const KIND: Kind = Kind::Srq;
}

// SAFETY: the head begins with its context.
unsafe impl OfContext for Arc<SrqBody> {}

impl SrqBody {
    pub(crate) fn create(
        pd: &Arc<PdBody>,
        context: &ContextBody,
        asked: &ibv_srq_attr,
    ) -> Result<Arc<SrqBody>, Errno> {
        let device = pd.device();
        // The daemon checks the maxima.
        let max_sge = elements(asked.max_sge);
        let options = SrqOptions { depth: asked.max_wr, max_sge, ..SrqOptions::default() };
        let srq = pd.client().create_srq(&options)?;
        let body = Arc::new(SrqBody {
            device: device.clone(),
            srq,
            pd: pd.user(),
            max_sge,
            events: ObjectEvents::new(context.async_events().clone()),
            wr_ids: Mutex::default(),
        });
        device.srqs.write().insert(body.id(), body.clone());
        Ok(body)
    }

    pub(crate) fn id(&self) -> SrqId {
        self.srq.id()
    }

    pub(crate) fn client(&self) -> &Srq {
        &self.srq
    }

    /// Returns the size and the armed limit (`ibv_query_srq(3)`).
    pub(crate) fn attributes(&self) -> Result<ibv_srq_attr, Errno> {
        self.pd.adapter().check()?;
        let row = self.srq.query()?;
        Ok(self.attr(row.limit))
    }

    /// Returns the attributes with this limit.
    pub(crate) fn attr(&self, limit: u32) -> ibv_srq_attr {
        ibv_srq_attr { max_wr: self.srq.capacity(), max_sge: self.max_sge.into(), srq_limit: limit }
    }

    /// Arms the limit (`ibv_modify_srq(3)`). The size is fixed.
    pub(crate) fn arm_limit(&self, limit: u32) -> Result<(), Errno> {
        self.pd.adapter().check()?;
        if limit > self.srq.capacity() {
            let capacity = self.srq.capacity();
            return Err(invalid!("srq_limit {limit} is above max_wr {capacity}"));
        }
        Ok(self.srq.arm_limit(limit)?)
    }

    /// Posts receives until one fails (`ibv_post_srq_recv(3)`).
    pub(crate) fn post_receive(
        &self,
        work: impl Iterator<Item = Result<ReceiveWork, Errno>>,
    ) -> (usize, Result<(), Errno>) {
        if let Err(errno) = self.pd.adapter().check() {
            return (0, Err(errno));
        }
        let mut wr_ids = self.wr_ids.lock();
        let mut posted = 0;
        for request in work {
            let done = request.and_then(|work| {
                let slot = wr_ids.vacant_entry();
                let request = RecvRequest::new(slot.key() as u64, work.elements.list());
                self.srq.post_recv(&[request]).map_err(|error| Errno::from(error.source))?;
                slot.insert(work.wr_id);
                Ok(())
            });
            if done.is_err() {
                return (posted, done);
            }
            posted += 1;
        }
        (posted, Ok(()))
    }

    /// Destroys the SRQ (`ibv_destroy_srq(3)`). Fails with `EBUSY` if a QP uses it.
    pub(crate) fn destroy(&self) -> Result<(), Errno> {
        let uses = |qp: &Arc<dyn AnyQp>| qp.uses_srq(self.id());
        if self.device.qps.read().values().any(uses) {
            return Err(busy!("a queue pair uses the shared receive queue"));
        }
        self.detach();
        self.events.unacknowledged.wait();
        Ok(())
    }

    /// Removes the SRQ from the device. The last thread that holds a reference frees it.
    pub(crate) fn detach(&self) {
        self.device.srqs.write().remove(&self.id());
        self.events.take_back();
    }
}

impl AnySrq for SrqBody {
    fn push_event(&self, kind: c::ibv_event_type) {
        self.events.push(kind);
    }

    fn receive_done(&self, completion: &Completion) -> u64 {
        self.wr_ids.lock().try_remove(completion.wr_id as usize).unwrap_or(0)
    }
}

/// Creates a shared receive queue. Writes back the granted attributes.
pub(crate) fn create(
    pd: *mut ibv_pd,
    wanted: InOut<ibv_srq_init_attr>,
) -> Result<*mut ibv_srq, Errno> {
    let w = wanted.required("srq_init_attr")?;
    let found = live::<Arc<PdBody>>(pd)?;
    let of = get!(found.context);
    let srq = SrqBody::create(&found, &*context(of)?, &get!(w.attr))?;
    set!(w.attr = srq.attr(0));
    let head = ibv_srq {
        context: of,
        srq_context: get!(w.srq_context),
        pd,
        handle: srq.id().0,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    let at = publish(head, srq.clone()).as_ptr();
    srq.events.set_head(at);
    Ok(at)
}

/// Like [`create`]. Only basic SRQs with a PD are supported.
pub(crate) fn create_ex(wanted: InOut<ibv_srq_init_attr_ex>) -> Result<*mut ibv_srq, Errno> {
    let w = wanted.required("srq_init_attr_ex")?;
    let mask = get!(w.comp_mask);
    if mask & IBV_SRQ_INIT_ATTR_TYPE != 0 && get!(w.srq_type) != IBV_SRQT_BASIC {
        let kind = get!(w.srq_type);
        return Err(unsupported!("srq_type {kind}: only IBV_SRQT_BASIC is supported"));
    }
    let unknown = mask & !(IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD);
    if unknown != 0 {
        return Err(unsupported!("SRQ comp_mask {unknown:#x} is not supported"));
    }
    if mask & IBV_SRQ_INIT_ATTR_PD == 0 {
        return Err(invalid!("comp_mask lacks IBV_SRQ_INIT_ATTR_PD"));
    }
    let mut basic = ibv_srq_init_attr { srq_context: get!(w.srq_context), attr: get!(w.attr) };
    // SAFETY: the local structure outlives the call.
    let made = create(get!(w.pd), unsafe { InOut::from_c(&raw mut basic) })?;
    set!(w.attr = basic.attr);
    Ok(made)
}

/// Sets the limit. The size of an SRQ is fixed.
fn modify(of: *mut ibv_srq, attr: In<ibv_srq_attr>, mask: c_int) -> Result<(), Errno> {
    let srq = live::<Arc<SrqBody>>(of)?;
    let attr = attr.read("srq_attr")?;
    match mask.cast_unsigned() {
        0 => srq.device.admit(Function::ModifySrq.call()),
        IBV_SRQ_LIMIT => srq.arm_limit(attr.srq_limit),
        mask => Err(unsupported!("srq_attr_mask {mask:#x}: only IBV_SRQ_LIMIT is supported")),
    }
}

fn query(of: *mut ibv_srq, attr: Out<ibv_srq_attr>) -> Result<(), Errno> {
    let srq = live::<Arc<SrqBody>>(of)?;
    attr.required("srq_attr")?.write(srq.attributes()?);
    Ok(())
}

pub(crate) fn destroy(of: *mut ibv_srq) -> Result<(), Errno> {
    live::<Arc<SrqBody>>(of)?.destroy()?;
    // SAFETY: no thread uses `of`, now or later (ibv_destroy_srq(3)).
    unsafe { withdraw::<Arc<SrqBody>>(of) }.map(drop)
}

fn destroy_by_program(of: *mut ibv_srq) -> Result<(), Errno> {
    live::<Arc<SrqBody>>(of)?.pd.admit(Function::DestroySrq)?;
    destroy(of)
}

/// Returns the number of the SRQ. Unlike with XRC, completions do not contain it.
fn number(of: *mut ibv_srq, number: Out<u32>) -> Result<(), Errno> {
    let number = number.required("srq_num")?;
    let srq = live::<Arc<SrqBody>>(of)?;
    srq.pd.admit(Function::GetSrqNum)?;
    number.write(srq.id().0);
    Ok(())
}

fn post_recv(
    of: *mut ibv_srq,
    wr: Chain<ibv_recv_wr>,
    bad: Out<*mut ibv_recv_wr>,
) -> Result<(), Errno> {
    post(wr, bad, |wr| match live::<Arc<SrqBody>>(of) {
        Ok(srq) => srq.post_receive(wr),
        Err(errno) => (0, Err(errno)),
    })
}

entry! {
    uncancelled ibv_create_srq(
        pd: *mut ibv_pd, wanted: InOut<ibv_srq_init_attr>,
    ) -> pointer<ibv_srq> = create;
    uncancelled create_srq_ex(
        of: *mut ibv_context, wanted: InOut<ibv_srq_init_attr_ex>,
    ) -> pointer<ibv_srq> = |_of, wanted| create_ex(wanted);
    plain ibv_modify_srq(of: *mut ibv_srq, attr: In<ibv_srq_attr>, mask: c_int) -> status = modify;
    plain ibv_query_srq(of: *mut ibv_srq, attr: Out<ibv_srq_attr>) -> status = query;
    uncancelled ibv_destroy_srq(of: *mut ibv_srq) -> status = destroy_by_program;
    plain get_srq_num(of: *mut ibv_srq, to: Out<u32>) -> status = number;
    plain post_srq_recv(
        of: *mut ibv_srq, wr: Chain<ibv_recv_wr>, bad: Out<*mut ibv_recv_wr>,
    ) -> status = post_recv;
}
