//! RDMA for programs: the verbs-shaped library that speaks to an RNIC of `rnicd`.
//!
//! A [`Context`] is one session with the daemon. It makes protection domains ([`Pd`]), shared
//! memory ([`SharedBuffer`]), regions of it ([`Mr`]) and windows on them ([`MemoryWindow`]),
//! completion queues ([`Cq`]), queue pairs ([`Qp`]) and shared receive queues ([`Srq`]), and it
//! binds addresses ([`Listener`]). The names are those of verbs and of `rdma_cm`, so that their man
//! pages apply; on the wire it is iWARP (RFC 5040, 5041, 5044, 6581), and a peer may be any RNIC
//! that speaks it.
//!
//! # A complete ping-pong
//!
//! Start `rnicd run`, then this program as `pingpong` in one terminal and `pingpong
//! 127.0.0.1:7471` in another.
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
//!     // Memory that messages arrive in. The first receive is posted before the peer can send.
//!     let memory = context.create_shared_buffer(4096)?;
//!     let buffer = pd.reg_mr(&memory, .., Access::LOCAL_WRITE)?;
//!     let ball = [buffer.sge(0, 64)];
//!     qp.post_recv(&[RecvRequest::new(1, &ball)])?;
//!
//!     if let Some(peer) = &peer {
//!         qp.connect(peer, &ConnectOptions::default())?;
//!         qp.post_send(&[SendRequest::send_inline(2, b"ball").signaled()])?;
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
//!                 // Room for the next one first, then back with it.
//!                 qp.post_recv(&[RecvRequest::new(1, &ball)])?;
//!                 if peer.is_none() || received < 1000 {
//!                     qp.post_send(&[SendRequest::send_inline(2, &bytes).signaled()])?;
//!                 }
//!             }
//!         }
//!     }
//!     if peer.is_some() {
//!         qp.disconnect()?;
//!     }
//!     println!("1000 times there and back: {:?}", qp.wait_disconnected(None)?);
//!     Ok(())
//! }
//! ```
//!
//! # What costs what
//!
//! [`Qp::post_send`], [`Qp::post_recv`] and [`Cq::poll`] work on memory shared with the daemon: one
//! uncontended lock, no allocation, and a system call only to wake a worker that sleeps. Post in
//! batches and ask for completions only where they are needed. [`Cq::wait`] looks for some 50 us
//! before it sleeps. Everything else is a request to the daemon and takes some microseconds.
//!
//! # Threads, processes, memory
//!
//! Every type of this library is `Send` and `Sync`, and every handle has `Debug`; several threads
//! may wait for different things at once. There is no thread in the background. Objects keep what
//! they were made with alive and are destroyed in the daemon when dropped. All descriptors are
//! close-on-exec; after `fork` only the parent may use its context (see [`Context`]).
//!
//! A peer with rights to a region writes into it whenever it likes, so a `&[u8]` of it would be
//! unsound: [`Mr`] copies in and out and has atomic words instead. Slices without `unsafe` are
//! those of a [`Lease`] on a [`LocalMr`], which no peer reaches and which a posted request takes
//! along until its completion gives it back; [`Mr::raw`] has `unsafe` ones. Programs need no
//! `unsafe`.
//!
//! # Errors
//!
//! Calls fail with an [`Error`], sorted by whose fault it is; requests that were posted fail with a
//! [`Completion`] whose status is not success. The daemon names every limit and rule by which it
//! refuses something ([`Error::Refused`]).

#![warn(missing_debug_implementations)]

mod access;
mod addresses;
mod adopt;
mod attached;
#[cfg(feature = "tokio")]
mod awaited;
mod channel;
mod completion;
mod connect;
mod context;
mod control;
mod copies;
mod cq;
mod datagram;
mod error;
mod events;
mod inbox;
mod lease;
mod listener;
mod memory;
mod mr;
mod paths;
mod pd;
mod program;
mod qp;
mod receive;
mod request;
mod resolution;
mod session;
mod shared_buffer;
mod srq;
#[cfg(feature = "tokio")]
mod stream;
#[cfg(feature = "tokio")]
mod tasks;
mod trust;
mod window;
mod wired;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

pub use adopt::{SocketError, SocketListener, SocketRequest};
pub use attached::AttachedBuffer;
pub use channel::CompletionChannel;
pub use completion::{Completion, Grh};
pub use connect::{ConnectOptions, Connected};
pub use context::{Context, OpenOptions, Page};
pub use cq::{Arm, Cq, CqOptions};
pub use datagram::{DatagramAddress, GRH_LEN, route_of};
pub use error::{Admission, Error, Fault, PostError};
pub use lease::{Lease, LeasedRequest, LocalMr, NotPosted, Posted};
pub use listener::{AcceptOptions, BindOptions, ConnectionRequest, Listener};
pub use mr::{Mr, MrOptions, RemoteAddr, RemoteMr};
pub use pd::Pd;
pub use program::ProgramMr;
pub use qp::{Posting, Qp, QpOptions};
pub use request::{RecvRequest, SendRequest};
pub use resolution::{ResolveOptions, Resolved};
#[doc(hidden)]
pub use rnic_core::shm::own::without_signals;
pub use shared_buffer::SharedBuffer;
pub use srq::{Srq, SrqOptions};
#[cfg(feature = "tokio")]
pub use stream::Stream;
pub use window::{Bind, MemoryWindow};

pub use rnic_core::abi::control::{
    ClientRow, CqRow, DeviceAttributes, Diagnosis, DiagnosisKind, DisconnectReason, Event,
    EventRecord, Features, GidRow, LimitRow, ListKind, ListenerRow, MAX_PRIVATE_DATA, MrRow,
    PAGE_ROWS, PdRow, QpCounters, QpRow, Refusal, Rows, Sending, SrqRow, StatusInfo, WindowRow,
    Wiring,
};
pub use rnic_core::abi::queue::Sge;
pub use rnic_core::shm::{ProgramRange, RawBytes};
pub use rnic_core::types::{
    Access, AddressPair, AtomicOperation, ChannelId, CompletionOpcode, CompletionStatus, CqId, Gid,
    ListenerId, MrId, MwId, PdId, QpId, QpState, QpType, RequestId, RnrPolicy, Scope, SessionId,
    SharedBufferId, SrqId, Stag, TerminateCode, TerminateOrigin, WindowKind,
};
