//! Workers: the threads that drive the engine.
//!
//! Each worker owns an [`Engine`](rnic_core::engine::Engine), the sockets of its QPs and a `mio`
//! poll. [`Workers`] is the control thread's handle to all of them. Workers move bytes between
//! sockets and the engine and carry out the engine's outputs. They contain no policy (commands are
//! already authorised) and no protocol.
//!
//! A worker never waits for another thread, and runs its commands before anything else. A command
//! with a [`Ticket`] is done when every worker has carried it out. The control thread acknowledges
//! some commands on behalf of sleeping workers. A panic in a worker aborts the daemon, because the
//! worker's state is suspect.

mod clients;
mod command;
mod connections;
mod copy_queues;
mod datagrams;
mod management;
mod run;
#[cfg(test)]
mod tests;
mod ticket;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use mio::Waker;
use rnic_abi::abi::control::{DisconnectMode, QpChange};
use rnic_abi::shm::doorbell::DoorbellScanner;
use rnic_abi::shm::parker::Parker;
use rnic_abi::shm::queue::CopyProducer;
use rnic_abi::shm::wait::WaitPolicy;
use rnic_abi::types::{CqId, QpId, SessionId, Stag, UserId};
use rnic_core::device::copier::Mark;
use rnic_core::device::{Copier, Cq, DiagnosisLog, StagChange, StagEntry, Window};
use rnic_core::engine::{
    ConnectedEnd, DatagramPort, DatagramRules, EngineOptions, Notification, PeerLimits, QpConfig,
};
use rnic_core::stream::startup::Negotiated;

use crate::config::Seccomp;
use crate::events::{ChannelSender, EventSender};
use crate::privilege::{ThreadKind, spawn_confined};
use crate::socket::Socket;
use command::{Command, TicketedCommand, Urgency};
use management::Management;
pub use management::ManagementDatagram;
use run::Worker;
pub use ticket::Ticket;
use ticket::Tickets;

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

/// The control thread's handle to all workers.
#[derive(Debug)]
pub struct Workers {
    workers: Vec<Handle>,
    tickets: Tickets,
    inbox: Receiver<Report>,
    diagnoses: Arc<DiagnosisLog>,
    notifications: VecDeque<Notification>,
    done: VecDeque<Ticket>,
    /// Tickets of the STag changes that QPs wait for, each with its QP and the QP's worker.
    changes: HashMap<Ticket, (u32, QpId, Box<StagChange>)>,
    /// Tickets that wait for all workers, and then for the copier's jobs of that moment.
    awaiting_workers: HashMap<Ticket, Arc<Copier>>,
    /// Tickets that only wait for a copier's jobs up to the mark.
    awaiting_copiers: Vec<(Ticket, Arc<Copier>, Mark)>,
}

/// A worker's report to the control thread.
#[derive(Debug)]
enum Report {
    /// A notification from this worker's engine.
    Engine { worker: u32, notification: Notification },
    /// A copier that a ticket waits for has completed a job.
    Copied,
    /// This worker has released all resources of the session that this ticket detaches.
    Gone { worker: usize, ticket: Ticket },
}

/// The control thread's handle to one worker.
#[derive(Debug)]
struct Handle {
    orders: Sender<TicketedCommand>,
    shared: Arc<WorkerShared>,
    thread: JoinHandle<()>,
}

/// State shared by a worker and the control thread, in addition to the command queue.
#[derive(Debug)]
struct WorkerShared {
    parker: Parker,
    waker: Waker,
    /// The last ticket carried out.
    carried_out: AtomicU64,
    /// Number of QPs that the worker has or is about to get. The control thread adds to it, the
    /// worker subtracts.
    load: AtomicU32,
    /// The control thread wants to be woken when this worker wakes up. The control thread sets it,
    /// the worker clears it.
    watched: AtomicBool,
    /// Management datagrams for the control thread.
    management: Management,
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
    /// Pairs with the end of a worker's sleep. Here: store `watched`, fence, load `parked`. There:
    /// clear `parked`, fence, load `watched`. One of the two fences comes first: if ours does, the
    /// worker sees `watched`, otherwise we see that the worker is awake.
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

    /// Adds a session to every worker, with its doorbell pages and eventfds (one per worker).
    /// Workers share their time among users.
    pub fn attach_session(
        &mut self,
        session: SessionId,
        user: UserId,
        scanners: Vec<DoorbellScanner>,
        eventfds: Vec<OwnedFd>,
        events: &Arc<EventSender>,
    ) {
        for ((worker, scanner), eventfd) in self.workers.iter().zip(scanners).zip(eventfds) {
            let events = Arc::clone(events);
            worker.send(None, Command::Attach { session, user, scanner, eventfd, events });
        }
    }

    /// Sets the channel for a CQ's events on every worker. Must precede the bind of the CQ's first
    /// QP.
    pub fn register_cq(&mut self, cq: CqId, session: SessionId, channel: &Arc<ChannelSender>) {
        for worker in &self.workers {
            let channel = Arc::clone(channel);
            worker.send(None, Command::RegisterCq { cq, session, channel });
        }
    }

    /// Undoes [`register_cq`](Self::register_cq).
    pub fn unregister_cq(&mut self, cq: CqId) {
        for worker in &self.workers {
            worker.send(None, Command::UnregisterCq(cq));
        }
    }

    /// Notifies the workers in the bit mask `workers` that a CQ has free slots, for which its
    /// client rings no doorbell.
    pub fn space_freed(&mut self, cq: &Arc<Cq>, workers: u64) {
        for worker in (0..self.count()).filter(|w| workers >> w & 1 == 1) {
            self.one(worker, None, Command::SpaceFreed(cq.clone()));
        }
    }

    /// Makes a memory region usable. Done when every worker has installed it.
    pub fn install_stag(&mut self, entry: StagEntry) -> Ticket {
        self.all(|| Command::InstallStag(entry.clone()))
    }

    /// Withdraws a memory region. When done, no worker accesses it any more.
    //= DDP-8.3.1-6, RDMAP-8.1.1-6
    pub fn revoke_stag(&mut self, stag: Stag) -> Ticket {
        self.all(|| Command::RevokeStag(stag))
    }

    /// Adds a memory window. Done when the QPs of every worker can bind it.
    pub fn add_window(&mut self, window: &Arc<Window>) -> Ticket {
        self.all(|| Command::AddWindow(window.clone()))
    }

    /// Withdraws a memory window. When done, no access through it is possible.
    pub fn remove_window(&mut self, window: &Arc<Window>) -> Ticket {
        self.all(|| Command::RemoveWindow(window.clone()))
    }

    /// Delays a ticket: after all workers have carried it out, it also waits for the jobs that the
    /// copier has at that time. Must precede the next [`poll_done`](Self::poll_done).
    pub fn await_copies(&mut self, ticket: Ticket, copier: Option<Arc<Copier>>) {
        self.awaiting_workers.extend(copier.map(|copier| (ticket, copier)));
    }

    /// Gives a worker a session's queue of copy jobs.
    pub fn add_copies(&mut self, worker: u32, copier: &Arc<Copier>, queue: CopyProducer) {
        if let Some(worker) = self.workers.get(worker as usize) {
            worker.send(None, Command::AddCopyQueue { copier: copier.clone(), queue });
        }
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

    /// Gives a worker a QP and its TCP connection.
    //= MPA-7.1-5
    pub fn attach_tcp(&mut self, worker: u32, end: ConnectedEnd, stream: Socket) {
        self.bind(worker, 1, Command::AttachTcp { end, stream });
    }

    /// Gives a worker two QPs that are connected to each other.
    pub fn attach_direct(&mut self, worker: u32, active: ConnectedEnd, passive: ConnectedEnd) {
        self.bind(worker, 2, Command::AttachDirect { active, passive });
    }

    /// Gives a worker an unconnected QP, only to flush its work requests. Done when the QP is in
    /// Error.
    pub fn attach_in_error(&mut self, worker: u32, config: Box<QpConfig>) -> Ticket {
        self.load(worker, 1);
        self.send_ticketed(worker, Command::AttachInError(config))
    }

    /// Gives a worker an RC or UC QP, in RTR.
    pub fn attach_roce(&mut self, worker: u32, config: Box<QpConfig>) {
        self.bind(worker, 1, Command::AttachRoce(config));
    }

    /// Gives a worker a UD QP, in RTR. When done, the QP receives the datagrams sent to it.
    pub fn attach_datagrams(&mut self, worker: u32, config: Box<QpConfig>) -> Ticket {
        self.load(worker, 1);
        self.send_ticketed(worker, Command::AttachRoce(config))
    }

    /// Gives a worker a UDP socket for datagrams, and the address it is bound to.
    pub fn add_datagram_socket(&mut self, worker: u32, socket: UdpSocket, at: SocketAddr) {
        self.one(worker, None, Command::AddDatagramSocket { socket, at });
    }

    /// Takes the socket with this address from a worker and closes it.
    pub fn remove_datagram_socket(&mut self, worker: u32, at: SocketAddr) {
        self.one(worker, None, Command::RemoveDatagramSocket { at });
    }

    /// Updates a UD QP's view of the device's ports.
    pub fn set_datagram_port(&mut self, worker: u32, qp: QpId, port: Arc<DatagramPort>) {
        self.one(worker, None, Command::DatagramPort { qp, port });
    }

    /// Sends a datagram packet from one of the device's addresses.
    pub fn send_datagram(&mut self, worker: u32, from: IpAddr, to: IpAddr, packet: Vec<u8>) {
        self.one(worker, None, Command::SendDatagram { from, to, packet });
    }

    /// Takes the queued management datagrams, a bounded number.
    pub fn take_management(&mut self) -> Vec<ManagementDatagram> {
        self.workers.iter().flat_map(|worker| worker.shared.management.take()).collect()
    }

    /// Returns the number of packets that workers have dropped because they cannot be from a
    /// daemon.
    pub fn dropped_packets(&self) -> u64 {
        self.workers.iter().map(|worker| worker.shared.management.dropped()).sum()
    }

    /// Replaces the rules of a UD QP.
    pub fn set_datagram_rules(
        &mut self,
        worker: u32,
        qp: QpId,
        rules: impl DatagramRules + 'static,
    ) {
        self.one(worker, None, Command::DatagramRules { qp, rules: Box::new(rules) });
    }

    /// Links two QPs of the same worker to each other, each with the limits of the other.
    pub fn link_direct(&mut self, worker: u32, ends: [(QpId, PeerLimits); 2]) {
        self.one(worker, None, Command::LinkDirect(ends));
    }

    /// Gives an RC or UC QP a stream to its peer, and the peer's limits.
    pub fn link_tcp(
        &mut self,
        worker: u32,
        qp: QpId,
        negotiated: Box<Negotiated>,
        peer: PeerLimits,
        stream: Socket,
    ) {
        self.one(worker, None, Command::LinkTcp { qp, negotiated, peer, stream });
    }

    /// Moves an RC, UC or UD QP to another state or changes its attributes. Done when the change
    /// has taken effect.
    pub fn change_qp(&mut self, worker: u32, qp: QpId, change: QpChange) -> Ticket {
        self.send_ticketed(worker, Command::Change { qp, change })
    }

    /// Sets the reason why an RC or UC QP has no stream.
    pub fn set_unlinked_reason(&mut self, worker: u32, qp: QpId, why: String) {
        self.one(worker, None, Command::UnlinkedBecause { qp, why });
    }

    /// Ends the stream of an RC or UC QP. `why` becomes the reason why it has no stream.
    pub fn unlink(&mut self, worker: u32, qp: QpId, why: String) {
        self.one(worker, None, Command::Unlink { qp, why });
    }

    /// Ends a QP's connection.
    pub fn disconnect(&mut self, worker: u32, qp: QpId, mode: DisconnectMode) {
        self.one(worker, None, Command::Disconnect { qp, mode });
    }

    /// Ends a QP's connection, with a Terminate where the stream allows one. The QP stays in Error.
    pub fn admin_disconnect(&mut self, worker: u32, qp: QpId) {
        self.one(worker, None, Command::AdminDisconnect(qp));
    }

    /// Replaces the options of every engine. Its number and the shared log of diagnoses stay.
    pub fn set_options(&mut self, options: &EngineOptions) {
        for worker in &self.workers {
            worker.send(None, Command::SetOptions(options.clone()));
        }
    }

    /// Moves a QP to Error. Done when the QP no longer accesses memory, except by jobs of a copier.
    pub fn to_error(&mut self, worker: u32, qp: QpId) -> Ticket {
        self.send_ticketed(worker, Command::ToError(qp))
    }

    /// Destroys a QP. When done, the worker no longer uses it.
    pub fn destroy_qp(&mut self, worker: u32, qp: QpId) -> Ticket {
        self.send_ticketed(worker, Command::Destroy(qp))
    }

    /// Returns a ticket that is done when every worker has reached this command, or sleeps.
    pub fn probe(&mut self) -> Ticket {
        self.all(|| Command::Answer)
    }

    /// Takes a ticket that is done. Must be called after each new ticket, because tickets for
    /// sleeping workers can be done at once, and whenever the control thread wakes up.
    pub fn poll_done(&mut self) -> Option<Ticket> {
        self.settle();
        self.done.pop_front()
    }

    /// Takes a notification for the resource manager. Notifications between workers (STag changes,
    /// freed CQ slots and receives) are carried out here and never returned.
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
                Report::Engine { worker, notification } => {
                    self.handle_notification(worker, notification)
                }
                // Handled below, with the other waiting tickets.
                Report::Copied => {}
                Report::Gone { worker, ticket } => self.tickets.answered(ticket, worker),
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

    /// Carries out a notification for other workers. Queues any other for the manager.
    fn handle_notification(&mut self, worker: u32, notification: Notification) {
        match notification {
            // If the QP's session has been detached in between, the workers no longer have its
            // window and install nothing.
            Notification::ChangeStags { qp, change } => {
                let ticket = self.all(|| Command::ChangeStags(StagChange::clone(&change)));
                self.await_copies(ticket, change.copier().cloned());
                self.changes.insert(ticket, (worker, qp, change));
            }
            Notification::CqSpaceFreed { cq, workers } => self.space_freed(&cq, workers),
            Notification::ReceivesFreed { srq, workers } => {
                for worker in (0..self.count()).filter(|w| workers >> w & 1 == 1) {
                    self.one(worker, None, Command::ReceivesPosted(srq.clone()));
                }
            }
            other => self.notifications.push_back(other),
        }
    }

    fn finish(&mut self, ticket: Ticket) {
        match self.changes.remove(&ticket) {
            Some((worker, qp, change)) => {
                change.settle();
                self.one(worker, None, Command::StagsChanged(qp));
            }
            None => self.done.push_back(ticket),
        }
    }

    fn bind(&mut self, worker: u32, qps: u32, command: Command) {
        self.load(worker, qps);
        self.one(worker, None, command);
    }

    /// Adds to the number of QPs of a worker.
    fn load(&self, worker: u32, qps: u32) {
        if let Some(w) = self.workers.get(worker as usize) {
            w.shared.load.fetch_add(qps, Ordering::Relaxed);
        }
    }

    /// Sends to one worker under a new ticket.
    fn send_ticketed(&mut self, worker: u32, command: Command) -> Ticket {
        let ticket = self.tickets.issue();
        let waits = self.one(worker, Some(ticket), command);
        self.tickets.open(ticket, waits.then_some(worker as usize).into_iter().collect());
        ticket
    }

    /// Sends to one worker. Returns true if the worker must answer.
    fn one(&mut self, worker: u32, ticket: Option<Ticket>, command: Command) -> bool {
        self.workers.get(worker as usize).is_some_and(|w| w.send(ticket, command))
    }

    /// Sends to all workers under a new ticket.
    fn all(&mut self, command: impl Fn() -> Command) -> Ticket {
        let ticket = self.tickets.issue();
        let waiting = self.workers.iter().map(|w| w.send(Some(ticket), command()));
        let waiting = (0..).zip(waiting).filter(|(_, waits)| *waits).map(|(n, _)| n).collect();
        self.tickets.open(ticket, waiting);
        ticket
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
        // The receiver lives as long as the thread, which only `stop` ends.
        let _ = self.orders.send(TicketedCommand { ticket, command });
        if !self.shared.parker.is_parked() {
            return true;
        }
        if urgency != Urgency::Later || self.orders.len() > SLEEPER_BACKLOG {
            // Fails only if the eventfd's counter is full, and then the waker has fired already.
            let _ = self.shared.waker.wake();
        }
        urgency == Urgency::Now
    }
}

/// Number of commands that may wait for a sleeping worker.
const SLEEPER_BACKLOG: usize = 64;
