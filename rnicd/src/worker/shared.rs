//! Options, reports and state that a worker and the control thread share.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use mio::Waker;
use rnic_abi::shm::parker::Parker;
use rnic_abi::shm::wait::WaitPolicy;
use rnic_core::engine::{Broadcast, EngineOptions, Notification};

use super::Ticket;
use super::management::Management;
use crate::config::Seccomp;

/// Options common to all workers.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Options of each worker's engine. Each worker fills in its own number.
    pub engine: EngineOptions,
    /// Reaction to system calls that a worker does not need.
    pub seccomp: Seccomp,
    /// When to spin, yield and sleep.
    pub wait: WaitPolicy,
}

/// A worker's report to the control thread.
#[derive(Debug)]
pub(super) enum Report {
    /// A notification for the resource manager.
    Notification(Notification),
    /// A request from this worker's engine to all engines.
    Broadcast { worker: u32, request: Broadcast },
    /// A copier that a ticket waits for has completed a job.
    Copied,
    /// This worker has carried out a command that takes longer than others: it has released all
    /// resources of a session, or moved a QP to Error.
    Answered { worker: usize, ticket: Ticket },
}

/// State shared by a worker and the control thread, in addition to the command queue.
#[derive(Debug)]
pub(super) struct WorkerShared {
    pub(super) parker: Parker,
    pub(super) waker: Waker,
    /// The last ticket carried out.
    pub(super) carried_out: AtomicU64,
    /// Number of QPs that the worker has or is about to get. The control thread adds to it, the
    /// worker subtracts.
    pub(super) load: AtomicU32,
    /// The control thread wants to be woken when this worker wakes up. The control thread sets it,
    /// the worker clears it.
    pub(super) watched: AtomicBool,
    /// QPs of the worker may hold data that a revocation must place. Set before the worker parks.
    pub(super) holds: AtomicBool,
    /// Management datagrams for the control thread.
    pub(super) management: Management,
}
