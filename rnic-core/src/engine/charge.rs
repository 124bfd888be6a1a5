//! What streams hold of this engine's memory for their peers' sake, charged to sessions.
//!
//! Two things of the [`link`](super::link) over TCP can grow by the will of peers: FPDUs that have
//! not arrived in full, and bytes that TCP does not take. Each has limits, for a session and for
//! all. Beyond the first, the session's stream that has held something for longest ends, because a
//! working one holds nothing for long; beyond the second, that of the session that holds most, so
//! that nobody's peers end a stream of who has less.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::schedule::Key;
use crate::types::SessionId;

/// How many bytes streams may hold.
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

/// Names of a kind of charge, for messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChargeNames {
    /// Keys of the limits of all sessions and of one.
    pub device: &'static str,
    pub session: &'static str,
    /// A thing that a stream holds.
    pub thing: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub key: Key,
    pub session: SessionId,
}

/// A stream that has to end because a limit is exceeded.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Excess {
    pub victim: Key,
    pub why: String,
}

/// What one stream holds.
#[derive(Debug, Default)]
pub(super) struct StreamCharge {
    bytes: usize,
    /// Its number among those that hold something.
    number: u64,
}

/// What all streams of an engine hold of one kind.
pub(super) struct Charges {
    limits: ChargeLimits,
    names: ChargeNames,
    used: usize,
    sessions: HashMap<SessionId, OfSession>,
    /// Sessions by what they hold.
    most: BTreeSet<(usize, SessionId)>,
    numbered: u64,
}

#[derive(Default)]
struct OfSession {
    used: usize,
    /// Streams that hold something, oldest first, but for those that have been told to end.
    ages: BTreeMap<u64, Key>,
    /// All streams of the session that hold something, those told to end included.
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

    /// Takes other limits. What is held already counts against them, and is kept until there is
    /// more.
    pub(super) fn set_limits(&mut self, limits: ChargeLimits) {
        self.limits = limits;
    }

    /// Notes that a stream holds so many bytes from now on. If that is more than before and exceeds
    /// a limit, the stream to end is told; until it has, what it holds counts.
    pub(super) fn set(
        &mut self,
        charge: &mut StreamCharge,
        owner: Owner,
        bytes: usize,
    ) -> Option<Excess> {
        let before = std::mem::replace(&mut charge.bytes, bytes);
        if before == bytes {
            return None;
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
        if bytes > before { self.excess(owner.session) } else { None }
    }

    /// Notes that a stream of this session holds nothing any more.
    pub(super) fn release(&mut self, charge: &mut StreamCharge, session: SessionId) {
        // Its key matters only to those who hold something.
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
        // Named once.
        let (_, victim) = self.sessions.get_mut(&session)?.ages.pop_first()?;
        let thing = self.names.thing;
        let why = format!(
            "{key} is reached (this worker's share: {limit} bytes), and its {thing} the oldest"
        );
        Some(Excess { victim, why })
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Bytes that a session holds.
    #[cfg(test)]
    pub(super) fn used_by(&self, session: SessionId) -> usize {
        self.sessions.get(&session).map_or(0, |s| s.used)
    }

    /// Whether nothing is held, nor remembered.
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
    fn the_oldest_of_the_session_ends_and_is_named_once() {
        let mut c = charges(1000, 100);
        let mut charges: Vec<_> = (0..4).map(|_| StreamCharge::default()).collect();
        for (key, charge) in (0..3).zip(&mut charges) {
            assert_eq!(c.set(charge, owner(key, MINE), 30), None);
        }
        let excess = c.set(&mut charges[1], owner(1, MINE), 41).expect("above 100");
        assert_eq!(excess.victim, 0);
        assert_eq!(
            excess.why,
            "limits.session_x is reached (this worker's share: 100 bytes), and its x was the oldest"
        );
        assert_eq!(c.set(&mut charges[1], owner(1, MINE), 42).expect("above").victim, 1);
        // Who holds less than before asks for nothing.
        assert_eq!(c.set(&mut charges[1], owner(1, MINE), 41), None);
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 0), None);
        assert_eq!((c.used(), c.used_by(MINE)), (71, 71));
        // Who begins anew is the youngest.
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 30).expect("above 100").victim, 2);
    }

    #[test]
    fn a_drained_stream_is_no_victim() {
        let mut c = charges(1000, 100);
        let mut charges: Vec<_> = (0..3).map(|_| StreamCharge::default()).collect();
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 50), None);
        assert_eq!(c.set(&mut charges[1], owner(1, MINE), 50), None);
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 0), None);
        assert_eq!(c.set(&mut charges[2], owner(2, MINE), 60).expect("above 100").victim, 1);
    }

    #[test]
    fn for_all_sessions_the_one_that_holds_most_loses_a_stream() {
        let mut c = charges(100, 80);
        let mut charges: Vec<_> = (0..4).map(|_| StreamCharge::default()).collect();
        assert_eq!(c.set(&mut charges[0], owner(0, MINE), 20), None);
        assert_eq!(c.set(&mut charges[1], owner(1, THEIRS), 40), None);
        assert_eq!(c.set(&mut charges[2], owner(2, THEIRS), 40), None);
        // The oldest of all is mine, but I have less.
        let excess = c.set(&mut charges[0], owner(0, MINE), 21).expect("above 100");
        assert_eq!(excess.victim, 1);
        assert!(excess.why.starts_with("limits.x is reached"), "{}", excess.why);
        for (key, session) in [(0, MINE), (1, THEIRS), (2, THEIRS)] {
            assert_eq!(c.set(&mut charges[key], owner(key as Key, session), 0), None);
        }
        assert!(c.is_unused());
    }
}
