//! Who has how much: counts per session and for the device, and the limits they may not pass.
//!
//! Every object is charged here before it is made and credited after it is gone. The manager
//! calls it; it knows kinds and numbers, not objects.

use rnic_core::abi::control::Refusal;

use super::Capacity;
use crate::config::{Limits, Totals};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Protection domains.
    Pds,
    /// Segments.
    Segments,
    /// Octets of segments.
    SegmentBytes,
    /// Memory regions.
    Mrs,
    /// Completion channels.
    Channels,
    /// Completion queues.
    Cqs,
    /// Queue pairs.
    Qps,
    /// Bound addresses.
    Listeners,
    /// Octets of arenas.
    ArenaBytes,
}

impl Kind {
    const COUNT: usize = 9;

    /// Every kind, in order.
    pub const ALL: [Kind; Kind::COUNT] = [
        Kind::Pds,
        Kind::Segments,
        Kind::SegmentBytes,
        Kind::Mrs,
        Kind::Channels,
        Kind::Cqs,
        Kind::Qps,
        Kind::Listeners,
        Kind::ArenaBytes,
    ];

    /// The key under `[limits]` and `[limits.session]`.
    pub fn key(self) -> &'static str {
        match self {
            Kind::Pds => "pds",
            Kind::Segments => "segments",
            Kind::SegmentBytes => "segment_bytes",
            Kind::Mrs => "mrs",
            Kind::Channels => "channels",
            Kind::Cqs => "cqs",
            Kind::Qps => "qps",
            Kind::Listeners => "listeners",
            Kind::ArenaBytes => "arena_bytes",
        }
    }

    fn limit(self, totals: &Totals) -> u64 {
        match self {
            Kind::Pds => totals.pds.into(),
            Kind::Segments => totals.segments.into(),
            Kind::SegmentBytes => totals.segment_bytes,
            Kind::Mrs => totals.mrs.into(),
            Kind::Channels => totals.channels.into(),
            Kind::Cqs => totals.cqs.into(),
            Kind::Qps => totals.qps.into(),
            Kind::Listeners => totals.listeners.into(),
            Kind::ArenaBytes => totals.arena_bytes,
        }
    }
}

/// Counts of every kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts([u64; Kind::COUNT]);

impl Counts {
    /// How much of `kind` there is.
    pub fn of(&self, kind: Kind) -> u64 {
        self.0[kind as usize]
    }
}

/// The device's counts and the limits in force.
#[derive(Debug)]
pub struct Ledger {
    session: Totals,
    device: Totals,
    qps_key: String,
    used: Counts,
}

impl Ledger {
    /// Nothing used yet.
    pub fn new(limits: &Limits, capacity: &Capacity) -> Self {
        let qps_key = capacity.qps_key(limits.device.qps);
        let device = Totals { qps: capacity.qps, ..limits.device.clone() };
        Ledger { session: limits.session.clone(), device, qps_key, used: Counts::default() }
    }

    /// Charges `amount` to a session and the device, or names the limit that forbids it.
    pub fn charge(&mut self, own: &mut Counts, kind: Kind, amount: u64) -> Result<(), Refusal> {
        let key = format!("limits.session.{}", kind.key());
        check(own, kind, amount, kind.limit(&self.session), || key)?;
        let qps_key = &self.qps_key;
        check(&self.used, kind, amount, kind.limit(&self.device), || match kind {
            Kind::Qps => qps_key.clone(),
            _ => format!("limits.{}", kind.key()),
        })?;
        own.0[kind as usize] += amount;
        self.used.0[kind as usize] += amount;
        Ok(())
    }

    /// Gives back what was charged.
    pub fn credit(&mut self, own: &mut Counts, kind: Kind, amount: u64) {
        debug_assert!(own.of(kind) >= amount, "{kind:?} credited without a charge");
        own.0[kind as usize] = own.of(kind).saturating_sub(amount);
        self.used.0[kind as usize] = self.used.of(kind).saturating_sub(amount);
    }

    /// Gives back everything a session was charged.
    pub fn credit_all(&mut self, own: &mut Counts) {
        for (used, own) in self.used.0.iter_mut().zip(&mut own.0) {
            *used = used.saturating_sub(*own);
            *own = 0;
        }
    }

    /// How much the device has given.
    pub fn used(&self) -> &Counts {
        &self.used
    }

    /// How much the device may give.
    pub fn device_limit(&self, kind: Kind) -> u64 {
        kind.limit(&self.device)
    }

    /// What remains of `kind` for a session with these counts.
    pub fn room(&self, own: &Counts, kind: Kind) -> u64 {
        let session = kind.limit(&self.session).saturating_sub(own.of(kind));
        session.min(kind.limit(&self.device).saturating_sub(self.used.of(kind)))
    }
}

fn check(
    counts: &Counts,
    kind: Kind,
    amount: u64,
    limit: u64,
    key: impl FnOnce() -> String,
) -> Result<(), Refusal> {
    let used = counts.of(kind);
    match used.checked_add(amount) {
        Some(sum) if sum <= limit => Ok(()),
        _ => Err(Refusal::Limit { key: key(), limit, used, wanted: amount }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn ledger(nofile: u64) -> Ledger {
        let mut config = Config::default();
        config.limits.session.pds = 2;
        config.limits.device.pds = 3;
        Ledger::new(&config.limits, &Capacity::derive(&config, nofile, 1))
    }

    #[test]
    fn the_session_limit_and_the_device_limit_are_named() {
        let mut ledger = ledger(1 << 20);
        let (mut a, mut b) = (Counts::default(), Counts::default());
        assert_eq!(ledger.charge(&mut a, Kind::Pds, 2), Ok(()));
        let e = ledger.charge(&mut a, Kind::Pds, 1).map_err(|e| e.to_string());
        let text = "limits.session.pds = 2 reached (asked for 1 more, 2 in use)";
        assert_eq!(e, Err(text.to_owned()));
        assert_eq!(ledger.charge(&mut b, Kind::Pds, 1), Ok(()));
        let e = ledger.charge(&mut b, Kind::Pds, 1).map_err(|e| e.to_string());
        assert_eq!(e, Err("limits.pds = 3 reached (asked for 1 more, 3 in use)".to_owned()));
        ledger.credit_all(&mut a);
        assert_eq!((ledger.used().of(Kind::Pds), a.of(Kind::Pds)), (1, 0));
        assert_eq!(ledger.room(&b, Kind::Pds), 1);
        ledger.credit(&mut b, Kind::Pds, 1);
        assert_eq!(ledger.used(), &Counts::default());
    }

    #[test]
    fn a_refused_charge_changes_nothing_and_sums_do_not_wrap() {
        let mut ledger = ledger(1 << 20);
        let mut own = Counts::default();
        assert_eq!(ledger.charge(&mut own, Kind::SegmentBytes, 4096), Ok(()));
        assert!(ledger.charge(&mut own, Kind::SegmentBytes, u64::MAX).is_err());
        assert_eq!(own.of(Kind::SegmentBytes), 4096);
        assert_eq!(ledger.used().of(Kind::SegmentBytes), 4096);
    }

    #[test]
    fn queue_pairs_lowered_by_descriptors_are_refused_by_that_name() {
        let mut ledger = ledger(68);
        let mut own = Counts::default();
        assert_eq!(ledger.charge(&mut own, Kind::Qps, 3), Ok(()));
        let e = ledger.charge(&mut own, Kind::Qps, 1).map_err(|e| e.to_string());
        assert!(e.is_err_and(|e| e.contains("RLIMIT_NOFILE = 68")));
    }
}
