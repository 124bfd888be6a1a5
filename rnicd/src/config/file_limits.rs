//! `[limits]` and its sections in the file: the value of each key, with its position.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use toml::Spanned;

use super::kind::{Kind, Scope, Unit};
use super::units::Size;

/// Values that one section sets. Takes no memory if it sets none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields(Vec<Option<Written>>);

/// A value and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// A count, or a number of bytes.
    pub value: u64,
    /// Byte offset of the value in the file.
    pub at: usize,
}

impl Fields {
    /// Returns the value of a kind, if it is set.
    pub fn of(&self, kind: Kind) -> Option<Written> {
        self.0.get(kind as usize).copied().flatten()
    }

    fn set(&mut self, kind: Kind, written: Written) {
        self.0.resize(Kind::COUNT, None);
        self.0[kind as usize] = Some(written);
    }
}

/// `[limits]` with the sections in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitsSection {
    /// `[limits]`
    pub device: Fields,
    /// `[limits.user]`
    pub user: Fields,
    /// `[limits.session]`
    pub session: Fields,
    /// `[limits.peer]`
    pub peer: Fields,
}

impl LimitsSection {
    /// The section of a scope.
    pub fn of(&self, scope: Scope) -> &Fields {
        match scope {
            Scope::Device => &self.device,
            Scope::User => &self.user,
            Scope::Session => &self.session,
            Scope::Peer => &self.peer,
        }
    }

    fn of_mut(&mut self, scope: Scope) -> &mut Fields {
        match scope {
            Scope::Device => &mut self.device,
            Scope::User => &mut self.user,
            Scope::Session => &mut self.session,
            Scope::Peer => &mut self.peer,
        }
    }
}

/// Reads `[limits]`.
pub fn limits<'de, D: Deserializer<'de>>(d: D) -> Result<LimitsSection, D::Error> {
    Section(Scope::Device).deserialize(d)
}

/// Reads the values that a rule sets instead of `[limits.user]`.
pub fn of_user<'de, D: Deserializer<'de>>(d: D) -> Result<Fields, D::Error> {
    Ok(Section(Scope::User).deserialize(d)?.user)
}

/// Reads the values that a rule sets instead of `[limits.session]`.
pub fn of_session<'de, D: Deserializer<'de>>(d: D) -> Result<Fields, D::Error> {
    Ok(Section(Scope::Session).deserialize(d)?.session)
}

/// A section of this scope. The section of the device contains the others.
#[derive(Clone, Copy)]
struct Section(Scope);

/// A key in a section.
enum Key {
    Limit(Kind),
    Section(Scope),
}

impl Section {
    fn inner(self) -> impl Iterator<Item = Scope> {
        let inner = Scope::ALL.into_iter().filter(|scope| *scope != Scope::Device);
        inner.filter(move |_| self.0 == Scope::Device)
    }
}

fn name(section: Scope) -> &'static str {
    section.section().trim_start_matches("limits.")
}

impl<'de> DeserializeSeed<'de> for Section {
    type Value = LimitsSection;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<LimitsSection, D::Error> {
        struct OneSection(Section);
        impl<'de> Visitor<'de> for OneSection {
            type Value = LimitsSection;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of limits")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<LimitsSection, M::Error> {
                let OneSection(section) = self;
                let mut all = LimitsSection::default();
                while let Some(key) = map.next_key_seed(KeyOf(section))? {
                    match key {
                        Key::Limit(kind) => {
                            let written = match kind.row().unit {
                                Unit::Count => {
                                    let value = map.next_value::<Spanned<u32>>()?;
                                    let at = value.span().start;
                                    Written { value: value.into_inner().into(), at }
                                }
                                Unit::Bytes => {
                                    let value = map.next_value::<Spanned<Size>>()?;
                                    let at = value.span().start;
                                    Written { value: value.into_inner().0, at }
                                }
                            };
                            all.of_mut(section.0).set(kind, written);
                        }
                        Key::Section(inner) => {
                            let read = map.next_value_seed(Section(inner))?;
                            *all.of_mut(inner) = read.of(inner).clone();
                        }
                    }
                }
                Ok(all)
            }
        }
        d.deserialize_map(OneSection(self))
    }
}

/// Reads a key. An unknown key fails here, so that the error is located at the key and not at its
/// value.
struct KeyOf(Section);

impl<'de> DeserializeSeed<'de> for KeyOf {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Key, D::Error> {
        struct OneKey(Section);
        impl Visitor<'_> for OneKey {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the key of a limit")
            }

            fn visit_str<E: Error>(self, key: &str) -> Result<Key, E> {
                let OneKey(section) = self;
                if let Some(kind) = Kind::with_key(section.0, key) {
                    return Ok(Key::Limit(kind));
                }
                if let Some(inner) = section.inner().find(|inner| name(*inner) == key) {
                    return Ok(Key::Section(inner));
                }
                let known =
                    Kind::of_scope(section.0).map(Kind::key).chain(section.inner().map(name));
                let known: Vec<String> = known.map(|key| format!("`{key}`")).collect();
                Err(E::custom(format!(
                    "unknown field `{key}`, expected one of {}",
                    known.join(", ")
                )))
            }
        }
        d.deserialize_identifier(OneKey(self.0))
    }
}
