//! Queue pairs: making them, posting to them, and giving completions their numbers back.
//!
//! The daemon gets numbers of our own for requests, one after the other, because any number is the
//! program's to use and what belongs to a request has to be found again. A slot is free again when
//! the completion of its request, or of a later one, has been polled, as verbs have it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use arrayvec::ArrayVec;
use parking_lot::Mutex;
use rnic_client::{
    Completion, CompletionStatus, CqId, PdId, Posting, Qp, QpId, QpOptions, QpState, QpType,
    RecvRequest, RemoteAddr, RnrPolicy, SendRequest, Sge, Stag,
};

use crate::async_events::{AsyncEvent, AsyncEvents, Unacknowledged};
use crate::c;
use crate::cq::CqBody;
use crate::device::{Device, DeviceKind};
use crate::errno::Errno;
use crate::mw::PostedBind;
use crate::object::{Body, Foreign, Kind, zeroed};
use crate::pd::{PdBody, PdUser};
use crate::section::Section;
use crate::srq::SrqBody;
use crate::states::{Consequence, States, state_name};
use crate::wired_states::{Allowed, WiredStates};
use crate::work::{MAX_INLINE, ReceiveWork, SendKind, SendWork, elements};

/// What becomes of messages that find no receive: they wait, because programs count on the RNR
/// retries of other transports. Not for long: a program that has all it wants posts no receive any
/// more, and learns only behind them that its peer has disconnected (qperf is patient for 5 s).
const RNR_POLICY: RnrPolicy = RnrPolicy::Wait { timeout_ms: 3000 };

/// A queue pair.
pub(crate) struct QpBody {
    device: Arc<Device>,
    qp: Qp,
    head: OnceLock<Foreign<c::ibv_qp>>,
    domain: PdId,
    /// Its place in its domain, until it is destroyed.
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
    /// From `ibv_wr_start(3)` to `ibv_wr_complete(3)`, requests are built by one thread.
    pub(crate) building: Section,
    /// Requests built since then.
    pub(crate) started: Mutex<Vec<SendWork>>,
    pub(crate) states: Mutex<States>,
    /// Its states, if it is wired by hand.
    wired: Option<Mutex<WiredStates>>,
    /// The program wants an event once the send queue is drained. It is not in `wired`: a thread
    /// holds that lock while it waits for the daemon, and the thread that delivers events must not.
    tells_when_drained: AtomicBool,
    /// It has been moved to SQD, and requests that had begun before are not done. It is not in
    /// `wired` for the same reason.
    draining: AtomicBool,
    /// It has neither acknowledgements nor responses.
    unreliable: bool,
    /// Each of its requests names where it goes.
    datagrams: bool,
    /// Programs can know that it is connected, if it connects.
    established: AtomicBool,
    /// Sends may be posted on the iWARP device: either end has asked for a connection, or the
    /// program has moved the QP to RTS or ERR. On the RoCE device, `wired` has the state.
    may_send: AtomicBool,
}

impl Body for Arc<QpBody> {
    type Head = c::ibv_qp_ex;
    const KIND: Kind = Kind::Qp;
}

/// What a program wants of a queue pair.
pub(crate) struct QpWanted {
    pub(crate) send_cq: Arc<CqBody>,
    pub(crate) recv_cq: Arc<CqBody>,
    pub(crate) srq: Option<Arc<SrqBody>>,
    pub(crate) cap: c::ibv_qp_cap,
    pub(crate) signal_all: bool,
    /// Requests may be built call by call (`ibv_wr_start(3)`).
    pub(crate) is_extended: bool,
    /// How it comes by its peer.
    pub(crate) kind: QpType,
}

/// Bytes that a request can always carry along: small messages are copied when they are posted.
const INLINE_AT_LEAST: u32 = 256;

impl QpBody {
    /// Makes a queue pair (`ibv_create_qp(3)`).
    pub(crate) fn create(pd: &Arc<PdBody>, wanted: QpWanted) -> Result<Arc<QpBody>, Errno> {
        let device = pd.device();
        let most = &device.attributes;
        let mut cap = wanted.cap;
        let shared = wanted.srq.is_some();
        if shared {
            // Ignored, as ibv_create_qp(3) has it: the receives are those of the shared queue.
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
            Errno::invalid(format_args!("max_inline_data {inline} is above the device's {most}"))
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
            wired: (pd.kind() == DeviceKind::Roce)
                .then(|| Mutex::new(WiredStates::of(wanted.kind))),
            tells_when_drained: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            unreliable: wanted.kind == QpType::WiredUnreliable,
            datagrams: wanted.kind == QpType::Datagrams,
            established: AtomicBool::new(wanted.kind != QpType::Connected),
            may_send: AtomicBool::new(false),
        });
        device.qps.write().insert(body.id(), body.clone());
        Ok(body)
    }

    /// Its number, in the daemon and for the program.
    pub(crate) fn id(&self) -> QpId {
        self.qp.id()
    }

    pub(crate) fn client(&self) -> &Qp {
        &self.qp
    }

    /// What it can hold: at least what was asked for.
    pub(crate) fn granted(&self) -> c::ibv_qp_cap {
        self.granted
    }

    pub(crate) fn signals_all(&self) -> bool {
        self.signal_all
    }

    /// Whether requests may be built call by call (`ibv_wr_start(3)`).
    pub(crate) fn is_extended(&self) -> bool {
        self.is_extended
    }

    pub(crate) fn published(&self, head: Foreign<c::ibv_qp>) {
        let _ = self.head.set(head);
    }

    /// What the program knows it by.
    pub(crate) fn head(&self) -> Foreign<c::ibv_qp> {
        self.head.get().copied().unwrap_or(Foreign::NULL)
    }

    pub(crate) fn uses_cq(&self, cq: CqId) -> bool {
        [&self.send_cq, &self.recv_cq].iter().any(|used| used.client().id() == cq)
    }

    pub(crate) fn uses_srq(&self, srq: &SrqBody) -> bool {
        self.srq.as_ref().is_some_and(|used| used.id() == srq.id())
    }

    /// Queues an asynchronous event about it.
    pub(crate) fn tell(&self, kind: c::ibv_event_type) {
        self.context_events.push(AsyncEvent::of(self.head(), kind));
    }

    /// Posts requests, as many as can be (`ibv_post_send(3)`). Returns how many were, with the
    /// error of the one that was not.
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
                // Those before it go out all the same.
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
        let (inline, bytes) = (copied.is_some(), copied.unwrap_or_default());
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
            SendKind::Read { remote, rkey } if self.wired.is_some() => {
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
                    (bind.address, bind.length),
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
        // Every element was accepted, so the length is at most that of a message.
        numbers.push(work.wr_id, u32::try_from(work.bytes()).unwrap_or(u32::MAX));
        Ok(())
    }

    /// Checks that a QP of this type, and with these capacities, serves a request.
    fn check_served(&self, work: &SendWork) -> Result<(), Errno> {
        if matches!(work.kind, SendKind::Unsupported) {
            return Err(unsupported());
        }
        if self.unreliable && work.kind.needs_reliability() {
            let reason = format_args!("a UC queue pair does no Reads, atomics and invalidations");
            return Err(Errno::invalid(reason));
        }
        let sends = matches!(work.kind, SendKind::Send | SendKind::SendImmediate { .. });
        if self.datagrams && !(sends && work.to.is_some()) {
            let reason = format_args!("a UD queue pair does Sends only, each to an address handle");
            return Err(Errno::invalid(reason));
        }
        if matches!(work.kind, SendKind::SendImmediate { .. }) && self.wired.is_none() {
            let reason = format_args!("IBV_WR_SEND_WITH_IMM: the iWARP device has no such opcode");
            return Err(Errno::invalid(reason));
        }
        let (given, most) = (work.elements.list().len(), self.granted.max_send_sge);
        if given > most as usize {
            let reason = format_args!("num_sge {given} is above max_send_sge {most}");
            return Err(Errno::invalid(reason));
        }
        let awaits_response = matches!(work.kind, SendKind::Read { .. } | SendKind::Atomic { .. });
        if work.is_inline() && awaits_response {
            let reason = format_args!("IBV_SEND_INLINE with a request that places its response");
            return Err(Errno::invalid(reason));
        }
        let scatters = matches!(work.kind, SendKind::Read { .. }) && self.wired.is_some();
        if awaits_response && !scatters && given > 1 {
            return Err(Errno::invalid(format_args!(
                "num_sge {given}: the response has one element"
            )));
        }
        let (bytes, most) = (work.bytes(), self.granted.max_inline_data);
        if work.is_inline() && bytes > u64::from(most) {
            let reason = format_args!("{bytes} inline bytes, above max_inline_data {most}");
            return Err(Errno::invalid(reason));
        }
        Ok(())
    }

    /// Posts what was built since `ibv_wr_start(3)`, all of it or none.
    pub(crate) fn post_started(&self) -> Result<(), Errno> {
        let started = std::mem::take(&mut *self.started.lock());
        started.iter().try_for_each(|work| self.check_served(work))?;
        let room = self.sends.lock().room();
        if room < started.len() {
            let reason = format_args!("{} requests, room for {room}", started.len());
            return Err(Errno::new(libc::ENOMEM, reason));
        }
        self.post_send(started.into_iter().map(Ok)).1
    }

    /// Changes its attributes, the state among them (`ibv_modify_qp(3)`).
    pub(crate) fn modify(&self, attributes: &c::ibv_qp_attr, mask: i32) -> Result<(), Errno> {
        if let Some(wired) = &self.wired {
            return self.modify_wired(&mut wired.lock(), attributes, mask);
        }
        match self.modify_connected(attributes, mask)? {
            Consequence::Noted => Ok(()),
            Consequence::ToError => Ok(self.qp.to_error()?),
            Consequence::Disconnect => Ok(self.qp.disconnect()?),
        }
    }

    /// Modifies the states of a QP of the iWARP device.
    fn modify_connected(
        &self,
        attributes: &c::ibv_qp_attr,
        mask: i32,
    ) -> Result<Consequence, Errno> {
        let ids = &self.device.ids;
        let mut states = self.states.lock();
        let known = states.by_attributes || ids.have_qp(self.id());
        let to_rtr = mask & c::IBV_QP_STATE != 0 && attributes.qp_state == c::IBV_QPS_RTR;
        let taken = to_rtr && !known && ids.take_attributes();
        let modified = states.modify(attributes, mask, known || taken);
        match &modified {
            Ok(_) => {
                states.by_attributes |= taken;
                if matches!(states.state, c::IBV_QPS_RTS | c::IBV_QPS_ERR) {
                    self.may_send.store(true, Ordering::Relaxed);
                }
            }
            // They are for another step, or another QP.
            Err(_) if taken => ids.gives_attributes(),
            Err(_) => {}
        }
        modified
    }

    /// As [`modify`](Self::modify), of one that is wired by hand.
    fn modify_wired(
        &self,
        states: &mut WiredStates,
        attributes: &c::ibv_qp_attr,
        mask: i32,
    ) -> Result<(), Errno> {
        states.follow(self.qp.query()?.state);
        let has = &self.device.attributes;
        let (max_ird, max_ord) = (has.max_ird, has.max_ord);
        let gids = self.device.gids.rows(&self.device.context)?;
        let allowed = Allowed { gids: &gids, max_ird, max_ord };
        let next = states.after(attributes, mask, &allowed)?;
        // Before the queue is drained, which may be told before this returns.
        self.tells_when_drained.store(next.said().en_sqd_async_notify != 0, Ordering::Release);
        match (states.state(), next.state()) {
            (_, c::IBV_QPS_RESET) => {
                CqBody::drop_with_reset([&self.send_cq, &self.recv_cq], self.id(), || {
                    let (mut sends, mut receives) = (self.sends.lock(), self.receives.lock());
                    self.qp.reset()?;
                    sends.begin_anew();
                    receives.begin_anew();
                    Ok(())
                })?;
            }
            (c::IBV_QPS_ERR, c::IBV_QPS_ERR) => {}
            (_, c::IBV_QPS_ERR) => self.qp.to_error()?,
            (c::IBV_QPS_INIT, c::IBV_QPS_RTR) if self.datagrams => {
                self.qp.receive_datagrams(next.said().qkey)?;
            }
            (c::IBV_QPS_INIT, c::IBV_QPS_RTR) => self.qp.to_rtr(&next.wiring(&gids)?)?,
            (from, c::IBV_QPS_RTS) if from != c::IBV_QPS_RTS => {
                self.tell_later(&next, mask)?;
                self.qp.to_rts(&next.sending())?;
            }
            (c::IBV_QPS_RTS, c::IBV_QPS_SQD) => {
                self.draining.store(true, Ordering::Release);
                self.qp.drain_send_queue()?;
            }
            (c::IBV_QPS_RTS, _) | (c::IBV_QPS_SQD, _) => self.tell_later(&next, mask)?,
            _ => {}
        }
        *states = next;
        Ok(())
    }

    /// Tells the device what has changed of what it was told on the way to RTR.
    fn tell_later(&self, next: &WiredStates, mask: i32) -> Result<(), Errno> {
        if mask & c::IBV_QP_ACCESS_FLAGS != 0 {
            self.qp.set_rights(next.rights())?;
        }
        if mask & c::IBV_QP_QKEY != 0 {
            self.qp.set_q_key(next.said().qkey)?;
        }
        if mask & c::IBV_QP_MIN_RNR_TIMER != 0 {
            self.qp.set_min_rnr_timer(next.said().min_rnr_timer)?;
        }
        Ok(())
    }

    /// Accepts Sends from now on. They are sent once the connection is established.
    pub(crate) fn begins_to_connect(&self) {
        self.may_send.store(true, Ordering::Relaxed);
    }

    /// Refuses Sends from now on: no connection is asked for any more.
    pub(crate) fn awaits_no_connection(&self) {
        self.may_send.store(false, Ordering::Relaxed);
    }

    /// Ends an attempt to connect. Moves the QP of an id to ERR, as librdmacm does; a QP that the
    /// program made without the id is the program's to move.
    pub(crate) fn fails_to_connect(&self, of_id: bool) {
        if !of_id {
            return self.awaits_no_connection();
        }
        self.states.lock().disconnected();
        // Refused if it is in ERR already.
        let _ = self.qp.to_error();
    }

    /// Checks that send requests may be posted: on the RoCE device not before RTS, on the iWARP
    /// device not before a connection is asked for, as nothing would ever complete them.
    fn check_may_send(&self) -> Result<(), Errno> {
        let Some(wired) = &self.wired else {
            if self.may_send.load(Ordering::Relaxed) {
                return Ok(());
            }
            let id = self.id();
            let reason = format_args!("QP {id} has no connection and none is asked for: no Sends");
            return Err(Errno::invalid(reason));
        };
        match wired.lock().state() {
            c::IBV_QPS_RTS | c::IBV_QPS_SQD | c::IBV_QPS_SQE | c::IBV_QPS_ERR => Ok(()),
            state => {
                let (id, state) = (self.id(), state_name(state));
                Err(Errno::invalid(format_args!("QP {id} is in {state}: it sends from RTS on")))
            }
        }
    }

    /// Its domain, if its requests are datagrams.
    pub(crate) fn sends_datagrams(&self) -> Option<PdId> {
        self.datagrams.then_some(self.domain)
    }

    /// Whether it is wired by hand.
    pub(crate) fn is_wired(&self) -> bool {
        self.wired.is_some()
    }

    /// Whether it is wired by hand and in RESET.
    fn is_reset(&self) -> bool {
        self.wired.as_ref().is_some_and(|wired| wired.lock().state() == c::IBV_QPS_RESET)
    }

    /// All requests that had begun before SQD are done.
    pub(crate) fn drained(&self) {
        self.draining.store(false, Ordering::Release);
        if self.tells_when_drained.load(Ordering::Acquire) {
            self.tell(c::IBV_EVENT_SQ_DRAINED);
        }
    }

    /// Its state and what it can hold (`ibv_query_qp(3)`).
    pub(crate) fn query(&self) -> Result<c::ibv_qp_attr, Errno> {
        let row = self.qp.query()?;
        if let Some(wired) = &self.wired {
            let mut states = *wired.lock();
            states.follow(row.state);
            let mut says = states.said();
            (says.cur_qp_state, says.cap) = (says.qp_state, self.granted);
            let drains = self.draining.load(Ordering::Acquire);
            says.sq_draining = u8::from(says.qp_state == c::IBV_QPS_SQD && drains);
            return Ok(says);
        }
        let states = *self.states.lock();
        let mut says: c::ibv_qp_attr = zeroed();
        says.qp_state = match row.state {
            // What the program has said is all there is to know.
            QpState::Idle | QpState::Rtr | QpState::Sqd | QpState::Sqe => states.state,
            QpState::Rts => c::IBV_QPS_RTS,
            QpState::Closing => c::IBV_QPS_SQD,
            QpState::Terminate | QpState::Error => c::IBV_QPS_ERR,
        };
        says.cur_qp_state = says.qp_state;
        says.qp_access_flags = states.access;
        says.min_rnr_timer = states.min_rnr_timer;
        says.timeout = states.timeout;
        says.cap = self.granted;
        says.path_mtu = crate::net::verbs_mtu();
        says.port_num = crate::context::PORT;
        let granted = |granted: u16, said: u8| match granted {
            0 => said,
            granted => u8::try_from(granted).unwrap_or(u8::MAX),
        };
        says.max_dest_rd_atomic = granted(row.ird, states.inbound_reads);
        says.max_rd_atomic = granted(row.ord, states.outbound_reads);
        Ok(says)
    }

    /// Returns the bytes of a message that fits into its request, to save the daemon the system
    /// call; `None` leaves the message to the daemon. A fenced message is left to it, because
    /// Reads and atomics ahead of the message may still write its bytes.
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

    /// Posts receives, as many as can be (`ibv_post_recv(3)`).
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
            let reason = format_args!("QP {id} is in RESET: it takes receives from INIT on");
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

    /// Waits, before the first completion of a connection is shown, until the program can read that
    /// the connection stands. A flushed request may never have had one.
    #[inline]
    pub(crate) fn await_established(&self, completion: &Completion) {
        if !self.established.load(Ordering::Relaxed)
            && completion.status != CompletionStatus::WrFlush
        {
            self.device.ids.await_established(self.id());
            self.established.store(true, Ordering::Relaxed);
        }
    }

    /// The send request that has completed, and with it all before it.
    pub(crate) fn send_done(&self, completion: &Completion) -> Posted {
        let mut sends = self.sends.lock();
        sends.settle_binds(completion.wr_id, completion.status == CompletionStatus::Success);
        sends.done(completion.wr_id)
    }

    /// The program's number of a receive that has completed.
    pub(crate) fn receive_done(&self, completion: &Completion) -> u64 {
        match (&self.srq, completion.srq) {
            (Some(srq), Some(_)) => srq.receive_done(completion),
            _ => self.receives.lock().done(completion.wr_id).wr_id,
        }
    }

    /// Takes it from the device, and waits until its events are acknowledged.
    pub(crate) fn destroy(&self) {
        self.detach();
        self.async_events.wait();
    }

    /// Takes it from the device: nothing of it completes any more, and it ends when the last who
    /// looks at it is done.
    pub(crate) fn detach(&self) {
        self.device.qps.write().remove(&self.id());
        self.device.ids.qp_destroyed(self.id());
        self.send_cq.forget(self);
        self.recv_cq.forget(self);
        let head = self.head();
        drop(self.context_events.take_back(|e| e.element.0 == head.0.cast()));
        // Others may look at it for a moment longer.
        self.qp.destroy();
        *self.pd.lock() = None;
    }
}

/// Immediate data as RFC 7306 has them: theirs are the first four of eight bytes.
fn on_the_wire(immediate: u32) -> [u8; 8] {
    let [a, b, c, d] = immediate.to_ne_bytes();
    [a, b, c, d, 0, 0, 0, 0]
}

/// The element that a response is placed in; of no bytes if there is none.
fn read_sink(elements: &[Sge]) -> Sge {
    elements.first().copied().unwrap_or(Sge { addr: 0, length: 0, lkey: 0 })
}

fn unsupported() -> Errno {
    Errno::invalid(format_args!("the opcode of the request is none of this device's"))
}

/// The depth of a queue, at least 1.
fn depth(name: &str, asked: u32, most: u32) -> Result<u32, Errno> {
    match asked <= most {
        true => Ok(asked.max(1)),
        false => Err(Errno::invalid(format_args!("{name} {asked} is above {most} (max_qp_wr)"))),
    }
}

/// An outstanding request, as the program posted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    /// Bytes of a send request.
    pub(crate) length: u32,
}

/// Numbers of requests that are outstanding, in order, each with the program's own.
#[derive(Debug)]
struct Numbers {
    posted: VecDeque<Posted>,
    /// The binds among them, by number.
    binds: VecDeque<(u64, PostedBind)>,
    /// Number of the first of them.
    first: u64,
    /// Most that may be outstanding.
    most: usize,
}

impl Numbers {
    fn new(most: u32) -> Self {
        // Filled as requests are posted: programs make deep queues and use little of them.
        Numbers { posted: VecDeque::new(), binds: VecDeque::new(), first: 0, most: most as usize }
    }

    /// The number of the next request, if there is room for one.
    fn next(&self) -> Result<u64, Errno> {
        match self.posted.len() < self.most {
            true => Ok(self.first + self.posted.len() as u64),
            false => {
                let most = self.most;
                let reason = format_args!("the queue is full: {most} requests are outstanding");
                Err(Errno::new(libc::ENOMEM, reason))
            }
        }
    }

    /// What is outstanding is gone.
    fn begin_anew(&mut self) {
        self.first += self.posted.len() as u64;
        self.posted.clear();
        self.binds.clear();
    }

    /// Requests that may still be posted.
    fn room(&self) -> usize {
        self.most - self.posted.len()
    }

    /// The next request was posted.
    fn push(&mut self, wr_id: u64, length: u32) {
        self.posted.push_back(Posted { wr_id, length });
    }

    /// The request of this number has completed. The binds before it have succeeded: what fails
    /// always completes.
    fn settle_binds(&mut self, number: u64, succeeded: bool) {
        while let Some((at, bind)) = self.binds.pop_front_if(|(at, _)| *at <= number) {
            if at == number && !succeeded {
                bind.failed();
            }
        }
    }

    /// The request of this number is done, and all before it. Returns it.
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
    fn a_completion_frees_the_slots_of_unsignaled_requests_before_it() {
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
