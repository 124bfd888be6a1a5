//! Lists of limits and their usage.

use rnic_abi::abi::control::LimitRow;
use rnic_abi::types::SessionId;

use super::page::{self, Page, key};
use crate::config::{Kind, Scope, UNLIMITED};
use crate::resource::Manager;
use crate::resource::ledger::UserAccount;
use crate::resource::policy::Rights;
use crate::resource::session::Session;

impl Manager {
    /// Returns a page of limits and usage: of the device, of named domains, of users and of
    /// sessions, or of one session and its user.
    pub(in crate::resource) fn limit_rows(
        &self,
        own: Option<SessionId>,
        from: u64,
    ) -> Page<LimitRow> {
        let device = match own {
            Some(_) => Vec::new(),
            None => self.device_limits(),
        };
        let limits_of_device = device.len();
        let place = LimitKey::of(from);
        let device = (0..).zip(device).map(|(row, limit)| (LimitKey::device(row), limit));
        let user = own.and_then(|own| self.sessions.get(&own)).map(|s| s.client.identity.uid);
        let users = self.users_from(user, place.user());
        let users = users.flat_map(|(uid, account)| {
            let rows = (0..).zip(self.user_limits(&account));
            rows.map(move |(row, limit)| (LimitKey::of_user(uid, row), limit)).collect::<Vec<_>>()
        });
        let sessions = page::sessions(&self.sessions, own, key(place.session(), 0));
        let sessions = sessions.flat_map(|session| {
            let rows = (0..).zip(session_limits(session));
            rows.map(|(row, limit)| (LimitKey::of_session(session.id, row), limit))
        });
        let all = device.chain(users).chain(sessions).filter(|(key, _)| *key >= from);
        let (users, sessions) = match own {
            Some(_) => (1, 1),
            None => (self.ledger.users(), self.sessions.len()),
        };
        let limited = |kind: &Kind| kind.default(Scope::Session).is_some();
        let of_session = Kind::counted().filter(limited).count();
        let total = limits_of_device
            + users * (Kind::counted().count() + UNCOUNTED_OF_USER)
            + sessions * of_session;
        Page::new(all, total, |row| row)
    }

    /// Returns users with any usage, from `from` on, in the order of their IDs. If `only` is set,
    /// returns at most this user.
    fn users_from(
        &self,
        only: Option<u32>,
        from: Option<u32>,
    ) -> impl Iterator<Item = (u32, UserAccount)> {
        let mut next = from.map(|from| only.unwrap_or(from));
        std::iter::from_fn(move || {
            let (uid, account) = self.ledger.user_from(next?)?;
            next = uid.checked_add(1);
            only.is_none_or(|only| only == uid).then_some((uid, account))
        })
    }

    fn device_limits(&self) -> Vec<LimitRow> {
        let limits = &self.config.limits.device;
        let mut rows = self.ledger.device_rows();
        rows.push(LimitRow {
            key: self.capacity.startups_key(limits.count(Kind::Startups)),
            scope: "device".to_owned(),
            limit: self.capacity.startups.into(),
            used: self.cm.startups() as u64,
        });
        rows.push(LimitRow {
            key: self.capacity.closing_key(limits.count(Kind::Closing)),
            scope: "device".to_owned(),
            limit: self.capacity.closing,
            used: self.reaper.closing_of_all() as u64,
        });
        rows.extend(self.named_pds.limit_rows(&self.policy));
        rows
    }

    fn user_limits(&self, UserAccount { rights, .. }: &UserAccount) -> Vec<LimitRow> {
        let closing = LimitRow {
            key: rights.user_key(Kind::Closing),
            scope: user_scope(rights),
            limit: self.capacity.closing_of_user(rights.user_count(Kind::Closing)),
            used: self.reaper.closing(rights.uid) as u64,
        };
        let quota = self.capacity.quota(rights);
        let startups = LimitRow {
            key: quota.startups_key,
            scope: user_scope(rights),
            limit: quota.startups.into(),
            used: self.cm.startups_of(rights.uid) as u64,
        };
        let uncounted: [LimitRow; UNCOUNTED_OF_USER] = [startups, closing];
        let mut rows = self.ledger.user_rows(rights);
        rows.extend(uncounted);
        rows
    }
}

/// Number of a user's limits that the ledger does not track.
const UNCOUNTED_OF_USER: usize = 2;

fn user_scope(rights: &Rights) -> String {
    format!("user {}", rights.uid)
}

fn session_limits(session: &Session) -> Vec<LimitRow> {
    let rights = session.account.rights();
    let used = session.account.amounts();
    let limited = |kind: &Kind| rights.session_limit(*kind) != UNLIMITED;
    let row = |kind| LimitRow {
        key: rights.session_key(kind),
        scope: format!("session {}", session.id),
        limit: rights.session_limit(kind),
        used: used.of(kind),
    };
    Kind::counted().filter(limited).map(row).collect()
}

/// Position of a limit in the list: device, then users, then sessions.
struct LimitKey {
    part: u64,
    whose: u32,
}

impl LimitKey {
    const PART: u32 = 40;
    const ROWS: u32 = 8;

    fn of(key: u64) -> Self {
        // Truncated to the 32 bits of the id.
        LimitKey { part: key >> Self::PART, whose: (key >> Self::ROWS) as u32 }
    }

    fn device(row: u32) -> u64 {
        row.into()
    }

    fn of_user(uid: u32, row: u32) -> u64 {
        1 << Self::PART | u64::from(uid) << Self::ROWS | u64::from(row)
    }

    fn of_session(session: SessionId, row: u32) -> u64 {
        2 << Self::PART | u64::from(session.0) << Self::ROWS | u64::from(row)
    }

    /// Returns the first user with limits at or after this position, or `None`.
    fn user(&self) -> Option<u32> {
        match self.part {
            0 => Some(0),
            1 => Some(self.whose),
            _ => None,
        }
    }

    /// Returns the first session with limits at or after this position.
    fn session(&self) -> SessionId {
        match self.part {
            0 | 1 => SessionId(0),
            2 => SessionId(self.whose),
            _ => SessionId(u32::MAX),
        }
    }
}
