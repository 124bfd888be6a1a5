//! The memory models as data: which effects may be reordered, and which events are barriers.
//!
//! `docs/memory-order.md` has the same tables with their reasons. The rules are those of RFC 5040
//! (RDMAP), RFC 5041 (DDP) and RFC 7306, of the IBTA specification, volume 1, and of PCI Express,
//! on which posted writes of a device keep their order unless they are relaxed, and reads do not.

use rnic_abi::faults::order::OrderModel;

/// Two effects in an order that a model may permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Inversion {
    /// A part of a Write or Read Response is placed before an earlier part.
    Bytes,
    /// A message is placed before an earlier one.
    Messages,
    /// A Write without a fence is placed before an earlier Read has read its source.
    ReadSource,
    /// A part of the source of a Read is read before an earlier part.
    SourceBytes,
    /// A store of the responder's processor falls between the read and the write of an atomic
    /// operation.
    Store,
    /// The requester completes a Write before it is visible at the responder.
    Completion,
}

/// Event at the end of which earlier data is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Barrier {
    /// A receive, a Read or an atomic operation completes at this end.
    Delivery,
    /// A Read Request of at least one byte, or an Atomic Request, arrives.
    Request,
    /// A Read Request of no bytes arrives.
    EmptyRead,
    /// Bytes arrive that are placed at once under any rule: those of a Send.
    OtherBytes,
}

/// Returns the rule that permits an inversion, or `None` if the model forbids it.
pub(in crate::engine) const fn permission(
    model: OrderModel,
    inversion: Inversion,
) -> Option<&'static str> {
    let [iwarp, rc, relaxed] = PERMISSIONS[inversion as usize];
    match model {
        OrderModel::Iwarp => iwarp,
        OrderModel::Rc => rc,
        OrderModel::RcRelaxed => relaxed,
    }
}

/// Returns true if all data that arrived before the event is visible after it. The end of a
/// stream, a change of the QP and the revocation of an STag are barriers of every model.
pub(in crate::engine) const fn is_barrier(model: OrderModel, barrier: Barrier) -> bool {
    match (model, barrier) {
        (_, Barrier::Delivery | Barrier::Request) => true,
        // A RoCE adapter reads no memory for it, so nothing is written first.
        (OrderModel::Iwarp, Barrier::EmptyRead) => true,
        (OrderModel::Rc | OrderModel::RcRelaxed, Barrier::EmptyRead) => false,
        (OrderModel::Rc, Barrier::OtherBytes) => true,
        (OrderModel::Iwarp | OrderModel::RcRelaxed, Barrier::OtherBytes) => false,
    }
}

/// Rules that permit each [`Inversion`], in its order: of iWARP, RC, and RC with relaxed ordering.
const PERMISSIONS: [[Option<&str>; 3]; 6] = [
    [
        Some("RFC 5041 section 5.3: segments may be placed out of order"),
        None,
        Some("IBV_ACCESS_RELAXED_ORDERING: writes of the NIC reach memory in any order"),
    ],
    [
        Some("RFC 5040 section 5.5: nothing orders the placement of two messages"),
        None,
        Some("IBV_ACCESS_RELAXED_ORDERING: a Write may be placed before an earlier one"),
    ],
    [
        Some(
            "RFC 5040 section 5.5: later Writes may be placed before a Read Response is generated",
        ),
        Some(FENCE),
        Some(FENCE),
    ],
    [
        Some("RFC 5040 section 5.5: a source that changes during a Read is indeterminate"),
        Some(READS),
        Some(READS),
    ],
    [
        Some("RFC 7306 section 5: an RNIC need be atomic only with regard to its own operations"),
        Some(ATOMIC_HCA),
        Some(ATOMIC_HCA),
    ],
    [
        Some("RFC 5040 section 5.5: a local completion does not mean that the peer sees the data"),
        Some(ACKNOWLEDGED),
        Some(ACKNOWLEDGED),
    ],
];

const FENCE: &str = "IBTA volume 1 section 10.8.3.3: an RDMA Read is ordered before later requests \
                     only by a fence";
const READS: &str = "PCI Express, transaction ordering: a read may pass an earlier read";
const ATOMIC_HCA: &str = "IBTA volume 1 section 9.4.5, IBV_ATOMIC_HCA: atomic only with regard to \
                          operations of the same adapter";
const ACKNOWLEDGED: &str = "IBTA volume 1 section 9.5: an acknowledged Write need not be visible \
                            in memory before a later message is delivered";
