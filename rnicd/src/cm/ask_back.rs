//! Connections that ask a peer's daemon whether it began a request: an MPA Request with the
//! question, which that daemon answers with an MPA Reject.
//!
//! The request waits undecided for the answer. Both connections are charged to the session of the
//! question as start-ups, and the question ends with the request.

use rnic_core::abi::control::Refusal;
use rnic_core::types::{RequestId, Time};

use super::active::{Active, Step};
use super::startups::WaitsFor;
use super::{CmEvent, ConnectParams, ConnectionManager, Slot};

/// A question about a request.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) request: RequestId,
    pub(super) active: Active,
}

impl ConnectionManager {
    /// Connects to `params.peer` and sends `params.private_data` as a question about an undecided
    /// request; the answer is a [`CmEvent::Answered`]. From now on the user of `params.session` is
    /// charged for the request too. No event follows an error or the end of the request.
    pub fn ask_back(
        &mut self,
        request: RequestId,
        mut params: ConnectParams,
        now: Time,
    ) -> Result<(), Refusal> {
        params.peer = self.options.ports.on_wire(params.peer);
        let session = params.session;
        let peer = params.peer.ip();
        // Without a charge the request cannot give way to itself.
        self.credit(self.undecided(request)?);
        self.room_for_start_up(session, peer, now)?;
        self.charge(self.undecided(request)?, session, peer, WaitsFor::Peer);
        self.room_for_start_up(session, peer, now)?;
        // With room for a single start-up the request gave way.
        self.undecided(request)?;
        let active = match self.begin_connect(params, now)? {
            Ok(active) => active,
            Err(why) => {
                self.events.push_back(CmEvent::Answered { request, answer: Err(why.reason) });
                return Ok(());
            }
        };
        let key = self.insert(Slot::Question(Box::new(Question { request, active })));
        self.questions.insert(request, key);
        self.charge(key, session, peer, WaitsFor::Peer);
        self.set_deadline(key, Some(now.after(self.options.connect_deadline)));
        let Slot::Question(question) = &self.slots[key].slot else { return Ok(()) };
        if let Err(e) = self.register(key, question.active.stream()) {
            self.end_question(key, Err(e.to_string()));
        }
        Ok(())
    }

    pub(super) fn drive_question(&mut self, key: usize, now: Time) {
        let Slot::Question(question) = &mut self.slots[key].slot else { return };
        let answer = match question.active.drive(&mut self.scratch[..]) {
            Step::Wait { entered_reply: false } => return,
            Step::Wait { entered_reply: true } => {
                return self.set_deadline(key, Some(now.after(self.options.reply_deadline)));
            }
            Step::Rejected(private_data) => Ok(private_data),
            Step::Accepted(_) => Err("the question was accepted like a connection".to_owned()),
            Step::Retry(why) => Err(why),
            Step::Failed(why) | Step::Part(_, why) => Err(why.reason),
        };
        self.end_question(key, answer);
    }

    /// Closes the connection of a question and reports the answer.
    pub(super) fn end_question(&mut self, key: usize, answer: Result<Vec<u8>, String>) {
        let Some(Slot::Question(question)) = self.remove(key) else { return };
        let request = question.request;
        self.events.push_back(CmEvent::Answered { request, answer });
    }
}
