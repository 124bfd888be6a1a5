//! Queue pairs: creation, state changes, and posting.
//!
//! Programs may use any `wr_id`, so the library numbers requests consecutively and passes these
//! numbers to the daemon. A completion returns the number, which identifies the request and its
//! `wr_id`. As in verbs, polling a completion frees the slots of its request and of earlier ones.

pub(crate) mod chain;
mod completion;
pub(crate) mod entry;
pub(crate) mod extended;
pub(crate) mod iwarp_states;
pub(crate) mod roce_states;
pub(crate) mod work;

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arrayvec::ArrayVec;
use parking_lot::Mutex;
use rnic_client::{
    Completion, CompletionStatus, PdId, Posting, Qp, QpId, QpOptions, QpState, QpType, RecvRequest,
    RemoteAddr, RnrPolicy, SendRequest, Sge, Stag,
};

use crate::c;
use crate::errno::Errno;
use crate::ffi::handles::{Body, Foreign, Kind, Live, OfContext, live, zeroed};
use crate::verbs::async_events::{AsyncEvents, Unacknowledged};
use crate::verbs::cq::CqBody;
use crate::verbs::device::{Device, DeviceKind};
use crate::verbs::mw::PostedBind;
use crate::verbs::pd::{PdBody, PdUser};
use crate::verbs::qp::iwarp_states::{DeviceAction, IwarpStates, state_name};
use crate::verbs::qp::roce_states::{Allowed, RoceStates};
use crate::verbs::qp::work::{MAX_INLINE, ReceiveWork, SendKind, SendWork, elements};
use crate::verbs::registry::AnySrq as _;
use crate::verbs::section::Section;
use crate::verbs::srq::SrqBody;

/// Messages that find no posted receive wait, because programs rely on the RNR retries of other
/// transports. The timeout is short, because the disconnect event follows the waiting messages, and
/// a program that has received all its data posts no more receives (qperf waits 5 s for the event).
const RNR_POLICY: RnrPolicy = RnrPolicy::Wait { timeout_ms: 3000 };

/// A queue pair.
pub(crate) struct QpBody {
    device: Arc<Device>,
    qp: Qp,
    head: OnceLock<Foreign<c::ibv_qp>>,
    domain: PdId,
    /// Counts the QP as a user of its PD until the QP is destroyed.
    pd: Mutex<Option<PdUser>>,
    send_cq: Arc<CqBody>,
    recv_cq: Arc<CqBody>,
    srq: Option<Arc<SrqBody>>,
    granted: c::ibv_qp_cap,
    signal_all: bool,
    is_extended: bool,
    context_events: Arc<AsyncEvents>,
    pub(crate) async_events: Unacknowledged,
    sends: Mutex<Numbers>,
    receives: Mutex<Numbers>,
    /// Held from `ibv_wr_start(3)` to `ibv_wr_complete(3)`: only one thread builds requests.
    pub(crate) building: Section,
    /// Requests built since `ibv_wr_start(3)`.
    pub(crate) started: Mutex<Vec<SendWork>>,
    pub(crate) states: Mutex<IwarpStates>,
    /// Attributes and state of a QP of the RoCE device.
    roce: Option<Mutex<RoceStates>>,
    /// The program has requested an event for when the send queue has drained. Not part of `roce`:
    /// threads hold that lock while they wait for the daemon, so the event thread must not take it.
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
const INLINE_AT_LEAST: u32 = 256;

impl QpBody {
    /// Creates a queue pair (`ibv_create_qp(3)`).
    pub(crate) fn create(pd: &Arc<PdBody>, wanted: QpInitAttr) -> Result<Arc<QpBody>, Errno> {
        let device = pd.device();
        let most = &device.attributes;
        let mut cap = wanted.cap;
        let shared = wanted.srq.is_some();
        if shared {
            // Ignored, as ibv_create_qp(3) documents: the QP uses the receives of the SRQ.
            cap.max_recv_wr = 0;
            cap.max_recv_sge = 0;
        }
        let sq_depth = depth("max_send_wr", cap.max_send_wr, most.max_wr_depth)?;
        let rq_depth = depth("max_recv_wr", cap.max_recv_wr, most.max_wr_depth)?;
        let max_send_sge = elements("max_send_sge", cap.max_send_sge, most.max_sge)?;
        let max_recv_sge = elements("max_recv_sge", cap.max_recv_sge, most.max_sge)?;
        let inline = cap.max_inline_data.max(INLINE_AT_LEAST.min(most.max_inline.into()));
        let fits = u16::try_from(inline).ok().filter(|&n| n <= most.max_inline);
        let max_inline = fits.ok_or_else(|| {
            let most = most.max_inline;
            Errno::invalid(format_args!("max_inline_data {inline} is above the maximum, {most}"))
        })?;
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
        let context_events = wanted.send_cq.context_events().clone();
        let body = Arc::new(QpBody {
            device: device.clone(),
            qp,
            head: OnceLock::new(),
            domain: pd.client().id(),
            pd: Mutex::new(Some(pd.user())),
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            srq: wanted.srq,
            granted,
            signal_all: wanted.signal_all,
            is_extended: wanted.is_extended,
            context_events,
            async_events: Unacknowledged::default(),
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

    pub(crate) fn set_head(&self, head: Foreign<c::ibv_qp>) {
        let _ = self.head.set(head);
    }

    /// Returns the program's pointer to the QP.
    pub(crate) fn head(&self) -> Foreign<c::ibv_qp> {
        self.head.get().copied().unwrap_or(Foreign::NULL)
    }

    /// Posts requests until one fails (`ibv_post_send(3)`). Returns the number of posted requests,
    /// and the error of the request that failed.
    pub(crate) fn post_send<'w>(
        &self,
        work: impl Iterator<Item = Result<SendWork, Errno>> + 'w,
    ) -> (usize, Result<(), Errno>) {
        if let Err(errno) = self.check_may_send() {
            return (0, Err(errno));
        }
        let mut numbers = self.sends.lock();
        let mut posting = match self.qp.posting() {
            Ok(posting) => posting,
            Err(error) => return (0, Err(error.into())),
        };
        let mut posted = 0;
        for request in work {
            let done = request.and_then(|work| self.post_one(&mut posting, &mut numbers, &work));
            if let Err(errno) = done {
                // The requests before it are still sent.
                let _ = posting.finish();
                return (posted, Err(errno));
            }
            posted += 1;
        }
        (posted, posting.finish().map_err(Errno::from))
    }

    fn post_one(
        &self,
        posting: &mut Posting<'_>,
        numbers: &mut Numbers,
        work: &SendWork,
    ) -> Result<(), Errno> {
        let number = numbers.next()?;
        self.check_served(work)?;
        let gathered = match work.flags & c::IBV_SEND_INLINE {
            0 => self.small_message(work),
            _ => work.elements.gather(),
        };
        let copied = work.copied.as_deref().or(gathered.as_deref());
        let inline = copied.is_some();
        let bytes = copied.unwrap_or_default();
        let elements = work.elements.list();
        let mut bound = None;
        let mut request = match work.kind {
            SendKind::Send if inline => SendRequest::send_inline(number, bytes),
            SendKind::Send => SendRequest::send(number, elements),
            SendKind::SendImmediate { data } if inline => {
                SendRequest::send_inline_with_imm(number, bytes, data.to_ne_bytes())
            }
            SendKind::SendImmediate { data } => {
                SendRequest::send_with_imm(number, elements, data.to_ne_bytes())
            }
            SendKind::SendInvalidate { rkey } if inline => {
                SendRequest::send_invalidate_inline(number, bytes, Stag(rkey))
            }
            SendKind::SendInvalidate { rkey } => {
                SendRequest::send_invalidate(number, elements, Stag(rkey))
            }
            SendKind::Write { remote, rkey, immediate } => {
                let to = RemoteAddr { addr: remote, rkey: Stag(rkey) };
                match (immediate.map(on_the_wire), inline) {
                    (None, true) => SendRequest::write_inline(number, bytes, to),
                    (None, false) => SendRequest::write(number, elements, to),
                    (Some(data), true) => {
                        SendRequest::write_inline_with_imm(number, bytes, to, data)
                    }
                    (Some(data), false) => SendRequest::write_with_imm(number, elements, to, data),
                }
            }
            SendKind::Atomic { remote, rkey, operation } => {
                let at = RemoteAddr { addr: remote, rkey: Stag(rkey) };
                SendRequest::atomic(number, read_sink(elements), at, operation)
            }
            SendKind::Read { remote, rkey } if self.roce.is_some() => {
                let from = RemoteAddr { addr: remote, rkey: Stag(rkey) };
                SendRequest::read_scattered(number, elements, from)
            }
            SendKind::Read { remote, rkey } => {
                let from = RemoteAddr { addr: remote, rkey: Stag(rkey) };
                SendRequest::read(number, read_sink(elements), from)
            }
            SendKind::LocalInvalidate { rkey } => SendRequest::local_invalidate(number, Stag(rkey)),
            SendKind::BindWindow(bind) => {
                let window = work.window.as_ref().ok_or_else(unsupported)?;
                let new = window.next(bind.wanted);
                bound = Some((window, new));
                SendRequest::bind_range(
                    number,
                    Stag(window.present()),
                    Stag(new),
                    Stag(bind.lkey),
                    bind.address,
                    bind.length,
                    rnic_client::Access::from_bits_truncate(bind.access),
                )
            }
            SendKind::Unsupported => return Err(unsupported()),
        };
        if let Some(to) = work.to {
            request = request.to(&to);
        }
        if work.flags & c::IBV_SEND_SIGNALED != 0 {
            request = request.signaled();
        }
        if work.flags & c::IBV_SEND_SOLICITED != 0 {
            request = request.solicited();
        }
        if work.flags & c::IBV_SEND_FENCE != 0 {
            request = request.fence();
        }
        posting.push(&request)?;
        if let Some((window, key)) = bound {
            numbers.binds.push_back((number, window.posted(key)));
        }
        // The client library has accepted every SGE, so this is at most the maximum message size.
        numbers.push(work.wr_id, u32::try_from(work.bytes()).unwrap_or(u32::MAX));
        Ok(())
    }

    /// Checks that a QP of this type and with these capacities supports the request.
    fn check_served(&self, work: &SendWork) -> Result<(), Errno> {
        if matches!(work.kind, SendKind::Unsupported) {
            return Err(unsupported());
        }
        if self.is_uc && work.kind.needs_reliability() {
            let reason = format_args!("a UC QP supports no Read, atomic or Send with Invalidate");
            return Err(Errno::invalid(reason));
        }
        let sends = matches!(work.kind, SendKind::Send | SendKind::SendImmediate { .. });
        if self.is_ud && !(sends && work.to.is_some()) {
            let reason = format_args!("a UD QP supports only Sends, each to an address handle");
            return Err(Errno::invalid(reason));
        }
        if matches!(work.kind, SendKind::SendImmediate { .. }) && self.roce.is_none() {
            let reason = format_args!("IBV_WR_SEND_WITH_IMM: the iWARP device lacks this opcode");
            return Err(Errno::invalid(reason));
        }
        let given = work.elements.list().len();
        let most = self.granted.max_send_sge;
        if given > most as usize {
            let reason = format_args!("num_sge {given} is above max_send_sge {most}");
            return Err(Errno::invalid(reason));
        }
        let awaits_response = matches!(work.kind, SendKind::Read { .. } | SendKind::Atomic { .. });
        if work.is_inline() && awaits_response {
            let reason = format_args!("IBV_SEND_INLINE is not valid for a Read or an atomic");
            return Err(Errno::invalid(reason));
        }
        let scatters = matches!(work.kind, SendKind::Read { .. }) && self.roce.is_some();
        if awaits_response && !scatters && given > 1 {
            return Err(Errno::invalid(format_args!(
                "num_sge {given}: this request supports only one SGE"
            )));
        }
        let bytes = work.bytes();
        let most = self.granted.max_inline_data;
        if work.is_inline() && bytes > u64::from(most) {
            let reason = format_args!("{bytes} inline bytes, above max_inline_data {most}");
            return Err(Errno::invalid(reason));
        }
        Ok(())
    }

    /// Posts the requests built since `ibv_wr_start(3)`, all of them or none.
    pub(crate) fn post_started(&self) -> Result<(), Errno> {
        let started = std::mem::take(&mut *self.started.lock());
        started.iter().try_for_each(|work| self.check_served(work))?;
        let room = self.sends.lock().room();
        if room < started.len() {
            let reason = format_args!("{} requests, but room for {room}", started.len());
            return Err(Errno::new(libc::ENOMEM, reason));
        }
        self.post_send(started.into_iter().map(Ok)).1
    }

    /// Changes attributes and state (`ibv_modify_qp(3)`).
    pub(crate) fn modify(&self, attributes: &c::ibv_qp_attr, mask: i32) -> Result<(), Errno> {
        if let Some(roce) = &self.roce {
            return self.modify_roce(&mut roce.lock(), attributes, mask);
        }
        match self.modify_iwarp(attributes, mask)? {
            DeviceAction::Nothing => Ok(()),
            DeviceAction::ToError => Ok(self.qp.to_error()?),
            DeviceAction::Disconnect => Ok(self.qp.disconnect()?),
        }
    }

    /// Modifies a QP of the iWARP device.
    fn modify_iwarp(&self, attributes: &c::ibv_qp_attr, mask: i32) -> Result<DeviceAction, Errno> {
        let ids = self.device.connections();
        let mut states = self.states.lock();
        let known = states.by_attributes || ids.is_some_and(|ids| ids.holds_qp(self.id()));
        let to_rtr = mask & c::IBV_QP_STATE != 0 && attributes.qp_state == c::IBV_QPS_RTR;
        let by_attributes = ids.filter(|ids| to_rtr && !known && ids.uncount_rtr_attrs());
        let taken = by_attributes.is_some();
        let modified = states.modify(attributes, mask, known || taken);
        match &modified {
            Ok(_) => {
                states.by_attributes |= taken;
                if matches!(states.state, c::IBV_QPS_RTS | c::IBV_QPS_ERR) {
                    self.may_send.store(true, Ordering::Relaxed);
                }
            }
            // The attributes are for another transition, or for another QP.
            Err(_) => {
                if let Some(ids) = by_attributes {
                    ids.count_rtr_attrs();
                }
            }
        }
        modified
    }

    /// Modifies a QP of the RoCE device.
    fn modify_roce(
        &self,
        states: &mut RoceStates,
        attributes: &c::ibv_qp_attr,
        mask: i32,
    ) -> Result<(), Errno> {
        states.follow(self.qp.query()?.state);
        let has = &self.device.attributes;
        let max_ird = has.max_ird;
        let max_ord = has.max_ord;
        let gids = self.device.gids.rows(&self.device.context)?;
        let allowed = Allowed { gids: &gids, max_ird, max_ord };
        let next = states.after(attributes, mask, &allowed)?;
        // Must precede draining: the event can arrive before this function returns.
        self.notify_when_drained.store(next.attr().en_sqd_async_notify != 0, Ordering::Release);
        match (states.state(), next.state()) {
            (_, c::IBV_QPS_RESET) => {
                CqBody::drop_with_reset([&self.send_cq, &self.recv_cq], self.id(), || {
                    let mut sends = self.sends.lock();
                    let mut receives = self.receives.lock();
                    self.qp.reset()?;
                    sends.clear();
                    receives.clear();
                    Ok(())
                })?;
            }
            (c::IBV_QPS_ERR, c::IBV_QPS_ERR) => {}
            (_, c::IBV_QPS_ERR) => self.qp.to_error()?,
            (c::IBV_QPS_INIT, c::IBV_QPS_RTR) if self.is_ud => {
                self.qp.receive_datagrams(next.attr().qkey)?;
            }
            (c::IBV_QPS_INIT, c::IBV_QPS_RTR) => self.qp.to_rtr(&next.wiring(&gids)?)?,
            (from, c::IBV_QPS_RTS) if from != c::IBV_QPS_RTS => {
                self.send_changes(&next, mask)?;
                self.qp.to_rts(&next.sending())?;
            }
            (c::IBV_QPS_RTS, c::IBV_QPS_SQD) => {
                self.draining.store(true, Ordering::Release);
                self.qp.drain_send_queue()?;
            }
            (c::IBV_QPS_RTS, _) | (c::IBV_QPS_SQD, _) => self.send_changes(&next, mask)?,
            _ => {}
        }
        *states = next;
        Ok(())
    }

    /// Passes changed attributes to the device, for transitions after RTR.
    fn send_changes(&self, next: &RoceStates, mask: i32) -> Result<(), Errno> {
        if mask & c::IBV_QP_ACCESS_FLAGS != 0 {
            self.qp.set_rights(next.rights())?;
        }
        if mask & c::IBV_QP_QKEY != 0 {
            self.qp.set_q_key(next.attr().qkey)?;
        }
        if mask & c::IBV_QP_MIN_RNR_TIMER != 0 {
            self.qp.set_min_rnr_timer(next.attr().min_rnr_timer)?;
        }
        Ok(())
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

    /// Checks that send requests may be posted: on the RoCE device from RTS on, on the iWARP device
    /// once a connection has been requested. Earlier requests would never complete.
    fn check_may_send(&self) -> Result<(), Errno> {
        let Some(roce) = &self.roce else {
            if self.may_send.load(Ordering::Relaxed) {
                return Ok(());
            }
            let id = self.id();
            let reason = format_args!("QP {id} is neither connected nor connecting: no Sends");
            return Err(Errno::invalid(reason));
        };
        match roce.lock().state() {
            c::IBV_QPS_RTS | c::IBV_QPS_SQD | c::IBV_QPS_SQE | c::IBV_QPS_ERR => Ok(()),
            state => {
                let id = self.id();
                let state = state_name(state);
                let reason = format_args!("QP {id} is in {state}: Sends are allowed from RTS on");
                Err(Errno::invalid(reason))
            }
        }
    }

    /// Returns the PD of a UD QP, and `None` for other types.
    pub(crate) fn ud_pd(&self) -> Option<PdId> {
        self.is_ud.then_some(self.domain)
    }

    /// Returns true for a QP of the RoCE device.
    pub(crate) fn is_roce(&self) -> bool {
        self.roce.is_some()
    }

    /// Returns true for a QP of the RoCE device in RESET.
    fn is_reset(&self) -> bool {
        self.roce.as_ref().is_some_and(|roce| roce.lock().state() == c::IBV_QPS_RESET)
    }

    /// Returns state, attributes and capacities (`ibv_query_qp(3)`).
    pub(crate) fn query(&self) -> Result<c::ibv_qp_attr, Errno> {
        let row = self.qp.query()?;
        if let Some(roce) = &self.roce {
            let mut states = *roce.lock();
            states.follow(row.state);
            let mut attr = states.attr();
            attr.cur_qp_state = attr.qp_state;
            attr.cap = self.granted;
            let drains = self.draining.load(Ordering::Acquire);
            attr.sq_draining = u8::from(attr.qp_state == c::IBV_QPS_SQD && drains);
            return Ok(attr);
        }
        let states = *self.states.lock();
        let mut attr: c::ibv_qp_attr = zeroed();
        attr.qp_state = match row.state {
            // The daemon's state adds nothing to the state that the program has set.
            QpState::Idle | QpState::Rtr | QpState::Sqd | QpState::Sqe => states.state,
            QpState::Rts => c::IBV_QPS_RTS,
            QpState::Closing => c::IBV_QPS_SQD,
            QpState::Terminate | QpState::Error => c::IBV_QPS_ERR,
        };
        attr.cur_qp_state = attr.qp_state;
        attr.qp_access_flags = states.access;
        attr.min_rnr_timer = states.min_rnr_timer;
        attr.timeout = states.timeout;
        attr.cap = self.granted;
        attr.path_mtu = crate::net::verbs_mtu();
        attr.port_num = crate::verbs::device::PORT;
        let granted = |granted: u16, asked: u8| match granted {
            0 => asked,
            granted => u8::try_from(granted).unwrap_or(u8::MAX),
        };
        attr.max_dest_rd_atomic = granted(row.ird, states.inbound_reads);
        attr.max_rd_atomic = granted(row.ord, states.outbound_reads);
        Ok(attr)
    }

    /// Returns the bytes of a message that fits into its request, which saves the daemon the system
    /// call; `None` leaves the copying to the daemon. Returns `None` for fenced messages, because
    /// Reads and atomics before the message may still write its bytes.
    fn small_message(&self, work: &SendWork) -> Option<ArrayVec<u8, MAX_INLINE>> {
        let carries = matches!(
            work.kind,
            SendKind::Send
                | SendKind::SendImmediate { .. }
                | SendKind::SendInvalidate { .. }
                | SendKind::Write { .. }
        );
        let bytes = work.elements.bytes();
        let fenced = work.flags & c::IBV_SEND_FENCE != 0;
        if !carries || fenced || bytes == 0 || bytes > u64::from(self.granted.max_inline_data) {
            return None;
        }
        let regions = &self.device.regions;
        work.elements.fetch(|element| regions.locate(self.domain, element))
    }

    /// Posts receives until one fails (`ibv_post_recv(3)`).
    pub(crate) fn post_receive(
        &self,
        work: impl Iterator<Item = Result<ReceiveWork, Errno>>,
    ) -> (usize, Result<(), Errno>) {
        if self.srq.is_some() {
            let id = self.id();
            let reason = format_args!("QP {id} has a shared receive queue: post receives there");
            return (0, Err(Errno::invalid(reason)));
        }
        if self.is_reset() {
            let id = self.id();
            let reason = format_args!("QP {id} is in RESET: receives are allowed from INIT on");
            return (0, Err(Errno::invalid(reason)));
        }
        let mut numbers = self.receives.lock();
        let mut posted = 0;
        for request in work {
            let done = request.and_then(|work| {
                let request = RecvRequest::new(numbers.next()?, work.elements.list());
                self.qp.post_recv(&[request]).map_err(|error| Errno::from(error.source))?;
                numbers.push(work.wr_id, 0);
                Ok(())
            });
            if done.is_err() {
                return (posted, done);
            }
            posted += 1;
        }
        (posted, Ok(()))
    }

    /// Waits until the program can read the ESTABLISHED event of the connection. Called before the
    /// first completion is returned. A flushed request may never have had a connection.
    #[inline]
    pub(crate) fn await_established(&self, completion: &Completion) {
        if !self.established.load(Ordering::Relaxed)
            && completion.status != CompletionStatus::WrFlush
        {
            if let Some(connections) = self.device.connections() {
                connections.await_established(self.id());
            }
            self.established.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the completed send request, and frees it and all requests before it.
    pub(crate) fn send_done(&self, completion: &Completion) -> Posted {
        let mut sends = self.sends.lock();
        sends.settle_binds(completion.wr_id, completion.status == CompletionStatus::Success);
        sends.done(completion.wr_id)
    }

    /// Returns the `wr_id` of a completed receive.
    pub(crate) fn receive_done(&self, completion: &Completion) -> u64 {
        match (&self.srq, completion.srq) {
            (Some(srq), Some(_)) => srq.receive_done(completion),
            _ => self.receives.lock().done(completion.wr_id).wr_id,
        }
    }

    /// Removes the QP from the device, and waits until its events are acknowledged.
    pub(crate) fn destroy(&self) {
        self.detach();
        self.async_events.wait();
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
        let head = self.head();
        drop(self.context_events.take_back(|e| e.element.0 == head.0.cast()));
        // Other threads may hold references a moment longer.
        self.qp.destroy();
        *self.pd.lock() = None;
    }
}

/// Encodes immediate data as in RFC 7306: the first four of eight bytes.
fn on_the_wire(immediate: u32) -> [u8; 8] {
    let [a, b, c, d] = immediate.to_ne_bytes();
    [a, b, c, d, 0, 0, 0, 0]
}

/// Returns the first SGE, which receives the response, or an empty SGE if there is none.
fn read_sink(elements: &[Sge]) -> Sge {
    elements.first().copied().unwrap_or(Sge { addr: 0, length: 0, lkey: 0 })
}

fn unsupported() -> Errno {
    Errno::invalid(format_args!("the device does not support the opcode of the request"))
}

/// Checks the depth of a queue. Returns at least 1.
fn depth(name: &str, asked: u32, most: u32) -> Result<u32, Errno> {
    if asked > most {
        return Err(Errno::invalid(format_args!("{name} {asked} is above {most} (max_qp_wr)")));
    }
    Ok(asked.max(1))
}

/// An outstanding request, as the program posted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    /// Length in bytes of a send request.
    pub(crate) length: u32,
}

/// Outstanding requests in order, with the library's number and the program's `wr_id` of each.
#[derive(Debug)]
struct Numbers {
    posted: VecDeque<Posted>,
    /// The outstanding binds, by number.
    binds: VecDeque<(u64, PostedBind)>,
    /// Number of the oldest outstanding request.
    first: u64,
    /// Maximum number of outstanding requests.
    most: usize,
}

impl Numbers {
    fn new(most: u32) -> Self {
        // Not preallocated: programs create deep queues and use a small part.
        Numbers { posted: VecDeque::new(), binds: VecDeque::new(), first: 0, most: most as usize }
    }

    /// Returns the number of the next request, or `ENOMEM` if the queue is full.
    fn next(&self) -> Result<u64, Errno> {
        if self.posted.len() < self.most {
            Ok(self.first + self.posted.len() as u64)
        } else {
            let most = self.most;
            let reason = format_args!("the queue is full: {most} requests are outstanding");
            Err(Errno::new(libc::ENOMEM, reason))
        }
    }

    /// Drops all outstanding requests.
    fn clear(&mut self) {
        self.first += self.posted.len() as u64;
        self.posted.clear();
        self.binds.clear();
    }

    /// Returns the number of requests that can still be posted.
    fn room(&self) -> usize {
        self.most - self.posted.len()
    }

    /// Adds a request that was posted.
    fn push(&mut self, wr_id: u64, length: u32) {
        self.posted.push_back(Posted { wr_id, length });
    }

    /// Settles the binds up to a completed request. Binds before it have succeeded, because a
    /// request that fails always completes.
    fn settle_binds(&mut self, number: u64, succeeded: bool) {
        while let Some((at, bind)) = self.binds.pop_front_if(|(at, _)| *at <= number) {
            if at == number && !succeeded {
                bind.failed();
            }
        }
    }

    /// Frees a completed request and all requests before it. Returns the completed request.
    fn done(&mut self, number: u64) -> Posted {
        let mut done = Posted::default();
        while self.first <= number
            && let Some(next) = self.posted.pop_front()
        {
            done = next;
            self.first += 1;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_frees_the_slots_before_it() {
        let mut numbers = Numbers::new(3);
        for wr_id in [70, 71, 72] {
            numbers.next().expect("room");
            numbers.push(wr_id, 5);
        }
        assert_eq!(numbers.next().map_err(|errno| errno.number()).err(), Some(libc::ENOMEM));
        assert_eq!(numbers.done(1), Posted { wr_id: 71, length: 5 });
        assert_eq!(numbers.next().ok(), Some(3));
        assert_eq!(numbers.done(2).wr_id, 72);
    }
}
