//! The state and counters of a QP that its worker and the control thread share.
//!
//! While a worker owns the QP, only that worker writes the fields, except the context. Readers may
//! see values from different instants.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use rnic_abi::abi::control::QpCounters;
use rnic_abi::types::{QpState, TerminateCode, TerminateOrigin};

/// State and counters of one QP.
#[derive(Default)]
pub struct QpShared {
    /// The application's context, returned in events. Written by the control thread.
    pub context: AtomicU64,
    /// Diagnosis of a QP that entered Error without a connection, or 0. Written by the control
    /// thread before a worker owns the QP.
    pub diagnosis: AtomicU64,
    state: AtomicU8,
    /// 0, or origin (1 local, 2 peer) << 24 | layer << 16 | etype << 8 | code.
    terminate: AtomicU32,
    pub(crate) sends_completed: Counter,
    pub(crate) receives_completed: Counter,
    pub(crate) bytes_sent: Counter,
    pub(crate) bytes_received: Counter,
    pub(crate) segments_sent: Counter,
    pub(crate) segments_received: Counter,
    pub(crate) reads_answered: Counter,
    pub(crate) errors: Counter,
    pub(crate) dropped: Counter,
}

impl QpShared {
    /// Returns the last published state.
    pub fn state(&self) -> QpState {
        QpState::from_u8(self.state.load(Relaxed)).unwrap_or(QpState::Error)
    }

    /// Publishes a state. Called by the control thread before the QP is bound, then by the worker.
    pub fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Relaxed);
    }

    /// Returns the Terminate that ended the connection, if one did.
    pub fn terminate(&self) -> Option<(TerminateOrigin, TerminateCode)> {
        let t = self.terminate.load(Relaxed);
        let [origin, layer, etype, code] = t.to_be_bytes();
        let origin = match origin {
            0 => return None,
            1 => TerminateOrigin::Local,
            _ => TerminateOrigin::Peer,
        };
        Some((origin, TerminateCode { layer, etype, code }))
    }

    pub(crate) fn set_terminate(&self, origin: TerminateOrigin, code: TerminateCode) {
        let o = match origin {
            TerminateOrigin::Local => 1,
            TerminateOrigin::Peer => 2,
        };
        self.terminate.store(o << 24 | terminate_detail(code), Relaxed);
    }

    /// Returns the counters. They are loaded one after another, not as a snapshot.
    pub fn counters(&self) -> QpCounters {
        QpCounters {
            sends_completed: self.sends_completed.value(),
            receives_completed: self.receives_completed.value(),
            bytes_sent: self.bytes_sent.value(),
            bytes_received: self.bytes_received.value(),
            segments_sent: self.segments_sent.value(),
            segments_received: self.segments_received.value(),
            reads_answered: self.reads_answered.value(),
            errors: self.errors.value(),
            dropped: self.dropped.value(),
        }
    }
}

/// Returns a Terminate code in the form of a completion's `detail`.
pub(crate) fn terminate_detail(code: TerminateCode) -> u32 {
    u32::from(code.layer) << 16 | u32::from(code.etype) << 8 | u32::from(code.code)
}

/// A counter with one writer, updated by a load and a store without a locked instruction.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_values_are_read() {
        let qp = QpShared::default();
        assert_eq!((qp.state(), qp.terminate()), (QpState::Idle, None));
        for state in (0..=u8::MAX).map_while(QpState::from_u8) {
            qp.set_state(state);
            assert_eq!(qp.state(), state);
        }
        let code = TerminateCode { layer: 0x12, etype: 0x34, code: 0x56 };
        assert_eq!(terminate_detail(code), 0x12_3456);
        for origin in [TerminateOrigin::Local, TerminateOrigin::Peer] {
            qp.set_terminate(origin, code);
            assert_eq!(qp.terminate(), Some((origin, code)));
        }
        qp.sends_completed.add(3);
        qp.sends_completed.add(4);
        assert_eq!(qp.counters(), QpCounters { sends_completed: 7, ..QpCounters::default() });
    }
}
