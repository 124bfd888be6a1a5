//! Memory of this engine that streams hold because of their peers, charged to sessions.
//!
//! Peers can make two parts of a TCP [`link`](super::link) grow: FPDUs that have not arrived in
//! full, and bytes that TCP has not accepted. Each part has a limit per session and a limit for all
//! sessions. If a session exceeds its limit, the stream of that session that has held memory for
//! longest ends, because a working stream holds none for long. If all sessions together exceed
//! their limit, a stream of the session that holds the most ends, so that peers of one session
//! cannot end a stream of a session that holds less.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::schedule::Key;
use rnic_abi::types::SessionId;

/// Limits on the bytes that streams may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargeLimits {
    /// Bytes of all sessions.
    pub device: usize,
    /// Bytes of one session.
    pub session: usize,
}

impl Default for ChargeLimits {
    fn default() -> Self {
        ChargeLimits { device: 256 << 20, session: 64 << 20 }
    }
}

/// Names of a kind of charge, for error texts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChargeNames {
    /// Config keys of the limit for all sessions and of the limit per session.
    pub device: &'static str,
    pub session: &'static str,
    /// Noun for the memory that a stream holds, followed by "was" or "were".
    pub thing: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub key: Key,
    pub session: SessionId,
}

/// A stream that must end because a limit is exceeded.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Excess {
    pub victim: Key,
    pub why: String,
}

/// Charge of one stream.
#[derive(Debug, Default)]
pub(super) struct StreamCharge {
    bytes: usize,
    /// Position by age among the streams that hold memory.
    number: u64,
}

/// Charges of one kind for all streams of an engine.
pub(super) struct Charges {
    limits: ChargeLimits,
    names: ChargeNames,
    used: usize,
    sessions: HashMap<SessionId, SessionCharge>,
    /// Sessions ordered by the bytes that they hold.
    most: BTreeSet<(usize, SessionId)>,
    numbered: u64,
}

#[derive(Default)]
struct SessionCharge {
    used: usize,
    /// Streams that hold memory, oldest first, without those already returned in an [`Excess`].
    ages: BTreeMap<u64, Key>,
    /// All streams of the session that hold memory.
    streams: usize,
}

impl Charges {
    pub(super) fn new(limits: ChargeLimits, names: ChargeNames) -> Self {
        Charges {
            limits,
            names,
            used: 0,
            sessions: HashMap::new(),
            most: BTreeSet::new(),
            numbered: 0,
        }
    }

    /// Replaces the limits. Memory already held counts against them, but no stream ends before a
    /// stream's memory grows.
    pub(super) fn set_limits(&mut self, limits: ChargeLimits) {
        self.limits = limits;
    }

    /// Sets the number of bytes that a stream holds. If the number has grown and exceeds a limit,
    /// returns the stream that must end. The memory of that stream counts until it has ended.
    pub(super) fn set(
        &mut self,
        charge: &mut StreamCharge,
        owner: Owner,
        bytes: usize,
    ) -> Option<Excess> {
        let before = charge.bytes;
        self.hold(charge, owner, bytes);
        if bytes > before { self.excess(owner.session) } else { None }
    }

    /// Sets the number of bytes that a stream holds, without enforcing the limits.
    pub(super) fn hold(&mut self, charge: &mut StreamCharge, owner: Owner, bytes: usize) {
        let before = std::mem::replace(&mut charge.bytes, bytes);
        if before == bytes {
            return;
        }
        let of_session = self.sessions.entry(owner.session).or_default();
        self.most.remove(&(of_session.used, owner.session));
        if before == 0 {
            self.numbered += 1;
            charge.number = self.numbered;
            of_session.ages.insert(charge.number, owner.key);
            of_session.streams += 1;
        } else if bytes == 0 {
            of_session.ages.remove(&charge.number);
            of_session.streams -= 1;
        }
        self.used = self.used - before + bytes;
        of_session.used = of_session.used - before + bytes;
        if of_session.streams == 0 {
            self.sessions.remove(&owner.session);
        } else {
            self.most.insert((of_session.used, owner.session));
        }
    }

    /// Returns true if a stream of this session may hold `bytes` without exceeding a limit.
    pub(super) fn may_hold(&self, charge: &StreamCharge, session: SessionId, bytes: usize) -> bool {
        let more = bytes.saturating_sub(charge.bytes);
        let of_session = self.sessions.get(&session).map_or(0, |of_session| of_session.used);
        more == 0
            || of_session + more <= self.limits.session && self.used + more <= self.limits.device
    }

    /// Removes the charge of a stream of this session, which no longer holds memory.
    pub(super) fn release(&mut self, charge: &mut StreamCharge, session: SessionId) {
        // `set` uses the key only for streams that hold memory.
        let owner = Owner { key: Key::default(), session };
        self.set(charge, owner, 0);
    }

    fn excess(&mut self, asking: SessionId) -> Option<Excess> {
        let of_asking = self.sessions.get(&asking).map_or(0, |s| s.used);
        let (key, limit, session) = if of_asking > self.limits.session {
            (self.names.session, self.limits.session, asking)
        } else if self.used > self.limits.device {
            (self.names.device, self.limits.device, self.most.last()?.1)
        } else {
            return None;
        };
        // Removed from `ages`, so that a stream is returned only once.
        let (_, victim) = self.sessions.get_mut(&session)?.ages.pop_first()?;
        let thing = self.names.thing;
        let why = format!(
            "{key} is exceeded (this worker's share: {limit} bytes), and its {thing} the oldest"
        );
        Some(Excess { victim, why })
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Returns the number of bytes that a session holds.
    #[cfg(test)]
    pub(super) fn used_by(&self, session: SessionId) -> usize {
        self.sessions.get(&session).map_or(0, |s| s.used)
    }

    /// Returns true if no memory is held and no session is tracked.
    #[cfg(test)]
    pub(super) fn is_unused(&self) -> bool {
        self.used == 0 && self.sessions.is_empty() && self.most.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: SessionId = SessionId(1);
    const THEIRS: SessionId = SessionId(2);

    fn charges(device: usize, session: usize) -> Charges {
        let names = ChargeNames { device: "limits.x", session: "limits.session_x", thing: "x was" };
        Charges::new(ChargeLimits { device, session }, names)
    }

    fn owner(key: Key, session: SessionId) -> Owner {
        Owner { key, session }
    }

    #[test]
    fn oldest_stream_ends_and_is_named_once() {
        let mut c = charges(1000, 100);
        let mut charges: Vec<_> = (0..4).map(|_| StreamCharge::default()).collect();
        for (key, charge) in (0..3).zip(&mut charges) {
            assert_eq!(c.set(charge, owner(key, MINE), 30), None);
        }
        let excess = c.set(&mut charges[1], owner(1, MINE), 41).expect("above 100");
        assert_eq!(excess.victim, 0);
        assert_eq!(
            excess.why,
            "limits.session_x is exceeded (this worker's share: 100 bytes), and its x was the \
             oldest"
        );
        assert_eq!(c.set(&mut charges[1], owner(1, MINE), 42).expect("above").victim, 1);
        // A stream that shrinks cannot exceed a limit.
        assert_eq!(c.set(&mut charges[1], owner(1, MINE), 41), None);
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 0), None);
        assert_eq!((c.used(), c.used_by(MINE)), (71, 71));
        // A stream that holds memory again is the youngest.
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 30).expect("above 100").victim, 2);
    }

    #[test]
    fn drained_stream_is_not_a_victim() {
        let mut c = charges(1000, 100);
        let mut charges: Vec<_> = (0..3).map(|_| StreamCharge::default()).collect();
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 50), None);
        assert_eq!(c.set(&mut charges[1], owner(1, MINE), 50), None);
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 0), None);
        assert_eq!(c.set(&mut charges[2], owner(2, MINE), 60).expect("above 100").victim, 1);
    }

    #[test]
    fn session_with_most_bytes_loses_a_stream() {
        let mut c = charges(100, 80);
        let mut charges: Vec<_> = (0..4).map(|_| StreamCharge::default()).collect();
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 20), None);
        assert_eq!(c.set(&mut charges[1], owner(1, THEIRS), 40), None);
        assert_eq!(c.set(&mut charges[2], owner(2, THEIRS), 40), None);
        // The oldest stream belongs to MINE, which holds less than THEIRS.
        let excess = c.set(&mut charges[0], owner(0, MINE), 21).expect("above 100");
        assert_eq!(excess.victim, 1);
        assert!(excess.why.starts_with("limits.x is exceeded"), "{}", excess.why);
        for (key, session) in [(0, MINE), (1, THEIRS), (2, THEIRS)] {
            assert_eq!(c.set(&mut charges[key], owner(key as Key, session), 0), None);
        }
        assert!(c.is_unused());
    }
}
