//! Messages of the control socket and of the event channels.
//!
//! The socket is `SOCK_SEQPACKET`: one message per packet, at most [`MAX_MESSAGE`] bytes, checked
//! before decoding. The first packets are a [`Hello`] and a [`HelloReply`] of fixed layout. Then
//! the client sends [`Request`]s, and the daemon answers each with a [`Reply`], in order. Requests
//! and replies are encoded in postcard. Connection and asynchronous events arrive on the event
//! channel, whose descriptor comes with the Hello reply, as one postcard [`Event`] per packet.
//! Enums are append-only, and structs never change. Descriptors travel with their message as
//! `SCM_RIGHTS`, in the documented order.

mod call;
mod cm;
mod device;
mod event;
mod hello;
mod listing;
mod profile;
mod qp_attr;
mod refusal;
mod reply;
mod request;

pub use call::{CallObject, Function, LibraryCall};
pub use cm::{RcOffer, RcPeer};
pub use device::{DeviceKind, DeviceRow, NO_GID};
pub use event::{AsyncObject, DisconnectReason, Event};
pub use hello::{Features, HELLO_LEN, HELLO_MAGIC, Hello, HelloReply, HelloStatus};
pub use listing::{
    ClientRow, CqRow, Diagnosis, DiagnosisKind, EventRecord, FaultRow, LimitRow, ListenerRow,
    MrRow, PdRow, QpCounters, QpRow, Rows, SrqRow, StatusInfo, WindowRow,
};
pub use profile::Profile;
pub use qp_attr::{GidRow, QpChange, Sending, Wiring};
pub use refusal::Refusal;
pub use reply::{DeviceAttributes, NewArena, QueueLocation, Reply, ReplyBody};
pub use request::{
    DescriptorKind, DisconnectMode, ListKind, MrRequest, MrSource, ObjectRef, QpRequest, Request,
    RequestBody, RequestInfo, RequestKind, SrqRequest,
};

/// Largest control or event message, in bytes.
pub const MAX_MESSAGE: usize = 8192;
/// Maximum private data of MPA, in bytes (RFC 5044 section 7.1).
pub const MAX_PRIVATE_DATA: usize = 512;
/// Maximum number of rows in a list reply.
pub const PAGE_ROWS: usize = 32;
