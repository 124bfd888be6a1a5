//! Users and groups of the configuration, by name or number. This module does not look them up.

use std::fmt;

use serde::de::{Error, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// A user or a group, by name or number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Id {
    /// By its name in `/etc/passwd` or `/etc/group`.
    Name(String),
    /// User id or group id.
    Number(u32),
}

impl Id {
    /// Parses a name, or a number in digits.
    fn parse(text: &str) -> Result<Self, String> {
        if let Ok(number) = text.parse() {
            return Ok(Id::Number(number));
        }
        let fits = |c: char| !c.is_whitespace() && !c.is_control() && !":,@*".contains(c);
        if !text.is_empty() && text.chars().all(fits) {
            Ok(Id::Name(text.to_owned()))
        } else {
            Err(format!("{text:?} is not a name or number of a user or group"))
        }
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Id::Name(name) => f.write_str(name),
            Id::Number(number) => write!(f, "{number}"),
        }
    }
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct OneId;
        impl Visitor<'_> for OneId {
            type Value = Id;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name or a number of a user or group")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Id, E> {
                Id::parse(text).map_err(E::custom)
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<Id, E> {
                number(n, &self)
            }
        }
        d.deserialize_any(OneId)
    }
}

/// Users and groups: `"*"`, `"alice"`, `"@group"`, a number, or a list of these.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Subjects {
    /// Every user with an id of its own: not the overflow user.
    pub everyone: bool,
    /// Users by name or number.
    pub users: Vec<Id>,
    /// Groups of the client's process, including supplementary groups.
    pub groups: Vec<Id>,
}

impl Subjects {
    fn add(&mut self, text: &str) -> Result<(), String> {
        match (text, text.strip_prefix('@')) {
            ("*", _) => self.everyone = true,
            (_, Some(group)) => self.groups.push(Id::parse(group)?),
            (user, None) => self.users.push(Id::parse(user)?),
        }
        Ok(())
    }

    /// Returns an error for `"*"`.
    pub(super) fn not_everyone(self) -> Result<Self, String> {
        if self.everyone {
            Err("not everybody can be an administrator".to_owned())
        } else {
            Ok(self)
        }
    }

    /// Returns true if it matches no user.
    pub fn is_empty(&self) -> bool {
        !self.everyone && self.users.is_empty() && self.groups.is_empty()
    }
}

impl fmt::Display for Subjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.everyone {
            return f.write_str("every user");
        }
        if self.is_empty() {
            return f.write_str("no user");
        }
        let users = self.users.iter().map(ToString::to_string);
        let groups = self.groups.iter().map(|g| format!("@{g}"));
        f.write_str(&users.chain(groups).collect::<Vec<_>>().join(", "))
    }
}

impl<'de> Deserialize<'de> for Subjects {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Several;
        impl<'de> Visitor<'de> for Several {
            type Value = Subjects;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"*\", a user, a \"@group\", or a list of them")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Subjects, E> {
                let mut subjects = Subjects::default();
                subjects.add(text).map_err(E::custom)?;
                Ok(subjects)
            }
            fn visit_i64<E: Error>(self, n: i64) -> Result<Subjects, E> {
                Ok(Subjects { users: vec![number(n, &self)?], ..Subjects::default() })
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Subjects, A::Error> {
                let mut subjects = Subjects::default();
                while let Some(one) = seq.next_element::<Subjects>()? {
                    subjects.everyone |= one.everyone;
                    subjects.users.extend(one.users);
                    subjects.groups.extend(one.groups);
                }
                Ok(subjects)
            }
        }
        d.deserialize_any(Several)
    }
}

fn number<E: Error>(n: i64, expected: &dyn serde::de::Expected) -> Result<Id, E> {
    u32::try_from(n).map(Id::Number).map_err(|_| E::invalid_value(Unexpected::Signed(n), expected))
}
