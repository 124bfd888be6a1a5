//! A rule's users and groups, resolved to IDs.

use std::collections::HashSet;

use crate::config::{Id, Subjects};
use crate::privilege::Names;

/// Identity of a client, as recorded by the kernel at connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Effective user id.
    pub uid: u32,
    /// Effective and supplementary groups.
    pub gids: Vec<u32>,
    /// The client's network namespace is unknown or differs from the daemon's.
    pub foreign: bool,
}

/// The IDs that the kernel reports for users and groups of other user namespaces that are not
/// mapped here. Two clients with the overflow ID may be different users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow {
    /// The kernel's overflow user id.
    pub uid: u32,
    /// The kernel's overflow group id.
    pub gid: u32,
}

impl Overflow {
    pub fn of_this_system() -> Self {
        let read = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?;
            text.trim().parse().ok()
        };
        Overflow {
            uid: read("overflowuid").unwrap_or(DEFAULT_OVERFLOW_ID),
            gid: read("overflowgid").unwrap_or(DEFAULT_OVERFLOW_ID),
        }
    }

    /// Returns the part of a client's identity that rules may match.
    pub fn known(&self, who: &Identity) -> Option<Identity> {
        (who.uid != self.uid).then(|| Identity {
            uid: who.uid,
            foreign: who.foreign,
            gids: who.gids.iter().copied().filter(|gid| *gid != self.gid).collect(),
        })
    }
}

/// The kernel's default overflow id.
const DEFAULT_OVERFLOW_ID: u32 = 65_534;

/// The subjects of a rule.
#[derive(Clone, Debug, Default)]
pub struct Members {
    everyone: bool,
    uids: HashSet<u32>,
    gids: HashSet<u32>,
}

impl Members {
    /// Resolves names. Appends a message to `unknown` for each name that does not exist.
    pub fn look_up(
        subjects: &Subjects,
        names: &AllNames,
        rule: &str,
        unknown: &mut Vec<String>,
    ) -> Self {
        let mut all = |ids: &[Id], what: &str, names: &Names| {
            let one = |id: &Id| {
                let number = number(id, names);
                if number.is_none() {
                    unknown.push(format!("{rule}: {what} {id} does not exist"));
                }
                number
            };
            ids.iter().filter_map(one).collect()
        };
        Members {
            everyone: subjects.everyone,
            uids: all(&subjects.users, "user", &names.users),
            gids: all(&subjects.groups, "group", &names.groups),
        }
    }

    /// Returns true if a client is one of the subjects.
    pub fn contain(&self, who: &Identity) -> bool {
        self.everyone
            || self.uids.contains(&who.uid)
            || who.gids.iter().any(|gid| self.gids.contains(gid))
    }
}

/// Names of users and groups of this system.
pub struct AllNames {
    pub users: Names,
    pub groups: Names,
}

impl AllNames {
    pub fn of_this_system() -> Self {
        AllNames { users: Names::of_users(), groups: Names::of_groups() }
    }
}

/// Returns the ID of a user or group.
pub fn number(id: &Id, names: &Names) -> Option<u32> {
    match id {
        Id::Number(number) => Some(*number),
        Id::Name(name) => names.id(name),
    }
}
