//! Queue pairs (`ibv_create_qp(3)`).

pub(crate) mod chain;
mod completion;
pub(crate) mod entry;
pub(crate) mod extended;
mod iwarp_states;
mod modify;
mod numbers;
mod post;
mod roce_states;
pub(crate) mod work;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rnic_client::{CallObject, DeviceKind, Function, PdId, Qp, QpId, QpOptions, QpType, RnrPolicy};

use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::{Body, Kind, Live, OfContext, live};
use crate::verbs::adapter::Adapter;
use crate::verbs::async_events::ObjectEvents;
use crate::verbs::cq::CqBody;
use crate::verbs::device::Device;
use crate::verbs::pd::{PdBody, PdUser};
use crate::verbs::qp::iwarp_states::IwarpStates;
use crate::verbs::qp::numbers::Numbers;
use crate::verbs::qp::roce_states::RoceStates;
use crate::verbs::qp::work::{SendWork, elements};
use crate::verbs::section::Section;
use crate::verbs::srq::SrqBody;

/// Messages that find no posted receive wait, because programs rely on the RNR retries of other
/// transports. The timeout is short, because the disconnect event follows the waiting messages, and
/// a program that has received all its data posts no more receives (qperf waits 5 s for the event).
const RNR_POLICY: RnrPolicy = RnrPolicy::Wait { timeout_ms: 3000 };

/// A queue pair.
pub(crate) struct QpBody {
    device: Arc<Device>,
    adapter: Arc<Adapter>,
    qp: Qp,
    domain: PdId,
    /// Counts the QP as a user of its PD until the QP is destroyed.
    pd: Mutex<Option<PdUser>>,
    send_cq: Arc<CqBody>,
    recv_cq: Arc<CqBody>,
    srq: Option<Arc<SrqBody>>,
    granted: c::ibv_qp_cap,
    signal_all: bool,
    is_extended: bool,
    pub(crate) events: ObjectEvents<c::ibv_qp>,
    sends: Mutex<Numbers>,
    receives: Mutex<Numbers>,
    /// Held from `ibv_wr_start(3)` to `ibv_wr_complete(3)`: only one thread builds requests.
    pub(crate) building: Section,
    /// Requests built since `ibv_wr_start(3)`.
    pub(crate) started: Mutex<Vec<SendWork>>,
    pub(crate) states: Mutex<IwarpStates>,
    /// Attributes and state of a QP of the RoCE device.
    roce: Option<Mutex<RoceStates>>,
    /// The program has requested `IBV_EVENT_SQ_DRAINED`. Not part of `roce`: threads hold that lock
    /// while they wait for the daemon, and the event thread would have to wait for them.
    notify_when_drained: AtomicBool,
    /// The QP is in SQD and earlier requests are still in progress. Not part of `roce`, for the
    /// same reason.
    draining: AtomicBool,
    /// A UC QP.
    is_uc: bool,
    /// A UD QP.
    is_ud: bool,
    /// The program can observe that the connection is established. Always true on the RoCE device.
    established: AtomicBool,
    /// Sends may be posted on the iWARP device: either end has requested a connection, or the
    /// program has moved the QP to RTS or ERR. For QPs of the RoCE device, `roce` has the state.
    may_send: AtomicBool,
}

impl Body for Arc<QpBody> {
    type Head = c::ibv_qp_ex;
    const KIND: Kind = Kind::Qp;
}

// SAFETY: the first field of the head begins with its context.
unsafe impl OfContext for Arc<QpBody> {}

/// Returns the queue pair of a C pointer.
pub(crate) fn qp(of: *mut c::ibv_qp) -> Result<Live<Arc<QpBody>>, Errno> {
    // Each QP is an `ibv_qp_ex`.
    live(of.cast())
}

/// Returns the queue pair of a device with this number.
pub(crate) fn find(device: &Device, id: QpId) -> Option<Arc<QpBody>> {
    let qp: Arc<dyn Any + Send + Sync> = device.qps.read().get(&id)?.clone();
    qp.downcast().ok()
}

/// Attributes of a new queue pair (`ibv_qp_init_attr`).
pub(crate) struct QpInitAttr {
    pub(crate) send_cq: Arc<CqBody>,
    pub(crate) recv_cq: Arc<CqBody>,
    pub(crate) srq: Option<Arc<SrqBody>>,
    pub(crate) cap: c::ibv_qp_cap,
    pub(crate) signal_all: bool,
    /// The program may build requests call by call (`ibv_wr_start(3)`).
    pub(crate) is_extended: bool,
    /// QP type.
    pub(crate) kind: QpType,
}

/// Minimum of `max_inline_data`: small messages are copied when they are posted.
const INLINE_AT_LEAST: u16 = 256;

impl QpBody {
    /// Creates a queue pair (`ibv_create_qp(3)`).
    pub(crate) fn create(pd: &Arc<PdBody>, wanted: QpInitAttr) -> Result<Arc<QpBody>, Errno> {
        let device = pd.device();
        let mut cap = wanted.cap;
        let shared = wanted.srq.is_some();
        if shared {
            // Ignored, as ibv_create_qp(3) documents: the QP uses the receives of the SRQ.
            cap.max_recv_wr = 0;
            cap.max_recv_sge = 0;
        }
        // The daemon checks the maxima. A value that saturates here is above them.
        let sq_depth = cap.max_send_wr.max(1);
        let rq_depth = cap.max_recv_wr.max(1);
        let max_send_sge = elements(cap.max_send_sge);
        let max_recv_sge = elements(cap.max_recv_sge);
        let inline = u16::try_from(cap.max_inline_data).unwrap_or(u16::MAX);
        let max_inline = inline.max(INLINE_AT_LEAST.min(device.attributes.max_inline));
        let options = QpOptions {
            srq: wanted.srq.as_deref().map(SrqBody::client),
            recv_cq: wanted.recv_cq.client(),
            sq_depth,
            rq_depth,
            max_send_sge,
            max_recv_sge,
            max_inline,
            signal_all: wanted.signal_all,
            rnr_policy: RNR_POLICY,
            kind: wanted.kind,
            device: pd.adapter().name(),
            ..QpOptions::new(wanted.send_cq.client())
        };
        let qp = pd.client().create_qp(&options)?;
        let granted = c::ibv_qp_cap {
            max_send_wr: sq_depth.next_power_of_two(),
            max_recv_wr: if shared { 0 } else { rq_depth.next_power_of_two() },
            max_send_sge: max_send_sge.into(),
            max_recv_sge: if shared { 0 } else { max_recv_sge.into() },
            max_inline_data: max_inline.into(),
        };
        let events = ObjectEvents::new(wanted.send_cq.events.queue().clone());
        let body = Arc::new(QpBody {
            device: device.clone(),
            qp,
            adapter: pd.adapter().clone(),
            domain: pd.client().id(),
            pd: Mutex::new(Some(pd.user())),
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            srq: wanted.srq,
            granted,
            signal_all: wanted.signal_all,
            is_extended: wanted.is_extended,
            events,
            sends: Mutex::new(Numbers::new(granted.max_send_wr)),
            receives: Mutex::new(Numbers::new(granted.max_recv_wr)),
            building: Section::new(),
            started: Mutex::default(),
            states: Mutex::default(),
            roce: (pd.kind() == DeviceKind::Roce).then(|| Mutex::new(RoceStates::of(wanted.kind))),
            notify_when_drained: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            is_uc: wanted.kind == QpType::Uc,
            is_ud: wanted.kind == QpType::Ud,
            established: AtomicBool::new(wanted.kind != QpType::Iwarp),
            may_send: AtomicBool::new(false),
        });
        device.qps.write().insert(body.id(), body.clone());
        Ok(body)
    }

    /// Returns the QP number, which is the same for the daemon and the program.
    pub(crate) fn id(&self) -> QpId {
        self.qp.id()
    }

    pub(crate) fn client(&self) -> &Qp {
        &self.qp
    }

    /// Evaluates the fault rules of a call that concerns the QP.
    fn admit(&self, function: Function) -> Result<(), Errno> {
        self.device.admit(function.of(CallObject::Qp(self.id())))
    }

    /// Returns the capacities, each at least the requested value.
    pub(crate) fn granted(&self) -> c::ibv_qp_cap {
        self.granted
    }

    pub(crate) fn signals_all(&self) -> bool {
        self.signal_all
    }

    /// Returns true if the program may build requests call by call (`ibv_wr_start(3)`).
    pub(crate) fn is_extended(&self) -> bool {
        self.is_extended
    }

    /// Accepts Sends from now on. The daemon sends them once the connection is established.
    pub(crate) fn allow_sends(&self) {
        self.may_send.store(true, Ordering::Relaxed);
    }

    /// Refuses Sends from now on: the connection attempt has ended.
    pub(crate) fn refuse_sends(&self) {
        self.may_send.store(false, Ordering::Relaxed);
    }

    /// Ends a connection attempt. Moves the QP of an id to ERR, as librdmacm does. A QP that the
    /// program created without the id keeps its state.
    pub(crate) fn connect_failed(&self, of_id: bool) {
        if !of_id {
            return self.refuse_sends();
        }
        self.states.lock().disconnected();
        // Fails if the QP is in ERR already.
        let _ = self.qp.to_error();
    }

    /// Returns the PD of a UD QP, and `None` for other types.
    pub(crate) fn ud_pd(&self) -> Option<PdId> {
        self.is_ud.then_some(self.domain)
    }

    /// Returns true for a UC QP.
    pub(crate) fn is_uc(&self) -> bool {
        self.is_uc
    }

    /// Returns true if the QP has an SRQ.
    pub(crate) fn has_srq(&self) -> bool {
        self.srq.is_some()
    }

    /// Returns true for a QP of the RoCE device.
    pub(crate) fn is_roce(&self) -> bool {
        self.roce.is_some()
    }

    /// Removes the QP from the device, and waits until its events are acknowledged.
    pub(crate) fn destroy(&self) {
        self.detach();
        self.events.unacknowledged.wait();
    }

    /// Removes the QP from the device. Its remaining completions are dropped. The QP is freed when
    /// the last thread has released its reference.
    pub(crate) fn detach(&self) {
        self.device.qps.write().remove(&self.id());
        if let Some(connections) = self.device.connections() {
            connections.qp_destroyed(self.id());
        }
        self.send_cq.forget(self.id());
        self.recv_cq.forget(self.id());
        self.events.take_back();
        // Not by `Drop`, because other threads may still hold references.
        self.qp.destroy();
        *self.pd.lock() = None;
    }
}
