//! `[limits]`: quotas and maxima.

use super::checker::Checker;
use super::error::ConfigError;
use super::file_limits::{Fields, LimitsSection};
use super::kind::{DOORBELLS, Kind, STAGS, Scope, Unit};
use super::units::Size;

/// The value of a kind without a limit.
pub const UNLIMITED: u64 = u64::MAX;

/// `[limits]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The whole device, and maxima of single objects.
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
    /// No values: every limit is [`UNLIMITED`].
    pub const NONE: Values = Values(Vec::new());

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

    /// Returns the maximum IRD and ORD of one QP.
    pub fn reads_of_qp(&self) -> (u16, u16) {
        // Fits u16: both are 14-bit fields.
        let most = |kind| u16::try_from(self.device.of(kind)).unwrap_or(u16::MAX);
        (most(Kind::Ird), most(Kind::Ord))
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

impl Checker<'_> {
    /// Checks `[limits]` and its subsections against the table of kinds.
    pub(super) fn limits(&self, s: &LimitsSection) -> Result<Limits, ConfigError> {
        let default = Limits::default();
        let all = |scope| Ok(default.of(scope).with(&self.values(scope, s.of(scope), false)?));
        let limits = Limits {
            device: all(Scope::Device)?,
            user: all(Scope::User)?,
            session: all(Scope::Session)?,
            peer: all(Scope::Peer)?,
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
            return Err(self.wrong(place(&s.session, &kinds), why));
        }
        let kinds = [Kind::Windows, Kind::Mrs];
        let stags: u64 = kinds.iter().map(|kind| limits.device.of(*kind)).sum();
        if stags > STAGS {
            let why = format!(
                "limits.mrs + windows = {stags} is above {STAGS}, half of the STag space; the \
                 other half must stay unused, so that STags are hard to guess"
            );
            return Err(self.wrong(place(&s.device, &kinds), why));
        }
        Ok(limits)
    }

    /// Checks the values of a section or of a rule.
    pub(super) fn values(
        &self,
        scope: Scope,
        fields: &Fields,
        of_rule: bool,
    ) -> Result<Values, ConfigError> {
        let mut values = Values::NONE;
        for kind in Kind::of_scope(scope) {
            let Some(written) = fields.of(kind) else { continue };
            let (least, most) = kind.range(scope);
            let least = if of_rule && kind.row().rules_may_forbid { 0 } else { least };
            if !(least..=most).contains(&written.value) {
                let least = amount(kind, least);
                let most = amount(kind, most);
                return Err(self.wrong(written.at, format!("must be from {least} to {most}")));
            }
            values.put(kind, written.value);
        }
        Ok(values)
    }
}

/// Returns the position of the first of these kinds that the file sets.
fn place(fields: &Fields, kinds: &[Kind]) -> usize {
    kinds.iter().find_map(|kind| fields.of(*kind)).map_or(0, |written| written.at)
}

/// Formats a value of a kind, with a unit if it counts bytes.
pub(super) fn amount(kind: Kind, value: u64) -> String {
    match kind.row().unit {
        Unit::Bytes => Size(value).to_string(),
        Unit::Count => value.to_string(),
    }
}
