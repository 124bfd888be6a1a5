//! Queries from libraries and `rnicctl`. Administrators see the objects of all users, and other
//! clients the objects of their own session.

use std::collections::BTreeMap;

use rnic_abi::abi::control::{ReplyBody, *};
use rnic_abi::types::*;

use crate::resource::answer::{Answer, Outcome};
use crate::resource::faults::Viewer;
use crate::resource::ledger::Kind;
use crate::resource::listing::page::{self, Page};
use crate::resource::memory::{mr_row, window_row};
use crate::resource::qp::qp_row;
use crate::resource::queue::{cq_row, srq_row};
use crate::resource::records::{Counters, Reader};
use crate::resource::session::{Session, client_row};
use crate::resource::{Manager, find};

impl Manager {
    pub(in crate::resource) fn device(&mut self, id: SessionId) -> Answer {
        let config = &self.config;
        let device = &config.device;
        let limits = &config.limits;
        let session = find(&mut self.sessions, id)?;
        let (max_ird, max_ord) = config.reads_of_qp();
        let rights = &session.account.rights();
        // The minimum of the limits of session, user and device.
        let ledger = &self.ledger;
        let most = |kind| ledger.most(rights, kind);
        let count = |kind| u32::try_from(most(kind)).unwrap_or(u32::MAX);
        let max_srq_wr = config.wired.profile.srq_wr().map_or(u64::MAX, |most| most.limit);
        let max_srq_wr = limits.device.of(Kind::QueueDepth).min(max_srq_wr);
        // Fits, because the depth of a queue is limited to 2^16.
        let max_srq_wr = u32::try_from(max_srq_wr).unwrap_or(u32::MAX);
        Outcome::now(ReplyBody::Device(DeviceAttributes {
            name: device.name.clone(),
            version: VERSION.to_owned(),
            max_qps: count(Kind::Qps),
            max_wr_depth: config.device_count(Kind::QueueDepth),
            // Configured values are at most 16 and 4096, so they fit.
            max_sge: config.device_limit(Kind::Sges) as u8,
            max_inline: config.device_limit(Kind::InlineBytes) as u16,
            max_cqs: count(Kind::Cqs),
            max_cq_entries: config.device_count(Kind::EntriesOfCq),
            max_mrs: count(Kind::Mrs),
            max_shared_bytes: most(Kind::SharedBytes),
            max_pds: count(Kind::Pds),
            max_ird,
            max_ord,
            direct_path: self.config.engine.loopback == crate::config::Loopback::Direct,
            max_windows: count(Kind::Windows),
            max_srqs: count(Kind::Srqs),
            hw_ver: config.hw_ver(),
            guid: self.guid.number(),
            max_srq_wr,
            max_backlog: limits.device.count(Kind::Backlog),
            devices: self.devices_seen_by(Viewer::Session(id)),
            profile: config.wired.profile.shown(limits),
            tree: self.tree.as_ref().map_or(String::new(), |path| path.display().to_string()),
        }))
    }

    pub(in crate::resource) fn query_gids(&self) -> Answer {
        Outcome::now(ReplyBody::Gids(self.gids.clone()))
    }

    pub(in crate::resource) fn status(&mut self, id: SessionId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let own = (!session.client.rights.admin).then_some(id);
        let counts = match own {
            Some(_) => session.account.amounts(),
            None => self.ledger.used(),
        };
        let refusals = own.map_or(self.records.refusals, |_| session.refusals);
        // Counts of objects are below their limits, which are below 2^32.
        let count = |kind| u32::try_from(counts.of(kind)).unwrap_or(u32::MAX);
        let mut done = Counters::default();
        for qp in page::sessions(&self.sessions, own, 0).flat_map(|s| s.qps.values()) {
            done.add_qp(&qp.shared);
        }
        if own.is_none() {
            for device in self.records.past.devices.values() {
                done.terminates_sent += device.terminates_sent;
                done.terminates_received += device.terminates_received;
            }
        }
        let faults = self.faults_in_force(own);
        let for_admins =
            |n: usize| if own.is_none() { u32::try_from(n).unwrap_or(u32::MAX) } else { 0 };
        Outcome::now(ReplyBody::Status(StatusInfo {
            version: VERSION.to_owned(),
            device: self.config.device.name.clone(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            workers: self.capacity.workers,
            loopback: self.config.engine.loopback.name().to_owned(),
            sessions: own.map_or(for_admins(self.sessions.len()), |_| 1),
            pds: count(Kind::Pds),
            shared_buffers: count(Kind::SharedBuffers),
            shared_bytes: counts.of(Kind::SharedBytes),
            mrs: count(Kind::Mrs),
            cqs: count(Kind::Cqs),
            qps: count(Kind::Qps),
            windows: count(Kind::Windows),
            srqs: count(Kind::Srqs),
            listeners: count(Kind::Listeners),
            startups: for_admins(self.cm.in_startup()),
            arena_bytes: counts.of(Kind::ArenaBytes),
            refusals,
            sessions_ended: own.map_or(self.records.misbehaved, |_| 0),
            terminates_sent: done.terminates_sent,
            terminates_received: done.terminates_received,
            draining: self.draining,
            wired_port: self.config.wired.port,
            wired_port_problem: self.wired_port_problem(),
            gids: u32::try_from(self.gid_count()).unwrap_or(u32::MAX),
            gids_problem: self.gids_problem.clone(),
            packets_dropped: self.workers.dropped_packets(),
            faults,
        }))
    }

    pub(in crate::resource) fn list(&mut self, id: SessionId, what: ListKind, from: u64) -> Answer {
        let reader = Reader::of(id, &find(&mut self.sessions, id)?.client);
        let own = reader.own();
        Outcome::now(match what {
            ListKind::Clients => {
                let total = own.map_or(self.sessions.len(), |_| 1);
                let clients = page::sessions(&self.sessions, own, from);
                let clients = clients.map(|session| (page::key(session.id, 0), session));
                Page::new(clients, total, client_row).reply(Rows::Clients)
            }
            ListKind::Qps => self
                .object_rows(own, from, |s| &s.qps, QpId, |id| id.0, |s, qp, o| qp_row(s.id, qp, o))
                .reply(Rows::Qps),
            ListKind::Cqs => self
                .object_rows(own, from, |s| &s.cqs, CqId, |id| id.0, |_, _, o| cq_row(&o.cq))
                .reply(Rows::Cqs),
            ListKind::Mrs => self
                .object_rows(own, from, |s| &s.mrs, MrId, |id| id.0, |s, mr, o| mr_row(s.id, mr, o))
                .reply(Rows::Mrs),
            ListKind::Listeners => self
                .object_rows(
                    own,
                    from,
                    |s| &s.listeners,
                    ListenerId,
                    |id| id.0,
                    |s, listener, o| {
                        self.cm.listener(listener).unwrap_or(ListenerRow {
                            listener,
                            session: s.id,
                            address: o.address,
                            backlog: 0,
                            pending: 0,
                            accepted: 0,
                            rejected: 0,
                        })
                    },
                )
                .reply(Rows::Listeners),
            ListKind::Windows => self
                .object_rows(
                    own,
                    from,
                    |s| &s.windows,
                    MwId,
                    |id| id.0,
                    |s, _, o| window_row(s.id, o),
                )
                .reply(Rows::Windows),
            ListKind::Srqs => self
                .object_rows(own, from, |s| &s.srqs, SrqId, |id| id.0, |_, _, o| srq_row(o))
                .reply(Rows::Srqs),
            ListKind::Pds => self.pd_rows(own, from).reply(Rows::Pds),
            ListKind::Limits => self.limit_rows(own, from).reply(Rows::Limits),
            ListKind::Diagnoses => self.list_diagnoses(reader, from).reply(Rows::Diagnoses),
            ListKind::Events => self.list_events(reader, from).reply(Rows::Events),
            ListKind::Faults => self.fault_rows(own, from).reply(Rows::Faults),
        })
    }

    /// Returns a page of the objects in a table of each session, or of one session.
    fn object_rows<K: Ord + Copy, V, R>(
        &self,
        own: Option<SessionId>,
        from: u64,
        table: fn(&Session) -> &BTreeMap<K, V>,
        named: fn(u32) -> K,
        number: fn(&K) -> u32,
        row: impl Fn(&Session, K, &V) -> R,
    ) -> Page<R> {
        let sessions = page::sessions(&self.sessions, own, from);
        let objects = page::objects(sessions, from, table, named, number);
        let total = page::count(page::sessions(&self.sessions, own, 0), table);
        Page::new(objects, total, |(session, id, object)| row(session, id, object))
    }
}

/// Version of the daemon.
const VERSION: &str = env!("CARGO_PKG_VERSION");
