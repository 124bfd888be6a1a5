//! Time limits of an RC or UC QP for its peer: for an acknowledgement, or for a stream that could
//! carry it (IBTA specification, volume 1, section 9.7.6.1.3), and for a receive (9.7.5.2.8).
//!
//! A RoCE adapter retransmits and counts retries. Here TCP retransmits, so only the total time
//! after which an adapter gives up applies.

use std::time::Duration;

use super::RcState;
use super::wait::Wait;
use crate::engine::deadlines::Due;
use crate::engine::fault_rules::rule_of_fault;
use crate::engine::link::tcp::TcpLink;
use crate::engine::phase::StreamPhase;
use crate::engine::qp::Qp;
use crate::engine::reason::Reason;
use crate::engine::requester::RequestError;
use crate::engine::schedule::REQUEST_COST;
use crate::engine::send_queue::SendQueue;
use crate::engine::state::EngineState;
use crate::engine::transport::Transport;
use rnic_abi::abi::control::DisconnectMode;
use rnic_abi::faults::FaultName;
use rnic_abi::types::Time;

impl Qp {
    /// Starts or stops the clock of requests that are posted or in flight. Called after each
    /// turn and when a stream begins or ends.
    #[inline]
    pub(in crate::engine) fn watch(&mut self, engine: &mut EngineState) {
        if self.rc.is_some() {
            self.set_clock(engine);
        }
    }

    /// Restarts the clock after progress: requests in flight get their full time.
    #[inline]
    pub(in crate::engine) fn restart_clock(&mut self, engine: &mut EngineState) {
        let Some(rc) = &self.rc else { return };
        // An answer about other requests does not extend the time for a receive.
        if !rc.clock.is_some_and(|(wait, _)| wait == Wait::Receive) {
            self.stop_clock(engine);
        }
        self.set_clock(engine);
    }

    /// Updates the clock after a call to the socket. The time limit for bytes that TCP has not
    /// accepted runs from when it last accepted any.
    #[inline]
    pub(in crate::engine) fn update_clock_after_send(
        &mut self,
        engine: &mut EngineState,
        progress: bool,
    ) {
        if progress && self.link.tcp().is_some_and(TcpLink::awaits_socket) {
            self.restart_clock(engine);
        } else {
            self.watch(engine);
        }
    }

    fn set_clock(&mut self, engine: &mut EngineState) {
        self.emit_drained(engine);
        let wanted = self.time_left(engine.now);
        let Some(rc) = &mut self.rc else { return };
        let due = Due::RcClock(self.core.key);
        let runs = rc.clock.map(|(wait, _)| wait);
        if runs == wanted.map(|(wait, _)| wait) {
            return;
        }
        if let Some((_, at)) = rc.clock.take() {
            engine.deadlines.clear(at, due);
        }
        if let Some((wait, time)) = wanted {
            let at = engine.now.after(time);
            rc.clock = Some((wait, at));
            engine.deadlines.set(at, due);
        }
    }

    /// Stops the clock: the QP ends, or another clock begins to run.
    pub(in crate::engine) fn stop_clock(&mut self, engine: &mut EngineState) {
        if let Some(rc) = &mut self.rc
            && let Some((_, at)) = rc.clock.take()
        {
            engine.deadlines.clear(at, Due::RcClock(self.core.key));
        }
    }

    /// Returns the rule that has stopped this QP or its peer, or has stalled the link of either.
    fn stopped_by(&self) -> Option<FaultName> {
        self.core.stopped.or(self.core.peer_stopped).or_else(|| self.stalled_by())
    }

    /// Returns the current wait and its time limit, or `None` without a wait or limit.
    fn time_left(&mut self, now: Time) -> Option<(Wait, Duration)> {
        let sends = self.send_queue == SendQueue::Works;
        let transport = self.core.transport;
        let is_stopped = self.stopped_by().is_some();
        if let Some(deadline) = self.core.moves_to_error {
            return Some((Wait::Error, deadline.since(now)));
        }
        let Qp { rc: Some(rc), requester, responder, life, link, .. } = self else {
            return None;
        };
        if is_stopped && !life.phase().flushes() {
            // A UC QP completes its requests, except a request that has been sent in part.
            let reliable = transport.acknowledges();
            let is_inside = !reliable && requester.message().is_some();
            let has_work =
                requester.is_under_way() || sends && rc.begins() && requester.has_posted();
            // The time limit of the program, without the allowances for a real network.
            let least = if reliable { Duration::ZERO } else { STOPPED_UC };
            let waits = has_work && !is_inside;
            let time = if waits { rc.time_limit(transport, least) } else { None };
            return time.map(|time| (Wait::Stopped, time));
        }
        match life.phase() {
            StreamPhase::Unlinked => {
                let has_work =
                    requester.is_under_way() || sends && rc.begins() && requester.has_posted();
                let time = if has_work { rc.retry_time(transport) } else { None };
                time.map(|time| (Wait::Stream, time))
            }
            StreamPhase::AwaitFirstFpdu | StreamPhase::Open => {
                if rc.peer_waits {
                    return rc.rnr_time().map(|time| (Wait::Receive, time));
                }
                // The peer cannot be blamed for an answer that this side does not read.
                let silent = responder.reads()
                    && (requester.awaits_peer() || link.tcp().is_some_and(TcpLink::awaits_socket));
                if silent {
                    rc.answer_time(transport).map(|time| (Wait::Answer, time))
                } else {
                    requester
                        .can_delay_ack_request()
                        .then_some((Wait::AckRequest, ACK_REQUEST_DELAY))
                }
            }
            _ => None,
        }
    }

    /// Handles the end of the time limit.
    pub(in crate::engine) fn clock_expired(&mut self, engine: &mut EngineState) {
        let Some(rc) = &mut self.rc else { return };
        let Some((wait, _)) = rc.clock.take() else { return };
        match wait {
            Wait::Stream | Wait::Stopped if !self.core.transport.acknowledges() => {
                self.complete_posted(engine);
            }
            Wait::Stopped => {
                let by = self.stopped_by();
                let why = by.map_or_else(|| "stopped".to_owned(), rule_of_fault);
                self.fail_oldest(engine, &why);
            }
            Wait::Stream => {
                let why = rc.why.clone();
                self.fail_oldest(engine, &why);
            }
            Wait::Receive => {
                if let Some(seq) = self.requester.oldest_send() {
                    let reason = Reason::ReceiverNotReady;
                    self.request_error(engine, RequestError::Failed { seq, reason });
                }
            }
            Wait::Answer => self.lost(engine, "the peer has been silent for too long"),
            Wait::Error => self.disconnect(engine, DisconnectMode::Abort),
            Wait::AckRequest => {
                self.requester.request_ack_now();
                engine.wake(&mut self.core);
            }
        }
    }

    /// Completes posted requests of a UC QP for which no stream was established in time. They count
    /// as sent.
    fn complete_posted(&mut self, engine: &mut EngineState) {
        for _ in 0..MAX_DROPPED {
            match self.requester.take_oldest_posted(&mut self.core, engine) {
                Ok(true) => self.core.turn.charge(REQUEST_COST),
                Ok(false) => break,
                Err(error) => return self.request_error(engine, error),
            }
        }
        self.retire(engine);
        self.watch(engine);
    }

    /// Fails the oldest request, which was not acknowledged, and with it the QP.
    pub(super) fn fail_oldest(&mut self, engine: &mut EngineState, why: &str) {
        match self.requester.take_oldest(&mut self.core, engine) {
            Ok(Some(seq)) => {
                let wr_id = self.requester.wr_id(seq).unwrap_or_default();
                let reason = Reason::NoAcknowledgement;
                let record = self.life.record_retry_exceeded(&self.core, engine, wr_id, why);
                self.requester.failed(seq, reason.status(), record);
                self.finish(engine, true);
                self.retire(engine);
            }
            // The completion needs a CQ slot. The doorbell of the CQ causes a turn, which restarts
            // the clock.
            Ok(None) => {}
            Err(error) => self.request_error(engine, error),
        }
    }
}

impl RcState {
    /// Returns the time limit for a stream and an acknowledgement, or `None` if unlimited.
    fn retry_time(&self, transport: Transport) -> Option<Duration> {
        // Unlike a packet, a stream takes time to set up.
        let least = if self.peer.is_none() { FIRST_STREAM } else { NEXT_STREAM };
        self.time_limit(transport, least)
    }

    /// Returns the time for which a peer with a stream may be silent, or `None` if unlimited.
    fn answer_time(&self, transport: Transport) -> Option<Duration> {
        self.time_limit(transport, MIN_ANSWER_TIME)
    }

    /// Returns the time limit for acknowledgements, at least `least`. Without acknowledgements it
    /// is `least`.
    fn time_limit(&self, transport: Transport, least: Duration) -> Option<Duration> {
        if transport.acknowledges() {
            self.timeout().map(|time| time.max(least))
        } else {
            Some(least)
        }
    }

    /// Returns the time after which a RoCE adapter gives up, or `None` if never.
    fn timeout(&self) -> Option<Duration> {
        let sending = self.sending?;
        if sending.timeout == 0 {
            return None;
        }
        let once = Duration::from_nanos(4096 << sending.timeout.min(31));
        Some(once.saturating_mul(u32::from(sending.retry_count.min(7)) + 1))
    }

    /// Returns the time for which a RoCE adapter waits after one RNR NAK of this side.
    pub(in crate::engine) fn rnr_timer(&self) -> Duration {
        rnr_timer(self.min_rnr_timer)
    }

    /// Returns the time for which the peer may lack a receive, or `None` if unlimited.
    fn rnr_time(&self) -> Option<Duration> {
        let sending = self.sending?;
        let peer = self.peer?;
        if sending.rnr_retry >= RNR_RETRY_INFINITE {
            return None;
        }
        let once = rnr_timer(peer.min_rnr_timer);
        Some(once.saturating_mul(u32::from(sending.rnr_retry)))
    }
}

/// Returns the wait after an RNR NAK with this timer code.
fn rnr_timer(code: u8) -> Duration {
    Duration::from_micros(RNR_TIMERS[usize::from(code) % 32]).max(MIN_RNR_TIMER)
}

/// Delay of the acknowledgement request for unsignaled requests. Requests sent within it need no
/// acknowledgement request of their own, and a failure is reported at most this much later.
const ACK_REQUEST_DELAY: Duration = Duration::from_millis(1);
/// Time after which requests of a stopped UC QP complete. If their CQ is full, this is the interval
/// of further attempts.
const STOPPED_UC: Duration = Duration::from_millis(1);
/// Maximum number of UC requests completed at a time without a stream.
const MAX_DROPPED: u32 = 1024;
/// RNR retry count that means unlimited retries.
const RNR_RETRY_INFINITE: u8 = 7;
/// Minimum time for the first stream to be set up.
const FIRST_STREAM: Duration = Duration::from_secs(1);
/// Minimum time for a later stream to be set up.
const NEXT_STREAM: Duration = Duration::from_millis(200);
/// Minimum time for which a peer with a stream may be silent. Its answer may be queued behind
/// megabytes on a slow network, and a busy host may delay its process.
const MIN_ANSWER_TIME: Duration = Duration::from_secs(30);

/// Shortest wait after an RNR NAK. A requester may wait longer than the timer (IBTA specification,
/// volume 1, section 9.7.5.2.8), and the kernel's rxe waits at least for one tick of the kernel. A
/// busy host may run the peer's program that late.
const MIN_RNR_TIMER: Duration = Duration::from_millis(1);
/// RNR NAK timer values by code, in microseconds.
const RNR_TIMERS: [u64; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
    5120, 7680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760,
    327_680, 491_520,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_timers_last_at_least_a_millisecond() {
        let micros = [0, 1, 13, 14, 15, 31].map(|code| rnr_timer(code).as_micros());
        assert_eq!(micros, [655_360, 1000, 1000, 1280, 1920, 491_520]);
    }
}
