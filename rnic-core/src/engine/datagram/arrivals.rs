//! State that a UD QP keeps for received datagrams.

use bitflags::bitflags;

use crate::device::copier::CopyResult;
use rnic_abi::abi::queue::Cqe;
use rnic_abi::types::SessionId;

bitflags! {
    /// Reasons for which a datagram is lost.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Drops: u8 {
        /// Its Q_Key is not that of the QP.
        const Q_KEY = 1;
        /// No receive is posted.
        const NO_RECEIVE = 2;
        /// It does not fit in the receive.
        const TOO_LONG = 4;
        /// The `[[listen]]` rules do not permit the user to receive at that address.
        const FORBIDDEN = 8;
        /// Too many copies to memory of the receive's session are in progress.
        const COPIER = 16;
        /// This daemon has no QP for a datagram of this QP.
        const NO_QP = 32;
    }
}

/// A received datagram that waits for a copier, or follows such a datagram.
pub(super) struct PendingDatagram {
    /// Number of the copy. `None` if the bytes were written at once but earlier datagrams still
    /// wait.
    pub job: Option<u64>,
    /// Session that owns the memory.
    pub owner: SessionId,
    /// Result of the copy, once it is known.
    pub written: Option<CopyResult>,
    /// Completion for a successful copy.
    pub cqe: Cqe,
    /// Bytes of data.
    pub len: usize,
}
