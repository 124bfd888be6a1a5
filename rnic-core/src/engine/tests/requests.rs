//! Builders for requests and regions, and text forms of results for comparisons.

use std::ops::Range;
use std::sync::Arc;

use crate::device::window::{BindRequest, WindowCount};
use rnic_abi::abi::control::{DisconnectReason, Event};
use rnic_abi::abi::queue::{
    CompletionFlags, Cqe, SendFlags, SendHeader, SendOpcode, Sge, WindowParams,
};
use rnic_abi::shm::Mapping;
use rnic_abi::types::{
    AtomicOperation, CompletionOpcode, CompletionStatus, Stag, TerminateCode, TerminateOrigin,
};

/// A memory region of a test.
#[derive(Clone)]
pub(super) struct Mr {
    pub stag: Stag,
    pub iova: u64,
    pub len: usize,
    pub mapping: Arc<Mapping>,
    pub windows: Arc<WindowCount>,
}

impl Mr {
    /// Returns an SGE for this range of the region.
    pub fn sge(&self, range: Range<usize>) -> Sge {
        Sge {
            addr: self.iova + range.start as u64,
            length: (range.end - range.start) as u32,
            lkey: self.stag.0,
        }
    }

    pub fn all(&self) -> Sge {
        self.sge(0..self.len)
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.mapping.read(0, &mut bytes).unwrap();
        bytes
    }

    pub fn set(&self, bytes: &[u8]) {
        self.mapping.write(0, bytes).unwrap();
    }

    pub fn fill(&self, byte: u8) {
        self.mapping.fill(0, self.len, byte).unwrap();
    }

    /// Fills the region with a pattern that depends on the seed, and returns it.
    pub fn pattern(&self, seed: u8) -> Vec<u8> {
        let bytes = pattern(self.len, seed);
        self.set(&bytes);
        bytes
    }
}

pub(super) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(2654435761).to_be_bytes()[1] ^ seed).collect()
}

/// A send request.
#[derive(Clone, Debug)]
pub(super) struct Wr {
    pub header: SendHeader,
    pub sges: Vec<Sge>,
    pub inline: Vec<u8>,
}

impl Wr {
    pub fn new(opcode: SendOpcode, wr_id: u64, sges: &[Sge]) -> Self {
        Wr {
            header: SendHeader {
                opcode: opcode as u8,
                num_sge: 0,
                flags: SendFlags::SIGNALED.bits(),
                inline_len: 0,
                wr_id,
                remote_addr: 0,
                rkey: 0,
                inv_rkey: 0,
                params: [0; 4],
                reserved_is_zero: true,
            },
            sges: sges.to_vec(),
            inline: Vec::new(),
        }
    }

    pub fn send(wr_id: u64, sges: &[Sge]) -> Self {
        Wr::new(SendOpcode::Send, wr_id, sges)
    }

    pub fn send_invalidate(wr_id: u64, sges: &[Sge], stag: Stag) -> Self {
        let mut wr = Wr::new(SendOpcode::SendInvalidate, wr_id, sges);
        wr.header.inv_rkey = stag.0;
        wr
    }

    pub fn write(wr_id: u64, sges: &[Sge], to: &Mr, at: u64) -> Self {
        Wr::new(SendOpcode::Write, wr_id, sges).remote(to.stag, to.iova.wrapping_add(at))
    }

    pub fn read(wr_id: u64, sink: Sge, from: &Mr, at: u64) -> Self {
        Wr::new(SendOpcode::Read, wr_id, &[sink]).remote(from.stag, from.iova.wrapping_add(at))
    }

    pub fn read_invalidate(wr_id: u64, sink: Sge, from: &Mr, at: u64) -> Self {
        let mut wr = Wr::read(wr_id, sink, from, at);
        wr.header.opcode = SendOpcode::ReadInvalidate as u8;
        wr
    }

    pub fn atomic(wr_id: u64, operation: AtomicOperation, sink: Sge, to: &Mr, at: u64) -> Self {
        let (opcode, params) = SendOpcode::of_operation(operation);
        let mut wr = Wr::new(opcode, wr_id, &[sink]);
        wr.header.params = params;
        wr.remote(to.stag, to.iova.wrapping_add(at))
    }

    pub fn fetch_add(wr_id: u64, add: u64, sink: Sge, to: &Mr, at: u64) -> Self {
        Wr::atomic(wr_id, AtomicOperation::FetchAdd { add, boundaries: 0 }, sink, to, at)
    }

    pub fn compare_swap(wr_id: u64, compare: u64, swap: u64, sink: Sge, to: &Mr, at: u64) -> Self {
        let swap_mask = u64::MAX;
        let compare_mask = u64::MAX;
        let operation = AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask };
        Wr::atomic(wr_id, operation, sink, to, at)
    }

    pub fn local_invalidate(wr_id: u64, stag: Stag) -> Self {
        let mut wr = Wr::new(SendOpcode::LocalInvalidate, wr_id, &[]);
        wr.header.inv_rkey = stag.0;
        wr
    }

    pub fn bind(wr_id: u64, request: &BindRequest) -> Self {
        let mut wr = Wr::new(SendOpcode::BindWindow, wr_id, &[]);
        wr.header.rkey = request.window.0;
        wr.header.inv_rkey = request.new.0;
        let BindRequest { address, length, lkey, access, .. } = *request;
        wr.header.params = WindowParams { address, length, lkey, access }.to_params();
        wr
    }

    /// Adds Immediate Data to a Write.
    pub fn immediate(mut self, data: u64) -> Self {
        self.header.opcode = SendOpcode::WriteImmediate as u8;
        self.header.params[0] = data;
        self
    }

    pub fn remote(mut self, stag: Stag, to: u64) -> Self {
        self.header.rkey = stag.0;
        self.header.remote_addr = to;
        self
    }

    pub fn with(mut self, flags: SendFlags) -> Self {
        self.header.flags |= flags.bits();
        self
    }

    pub fn unsignaled(mut self) -> Self {
        self.header.flags &= !SendFlags::SIGNALED.bits();
        self
    }

    pub fn inline(mut self, bytes: &[u8]) -> Self {
        self.inline = bytes.to_vec();
        self.sges.clear();
        self.with(SendFlags::INLINE)
    }
}

/// Formats a completion: request, operation, status unless it is success, and the other fields.
pub(super) fn completion(cqe: &Cqe) -> String {
    let mut s = format!("{}", cqe.wr_id);
    match CompletionOpcode::from_u8(cqe.opcode) {
        Some(o) => s += &format!(" {o:?}"),
        None => s += &format!(" opcode {}", cqe.opcode),
    }
    match CompletionStatus::from_u8(cqe.status) {
        Some(CompletionStatus::Success) => {}
        Some(st) => s += &format!(" {st:?}"),
        None => s += &format!(" status {}", cqe.status),
    }
    if cqe.byte_len != 0 {
        s += &format!(" {}", cqe.byte_len);
    }
    let flags = CompletionFlags::from_bits_retain(cqe.flags);
    if flags.contains(CompletionFlags::SOLICITED) {
        s += " solicited";
    }
    if flags.contains(CompletionFlags::WITH_INV) {
        s += &format!(" invalidated {:#x}", cqe.imm_or_inv);
    }
    if flags.contains(CompletionFlags::WITH_IMM) {
        s += &format!(" immediate {:#x}", cqe.imm_or_inv);
    }
    if flags.contains(CompletionFlags::GRH) {
        s += &format!(" from {}", cqe.src_qp);
    }
    if cqe.detail != 0 {
        let d = cqe.detail;
        s += &format!(" {:x}/{:x}/{:02x}", d >> 16, d >> 8 & 0xFF, d & 0xFF);
    }
    s
}

/// Formats an event.
pub(super) fn event(event: &Event) -> String {
    match event {
        Event::Established { ird, ord, .. } => format!("established {ird}/{ord}"),
        Event::Disconnected { reason, .. } => match reason {
            DisconnectReason::Orderly => "disconnected".to_owned(),
            DisconnectReason::Aborted => "aborted".to_owned(),
            DisconnectReason::Lost { why } => format!("lost: {why}"),
            DisconnectReason::Terminate { origin, code, headers } => {
                terminated(*origin, *code, headers)
            }
        },
        Event::PeerClosed { .. } => "peer closed".to_owned(),
        Event::PeerClosing { .. } => "peer closing".to_owned(),
        Event::CqError { .. } => "CQ error".to_owned(),
        Event::QpFatal { reason, .. } => format!("fatal: {reason}"),
        Event::Unreachable { reason, .. } => format!("unreachable: {reason}"),
        Event::SrqLimit { .. } => "SRQ limit".to_owned(),
        Event::SrqError { .. } => "SRQ error".to_owned(),
        Event::SrqUnfair { qp, taken, of_last, .. } => format!("QP {qp} took {taken}/{of_last}"),
        Event::DatagramLost { qp, reason, .. } => format!("QP {qp}: {reason}"),
        Event::LastWqeReached { qp, .. } => format!("last receive of QP {qp}"),
        other => format!("{other:?}"),
    }
}

fn terminated(origin: TerminateOrigin, code: TerminateCode, headers: &[u8]) -> String {
    let code = code.number();
    let mut s = match origin {
        TerminateOrigin::Local => format!("terminated {code}"),
        TerminateOrigin::Peer => format!("terminated by peer {code}"),
    };
    if !headers.is_empty() {
        s += " ";
        s.extend(headers.iter().map(|b| format!("{b:02x}")));
    }
    s
}
