//! Events and completions of a queue pair.

use std::sync::atomic::Ordering;

use rnic_client::{Completion, CompletionOpcode, CompletionStatus, CqId, Grh, SrqId};

use super::QpBody;
use super::numbers::Posted;
use crate::c;
use crate::verbs::registry::{AnyQp, AnySrq as _};

impl AnyQp for QpBody {
    fn push_event(&self, kind: c::ibv_event_type) {
        self.events.push(kind);
    }

    fn drained(&self) {
        self.draining.store(false, Ordering::Release);
        if self.notify_when_drained.load(Ordering::Acquire) {
            self.push_event(c::IBV_EVENT_SQ_DRAINED);
        }
    }

    fn uses_cq(&self, cq: CqId) -> bool {
        [&self.send_cq, &self.recv_cq].iter().any(|used| used.client().id() == cq)
    }

    fn uses_srq(&self, srq: SrqId) -> bool {
        self.srq.as_ref().is_some_and(|used| used.id() == srq)
    }

    fn complete(&self, completion: &Completion) -> c::ibv_wc {
        self.await_established(completion);
        self.completion_in_c(completion)
    }
}

impl QpBody {
    /// Converts a completion, with the program's `wr_id`.
    fn completion_in_c(&self, completion: &Completion) -> c::ibv_wc {
        let succeeded = completion.status == CompletionStatus::Success;
        let (wr_id, byte_len) = match completion.opcode {
            CompletionOpcode::Receive => (self.receive_done(completion), completion.byte_len),
            _ => {
                let posted = self.send_done(completion);
                // As in rxe and siw: the length of the request, also for Sends and Writes.
                (posted.wr_id, if succeeded { posted.length } else { completion.byte_len })
            }
        };
        let mut wc = c::ibv_wc {
            wr_id,
            status: u32::from(completion.status as u8),
            opcode: u32::from(completion.opcode as u8),
            byte_len,
            qp_num: self.id().0,
            src_qp: completion.src_qp.0,
            ..c::ibv_wc::default()
        };
        if let Some(stag) = completion.invalidated {
            wc.imm_data = stag.0;
            wc.wc_flags |= c::IBV_WC_WITH_INV;
        }
        if let Some([a, b, c, d, ..]) = completion.immediate {
            // In network byte order, as received.
            wc.imm_data = u32::from_ne_bytes([a, b, c, d]);
            wc.wc_flags |= c::IBV_WC_WITH_IMM;
            if !completion.immediate_with_send {
                wc.opcode = c::IBV_WC_RECV_RDMA_WITH_IMM;
            }
        }
        if completion.opcode == CompletionOpcode::Receive && self.is_roce() {
            // On Ethernet, every packet has a GRH. Programs compare `wc_flags` as a whole.
            wc.wc_flags |= c::IBV_WC_GRH;
        }
        if let Some(grh) = completion.grh {
            // Mellanox adapters encode the header type here, and UCX reads it: UDP (8) over IPv6
            // (1) or IPv4 (2).
            wc.sl = match grh {
                Grh::Ipv6 => 8 | 1,
                Grh::Ipv4 => 8 | 2,
            };
        }
        if !succeeded {
            // Number for `rnicctl why`. Numbers start at 1 when the daemon starts.
            wc.vendor_err = completion.diagnosis_id as u32;
        }
        wc
    }

    /// Waits until the program can read the ESTABLISHED event of the connection. Called before the
    /// first completion is returned. A flushed request may never have had a connection.
    #[inline]
    fn await_established(&self, completion: &Completion) {
        if !self.established.load(Ordering::Relaxed)
            && completion.status != CompletionStatus::WrFlush
        {
            if let Some(connections) = self.device.connections() {
                connections.await_established(self.id());
            }
            self.established.store(true, Ordering::Relaxed);
        }
    }

    /// Returns the completed send request, and frees it and all requests before it.
    fn send_done(&self, completion: &Completion) -> Posted {
        let mut sends = self.sends.lock();
        sends.settle_binds(completion.wr_id, completion.status == CompletionStatus::Success);
        sends.done(completion.wr_id)
    }

    /// Returns the `wr_id` of a completed receive.
    fn receive_done(&self, completion: &Completion) -> u64 {
        match (&self.srq, completion.srq) {
            (Some(srq), Some(_)) => srq.receive_done(completion),
            _ => self.receives.lock().done(completion.wr_id).wr_id,
        }
    }
}
