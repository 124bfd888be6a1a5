//! The metrics page: current objects and counters since the start, for the device and each user.

use std::collections::BTreeMap;

use crate::metrics::{MetricKind, Page};
use crate::resource::Manager;
use crate::resource::ledger::{Amounts, Kind};
use crate::resource::records::{Counters, METRICS, Totals, USERS};

/// Objects and counters of a user.
#[derive(Default)]
struct User {
    done: Counters,
    sessions: u64,
    used: Amounts,
}

impl Manager {
    /// Returns all metrics in the text format of Prometheus.
    pub fn metrics(&self) -> String {
        let mut page = Page::default();
        let users = self.users();
        self.device_metrics(&mut page, &users);
        for (name, help, value) in METRICS {
            let total = users.values().map(|user| value(&user.done)).sum();
            page.metric(name, MetricKind::Counter, help).sample(&[], total);
            let mut metric = page.metric(&format!("user_{name}"), MetricKind::Counter, help);
            for (uid, user) in &users {
                metric.sample(&[("uid", &uid_text(*uid))], value(&user.done));
            }
        }
        page.into_text()
    }

    fn device_metrics(&self, page: &mut Page, users: &BTreeMap<Option<u32>, User>) {
        let device = &self.config.device.name;
        page.metric("info", MetricKind::Gauge, "The device and its version.")
            .sample(&[("device", device), ("version", &env!("CARGO_PKG_VERSION"))], 1);
        page.metric("uptime_seconds", MetricKind::Gauge, "Seconds since the daemon started.")
            .sample(&[], self.started.elapsed().as_secs());
        let sessions = self.sessions.len() as u64;
        page.metric("sessions", MetricKind::Gauge, "Open sessions.").sample(&[], sessions);
        page.metric("sessions_limit", MetricKind::Gauge, "Maximum number of sessions.")
            .sample(&[], self.config.limits.device.of(Kind::Sessions));
        page.metric("connections_in_startup", MetricKind::Gauge, "Connections in MPA start-up.")
            .sample(&[], self.cm.in_startup() as u64);
        let ended = "Misbehaving clients dropped.";
        page.metric("sessions_ended_total", MetricKind::Counter, ended)
            .sample(&[], self.records.misbehaved);
        page.metric("events_total", MetricKind::Counter, "Important events.")
            .sample(&[], self.records.notes.sequence);
        page.metric("diagnoses_total", MetricKind::Counter, "Recorded failures.")
            .sample(&[], self.records.diagnoses.made());
        let injected = "Faults injected by fault rules.";
        page.metric("faults_injected_total", MetricKind::Counter, injected)
            .sample(&[], self.faults.injected());
        let dropped = "Packets dropped at wired.port because they cannot be from a daemon.";
        page.metric("packets_dropped_total", MetricKind::Counter, dropped)
            .sample(&[], self.workers.dropped_packets());
        let mut metric = page.metric("objects", MetricKind::Gauge, "Objects, or bytes, in use.");
        for kind in Kind::counted() {
            metric.sample(&[("kind", &kind.key())], self.ledger.used().of(kind));
        }
        let mut metric =
            page.metric("objects_limit", MetricKind::Gauge, "Maximum of each kind (limits.KIND).");
        for kind in Kind::counted() {
            match self.ledger.device_limit(kind) {
                u64::MAX => {}
                limit => drop(metric.sample(&[("kind", &kind.key())], limit)),
            }
        }
        let mut metric = page.metric("user_sessions", MetricKind::Gauge, "Open sessions, by user.");
        for (uid, user) in users {
            metric.sample(&[("uid", &uid_text(*uid))], user.sessions);
        }
        let mut metric = page.metric("user_objects", MetricKind::Gauge, "Objects in use, by user.");
        for (uid, user) in users {
            for kind in Kind::counted() {
                let used = user.used.of(kind);
                metric.sample(&[("uid", &uid_text(*uid)), ("kind", &kind.key())], used);
            }
        }
    }

    /// Returns users with any objects or counters. The key `None` stands for all users after the
    /// first [`USERS`].
    fn users(&self) -> BTreeMap<Option<u32>, User> {
        let mut users = BTreeMap::<Option<u32>, User>::new();
        let Totals { users: past, others, .. } = &self.records.past;
        for (uid, done) in past {
            users.entry(Some(*uid)).or_default().done = done.clone();
        }
        if past.len() >= USERS {
            users.entry(None).or_default().done = others.clone();
        }
        // QPs of sessions that are being closed are not in `Totals` yet.
        for session in self.sessions.values().chain(self.leaving.values()) {
            let user = entry(&mut users, session.client.identity.uid);
            session.qps.values().for_each(|qp| user.done.add_qp(&qp.shared));
            user.sessions += 1;
        }
        // Some objects outlive their session, such as fault rules.
        let mut next = Some(0);
        while let Some((uid, account)) = next.and_then(|uid| self.ledger.user_from(uid)) {
            entry(&mut users, uid).used.add_all(&account.used);
            next = uid.checked_add(1);
        }
        users
    }
}

/// Returns the entry of a user, or that of all users after the first [`USERS`].
fn entry(users: &mut BTreeMap<Option<u32>, User>, uid: u32) -> &mut User {
    let full = users.len() >= USERS && !users.contains_key(&Some(uid));
    users.entry((!full).then_some(uid)).or_default()
}

fn uid_text(uid: Option<u32>) -> String {
    uid.map_or("others".to_owned(), |uid| uid.to_string())
}
