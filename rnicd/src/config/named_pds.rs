//! `[[pd]]`: protection domains that several sessions may have open.

use std::collections::BTreeSet;

use super::checker::Checker;
use super::error::ConfigError;
use super::file_rules::PdTable;
use super::kind::{Kind, Scope};
use super::subjects::Subjects;

/// A protection domain with a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPd {
    /// Name by which programs open it.
    pub name: String,
    /// Users that may open it.
    pub who: Subjects,
    /// Maximum sessions that have it open; by default only the limits of sessions apply.
    pub max_sessions: Option<u32>,
    /// Maximum memory regions in it, of all sessions; by default only the sessions' own limits
    /// apply.
    pub mrs: Option<u32>,
    /// Maximum QPs in it, of all sessions; by default only the sessions' own limits apply.
    pub qps: Option<u32>,
}

impl Checker<'_> {
    /// Checks all `[[pd]]` tables.
    pub(super) fn named_pds(&self, tables: Vec<PdTable>) -> Result<Vec<NamedPd>, ConfigError> {
        let mut pds: Vec<NamedPd> = Vec::new();
        let mut names = BTreeSet::new();
        for table in tables {
            let at = table.name.span().start;
            let name = table.name.into_inner();
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if !(1..=64).contains(&name.len()) || !name.chars().all(plain) {
                return Err(self.wrong(at, "must be 1 to 64 letters, digits, '-', '_' or '.'"));
            }
            if !names.insert(name.clone()) {
                return Err(self.wrong(at, format!("there are two [[pd]] named {name:?}")));
            }
            let who = Subjects { everyone: false, users: table.users, groups: table.groups };
            if who.is_empty() {
                return Err(self.wrong(at, "no user may open it: add users or groups"));
            }
            pds.push(NamedPd {
                name,
                who,
                max_sessions: self.optional_number(table.max_sessions, 1..=65_535)?,
                mrs: self.optional_number(table.mrs, range_of(Kind::Mrs))?,
                qps: self.optional_number(table.qps, range_of(Kind::Qps))?,
            });
        }
        Ok(pds)
    }
}

/// Returns the device's range for a kind.
fn range_of(kind: Kind) -> std::ops::RangeInclusive<u32> {
    let (least, most) = kind.range(Scope::Device);
    // The table limits counts of objects to 32 bits.
    least as u32..=most as u32
}
