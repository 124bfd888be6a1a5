//! Messages of the control socket and of the event channels.
//!
//! The socket is `SOCK_SEQPACKET`: one message per packet, at most [`MAX_MESSAGE`] bytes, checked
//! before decoding. The first packet each way is a [`Hello`] / [`HelloReply`] of fixed layout; then
//! the client sends [`Request`]s and gets one [`Reply`] each, in order, both in postcard.
//! Connection and asynchronous events travel on the event channel whose descriptor came with the
//! Hello reply, one postcard [`Event`] per packet. Enums are append-only and structs never change.
//! Descriptors that belong to a message travel with it as `SCM_RIGHTS`, in the order named here.

mod event;
mod hello;
mod listing;
mod refusal;
mod reply;
mod request;
mod wired;

pub use event::{DisconnectReason, Event};
pub use hello::{Features, HELLO_LEN, HELLO_MAGIC, Hello, HelloReply, HelloStatus};
pub use listing::{
    ClientRow, CqRow, Diagnosis, DiagnosisKind, EventRecord, LimitRow, ListenerRow, MrRow, PdRow,
    QpCounters, QpRow, Rows, SrqRow, StatusInfo, WindowRow,
};
pub use refusal::Refusal;
pub use reply::{DeviceAttributes, NewArena, QueueLocation, Reply, ReplyBody};
pub use request::{
    DisconnectMode, ListKind, MrRequest, MrSource, ObjectRef, QpRequest, Request, RequestBody,
    SrqRequest,
};
pub use wired::{GidRow, QpChange, Sending, Wiring};

/// Largest control or event message, in bytes.
pub const MAX_MESSAGE: usize = 8192;
/// Most private data MPA carries, in bytes (RFC 5044 section 7.1).
pub const MAX_PRIVATE_DATA: usize = 512;
/// Rows per page of a list reply.
pub const PAGE_ROWS: usize = 32;
