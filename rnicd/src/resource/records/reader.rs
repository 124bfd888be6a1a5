//! Access to records, and their times.
//!
//! Administrators may read all records. Other clients may read the records of all sessions of their
//! user: any program of a user can debug that user's processes anyway, and `rnicctl` runs in a
//! separate session.

use std::time::{SystemTime, UNIX_EPOCH};

use rnic_abi::types::*;
use rnic_core::device::diagnoses::OwnerFilter;

use crate::clock;
use crate::resource::session::Client;

/// Returns the exclusive upper bound of the record numbers on the page that begins at `from`.
pub fn before(from: u64) -> u64 {
    if from == 0 { u64::MAX } else { from }
}

/// A session that reads records, and its rights.
#[derive(Clone, Copy)]
pub struct Reader {
    session: SessionId,
    /// User of the session, or `None` if the user id is not unique.
    account: Option<u32>,
    admin: bool,
}

impl Reader {
    pub fn of(session: SessionId, client: &Client) -> Self {
        Reader { session, account: client.account(), admin: client.rights.admin }
    }

    /// Returns true if the session may read a record of this user and session. A client without a
    /// unique user id may only read the records of its own session.
    pub fn may_read(self, owner: Option<u32>, session: Option<SessionId>) -> bool {
        match (self.admin, self.account) {
            (true, _) => true,
            (false, Some(_)) => owner == self.account,
            (false, None) => owner.is_none() && session == Some(self.session),
        }
    }

    /// Returns the filter for the records that the session may read.
    pub fn whose(self) -> OwnerFilter {
        if self.admin { OwnerFilter::All } else { OwnerFilter::Of(self.account) }
    }

    /// Returns the only session whose objects the reader may list, or `None` for all sessions.
    pub fn own(self) -> Option<SessionId> {
        (!self.admin).then_some(self.session)
    }
}

/// Monotonic and wall-clock time of one instant. Converts the time of a record to wall-clock time.
#[derive(Clone, Copy)]
pub struct ClockReading {
    now: Time,
    ms: u64,
}

impl ClockReading {
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        ClockReading { now: clock::now(), ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) }
    }

    /// Returns the wall-clock time at `time`, in milliseconds since 1970.
    pub fn at(self, time: Time) -> u64 {
        let ago = self.now.since(time).as_millis();
        self.ms.saturating_sub(u64::try_from(ago).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(session: u32, account: Option<u32>, admin: bool) -> Reader {
        Reader { session: SessionId(session), account, admin }
    }

    #[test]
    fn records_are_private_to_their_user() {
        let owner = Some(1000);
        let session = Some(SessionId(3));
        assert!(reader(3, Some(1000), false).may_read(owner, session));
        assert!(reader(4, Some(1000), false).may_read(owner, session), "rnicctl of the same user");
        assert!(!reader(4, Some(1001), false).may_read(owner, session));
        assert!(
            !reader(3, Some(1001), false).may_read(None, session),
            "an earlier session's number"
        );
        assert!(reader(9, Some(0), true).may_read(owner, session));
        assert!(reader(9, Some(0), true).may_read(None, None));
        // Two clients with the overflow user id may be different users.
        assert!(reader(3, None, false).may_read(None, session));
        assert!(!reader(4, None, false).may_read(None, session));
        assert!(!reader(3, None, false).may_read(owner, session));
        assert!(!reader(4, Some(1000), false).may_read(None, None));
    }
}
