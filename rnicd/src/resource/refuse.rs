//! Constructors of refusals.

use rnic_abi::abi::control::Refusal;

use crate::config::{Config, Kind, Maximum, Profile};

pub fn no_such(kind: &str, handle: u32) -> Refusal {
    Refusal::NoSuchObject { kind: kind.to_owned(), handle }
}

pub fn invalid(field: &str, why: impl Into<String>) -> Refusal {
    Refusal::Invalid { field: field.to_owned(), why: why.into() }
}

pub fn in_use(kind: &str, handle: u32, by: impl Into<String>) -> Refusal {
    Refusal::InUse { kind: kind.to_owned(), handle, by: by.into() }
}

pub fn wrong_state(kind: &str, handle: u32, state: &str, needs: &str) -> Refusal {
    let [kind, state, needs] = [kind, state, needs].map(str::to_owned);
    Refusal::WrongState { kind, handle, state, needs }
}

/// Returns the refusal for an exhausted resource of the machine, with errno ENOMEM.
pub fn system(what: &str, error: &dyn std::fmt::Display) -> Refusal {
    let errno = crate::system::number(&rustix::io::Errno::NOMEM.into());
    Refusal::System { what: what.to_owned(), error: error.to_string(), errno }
}

/// Returns the refusal for a request whose descriptor was lost. The control thread ends a client
/// that sends none, so this process must be out of descriptors.
pub fn lost_descriptor() -> Refusal {
    crate::system::refusal("cannot take the descriptor", &rustix::io::Errno::MFILE.into())
}

/// Returns a refusal if a value of one object is above the configured maximum.
pub fn at_most(field: &str, value: u64, key: &str, limit: u64) -> Result<(), Refusal> {
    if value <= limit {
        return Ok(());
    }
    Err(Refusal::AboveMaximum { field: field.to_owned(), value, key: key.to_owned(), limit })
}

/// Returns a refusal if a value of one object is above the maximum of the profile, or above the
/// configured one.
pub fn at_most_of(config: &Config, kind: Kind, field: &str, value: u64) -> Result<(), Refusal> {
    let profile = &config.wired.profile;
    above_profile(profile, profile.limit(kind), value)?;
    let key = format!("limits.{}", kind.key());
    at_most(field, value, &key, config.limits.device.of(kind))
}

/// Returns a refusal if a value, or a number of objects, is above a maximum of the profile.
pub fn above_profile(profile: &Profile, most: Option<Maximum>, asked: u64) -> Result<(), Refusal> {
    let Some(Maximum { key, limit, errno }) = most.filter(|most| asked > most.limit) else {
        return Ok(());
    };
    let profile = profile.name().to_owned();
    Err(Refusal::AboveProfile { profile, key: key.to_owned(), limit, asked, errno })
}
