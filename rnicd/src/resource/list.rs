//! What the daemon knows, for `rnicctl`: everybody's objects for administrators, one's own for
//! others.

use std::sync::atomic::Ordering::Relaxed;

use rnic_core::abi::control::*;
use rnic_core::device::QpShared;
use rnic_core::types::*;
use serde::Serialize;

use super::ledger::Kind;
use super::session::{Phase, Qp, Session};
use super::srqs::srq_row;
use super::why::Reader;
use super::windows::window_row;
use super::{Answer, Given, Manager, find};

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
        let limits = &self.config.limits;
        let session = find(&mut self.sessions, id)?;
        let attached_memory = session.client.is_trusted() || limits.movers > 0;
        let rights = &session.counts.rights;
        // The least of what its session, its user and the device may have.
        let ledger = &self.ledger;
        let most = |kind| ledger.most(rights, kind);
        let count = |kind| u32::try_from(most(kind)).unwrap_or(u32::MAX);
        Given::now(ReplyBody::Device(DeviceAttributes {
            name: self.config.device.name.clone(),
            version: VERSION.to_owned(),
            max_qps: count(Kind::Qps),
            max_wr_depth: limits.wr_depth,
            max_sge: limits.sge,
            max_inline: limits.inline,
            max_cqs: count(Kind::Cqs),
            max_cq_entries: limits.cq_entries,
            max_mrs: count(Kind::Mrs),
            max_segment_bytes: most(Kind::SegmentBytes),
            max_pds: count(Kind::Pds),
            max_ird: limits.ird,
            max_ord: limits.ord,
            direct_path: self.config.engine.loopback == crate::config::Loopback::Direct,
            max_windows: count(Kind::Windows),
            max_srqs: count(Kind::Srqs),
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
            Some(_) => session.counts.amounts().clone(),
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
            windows: count(Kind::Windows),
            srqs: count(Kind::Srqs),
            listeners: count(Kind::Listeners),
            half_open: everybody(self.cm.half_open()),
            arena_bytes: counts.of(Kind::ArenaBytes),
            refusals,
            sessions_ended: own.map_or(self.misbehaved, |_| 0),
            terminates_sent: terminates.sent,
            terminates_received: terminates.received,
            draining: self.draining,
        }))
    }

    pub(super) fn list(&mut self, id: SessionId, what: ListKind, from: u32) -> Answer {
        let client = &find(&mut self.sessions, id)?.client;
        let own = (!client.admin).then_some(id);
        let reader = Reader::of(id, client);
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
            ListKind::Windows => {
                let all = visible().flat_map(|s| s.windows.values().map(move |o| (s.id, o)));
                let (rows, total) = page(all, from, |(session, o)| window_row(session, o));
                (Rows::Windows(rows), total)
            }
            ListKind::Srqs => {
                let all = visible().flat_map(|s| s.srqs.values());
                let (rows, total) = page(all, from, srq_row);
                (Rows::Srqs(rows), total)
            }
            ListKind::Pds => {
                let (rows, total) = page(self.pd_rows(own).into_iter(), from, |row| row);
                (Rows::Pds(rows), total)
            }
            ListKind::Limits => {
                let (rows, total) = page(self.limit_rows(own).into_iter(), from, |row| row);
                (Rows::Limits(rows), total)
            }
            ListKind::Whys => self.whys(reader, from),
            ListKind::Events => self.list_events(reader, from),
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

/// A page of rows that are long: as many as a message holds.
pub fn page_that_fits<T, R: Serialize>(
    all: &[T],
    from: u32,
    mut row: impl FnMut(&T) -> R,
) -> Vec<R> {
    let mut room = MAX_MESSAGE - REPLY_HEAD;
    let mut rows = Vec::new();
    for item in all.iter().skip(from as usize).take(PAGE_ROWS) {
        let row = row(item);
        let octets = postcard::to_stdvec(&row).map_or(usize::MAX, |octets| octets.len());
        if octets > room {
            break;
        }
        room -= octets;
        rows.push(row);
    }
    rows
}

/// More octets than a reply with a list has besides its rows.
const REPLY_HEAD: usize = 64;

fn client_row(s: &Session) -> ClientRow {
    let count = |kind| u32::try_from(s.counts.of(kind)).unwrap_or(u32::MAX);
    ClientRow {
        session: s.id,
        pid: s.client.pid,
        uid: s.client.identity.uid,
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
        srq: object.srq,
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

#[cfg(test)]
mod tests {
    use rnic_core::device::why::{MAX_RULE, MAX_TEXT};

    use super::*;

    #[test]
    fn the_longest_records_come_in_pages_that_fit_a_message() {
        let all = u64::MAX;
        let address = std::net::SocketAddr::from(([0xFFFF; 8], u16::MAX));
        let record = WhyRecord {
            id: all,
            time_ms: all,
            session: SessionId(u32::MAX),
            what: WhyKind::Completion { wr_id: all, status: CompletionStatus::General },
            rule: "r".repeat(MAX_RULE),
            text: "t".repeat(MAX_TEXT),
            qp: Some(QpId(u32::MAX)),
            pd: Some(PdId(u32::MAX)),
            stag: Some(Stag(u32::MAX)),
            offset: Some(all),
            length: Some(all),
            addresses: Some(AddressPair { local: address, peer: address }),
        };
        let records = vec![record; 100];
        let (mut from, mut pages) = (0, 0);
        while from < 100 {
            let rows = page_that_fits(&records, from, Clone::clone);
            assert!(!rows.is_empty(), "stuck at {from}");
            from += rows.len() as u32;
            pages += 1;
            let body = ReplyBody::Rows { rows: Rows::Whys(rows), total: u32::MAX };
            let reply = Reply { id: u32::MAX, result: Ok(body), why_id: all };
            let octets = postcard::to_stdvec(&reply).map_or(usize::MAX, |octets| octets.len());
            assert!(octets <= MAX_MESSAGE, "{octets}");
        }
        assert!(pages < 20, "{pages} pages");
        assert!(page_that_fits(&records, 100, Clone::clone).is_empty());
        let short = vec![7u8; 100];
        assert_eq!(page_that_fits(&short, 90, |n| *n).len(), 10);
        assert_eq!(page_that_fits(&short, 0, |n| *n).len(), PAGE_ROWS);
    }
}
