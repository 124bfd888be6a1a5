//! Verifies a connection request with the daemon at the peer's address. A second connection carries
//! an MPA Request with a query, and that daemon answers with an MPA Reject.
//!
//! The request stays undecided until the answer arrives. The session that verifies it is charged
//! for both connections as start-ups. The query ends with the request.

use rnic_abi::abi::control::Refusal;
use rnic_abi::types::{RequestId, Time};

use super::active::Step;
use crate::cm::slots::RequestCheck;
use crate::cm::startups::WaitsFor;
use crate::cm::{CmEvent, ConnectParams, ConnectionManager, Slot};

impl ConnectionManager {
    /// Connects to `params.peer` and sends `params.private_data` as a query about an undecided
    /// request. The answer is a [`CmEvent::Answered`]. From now on the user of `params.session` is
    /// charged for the request too. No event follows an error or the end of the request.
    pub fn ask_back(
        &mut self,
        request: RequestId,
        mut params: ConnectParams,
        now: Time,
    ) -> Result<(), Refusal> {
        params.peer = self.options.ports.tcp_address(params.peer);
        let session = params.session;
        let peer = params.peer.ip();
        // The request is not charged now, so its own query cannot evict it.
        self.credit(self.undecided(request)?);
        self.room_for_start_up(session, peer, now)?;
        self.charge(self.undecided(request)?, session, peer, WaitsFor::Peer);
        self.room_for_start_up(session, peer, now)?;
        // Making room may have evicted the request itself.
        self.undecided(request)?;
        let active = match self.begin_connect(params, now)? {
            Ok(active) => active,
            Err(why) => {
                self.events.push_back(CmEvent::Answered { request, answer: Err(why.reason) });
                return Ok(());
            }
        };
        let key = self.insert(Slot::RequestCheck(Box::new(RequestCheck { request, active })));
        self.request_checks.insert(request, key);
        self.charge(key, session, peer, WaitsFor::Peer);
        self.set_deadline(key, Some(now.after(self.options.connect_deadline)));
        let Slot::RequestCheck(check) = &self.slots[key].slot else { return Ok(()) };
        if let Err(e) = self.register(key, check.active.stream()) {
            self.end_request_check(key, Err(e.to_string()));
        }
        Ok(())
    }

    pub(in crate::cm) fn drive_request_check(&mut self, key: usize, now: Time) {
        let Slot::RequestCheck(check) = &mut self.slots[key].slot else { return };
        let answer = match check.active.drive(&mut self.scratch[..]) {
            Step::Wait { entered_reply: false } => return,
            Step::Wait { entered_reply: true } => {
                return self.set_deadline(key, Some(now.after(self.options.reply_deadline)));
            }
            Step::Rejected(private_data) => Ok(private_data),
            Step::Accepted(_) => Err("the peer accepted the query as a connection".to_owned()),
            Step::Retry(why) => Err(why),
            Step::Failed(why) | Step::FailedWithReply(_, why) => Err(why.reason),
        };
        self.end_request_check(key, answer);
    }

    /// Closes the connection of a query and reports the answer.
    pub(in crate::cm) fn end_request_check(&mut self, key: usize, answer: Result<Vec<u8>, String>) {
        let Some(Slot::RequestCheck(check)) = self.remove(key) else { return };
        let request = check.request;
        self.events.push_back(CmEvent::Answered { request, answer });
    }
}
