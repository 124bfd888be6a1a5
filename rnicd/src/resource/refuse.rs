//! Refusals in few words.

use rnic_core::abi::control::Refusal;

pub fn no_such(kind: &str, handle: u32) -> Refusal {
    Refusal::NoSuchObject { kind: kind.to_owned(), handle }
}

pub fn invalid(field: &str, why: impl Into<String>) -> Refusal {
    Refusal::Invalid { field: field.to_owned(), why: why.into() }
}

pub fn in_use(kind: &str, handle: u32, by: impl Into<String>) -> Refusal {
    Refusal::InUse { kind: kind.to_owned(), handle, by: by.into() }
}

/// Something of the machine is used up, memory as a rule.
pub fn system(what: &str, error: &dyn std::fmt::Display) -> Refusal {
    let errno = crate::system::number(&rustix::io::Errno::NOMEM.into());
    Refusal::System { what: what.to_owned(), error: error.to_string(), errno }
}

/// The descriptor of a request did not arrive: a client that sends none has been ended before, so
/// this process has none left.
pub fn lost_descriptor() -> Refusal {
    crate::system::refusal("cannot take the descriptor", &rustix::io::Errno::MFILE.into())
}

/// Refuses a value of one object that is above the configured maximum.
pub fn at_most(field: &str, value: u64, key: &str, limit: u64) -> Result<(), Refusal> {
    if value <= limit {
        return Ok(());
    }
    Err(Refusal::AboveMaximum { field: field.to_owned(), value, key: key.to_owned(), limit })
}
