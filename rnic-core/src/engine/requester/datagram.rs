//! Requests of UD QPs, each of which carries its destination and is one message of one segment.

use super::message::{Addressed, HeaderTemplate, Message};
use super::staging::StagingBuffer;
use super::{RequestError, Requester};
use crate::ddp::qn;
use crate::engine::fault_rules::RequestFault;
use crate::engine::numbers::high_half;
use crate::engine::qp_core::QpCore;
use crate::engine::reason::Reason;
use crate::engine::schedule::REQUEST_COST;
use crate::engine::state::EngineState;
use crate::rdmap::Opcode;
use rnic_abi::abi::queue::{DatagramParams, OWN_Q_KEY, SendFlags, SendOpcode};
use rnic_abi::shm::queue::SendEntry;
use rnic_abi::types::{Msn, Stag};

impl Requester {
    /// Makes a datagram of at most `mtu` bytes ready to be sent. Returns false if no datagram can
    /// be sent now.
    pub(in crate::engine) fn next_datagram(
        &mut self,
        mtu: u32,
        core: &mut QpCore,
        engine: &mut EngineState,
    ) -> Result<bool, RequestError> {
        if self.message.is_some() {
            return Ok(true);
        }
        self.staging = StagingBuffer::default();
        if self.held_back {
            return Ok(false);
        }
        let Some(entry) = self.take_request(core, engine)? else { return Ok(false) };
        let fault = core.request_fault(&entry, engine);
        if let RequestFault::Waits = fault {
            self.fenced = Some(entry);
            return Ok(false);
        }
        let seq = self.push_in_flight(&entry, core);
        let begun = match fault {
            RequestFault::Fails(reason) => Err(reason),
            _ => self.datagram(&entry, seq, mtu, core, engine),
        };
        let (message, addressed) = begun.map_err(|reason| {
            core.turn.charge(REQUEST_COST);
            RequestError::Failed { seq, reason }
        })?;
        self.message = Some(message);
        self.addressed = Some(addressed);
        Ok(true)
    }

    /// Returns the destination of the datagram in progress.
    pub(in crate::engine) fn addressed(&self) -> Option<Addressed> {
        self.addressed
    }

    fn datagram(
        &self,
        entry: &SendEntry,
        seq: u64,
        mtu: u32,
        core: &QpCore,
        engine: &EngineState,
    ) -> Result<(Message, Addressed), Reason> {
        let h = &entry.header;
        let immediate = match SendOpcode::from_u8(h.opcode) {
            Some(SendOpcode::Send) if h.params[0] == 0 => None,
            Some(SendOpcode::SendImmediate) => Some(high_half(h.params[0])),
            Some(SendOpcode::Send) => return Err(Reason::UnsupportedFlags(h.flags.into())),
            Some(_) => return Err(Reason::NoDatagram),
            None => return Err(Reason::Opcode(h.opcode)),
        };
        let Some(flags) = SendFlags::from_bits(h.flags).filter(|_| h.remote_addr == 0) else {
            return Err(Reason::UnsupportedFlags(h.flags.into()));
        };
        let params = DatagramParams::from_params(h.params)
            .ok_or(Reason::DatagramSource { index: h.params[3] })?;
        let (source, total) = self.payload(entry, core, engine)?;
        if total > mtu {
            return Err(Reason::DatagramLength { len: total, mtu });
        }
        let addressed = Addressed {
            to: params.gid,
            qp: h.rkey,
            q_key: (h.inv_rkey & OWN_Q_KEY == 0).then_some(h.inv_rkey),
            source: params.source,
            immediate,
            solicited: flags.contains(SendFlags::SOLICITED),
        };
        // No DDP header is sent. For reading the payload the message counts as a Send.
        let opcode = Opcode::send(addressed.solicited, false);
        let invalidate = Stag(0);
        let head = HeaderTemplate::Untagged { opcode, invalidate, qn: qn::SEND, msn: Msn::FIRST };
        Ok((Message { head, source, total, sent: 0, seq: Some(seq) }, addressed))
    }
}
