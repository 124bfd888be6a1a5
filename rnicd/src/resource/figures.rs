//! What there is and what has been, for the device and for each user, as a page of metrics.
//!
//! Counters of objects stand in the objects; what those that are gone had counted is added up here,
//! so that no sum ever goes down.

use std::collections::BTreeMap;

use rnic_core::abi::control::QpCounters;
use rnic_core::device::QpShared;
use rnic_core::types::TerminateOrigin;

use super::Manager;
use super::ledger::Kind as Counted;
use super::session::Session;
use crate::metrics::{Kind, Page};

/// Users that are counted each for themselves; all others are counted together.
const USERS: usize = 1024;

/// What a user, or everybody, has done since the start.
#[derive(Clone, Debug, Default)]
struct Done {
    counters: QpCounters,
    terminates_sent: u64,
    terminates_received: u64,
    refusals: u64,
}

impl Done {
    fn add_qp(&mut self, qp: &QpShared) {
        let (sum, c) = (&mut self.counters, qp.counters());
        sum.sends_completed += c.sends_completed;
        sum.receives_completed += c.receives_completed;
        sum.bytes_sent += c.bytes_sent;
        sum.bytes_received += c.bytes_received;
        sum.segments_sent += c.segments_sent;
        sum.segments_received += c.segments_received;
        sum.reads_answered += c.reads_answered;
        sum.errors += c.errors;
        match qp.terminate() {
            Some((TerminateOrigin::Local, _)) => self.terminates_sent += 1,
            Some((TerminateOrigin::Peer, _)) => self.terminates_received += 1,
            None => {}
        }
    }

    fn values(&self) -> [u64; FIGURES.len()] {
        let c = &self.counters;
        [
            c.sends_completed,
            c.receives_completed,
            c.errors,
            c.bytes_sent,
            c.bytes_received,
            c.segments_sent,
            c.segments_received,
            c.reads_answered,
            self.terminates_sent,
            self.terminates_received,
            self.refusals,
        ]
    }
}

/// Names of [`Done::values`], in that order.
const FIGURES: [(&str, &str); 11] = [
    ("send_completions_total", "Send queue requests completed."),
    ("receive_completions_total", "Receives completed."),
    ("completion_errors_total", "Requests that completed with an error, flushes included."),
    ("sent_bytes_total", "Payload bytes sent."),
    ("placed_bytes_total", "Payload bytes placed."),
    ("sent_segments_total", "DDP segments sent."),
    ("received_segments_total", "DDP segments received."),
    ("reads_answered_total", "RDMA Reads answered."),
    ("terminates_sent_total", "Connections ended by a Terminate of this side."),
    ("terminates_received_total", "Connections ended by a Terminate of the peer."),
    ("refusals_total", "Requests refused."),
];

/// What users have done with objects that are gone.
#[derive(Debug, Default)]
pub struct Past {
    users: BTreeMap<u32, Done>,
    others: Done,
}

impl Past {
    fn of(&mut self, uid: u32) -> &mut Done {
        if self.users.len() >= USERS && !self.users.contains_key(&uid) {
            return &mut self.others;
        }
        self.users.entry(uid).or_default()
    }

    /// Adds what a QP of this user had counted.
    pub fn add_qp(&mut self, uid: u32, qp: &QpShared) {
        self.of(uid).add_qp(qp);
    }

    /// Counts a refusal.
    pub fn add_refusal(&mut self, uid: u32) {
        self.of(uid).refusals += 1;
    }
}

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
        for (n, (name, help)) in FIGURES.into_iter().enumerate() {
            let total = users.values().map(|user| user.done.values()[n]).sum();
            page.figure(name, Kind::Counter, help).sample(&[], total);
            let mut figure = page.figure(&format!("user_{name}"), Kind::Counter, help);
            for (uid, user) in &users {
                figure.sample(&[("uid", &uid_text(*uid))], user.done.values()[n]);
            }
        }
        page.into_text()
    }

    fn device_figures(&self, page: &mut Page, users: &BTreeMap<Option<u32>, User<'_>>) {
        let device = &self.config.device.name;
        page.figure("info", Kind::Gauge, "The device and its version.")
            .sample(&[("device", device), ("version", &env!("CARGO_PKG_VERSION"))], 1);
        page.figure("uptime_seconds", Kind::Gauge, "Since the start.")
            .sample(&[], self.started.elapsed().as_secs());
        let sessions = self.sessions.len() as u64;
        page.figure("sessions", Kind::Gauge, "Sessions open.").sample(&[], sessions);
        page.figure("sessions_limit", Kind::Gauge, "Most sessions at once.")
            .sample(&[], self.config.limits.device.of(Counted::Sessions));
        page.figure("connections_in_startup", Kind::Gauge, "Connections before MPA has begun.")
            .sample(&[], self.cm.half_open() as u64);
        let ended = "Sessions ended for misbehaviour.";
        page.figure("sessions_ended_total", Kind::Counter, ended).sample(&[], self.misbehaved);
        page.figure("events_total", Kind::Counter, "Notable happenings.")
            .sample(&[], self.notes.total());
        page.figure("why_records_total", Kind::Counter, "Failures put on record.")
            .sample(&[], self.why.made());
        let mut figure = page.figure("objects", Kind::Gauge, "Objects, or bytes, in use.");
        for kind in Counted::counted() {
            figure.sample(&[("kind", &kind.key())], self.ledger.used().of(kind));
        }
        let mut figure = page.figure("objects_limit", Kind::Gauge, "Most of them, by limits.KIND.");
        for kind in Counted::counted() {
            match self.ledger.device_limit(kind) {
                u64::MAX => {}
                limit => drop(figure.sample(&[("kind", &kind.key())], limit)),
            }
        }
        let mut figure = page.figure("user_sessions", Kind::Gauge, "Sessions open, by user.");
        for (uid, user) in users {
            figure.sample(&[("uid", &uid_text(*uid))], user.sessions.len() as u64);
        }
        let mut figure = page.figure("user_objects", Kind::Gauge, "Objects in use, by user.");
        for (uid, user) in users {
            for kind in Counted::counted() {
                let used = user.sessions.iter().map(|s| s.account.used(kind)).sum();
                figure.sample(&[("uid", &uid_text(*uid)), ("kind", &kind.key())], used);
            }
        }
    }

    /// Users that have or had something; without a number those that are counted together.
    fn users(&self) -> BTreeMap<Option<u32>, User<'_>> {
        let mut users = BTreeMap::<Option<u32>, User<'_>>::new();
        let Past { users: past, others } = &self.past;
        for (uid, done) in past {
            users.entry(Some(*uid)).or_default().done = done.clone();
        }
        if past.len() >= USERS {
            users.entry(None).or_default().done = others.clone();
        }
        // Those that are being taken down have not been added to the past yet.
        for session in self.sessions.values().chain(self.leaving.values().map(|l| &l.session)) {
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
