//! The state of one QP.

use std::sync::Arc;
use std::time::Duration;

use super::arrival::{Acknowledgement, Arrival};
use super::delay_line::DelayLine;
use super::shared::EmulatedLink;
use crate::engine::charge::{Charges, StreamCharge};
use crate::engine::datagram::in_flight::DelayedDatagrams;
use rnic_abi::faults::FaultName;
use rnic_abi::types::{QpId, SessionId, Time};

/// State of a QP whose link is emulated, or whose peer's link on the direct path is.
#[derive(Default)]
pub(in crate::engine) struct Emulation {
    /// Link for data that the QP sends. `None` if only its peer has an emulated link, or if the
    /// link was removed and the lines are not empty yet.
    pub(super) link: Option<Arc<EmulatedLink>>,
    /// Units sent, which select their jitter.
    pub(super) units: u64,
    /// Messages or datagrams sent, which select their fate.
    pub(super) packets: u64,
    /// Number of packets whose fate was recorded.
    pub(super) reports: u32,
    /// Request whose fate is decided.
    pub(super) decided: Option<u64>,
    /// Time at which the link accepts more. Until the QP has nothing more to send, its bytes count
    /// as ready at this time, so that late turns do not lower the rate.
    pub(super) resumes: Option<Time>,
    /// The deadline that is set.
    pub(super) deadline: Option<Time>,
    /// Segments, acknowledgements and signals of the other QP of the direct path.
    pub(super) arrivals: DelayLine<Arrival>,
    /// The other QP waits for room in `arrivals`.
    pub(super) sender_waits: bool,
    /// The rule that stalls the link of the other QP of the direct path.
    pub(super) peer_stalled: Option<FaultName>,
    pub(super) acknowledgement: Acknowledgement,
    pub datagrams: DelayedDatagrams,
    /// Charge of the session for units in flight to this QP or, over TCP and on UD, from it.
    pub(super) charge: StreamCharge,
}

impl Emulation {
    /// Returns true if the link accepts another unit now.
    pub(in crate::engine) fn is_open(&mut self, now: Time) -> bool {
        let Some(link) = &self.link else { return true };
        if link.is_stalled() {
            return false;
        }
        let free_at = link.free_at().unwrap_or_default();
        let is_open = free_at <= now.after(AHEAD);
        if !is_open {
            self.resumes = Some(Time(free_at.0 - nanoseconds(AHEAD)));
        }
        is_open
    }

    /// Returns the rule that stalls the link.
    pub(super) fn stalled(&self) -> Option<FaultName> {
        self.link.as_ref().filter(|link| link.is_stalled()).map(|link| link.fault().name)
    }

    /// Sends a unit. Returns the time at which it arrives, unless an earlier unit arrives later.
    pub(in crate::engine) fn send(&mut self, now: Time, bytes: usize, qp: QpId) -> Time {
        let Some(link) = &self.link else { return now };
        let left = link.send(self.ready_at(now), bytes);
        let delay = link.delay(qp, self.units);
        self.units += 1;
        left.after(delay)
    }

    /// Returns how many bytes a QP may hand to the link at once, at least 1.
    pub(in crate::engine) fn allowance(&self, now: Time) -> usize {
        let ready = self.ready_at(now);
        self.link.as_ref().map_or(usize::MAX, |link| link.bytes_between(ready, now.after(AHEAD)))
    }

    /// Returns the time at which bytes sent now count as ready.
    fn ready_at(&self, now: Time) -> Time {
        let earliest = Time(now.0.saturating_sub(nanoseconds(CATCH_UP)));
        self.resumes.map_or(now, |at| at.clamp(earliest, now))
    }

    /// Returns true if a unit may enter this line: it has room, and its session for more memory, or
    /// nothing is in flight.
    pub(in crate::engine) fn has_room<T>(
        &self,
        line: &DelayLine<T>,
        session: SessionId,
        held: &Charges,
    ) -> bool {
        // A QP uses only one line.
        let more = line.room() + 1;
        line.is_empty() || line.has_room() && held.may_hold(&self.charge, session, more)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Time before the link is free at which the QP hands it the next unit, so that a turn that is a
/// little late leaves no gap.
const AHEAD: Duration = Duration::from_micros(100);
/// Maximum time by which a turn may be late without lowering the rate.
const CATCH_UP: Duration = Duration::from_millis(100);
