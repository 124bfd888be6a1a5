//! Users and groups of `/etc/passwd` and `/etc/group`.

use std::collections::HashMap;

/// A user to switch to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

impl Account {
    /// Returns the user with this name or number. A number that is missing from `/etc/passwd` is
    /// also used as the group ID.
    pub fn find(name: &str) -> Option<Self> {
        let read = |file| std::fs::read_to_string(file).unwrap_or_default();
        Account::find_in(name, &read("/etc/passwd"), &read("/etc/group"))
    }

    fn find_in(name: &str, users: &str, groups: &str) -> Option<Self> {
        let number: Option<u32> = name.parse().ok();
        let entry = users.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let uid = fields.get(2)?.parse().ok()?;
            let gid = fields.get(3)?.parse().ok()?;
            (fields[0] == name || number == Some(uid)).then_some((fields[0], uid, gid))
        });
        let Some((name, uid, gid)) = entry else {
            return number.map(|n| Account { uid: n, gid: n, groups: Vec::new() });
        };
        let groups = groups.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let members = fields.get(3)?;
            members.split(',').any(|m| m == name).then(|| fields[2].parse().ok()).flatten()
        });
        let groups = groups.filter(|group| *group != gid).collect();
        Some(Account { uid, gid, groups })
    }
}

/// Returns the id of a user given by name or number, from `/etc/passwd`.
pub fn user_id(name: &str) -> Option<u32> {
    name.parse().ok().or_else(|| Names::of_users().id(name))
}

/// Returns the id of a group given by name or number, from `/etc/group`.
pub fn group_id(name: &str) -> Option<u32> {
    name.parse().ok().or_else(|| Names::of_groups().id(name))
}

/// Ids of users or groups by name, read once for any number of look-ups.
#[derive(Debug, Default)]
pub struct Names(HashMap<String, u32>);

impl Names {
    /// Reads the users of `/etc/passwd`.
    pub fn of_users() -> Self {
        Names::read("/etc/passwd")
    }

    /// Reads the groups of `/etc/group`.
    pub fn of_groups() -> Self {
        Names::read("/etc/group")
    }

    /// Returns the id of a name.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.0.get(name).copied()
    }

    fn read(file: &str) -> Self {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let mut ids = HashMap::new();
        for line in text.lines() {
            let mut fields = line.split(':');
            if let (Some(name), Some(Ok(id))) = (fields.next(), fields.nth(1).map(str::parse)) {
                // The first of several lines with the same name applies.
                ids.entry(name.to_owned()).or_insert(id);
            }
        }
        Names(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_and_groups_are_found_by_name_and_number() {
        assert_eq!(user_id("root"), Some(0));
        assert_eq!(group_id("root"), Some(0));
        assert_eq!(user_id("1234"), Some(1234));
        assert_eq!(user_id("no such user"), None);
    }

    #[test]
    fn an_account_has_its_groups() {
        let users = "root:x:0:0::/root:/bin/sh\nbroken\nrnicd:x:71:72::/:/sbin/nologin\n";
        let groups = "rnicd:x:72:\nrdma:x:90:alice,rnicd\nbroken\nrd:x:91:rnicdx\n";
        let found = Account { uid: 71, gid: 72, groups: vec![90] };
        assert_eq!(Account::find_in("rnicd", users, groups), Some(found.clone()));
        assert_eq!(Account::find_in("71", users, groups), Some(found));
        let alone = Account { uid: 65533, gid: 65533, groups: Vec::new() };
        assert_eq!(Account::find_in("65533", users, groups), Some(alone));
        assert_eq!(Account::find_in("nobody at all", users, groups), None);
    }
}
