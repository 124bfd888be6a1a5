//! Destinations of a worker's messages to clients: event senders by session, channels by CQ.

use std::collections::HashMap;
use std::sync::Arc;

use rnic_abi::abi::control::Event;
use rnic_abi::types::{CqId, SessionId};

use super::connections::{Connections, FullSender};
use crate::events::{ChannelSender, EventSender, Sent};

/// Senders of the sessions attached to a worker.
#[derive(Debug, Default)]
pub(super) struct Clients {
    events: HashMap<SessionId, Arc<EventSender>>,
    channels: HashMap<CqId, (SessionId, Arc<ChannelSender>)>,
}

impl Clients {
    pub(super) fn attach(&mut self, session: SessionId, events: Arc<EventSender>) {
        self.events.insert(session, events);
    }

    pub(super) fn detach(&mut self, session: SessionId) {
        self.events.remove(&session);
        self.channels.retain(|_, (of, _)| *of != session);
    }

    pub(super) fn sessions(&self) -> Vec<SessionId> {
        self.events.keys().copied().collect()
    }

    pub(super) fn register_cq(
        &mut self,
        cq: CqId,
        session: SessionId,
        channel: Arc<ChannelSender>,
    ) {
        self.channels.insert(cq, (session, channel));
    }

    pub(super) fn unregister_cq(&mut self, cq: CqId) {
        self.channels.remove(&cq);
    }

    /// Sends an event to a session. If its socket is full, the event waits or is lost.
    pub(super) fn send_event(
        &self,
        session: SessionId,
        event: &Event,
        connections: &mut Connections,
    ) {
        if let Some(sender) = self.events.get(&session)
            && sender.send(event) == Sent::Waiting
        {
            connections.watch(session, FullSender::Events(Arc::clone(sender)));
        }
    }

    /// Notifies the channel of a CQ, if it has one.
    pub(super) fn notify(&self, cq: CqId, connections: &mut Connections) {
        if let Some((session, channel)) = self.channels.get(&cq)
            && channel.notify(cq) == Sent::Waiting
        {
            connections.watch(*session, FullSender::Channel(Arc::clone(channel)));
        }
    }
}
