//! What becomes of a request: something done, at once or later, or a refusal.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rnic_core::abi::control::{Refusal, ReplyBody};
use rnic_core::types::SessionId;

/// What a request came to: something given, or a refusal by name.
pub type Answer = Result<Outcome, Refusal>;

/// An answer with the descriptors that go with it.
#[derive(Debug)]
pub struct Response {
    /// What was done, to be sent as the reply's result.
    pub body: ReplyBody,
    /// In the order in which the message names them.
    pub descriptors: Vec<OwnedFd>,
}

impl From<ReplyBody> for Response {
    fn from(body: ReplyBody) -> Self {
        Response { body, descriptors: Vec::new() }
    }
}

/// What a client gets, and when.
#[derive(Debug)]
pub enum Outcome {
    /// An answer that is sent at once.
    Now(Box<Response>),
    /// An answer when the workers are done, from
    /// [`Manager::poll_answer`](super::Manager::poll_answer).
    Later,
}

impl Outcome {
    /// Done, and that is all.
    pub(super) fn now(body: ReplyBody) -> Answer {
        Outcome::with(body, Vec::new())
    }

    /// The answer that a request was carried out, with descriptors for the client.
    pub(super) fn with(body: ReplyBody, descriptors: Vec<OwnedFd>) -> Answer {
        Ok(Outcome::Now(Box::new(Response { body, descriptors })))
    }

    /// Done, without anything to tell.
    pub(super) fn done() -> Answer {
        Outcome::now(ReplyBody::Done)
    }

    /// The answer that workers are to be waited for.
    pub(super) fn later() -> Answer {
        Ok(Outcome::Later)
    }
}

/// What others are to be told and have not fetched yet.
#[derive(Default)]
pub struct Outbox {
    answers: VecDeque<(SessionId, Response)>,
    ended: VecDeque<(SessionId, String)>,
}

impl Outbox {
    /// What a session was promised.
    pub fn answer(&mut self, session: SessionId, body: ReplyBody) {
        self.answers.push_back((session, body.into()));
    }

    /// It is to be closed, because of this.
    pub fn end(&mut self, session: SessionId, why: String) {
        self.ended.push_back((session, why));
    }

    /// Takes the next answer that a session was promised, if there is one.
    pub fn poll_answer(&mut self) -> Option<(SessionId, Response)> {
        self.answers.pop_front()
    }

    /// The next session that is to be closed.
    pub fn poll_ended(&mut self) -> Option<(SessionId, String)> {
        self.ended.pop_front()
    }
}

/// A refusal with the number of its record.
#[derive(Debug)]
pub struct Refused {
    /// What was refused, and why.
    pub refusal: Refusal,
    /// Number of the diagnosis; 0 if there is none.
    pub diagnosis_id: u64,
}
