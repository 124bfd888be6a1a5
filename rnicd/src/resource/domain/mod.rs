//! Protection domains: private, or named and shared by several sessions.

mod named;
mod requests;

use std::sync::atomic::AtomicU32;

use crate::resource::ledger::Charge;
use crate::resource::numbers::Handle;
use crate::resource::uses::{Use, Users};
pub use named::{Member, Membership, NamedPds, Opened};

/// A counted use of a domain.
pub type UseOfPd = Use<AtomicU32>;

/// A session's use of a protection domain.
#[derive(Debug)]
pub struct Pd {
    /// Further opens of a named domain, not yet closed.
    pub reopened: u32,
    pub mrs: Users,
    pub qps: Users,
    pub windows: Users,
    pub srqs: Users,
    /// The session's membership in a named domain.
    pub named: Option<Opened>,
    /// Handle of a private domain.
    _handle: Option<Handle>,
    _charge: Charge,
}

impl Pd {
    /// Creates a private domain.
    pub fn private(handle: Handle, charge: Charge) -> Self {
        Pd::new(None, Some(handle), charge)
    }

    /// Creates a use of a named domain.
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
