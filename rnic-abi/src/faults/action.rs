//! Actions of rules.

use std::time::Duration;

use super::change::Change;
use super::cm_event::{CmEventEffect, CmEventKind};
use super::error::FaultError;
use super::event::AsyncEvent;
use super::link::{LinkShape, link};
use super::message::{self, MessageEffect, MessageKind};
use super::names::{Names, errno, listed, status};
use super::order::{MAX_HOLD, Order, OrderModel};
use super::verb::Verb;
use super::words::{Words, yes};
use crate::types::{CompletionStatus, TerminateCode};
use crate::units::Span;

/// Effect of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Fails a request with this status instead of carrying it out, and moves the QP to ERR.
    Complete {
        /// Status of the completion.
        status: CompletionStatus,
    },
    /// Starts a request later, as if its doorbell were slow. Later requests of the QP wait too.
    DelayRequest {
        /// Delay.
        by: Duration,
    },
    /// Refuses a message of the peer as if it were invalid. Both ends fail as with a real error.
    Refuse {
        /// The error.
        error: RefusedAs,
    },
    /// Ends the stream with a Terminate when a message of the peer arrives.
    Terminate {
        /// Code of the Terminate.
        code: TerminateCode,
    },
    /// Makes a Send of the peer wait for a receive although one is posted.
    Rnr {
        /// Number of RNR NAKs; the peer waits its RNR timer for each.
        times: u32,
    },
    /// Publishes a completion later. Later completions of the QP wait as well.
    HoldCompletion {
        /// Delay.
        by: Duration,
        /// Number of held completions of the QP at which all are published.
        batch: Option<u32>,
        /// Minimum time between two held completions.
        gap: Duration,
    },
    /// Never publishes a completion. No device may do this.
    LoseCompletion,
    /// Sends a completion event later. Until then the CQ raises no other event, so events are
    /// coalesced.
    HoldEvent {
        /// Delay.
        by: Duration,
    },
    /// Never sends a completion event. No device may do this.
    LoseEvent,
    /// Sends a completion event for a completion that raises no event.
    ExtraEvent,
    /// Corrupts the CRC of an outgoing FPDU, over TCP.
    CorruptCrc,
    /// Sends only a part of an outgoing FPDU, over TCP, and then closes the connection.
    CutFpdu {
        /// Close with RST instead of FIN.
        reset: bool,
    },
    /// Stops the QP: it neither sends nor handles incoming messages, but stays connected.
    Stop {
        /// Duration; without it, until the rule is cleared.
        time: Option<Duration>,
    },
    /// Ends the connection of the QP.
    Disconnect,
    /// Moves the QP to ERR with `IBV_EVENT_QP_FATAL`.
    QpFatal,
    /// Refuses a request to the daemon with this error number.
    Fail {
        /// Error number (`errno(3)`).
        errno: u16,
    },
    /// Rejects a connection request: an outgoing one, or an incoming one that the program accepts.
    Reject {
        /// Reason code (IBTA specification, volume 1, section 12.6.7.2).
        reason: u16,
    },
    /// Fails an outgoing connection request as unreachable.
    Unreachable {
        /// Error number (`errno(3)`).
        errno: u16,
        /// Time until the failure.
        by: Duration,
    },
    /// Fails the resolution of an address: `RDMA_CM_EVENT_ADDR_ERROR`.
    AddrError {
        /// Error number (`errno(3)`).
        errno: u16,
        /// Time until the failure.
        by: Duration,
    },
    /// Fails the resolution of a route: `RDMA_CM_EVENT_ROUTE_ERROR`.
    RouteError {
        /// Error number (`errno(3)`).
        errno: u16,
        /// Time until the failure.
        by: Duration,
    },
    /// Sends the reply to a connection request later: the MPA reply, or REP on the RoCE device.
    LateReply {
        /// Delay.
        by: Duration,
    },
    /// Never sends the reply to a connection request.
    NoReply,
    /// Drops, duplicates or delays a message of the connection manager of the RoCE device.
    CmMessage {
        /// Kind of message; `None` for all.
        kind: Option<MessageKind>,
        /// Effect.
        effect: MessageEffect,
    },
    /// Repeats or loses an rdma_cm event.
    CmEvent {
        /// Kind of event; `None` for all.
        kind: Option<CmEventKind>,
        /// Effect.
        effect: CmEventEffect,
    },
    /// Takes the port of the device down: `IBV_EVENT_PORT_ERR`, and its QPs stop.
    PortDown {
        /// Time until the port is active again; without it, until the rule is cleared.
        time: Option<Duration>,
    },
    /// Fails CQs as if they had overrun: `IBV_EVENT_CQ_ERR`, and their QPs move to ERR.
    CqFatal,
    /// Fails SRQs: `IBV_EVENT_SRQ_ERR`, and their QPs move to ERR.
    SrqFatal,
    /// Raises an asynchronous event. Nothing else changes.
    Event {
        /// The event.
        event: AsyncEvent,
    },
    /// Changes a device or its port.
    Change {
        /// The change.
        change: Change,
        /// Time until it is undone; without it, until the rule is cleared.
        time: Option<Duration>,
    },
    /// The device fails: `IBV_EVENT_DEVICE_FATAL`, and its QPs move to ERR.
    DeviceFatal,
    /// Ends the session, as if its program had been killed.
    EndSession,
    /// Shapes the link of the QP's outgoing data, as long as the rule is in force.
    Link(LinkShape),
    /// Chooses the order in which the QP places incoming data, as long as the rule is in force.
    Order {
        /// Choice among the permitted orders.
        order: Order,
        /// The permitted orders; `None` for those of the QP type.
        model: Option<OrderModel>,
        /// Numbers of the messages whose order may change: the first, and the end (exclusive).
        inversions: Option<(u64, u64)>,
    },
}

/// Error with which a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedAs {
    /// No access to the memory: `IBV_WC_REM_ACCESS_ERR` at the peer.
    AccessError,
    /// Invalid request: `IBV_WC_REM_INV_REQ_ERR` at the peer.
    InvalidRequest,
    /// The responder failed: `IBV_WC_REM_OP_ERR` at the peer.
    OperationError,
}

const REFUSALS: Names<RefusedAs> = &[
    ("access-error", RefusedAs::AccessError),
    ("invalid-request", RefusedAs::InvalidRequest),
    ("operation-error", RefusedAs::OperationError),
];

/// Occasion at which a rule is evaluated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The QP begins a request.
    Request,
    /// A message of the peer has arrived.
    Message,
    /// A Send of the peer needs a receive, on an RC QP.
    Receive,
    /// The QP publishes a completion.
    Completion,
    /// A completion of the QP raises an event.
    CompletionEvent,
    /// A completion of the QP raises no event.
    QuietCompletion,
    /// The QP frames an outgoing FPDU, over TCP.
    Fpdu,
    /// The connection manager of the RoCE device sends a message.
    CmMessage,
    /// The daemon handles a request of the program.
    Verb,
    /// The rule is set, or the time `after` of its trigger has passed.
    Once,
    /// No occasion: the rule is a permanent setting of the QP.
    Setting,
}

impl Point {
    /// Returns true if a worker evaluates the rule.
    pub fn is_of_engine(self) -> bool {
        !matches!(self, Point::CmMessage | Point::Verb | Point::Once | Point::Setting)
    }
}

/// Names of the actions, each with the keys of its arguments.
const ACTIONS: &[(&str, &[&str])] = &[
    ("complete", &["status"]),
    ("delay-request", &["by"]),
    ("refuse", &["as"]),
    ("terminate", &["code"]),
    ("rnr", &["times"]),
    ("hold-completion", &["by", "batch", "gap"]),
    ("lose-completion", &[]),
    ("hold-event", &["by"]),
    ("lose-event", &[]),
    ("extra-event", &[]),
    ("corrupt-crc", &[]),
    ("cut-fpdu", &["reset"]),
    ("stop", &["for"]),
    ("disconnect", &[]),
    ("qp-fatal", &[]),
    ("fail", &["errno"]),
    ("reject", &["reason", "data"]),
    ("unreachable", &["errno", "by"]),
    ("addr-error", &["errno", "by"]),
    ("route-error", &["errno", "by"]),
    ("late-reply", &["by"]),
    ("no-reply", &[]),
    ("cm-message", &["type", "effect", "by"]),
    ("cm-event", &["type", "effect"]),
    ("port-down", &["for"]),
    ("cq-fatal", &[]),
    ("srq-fatal", &[]),
    ("event", &["event"]),
    ("gid-change", &["index", "for"]),
    ("pkey-change", &["pkey", "for"]),
    ("speed-change", &["speed", "width", "for"]),
    ("device-removal", &["for"]),
    ("device-fatal", &[]),
    ("end-session", &[]),
    ("link", &["delay", "jitter", "rate", "stall", "loss", "duplicate", "reorder", "truncate"]),
    ("order", &["order", "model", "hold", "inversions"]),
];

impl Action {
    /// Removes the action and its arguments. Returns the action and its name.
    pub(super) fn take(words: &mut Words) -> Result<(Self, &'static str), FaultError> {
        let names = || ACTIONS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let Some(wanted) = words.take("do") else { return Err(FaultError::NoAction(names())) };
        let found = ACTIONS.iter().find(|(name, _)| *name == wanted);
        let &(name, _) = found.ok_or_else(|| FaultError::Value {
            key: "do".to_owned(),
            value: wanted,
            why: format!("needs one of {}", names()),
        })?;
        let missing = |key| FaultError::Missing { action: name, key };
        let action = match name {
            "complete" => {
                let status = words.parse("status", status)?;
                Action::Complete { status: status.ok_or_else(|| missing("status"))? }
            }
            "delay-request" => {
                Action::DelayRequest { by: words.time("by")?.ok_or_else(|| missing("by"))? }
            }
            "refuse" => {
                let error = words.parse("as", |value| listed(REFUSALS, value, ""))?;
                Action::Refuse { error: error.ok_or_else(|| missing("as"))? }
            }
            "terminate" => {
                let code = words.parse("code", terminate_code)?;
                Action::Terminate { code: code.ok_or_else(|| missing("code"))? }
            }
            "rnr" => Action::Rnr { times: words.number("times", 1, MAX_RNR_NAKS)?.unwrap_or(1) },
            "hold-completion" => {
                let gap = words.time("gap")?;
                Action::HoldCompletion {
                    by: words.time("by")?.or(gap).ok_or_else(|| missing("by or gap"))?,
                    batch: words.number("batch", 2, u32::MAX)?,
                    gap: gap.unwrap_or_default(),
                }
            }
            "lose-completion" => Action::LoseCompletion,
            "hold-event" => {
                Action::HoldEvent { by: words.time("by")?.ok_or_else(|| missing("by"))? }
            }
            "lose-event" => Action::LoseEvent,
            "extra-event" => Action::ExtraEvent,
            "corrupt-crc" => Action::CorruptCrc,
            "cut-fpdu" => Action::CutFpdu { reset: words.parse("reset", yes)?.unwrap_or_default() },
            "stop" => Action::Stop { time: words.time("for")? },
            "disconnect" => Action::Disconnect,
            "qp-fatal" => Action::QpFatal,
            "fail" => {
                let errno = words.parse("errno", errno)?;
                Action::Fail { errno: errno.ok_or_else(|| missing("errno"))? }
            }
            "reject" => {
                let reason = words.number("reason", 1, u16::MAX)?.unwrap_or(CONSUMER_REJECT);
                Action::Reject { reason }
            }
            "unreachable" => Action::Unreachable {
                errno: words.parse("errno", errno)?.unwrap_or(TIMED_OUT),
                by: words.time("by")?.unwrap_or_default(),
            },
            "addr-error" => Action::AddrError {
                errno: words.parse("errno", errno)?.unwrap_or(NO_DEVICE),
                by: words.time("by")?.unwrap_or_default(),
            },
            "route-error" => Action::RouteError {
                errno: words.parse("errno", errno)?.unwrap_or(TIMED_OUT),
                by: words.time("by")?.unwrap_or_default(),
            },
            "late-reply" => {
                Action::LateReply { by: words.time("by")?.ok_or_else(|| missing("by"))? }
            }
            "no-reply" => Action::NoReply,
            "cm-message" => Action::CmMessage {
                kind: message::kind(words)?,
                effect: MessageEffect::take(words)?,
            },
            "cm-event" => {
                let (kind, effect) = CmEventEffect::take(words)?;
                Action::CmEvent { kind, effect }
            }
            "port-down" => Action::PortDown { time: words.time("for")? },
            "event" => {
                let event = words.parse("event", AsyncEvent::parse)?;
                Action::Event { event: event.ok_or_else(|| missing("event"))? }
            }
            "cq-fatal" => Action::CqFatal,
            "srq-fatal" => Action::SrqFatal,
            "device-fatal" => Action::DeviceFatal,
            "link" => Action::Link(link(words)?),
            "order" => order(words)?,
            _ => match Change::take(name, words)? {
                Some(change) => Action::Change { change, time: words.time("for")? },
                None => Action::EndSession,
            },
        };
        Ok((action, name))
    }

    /// Returns the occasion of the action, unless the rule has a verb or an opcode.
    pub(super) fn point(self) -> Point {
        match self {
            Action::Complete { .. } | Action::DelayRequest { .. } => Point::Request,
            Action::Refuse { .. } | Action::Terminate { .. } => Point::Message,
            Action::Rnr { .. } => Point::Receive,
            Action::HoldCompletion { .. } | Action::LoseCompletion => Point::Completion,
            Action::HoldEvent { .. } | Action::LoseEvent => Point::CompletionEvent,
            Action::ExtraEvent => Point::QuietCompletion,
            Action::CorruptCrc | Action::CutFpdu { .. } => Point::Fpdu,
            Action::Fail { .. }
            | Action::Reject { .. }
            | Action::Unreachable { .. }
            | Action::AddrError { .. }
            | Action::RouteError { .. }
            | Action::LateReply { .. }
            | Action::NoReply
            | Action::CmEvent { .. } => Point::Verb,
            Action::CmMessage { .. } => Point::CmMessage,
            Action::Stop { .. }
            | Action::Disconnect
            | Action::QpFatal
            | Action::PortDown { .. }
            | Action::CqFatal
            | Action::SrqFatal
            | Action::Change { .. }
            | Action::Event { .. }
            | Action::DeviceFatal
            | Action::EndSession => Point::Once,
            Action::Link(_) | Action::Order { .. } => Point::Setting,
        }
    }

    /// Returns the verbs with which a rule may combine the action; empty for all verbs. The first
    /// verb applies to a rule without a verb.
    pub(super) fn verbs(self) -> &'static [Verb] {
        match self {
            Action::Reject { .. } => &[Verb::CONNECT, Verb::ACCEPT],
            Action::Unreachable { .. } => &[Verb::CONNECT],
            Action::LateReply { .. } | Action::NoReply => &[Verb::ACCEPT],
            Action::AddrError { .. } => &[Verb::RESOLVE_ADDR],
            Action::RouteError { .. } => &[Verb::RESOLVE_ROUTE],
            Action::CmEvent { .. } => &[Verb::CM_EVENT],
            _ => &[],
        }
    }

    /// Returns true if the action holds back the reply to a connection request.
    pub fn holds_reply(self) -> bool {
        matches!(self, Action::LateReply { .. } | Action::NoReply)
    }
}

/// Removes the arguments of `order`. Returns the action.
fn order(words: &mut Words) -> Result<Action, FaultError> {
    let model = words.parse("model", |value| {
        let found = OrderModel::ALL.into_iter().find(|model| model.name() == value);
        found.ok_or_else(|| "needs one of iwarp, rc, rc-relaxed".to_owned())
    })?;
    let hold = words.parse("hold", |value| match Span::parse(value)?.0 {
        hold if hold <= MAX_HOLD => Ok(hold),
        _ => Err(format!("is longer than {} s", MAX_HOLD.as_secs())),
    })?;
    let hold = hold.unwrap_or(HOLD);
    let seed = words.number("seed", 0, u64::MAX)?;
    let order = words.parse("order", |value| match (value, seed) {
        ("worst", None) => Ok(Order::Worst { hold }),
        ("worst", Some(_)) => Err("cannot be combined with seed".to_owned()),
        ("random", seed) => Ok(Order::Random { seed: seed.unwrap_or_default(), hold }),
        _ => Err("needs worst or random".to_owned()),
    })?;
    Ok(Action::Order {
        order: order.ok_or(FaultError::Missing { action: "order", key: "order" })?,
        model,
        inversions: words.parse("inversions", |value| {
            let range = value
                .split_once("..")
                .and_then(|(from, to)| Some((from.parse::<u64>().ok()?, to.parse::<u64>().ok()?)));
            range.ok_or_else(|| "needs FROM..TO, two whole numbers (TO is excluded)".to_owned())
        })?,
    })
}

/// Time for which the first piece of a message is held, unless the rule states another.
const HOLD: Duration = Duration::from_millis(1);

/// Returns the keys of an action, for error texts.
pub(super) fn keys_of(action: &str) -> &'static [&'static str] {
    ACTIONS.iter().find(|(name, _)| *name == action).map_or(&[], |(_, keys)| keys)
}

/// Parses `L/E/CC` in hexadecimal, as `rnicctl why` shows it.
fn terminate_code(text: &str) -> Result<TerminateCode, String> {
    let mut parts = text.split('/').map(|part| u8::from_str_radix(part, 16).ok());
    let mut next = |most| parts.next().flatten().filter(|part| *part <= most);
    match (next(2), next(15), next(u8::MAX), parts.next()) {
        (Some(layer), Some(etype), Some(code), None) => Ok(TerminateCode { layer, etype, code }),
        _ => {
            Err("needs LAYER/TYPE/CODE in hexadecimal, as in 1/2/02 (RFC 5040 section 4.8)".into())
        }
    }
}

/// `ENODEV`: the kernel finds no device with the source address.
const NO_DEVICE: u16 = 19;
/// `ETIMEDOUT`.
const TIMED_OUT: u16 = 110;
/// Rejected by the program: IBTA specification, volume 1, section 12.6.7.2, code 28.
const CONSUMER_REJECT: u16 = 28;
/// Maximum number of RNR NAKs of one rule.
const MAX_RNR_NAKS: u32 = 1_000_000;
