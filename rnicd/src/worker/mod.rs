//! Workers: the threads that drive the engine.
//!
//! Each worker owns an [`Engine`](rnic_core::engine::Engine), the sockets of its QPs and a `mio`
//! poll; [`Workers`] is the control thread's handle on all of them. A worker never waits for
//! another thread, and takes what it is told (commands, already authorised) before it does anything
//! else. Commands with a [`Ticket`] are answered when every worker has carried them out; for one
//! that sleeps the control thread answers itself. This module knows neither who may do what nor the
//! protocol: it moves bytes between sockets and the engine and carries out what the engine says.
//! A worker that panics takes the daemon with it, because its state is suspect.

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
use rnic_core::abi::control::{DisconnectMode, QpChange};
use rnic_core::device::copier::Mark;
use rnic_core::device::{Copier, Cq, DiagnosisLog, StagChange, StagEntry, Window};
use rnic_core::engine::{
    DatagramPort, DatagramRules, EngineOptions, Notification, PeerLimits, QpConfig,
};
use rnic_core::shm::doorbell::DoorbellScanner;
use rnic_core::shm::parker::Parker;
use rnic_core::shm::queue::CopyProducer;
use rnic_core::shm::wait::WaitPolicy;
use rnic_core::stream::startup::Negotiated;
use rnic_core::types::{CqId, QpId, SessionId, Stag, UserId};

use crate::config::Seccomp;
use crate::events::{ChannelSender, EventSender};
use crate::privilege::{ThreadKind, spawn_confined};
use crate::socket::Socket;
pub use command::ConnectedEnd;
use command::{Command, TicketedCommand, Urgency};
use management::Management;
pub use management::ManagementDatagram;
use run::Worker;
pub use ticket::Ticket;
use ticket::Tickets;

/// Options that all workers have alike.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// For each worker's engine; the worker's number is filled in.
    pub engine: EngineOptions,
    /// What happens to system calls that a worker has no need of.
    pub seccomp: Seccomp,
    /// When to spin, yield and sleep.
    pub wait: WaitPolicy,
}

/// All workers, as the control thread sees them.
#[derive(Debug)]
pub struct Workers {
    workers: Vec<Handle>,
    tickets: Tickets,
    inbox: Receiver<Report>,
    diagnoses: Arc<DiagnosisLog>,
    notifications: VecDeque<Notification>,
    done: VecDeque<Ticket>,
    /// Tickets of changes a QP waits for, with that QP and its worker.
    changes: HashMap<Ticket, (u32, QpId, Box<StagChange>)>,
    /// Tickets that all workers must carry out before what copiers are at is waited for.
    awaiting_workers: HashMap<Ticket, Arc<Copier>>,
    /// Tickets that wait for copiers.
    awaiting_copiers: Vec<(Ticket, Arc<Copier>, Mark)>,
}

/// What a worker sends to the control thread.
#[derive(Debug)]
enum Report {
    /// The engine of this worker has something known or done.
    Engine { worker: u32, notification: Notification },
    /// A copier that somebody waits for has answered.
    Copied,
    /// This worker holds nothing any more of the session whose end has this ticket.
    Gone { worker: usize, ticket: Ticket },
}

/// One worker, as the control thread sees it.
#[derive(Debug)]
struct Handle {
    orders: Sender<TicketedCommand>,
    shared: Arc<WorkerShared>,
    thread: JoinHandle<()>,
}

/// What a worker and the control thread share besides the command queue.
#[derive(Debug)]
struct WorkerShared {
    parker: Parker,
    waker: Waker,
    /// The last ticket carried out.
    carried_out: AtomicU64,
    /// QPs bound or on their way: the control thread adds, the worker subtracts.
    load: AtomicU32,
    /// The control thread wants to be woken when the worker is: set by the one, cleared by the
    /// other.
    watched: AtomicBool,
    /// Management datagrams for the control thread.
    management: Management,
}

impl Workers {
    /// Starts `count` workers. `control` is woken when tickets are done or reports are there.
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

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.workers.len() as u32
    }

    /// Where the engines put reasons of failures.
    pub fn diagnoses(&self) -> &Arc<DiagnosisLog> {
        &self.diagnoses
    }

    /// The worker with the fewest QPs.
    pub fn least_loaded(&self) -> u32 {
        let load = |w: &Handle| w.shared.load.load(Ordering::Relaxed);
        (0..).zip(&self.workers).min_by_key(|(_, w)| load(w)).map_or(0, |(number, _)| number)
    }

    /// Has every worker wake the control thread when it is woken; whether all of them sleep.
    ///
    /// Pairs with the end of a worker's sleep. Here: store `watched`, fence, load `parked`. There:
    /// clear `parked`, fence, load `watched`. Of the two fences one comes first: if ours does, the
    /// worker sees that it is watched; if theirs does, we see that it does not sleep.
    pub fn watch(&self) -> bool {
        for worker in &self.workers {
            worker.shared.watched.store(true, Ordering::Relaxed);
        }
        self.workers.iter().all(|worker| worker.shared.parker.is_parked())
    }

    /// Whether all of them have slept since they were [watched](Self::watch), if they did then.
    pub fn still_sleep(&self) -> bool {
        self.workers.iter().all(|worker| worker.shared.watched.load(Ordering::Acquire))
    }

    /// Makes a session known to every worker: its doorbell pages and eventfds, one per worker.
    /// Workers share their time out among users.
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

    /// Tells every worker where events of a CQ go. To come before the CQ's first QP is bound.
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

    /// Tells workers (by bit) that slots of a CQ may be had, by no doing of its client.
    pub fn space_freed(&mut self, cq: &Arc<Cq>, workers: u64) {
        for worker in (0..self.count()).filter(|w| workers >> w & 1 == 1) {
            self.one(worker, None, Command::SpaceFreed(cq.clone()));
        }
    }

    /// Makes a memory region usable; done when every worker knows it.
    pub fn install_stag(&mut self, entry: StagEntry) -> Ticket {
        self.all(|| Command::InstallStag(entry.clone()))
    }

    /// Withdraws a memory region; when done, no worker touches it any more.
    //= DDP-8.3.1-6, RDMAP-8.1.1-6
    pub fn revoke_stag(&mut self, stag: Stag) -> Ticket {
        self.all(|| Command::RevokeStag(stag))
    }

    /// Makes a memory window known; done when every worker's QPs can bind it.
    pub fn add_window(&mut self, window: &Arc<Window>) -> Ticket {
        self.all(|| Command::AddWindow(window.clone()))
    }

    /// Withdraws a memory window; when done, nothing is reached through it.
    pub fn remove_window(&mut self, window: &Arc<Window>) -> Ticket {
        self.all(|| Command::RemoveWindow(window.clone()))
    }

    /// Has a ticket done only when also the jobs are over that this copier has when all workers
    /// have carried it out. To be asked before [`poll_done`](Self::poll_done) is.
    pub fn await_copies(&mut self, ticket: Ticket, copier: Option<Arc<Copier>>) {
        self.awaiting_workers.extend(copier.map(|copier| (ticket, copier)));
    }

    /// Makes the queue of copies of a session known to a worker.
    pub fn add_copies(&mut self, worker: u32, copier: &Arc<Copier>, queue: CopyProducer) {
        if let Some(worker) = self.workers.get(worker as usize) {
            worker.send(None, Command::AddCopyQueue { copier: copier.clone(), queue });
        }
    }

    /// Ends all of a session's QPs and forgets it. What is asked for later may be done earlier:
    /// workers end QPs between turns of others.
    pub fn detach_session(&mut self, session: SessionId) -> Ticket {
        let ticket = self.tickets.issue();
        let waiting = (0..self.workers.len()).collect();
        self.tickets.open_apart(ticket, waiting);
        for worker in &self.workers {
            worker.send(Some(ticket), Command::Detach(session));
        }
        ticket
    }

    /// Gives a QP to a worker, with its TCP connection.
    //= MPA-7.1-5
    pub fn attach_tcp(&mut self, worker: u32, end: ConnectedEnd, stream: Socket) {
        self.bind(worker, 1, Command::AttachTcp { end, stream });
    }

    /// Gives two QPs that are connected to each other to a worker.
    pub fn attach_direct(&mut self, worker: u32, active: ConnectedEnd, passive: ConnectedEnd) {
        self.bind(worker, 2, Command::AttachDirect { active, passive });
    }

    /// Gives an unconnected QP to a worker, only to flush what is posted to it; done when the QP
    /// is in Error.
    pub fn attach_in_error(&mut self, worker: u32, config: Box<QpConfig>) -> Ticket {
        self.load(worker, 1);
        self.ticketed(worker, Command::AttachInError(config))
    }

    /// Gives a QP that is wired by hand to a worker, in Rtr.
    pub fn attach_wired(&mut self, worker: u32, config: Box<QpConfig>) {
        self.bind(worker, 1, Command::AttachWired(config));
    }

    /// Gives a QP of datagrams to a worker, in Rtr; when done, what is sent to it is its own.
    pub fn attach_datagrams(&mut self, worker: u32, config: Box<QpConfig>) -> Ticket {
        self.load(worker, 1);
        self.ticketed(worker, Command::AttachWired(config))
    }

    /// Gives a worker a socket of UDP by which datagrams go, and the address that it is bound to.
    pub fn add_datagram_socket(&mut self, worker: u32, socket: UdpSocket, at: SocketAddr) {
        self.one(worker, None, Command::AddDatagramSocket { socket, at });
    }

    /// Takes the socket of an address from a worker, and closes it.
    pub fn remove_datagram_socket(&mut self, worker: u32, at: SocketAddr) {
        self.one(worker, None, Command::RemoveDatagramSocket { at });
    }

    /// Gives a UD QP the device's ports as they are now.
    pub fn set_datagram_port(&mut self, worker: u32, qp: QpId, port: Arc<DatagramPort>) {
        self.one(worker, None, Command::DatagramPort { qp, port });
    }

    /// Sends a packet of a datagram from one of the device's addresses.
    pub fn send_datagram(&mut self, worker: u32, from: IpAddr, to: IpAddr, packet: Vec<u8>) {
        self.one(worker, None, Command::SendDatagram { from, to, packet });
    }

    /// Takes the datagrams that have come for the management of ports, a bounded number.
    pub fn take_management(&mut self) -> Vec<ManagementDatagram> {
        self.workers.iter().flat_map(|worker| worker.shared.management.take()).collect()
    }

    /// Packets that workers have dropped because they are of no daemon.
    pub fn dropped_packets(&self) -> u64 {
        self.workers.iter().map(|worker| worker.shared.management.dropped()).sum()
    }

    /// Has a QP of datagrams keep to other rules.
    pub fn set_datagram_rules(
        &mut self,
        worker: u32,
        qp: QpId,
        rules: impl DatagramRules + 'static,
    ) {
        self.one(worker, None, Command::DatagramRules { qp, rules: Box::new(rules) });
    }

    /// Links two QPs of a worker that are wired to each other, each with what the other has said.
    pub fn link_direct(&mut self, worker: u32, ends: [(QpId, PeerLimits); 2]) {
        self.one(worker, None, Command::LinkDirect(ends));
    }

    /// Gives a QP that is wired by hand a stream to its peer, with what that has said.
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

    /// Moves an RC, UC or UD QP to another state or changes its attributes; done when the QP has
    /// the change.
    pub fn change_qp(&mut self, worker: u32, qp: QpId, change: QpChange) -> Ticket {
        self.ticketed(worker, Command::Change { qp, change })
    }

    /// Says why a QP that is wired by hand has no stream.
    pub fn unlinked_because(&mut self, worker: u32, qp: QpId, why: String) {
        self.one(worker, None, Command::UnlinkedBecause { qp, why });
    }

    /// Takes the stream from a QP that is wired by hand.
    pub fn unlink(&mut self, worker: u32, qp: QpId, why: String) {
        self.one(worker, None, Command::Unlink { qp, why });
    }

    /// Ends a QP's connection.
    pub fn disconnect(&mut self, worker: u32, qp: QpId, mode: DisconnectMode) {
        self.one(worker, None, Command::Disconnect { qp, mode });
    }

    /// Ends a QP's connection with a Terminate where the stream allows one; the QP stays in Error.
    pub fn admin_disconnect(&mut self, worker: u32, qp: QpId) {
        self.one(worker, None, Command::AdminDisconnect(qp));
    }

    /// Gives every engine other deadlines; its number stays.
    pub fn set_options(&mut self, options: &EngineOptions) {
        for worker in &self.workers {
            worker.send(None, Command::SetOptions(options.clone()));
        }
    }

    /// Moves a QP to Error; done when the QP reads and writes no more memory, except by jobs of a
    /// copier.
    pub fn to_error(&mut self, worker: u32, qp: QpId) -> Ticket {
        self.ticketed(worker, Command::ToError(qp))
    }

    /// Destroys a QP; when done, the worker holds nothing of it.
    pub fn destroy_qp(&mut self, worker: u32, qp: QpId) -> Ticket {
        self.ticketed(worker, Command::Destroy(qp))
    }

    /// Done when every worker has come to its commands, or sleeps.
    pub fn ask(&mut self) -> Ticket {
        self.all(|| Command::Answer)
    }

    /// A ticket that is done. To be asked after issuing one, because sleeping workers are answered
    /// for at once, and whenever the control thread is woken.
    pub fn poll_done(&mut self) -> Option<Ticket> {
        self.settle();
        self.done.pop_front()
    }

    /// What an engine has the resource manager know. What workers do among themselves (changes of
    /// STags, slots and receives that are free again) is carried out here, and not among it.
    pub fn poll_notification(&mut self) -> Option<Notification> {
        self.settle();
        self.notifications.pop_front()
    }

    /// Ends all connections and waits for the threads.
    pub fn stop(self) {
        for worker in &self.workers {
            worker.send(None, Command::Stop);
        }
        for worker in self.workers {
            // It cannot have panicked: that would have ended the process.
            let _ = worker.thread.join();
        }
    }

    /// Takes in what workers say. Changes of STags that all workers know begin and end here: every
    /// worker carries the change out, then the QP that asked goes on.
    fn settle(&mut self) {
        while let Ok(report) = self.inbox.try_recv() {
            match report {
                Report::Engine { worker, notification } => self.notified(worker, notification),
                // What waits is looked at below.
                Report::Copied => {}
                Report::Gone { worker, ticket } => self.tickets.answered(ticket, worker),
            }
        }
        loop {
            let workers = &self.workers;
            let carried_out = |w: usize| workers[w].shared.carried_out.load(Ordering::Acquire);
            let Some(ticket) = self.tickets.poll(carried_out) else { break };
            match self.awaiting_workers.remove(&ticket) {
                // From now on no job can begin there: those that have are waited for.
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

    /// Carries out what an engine wants of other workers, and keeps the rest for the manager.
    fn notified(&mut self, worker: u32, notification: Notification) {
        match notification {
            // If it comes behind the command that ends its session, the workers do not know its
            // window any more and install nothing.
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

    /// So many QPs are on their way to a worker.
    fn load(&self, worker: u32, qps: u32) {
        if let Some(w) = self.workers.get(worker as usize) {
            w.shared.load.fetch_add(qps, Ordering::Relaxed);
        }
    }

    /// Sends to one worker under a new ticket.
    fn ticketed(&mut self, worker: u32, command: Command) -> Ticket {
        let ticket = self.tickets.issue();
        let waits = self.one(worker, Some(ticket), command);
        self.tickets.open(ticket, waits.then_some(worker as usize).into_iter().collect());
        ticket
    }

    /// Sends to one worker; whether it has to answer.
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

    /// Queues a command; whether the worker has to answer for it, rather than being answered for.
    fn send(&self, ticket: Option<Ticket>, command: Command) -> bool {
        let urgency = command.urgency();
        // The receiver lives until the thread has ended, which only `stop` makes it do.
        let _ = self.orders.send(TicketedCommand { ticket, command });
        if !self.shared.parker.is_parked() {
            return true;
        }
        if urgency != Urgency::Later || self.orders.len() > SLEEPER_BACKLOG {
            // Writing to an eventfd of our own fails only when its counter is full: then it rings.
            let _ = self.shared.waker.wake();
        }
        urgency == Urgency::Now
    }
}

/// Commands that may wait for a worker that sleeps.
const SLEEPER_BACKLOG: usize = 64;
