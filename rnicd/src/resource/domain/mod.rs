//! Protection domains: those of one session, and named ones that several share.

mod named;
mod requests;

use std::sync::atomic::AtomicU32;

use crate::resource::ledger::Charge;
use crate::resource::numbers::Handle;
use crate::resource::uses::{Use, Users};
pub use named::{Member, Membership, NamedPds, Opened};

/// Counted where the domain is.
pub type UseOfPd = Use<AtomicU32>;

/// A protection domain, as far as this session uses it.
#[derive(Debug)]
pub struct Pd {
    /// How often a named one was opened besides the first time.
    pub reopened: u32,
    pub mrs: Users,
    pub qps: Users,
    pub windows: Users,
    pub srqs: Users,
    /// The session's place in it, if others may have it open too.
    pub named: Option<Opened>,
    /// Its own, unless it is named.
    _handle: Option<Handle>,
    _charge: Charge,
}

impl Pd {
    /// One of the session's own.
    pub fn private(handle: Handle, charge: Charge) -> Self {
        Pd::new(None, Some(handle), charge)
    }

    /// One that other sessions may have open too.
    pub fn named(opened: Opened, charge: Charge) -> Self {
        Pd::new(Some(opened), None, charge)
    }

    fn new(named: Option<Opened>, handle: Option<Handle>, charge: Charge) -> Self {
        Pd {
            reopened: 0,
            mrs: Users::default(),
            qps: Users::default(),
            windows: Users::default(),
            srqs: Users::default(),
            named,
            _handle: handle,
            _charge: charge,
        }
    }
}
