//! What there is and what has been, for the device and for each user, as a page of metrics.

use std::collections::BTreeMap;

use crate::metrics::{MetricKind, Page};
use crate::resource::Manager;
use crate::resource::ledger::Kind;
use crate::resource::records::{Done, METRICS, Past, USERS};
use crate::resource::session::Session;

/// What a user has and has done.
#[derive(Default)]
struct User<'m> {
    done: Done,
    sessions: Vec<&'m Session>,
}

impl Manager {
    /// All figures, in the text format of Prometheus.
    pub fn metrics(&self) -> String {
        let mut page = Page::default();
        let users = self.users();
        self.device_figures(&mut page, &users);
        for (n, (name, help)) in METRICS.into_iter().enumerate() {
            let total = users.values().map(|user| user.done.values()[n]).sum();
            page.figure(name, MetricKind::Counter, help).sample(&[], total);
            let mut figure = page.figure(&format!("user_{name}"), MetricKind::Counter, help);
            for (uid, user) in &users {
                figure.sample(&[("uid", &uid_text(*uid))], user.done.values()[n]);
            }
        }
        page.into_text()
    }

    fn device_figures(&self, page: &mut Page, users: &BTreeMap<Option<u32>, User<'_>>) {
        let device = &self.config.device.name;
        page.figure("info", MetricKind::Gauge, "The device and its version.")
            .sample(&[("device", device), ("version", &env!("CARGO_PKG_VERSION"))], 1);
        page.figure("uptime_seconds", MetricKind::Gauge, "Since the start.")
            .sample(&[], self.started.elapsed().as_secs());
        let sessions = self.sessions.len() as u64;
        page.figure("sessions", MetricKind::Gauge, "Sessions open.").sample(&[], sessions);
        page.figure("sessions_limit", MetricKind::Gauge, "Most sessions at once.")
            .sample(&[], self.config.limits.device.of(Kind::Sessions));
        page.figure(
            "connections_in_startup",
            MetricKind::Gauge,
            "Connections before MPA has begun.",
        )
        .sample(&[], self.cm.in_startup() as u64);
        let ended = "Sessions ended for misbehaviour.";
        page.figure("sessions_ended_total", MetricKind::Counter, ended)
            .sample(&[], self.records.misbehaved());
        page.figure("events_total", MetricKind::Counter, "Notable happenings.")
            .sample(&[], self.records.noted());
        page.figure("diagnoses_total", MetricKind::Counter, "Failures put on record.")
            .sample(&[], self.records.whys());
        let dropped = "Packets at wired.port that were of no daemon.";
        page.figure("packets_dropped_total", MetricKind::Counter, dropped)
            .sample(&[], self.workers.dropped_packets());
        let mut figure = page.figure("objects", MetricKind::Gauge, "Objects, or bytes, in use.");
        for kind in Kind::counted() {
            figure.sample(&[("kind", &kind.key())], self.ledger.used().of(kind));
        }
        let mut figure =
            page.figure("objects_limit", MetricKind::Gauge, "Most of them, by limits.KIND.");
        for kind in Kind::counted() {
            match self.ledger.device_limit(kind) {
                u64::MAX => {}
                limit => drop(figure.sample(&[("kind", &kind.key())], limit)),
            }
        }
        let mut figure = page.figure("user_sessions", MetricKind::Gauge, "Sessions open, by user.");
        for (uid, user) in users {
            figure.sample(&[("uid", &uid_text(*uid))], user.sessions.len() as u64);
        }
        let mut figure = page.figure("user_objects", MetricKind::Gauge, "Objects in use, by user.");
        for (uid, user) in users {
            for kind in Kind::counted() {
                let used = user.sessions.iter().map(|s| s.account.used(kind)).sum();
                figure.sample(&[("uid", &uid_text(*uid)), ("kind", &kind.key())], used);
            }
        }
    }

    /// Users that have or had something; without a number those that are counted together.
    fn users(&self) -> BTreeMap<Option<u32>, User<'_>> {
        let mut users = BTreeMap::<Option<u32>, User<'_>>::new();
        let Past { users: past, others, .. } = self.records.past();
        for (uid, done) in past {
            users.entry(Some(*uid)).or_default().done = done.clone();
        }
        if past.len() >= USERS {
            users.entry(None).or_default().done = others.clone();
        }
        // Those that are being taken down have not been added to the past yet.
        for session in self.sessions.values().chain(self.leaving.values()) {
            let uid = Some(session.client.identity.uid);
            let full = users.len() >= USERS && !users.contains_key(&uid);
            let user = users.entry(if full { None } else { uid }).or_default();
            session.qps.values().for_each(|qp| user.done.add_qp(&qp.shared));
            user.sessions.push(session);
        }
        users
    }
}

fn uid_text(uid: Option<u32>) -> String {
    uid.map_or("others".to_owned(), |uid| uid.to_string())
}
