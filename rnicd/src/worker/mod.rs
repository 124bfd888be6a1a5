//! Workers: the threads that drive the engine.
//!
//! Each worker owns an [`Engine`](rnic_core::engine::Engine), the sockets of its QPs and a `mio`
//! poll. [`Workers`] is the control thread's handle to all of them. Workers move bytes between
//! sockets and the engine and carry out the engine's outputs. They contain no policy (commands are
//! already authorised) and no protocol.
//!
//! A worker never waits for another thread, and runs its commands before anything else. A command
//! with a [`Ticket`] is done when every recipient has carried it out. The control thread
//! acknowledges some commands on behalf of sleeping workers. A panic in a worker aborts the daemon,
//! because the worker's state is suspect.

mod clients;
mod command;
mod connections;
mod copy_queues;
mod datagrams;
mod management;
mod run;
mod shared;
#[cfg(test)]
mod tests;
mod ticket;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use mio::Waker;
use rnic_abi::shm::parker::Parker;
use rnic_abi::types::{QpId, SessionId};
use rnic_core::device::copier::Mark;
use rnic_core::device::{Copier, DiagnosisLog, StagChange};
use rnic_core::engine::{Broadcast, EngineCommand, Notification};

use crate::privilege::{ThreadKind, spawn_confined};
pub use command::Command;
use command::{TicketedCommand, Urgency};
use management::Management;
pub use management::ManagementDatagram;
use run::Worker;
pub use shared::WorkerOptions;
use shared::{Report, WorkerShared};
pub use ticket::Ticket;
use ticket::Tickets;

/// The control thread's handle to all workers.
#[derive(Debug)]
pub struct Workers {
    workers: Vec<Handle>,
    /// Wakes the control thread.
    control: Arc<Waker>,
    tickets: Tickets,
    inbox: Receiver<Report>,
    diagnoses: Arc<DiagnosisLog>,
    notifications: VecDeque<Notification>,
    done: VecDeque<Ticket>,
    /// Tickets of the STag changes that QPs wait for, each with its QP and the QP's worker.
    changes: HashMap<Ticket, (u32, QpId, Box<StagChange>)>,
    /// Tickets that wait for workers, and then for the copier's current jobs.
    awaiting_workers: HashMap<Ticket, Arc<Copier>>,
    /// Tickets that only wait for a copier's jobs up to the mark.
    awaiting_copiers: Vec<(Ticket, Arc<Copier>, Mark)>,
}

/// The control thread's handle to one worker.
#[derive(Debug)]
struct Handle {
    orders: Sender<TicketedCommand>,
    shared: Arc<WorkerShared>,
    thread: JoinHandle<()>,
}

impl Workers {
    /// Starts `count` workers. They wake `control` when tickets are done or reports are queued.
    pub fn start(count: u32, options: &WorkerOptions, control: Arc<Waker>) -> io::Result<Self> {
        let (report, inbox) = unbounded();
        let workers = (0..count)
            .map(|number| Handle::start(number, options, &control, &report))
            .collect::<io::Result<_>>()?;
        Ok(Workers {
            workers,
            control,
            tickets: Tickets::default(),
            inbox,
            diagnoses: Arc::clone(&options.engine.diagnoses),
            notifications: VecDeque::new(),
            done: VecDeque::new(),
            changes: HashMap::new(),
            awaiting_workers: HashMap::new(),
            awaiting_copiers: Vec::new(),
        })
    }

    /// Returns the number of workers.
    pub fn count(&self) -> u32 {
        self.workers.len() as u32
    }

    /// Returns the log in which the engines record reasons of failures.
    pub fn diagnoses(&self) -> &Arc<DiagnosisLog> {
        &self.diagnoses
    }

    /// Returns the number of the worker with the fewest QPs.
    pub fn least_loaded(&self) -> u32 {
        let load = |w: &Handle| w.shared.load.load(Ordering::Relaxed);
        (0..).zip(&self.workers).min_by_key(|(_, w)| load(w)).map_or(0, |(number, _)| number)
    }

    /// Requests a wake-up from each worker. Returns true if all are asleep.
    ///
    /// Pairs with the end of a worker's sleep. This function stores `watched`, fences, and loads
    /// `parked`; the worker clears `parked`, fences, and loads `watched`. If this fence is first,
    /// the worker sees `watched`, otherwise this function sees that the worker is awake.
    pub fn watch(&self) -> bool {
        for worker in &self.workers {
            worker.shared.watched.store(true, Ordering::Relaxed);
        }
        self.workers.iter().all(|worker| worker.shared.parker.is_parked())
    }

    /// Returns true if no worker has woken up since [`watch`](Self::watch) returned true.
    pub fn still_sleep(&self) -> bool {
        self.workers.iter().all(|worker| worker.shared.watched.load(Ordering::Acquire))
    }

    /// Sends a command to one worker.
    pub fn one(&mut self, worker: u32, command: impl Into<Command>) {
        self.send(worker, None, command.into());
    }

    /// Sends a command to the workers in a bit mask.
    pub fn some<C: Into<Command>>(&mut self, workers: u64, command: impl Fn() -> C) {
        for worker in (0..self.count()).filter(|w| workers >> w & 1 == 1) {
            self.one(worker, command());
        }
    }

    /// Sends a command to all workers.
    pub fn all<C: Into<Command>>(&mut self, command: impl Fn() -> C) {
        for worker in 0..self.count() {
            self.one(worker, command());
        }
    }

    /// Sends a command to one worker. The ticket is done when the worker has carried it out.
    pub fn one_ticketed(&mut self, worker: u32, command: impl Into<Command>) -> Ticket {
        let ticket = self.tickets.issue();
        let waits = self.send(worker, Some(ticket), command.into());
        self.tickets.open(ticket, waits.then_some(worker as usize).into_iter().collect());
        ticket
    }

    /// Sends a command to all workers. The ticket is done when every worker has carried it out, or
    /// sleeps and will carry it out before anything else.
    pub fn all_ticketed<C: Into<Command>>(&mut self, command: impl Fn() -> C) -> Ticket {
        let ticket = self.tickets.issue();
        let waiting = self.workers.iter().map(|w| w.send(Some(ticket), command().into()));
        let waiting = (0..).zip(waiting).filter(|(_, waits)| *waits).map(|(n, _)| n).collect();
        self.tickets.open(ticket, waiting);
        ticket
    }

    /// Delays a ticket: after its workers have carried it out, it also waits for the jobs that the
    /// copier has then. Must precede the next [`poll_done`](Self::poll_done).
    pub fn await_copies(&mut self, ticket: Ticket, copier: Option<Arc<Copier>>) {
        self.awaiting_workers.extend(copier.map(|copier| (ticket, copier)));
    }

    /// Ends all QPs of a session and removes it. Tickets issued later may be done earlier, because
    /// workers end these QPs between turns of other QPs.
    pub fn detach_session(&mut self, session: SessionId) -> Ticket {
        let ticket = self.tickets.issue();
        let waiting = (0..self.workers.len()).collect();
        self.tickets.open_separate(ticket, waiting);
        for worker in &self.workers {
            worker.send(Some(ticket), Command::Detach(session));
        }
        ticket
    }

    /// Moves a RoCE QP to Error at the request of its program. Posted requests are sent first, as
    /// far as the peer and the socket take them at once. Requests of an RC or UC QP without a
    /// stream wait for one if the QP `expects_stream`. Tickets issued later may be done earlier.
    pub fn move_to_error(&mut self, worker: u32, qp: QpId, expects_stream: bool) -> Ticket {
        let ticket = self.tickets.issue();
        self.tickets.open_separate(ticket, vec![worker as usize]);
        self.send(worker, Some(ticket), Command::ToError { qp, expects_stream });
        ticket
    }

    /// Takes a bounded number of the queued management datagrams. If others remain, the control
    /// thread is woken again.
    pub fn take_management(&mut self) -> Vec<ManagementDatagram> {
        let queues = || self.workers.iter().map(|worker| &worker.shared.management);
        let taken = queues().flat_map(Management::take).collect();
        if queues().any(Management::has_some) {
            // Fails only if the control thread has been woken already.
            let _ = self.control.wake();
        }
        taken
    }

    /// Returns the number of packets that workers have dropped because they cannot be from a
    /// daemon.
    pub fn dropped_packets(&self) -> u64 {
        self.workers.iter().map(|worker| worker.shared.management.dropped()).sum()
    }

    /// Takes a ticket that is done. Must be called after each new ticket, because tickets for
    /// sleeping workers can be done at once, and whenever the control thread wakes up.
    pub fn poll_done(&mut self) -> Option<Ticket> {
        self.settle();
        self.done.pop_front()
    }

    /// Takes a notification for the resource manager.
    pub fn poll_notification(&mut self) -> Option<Notification> {
        self.settle();
        self.notifications.pop_front()
    }

    /// Ends all connections and joins the threads.
    pub fn stop(self) {
        for worker in &self.workers {
            worker.send(None, Command::Stop);
        }
        for worker in self.workers {
            // A panic would have ended the process.
            let _ = worker.thread.join();
        }
    }

    /// Processes the workers' reports and finished tickets. An STag change starts and ends here:
    /// every worker carries it out, then the QP that requested it continues.
    fn settle(&mut self) {
        while let Ok(report) = self.inbox.try_recv() {
            match report {
                Report::Notification(notification) => self.notifications.push_back(notification),
                Report::Broadcast { worker, request } => self.broadcast(worker, request),
                // Handled below, with the other waiting tickets.
                Report::Copied => {}
                Report::Answered { worker, ticket } => self.tickets.answered(ticket, worker),
            }
        }
        loop {
            let workers = &self.workers;
            let carried_out = |w: usize| workers[w].shared.carried_out.load(Ordering::Acquire);
            let Some(ticket) = self.tickets.poll(carried_out) else { break };
            match self.awaiting_workers.remove(&ticket) {
                // From here on, no new job can use the revoked memory. Wait for the current jobs.
                Some(copier) => {
                    let mark = copier.mark();
                    self.awaiting_copiers.push((ticket, copier, mark));
                }
                None => self.finish(ticket),
            }
        }
        let passed: Vec<_> =
            self.awaiting_copiers.extract_if(.., |(_, m, mark)| m.has_passed(mark)).collect();
        for (ticket, copier, _) in passed {
            if !self.awaiting_copiers.iter().any(|(_, other, _)| Arc::ptr_eq(other, &copier)) {
                copier.unwatch();
            }
            self.finish(ticket);
        }
    }

    /// Passes on a request from a worker's engine to all engines.
    fn broadcast(&mut self, worker: u32, request: Broadcast) {
        match request {
            // If the QP's session has been detached in between, the workers no longer have its
            // window and install nothing.
            Broadcast::ChangeStags { qp, change } => {
                let command = || EngineCommand::ChangeStags(StagChange::clone(&change));
                let ticket = self.all_ticketed(command);
                self.await_copies(ticket, change.copier().cloned());
                self.changes.insert(ticket, (worker, qp, change));
            }
            Broadcast::Freed { freed, workers } => {
                self.some(workers, || EngineCommand::Wake(freed.clone()));
            }
        }
    }

    fn finish(&mut self, ticket: Ticket) {
        match self.changes.remove(&ticket) {
            Some((worker, qp, change)) => {
                change.settle();
                self.one(worker, EngineCommand::StagsChanged(qp));
            }
            None => self.done.push_back(ticket),
        }
    }

    /// Sends to one worker. Returns true if the worker must answer.
    fn send(&mut self, worker: u32, ticket: Option<Ticket>, command: Command) -> bool {
        self.workers.get(worker as usize).is_some_and(|w| w.send(ticket, command))
    }
}

impl Handle {
    fn start(
        number: u32,
        options: &WorkerOptions,
        control: &Arc<Waker>,
        reports: &Sender<Report>,
    ) -> io::Result<Self> {
        let poll = mio::Poll::new()?;
        let waker = Waker::new(poll.registry(), connections::WAKER)?;
        let shared = Arc::new(WorkerShared {
            parker: Parker::new(),
            waker,
            carried_out: AtomicU64::new(0),
            load: AtomicU32::new(0),
            watched: AtomicBool::new(false),
            holds: AtomicBool::new(false),
            management: Management::default(),
        });
        let (orders, inbox) = unbounded();
        let worker = Worker::new(
            number,
            options,
            poll,
            inbox,
            Arc::clone(&shared),
            Arc::clone(control),
            reports.clone(),
        )?;
        let name = format!("rnicd-worker-{number}");
        let thread =
            spawn_confined(&name, ThreadKind::Worker, options.seccomp, move || worker.run())?;
        Ok(Handle { orders, shared, thread })
    }

    /// Queues a command. Returns true if the worker must answer, false if the command counts as
    /// done.
    fn send(&self, ticket: Option<Ticket>, command: Command) -> bool {
        let urgency = command.urgency();
        self.shared.load.fetch_add(command.qps(), Ordering::Relaxed);
        // The receiver lives as long as the thread, which only `stop` ends.
        let _ = self.orders.send(TicketedCommand { ticket, command });
        if !self.shared.parker.is_parked() {
            return true;
        }
        // Published by `park`.
        let must_answer = urgency == Urgency::Now || self.shared.holds.load(Ordering::Relaxed);
        if urgency != Urgency::Later || must_answer || self.orders.len() > SLEEPER_BACKLOG {
            // Fails only if the eventfd's counter is full, and then the waker has fired already.
            let _ = self.shared.waker.wake();
        }
        must_answer
    }
}

/// Number of commands that may wait for a sleeping worker.
const SLEEPER_BACKLOG: usize = 64;
