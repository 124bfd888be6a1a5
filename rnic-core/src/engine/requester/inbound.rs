//! Requests of the peer's that await a response of this side, at most IRD of them (RFC 5040 section
//! 6.4; siw's IRQ).

use super::Requester;
use super::message::{Head, Message, Source};
use crate::rdmap::Opcode;
use crate::stream::ReadArrival;

impl Requester {
    /// Whether another request of the peer's may be taken on.
    pub(in crate::engine) fn ird_available(&self) -> bool {
        let answering = self.message.as_ref().is_some_and(Message::is_response);
        self.inbound.len() + usize::from(answering) < usize::from(self.ird)
    }

    /// Takes on a request, which is answered in its turn.
    pub(in crate::engine) fn take_on(&mut self, read: ReadArrival) {
        self.inbound.push_back(read);
    }

    /// Begins the response to the oldest request; false if there is none.
    pub(super) fn begin_response(&mut self) -> bool {
        let Some(read) = self.inbound.pop_front() else { return false };
        self.message = Some(response_to(read));
        true
    }
}

fn response_to(read: ReadArrival) -> Message {
    let r = read.request;
    let head = Head::Tagged { opcode: Opcode::ReadResponse, stag: r.sink_stag, to: r.sink_to.0 };
    let source = match r.size {
        0 => Source::Empty,
        _ => Source::Region(read),
    };
    Message { head, source, total: r.size, sent: 0, seq: None }
}
