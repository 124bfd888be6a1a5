//! Results of requests: an answer, at once or later, or a refusal.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rnic_abi::abi::control::{Refusal, ReplyBody};
use rnic_abi::types::SessionId;

/// Result of a request.
pub type Answer = Result<Outcome, Refusal>;

/// An answer with its descriptors.
#[derive(Debug)]
pub struct Response {
    /// Result for the reply.
    pub body: ReplyBody,
    /// Descriptors, in the order in which `body` refers to them.
    pub descriptors: Vec<OwnedFd>,
}

impl From<ReplyBody> for Response {
    fn from(body: ReplyBody) -> Self {
        Response { body, descriptors: Vec::new() }
    }
}

/// A successful result.
#[derive(Debug)]
pub enum Outcome {
    /// The answer is available at once.
    Now(Box<Response>),
    /// [`Manager::poll_answer`](super::Manager::poll_answer) returns the answer later.
    Later,
}

impl From<ReplyBody> for Outcome {
    fn from(body: ReplyBody) -> Self {
        Outcome::Now(Box::new(body.into()))
    }
}

impl Outcome {
    /// Answers at once, without descriptors.
    pub(super) fn now(body: ReplyBody) -> Answer {
        Outcome::with(body, Vec::new())
    }

    /// Answers at once, with descriptors.
    pub(super) fn with(body: ReplyBody, descriptors: Vec<OwnedFd>) -> Answer {
        Ok(Outcome::Now(Box::new(Response { body, descriptors })))
    }

    /// Answers at once, without a result.
    pub(super) fn done() -> Answer {
        Outcome::now(ReplyBody::Done)
    }

    /// Answers later, through the [`Outbox`].
    pub(super) fn later() -> Answer {
        Ok(Outcome::Later)
    }
}

/// Answers and ended sessions that the control thread has not taken yet.
#[derive(Default)]
pub struct Outbox {
    /// Deferred answers.
    pub answers: VecDeque<(SessionId, Response)>,
    /// Sessions to be closed, with the reasons.
    pub ended: VecDeque<(SessionId, SessionEnd)>,
}

/// Reason for which the resource manager ends a session.
#[derive(Debug)]
pub enum SessionEnd {
    /// The client violated the rules of shared memory.
    Misbehaved(String),
    /// A fault rule ends the session. Contains the rule, as the diagnosis names it.
    Injected(String),
}

impl Outbox {
    /// Queues a deferred answer.
    pub fn answer(&mut self, session: SessionId, body: ReplyBody) {
        self.answers.push_back((session, body.into()));
    }

    /// Queues a session to be closed because its client misbehaved, with the reason.
    pub fn end(&mut self, session: SessionId, why: String) {
        self.ended.push_back((session, SessionEnd::Misbehaved(why)));
    }

    /// Queues a session to be closed because of a fault rule.
    pub fn end_by_rule(&mut self, session: SessionId, rule: String) {
        self.ended.push_back((session, SessionEnd::Injected(rule)));
    }
}

/// A refusal with the number of its diagnosis.
#[derive(Debug)]
pub struct Refused {
    /// Reason of the refusal.
    pub refusal: Refusal,
    /// Number of the diagnosis, or 0.
    pub diagnosis_id: u64,
}
