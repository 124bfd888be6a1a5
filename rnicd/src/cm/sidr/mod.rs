//! Service ID resolution (SIDR): which UD QP serves a port of `RDMA_PS_UDP`.
//!
//! The daemon manages this port space itself: its addresses are those of the device's ports, and no
//! kernel socket is bound to them. The [`client`] repeats its request until a reply arrives or its
//! deadline passes. The [`server`] remembers its replies, so a repeated request gets the same
//! reply. Between two ends in this daemon, messages are passed in memory. Other messages leave as
//! [`CmEvent::Management`] and arrive in
//! [`handle_management`](ConnectionManager::handle_management).

mod client;
mod server;
mod state;

use std::net::IpAddr;
use std::sync::Arc;

use rnic_abi::roce::sidr::{self, Exchange, Message};
use rnic_abi::types::Time;
use rnic_core::engine::DatagramPort;

use state::{FIRST_PORT, LAST_PORT};
pub(super) use state::{RecentReplies, Sidr, SidrRequest, SidrResolution};

use super::{CmEvent, ConnectionManager, Slot};

impl ConnectionManager {
    /// Sets the ports of the device. With `has_loopback` the port of 127.0.0.1 serves all of
    /// 127.0.0.0/8; otherwise other daemons on this host may use the rest.
    pub fn set_datagram_port(&mut self, port: &Arc<DatagramPort>, has_loopback: bool) {
        self.sidr.port = port.clone();
        self.sidr.has_loopback = has_loopback;
    }

    /// Handles a management datagram from another daemon. Ignores datagrams that are not SIDR
    /// messages or that claim to come from this daemon.
    pub fn handle_management(&mut self, from: IpAddr, to: IpAddr, mad: &sidr::Bytes, now: Time) {
        if !self.sidr.is_local(from) {
            self.message_arrived(from, to, mad, now);
        }
    }

    /// Sends a message, in memory or as an event.
    fn send_message(&mut self, from: IpAddr, to: IpAddr, message: sidr::Bytes, now: Time) {
        if self.sidr.stays_local(from, to) {
            self.message_arrived(from, to, &message, now);
        } else {
            let mad = Box::new(message);
            self.events.push_back(CmEvent::Management { from, to, mad });
        }
    }

    fn message_arrived(&mut self, from: IpAddr, to: IpAddr, message: &sidr::Bytes, now: Time) {
        match sidr::parse(message) {
            Ok(Message::Request(request)) => self.handle_request(from, to, &request, now),
            Ok(Message::Reply(reply)) => self.handle_reply(from, to, &reply),
            Err(fault) => tracing::debug!(%from, "a management datagram was dropped: {fault}"),
        }
    }

    /// Returns a port without a listener for UD QPs.
    fn free_port(&mut self) -> Option<u16> {
        for _ in FIRST_PORT..=LAST_PORT {
            let last = self.sidr.last_port;
            let next = if last == LAST_PORT { FIRST_PORT } else { last + 1 };
            self.sidr.last_port = next;
            if self.sidr.listeners_at(next).next().is_none() {
                return Some(next);
            }
        }
        None
    }

    /// Withdraws an undecided request that a client of this daemon sent.
    fn withdraw_local(&mut self, from: IpAddr, exchange: Exchange, why: &str) {
        if let Some(key) = self.sidr.undecided.get(&(from, exchange)).copied() {
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
