//! Who may read which record, and when its time was.
//!
//! Administrators read everything. Others read what sessions of their own user left: whoever can
//! run a program as a user can debug that user's processes anyway, and `rnicctl` is always another
//! session than the one it is asked about.

use std::time::{SystemTime, UNIX_EPOCH};

use rnic_core::device::diagnoses::Whose;
use rnic_core::types::*;

use crate::clock;
use crate::resource::session::Client;

/// Records below this number stand on the page that begins there.
pub fn before(from: u64) -> u64 {
    if from == 0 { u64::MAX } else { from }
}

/// The session that asks for records, and what it may read.
#[derive(Clone, Copy)]
pub struct Reader {
    session: SessionId,
    /// Its user, if the kernel could name him here.
    account: Option<u32>,
    admin: bool,
}

impl Reader {
    pub fn of(session: SessionId, client: &Client) -> Self {
        Reader { session, account: client.account(), admin: client.admin }
    }

    /// Whether a record of this user and session is theirs to read. Whom the kernel cannot name
    /// sees what his session left: others whom it cannot name need not be the same user.
    pub fn may_read(self, owner: Option<u32>, session: Option<SessionId>) -> bool {
        match (self.admin, self.account) {
            (true, _) => true,
            (false, Some(_)) => owner == self.account,
            (false, None) => owner.is_none() && session == Some(self.session),
        }
    }

    /// Among whose records his are.
    pub fn whose(self) -> Whose {
        if self.admin { Whose::All } else { Whose::Of(self.account) }
    }

    /// The session whose objects alone it sees, unless it sees everybody's.
    pub fn own(self) -> Option<SessionId> {
        (!self.admin).then_some(self.session)
    }
}

/// The two clocks at one instant: records are kept by the one and told by the other.
#[derive(Clone, Copy)]
pub struct Wall {
    now: Time,
    ms: u64,
}

impl Wall {
    pub fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Wall { now: clock::now(), ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX) }
    }

    /// The wall clock at `time`, in milliseconds since 1970.
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
    fn records_are_for_their_user_and_for_administrators() {
        let (owner, session) = (Some(1000), Some(SessionId(3)));
        assert!(reader(3, Some(1000), false).may_read(owner, session));
        assert!(reader(4, Some(1000), false).may_read(owner, session), "rnicctl of the same user");
        assert!(!reader(4, Some(1001), false).may_read(owner, session));
        assert!(
            !reader(3, Some(1001), false).may_read(None, session),
            "an earlier session's number"
        );
        assert!(reader(9, Some(0), true).may_read(owner, session));
        assert!(reader(9, Some(0), true).may_read(None, None));
        // Two whom the kernel cannot name need not be one user.
        assert!(reader(3, None, false).may_read(None, session));
        assert!(!reader(4, None, false).may_read(None, session));
        assert!(!reader(3, None, false).may_read(owner, session));
        assert!(!reader(4, Some(1000), false).may_read(None, None));
    }
}
