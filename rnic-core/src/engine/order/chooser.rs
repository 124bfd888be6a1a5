//! Decides whether a piece is placed at once or held, and for how long.
//!
//! The choice depends on the rule, the number of the QP and the position of the piece in the
//! stream. Time only determines which pieces are still held when another arrives.

use std::time::Duration;

use rnic_abi::faults::order::Order;

/// Position of a piece in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Position {
    First,
    Middle,
    Last,
    /// The message has one piece.
    Only,
}

/// Identity of a piece.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceId {
    /// Number of the QP.
    pub stream: u64,
    /// Number of the message on the QP.
    pub message: u64,
    /// Offset of the piece in the message.
    pub offset: u64,
}

/// Returns the time for which a piece is held, or `None` if it is placed at once. `others` is true
/// if earlier pieces are held.
pub(super) fn hold_time(
    order: &Order,
    id: PieceId,
    position: Position,
    others: bool,
) -> Option<Duration> {
    let hold = order.hold();
    match *order {
        Order::Worst { .. } => match position {
            Position::Last => None,
            Position::Only if others => None,
            Position::First | Position::Only => Some(hold),
            Position::Middle => Some(hold / 2),
        },
        Order::Random { seed, .. } => {
            let random = mix(seed, id);
            let eighths = u32::try_from(random >> 1 & 7).unwrap_or(0) + 1;
            (random & 1 == 0).then_some(hold * eighths / 8)
        }
    }
}

/// Returns the rank of a held piece: of the pieces released together, the lowest is placed first.
/// `arrival` numbers the pieces in the order of their arrival.
pub(super) fn rank(order: &Order, id: PieceId, arrival: u64) -> u64 {
    match *order {
        Order::Worst { .. } => u64::MAX - arrival,
        Order::Random { seed, .. } => mix(!seed, id),
    }
}

/// Returns true if a request of the peer is carried out later than it could be.
pub(super) fn delays(order: &Order, id: PieceId) -> bool {
    hold_time(order, id, Position::Only, false).is_some()
}

/// Returns 64 bits that depend on each bit of the arguments (the finaliser of SplitMix64).
fn mix(seed: u64, id: PieceId) -> u64 {
    [id.stream, id.message, id.offset].into_iter().fold(seed, |state, word| {
        let mut x = (state ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    })
}
