//! Posting requests (`ibv_post_send(3)`, `ibv_post_recv(3)`).

use std::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use rnic_client::{Posting, RecvRequest, RemoteAddr, SendRequest, Sge, Stag};

use super::QpBody;
use super::iwarp_states::state_name;
use super::numbers::Numbers;
use super::work::{MAX_INLINE, ReceiveWork, SendKind, SendWork};
use crate::c;
use crate::errno::Errno;

impl QpBody {
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
        match self.qp.posting() {
            Ok(posting) => self.post_with(posting, &mut numbers, work),
            Err(error) => (0, Err(error.into())),
        }
    }

    fn post_with(
        &self,
        mut posting: Posting<'_>,
        numbers: &mut Numbers,
        work: impl Iterator<Item = Result<SendWork, Errno>>,
    ) -> (usize, Result<(), Errno>) {
        let mut posted = 0;
        for request in work {
            let done = request.and_then(|work| self.post_one(&mut posting, numbers, &work));
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
                let window = work.window.as_ref().ok_or_else(|| unsupported(None))?;
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
            SendKind::Unsupported(opcode) => return Err(unsupported(opcode)),
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
        if let SendKind::Unsupported(opcode) = work.kind {
            return Err(unsupported(opcode));
        }
        if self.is_uc && work.kind.needs_reliability() {
            return Err(invalid!("a UC QP supports no Read, atomic or Send with Invalidate"));
        }
        let sends = matches!(work.kind, SendKind::Send | SendKind::SendImmediate { .. });
        if self.is_ud && !(sends && work.to.is_some()) {
            return Err(invalid!("a UD QP supports only Sends, each to an address handle"));
        }
        if matches!(work.kind, SendKind::SendImmediate { .. }) && self.roce.is_none() {
            return Err(invalid!("IBV_WR_SEND_WITH_IMM: the iWARP device lacks this opcode"));
        }
        let given = work.elements.list().len();
        let most = self.granted.max_send_sge;
        if given > most as usize {
            return Err(invalid!("num_sge {given} is above max_send_sge {most}"));
        }
        let awaits_response = matches!(work.kind, SendKind::Read { .. } | SendKind::Atomic { .. });
        if work.is_inline() && awaits_response {
            return Err(invalid!("IBV_SEND_INLINE is not valid for a Read or an atomic"));
        }
        if matches!(work.kind, SendKind::Atomic { .. }) && !self.adapter.limits().profile.atomics {
            return Err(invalid!("the profile of the device has no atomics (atomic_cap)"));
        }
        let scatters = matches!(work.kind, SendKind::Read { .. }) && self.roce.is_some();
        if awaits_response && !scatters && given > 1 {
            return Err(invalid!("num_sge {given}: this request supports only one SGE"));
        }
        let bytes = work.bytes();
        let most = self.granted.max_inline_data;
        if work.is_inline() && bytes > u64::from(most) {
            return Err(invalid!("{bytes} inline bytes, above max_inline_data {most}"));
        }
        Ok(())
    }

    /// Posts the requests built since `ibv_wr_start(3)`, all of them or none.
    pub(crate) fn post_started(&self) -> Result<(), Errno> {
        let started = std::mem::take(&mut *self.started.lock());
        started.iter().try_for_each(|work| self.check_served(work))?;
        // Must precede the lock of `sends`: a change of state locks the state first, then `sends`.
        self.check_may_send()?;
        let mut numbers = self.sends.lock();
        let room = numbers.room();
        if room < started.len() {
            return Err(errno!(libc::ENOMEM, "{} requests, but room for {room}", started.len()));
        }
        let mut posting = self.qp.posting()?;
        started.iter().filter_map(|work| work.kind.opcode()).try_for_each(|o| posting.admit(o))?;
        self.post_with(posting, &mut numbers, started.into_iter().map(Ok)).1
    }

    /// Checks that send requests may be posted: on the RoCE device from RTS on, on the iWARP device
    /// once a connection has been requested. Earlier requests would never complete.
    fn check_may_send(&self) -> Result<(), Errno> {
        self.adapter.check()?;
        let Some(roce) = &self.roce else {
            if self.may_send.load(Ordering::Relaxed) {
                return Ok(());
            }
            let id = self.id();
            return Err(invalid!(
                "QP {id} is neither connected nor connecting; post Sends after rdma_connect or \
                 rdma_accept"
            ));
        };
        match roce.lock().state() {
            c::IBV_QPS_RTS | c::IBV_QPS_SQD | c::IBV_QPS_SQE | c::IBV_QPS_ERR => Ok(()),
            state => {
                let id = self.id();
                let state = state_name(state);
                Err(invalid!("QP {id} is in {state}: Sends are allowed from RTS on"))
            }
        }
    }

    /// Returns true for a QP of the RoCE device in RESET.
    fn is_reset(&self) -> bool {
        self.roce.as_ref().is_some_and(|roce| roce.lock().state() == c::IBV_QPS_RESET)
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
        if let Err(errno) = self.adapter.check() {
            return (0, Err(errno));
        }
        if self.srq.is_some() {
            let id = self.id();
            return (0, Err(invalid!("QP {id} has a shared receive queue: post receives there")));
        }
        if self.is_reset() {
            let id = self.id();
            return (0, Err(invalid!("QP {id} is in RESET: receives are allowed from INIT on")));
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

fn unsupported(opcode: Option<u32>) -> Errno {
    match opcode {
        Some(opcode) => invalid!("opcode {opcode}: the device has no such request"),
        None => invalid!("a call that describes the request has failed"),
    }
}
