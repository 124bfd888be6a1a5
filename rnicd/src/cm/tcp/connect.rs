//! Connects over TCP.
//!
//! A peer that closes without a reply may not support revision 2 (RFC 6581 section 9.2). The
//! manager tries once more with revision 1 on a new TCP connection.

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{AddressPair, Time};
use rnic_core::stream::startup::{Negotiated, Options};

use super::active::{Active, Step, new_initiator};
use crate::cm::connect_failure::ConnectFailure;
use crate::cm::{CmEvent, ConnectParams, ConnectionManager, Slot, net};
use crate::socket::Socket;
use crate::system;

impl ConnectionManager {
    pub(in crate::cm) fn connect_tcp(
        &mut self,
        params: ConnectParams,
        now: Time,
    ) -> Result<(), Refusal> {
        let qp = params.qp;
        let active = match self.begin_connect(params, now)? {
            Ok(active) => active,
            Err(why) => {
                self.events.push_back(CmEvent::Unreachable { qp, why });
                return Ok(());
            }
        };
        let key = self.insert(Slot::Active(Box::new(active)));
        if let Slot::Active(active) = &self.slots[key].slot
            && let Err(e) = self.register(key, &active.stream)
        {
            let refusal = system::refusal(&format!("connect {}", active.params.peer), &e);
            self.remove(key);
            return Err(refusal);
        }
        self.qps.insert(qp, key);
        self.set_deadline(key, Some(now.after(self.options.connect_deadline)));
        Ok(())
    }

    /// Starts a TCP connection to the peer. The outer error is a failure of the local end; the
    /// inner error means that the peer is unreachable.
    pub(in crate::cm) fn begin_connect(
        &self,
        params: ConnectParams,
        now: Time,
    ) -> Result<Result<Active, ConnectFailure>, Refusal> {
        let options = self.initiator_options(&params);
        let initiator = new_initiator(&options, &params.private_data)?;
        let what = || format!("connect {}", params.peer);
        let buffers = self.options.buffers;
        let mut stream = match net::start_connect(params.local, params.peer, buffers) {
            Ok(Ok(stream)) => Socket::own(stream),
            Ok(Err(e)) => return Ok(Err(ConnectFailure::system("connect", &e))),
            Err(e) => return Err(system::refusal(&what(), &e)),
        };
        stream.watch(&self.options.tcp).map_err(|e| system::refusal(&what(), &e))?;
        let until = now.after(self.options.connect_deadline + self.options.reply_deadline);
        Ok(Ok(Active::new(params, options, initiator, stream, until)))
    }

    /// Returns the device's options with the parameters of this connect.
    pub(in crate::cm) fn initiator_options(&self, params: &ConnectParams) -> Options {
        let mut options = self.options.startup;
        options.ird = params.ird.unwrap_or(options.ird);
        options.ord = params.ord.unwrap_or(options.ord);
        options.peer_to_peer = params.peer_to_peer;
        options
    }

    pub(in crate::cm) fn drive_active(&mut self, key: usize, now: Time) {
        let Slot::Active(active) = &mut self.slots[key].slot else { return };
        match active.drive(&mut self.scratch[..]) {
            Step::Wait { entered_reply: false } => {}
            Step::Wait { entered_reply: true } => {
                let at = now.after(self.options.reply_deadline).min(active.until);
                let qp = active.params.qp;
                self.set_deadline(key, Some(at));
                self.events.push_back(CmEvent::Reached { qp });
            }
            Step::Accepted(negotiated) => self.finish_active(key, negotiated),
            Step::Rejected(private_data) => {
                let qp = active.params.qp;
                if let Some(Slot::Active(active)) = self.remove(key) {
                    //= MPA-7.1.2-3b
                    active.stream.let_go();
                }
                self.events.push_back(CmEvent::Rejected { qp, private_data });
            }
            Step::Retry(first) => self.retry(key, first, now),
            //= MPA-7.1.1-4, MPA-7.1.2-3a, MPA-7.1.2-5, MPA-8-7
            Step::Failed(why) => self.fail_active(key, why),
            Step::FailedWithReply(final_bytes, why) => {
                if let Some(Slot::Active(mut active)) = self.remove(key) {
                    let qp = active.params.qp;
                    let why = active.with_first(why);
                    self.events.push_back(CmEvent::Unreachable { qp, why });
                    let session = active.params.session;
                    let peer = active.params.peer.ip();
                    self.close_after(active.stream, final_bytes, session, peer, now);
                }
            }
        }
    }

    pub(in crate::cm) fn fail_active(&mut self, key: usize, why: ConnectFailure) {
        if let Some(Slot::Active(mut active)) = self.remove(key) {
            let qp = active.params.qp;
            let why = active.with_first(why);
            self.events.push_back(CmEvent::Unreachable { qp, why });
        }
    }

    fn finish_active(&mut self, key: usize, negotiated: Box<Negotiated>) {
        let Some(Slot::Active(active)) = self.remove(key) else { return };
        let Active { params, stream, .. } = *active;
        let local = match net::local_address(&stream) {
            Ok(local) => local,
            Err(e) => {
                let why = ConnectFailure::system("after the MPA reply", &e);
                self.events.push_back(CmEvent::Unreachable { qp: params.qp, why });
                return;
            }
        };
        self.deregister(&stream);
        // The client connected a passed socket itself, so the peer's port is not mapped.
        let peer = net::canonical(params.peer);
        let peer = if stream.is_passed() { peer } else { self.options.ports.named(peer) };
        let addresses = AddressPair { local, peer };
        self.events.push_back(CmEvent::ConnectedTcp {
            qp: params.qp,
            stream,
            negotiated,
            addresses,
        });
    }

    /// Starts the second attempt, as revision 1. Keeps the slot and its token.
    fn retry(&mut self, key: usize, first: String, now: Time) {
        let Slot::Active(active) = &mut self.slots[key].slot else { return };
        active.first = Some(first);
        let at = now.after(self.options.connect_deadline).min(active.until);
        let result = active.start_over(&self.options);
        let result = result.and_then(|()| match &self.slots[key].slot {
            Slot::Active(active) => self.register(key, &active.stream),
            _ => Ok(()),
        });
        match result {
            Ok(()) => {
                self.set_deadline(key, Some(at));
            }
            // The peer closed the first connection, so the failure counts as a reset.
            Err(e) => self.fail_active(key, ConnectFailure::reset(format!("connect: {e}"))),
        }
    }
}
