//! The user and the group of the daemon, as lines of `/etc/passwd` and `/etc/group`.
//!
//! `useradd` would also change the shadow files and backups, which could not be restored. An
//! account without a password needs no line there.

use std::collections::HashSet;
use std::path::Path;

use super::parts::{Content, Parts};
use super::root::Root;
use super::{OWN_NAME, SystemError};

/// The users of a system.
pub const USERS: &str = "/etc/passwd";
/// The groups of a system.
pub const GROUPS: &str = "/etc/group";
/// Range of IDs for system accounts, as in `/etc/login.defs`.
const SYSTEM_IDS: std::ops::RangeInclusive<u32> = 100..=999;

/// Adds the missing lines. A root without `/etc/passwd` is a package, which creates the accounts by
/// `sysusers.d`.
pub fn parts(parts: &mut Parts, root: &Root) -> Result<(), SystemError> {
    let (Some(users), Some(groups)) = (read(root, USERS)?, read(root, GROUPS)?) else {
        return Ok(());
    };
    let group_id = match id_of(&groups, OWN_NAME) {
        Some(id) => id,
        None => free_id(&[&users, &groups], None),
    };
    // The same number for both, if it is free.
    let user_id = id_of(&users, OWN_NAME).unwrap_or_else(|| free_id(&[&users], Some(group_id)));
    let line = |line: String| Content::Line { line, create: false };
    parts.add(Path::new(GROUPS), line(format!("{OWN_NAME}:*:{group_id}:")));
    let user =
        format!("{OWN_NAME}:*:{user_id}:{group_id}:RDMA NIC in a daemon:/:/usr/sbin/nologin");
    parts.add(Path::new(USERS), line(user));
    Ok(())
}

/// Returns true if a group exists, or if the root has no groups.
pub fn has_group(root: &Root, group: &str) -> Result<bool, SystemError> {
    Ok(read(root, GROUPS)?.is_none_or(|groups| id_of(&groups, group).is_some()))
}

fn read(root: &Root, file: &str) -> Result<Option<String>, SystemError> {
    let place = root.file(Path::new(file))?;
    match std::fs::read(&place) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(SystemError::at("cannot read", &place)(error)),
    }
}

/// Returns the ID in the line of a name.
fn id_of(text: &str, name: &str) -> Option<u32> {
    ids(text).find(|(other, _)| *other == name).map(|(_, id)| id)
}

fn ids(text: &str) -> impl Iterator<Item = (&str, u32)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        Some((fields.next()?, fields.nth(1)?.parse().ok()?))
    })
}

/// Returns the highest ID of a system account that no line has, or `wanted` if no line has it.
fn free_id(texts: &[&str], wanted: Option<u32>) -> u32 {
    let taken: HashSet<u32> = texts.iter().flat_map(|text| ids(text)).map(|(_, id)| id).collect();
    let mut all = wanted.into_iter().chain(SYSTEM_IDS.rev());
    // If all 900 are taken, the next higher one is as good.
    all.find(|id| !taken.contains(id)).unwrap_or(SYSTEM_IDS.end() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ids_are_those_without_a_line() {
        let users = "root:x:0:0:root:/root:/bin/sh\nlast:x:999:7::/:/bin/sh\n";
        let groups = "root:x:0:\nsome:x:998:a,b\n+nis\n";
        assert_eq!((id_of(users, "last"), id_of(groups, "none")), (Some(999), None));
        assert_eq!(free_id(&[users, groups], None), 997);
        assert_eq!(free_id(&[users], Some(998)), 998);
        assert_eq!(free_id(&[users], Some(999)), 998);
    }
}
