//! `[limits]`: quotas and maxima. `kind.rs` declares the keys.

use std::fmt;

use serde::de::{DeserializeSeed, Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use toml::Spanned;

use super::error::Wrong;
use super::kind::{DOORBELLS, Kind, STAGS, Scope, Unit};
use super::section::{KnownKey, Row};
use rnic_abi::units::Size;

/// The value of a kind without a limit.
pub const UNLIMITED: u64 = u64::MAX;

/// `[limits]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The whole device, and maxima of individual objects.
    pub device: Values,
    /// All sessions of a user together.
    pub user: Values,
    /// One session. `[[user]]` and `[[group]]` rules may set different values.
    pub session: Values,
    /// One remote host.
    pub peer: Values,
}

/// Values of some kinds. Takes no memory if it has none, as in most rules of a long file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Values(Vec<Option<u64>>);

impl Values {
    /// Returns an empty set: every limit is [`UNLIMITED`].
    pub(super) fn none() -> Self {
        Values(Vec::new())
    }

    /// Returns the value of a kind, if it has one.
    pub fn set(&self, kind: Kind) -> Option<u64> {
        self.0.get(kind as usize).copied().flatten()
    }

    /// Returns the limit of a kind, or [`UNLIMITED`].
    pub fn of(&self, kind: Kind) -> u64 {
        self.set(kind).unwrap_or(UNLIMITED)
    }

    /// Returns the limit of a kind that counts objects. The table limits those to 32 bits.
    pub fn count(&self, kind: Kind) -> u32 {
        u32::try_from(self.of(kind)).unwrap_or(u32::MAX)
    }

    /// Sets the value of a kind.
    pub fn put(&mut self, kind: Kind, value: u64) {
        self.0.resize(Kind::COUNT, None);
        self.0[kind as usize] = Some(value);
    }

    /// Returns all kinds that have a value, with the value.
    pub fn each(&self) -> impl Iterator<Item = (Kind, u64)> {
        Kind::ALL.into_iter().filter_map(|kind| Some((kind, self.set(kind)?)))
    }

    /// Returns a copy in which the values that `others` sets replace these.
    #[must_use]
    pub fn with(&self, others: &Values) -> Values {
        Values(Kind::ALL.map(|kind| others.set(kind).or(self.set(kind))).to_vec())
    }
}

impl Limits {
    /// Returns the limits of a scope.
    pub fn of(&self, scope: Scope) -> &Values {
        match scope {
            Scope::Device => &self.device,
            Scope::User => &self.user,
            Scope::Session => &self.session,
            Scope::Peer => &self.peer,
        }
    }

    fn of_mut(&mut self, scope: Scope) -> &mut Values {
        match scope {
            Scope::Device => &mut self.device,
            Scope::User => &mut self.user,
            Scope::Session => &mut self.session,
            Scope::Peer => &mut self.peer,
        }
    }

    /// Replaces the defaults with the values of `[limits]` and its subsections.
    pub(super) fn new(written: &[Written]) -> Result<Self, Wrong> {
        let mut limits = Limits::default();
        for Written { scope, kind, value, .. } in written {
            limits.of_mut(*scope).put(*kind, *value);
        }
        // Position of the first of these kinds that the file sets.
        let at = |scope, kinds: &[Kind]| {
            let is_set = |kind| written.iter().find(|w| (w.scope, w.kind) == (scope, kind));
            kinds.iter().find_map(|kind| is_set(*kind)).map_or(0, |w| w.at)
        };
        let kinds = [Kind::Qps, Kind::Cqs, Kind::Srqs];
        // Each is at most the doorbells of a page, so the sum does not wrap. The same holds for
        // STags below.
        let doorbells: u64 = kinds.iter().map(|kind| limits.session.of(*kind)).sum();
        if doorbells > DOORBELLS {
            let why = format!(
                "limits.session.qps + cqs + srqs = {doorbells} is above {DOORBELLS}, the number of \
                 doorbells of a session"
            );
            return Err(Wrong { at: at(Scope::Session, &kinds), why });
        }
        let kinds = [Kind::Windows, Kind::Mrs];
        let stags: u64 = kinds.iter().map(|kind| limits.device.of(*kind)).sum();
        if stags > STAGS {
            let why = format!(
                "limits.mrs + windows = {stags} is above {STAGS}, half of the STag space; the \
                 other half must stay unused, so that STags are hard to guess"
            );
            return Err(Wrong { at: at(Scope::Device, &kinds), why });
        }
        Ok(limits)
    }

    /// Keeps the running limits that a reload does not change.
    pub(super) fn keep(&mut self, running: &Limits) {
        for kind in Kind::ALL.into_iter().filter(|kind| kind.row().at_start) {
            self.device.put(kind, running.device.of(kind));
        }
    }

    /// Appends all rows.
    pub(super) fn rows(&self, rows: &mut Vec<Row>) {
        for scope in Scope::ALL {
            rows.extend(self.of(scope).each().map(|(kind, value)| Row {
                key: format!("{}.{}", scope.section(), kind.key()),
                value: amount(kind, value),
                text: kind.sentence(scope),
            }));
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        let of = |scope| Values(Kind::ALL.map(|kind| kind.default(scope)).to_vec());
        Limits {
            device: of(Scope::Device),
            user: of(Scope::User),
            session: of(Scope::Session),
            peer: of(Scope::Peer),
        }
    }
}

/// A limit that the file sets.
#[derive(Debug)]
pub(super) struct Written {
    scope: Scope,
    kind: Kind,
    value: u64,
    /// Byte offset of the value in the file.
    at: usize,
}

/// Reads `[limits]` and its subsections.
pub(super) fn written<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Written>, D::Error> {
    SectionOf { scope: Scope::Device, is_rule: false }.deserialize(d)
}

/// Reads the values that a rule sets instead of `[limits.user]`.
pub(super) fn of_user<'de, D: Deserializer<'de>>(d: D) -> Result<Values, D::Error> {
    of_rule(Scope::User, d)
}

/// Reads the values that a rule sets instead of `[limits.session]`.
pub(super) fn of_session<'de, D: Deserializer<'de>>(d: D) -> Result<Values, D::Error> {
    of_rule(Scope::Session, d)
}

fn of_rule<'de, D: Deserializer<'de>>(scope: Scope, d: D) -> Result<Values, D::Error> {
    let mut values = Values::none();
    for Written { kind, value, .. } in (SectionOf { scope, is_rule: true }).deserialize(d)? {
        values.put(kind, value);
    }
    Ok(values)
}

/// Reads the limits of this scope. The device's section contains the others.
#[derive(Clone, Copy)]
struct SectionOf {
    scope: Scope,
    is_rule: bool,
}

impl SectionOf {
    fn inner(self) -> impl Iterator<Item = Scope> {
        let inner = Scope::ALL.into_iter().filter(|scope| *scope != Scope::Device);
        inner.filter(move |_| self.scope == Scope::Device)
    }

    fn known_key(self) -> KnownKey {
        let limits = Kind::of_scope(self.scope).map(Kind::key);
        KnownKey(limits.chain(self.inner().map(Scope::name)).collect())
    }

    /// Checks the range of a value.
    fn check(self, kind: Kind, value: u64) -> Result<(), String> {
        let (least, most) = kind.range(self.scope);
        let least = if self.is_rule && kind.row().rules_may_forbid { 0 } else { least };
        if (least..=most).contains(&value) {
            return Ok(());
        }
        Err(format!("must be from {} to {}", amount(kind, least), amount(kind, most)))
    }
}

impl<'de> DeserializeSeed<'de> for SectionOf {
    type Value = Vec<Written>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<Written>, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for SectionOf {
    type Value = Vec<Written>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of limits")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Vec<Written>, M::Error> {
        let mut all = Vec::new();
        while let Some(key) = map.next_key_seed(self.known_key())? {
            if let Some(kind) = Kind::with_key(self.scope, key) {
                all.push(map.next_value_seed(ValueOf { section: self, kind })?);
            } else if let Some(scope) = self.inner().find(|inner| inner.name() == key) {
                all.extend(map.next_value_seed(SectionOf { scope, ..self })?);
            }
        }
        Ok(all)
    }
}

/// Reads the value of a limit.
struct ValueOf {
    section: SectionOf,
    kind: Kind,
}

impl<'de> DeserializeSeed<'de> for ValueOf {
    type Value = Written;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Written, D::Error> {
        let ValueOf { section, kind } = self;
        let (value, at) = match kind.row().unit {
            Unit::Count => {
                let count = Spanned::<u32>::deserialize(d)?;
                (u64::from(*count.get_ref()), count.span().start)
            }
            Unit::Bytes => {
                let size = Spanned::<Size>::deserialize(d)?;
                (size.get_ref().0, size.span().start)
            }
        };
        section.check(kind, value).map_err(D::Error::custom)?;
        Ok(Written { scope: section.scope, kind, value, at })
    }
}

/// Formats a value of a kind, with a unit if it counts bytes.
pub(super) fn amount(kind: Kind, value: u64) -> String {
    match kind.row().unit {
        Unit::Bytes => Size(value).to_string(),
        Unit::Count => value.to_string(),
    }
}
