//! Interprets the peer's Terminate: it blames a request, or only ends the stream.

use crate::ddp::Header;
use crate::engine::qp::Qp;
use crate::rdmap::{Control, Opcode, Terminate};

impl Qp {
    /// Returns true if a Terminate blames no request, so that only the stream ends.
    pub(in crate::engine) fn blames_no_request(&self, t: &Terminate<'_>) -> bool {
        let transport = self.core.transport;
        transport.outlives_stream() && transport.blamed_status(t).is_none()
    }

    /// Records the number of the Write that a Terminate of this side reports, for the notice that
    /// precedes the Terminate. The enclosed header has only STag and offset, which several Writes
    /// of the peer may share.
    pub(in crate::engine) fn number_refused_write(&mut self, payload: &[u8]) {
        let header = Terminate::parse(payload).ok().and_then(|t| t.ddp_header);
        if let Some(Ok((Header::Tagged(header), _))) = header.map(Header::parse)
            && Control::parse(header.rsvd_ulp).opcode == Opcode::Write
        {
            self.requester.set_refused_write(self.responder.write_number());
        }
    }

    /// Fails the request that the peer blames, if any, and returns its sequence number. With
    /// acknowledgements, all requests before it are done.
    pub(in crate::engine) fn blame(&mut self, t: &Terminate<'_>) -> Option<u64> {
        let transport = self.core.transport;
        let status = transport.blamed_status(t)?;
        let seq = if transport.acknowledges() {
            self.requester.blamed_by_header(t)?
        } else {
            self.requester.blamed(t)?.seq?
        };
        self.requester.acknowledge_before(seq);
        self.requester.blame(seq, status, t.code);
        Some(seq)
    }
}
