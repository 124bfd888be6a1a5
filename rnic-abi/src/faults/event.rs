//! Asynchronous events that rules raise.

use super::names::{Names, listed};

/// Asynchronous event, with the number of `ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent(u32);

impl AsyncEvent {
    /// `IBV_EVENT_QP_FATAL`.
    pub const QP_FATAL: AsyncEvent = AsyncEvent(1);
    /// `IBV_EVENT_DEVICE_FATAL`.
    pub const DEVICE_FATAL: AsyncEvent = AsyncEvent(8);
    /// `IBV_EVENT_PORT_ACTIVE`.
    pub const PORT_ACTIVE: AsyncEvent = AsyncEvent(9);
    /// `IBV_EVENT_PORT_ERR`.
    pub const PORT_ERR: AsyncEvent = AsyncEvent(10);
    /// `IBV_EVENT_PKEY_CHANGE`.
    pub const PKEY_CHANGE: AsyncEvent = AsyncEvent(12);
    /// `IBV_EVENT_GID_CHANGE`.
    pub const GID_CHANGE: AsyncEvent = AsyncEvent(18);

    /// Returns the number in verbs.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Returns the name, `IBV_EVENT_PORT_ERR` without `IBV_EVENT_`.
    pub fn name(self) -> String {
        let found = EVENTS.iter().find(|(_, number)| *number == self.0);
        found.map_or_else(String::new, |(name, _)| name.to_uppercase().replace('-', "_"))
    }

    /// Returns the kind of object that the event concerns.
    pub fn element(self) -> Element {
        match self.0 {
            0 => Element::Cq,
            1..=7 | 16 => Element::Qp,
            14 | 15 => Element::Srq,
            8 => Element::Device,
            _ => Element::Port,
        }
    }

    pub(super) fn parse(text: &str) -> Result<Self, String> {
        listed(EVENTS, text, "ibv-event-").map(AsyncEvent)
    }
}

/// Kind of object that an asynchronous event concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Completion queues.
    Cq,
    /// Queue pairs.
    Qp,
    /// Shared receive queues.
    Srq,
    /// Ports.
    Port,
    /// Devices.
    Device,
}

const EVENTS: Names<u32> = &[
    ("cq-err", 0),
    ("qp-fatal", 1),
    ("qp-req-err", 2),
    ("qp-access-err", 3),
    ("comm-est", 4),
    ("sq-drained", 5),
    ("path-mig", 6),
    ("path-mig-err", 7),
    ("device-fatal", 8),
    ("port-active", 9),
    ("port-err", 10),
    ("lid-change", 11),
    ("pkey-change", 12),
    ("sm-change", 13),
    ("srq-err", 14),
    ("srq-limit-reached", 15),
    ("qp-last-wqe-reached", 16),
    ("client-reregister", 17),
    ("gid-change", 18),
];
