//! Completion queues.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{Refusal, ReplyBody};
use rnic_abi::abi::queue::{QueueKind, QueueShape};
use rnic_abi::types::*;
use rnic_core::device::Cq;

use super::{CqObject, Room};
use crate::config::{Config, CqOverrun};
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::qp::Qp;
use crate::resource::{Manager, find, refuse};
use crate::worker::Command;

impl Manager {
    pub(in crate::resource) fn create_cq(
        &mut self,
        id: SessionId,
        entries: u32,
        channel: Option<ChannelId>,
        context: u64,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        check_entries(&self.config, entries)?;
        let notified = channel.map(|c| session.channel(c).map(|c| (c.sender.clone(), c.cqs.add())));
        let notified = notified.transpose()?;
        let shape = QueueShape::completion(entries);
        let charge = session.account.charge(Kind::Cqs, 1)?;
        //= RDMAP-8.1.2-5
        let entries = session.account.charge(Kind::CqEntries, shape.capacity.into())?;
        let doorbell = session.doorbells.allocate()?;
        let Room { places: [place], made } = session.arenas.room([shape])?;
        let handle = self.handles.cqs.allocate(id);
        let cq = CqId(handle.number());
        let queue = place.format(QueueKind::Completion, cq.0, &doorbell)?;
        let overruns = self.config.wired.profile.keys.cq_overrun == CqOverrun::Error;
        let shared = Cq::new(cq, id, context, queue).with_overrun_by_sends(overruns);
        let shared = Arc::new(shared);
        let channel = channel.zip(notified).map(|(channel, (sender, used))| {
            self.workers.all(|| Command::RegisterCq { cq, session: id, channel: sender.clone() });
            (channel, used)
        });
        let location = place.location();
        let object = CqObject {
            cq: shared,
            channel,
            place,
            doorbell,
            _handle: handle,
            entries,
            _charge: charge,
        };
        session.cqs.insert(cq, object);
        let (new_arena, descriptors) = session.arenas.keep(made);
        Outcome::with(ReplyBody::Cq { cq, queue: location, new_arena }, descriptors)
    }

    pub(in crate::resource) fn destroy_cq(&mut self, id: SessionId, cq: CqId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let users = session.cq(cq)?.cq.qps.load(Relaxed);
        if users > 0 {
            return Err(refuse::in_use("CQ", cq.0, format!("{users} QPs")));
        }
        let Some(object) = session.cqs.remove(&cq) else { return Outcome::done() };
        if let Some((channel, _)) = &object.channel
            && let Some(channel) = session.channels.get(channel)
        {
            channel.sender.forget(cq);
            self.workers.all(|| Command::UnregisterCq(cq));
        }
        Outcome::done()
    }

    /// Moves all QPs of a dead CQ to Error.
    pub(in crate::resource) fn cq_failed(&mut self, cq: CqId) {
        if let Some(id) = self.handles.cqs.owner(cq.0) {
            self.qps_to_error(id, |qp| qp.send_cq == cq || qp.recv_cq == cq);
        }
    }

    /// Moves matching QPs of a session to Error.
    pub(super) fn qps_to_error(&mut self, id: SessionId, which: impl Fn(&Qp) -> bool) {
        let Ok(session) = find(&mut self.sessions, id) else { return };
        let qps = session.qps.iter().filter(|(_, qp)| which(qp)).map(|(id, _)| *id);
        for qp in qps.collect::<Vec<_>>() {
            self.fail_qp(id, qp);
        }
    }
}

pub fn check_entries(config: &Config, entries: u32) -> Result<(), Refusal> {
    if entries == 0 {
        return Err(refuse::invalid("entries", "a CQ has at least one entry"));
    }
    refuse::at_most_of(config, Kind::EntriesOfCq, "entries", entries.into())
}
