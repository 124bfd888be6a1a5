//! Memory order: how a QP places incoming data where the standards leave the order open.

use std::ops::Range;
use std::time::Duration;

use super::name::FaultName;

/// Placement of the incoming data of a QP. Without a rule the order is strict: each segment is
/// placed when it arrives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderRule {
    /// Name of the fault rule, for diagnoses.
    pub fault: FaultName,
    /// Choice among the permitted orders.
    pub order: Order,
    /// The permitted orders.
    pub model: OrderModel,
    /// Messages whose order may change, by their numbers on the QP, from 0. `None` for all. Each
    /// Write, Read Response, Read Request and Atomic Request has a number. All other messages are
    /// placed as without a rule.
    pub inversions: Option<Range<u64>>,
}

/// Choice among the orders that a model permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The last piece of a message is placed first, and its first piece last.
    Worst {
        /// Time for which the first piece is held. At most [`MAX_HOLD`].
        hold: Duration,
    },
    /// Each piece is placed at once or held. The choice depends on the seed, the number of the QP
    /// and the position of the piece in the stream, and never on time.
    Random {
        /// Seed.
        seed: u64,
        /// Maximum time for which a piece is held. At most [`MAX_HOLD`].
        hold: Duration,
    },
}

/// Memory model. `docs/memory-order.md` lists the orders that each model permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderModel {
    /// RFC 5040 section 5.5 and RFC 7306 section 5.
    Iwarp,
    /// An RC QP of a NIC on PCIe, with memory registered without relaxed ordering.
    Rc,
    /// An RC QP of a NIC on PCIe, with all memory registered with `IBV_ACCESS_RELAXED_ORDERING`.
    RcRelaxed,
}

impl Order {
    /// Returns the maximum time for which a piece is held.
    pub fn hold(&self) -> Duration {
        match *self {
            Order::Worst { hold } | Order::Random { hold, .. } => hold.min(MAX_HOLD),
        }
    }
}

impl OrderModel {
    /// All models.
    pub const ALL: [OrderModel; 3] = [OrderModel::Iwarp, OrderModel::Rc, OrderModel::RcRelaxed];

    /// Returns the name in a fault rule.
    pub fn name(self) -> &'static str {
        match self {
            OrderModel::Iwarp => "iwarp",
            OrderModel::Rc => "rc",
            OrderModel::RcRelaxed => "rc-relaxed",
        }
    }
}

/// Maximum time for which a piece is held. It is shorter than any timeout of a peer.
pub const MAX_HOLD: Duration = Duration::from_secs(1);
