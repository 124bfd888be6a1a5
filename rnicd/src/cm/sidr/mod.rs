//! Service ID resolution (SIDR): which UD QP serves a port of `RDMA_PS_UDP`.
//!
//! The [`client`] repeats its request until a reply arrives or its deadline passes. The [`server`]
//! remembers its replies, so a repeated request gets the same reply.

mod client;
mod server;
mod state;

use std::net::IpAddr;

use rnic_abi::roce::mad::Exchange;
use rnic_abi::roce::sidr::Message;
use rnic_abi::types::Time;

pub(super) use state::{SidrRequest, SidrResolution};

use super::{ConnectionManager, Slot};

impl ConnectionManager {
    pub(super) fn handle_sidr(&mut self, from: IpAddr, to: IpAddr, message: Message, now: Time) {
        match message {
            Message::Request(request) => self.handle_request(from, to, &request, now),
            Message::Reply(reply) => self.handle_reply(from, to, &reply),
        }
    }

    /// Withdraws an undecided request that a client of this daemon sent.
    fn withdraw_local(&mut self, from: IpAddr, exchange: Exchange, why: &str) {
        if let Some(key) = self.service.undecided.get(&(from, exchange)).copied() {
            self.withdraw_sidr_request(key, why);
        }
    }

    /// Ends an undecided request without a reply.
    pub(super) fn withdraw_sidr_request(&mut self, key: usize, why: &str) {
        if let Some(Slot::SidrRequest(asked)) = self.remove(key) {
            self.withdraw(asked.listener, asked.request, why);
        }
    }
}
