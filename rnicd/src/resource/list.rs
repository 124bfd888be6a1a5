//! What the daemon knows, for `rnicctl`: everybody's objects for administrators, one's own for
//! others.

use std::sync::atomic::Ordering::Relaxed;

use rnic_core::abi::control::*;
use rnic_core::device::QpShared;
use rnic_core::types::*;

use super::ledger::Kind;
use super::session::{Phase, Qp, Session};
use super::{Answer, Given, Manager, attach, find};

/// Terminates of QPs that are gone.
#[derive(Debug, Default)]
pub struct Terminates {
    sent: u64,
    received: u64,
}

impl Terminates {
    /// Counts how a QP ended.
    pub fn count(&mut self, qp: &QpShared) {
        match qp.terminate() {
            Some((TerminateOrigin::Local, _)) => self.sent += 1,
            Some((TerminateOrigin::Peer, _)) => self.received += 1,
            None => {}
        }
    }
}

impl Manager {
    pub(super) fn device(&mut self, id: SessionId) -> Answer {
        let trusted = attach::is_trusted(&find(&mut self.sessions, id)?.client);
        let attached_memory = trusted || self.config.limits.movers > 0;
        let limits = &self.config.limits;
        let (s, d) = (&limits.session, &limits.device);
        Given::now(ReplyBody::Device(DeviceAttributes {
            name: self.config.device.name.clone(),
            version: VERSION.to_owned(),
            max_qps: s.qps.min(self.capacity.qps),
            max_wr_depth: limits.wr_depth,
            max_sge: limits.sge,
            max_inline: limits.inline,
            max_cqs: s.cqs.min(d.cqs),
            max_cq_entries: limits.cq_entries,
            max_mrs: s.mrs.min(d.mrs),
            max_segment_bytes: s.segment_bytes.min(d.segment_bytes),
            max_pds: s.pds.min(d.pds),
            max_ird: limits.ird,
            max_ord: limits.ord,
            direct_path: self.is_direct(),
            max_windows: 0,
            max_srqs: 0,
            attached_memory,
        }))
    }

    pub(super) fn query_qp(&mut self, id: SessionId, qp: QpId) -> Answer {
        let object = find(&mut self.sessions, id)?.qp(qp)?;
        let row = qp_row(id, qp, object);
        Given::now(ReplyBody::QpInfo(row))
    }

    pub(super) fn status(&mut self, id: SessionId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let own = (!session.client.admin).then_some(id);
        let counts = match own {
            Some(_) => session.counts.clone(),
            None => self.ledger.used().clone(),
        };
        let refusals = own.map_or(self.refusals, |_| session.refusals);
        // Counts of objects are below their limits, which are below 2^32.
        let count = |kind| u32::try_from(counts.of(kind)).unwrap_or(u32::MAX);
        let mut terminates = Terminates::default();
        let visible = self.sessions.values().filter(|s| own.is_none_or(|own| own == s.id));
        for qp in visible.flat_map(|s| s.qps.values()) {
            terminates.count(&qp.shared);
        }
        if own.is_none() {
            terminates.sent += self.terminates.sent;
            terminates.received += self.terminates.received;
        }
        let everybody =
            |n: usize| if own.is_none() { u32::try_from(n).unwrap_or(u32::MAX) } else { 0 };
        Given::now(ReplyBody::Status(StatusInfo {
            version: VERSION.to_owned(),
            device: self.config.device.name.clone(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            workers: self.capacity.workers,
            loopback: self.config.engine.loopback.name().to_owned(),
            sessions: own.map_or(everybody(self.sessions.len()), |_| 1),
            pds: count(Kind::Pds),
            segments: count(Kind::Segments),
            segment_bytes: counts.of(Kind::SegmentBytes),
            mrs: count(Kind::Mrs),
            cqs: count(Kind::Cqs),
            qps: count(Kind::Qps),
            windows: 0,
            srqs: 0,
            listeners: count(Kind::Listeners),
            half_open: everybody(self.cm.half_open()),
            arena_bytes: counts.of(Kind::ArenaBytes),
            refusals,
            sessions_ended: own.map_or(self.misbehaved, |_| 0),
            terminates_sent: terminates.sent,
            terminates_received: terminates.received,
            draining: false,
        }))
    }

    pub(super) fn list(&mut self, id: SessionId, what: ListKind, from: u32) -> Answer {
        let own = (!find(&mut self.sessions, id)?.client.admin).then_some(id);
        let visible = || self.sessions.values().filter(move |s| own.is_none_or(|own| own == s.id));
        let (rows, total) = match what {
            ListKind::Clients => {
                let (rows, total) = page(visible(), from, client_row);
                (Rows::Clients(rows), total)
            }
            ListKind::Qps => {
                let all = visible().flat_map(|s| s.qps.iter().map(move |(qp, o)| (s.id, *qp, o)));
                let (rows, total) = page(all, from, |(s, qp, object)| qp_row(s, qp, object));
                (Rows::Qps(rows), total)
            }
            ListKind::Cqs => {
                let all = visible().flat_map(|s| s.cqs.values());
                let (rows, total) = page(all, from, |o| {
                    let (unread, reserved, completions) = o.cq.usage();
                    CqRow {
                        cq: o.cq.id(),
                        session: o.cq.session(),
                        capacity: o.cq.capacity(),
                        unread,
                        reserved,
                        qps: o.cq.users.load(Relaxed),
                        completions,
                        overflowed: o.cq.is_dead(),
                    }
                });
                (Rows::Cqs(rows), total)
            }
            ListKind::Mrs => {
                let all = visible().flat_map(|s| s.mrs.iter().map(move |(mr, o)| (s.id, *mr, o)));
                let (rows, total) = page(all, from, |(session, mr, o)| MrRow {
                    mr,
                    session,
                    pd: o.pd,
                    segment: o.segment,
                    iova: o.iova,
                    length: o.length,
                    access: o.access,
                    scope: o.scope,
                });
                (Rows::Mrs(rows), total)
            }
            ListKind::Listeners => {
                let all =
                    visible().flat_map(|s| s.listeners.iter().map(move |(l, o)| (s.id, *l, o)));
                let cm = &self.cm;
                let (rows, total) = page(all, from, |(session, listener, o)| {
                    cm.listener(listener).unwrap_or(ListenerRow {
                        listener,
                        session,
                        address: o.address,
                        backlog: 0,
                        pending: 0,
                        accepted: 0,
                        rejected: 0,
                    })
                });
                (Rows::Listeners(rows), total)
            }
            ListKind::Srqs
            | ListKind::Windows
            | ListKind::Pds
            | ListKind::Limits
            | ListKind::Whys
            | ListKind::Events => {
                return Err(Refusal::Unsupported { what: format!("a list of {what:?}") });
            }
        };
        Given::now(ReplyBody::Rows { rows, total })
    }
}

/// A page of rows, and how many there are in all.
fn page<T, R>(all: impl Iterator<Item = T>, from: u32, row: impl FnMut(T) -> R) -> (Vec<R>, u32) {
    let mut total = 0u32;
    let mut chosen = Vec::with_capacity(PAGE_ROWS);
    for item in all {
        if total >= from && chosen.len() < PAGE_ROWS {
            chosen.push(item);
        }
        total += 1;
    }
    (chosen.into_iter().map(row).collect(), total)
}

fn client_row(s: &Session) -> ClientRow {
    let count = |kind| u32::try_from(s.counts.of(kind)).unwrap_or(u32::MAX);
    ClientRow {
        session: s.id,
        pid: s.client.pid,
        uid: s.client.uid,
        command: s.client.command.clone(),
        qps: count(Kind::Qps),
        cqs: count(Kind::Cqs),
        mrs: count(Kind::Mrs),
        segment_bytes: s.counts.of(Kind::SegmentBytes),
        arena_bytes: s.counts.of(Kind::ArenaBytes),
        refusals: s.refusals,
    }
}

fn qp_row(session: SessionId, qp: QpId, object: &Qp) -> QpRow {
    let connection = object.connection;
    QpRow {
        qp,
        session,
        pd: object.pd,
        srq: None,
        state: object.shared.state(),
        path: connection.map_or("none", |c| c.path).to_owned(),
        addresses: connection.map(|c| c.addresses),
        worker: match object.phase {
            Phase::Bound(worker) => Some(worker),
            _ => None,
        },
        ird: connection.map_or(0, |c| c.ird),
        ord: connection.map_or(0, |c| c.ord),
        counters: object.shared.counters(),
        terminate: object.shared.terminate(),
    }
}

/// Version of the daemon.
const VERSION: &str = env!("CARGO_PKG_VERSION");
