//! Meaning of the peer's Terminate on an RC or UC QP: it blames a request, or only ends the stream.

use crate::ddp::Header;
use crate::engine::qp::Qp;
use crate::rdmap::{Control, Opcode, Terminate};
use rnic_abi::types::{CompletionStatus, TerminateCode};

impl Qp {
    /// Returns true if a Terminate blames no request, so that only the stream ends.
    pub(in crate::engine) fn blames_no_request(&self, t: &Terminate<'_>) -> bool {
        self.rc.as_ref().is_some_and(|rc| rc.unreliable || status_of(t).is_none())
    }

    /// Notes the number of the Write that a Terminate of this side refuses, for the notice before
    /// it. The enclosed header has only STag and offset, which several Writes of the peer may
    /// share.
    pub(in crate::engine) fn number_refused_write(&mut self, payload: &[u8]) {
        let header = Terminate::parse(payload).ok().and_then(|t| t.ddp_header);
        if let Some(Ok((Header::Tagged(header), _))) = header.map(Header::parse)
            && Control::parse(header.rsvd_ulp).opcode == Opcode::Write
        {
            self.requester.set_refused_write(self.responder.write_number());
        }
    }

    /// Fails the request that the peer blames, with the status that it has on a RoCE adapter, and
    /// completes all requests before it.
    pub(in crate::engine) fn blame_acknowledged(&mut self, t: &Terminate<'_>) -> Option<u64> {
        let status = status_of(t)?;
        let seq = self.requester.blamed_by_header(t)?;
        self.requester.acknowledge_before(seq);
        self.requester.blame(seq, status, t.code);
        Some(seq)
    }
}

/// Returns the status of the request that a Terminate blames (IBTA specification, volume 1, section
/// 11.6.2), or `None` if it blames none.
fn status_of(t: &Terminate<'_>) -> Option<CompletionStatus> {
    let TerminateCode { layer, etype, code } = t.code;
    t.ddp_header?;
    match (layer, etype, code) {
        // Remote protection errors, and DDP errors of a tagged buffer.
        (0, 1, _) | (1, 1, _) => Some(CompletionStatus::RemoteAccess),
        // A message that is too long, and invalid operations.
        (1, 2, _) | (0, 2, _) => Some(CompletionStatus::RemoteInvalidRequest),
        // An error of the peer's own memory.
        (1, 0, _) => Some(CompletionStatus::RemoteOperation),
        _ => None,
    }
}
