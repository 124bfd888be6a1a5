//! Usage per session, per user and for the device, and the limits on it.
//!
//! A session has an [`Account`]. A charge to the account is also a charge to its user and to the
//! device. The amount is charged before the object is created, and the object then owns the
//! [`Charge`]. Dropping the charge credits the amount, on any thread. The charge is dropped with
//! the object, or with the request that failed to create the object, so no code has to credit it
//! explicitly. This module handles kinds and amounts, not objects.
//!
//! The reaper drops objects of sessions on its own threads, so the ledger needs locks. No lock
//! guard leaves this file. Lock order: the ledger before an account.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rnic_abi::abi::control::{LimitRow, Refusal};

use super::policy::Rights;
use super::{Capacity, refuse};
pub use crate::config::Kind;
use crate::config::{Config, Profile, UNLIMITED};

/// One amount for each kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Amounts([u64; Kind::COUNT]);

impl Default for Amounts {
    fn default() -> Self {
        Amounts([0; Kind::COUNT])
    }
}

impl Amounts {
    /// Returns the amount of `kind`.
    pub fn of(&self, kind: Kind) -> u64 {
        self.0[kind as usize]
    }

    fn add(&mut self, kind: Kind, amount: u64) {
        self.0[kind as usize] += amount;
    }

    /// Adds the amounts of all kinds.
    pub fn add_all(&mut self, other: &Amounts) {
        Kind::ALL.into_iter().for_each(|kind| self.add(kind, other.of(kind)));
    }

    fn subtract(&mut self, kind: Kind, amount: u64) {
        self.0[kind as usize] = self.of(kind).saturating_sub(amount);
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; Kind::COUNT]
    }
}

/// The usage of the device and of its users, and the limits of the device.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Mutex<Books>>);

#[derive(Debug)]
struct Books {
    device: [u64; Kind::COUNT],
    profile: Profile,
    qps_key: String,
    /// Maximum number of QPs of one user if a lack of descriptors has lowered the device's limit.
    qps_of_user: u64,
    descriptors: Descriptors,
    used: Amounts,
    /// Users with any usage.
    users: BTreeMap<u32, UserAccount>,
}

/// Usage and rights of a user.
#[derive(Clone, Debug)]
pub struct UserAccount {
    /// Sum over the user's sessions.
    pub used: Amounts,
    /// Rights from the user's first charge or the last [`Account::set_rights`].
    pub rights: Arc<Rights>,
}

/// Usage and rights of a session.
#[derive(Debug)]
pub struct Account {
    ledger: Ledger,
    /// Owner of the session. It never changes, even if the rights do.
    user: u32,
    own: Mutex<Own>,
}

#[derive(Debug)]
struct Own {
    used: Amounts,
    rights: Arc<Rights>,
}

/// A charged amount. Dropping it credits the amount.
#[derive(Debug)]
#[must_use = "a dropped charge is credited at once"]
pub struct Charge {
    account: Arc<Account>,
    kind: Kind,
    amount: u64,
}

impl Account {
    /// Charges `amount` to the session, its user and the device. The error reports the limit that
    /// would be exceeded.
    pub fn charge(self: &Arc<Self>, kind: Kind, amount: u64) -> Result<Charge, Refusal> {
        let mut books = self.ledger.0.lock();
        let mut own = self.own.lock();
        books.charge(&mut own, kind, amount)?;
        Ok(Charge { account: self.clone(), kind, amount })
    }

    /// Returns the amount of `kind` that the session can still be charged.
    pub fn room(&self, kind: Kind) -> u64 {
        let books = self.ledger.0.lock();
        let own = self.own.lock();
        books.room(&own, kind)
    }

    /// Returns the session's usage of every kind.
    pub fn amounts(&self) -> Amounts {
        self.own.lock().used.clone()
    }

    /// Returns the session's rights.
    pub fn rights(&self) -> Arc<Rights> {
        self.own.lock().rights.clone()
    }

    /// Replaces the rights of the session and its user. Existing charges stay, even above the new
    /// limits.
    pub fn set_rights(&self, rights: &Arc<Rights>) {
        let mut books = self.ledger.0.lock();
        let mut own = self.own.lock();
        own.rights = rights.clone();
        if let Some(user) = books.users.get_mut(&self.user) {
            user.rights = rights.clone();
        }
    }
}

impl Charge {
    /// Returns the charged amount.
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Credits the part above `amount`.
    pub fn reduce_to(&mut self, amount: u64) {
        let more = self.amount.saturating_sub(amount);
        self.amount -= more;
        self.account.credit(self.kind, more);
    }

    /// Merges another charge of the same kind and session into this one.
    pub fn add(&mut self, mut other: Charge) {
        debug_assert!(self.kind == other.kind && Arc::ptr_eq(&self.account, &other.account));
        self.amount += std::mem::take(&mut other.amount);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.credit(self.kind, self.amount);
    }
}

impl Account {
    fn credit(&self, kind: Kind, amount: u64) {
        let mut books = self.ledger.0.lock();
        let mut own = self.own.lock();
        own.used.subtract(kind, amount);
        books.used.subtract(kind, amount);
        if let Some(user) = books.users.get_mut(&self.user) {
            user.used.subtract(kind, amount);
            if user.used.is_empty() {
                books.users.remove(&self.user);
            }
        }
    }
}

impl Ledger {
    /// Creates a ledger without any usage.
    pub fn new(config: &Config, capacity: &Capacity) -> Self {
        let mut books = Books {
            device: [UNLIMITED; Kind::COUNT],
            profile: Profile::default(),
            qps_key: String::new(),
            qps_of_user: UNLIMITED,
            descriptors: Descriptors::default(),
            used: Amounts::default(),
            users: BTreeMap::new(),
        };
        books.set_limits(config, capacity);
        Ledger(Arc::new(Mutex::new(books)))
    }

    /// Replaces the limits of the device. Existing charges stay, even above the new limits.
    pub fn set_limits(&self, config: &Config, capacity: &Capacity) {
        self.0.lock().set_limits(config, capacity);
    }

    /// Returns a new account for a session, without any usage.
    pub fn open(&self, rights: Arc<Rights>) -> Arc<Account> {
        let user = rights.uid;
        let own = Mutex::new(Own { used: Amounts::default(), rights });
        Arc::new(Account { ledger: self.clone(), user, own })
    }

    /// Returns the usage of the device.
    pub fn used(&self) -> Amounts {
        self.0.lock().used.clone()
    }

    /// Returns the number of sessions, MRs, MWs, CQs, QPs, SRQs and start-ups of all users.
    pub fn objects(&self) -> u64 {
        let used = &self.0.lock().used;
        let kinds = [
            Kind::Sessions,
            Kind::Mrs,
            Kind::Windows,
            Kind::Cqs,
            Kind::Qps,
            Kind::Srqs,
            Kind::Startups,
        ];
        kinds.iter().map(|kind| used.of(*kind)).sum()
    }

    /// Returns the device's limit.
    pub fn device_limit(&self, kind: Kind) -> u64 {
        self.0.lock().device[kind as usize]
    }

    /// Returns the maximum of `kind` that a client with these rights can use, regardless of the
    /// current usage.
    pub fn most(&self, rights: &Rights, kind: Kind) -> u64 {
        let books = self.0.lock();
        let own = rights.session_limit(kind).min(books.user_limit(rights, kind));
        own.min(books.device[kind as usize])
    }

    /// Returns the limits and the usage of the device.
    pub fn device_rows(&self) -> Vec<LimitRow> {
        self.0.lock().device_rows()
    }

    /// Returns the limits and the usage of a user.
    pub fn user_rows(&self, rights: &Rights) -> Vec<LimitRow> {
        self.0.lock().user_rows(rights)
    }

    /// Returns the first user with any usage whose user ID is at least `uid`.
    pub fn user_from(&self, uid: u32) -> Option<(u32, UserAccount)> {
        let books = self.0.lock();
        books.users.range(uid..).next().map(|(uid, account)| (*uid, account.clone()))
    }

    /// Returns the number of users with any usage.
    pub fn users(&self) -> usize {
        self.0.lock().users.len()
    }

    /// Returns true if any other user has any usage.
    pub fn has_others(&self, uid: u32) -> bool {
        self.0.lock().users.keys().any(|user| *user != uid)
    }
}

impl Books {
    fn set_limits(&mut self, config: &Config, capacity: &Capacity) {
        let configured = config.device_count(Kind::Qps);
        self.profile = config.wired.profile.clone();
        self.qps_key = capacity.qps_key(configured);
        self.qps_of_user =
            if capacity.qps < configured { u64::from(capacity.qps) / 2 } else { UNLIMITED };
        self.descriptors = Descriptors {
            nofile: capacity.nofile,
            limit: capacity.control_descriptors(),
            per_session: capacity.per_session(),
        };
        self.device = Kind::ALL.map(|kind| match kind {
            Kind::Qps => capacity.qps.into(),
            _ => config.device_limit(kind),
        });
    }

    fn charge(&mut self, own: &mut Own, kind: Kind, amount: u64) -> Result<(), Refusal> {
        let rights = &own.rights;
        let of_session = own.used.of(kind);
        check(of_session, amount, rights.session_limit(kind), || rights.session_key(kind))?;
        let of_user = self.of_user(rights.uid, kind);
        check(of_user, amount, self.user_limit(rights, kind), || self.user_key(rights, kind))?;
        let of_device = self.used.of(kind);
        let asked = of_device.saturating_add(amount);
        refuse::above_profile(&self.profile, self.profile.limit(kind), asked)?;
        let limit = self.device[kind as usize];
        check(of_device, amount, limit, || self.device_key(kind))?;
        let none = Amounts::default();
        let of_user = self.users.get(&rights.uid).map_or(&none, |account| &account.used);
        self.descriptors.check(rights, of_user, &self.used, kind, amount)?;
        let fresh = || UserAccount { used: Amounts::default(), rights: rights.clone() };
        self.users.entry(rights.uid).or_insert_with(fresh).used.add(kind, amount);
        self.used.add(kind, amount);
        own.used.add(kind, amount);
        Ok(())
    }

    fn room(&self, own: &Own, kind: Kind) -> u64 {
        let rights = &own.rights;
        let session = rights.session_limit(kind).saturating_sub(own.used.of(kind));
        let of_user = self.of_user(rights.uid, kind);
        let user = self.user_limit(rights, kind).saturating_sub(of_user);
        let device = self.device[kind as usize].saturating_sub(self.used.of(kind));
        session.min(user).min(device)
    }

    fn device_rows(&self) -> Vec<LimitRow> {
        let limited = |kind: &Kind| self.device[*kind as usize] != UNLIMITED;
        let row = |kind| LimitRow {
            key: self.device_key(kind),
            scope: "device".to_owned(),
            limit: self.device[kind as usize],
            used: self.used.of(kind),
        };
        Kind::counted().filter(limited).map(row).collect()
    }

    fn user_rows(&self, rights: &Rights) -> Vec<LimitRow> {
        let row = |kind| LimitRow {
            key: self.user_key(rights, kind),
            scope: format!("user {}", rights.uid),
            limit: self.user_limit(rights, kind),
            used: self.of_user(rights.uid, kind),
        };
        Kind::counted().map(row).collect()
    }

    fn of_user(&self, uid: u32, kind: Kind) -> u64 {
        self.users.get(&uid).map_or(0, |account| account.used.of(kind))
    }

    /// Returns a user's limit. For QPs, it is at most half of a device limit lowered for lack of
    /// descriptors, unless the daemon runs as this user.
    fn user_limit(&self, rights: &Rights, kind: Kind) -> u64 {
        let configured = rights.user_limit(kind);
        match kind {
            Kind::Qps if !rights.own => configured.min(self.qps_of_user),
            _ => configured,
        }
    }

    fn user_key(&self, rights: &Rights, kind: Kind) -> String {
        if self.user_limit(rights, kind) < rights.user_limit(kind) {
            format!("half of {} for user {}", self.qps_key, rights.uid)
        } else {
            rights.user_key(kind)
        }
    }

    fn device_key(&self, kind: Kind) -> String {
        let of_profile = self.profile.limit(kind);
        if let Some(most) = of_profile.filter(|most| most.limit == self.device[kind as usize]) {
            return format!("{} of profile {}", most.key, self.profile.name());
        }
        match kind {
            Kind::Qps => self.qps_key.clone(),
            _ => format!("limits.{}", kind.key()),
        }
    }
}

/// Limit on the daemon's descriptors for sessions, channels and listeners. It has no configuration
/// key. No client can connect when they are exhausted, so one user gets at most half of them,
/// unless the daemon runs as this user.
#[derive(Debug, Default)]
struct Descriptors {
    nofile: u64,
    limit: u64,
    per_session: u64,
}

impl Descriptors {
    fn of_one(&self, kind: Kind) -> u64 {
        match kind {
            Kind::Sessions => self.per_session,
            _ => kind.row().has_descriptor.into(),
        }
    }

    fn of(&self, amounts: &Amounts) -> u64 {
        Kind::counted().map(|kind| amounts.of(kind) * self.of_one(kind)).sum()
    }

    fn check(
        &self,
        rights: &Rights,
        of_user: &Amounts,
        used: &Amounts,
        kind: Kind,
        amount: u64,
    ) -> Result<(), Refusal> {
        let wanted = amount.saturating_mul(self.of_one(kind));
        if wanted == 0 {
            return Ok(());
        }
        let for_what =
            format!("sessions, channels and listeners (RLIMIT_NOFILE = {})", self.nofile);
        if !rights.own {
            let key = || format!("half of the descriptors for {for_what} for user {}", rights.uid);
            check(self.of(of_user), wanted, self.limit / 2, key)?;
        }
        check(self.of(used), wanted, self.limit, || format!("descriptors for {for_what}"))
    }
}

fn check(used: u64, amount: u64, limit: u64, key: impl FnOnce() -> String) -> Result<(), Refusal> {
    match used.checked_add(amount) {
        Some(sum) if sum <= limit => Ok(()),
        _ => Err(Refusal::Limit { key: key(), limit, used, wanted: amount }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::policy::{Identity, Overflow, Policy};
    use super::*;
    use crate::config::Config;

    struct Fixture {
        ledger: Ledger,
        policy: Policy,
    }

    fn config(text: &str) -> Config {
        Config::parse(std::path::Path::new("t"), text).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Returns the rules of a daemon that runs as [`OWN`], whatever user runs the tests.
    fn policy(config: &Config) -> Policy {
        Policy::for_system(config, Overflow { uid: 65_534, gid: 65_534 }, OWN)
    }

    fn fixture(nofile: u64, text: &str) -> Fixture {
        let config = config(text);
        let capacity = Capacity::derive(&config, nofile, 1);
        Fixture { ledger: Ledger::new(&config, &capacity), policy: policy(&config) }
    }

    impl Fixture {
        fn session(&self, uid: u32) -> Arc<Account> {
            self.ledger.open(self.rights(uid))
        }

        fn rights(&self, uid: u32) -> Arc<Rights> {
            self.policy.rights(&Identity { uid, gids: vec![uid], foreign: false })
        }
    }

    fn granted(account: &Arc<Account>, kind: Kind, amount: u64) -> Charge {
        account.charge(kind, amount).unwrap_or_else(|e| panic!("{e}"))
    }

    fn refused(account: &Arc<Account>, kind: Kind, amount: u64) -> String {
        account.charge(kind, amount).map_or_else(|e| e.to_string(), |charge| panic!("{charge:?}"))
    }

    /// User of the daemon, different from all users in the tests.
    const OWN: u32 = 999;

    const FEW: &str = "[limits]\npds = 5\n[limits.user]\npds = 3\n[limits.session]\npds = 2\n";

    #[test]
    fn the_limit_of_session_user_or_device_is_named() {
        let f = fixture(1 << 20, FEW);
        let a = f.session(1000);
        let b = f.session(1000);
        let c = f.session(1001);
        let of_a = granted(&a, Kind::Pds, 2);
        let text = "limits.session.pds = 2 reached (asked for 1 more, 2 in use)";
        assert_eq!(refused(&a, Kind::Pds, 1), text);
        let of_b = granted(&b, Kind::Pds, 1);
        let text = "limits.user.pds (user 1000) = 3 reached (asked for 1 more, 3 in use)";
        assert_eq!(refused(&b, Kind::Pds, 1), text);
        assert_eq!(c.room(Kind::Pds), 2);
        let of_c = granted(&c, Kind::Pds, 2);
        let text = "limits.pds = 5 reached (asked for 1 more, 5 in use)";
        assert_eq!(refused(&f.session(1002), Kind::Pds, 1), text);
        drop(of_a);
        assert_eq!((f.ledger.used().of(Kind::Pds), a.amounts().of(Kind::Pds)), (3, 0));
        assert_eq!(b.room(Kind::Pds), 1);
        drop((of_b, of_c));
        assert_eq!(f.ledger.used(), Amounts::default());
        assert_eq!(f.ledger.users(), 0, "users without usage are removed");
    }

    #[test]
    fn profile_limits_all_sessions_together() {
        let mut config = config("");
        config.wired.profile.keys.max_pd = Some(3);
        let capacity = Capacity::derive(&config, 1 << 20, 1);
        let f = Fixture { ledger: Ledger::new(&config, &capacity), policy: policy(&config) };
        let a = f.session(1000);
        assert_eq!(f.ledger.most(&f.rights(1000), Kind::Pds), 3);
        let _of_a = granted(&a, Kind::Pds, 2);
        let b = f.session(1001);
        let _of_b = granted(&b, Kind::Pds, 1);
        assert_eq!(refused(&b, Kind::Pds, 1), "profile rnicd: max_pd = 3, asked for 4");
        let row = f.ledger.device_rows().into_iter().find(|row| row.key.contains("max_pd"));
        assert_eq!(row.map(|row| (row.limit, row.used)), Some((3, 3)));
    }

    #[test]
    fn descriptor_limits_name_nofile() {
        // 136 unreserved descriptors: 34 of them are not for connections, and 8 of these are for
        // closing. A session uses 4.
        let f = fixture(200, "");
        let a = f.session(1000);
        let b = f.session(1001);
        let c = f.session(1002);
        let of_a = (granted(&a, Kind::Sessions, 1), granted(&a, Kind::Channels, 9));
        let text = "half of the descriptors for sessions, channels and listeners (RLIMIT_NOFILE = \
                    200) for user 1000 = 13 reached (asked for 1 more, 13 in use)";
        assert_eq!(refused(&a, Kind::Listeners, 1), text);
        let _without_any = granted(&a, Kind::Pds, 1);
        let _of_b = granted(&b, Kind::Sessions, 3);
        let e = refused(&c, Kind::Sessions, 1);
        assert!(e.starts_with("descriptors for sessions,") && e.contains(" = 26 reached"), "{e}");
        drop(of_a);
        drop(granted(&c, Kind::Sessions, 1));
    }

    #[test]
    fn refused_charge_changes_nothing() {
        let f = fixture(1 << 20, FEW);
        let own = f.session(1000);
        let _have = granted(&own, Kind::SharedBytes, 4096);
        assert!(own.charge(Kind::SharedBytes, u64::MAX).is_err());
        assert_eq!(own.amounts().of(Kind::SharedBytes), 4096);
        assert_eq!(f.ledger.used().of(Kind::SharedBytes), 4096);
    }

    #[test]
    fn qps_lowered_by_nofile_name_it() {
        let f = fixture(72, FEW);
        let own = f.session(1000);
        let _have = granted(&own, Kind::Qps, 2);
        let e = refused(&own, Kind::Qps, 1);
        let key = "half of limits.qps (lowered by RLIMIT_NOFILE = 72) for user 1000 = 2 reached";
        assert!(e.starts_with(key), "{e}");
        assert_eq!(own.room(Kind::Qps), 0);
        let second = f.session(1001);
        let third = f.session(1002);
        let _have = (granted(&second, Kind::Qps, 2), granted(&third, Kind::Qps, 1));
        let e = refused(&third, Kind::Qps, 1);
        assert!(e.contains("RLIMIT_NOFILE = 72"), "{e}");
    }

    #[test]
    fn the_daemons_own_user_has_all_descriptors() {
        let f = fixture(72, FEW);
        let own = f.session(OWN);
        assert_eq!(own.room(Kind::Qps), 5);
        assert_eq!(f.session(1000).room(Kind::Qps), 2);
    }

    #[test]
    fn lowered_limit_refuses_new_charges() {
        let f = fixture(1 << 20, "");
        let own = f.session(1000);
        let mut have = granted(&own, Kind::Qps, 3);
        let lowered = config("[limits]\nqps = 2\n");
        f.ledger.set_limits(&lowered, &Capacity::derive(&lowered, 1 << 20, 1));
        let lowered = Fixture { ledger: f.ledger.clone(), policy: policy(&lowered) };
        own.set_rights(&lowered.rights(1000));
        assert!(own.charge(Kind::Qps, 1).is_err());
        assert_eq!(own.room(Kind::Qps), 0);
        have.reduce_to(1);
        assert_eq!(own.room(Kind::Qps), 1);
        have.add(granted(&own, Kind::Qps, 1));
        assert_eq!(
            (have.amount(), own.amounts().of(Kind::Qps), f.ledger.used().of(Kind::Qps)),
            (2, 2, 2)
        );
        drop(have);
        assert_eq!(f.ledger.used(), Amounts::default());
    }

    /// The reaper drops objects of a session after the manager has removed the session.
    #[test]
    fn charge_is_credited_on_any_thread() {
        let f = fixture(1 << 20, "");
        let account = f.session(1000);
        let charges: Vec<Charge> = (0..8).map(|_| granted(&account, Kind::Mrs, 1)).collect();
        drop(account);
        assert_eq!(f.ledger.used().of(Kind::Mrs), 8);
        std::thread::scope(|scope| drop(scope.spawn(|| drop(charges)).join()));
        assert_eq!((f.ledger.used(), f.ledger.users()), (Amounts::default(), 0));
    }
}
