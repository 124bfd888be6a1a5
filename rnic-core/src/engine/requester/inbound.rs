//! Requests of the peer's that await a response of this side, at most IRD of them (RFC 5040 section
//! 6.1; siw's IRQ).

use super::Requester;
use super::message::{HeaderTemplate, Message, MessageSource};
use crate::rdmap::Opcode;
use crate::stream::InboundRead;

impl Requester {
    /// Whether another request of the peer's may be taken on.
    pub(in crate::engine) fn ird_available(&self) -> bool {
        let answering = self.message.as_ref().is_some_and(Message::is_response);
        //= RDMAP-5.2.2-2
        self.inbound.len() + usize::from(answering) < usize::from(self.ird)
    }

    /// Takes on a request, which is answered in its turn.
    pub(in crate::engine) fn take_on(&mut self, read: InboundRead) {
        //= RDMAP-5.2.1-2
        self.inbound.push_back(read);
    }

    /// Begins the response to the oldest request; false if there is none.
    pub(super) fn begin_response(&mut self) -> bool {
        //= RDMAP-5.2.1-8, RDMAP-5.2.2-6, RDMAP-5.5-20
        let Some(read) = self.inbound.pop_front() else { return false };
        //= RDMAP-5.2-1, RDMAP-5.2.1-11
        self.message = Some(response_to(read));
        true
    }
}

fn response_to(read: InboundRead) -> Message {
    let r = read.request;
    //= RDMAP-4.1-3, RDMAP-4.1-5, RDMAP-4.4-2, RDMAP-4.4-3, RDMAP-5.2.2-1
    let head =
        HeaderTemplate::Tagged { opcode: Opcode::ReadResponse, stag: r.sink_stag, to: r.sink_to.0 };
    let source = match r.size {
        //= RDMAP-5.2.1-15
        0 => MessageSource::Empty,
        _ => MessageSource::ReadResponse(read),
    };
    //= RDMAP-3.2-7
    Message { head, source, total: r.size, sent: 0, seq: None }
}
