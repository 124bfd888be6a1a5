//! How long a queue pair that is wired by hand waits for its peer: for an acknowledgement while
//! there is no stream (IBTA specification, volume 1, section 9.7.6.1.3), and for a receive
//! (9.7.5.2.8).
//!
//! An adapter sends once more and counts; here TCP does that, or nobody, so that what remains is
//! the time after which the adapter would have given up.

use std::time::Duration;

use super::Wired;
use super::wait::Wait;
use crate::engine::deadlines::Due;
use crate::engine::link::tcp::TcpLink;
use crate::engine::phase::StreamPhase;
use crate::engine::qp::Qp;
use crate::engine::reason::Reason;
use crate::engine::requester::RequestError;
use crate::engine::schedule::REQUEST_COST;
use crate::engine::send_queue::SendQueue;
use crate::engine::state::EngineState;

impl Qp {
    /// Starts the clock that what is posted or under way asks for, or stops it. Called after each
    /// turn and when a stream comes or goes.
    #[inline]
    pub(in crate::engine) fn watch(&mut self, engine: &mut EngineState) {
        if self.wired.is_some() {
            self.look_at_clock(engine);
        }
    }

    /// The peer has answered: what is under way now has its time from now on.
    #[inline]
    pub(in crate::engine) fn watch_anew(&mut self, engine: &mut EngineState) {
        let Some(wired) = &self.wired else { return };
        // What it says of other requests gives it no more time for a receive.
        if !wired.clock.is_some_and(|(wait, _)| wait == Wait::Receive) {
            self.stop_clock(engine);
        }
        self.look_at_clock(engine);
    }

    /// A call to the socket is over: what TCP does not take waits from the last byte on that it
    /// took.
    #[inline]
    pub(in crate::engine) fn watch_sent(&mut self, engine: &mut EngineState, progress: bool) {
        match progress && self.link.tcp().is_some_and(TcpLink::awaits_socket) {
            true => self.watch_anew(engine),
            false => self.watch(engine),
        }
    }

    fn look_at_clock(&mut self, engine: &mut EngineState) {
        self.tell_of_drain(engine);
        let wanted = self.time_left();
        let Some(wired) = &mut self.wired else { return };
        let due = Due::Wired(self.core.key);
        let runs = wired.clock.map(|(wait, _)| wait);
        if runs == wanted.map(|(wait, _)| wait) {
            return;
        }
        if let Some((_, at)) = wired.clock.take() {
            engine.deadlines.clear(at, due);
        }
        if let Some((wait, time)) = wanted {
            let at = engine.now.after(time);
            wired.clock = Some((wait, at));
            engine.deadlines.set(at, due);
        }
    }

    /// Stops the clock: the queue pair goes, or another one begins to run.
    pub(in crate::engine) fn stop_clock(&mut self, engine: &mut EngineState) {
        if let Some(wired) = &mut self.wired
            && let Some((_, at)) = wired.clock.take()
        {
            engine.deadlines.clear(at, Due::Wired(self.core.key));
        }
    }

    /// What is waited for and how long; none if for ever, or if there is nothing.
    fn time_left(&mut self) -> Option<(Wait, Duration)> {
        let sends = self.send_queue == SendQueue::Works;
        let Qp { wired: Some(wired), requester, responder, life, link, .. } = self else {
            return None;
        };
        match life.phase() {
            StreamPhase::Unlinked => {
                let has_work =
                    requester.is_under_way() || sends && wired.begins() && requester.has_posted();
                let time = if has_work { wired.retry_time() } else { None };
                time.map(|time| (Wait::Stream, time))
            }
            StreamPhase::AwaitFirstFpdu | StreamPhase::Open => {
                if wired.peer_waits {
                    return wired.rnr_time().map(|time| (Wait::Receive, time));
                }
                // What this side does not read it cannot hold against the peer.
                let silent = responder.reads()
                    && (requester.awaits_peer() || link.tcp().is_some_and(TcpLink::awaits_socket));
                match silent {
                    true => wired.answer_time().map(|time| (Wait::Answer, time)),
                    false => requester.can_ask_later().then_some((Wait::Question, QUESTION)),
                }
            }
            _ => None,
        }
    }

    /// A clock has run out.
    pub(in crate::engine) fn clock_ran_out(&mut self, engine: &mut EngineState) {
        let Some(wired) = &mut self.wired else { return };
        let Some((wait, _)) = wired.clock.take() else { return };
        match wait {
            Wait::Stream if wired.unreliable => self.lose_posted(engine),
            Wait::Stream => {
                let why = wired.why.clone();
                self.fail_oldest(engine, &why);
            }
            Wait::Receive => {
                if let Some(seq) = self.requester.oldest_send() {
                    let reason = Reason::ReceiverNotReady;
                    self.request_error(engine, RequestError::Failed { seq, reason });
                }
            }
            Wait::Answer => self.lost(engine, "the peer has been silent for too long"),
            Wait::Question => {
                self.requester.ask_now();
                engine.wake(&mut self.core);
            }
        }
    }

    /// No stream has come in time for requests that need no acknowledgement: they are sent as far
    /// as anybody will know.
    fn lose_posted(&mut self, engine: &mut EngineState) {
        for _ in 0..LOST_AT_ONCE {
            match self.requester.take_oldest_posted(&mut self.core, engine) {
                Ok(true) => self.core.turn.charge(REQUEST_COST),
                Ok(false) => break,
                Err(error) => return self.request_error(engine, error),
            }
        }
        self.retire(engine);
        self.watch(engine);
    }

    /// Nobody has acknowledged the oldest request in time: it fails, and with it the queue pair.
    pub(super) fn fail_oldest(&mut self, engine: &mut EngineState, why: &str) {
        match self.requester.take_oldest(&mut self.core, engine) {
            Ok(Some(seq)) => {
                let wr_id = self.requester.wr_id(seq).unwrap_or_default();
                let reason = Reason::NoAcknowledgement;
                let record = self.life.record_silence(&self.core, engine, wr_id, why);
                self.requester.failed(seq, reason.status(), record);
                self.finish(engine, true);
                self.retire(engine);
            }
            // No room for its completion: the bell of the CQ brings a turn, and that the clock.
            Ok(None) => {}
            Err(error) => self.request_error(engine, error),
        }
    }
}

impl Wired {
    /// How long no acknowledgement is waited for; none if for ever.
    fn retry_time(&self) -> Option<Duration> {
        // Streams take time to come about, which packets do not.
        let least = if self.peer.is_none() { FIRST_STREAM } else { NEXT_STREAM };
        match self.unreliable {
            true => Some(least),
            false => self.timeout().map(|time| time.max(least)),
        }
    }

    /// How long a peer that has a stream may say nothing; none if for ever.
    fn answer_time(&self) -> Option<Duration> {
        match self.unreliable {
            true => Some(SILENCE),
            false => self.timeout().map(|time| time.max(SILENCE)),
        }
    }

    /// After which time an adapter gives up; none if never.
    fn timeout(&self) -> Option<Duration> {
        let sending = self.sending?;
        if sending.timeout == 0 {
            return None;
        }
        let once = Duration::from_nanos(4096 << sending.timeout.min(31));
        Some(once.saturating_mul(u32::from(sending.retry_count.min(7)) + 1))
    }

    /// How long the peer may be without a receive; none if for ever.
    fn rnr_time(&self) -> Option<Duration> {
        let (sending, peer) = (self.sending?, self.peer?);
        if sending.rnr_retry >= FOR_EVER {
            return None;
        }
        let once = Duration::from_micros(RNR_TIMERS[usize::from(peer.min_rnr_timer) % 32]);
        Some(once.saturating_mul(u32::from(sending.rnr_retry)))
    }
}

/// How long the peer is not asked about requests of whose success nobody wants to hear: what is
/// sent in this time costs no question of its own, and a failure is told no later than that.
const QUESTION: Duration = Duration::from_millis(1);
/// Requests that are lost at a time.
const LOST_AT_ONCE: u32 = 1024;
/// Number of RNR retries that means without end.
const FOR_EVER: u8 = 7;
/// Least time in which the first stream has to come about.
const FIRST_STREAM: Duration = Duration::from_secs(1);
/// Least time in which another one has to.
const NEXT_STREAM: Duration = Duration::from_millis(200);
/// Least time that a peer may say nothing while there is a stream to it: what it has to say may be
/// behind megabytes in slow networks, and machines that are busy let a process wait.
const SILENCE: Duration = Duration::from_secs(30);

/// Times of the RNR NAK timer by code, in microseconds.
const RNR_TIMERS: [u64; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
    5120, 7680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760,
    327_680, 491_520,
];
