//! What becomes of a request: something done, at once or later, or a refusal.

use std::os::fd::OwnedFd;

use rnic_core::abi::control::{Refusal, ReplyBody};

/// What a request came to: something given, or a refusal by name.
pub type Answer = Result<Given, Refusal>;

/// An answer with the descriptors that go with it.
#[derive(Debug)]
pub struct Granted {
    /// What was done.
    pub body: ReplyBody,
    /// In the order in which the message names them.
    pub descriptors: Vec<OwnedFd>,
}

impl From<ReplyBody> for Granted {
    fn from(body: ReplyBody) -> Self {
        Granted { body, descriptors: Vec::new() }
    }
}

/// What a client gets, and when.
#[derive(Debug)]
pub enum Given {
    /// It, at once.
    Now(Box<Granted>),
    /// An answer when the workers are done, from [`Manager::poll_answer`].
    Later,
}

impl Given {
    /// Done, and that is all.
    pub(super) fn now(body: ReplyBody) -> Answer {
        Given::with(body, Vec::new())
    }

    /// Done, with descriptors.
    pub(super) fn with(body: ReplyBody, descriptors: Vec<OwnedFd>) -> Answer {
        Ok(Given::Now(Box::new(Granted { body, descriptors })))
    }

    /// Done, without anything to tell.
    pub(super) fn done() -> Answer {
        Given::now(ReplyBody::Done)
    }

    /// Begun.
    pub(super) fn later() -> Answer {
        Ok(Given::Later)
    }
}

/// A refusal with the number of its record.
#[derive(Debug)]
pub struct Refused {
    /// What was refused, and why.
    pub refusal: Refusal,
    /// The record.
    pub why_id: u64,
}
