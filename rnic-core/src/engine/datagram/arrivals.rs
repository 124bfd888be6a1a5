//! What a queue pair keeps of datagrams that have come.

use bitflags::bitflags;

use crate::abi::queue::Cqe;
use crate::device::copier::CopyResult;
use crate::types::SessionId;

bitflags! {
    /// Why a datagram was dropped.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) struct Drops: u8 {
        /// It has another Q_Key.
        const Q_KEY = 1;
        /// No receive is posted.
        const NO_RECEIVE = 2;
        /// It does not fit the receive.
        const TOO_LONG = 4;
        /// The rules do not let the owner receive at that address.
        const FORBIDDEN = 8;
        /// A copier has enough to write already.
        const COPIER = 16;
    }
}

/// A datagram that a copier is writing.
pub(super) struct Placing {
    /// Number of the copy; none if it was written at once, behind others.
    pub job: Option<u64>,
    /// Whose memory it is.
    pub owner: SessionId,
    /// Whether it has been written, and how it went.
    pub written: Option<CopyResult>,
    /// The completion, if it goes well.
    pub cqe: Cqe,
    /// Bytes of its data.
    pub len: usize,
}
