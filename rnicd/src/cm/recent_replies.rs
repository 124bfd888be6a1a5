//! Replies that a listener on the RoCE device repeats.

use std::collections::VecDeque;
use std::net::IpAddr;

use rnic_abi::roce::mad::{Bytes, Exchange};

/// Recent replies of a listener, for requesters whose reply was lost.
#[derive(Debug, Default)]
pub struct RecentReplies(VecDeque<Answer>);

#[derive(Debug)]
struct Answer {
    to: IpAddr,
    exchange: Exchange,
    reply: Box<Bytes>,
}

impl RecentReplies {
    pub(super) fn keep(&mut self, to: IpAddr, exchange: Exchange, reply: &Bytes) {
        if self.0.len() >= MAX_REPLIES {
            self.0.pop_front();
        }
        self.0.push_back(Answer { to, exchange, reply: Box::new(*reply) });
    }

    pub(super) fn find(&self, to: IpAddr, exchange: Exchange) -> Option<Bytes> {
        let answer = self.0.iter().find(|a| (a.to, a.exchange) == (to, exchange));
        answer.map(|answer| *answer.reply)
    }
}

/// Maximum replies that a listener keeps.
const MAX_REPLIES: usize = 64;
