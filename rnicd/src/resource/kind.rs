//! What is counted, and which keys of the configuration limit it.

use crate::config::{Totals, TotalsPatch, UserLimits, UserPatch};

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Sessions.
    Sessions,
    /// Protection domains.
    Pds,
    /// Segments.
    Segments,
    /// Bytes of segments.
    SegmentBytes,
    /// Memory regions.
    Mrs,
    /// Memory windows.
    Windows,
    /// Completion channels.
    Channels,
    /// Completion queues.
    Cqs,
    /// Entries of completion queues.
    CqEntries,
    /// Queue pairs.
    Qps,
    /// Shared receive queues.
    Srqs,
    /// Bound addresses.
    Listeners,
    /// Bytes of arenas.
    ArenaBytes,
    /// Inbound reads granted to connections.
    Ird,
    /// Outbound reads granted to connections.
    Ord,
    /// Processes that copy for attached clients.
    Movers,
}

impl Kind {
    /// Each kind, in the order of its number.
    pub const ALL: [Kind; 16] = [
        Kind::Sessions,
        Kind::Pds,
        Kind::Segments,
        Kind::SegmentBytes,
        Kind::Mrs,
        Kind::Windows,
        Kind::Channels,
        Kind::Cqs,
        Kind::CqEntries,
        Kind::Qps,
        Kind::Srqs,
        Kind::Listeners,
        Kind::ArenaBytes,
        Kind::Ird,
        Kind::Ord,
        Kind::Movers,
    ];
    pub const COUNT: usize = Kind::ALL.len();

    /// The key under `[limits]`, `[limits.user]` and `[limits.session]`.
    pub fn key(self) -> &'static str {
        match self {
            Kind::Sessions => "sessions",
            Kind::Pds => "pds",
            Kind::Segments => "segments",
            Kind::SegmentBytes => "segment_bytes",
            Kind::Mrs => "mrs",
            Kind::Windows => "windows",
            Kind::Channels => "channels",
            Kind::Cqs => "cqs",
            Kind::CqEntries => "cq_entries_total",
            Kind::Qps => "qps",
            Kind::Srqs => "srqs",
            Kind::Listeners => "listeners",
            Kind::ArenaBytes => "arena_bytes",
            Kind::Ird => "ird",
            Kind::Ord => "ord",
            Kind::Movers => "movers",
        }
    }

    /// The limit of the device or of a session; none if only users have one.
    pub fn of_totals(self, totals: &Totals) -> Option<u64> {
        totals.each().into_iter().find(|(key, _)| *key == self.key()).map(|(_, value)| value)
    }

    /// The limit of a user.
    pub fn of_user(self, user: &UserLimits) -> u64 {
        match self {
            Kind::Sessions => user.sessions.into(),
            Kind::Ird => user.ird.into(),
            Kind::Ord => user.ord.into(),
            Kind::Movers => user.movers.into(),
            // Every other kind is a total.
            _ => self.of_totals(&user.totals).unwrap_or(UNLIMITED),
        }
    }

    /// What a rule sets for sessions.
    pub fn of_patch(self, patch: &TotalsPatch) -> Option<u64> {
        match self {
            Kind::Sessions | Kind::Ird | Kind::Ord | Kind::Movers => None,
            Kind::Pds => patch.pds.map(u64::from),
            Kind::Segments => patch.segments.map(u64::from),
            Kind::SegmentBytes => patch.segment_bytes,
            Kind::Mrs => patch.mrs.map(u64::from),
            Kind::Windows => patch.windows.map(u64::from),
            Kind::Channels => patch.channels.map(u64::from),
            Kind::Cqs => patch.cqs.map(u64::from),
            Kind::CqEntries => patch.cq_entries_total.map(u64::from),
            Kind::Qps => patch.qps.map(u64::from),
            Kind::Srqs => patch.srqs.map(u64::from),
            Kind::Listeners => patch.listeners.map(u64::from),
            Kind::ArenaBytes => patch.arena_bytes,
        }
    }

    /// What a rule sets for users.
    pub fn of_user_patch(self, patch: &UserPatch) -> Option<u64> {
        match self {
            Kind::Sessions => patch.sessions.map(u64::from),
            Kind::Ird => patch.ird.map(u64::from),
            Kind::Ord => patch.ord.map(u64::from),
            Kind::Movers => patch.movers.map(u64::from),
            _ => self.of_patch(&patch.totals),
        }
    }
}

/// Where a kind has no limit of its own.
pub const UNLIMITED: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_numbered_as_they_are_listed_and_every_total_is_one() {
        for (n, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, n);
        }
        let limits = crate::config::Limits::default();
        for (key, value) in limits.device.each() {
            let kind = Kind::ALL.into_iter().find(|kind| kind.key() == key);
            assert_eq!(kind.and_then(|k| k.of_totals(&limits.device)), Some(value), "{key}");
        }
    }
}
