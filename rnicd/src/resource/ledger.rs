//! Who has how much: counts per session, per user and for the device, and the limits they may not
//! pass.
//!
//! Every object is charged here before it is made and credited after it is gone. The manager
//! calls it; it knows kinds and numbers, not objects.

use std::collections::BTreeMap;
use std::sync::Arc;

use rnic_core::abi::control::{LimitRow, Refusal};

use super::Capacity;
pub use super::kind::Kind;
use super::kind::UNLIMITED;
use super::policy::Rights;
use crate::config::Limits;

/// An amount of every kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amounts([u64; Kind::COUNT]);

impl Amounts {
    /// How much of `kind` there is.
    pub fn of(&self, kind: Kind) -> u64 {
        self.0[kind as usize]
    }

    fn add(&mut self, kind: Kind, amount: u64) {
        self.0[kind as usize] += amount;
    }

    fn subtract(&mut self, kind: Kind, amount: u64) {
        self.0[kind as usize] = self.of(kind).saturating_sub(amount);
    }

    fn is_empty(&self) -> bool {
        self.0 == [0; Kind::COUNT]
    }
}

/// What a session has, and what it may have.
#[derive(Clone, Debug)]
pub struct Counts {
    own: Amounts,
    /// What it may have. They change when the configuration does.
    pub rights: Arc<Rights>,
}

impl Counts {
    /// Nothing yet.
    pub fn new(rights: Arc<Rights>) -> Self {
        Counts { own: Amounts::default(), rights }
    }

    /// How much of `kind` there is.
    pub fn of(&self, kind: Kind) -> u64 {
        self.own.of(kind)
    }

    /// All of it.
    pub fn amounts(&self) -> &Amounts {
        &self.own
    }

    /// Takes out what was charged, to be credited later.
    pub fn take(&mut self) -> Counts {
        Counts { own: std::mem::take(&mut self.own), rights: self.rights.clone() }
    }
}

/// The counts of the device and of its users, and the limits of the device.
#[derive(Debug)]
pub struct Ledger {
    device: [u64; Kind::COUNT],
    qps_key: String,
    /// Queue pairs of one user, where descriptors have lowered those of the device.
    qps_of_user: u64,
    descriptors: Descriptors,
    used: Amounts,
    /// Users who have something.
    users: BTreeMap<u32, Account>,
}

/// What a user has, and may have.
#[derive(Debug)]
pub struct Account {
    /// The sum of his sessions.
    pub used: Amounts,
    /// As of his last charge or the last reload.
    pub rights: Arc<Rights>,
}

impl Ledger {
    /// Nothing used yet.
    pub fn new(limits: &Limits, capacity: &Capacity) -> Self {
        let mut ledger = Ledger {
            device: [UNLIMITED; Kind::COUNT],
            qps_key: String::new(),
            qps_of_user: UNLIMITED,
            descriptors: Descriptors::default(),
            used: Amounts::default(),
            users: BTreeMap::new(),
        };
        ledger.set_limits(limits, capacity);
        ledger
    }

    /// Other limits of the device. What exists stays, even above them.
    pub fn set_limits(&mut self, limits: &Limits, capacity: &Capacity) {
        self.qps_key = capacity.qps_key(limits.device.qps);
        self.qps_of_user = match capacity.qps < limits.device.qps {
            true => u64::from(capacity.qps) / 2,
            false => UNLIMITED,
        };
        self.descriptors = Descriptors {
            nofile: capacity.nofile,
            limit: capacity.rest(),
            per_session: capacity.per_session(),
        };
        self.device = Kind::ALL.map(|kind| match kind {
            Kind::Sessions => limits.sessions.into(),
            Kind::Movers => limits.movers.into(),
            Kind::Qps => capacity.qps.into(),
            _ => kind.of_totals(&limits.device).unwrap_or(UNLIMITED),
        });
    }

    /// Charges `amount` to a session, its user and the device, or names the limit that forbids it.
    pub fn charge(&mut self, own: &mut Counts, kind: Kind, amount: u64) -> Result<(), Refusal> {
        let rights = &own.rights;
        let of_session = own.own.of(kind);
        check(of_session, amount, rights.session_limit(kind), || rights.session_key(kind))?;
        let of_user = self.of_user(rights.uid, kind);
        check(of_user, amount, self.user_limit(rights, kind), || self.user_key(rights, kind))?;
        let limit = self.device[kind as usize];
        check(self.used.of(kind), amount, limit, || self.device_key(kind))?;
        let none = Amounts::default();
        let of_user = self.users.get(&rights.uid).map_or(&none, |account| &account.used);
        self.descriptors.check(rights, of_user, &self.used, kind, amount)?;
        let fresh = || Account { used: Amounts::default(), rights: rights.clone() };
        self.users.entry(rights.uid).or_insert_with(fresh).used.add(kind, amount);
        self.used.add(kind, amount);
        own.own.add(kind, amount);
        Ok(())
    }

    /// Gives back what was charged.
    pub fn credit(&mut self, own: &mut Counts, kind: Kind, amount: u64) {
        debug_assert!(own.of(kind) >= amount, "{kind:?} credited without a charge");
        own.own.subtract(kind, amount);
        self.used.subtract(kind, amount);
        let uid = own.rights.uid;
        if let Some(user) = self.users.get_mut(&uid) {
            user.used.subtract(kind, amount);
            if user.used.is_empty() {
                self.users.remove(&uid);
            }
        }
    }

    /// Gives back everything a session was charged.
    pub fn credit_all(&mut self, own: &mut Counts) {
        for kind in Kind::ALL {
            let amount = own.of(kind);
            self.credit(own, kind, amount);
        }
    }

    /// How much the device has given.
    pub fn used(&self) -> &Amounts {
        &self.used
    }

    /// How much the device may give.
    pub fn device_limit(&self, kind: Kind) -> u64 {
        self.device[kind as usize]
    }

    /// The most of `kind` that a client could ever have.
    pub fn most(&self, rights: &Rights, kind: Kind) -> u64 {
        let own = rights.session_limit(kind).min(self.user_limit(rights, kind));
        own.min(self.device[kind as usize])
    }

    /// What remains of `kind` for a session with these counts.
    pub fn room(&self, own: &Counts, kind: Kind) -> u64 {
        let rights = &own.rights;
        let session = rights.session_limit(kind).saturating_sub(own.of(kind));
        let of_user = self.of_user(rights.uid, kind);
        let user = self.user_limit(rights, kind).saturating_sub(of_user);
        let device = self.device[kind as usize].saturating_sub(self.used.of(kind));
        session.min(user).min(device)
    }

    /// The limits of the device with what is in use.
    pub fn device_rows(&self) -> impl Iterator<Item = LimitRow> {
        Kind::ALL.into_iter().filter(|kind| self.device[*kind as usize] != UNLIMITED).map(|kind| {
            LimitRow {
                key: self.device_key(kind),
                scope: "device".to_owned(),
                limit: self.device[kind as usize],
                used: self.used.of(kind),
            }
        })
    }

    /// Users who have something, from a number on, in the order of their numbers: one of them, or
    /// all.
    pub fn accounts(
        &self,
        only: Option<u32>,
        from: Option<u32>,
    ) -> impl Iterator<Item = (u32, &Account)> {
        let range = from.map(|from| self.users.range(only.unwrap_or(from)..));
        let wanted = move |uid: u32| only.is_none_or(|only| only == uid);
        let accounts = range.into_iter().flatten().map(|(uid, account)| (*uid, account));
        accounts.take_while(move |(uid, _)| wanted(*uid))
    }

    /// How many users have something.
    pub fn users(&self) -> usize {
        self.users.len()
    }

    /// Whether users other than this one have something.
    pub fn has_others(&self, uid: u32) -> bool {
        self.users.keys().any(|user| *user != uid)
    }

    /// A user may have something else from now on.
    pub fn set_rights(&mut self, rights: &Arc<Rights>) {
        if let Some(account) = self.users.get_mut(&rights.uid) {
            account.rights = rights.clone();
        }
    }

    /// The limits of a user with what is in use.
    pub fn user_rows(&self, rights: &Rights) -> impl Iterator<Item = LimitRow> {
        Kind::ALL.into_iter().map(|kind| LimitRow {
            key: self.user_key(rights, kind),
            scope: format!("user {}", rights.uid),
            limit: self.user_limit(rights, kind),
            used: self.of_user(rights.uid, kind),
        })
    }

    fn of_user(&self, uid: u32, kind: Kind) -> u64 {
        self.users.get(&uid).map_or(0, |account| account.used.of(kind))
    }

    /// What a user may have: as configured, but no more than half of the queue pairs that there are
    /// descriptors for, unless the daemon is his.
    fn user_limit(&self, rights: &Rights, kind: Kind) -> u64 {
        let configured = rights.user_limit(kind);
        match kind {
            Kind::Qps if rights.uid != crate::privilege::own_user() => {
                configured.min(self.qps_of_user)
            }
            _ => configured,
        }
    }

    fn user_key(&self, rights: &Rights, kind: Kind) -> String {
        match self.user_limit(rights, kind) < rights.user_limit(kind) {
            true => format!("half of {} for user {}", self.qps_key, rights.uid),
            false => rights.user_key(kind),
        }
    }

    fn device_key(&self, kind: Kind) -> String {
        match kind {
            Kind::Qps => self.qps_key.clone(),
            _ => format!("limits.{}", kind.key()),
        }
    }
}

/// The daemon's descriptors, apart from those of connections. They are no key of the
/// configuration, but without them nobody gets in: so one user gets half of them at most, unless the
/// daemon is his.
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
            Kind::Channels | Kind::Listeners => 1,
            _ => 0,
        }
    }

    fn of(&self, amounts: &Amounts) -> u64 {
        let kinds = [Kind::Sessions, Kind::Channels, Kind::Listeners];
        kinds.map(|kind| amounts.of(kind) * self.of_one(kind)).iter().sum()
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
    use super::super::policy::{Identity, Policy};
    use super::*;
    use crate::config::Config;

    struct Fixture {
        ledger: Ledger,
        policy: Policy,
    }

    fn fixture(nofile: u64, text: &str) -> Fixture {
        let config = Config::parse(std::path::Path::new("t"), text);
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        let capacity = Capacity::derive(&config, nofile, 1);
        Fixture { ledger: Ledger::new(&config.limits, &capacity), policy: Policy::new(&config) }
    }

    impl Fixture {
        fn session(&self, uid: u32) -> Counts {
            Counts::new(self.policy.rights(&Identity { uid, gids: vec![uid], foreign: false }))
        }

        fn charge(&mut self, own: &mut Counts, kind: Kind, amount: u64) -> Result<(), String> {
            self.ledger.charge(own, kind, amount).map_err(|e| e.to_string())
        }
    }

    const FEW: &str = "[limits]\npds = 5\n[limits.user]\npds = 3\n[limits.session]\npds = 2\n";

    #[test]
    fn the_limit_of_session_user_or_device_is_named() {
        let mut f = fixture(1 << 20, FEW);
        let (mut a, mut b, mut c) = (f.session(1000), f.session(1000), f.session(1001));
        assert_eq!(f.charge(&mut a, Kind::Pds, 2), Ok(()));
        let text = "limits.session.pds = 2 reached (asked for 1 more, 2 in use)";
        assert_eq!(f.charge(&mut a, Kind::Pds, 1), Err(text.to_owned()));
        assert_eq!(f.charge(&mut b, Kind::Pds, 1), Ok(()));
        let text = "limits.user.pds (user 1000) = 3 reached (asked for 1 more, 3 in use)";
        assert_eq!(f.charge(&mut b, Kind::Pds, 1), Err(text.to_owned()));
        assert_eq!(f.ledger.room(&c, Kind::Pds), 2);
        assert_eq!(f.charge(&mut c, Kind::Pds, 2), Ok(()));
        let mut d = f.session(1002);
        let text = "limits.pds = 5 reached (asked for 1 more, 5 in use)";
        assert_eq!(f.charge(&mut d, Kind::Pds, 1), Err(text.to_owned()));
        f.ledger.credit_all(&mut a);
        assert_eq!((f.ledger.used().of(Kind::Pds), a.of(Kind::Pds)), (3, 0));
        assert_eq!(f.ledger.room(&b, Kind::Pds), 1);
        for own in [&mut b, &mut c] {
            f.ledger.credit_all(own);
        }
        assert_eq!(f.ledger.used(), &Amounts::default());
        assert!(f.ledger.users.is_empty(), "users who have nothing are forgotten");
    }

    #[test]
    fn descriptors_are_shared_out_and_named() {
        // 136 descriptors, of which 34 are not for connections, and 8 of these for what is being
        // closed; 4 a session.
        let mut f = fixture(200, "");
        let (mut a, mut b) = (f.session(1000), f.session(1001));
        assert_eq!(f.charge(&mut a, Kind::Sessions, 1), Ok(()));
        assert_eq!(f.charge(&mut a, Kind::Channels, 9), Ok(()));
        let e = f.charge(&mut a, Kind::Listeners, 1).unwrap_err();
        let text = "half of the descriptors for sessions, channels and listeners (RLIMIT_NOFILE = \
                    200) for user 1000 = 13 reached (asked for 1 more, 13 in use)";
        assert_eq!(e, text);
        assert_eq!(f.charge(&mut a, Kind::Pds, 1), Ok(()));
        assert_eq!(f.charge(&mut b, Kind::Sessions, 3), Ok(()));
        let mut c = f.session(1002);
        let e = f.charge(&mut c, Kind::Sessions, 1).unwrap_err();
        assert!(e.starts_with("descriptors for sessions,") && e.contains(" = 26 reached"), "{e}");
        f.ledger.credit_all(&mut a);
        assert_eq!(f.charge(&mut c, Kind::Sessions, 1), Ok(()));
    }

    #[test]
    fn an_override_is_named_by_its_rule() {
        let rules = "[[user]]\nwho = 1000\nsession = { qps = 1 }\nuser = { mrs = 1 }\n\
                     [[group]]\nwho = 1001\nsession = { qps = 0 }\nuser = { mrs = 0 }\n";
        let mut f = fixture(1 << 20, rules);
        let (mut a, mut b) = (f.session(1000), f.session(1001));
        assert_eq!(f.charge(&mut a, Kind::Qps, 1), Ok(()));
        assert_eq!(f.charge(&mut a, Kind::Mrs, 1), Ok(()));
        let (a_too, b_too) = (&mut a.clone(), &mut b.clone());
        for (own, kind, start) in [
            (&mut a, Kind::Qps, "user.1000.session.qps = 1 reached"),
            (a_too, Kind::Mrs, "user.1000.user.mrs = 1 reached"),
            (&mut b, Kind::Qps, "group.1001.session.qps = 0 reached"),
            (b_too, Kind::Mrs, "group.1001.user.mrs (user 1001) = 0 reached"),
        ] {
            let refused = f.charge(own, kind, 1);
            let text = refused.map_or_else(|e| e, |()| "granted".to_owned());
            assert!(text.starts_with(start), "{text}");
        }
    }

    #[test]
    fn a_refused_charge_changes_nothing_and_sums_do_not_wrap() {
        let mut f = fixture(1 << 20, FEW);
        let mut own = f.session(1000);
        assert_eq!(f.charge(&mut own, Kind::SegmentBytes, 4096), Ok(()));
        assert!(f.charge(&mut own, Kind::SegmentBytes, u64::MAX).is_err());
        assert_eq!(own.of(Kind::SegmentBytes), 4096);
        assert_eq!(f.ledger.used().of(Kind::SegmentBytes), 4096);
    }

    #[test]
    fn queue_pairs_lowered_by_descriptors_are_refused_by_that_name() {
        let mut f = fixture(72, FEW);
        let mut own = f.session(1000);
        assert_eq!(f.charge(&mut own, Kind::Qps, 2), Ok(()));
        let e = f.charge(&mut own, Kind::Qps, 1).unwrap_err();
        let key = "half of limits.qps (lowered by RLIMIT_NOFILE = 72) for user 1000 = 2 reached";
        assert!(e.starts_with(key), "{e}");
        assert_eq!(f.ledger.room(&own, Kind::Qps), 0);
        let (mut second, mut third) = (f.session(1001), f.session(1002));
        assert_eq!(f.charge(&mut second, Kind::Qps, 2), Ok(()));
        assert_eq!(f.charge(&mut third, Kind::Qps, 1), Ok(()));
        let e = f.charge(&mut third, Kind::Qps, 1);
        assert!(e.is_err_and(|e| e.contains("RLIMIT_NOFILE = 72")));
    }

    #[test]
    fn above_a_lowered_limit_nothing_new_is_given_until_enough_is_back() {
        let mut f = fixture(1 << 20, "");
        let mut own = f.session(1000);
        assert_eq!(f.charge(&mut own, Kind::Qps, 3), Ok(()));
        let lowered = fixture(1 << 20, "[limits]\nqps = 2\n");
        (f.ledger.device, f.policy) = (lowered.ledger.device, lowered.policy);
        own.rights = f.session(1000).rights;
        assert!(f.charge(&mut own, Kind::Qps, 1).is_err());
        assert_eq!(f.ledger.room(&own, Kind::Qps), 0);
        f.ledger.credit(&mut own, Kind::Qps, 2);
        assert_eq!(f.charge(&mut own, Kind::Qps, 1), Ok(()));
    }
}
