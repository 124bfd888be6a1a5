//! Shared receive queues (`ibv_create_srq(3)`).

pub(crate) mod entry;

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rnic_client::{Completion, RecvRequest, Srq, SrqId, SrqOptions};
use slab::Slab;

use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::{Body, Foreign, Kind};
use crate::verbs::async_events::{AsyncEvent, AsyncEvents, Unacknowledged};
use crate::verbs::context::ContextBody;
use crate::verbs::device::Device;
use crate::verbs::pd::{PdBody, PdUser};
use crate::verbs::qp::QpBody;
use crate::verbs::qp::work::{ReceiveWork, elements};

/// A shared receive queue.
pub(crate) struct SrqBody {
    device: Arc<Device>,
    srq: Srq,
    head: OnceLock<Foreign<c::ibv_srq>>,
    _pd: PdUser,
    max_sge: u8,
    context_events: Arc<AsyncEvents>,
    pub(crate) async_events: Unacknowledged,
    /// `wr_id`s of outstanding receives. They may complete in any order.
    wr_ids: Mutex<Slab<u64>>,
}

impl Body for Arc<SrqBody> {
    type Head = c::ibv_srq;
    const KIND: Kind = Kind::Srq;
}

impl SrqBody {
    pub(crate) fn create(
        pd: &Arc<PdBody>,
        context: &ContextBody,
        asked: &c::ibv_srq_attr,
    ) -> Result<Arc<SrqBody>, Errno> {
        let device = pd.device();
        let most = &device.attributes;
        let max_sge = elements("max_sge", asked.max_sge, most.max_sge)?;
        if !(1..=most.max_srq_wr).contains(&asked.max_wr) {
            let wr = asked.max_wr;
            let most = most.max_srq_wr;
            let reason = format_args!("max_wr {wr} is not in 1 to {most} (max_srq_wr)");
            return Err(Errno::invalid(reason));
        }
        let options = SrqOptions { depth: asked.max_wr, max_sge, ..SrqOptions::default() };
        let srq = pd.client().create_srq(&options)?;
        let body = Arc::new(SrqBody {
            device: device.clone(),
            srq,
            head: OnceLock::new(),
            _pd: pd.user(),
            max_sge,
            context_events: context.async_events().clone(),
            async_events: Unacknowledged::default(),
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

    pub(crate) fn set_head(&self, head: Foreign<c::ibv_srq>) {
        let _ = self.head.set(head);
    }

    /// Returns the program's pointer to the SRQ.
    pub(crate) fn head(&self) -> Foreign<c::ibv_srq> {
        self.head.get().copied().unwrap_or(Foreign::NULL)
    }

    /// Queues an asynchronous event of this SRQ.
    pub(crate) fn push_event(&self, kind: c::ibv_event_type) {
        self.context_events.push(AsyncEvent::of(self.head(), kind));
    }

    /// Returns the size and the armed limit (`ibv_query_srq(3)`).
    pub(crate) fn attributes(&self) -> Result<c::ibv_srq_attr, Errno> {
        let row = self.srq.query()?;
        Ok(self.attr(row.limit))
    }

    /// Returns the attributes with this limit.
    pub(crate) fn attr(&self, limit: u32) -> c::ibv_srq_attr {
        c::ibv_srq_attr {
            max_wr: self.srq.capacity(),
            max_sge: self.max_sge.into(),
            srq_limit: limit,
        }
    }

    /// Arms the limit (`ibv_modify_srq(3)`). The size is fixed.
    pub(crate) fn arm_limit(&self, limit: u32) -> Result<(), Errno> {
        if limit > self.srq.capacity() {
            let capacity = self.srq.capacity();
            let reason = format_args!("srq_limit {limit} is above max_wr {capacity}");
            return Err(Errno::invalid(reason));
        }
        Ok(self.srq.arm_limit(limit)?)
    }

    /// Posts receives until one fails (`ibv_post_srq_recv(3)`).
    pub(crate) fn post_receive(
        &self,
        work: impl Iterator<Item = Result<ReceiveWork, Errno>>,
    ) -> (usize, Result<(), Errno>) {
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

    /// Returns the `wr_id` of a completed receive.
    pub(crate) fn receive_done(&self, completion: &Completion) -> u64 {
        self.wr_ids.lock().try_remove(completion.wr_id as usize).unwrap_or(0)
    }

    /// Destroys the SRQ (`ibv_destroy_srq(3)`). Fails with `EBUSY` if a QP uses it.
    pub(crate) fn destroy(&self) -> Result<(), Errno> {
        let uses = |qp: &Arc<QpBody>| qp.uses_srq(self);
        if self.device.qps.read().values().any(uses) {
            return Err(Errno::busy(format_args!("a queue pair uses the shared receive queue")));
        }
        self.detach();
        self.async_events.wait();
        Ok(())
    }

    /// Removes the SRQ from the device. The last thread that holds a reference frees it.
    pub(crate) fn detach(&self) {
        self.device.srqs.write().remove(&self.id());
        let head = self.head();
        drop(self.context_events.take_back(|e| e.element.0 == head.0.cast()));
    }
}
