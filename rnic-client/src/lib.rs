//! Client library of `rnicd`: RDMA verbs for Rust programs.
//!
//! A [`Context`] is one session with the daemon. It creates protection domains ([`Pd`]), shared
//! memory ([`SharedBuffer`]), memory regions ([`Mr`]), memory windows ([`MemoryWindow`]),
//! completion queues ([`Cq`]), queue pairs ([`Qp`]), shared receive queues ([`Srq`]) and listeners
//! ([`Listener`]). The names follow libibverbs and librdmacm, so their man pages apply. iWARP QPs
//! follow RFC 5040, 5041, 5044 and 6581, so their peer may be any iWARP RNIC.
//!
//! # A complete ping-pong
//!
//! Start `rnicd run`, then this program as `pingpong` in one terminal and
//! `pingpong 127.0.0.1:7471` in another.
//!
//! ```no_run
//! use rnic_client::*;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let peer = std::env::args().nth(1);
//!     let context = Context::open()?;
//!     let pd = context.open_pd(None)?;
//!     let cq = context.create_cq(16, None)?;
//!     let qp = pd.create_qp(&QpOptions::new(&cq))?;
//!
//!     // Buffer for incoming messages. Post the first receive before the peer can send.
//!     let memory = context.create_shared_buffer(4096)?;
//!     let buffer = pd.reg_mr(&memory, .., Access::LOCAL_WRITE)?;
//!     let message = [buffer.sge(0, 64)];
//!     qp.post_recv(&[RecvRequest::new(1, &message)])?;
//!
//!     if let Some(peer) = &peer {
//!         qp.connect(peer, &ConnectOptions::default())?;
//!         qp.post_send(&[SendRequest::send_inline(2, b"ping").signaled()])?;
//!     } else {
//!         let listener = context.listen("127.0.0.1:7471", 1)?;
//!         listener.accept_request(None)?.accept(&qp, &AcceptOptions::default())?;
//!     }
//!
//!     let mut received = 0;
//!     while received < 1000 {
//!         let mut completions = [Completion::default(); 4];
//!         let n = cq.wait(&mut completions, None)?;
//!         for completion in &completions[..n] {
//!             let completion = completion.ok()?;
//!             if completion.opcode == CompletionOpcode::Receive {
//!                 received += 1;
//!                 let mut bytes = vec![0; completion.byte_len as usize];
//!                 buffer.read_at(0, &mut bytes)?;
//!                 // Post the next receive before sending the message back.
//!                 qp.post_recv(&[RecvRequest::new(1, &message)])?;
//!                 if peer.is_none() || received < 1000 {
//!                     qp.post_send(&[SendRequest::send_inline(2, &bytes).signaled()])?;
//!                 }
//!             }
//!         }
//!     }
//!     if peer.is_some() {
//!         qp.disconnect()?;
//!     }
//!     println!("1000 round trips: {:?}", qp.wait_disconnected(None)?);
//!     Ok(())
//! }
//! ```
//!
//! # QP types
//!
//! A context is a session with the daemon, not with one of its devices, so QPs of all types are
//! created from the same PD. The default is [`QpType::Iwarp`]: such a QP connects to an address and
//! port without any exchange outside of RDMA, and its peer may be any iWARP RNIC. Programs of the C
//! libraries see the RoCE device by default, because most of them expect RC QPs of InfiniBand.
//! [`QpType::Rc`], [`QpType::Uc`] and [`QpType::Ud`] are QPs of that device: their completions are
//! acknowledgements, and they have Sends with immediate data. A peer is a GID and a QP number
//! ([`Qp::to_rtr`]), or is found by rdma_cm ([`Qp::start_connect_rc`], [`Qp::resolve`]).
//! [`QpOptions::device`] selects one of several RoCE devices for fault rules and counters.
//!
//! # Performance
//!
//! [`Qp::post_send`], [`Qp::post_recv`] and [`Cq::poll`] use memory shared with the daemon. They
//! take one uncontended lock, do not allocate, and make a system call only to wake a sleeping
//! worker. Post in batches, and request completions only where you need them. [`Cq::wait`] polls
//! for about 50 us before it sleeps. A program that polls in a loop calls [`yield_now`] after some
//! empty polls, because a worker may need the CPU. All other calls that reach the daemon take a few
//! microseconds.
//!
//! # Threads, processes, memory
//!
//! All types of this library are `Send` and `Sync`, and all handles implement `Debug`. Several
//! threads may wait for different objects at once. The library starts no threads except in
//! [`Pd::reg_program_memory`]. An object keeps the objects it was created from alive; dropping its
//! last handle destroys it in the daemon. All descriptors are close-on-exec. After `fork`, only the
//! parent may use its context (see [`Context`]).
//!
//! A peer with rights to a region may write to it at any time, so a `&[u8]` of it would be unsound.
//! [`Mr`] copies bytes in and out, and accesses 8-byte words atomically. Safe slices come from a
//! [`Lease`] on a [`LocalMr`], which no peer can access: a posted request owns the lease until its
//! completion returns it. [`Mr::raw`] gives slices through `unsafe` calls. Programs that do not use
//! it need no `unsafe`.
//!
//! # Errors
//!
//! Calls fail with an [`Error`], and [`Error::fault`] returns the party at fault. A posted request
//! that fails writes a [`Completion`] with an error status. If the daemon refuses a call,
//! [`Error::Refused`] contains the limit or rule.

#![warn(missing_debug_implementations)]

mod access;
mod addresses;
#[cfg(feature = "tokio")]
mod async_requests;
mod channel;
mod completion;
mod connect;
mod context;
mod control;
mod copies;
mod cq;
mod datagram;
mod doorbell;
mod error;
mod events;
mod inbox;
mod lease;
mod listener;
mod local_keys;
mod memory;
mod mr;
mod paths;
mod pd;
mod polling;
mod program;
mod qp;
mod qp_states;
mod rc_connect;
pub mod rdma;
mod receive;
mod request;
mod resolution;
mod rows;
mod session;
mod shared_buffer;
mod socket;
mod srq;
#[cfg(feature = "tokio")]
mod stream;
#[cfg(feature = "tokio")]
mod tasks;
mod trust;
mod window;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

pub use channel::CompletionChannel;
pub use completion::{Completion, Grh};
pub use connect::{ConnectOptions, Connected};
pub use context::{Context, OpenOptions, Page};
pub use cq::{Arm, Cq, CqOptions};
pub use datagram::{DatagramAddress, GRH_LEN, route_of};
pub use error::{AdmissionError, Error, Fault, PostError};
pub use lease::{Lease, LeasedRequest, LocalMr, NotPosted, Posted};
pub use listener::{AcceptOptions, BindOptions, ConnectionRequest, Listener};
pub use mr::{Mr, MrOptions, RemoteAddr, RemoteMr};
pub use pd::Pd;
pub use polling::yield_now;
pub use program::ProgramMr;
pub use qp::{Posting, Qp, QpOptions};
pub use request::{Bind, RecvRequest, SendRequest};
pub use resolution::{ResolveOptions, Resolved};
#[doc(hidden)]
pub use rnic_abi::shm::own::without_signals;
pub use rows::Row;
pub use shared_buffer::SharedBuffer;
pub use socket::{SocketError, SocketListener, SocketRequest};
pub use srq::{Srq, SrqOptions};
#[cfg(feature = "tokio")]
pub use stream::Stream;
pub use window::MemoryWindow;

pub use rnic_abi::abi::control::{
    AsyncObject, CallObject, ClientRow, CqRow, DeviceAttributes, DeviceKind, DeviceRow, Diagnosis,
    DiagnosisKind, DisconnectReason, Event, EventRecord, FaultRow, Features, Function, GidRow,
    LibraryCall, LimitRow, ListKind, ListenerRow, MAX_PRIVATE_DATA, MrRow, NO_GID, PAGE_ROWS,
    PdRow, Profile, QpCounters, QpRow, RcOffer, RcPeer, Refusal, Rows, Sending, SrqRow, StatusInfo,
    WindowRow, Wiring,
};
pub use rnic_abi::abi::queue::{SendOpcode, Sge};
pub use rnic_abi::faults;
pub use rnic_abi::roce::{PortSpace, ServiceId};
pub use rnic_abi::shm::{ProgramRange, RawBytes};
pub use rnic_abi::types::{
    Access, AddressPair, AtomicOperation, ChannelId, CompletionOpcode, CompletionStatus, CqId, Gid,
    ListenerId, MrId, MwId, PdId, QpId, QpState, QpType, RequestId, RnrPolicy, Scope, SessionId,
    SharedBufferId, SrqId, Stag, TerminateCode, TerminateOrigin, WindowKind,
};
