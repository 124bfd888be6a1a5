//! Completions of work requests.

use rnic_abi::abi::queue::{CompletionFlags, Cqe};
use rnic_abi::types::{CompletionOpcode, CompletionStatus, QpId, SrqId, Stag, TerminateCode};

use crate::error::Error;

/// Outcome of a work request (compare `struct ibv_wc` in `ibv_poll_cq(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// `wr_id` of the request.
    pub wr_id: u64,
    /// Status. Unless it is `Success`, only `wr_id`, `qp`, `opcode`, `detail`, `srq` and
    /// `diagnosis_id` are valid.
    pub status: CompletionStatus,
    /// Type of the request.
    pub opcode: CompletionOpcode,
    /// QP of the request.
    pub qp: QpId,
    /// Bytes received or read; 8 for an atomic operation; with Immediate Data, the bytes of the
    /// preceding RDMA Write; 0 for other requests.
    pub byte_len: u32,
    /// The peer requested a solicited event with this message (RFC 5040 section 5.3).
    pub solicited: bool,
    /// STag that the peer's message invalidated; it no longer grants access (RFC 5040 section 5.3).
    pub invalidated: Option<Stag>,
    /// Immediate Data of the message (RFC 7306 section 6).
    pub immediate: Option<[u8; 8]>,
    /// True if the immediate data arrived with a Send. `byte_len` is then the length of that Send,
    /// and the immediate data are the first four bytes of `immediate`.
    pub immediate_with_send: bool,
    /// QP that sent the datagram; 0 for other messages.
    pub src_qp: QpId,
    /// Type of the GRH area before a datagram's data; `byte_len` includes the area.
    pub grh: Option<Grh>,
    /// Terminate message, sent or received, that caused the failure (RFC 5040 section 4.8).
    pub detail: Option<TerminateCode>,
    /// SRQ of a receive.
    pub srq: Option<SrqId>,
    /// Number of the daemon's diagnosis of the failure; 0 if it has none.
    pub diagnosis_id: u64,
}

/// Contents of the 40-byte GRH area before the data of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grh {
    /// 20 unused bytes and an IPv4 header.
    Ipv4,
    /// An IPv6 header.
    Ipv6,
}

impl Grh {
    fn of(flags: CompletionFlags) -> Self {
        if flags.contains(CompletionFlags::IPV4) { Grh::Ipv4 } else { Grh::Ipv6 }
    }
}

impl Completion {
    /// Returns the completion, or [`Error::Failed`] if the request failed.
    pub fn ok(self) -> Result<Completion, Error> {
        match self.status {
            CompletionStatus::Success => Ok(self),
            status => Err(Error::Failed {
                wr_id: self.wr_id,
                qp: self.qp,
                opcode: self.opcode,
                status,
                detail: self.detail,
                diagnosis_id: self.diagnosis_id,
            }),
        }
    }

    /// Decodes a queue entry. An unknown status becomes `General`.
    pub(crate) fn from_entry(e: &Cqe) -> Result<Self, Error> {
        let flags = CompletionFlags::from_bits_retain(e.flags);
        let Some(opcode) = CompletionOpcode::from_u8(e.opcode) else {
            return Err(Error::protocol(format!("a completion with unknown opcode {}", e.opcode)));
        };
        let status = CompletionStatus::from_u8(e.status).unwrap_or(CompletionStatus::General);
        Ok(Completion {
            wr_id: e.wr_id,
            status,
            opcode,
            qp: QpId(e.qp),
            byte_len: e.byte_len,
            solicited: flags.contains(CompletionFlags::SOLICITED),
            invalidated: flags
                .contains(CompletionFlags::WITH_INV)
                .then_some(Stag(e.imm_or_inv as u32)),
            immediate: flags
                .contains(CompletionFlags::WITH_IMM)
                .then(|| e.imm_or_inv.to_be_bytes()),
            immediate_with_send: flags.contains(CompletionFlags::IMM_WITH_SEND),
            src_qp: QpId(e.src_qp),
            grh: flags.contains(CompletionFlags::GRH).then(|| Grh::of(flags)),
            detail: (e.detail != 0).then_some(TerminateCode {
                layer: (e.detail >> 16) as u8,
                etype: (e.detail >> 8) as u8,
                code: e.detail as u8,
            }),
            srq: (e.srq != 0).then_some(SrqId(e.srq)),
            diagnosis_id: e.diagnosis_id,
        })
    }
}

/// A completion of no request, with an error status, for [`Cq::poll`](crate::Cq::poll) to
/// overwrite.
impl Default for Completion {
    fn default() -> Self {
        Completion {
            wr_id: 0,
            status: CompletionStatus::General,
            opcode: CompletionOpcode::Send,
            qp: QpId(0),
            byte_len: 0,
            solicited: false,
            invalidated: None,
            immediate: None,
            immediate_with_send: false,
            src_qp: QpId(0),
            grh: None,
            detail: None,
            srq: None,
            diagnosis_id: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_fields_are_decoded() {
        let mut e = Cqe::new(5, 77, CompletionOpcode::Receive, CompletionStatus::Success);
        e.byte_len = 12;
        e.srq = 6;
        e.flags = (CompletionFlags::SOLICITED | CompletionFlags::WITH_INV).bits();
        e.imm_or_inv = 0xABCD_EF01;
        let c = Completion::from_entry(&e).unwrap();
        assert_eq!((c.wr_id, c.qp, c.byte_len, c.solicited), (77, QpId(5), 12, true));
        assert_eq!(c.srq, Some(SrqId(6)));
        assert_eq!(c.invalidated, Some(Stag(0xABCD_EF01)));
        assert_eq!(c.ok().unwrap(), c);
    }

    #[test]
    fn immediate_data_keep_wire_order() {
        let mut e = Cqe::new(5, 77, CompletionOpcode::Receive, CompletionStatus::Success);
        e.imm_or_inv = 0x0102_0304_0506_0708;
        assert_eq!(Completion::from_entry(&e).unwrap().immediate, None);
        e.flags = CompletionFlags::WITH_IMM.bits();
        let c = Completion::from_entry(&e).unwrap();
        assert_eq!((c.immediate, c.invalidated), (Some([1, 2, 3, 4, 5, 6, 7, 8]), None));
    }

    #[test]
    fn a_failure_names_its_terminate() {
        let mut e = Cqe::new(5, 77, CompletionOpcode::RdmaRead, CompletionStatus::RemoteAccess);
        e.detail = 0x01_01_02;
        e.diagnosis_id = 9;
        let text = Completion::from_entry(&e).unwrap().ok().unwrap_err().to_string();
        assert_eq!(
            text,
            "RDMA Read 77 of QP 5 failed: the peer refuses access to its memory, Terminate 1/1/02 \
             (tagged buffer: STag not associated with the DDP stream) (details: `rnicctl why 9`)"
        );
    }

    #[test]
    fn missing_receive_explains_rnr_policy() {
        let mut e = Cqe::new(5, 77, CompletionOpcode::Send, CompletionStatus::RemoteOperation);
        e.detail = 0x01_02_02;
        let text = Completion::from_entry(&e).unwrap().ok().unwrap_err().to_string();
        assert!(text.contains("Terminate 1/2/02"), "{text}");
        assert!(text.contains("QpOptions::rnr_policy"), "{text}");
    }

    #[test]
    fn unknown_numbers_do_not_decode_as_success() {
        let mut e = Cqe::new(5, 77, CompletionOpcode::Send, CompletionStatus::Success);
        e.status = 200;
        assert_eq!(Completion::from_entry(&e).unwrap().status, CompletionStatus::General);
        e.opcode = 99;
        assert!(matches!(Completion::from_entry(&e), Err(Error::Protocol(_))));
    }
}
