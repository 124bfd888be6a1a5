//! Completion channels.

use std::sync::Arc;

use rnic_abi::abi::control::ReplyBody;
use rnic_abi::types::*;

use super::Channel;
use crate::events::ChannelSender;
use crate::resource::answer::{Answer, Outcome};
use crate::resource::ledger::Kind;
use crate::resource::uses::Users;
use crate::resource::{Manager, find, refuse};
use crate::system;

impl Manager {
    pub(in crate::resource) fn create_channel(&mut self, id: SessionId) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let charge = session.account.charge(Kind::Channels, 1)?;
        let made = ChannelSender::pair();
        let (sender, theirs) =
            made.map_err(|error| system::refusal("cannot create a channel", &error))?;
        let handle = self.handles.channels.allocate(id);
        let channel = ChannelId(handle.number());
        let sender = Arc::new(sender);
        let cqs = Users::default();
        let object = Channel { sender, cqs, _handle: handle, _charge: charge };
        session.channels.insert(channel, object);
        Outcome::with(ReplyBody::Channel { channel }, vec![theirs])
    }

    pub(in crate::resource) fn destroy_channel(
        &mut self,
        id: SessionId,
        channel: ChannelId,
    ) -> Answer {
        let session = find(&mut self.sessions, id)?;
        let cqs = session.channel(channel)?.cqs.count();
        if cqs > 0 {
            let by = format!("{cqs} CQs");
            return Err(refuse::in_use("completion channel", channel.0, by));
        }
        session.channels.remove(&channel);
        Outcome::done()
    }
}
