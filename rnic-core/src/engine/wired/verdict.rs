//! What the peer's Terminate means for a queue pair that is wired by hand: that one of its requests
//! was wrong, or only that the stream is gone.

use crate::ddp::Header;
use crate::engine::qp::Qp;
use crate::rdmap::{Control, Opcode, Terminate};
use crate::types::{CompletionStatus, TerminateCode};

impl Qp {
    /// Whether the peer blames no request, so that only the stream is gone.
    pub(in crate::engine) fn is_blameless(&self, t: &Terminate<'_>) -> bool {
        self.wired.as_ref().is_some_and(|wired| wired.unreliable || status_of(t).is_none())
    }

    /// Notes the number of the Write that a Terminate of this side refuses, for the notice before
    /// it. Its header has only STag and offset, which several Writes of the peer may have.
    pub(in crate::engine) fn number_refused_write(&mut self, payload: &[u8]) {
        let header = Terminate::parse(payload).ok().and_then(|t| t.ddp_header);
        if let Some(Ok((Header::Tagged(header), _))) = header.map(Header::parse)
            && Control::parse(header.rsvd_ulp).opcode == Opcode::Write
        {
            self.requester.set_refused_write(self.responder.write_number());
        }
    }

    /// The request that the peer blames fails with the status that it has on an adapter; all before
    /// it are done.
    pub(in crate::engine) fn blame_acknowledged(&mut self, t: &Terminate<'_>) -> Option<u64> {
        let status = status_of(t)?;
        let seq = self.requester.blamed_by_header(t)?;
        self.requester.acknowledge_before(seq);
        self.requester.blame(seq, status, t.code);
        Some(seq)
    }
}

/// The status of the request that a Terminate blames (IBTA specification, volume 1, section
/// 11.6.2); none if it blames none.
fn status_of(t: &Terminate<'_>) -> Option<CompletionStatus> {
    let TerminateCode { layer, etype, code } = t.code;
    t.ddp_header?;
    match (layer, etype, code) {
        // Remote protection; a tagged buffer.
        (0, 1, _) | (1, 1, _) => Some(CompletionStatus::RemoteAccess),
        // A message that is too long, and operations that cannot be.
        (1, 2, _) | (0, 2, _) => Some(CompletionStatus::RemoteInvalidRequest),
        // The peer's own memory.
        (1, 0, _) => Some(CompletionStatus::RemoteOperation),
        _ => None,
    }
}
