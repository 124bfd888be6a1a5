//! The main loop of a worker thread.
//!
//! A round runs commands, doorbells, some turns of QPs (sending and receiving) and deadlines, and
//! carries out the engine's outputs. Rounds are short, so that none of these waits long. After a
//! round without work the worker spins, then yields, then sleeps (with the same `Waiter` as the
//! client). While it waits, it tries the recently active sockets before it polls all of them. After
//! a sleep it runs the commands first, because the control thread may have acknowledged some on its
//! behalf.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use mio::{Events, Poll, Waker};
use rnic_abi::abi::control::{DisconnectMode, Event};
use rnic_abi::shm::io::send_pieces;
use rnic_abi::shm::wait::{Step, Waiter, cpus};
use rnic_abi::types::{QpId, SessionId, Time};
use rnic_core::engine::{
    Engine, EngineCommand, EngineOptions, Notification, Output, Receive, Transmit, Work,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use super::Ticket;
use super::clients::Clients;
use super::command::{Command, TicketedCommand};
use super::connections::{Connections, Polled, WAKER};
use super::copy_queues::{Answer, CopyQueues};
use super::datagrams::DatagramSockets;
use super::shared::{Report, WorkerOptions, WorkerShared};
use crate::clock;
use crate::log::RateLimitedLog;
use crate::privilege::set_short_slices;

/// One worker, on its own thread.
pub(super) struct Worker {
    number: u32,
    engine: Engine,
    connections: Connections,
    clients: Clients,
    copy_queues: CopyQueues,
    datagrams: DatagramSockets,
    waiter: Waiter,
    /// The worker has short time slices, because other threads compete for its CPU.
    short_slices: bool,
    poll: Poll,
    events: Events,
    /// Time of the last poll for readiness.
    polled: Time,
    inbox: Receiver<TicketedCommand>,
    shared: Arc<WorkerShared>,
    control: Arc<Waker>,
    reports: Sender<Report>,
    stopping: bool,
    /// Commands remain from the last call of `run_commands`.
    backlogged: bool,
    /// Tickets of sessions that are being detached.
    detaching: HashMap<SessionId, Ticket>,
    /// Tickets of QPs that move to Error, at most one for each session.
    moving_to_error: HashMap<QpId, Ticket>,
    /// Rate limits of log lines that clients can cause: this field and the next two.
    warnings: RateLimitedLog,
    unfair: RateLimitedLog,
    unpolled: RateLimitedLog,
}

impl Worker {
    pub(super) fn new(
        number: u32,
        options: &WorkerOptions,
        poll: Poll,
        inbox: Receiver<TicketedCommand>,
        shared: Arc<WorkerShared>,
        control: Arc<Waker>,
        reports: Sender<Report>,
    ) -> io::Result<Self> {
        let engine = EngineOptions { worker: number, ..options.engine.clone() };
        Ok(Worker {
            number,
            engine: Engine::new(engine),
            connections: Connections::new(poll.registry().try_clone()?),
            clients: Clients::default(),
            copy_queues: CopyQueues::default(),
            datagrams: DatagramSockets::default(),
            waiter: Waiter::new(cpus(), options.wait),
            short_slices: false,
            poll,
            events: Events::with_capacity(EVENTS),
            polled: Time(0),
            inbox,
            shared,
            control,
            reports,
            stopping: false,
            backlogged: false,
            detaching: HashMap::new(),
            moving_to_error: HashMap::new(),
            warnings: RateLimitedLog::new(WARNINGS, WARN_EVERY),
            unfair: RateLimitedLog::new(WARNINGS, WARN_EVERY),
            unpolled: RateLimitedLog::new(WARNINGS, WARN_EVERY),
        })
    }

    /// Runs until it receives [`Command::Stop`].
    pub(super) fn run(mut self) {
        let _guard = AbortOnPanic;
        let mut idle_rounds = 0u32;
        loop {
            let now = clock::now();
            self.run_commands(now, 0);
            if self.stopping {
                return self.end(now);
            }
            if self.round(now) {
                idle_rounds = 0;
                self.waiter.progress(now);
                self.poll_sockets(now);
                if self.engine.users() > 1 {
                    let now = clock::now();
                    self.adjust_slice(now);
                    if self.waiter.shares(now, self.engine.is_resting()) {
                        std::thread::yield_now();
                    }
                }
                continue;
            }
            idle_rounds = idle_rounds.wrapping_add(1);
            match self.waiter.step(now) {
                Step::Spin => {
                    if idle_rounds % SPINS_PER_TRY == 1 {
                        self.retry_hot();
                    }
                    std::hint::spin_loop();
                }
                // This worker may just have sent to another QP of its own. A try takes less time
                // than a yield.
                Step::Yield if idle_rounds == 1 && self.connections.several_hot() => {
                    self.retry_hot();
                }
                Step::Yield => {
                    self.retry_hot();
                    self.poll_sockets(now);
                    std::thread::yield_now();
                }
                // Sleeping now would handle the deadline late.
                Step::Sleep if self.is_almost_due(now) && self.waiter.shares(now, true) => {
                    self.retry_hot();
                    self.poll_sockets(now);
                    std::thread::yield_now();
                }
                Step::Sleep => self.sleep(now),
            }
        }
    }

    /// Returns true if an emulated link is due so soon that the worker polls for it.
    fn is_almost_due(&self, now: Time) -> bool {
        self.engine.poll_precise_timeout().is_some_and(|at| at.since(now) <= POLL_AHEAD)
    }

    /// Does a bounded amount of work, so that commands and doorbells do not wait long. Returns true
    /// if there was any.
    fn round(&mut self, now: Time) -> bool {
        let mut worked = self.engine.poll_doorbells(now);
        if self.datagrams.has_some() {
            let most = if self.engine.is_shared() { FEW_DATAGRAMS } else { DATAGRAMS };
            let management = &self.shared.management;
            // Fails only if the control thread has been woken already.
            let wake = || drop(self.control.wake());
            worked |= self.datagrams.receive(&mut self.engine, management, wake, now, most);
        }
        worked |= self.poll_copies(now);
        worked |= self.serve(now);
        if self.engine.poll_timeout().is_some_and(|at| at <= now) {
            self.engine.handle_timeout(now);
            worked = true;
        }
        if self.engine.is_ending() {
            self.end_sessions(now);
            worked = true;
        }
        self.run_outputs();
        worked
    }

    /// Returns true if a command waits. The round is then cut short, so that the command is
    /// acknowledged soon. While there are more commands than fit between two rounds, rounds keep
    /// their length.
    fn interrupted(&self) -> bool {
        !self.backlogged && !self.inbox.is_empty()
    }

    /// Serves QPs in turns until no QP is ready or the round ends: by the engine's count of work,
    /// or by time if the work takes longer than counted.
    fn serve(&mut self, begun: Time) -> bool {
        let before = self.engine.turns();
        let round = round_length(self.engine.is_shared(), self.engine.users());
        let mut now = begun;
        let mut worked = false;
        while let Some(work) = self.engine.poll_work(now) {
            match work {
                Work::Transmit(qp) => self.transmit(qp, now),
                Work::TurnTaken => {}
                Work::Receive(qp) => {
                    worked |= self.receive(qp, now);
                    // The event for the connection must precede completions of later messages.
                    self.run_outputs();
                }
            }
            let began = std::mem::replace(&mut now, clock::now());
            self.engine.turn_over(began, now);
            if self.interrupted() || now.since(begun) >= round {
                break;
            }
        }
        worked || self.engine.turns() != before || self.engine.is_resting()
    }

    /// Takes a turn of a QP at once.
    fn take_turn_now(&mut self, qp: QpId, now: Time) {
        if let Some(Work::Transmit(qp)) = self.engine.take_turn_now(qp, now) {
            self.transmit(qp, now);
        }
    }

    fn transmit(&mut self, qp: QpId, now: Time) {
        // A connection without a socket is about to end: an output of the engine has closed it.
        if let Some(connection) = self.connections.of_qp(qp) {
            let emss = connection.emss(now);
            let stream = &connection.stream;
            let sent =
                self.engine.transmit(qp, now, emss, |batch| send_pieces(stream, batch.pieces()));
            connection.blocked = sent == Transmit::Blocked;
        }
    }

    /// Reads a connection once. Returns true if anything arrived.
    fn receive(&mut self, qp: QpId, now: Time) -> bool {
        let Some((token, connection)) = self.connections.readable(qp) else { return false };
        let stream = &connection.stream;
        let received = self.engine.receive(qp, now, |buffers| {
            let mut no_descriptors = RecvAncillaryBuffer::default();
            let message = recvmsg(stream, buffers, &mut no_descriptors, RecvFlags::DONTWAIT)?;
            Ok(message.bytes)
        });
        match received {
            Receive::Progress => {
                self.connections.keep_hot(token);
                self.engine.handle_readable(qp);
                true
            }
            Receive::Emptied => {
                let closing = connection.closing;
                self.connections.keep_hot(token);
                if closing {
                    self.engine.handle_readable(qp);
                }
                true
            }
            Receive::WouldBlock => false,
            Receive::Blocked => connection.pause(&mut self.engine, now),
            Receive::Closed => {
                connection.ended = true;
                true
            }
        }
    }

    /// Marks the recently active sockets as readable, so that the next round tries them.
    fn retry_hot(&mut self) {
        for qp in self.connections.hot() {
            self.engine.handle_readable(qp);
        }
        self.datagrams.retry_hot();
    }

    /// Carries out the engine's outputs.
    fn run_outputs(&mut self) {
        while let Some(output) = self.engine.poll_output() {
            match output {
                Output::Event { session, event } => {
                    if let Event::SrqUnfair { srq, qp, taken, of_last, .. } = &event
                        && let Some(held_back) = self.unfair.count(Instant::now())
                    {
                        tracing::info!(
                            %session, %srq, %qp, taken, of_last, held_back, "unfair share of an SRQ"
                        );
                    }
                    self.clients.send_event(session, &event, &mut self.connections);
                }
                Output::NotifyCq(cq) => self.clients.notify(cq.id(), &mut self.connections),
                Output::ShutdownWrite(qp) => self.connections.shutdown(qp),
                Output::FinalFpdu { qp, bytes } => self.connections.send_last(qp, &bytes),
                Output::Close { qp, reset } => self.connections.close(qp, reset),
                Output::Copy(job) => {
                    let now = clock::now();
                    let answer = self.copy_queues.submit(job, now);
                    self.copied(answer, now);
                }
                Output::SendDatagram { from, to, packet } => {
                    self.datagrams.send(from, to, &packet);
                }
                Output::InError(qp) => {
                    if let Some(ticket) = self.moving_to_error.remove(&qp) {
                        self.answer(ticket);
                    }
                }
                Output::ReadAgain(qp) => {
                    if self.connections.read_again(qp) {
                        self.engine.handle_readable(qp);
                    }
                }
                Output::Warning { session, text } => {
                    // Clients can cause any number of warnings. Most are not logged.
                    if let Some(held_back) = self.warnings.count(Instant::now()) {
                        tracing::warn!(%session, held_back, "{text}");
                    }
                }
                Output::Notification(notification) => {
                    self.report(Report::Notification(notification));
                }
                Output::Broadcast(request) => {
                    self.report(Report::Broadcast { worker: self.number, request });
                }
            }
        }
    }

    /// Passes results of copy jobs to the engine, and reports them if a ticket waits for them.
    fn copied(&mut self, answers: impl IntoIterator<Item = Answer>, now: Time) {
        for (copier, job, result) in answers {
            self.engine.handle_copied(&copier, job, result, now);
            if copier.is_watched() {
                self.report(Report::Copied);
            }
        }
    }

    /// Polls the queues of copy jobs. Returns true if anything was done.
    fn poll_copies(&mut self, now: Time) -> bool {
        if !self.copy_queues.is_busy() {
            return false;
        }
        let polled = self.copy_queues.poll(now);
        self.copied(polled.answers, now);
        for (session, fault) in polled.faults {
            self.report_misbehaviour(session, format!("its copy queue: {fault}"));
        }
        if polled.worked {
            self.run_outputs();
        }
        polled.worked
    }

    /// Reports a session that cannot be served and must end.
    fn report_misbehaviour(&self, session: SessionId, why: String) {
        self.report(Report::Notification(Notification::Misbehaved { session, why }));
    }

    /// Answers a ticket that may take several rounds.
    fn answer(&self, ticket: Ticket) {
        self.report(Report::Answered { worker: self.number as usize, ticket });
    }

    fn report(&self, report: Report) {
        // The receiver lives until all threads have ended.
        let _ = self.reports.send(report);
        // Fails only if the waker has fired already.
        let _ = self.control.wake();
    }

    // --- Commands ----------------------------------------------------------------------------

    /// Runs at least `at_least` commands, and more until [`COMMAND_TIME`] has passed. Publishes the
    /// last ticket.
    fn run_commands(&mut self, now: Time, at_least: usize) {
        self.backlogged = false;
        if self.inbox.is_empty() {
            return;
        }
        let mut last = None;
        let mut carried = 0;
        while let Ok(TicketedCommand { ticket, command }) = self.inbox.try_recv() {
            match (&command, ticket) {
                // Detaching takes several rounds and has its own report.
                (Command::Detach(session), Some(ticket)) => {
                    self.detaching.insert(*session, ticket);
                }
                // May take several rounds too.
                (Command::ToError { qp, .. }, Some(ticket)) => {
                    self.moving_to_error.insert(*qp, ticket);
                }
                _ => last = ticket.or(last),
            }
            let before = self.engine.qp_count();
            self.run_command(command, now);
            self.unload(before);
            carried += 1;
            if carried >= at_least
                && carried % COMMANDS_PER_CLOCK_READ == 0
                && clock::now().since(now) >= COMMAND_TIME
            {
                self.backlogged = !self.inbox.is_empty();
                break;
            }
        }
        // Sockets and descriptors must be closed before the ticket that removes them is done.
        self.run_outputs();
        if let Some(Ticket(number)) = last {
            self.shared.carried_out.store(number, Ordering::Release);
            let _ = self.control.wake();
        }
    }

    /// Subtracts the QPs that have ended from the load. `before` is the earlier QP count.
    fn unload(&self, before: usize) {
        let gone = before.saturating_sub(self.engine.qp_count());
        // A worker has fewer than 2^32 QPs.
        self.shared.load.fetch_sub(gone as u32, Ordering::Relaxed);
    }

    /// Ends some QPs of detached sessions, and reports each session that is gone.
    fn end_sessions(&mut self, begun: Time) {
        while self.engine.is_ending() {
            let now = clock::now();
            let before = self.engine.qp_count();
            let ended = self.engine.poll_session_end(now);
            self.unload(before);
            self.run_outputs();
            if let Some(session) = ended {
                self.clients.detach(session);
                self.connections.remove_session(session);
                let left = self.copy_queues.remove(session);
                self.copied(left, now);
                self.run_outputs();
                if let Some(ticket) = self.detaching.remove(&session) {
                    self.answer(ticket);
                }
            }
            if now.since(begun) >= ROUND && !self.stopping {
                break;
            }
        }
    }

    fn run_command(&mut self, command: Command, now: Time) {
        match command {
            Command::Engine(command) => self.engine.handle_command(command, now),
            Command::Attach { session, user, scanner, eventfd, events } => {
                self.engine.attach_session(session, user, scanner, now);
                self.clients.attach(session, events);
                if let Err(e) = self.connections.add_bell(session, eventfd) {
                    self.report_misbehaviour(session, format!("its eventfd cannot be polled: {e}"));
                }
            }
            // `end_sessions` does the rest.
            Command::Detach(session) => self.engine.close_session(session, now),
            Command::RegisterCq { cq, session, channel } => {
                self.clients.register_cq(cq, session, channel);
            }
            Command::UnregisterCq(cq) => self.clients.unregister_cq(cq),
            Command::AddCopyQueue { copier, queue } => self.copy_queues.add(copier, queue),
            Command::AttachTcp { end, stream } => {
                let qp = end.config.qp;
                let added = self.connections.add(qp, stream);
                self.engine.attach_tcp(end, now);
                if let Err(e) = added {
                    if let Some(held_back) = self.unpolled.count(Instant::now()) {
                        tracing::warn!(%qp, held_back, "cannot poll the QP's connection: {e}");
                    }
                    let abort = EngineCommand::Disconnect(qp, DisconnectMode::Abort);
                    self.engine.handle_command(abort, now);
                }
            }
            // Closes the stream if the QP already has one or has ended.
            Command::LinkTcp { qp, negotiated, peer, stream } => {
                if self.engine.is_unlinked(qp) {
                    let added = self.connections.add(qp, stream);
                    self.engine.link_tcp(qp, *negotiated, peer, now);
                    if let Err(e) = added {
                        let why = format!("cannot poll its connection: {e}");
                        self.engine.handle_command(EngineCommand::Unlink(qp, why), now);
                    }
                }
            }
            Command::Destroy(qp) => {
                self.take_turn_now(qp, now);
                self.engine.destroy(qp, now);
            }
            Command::ToError { qp, expects_stream } => {
                self.take_turn_now(qp, now);
                self.engine.move_to_error(qp, expects_stream, now);
            }
            Command::ReadAll(qp) => {
                for _ in 0..MAX_READS {
                    // Handles bytes that were read earlier.
                    self.take_turn_now(qp, now);
                    if self.engine.is_stopped(qp) || !self.receive(qp, now) {
                        break;
                    }
                    // The events of a message precede that of the end of its connection.
                    self.run_outputs();
                }
            }
            Command::AddDatagramSocket { socket, at } => {
                let fd = socket.as_raw_fd();
                let number = self.datagrams.add(socket, at);
                if let Err(e) = self.connections.add_datagrams(number, fd) {
                    tracing::warn!("cannot receive datagrams at {at}: {e}");
                }
            }
            Command::RemoveDatagramSocket(at) => {
                if let Some((number, _socket)) = self.datagrams.remove(at) {
                    self.connections.remove_datagrams(number);
                }
            }
            Command::SendDatagram { from, to, packet } => self.datagrams.send(from, to, &packet),
            Command::Answer => {}
            Command::Stop => self.stopping = true,
        }
    }

    /// Detaches all sessions and ends their remaining QPs.
    fn end(&mut self, now: Time) {
        for session in self.clients.sessions() {
            self.run_command(Command::Detach(session), now);
        }
        self.end_sessions(now);
    }

    // --- Waiting -----------------------------------------------------------------------------

    /// Polls for readiness, unless the last poll was less than [`POLL_EVERY`] ago.
    fn poll_sockets(&mut self, now: Time) {
        if now.since(self.polled) >= POLL_EVERY {
            self.poll(Some(Duration::ZERO));
            self.handle_ready(now);
        }
    }

    /// Sets short time slices while other threads compete for this CPU, so that woken threads run
    /// at once.
    fn adjust_slice(&mut self, now: Time) {
        let short_slices = self.waiter.is_contended(now);
        if short_slices != self.short_slices {
            self.short_slices = short_slices;
            if let Err(error) = set_short_slices(short_slices) {
                tracing::debug!(%error, "cannot change the time slice of a worker");
            }
        }
    }

    /// Sleeps until a socket, a client, the control thread or a deadline needs the worker.
    fn sleep(&mut self, now: Time) {
        self.connections.cool();
        self.datagrams.cool();
        self.adjust_slice(now);
        // A readable UDP socket counts as work, because epoll reports its edge only once.
        if self.engine.has_work() || self.datagrams.has_some() || !self.engine.prepare_sleep() {
            return;
        }
        // From here on, a library that completes a job rings the doorbell. The polls below find
        // jobs completed before.
        self.copy_queues.wake_all();
        for _ in 0..self.copy_queues.rounds() {
            if self.poll_copies(now) {
                return;
            }
        }
        let timeout = self.engine.poll_timeout().map(|at| at.since(now));
        let precise = self.engine.poll_precise_timeout().is_some();
        let inbox = &self.inbox;
        self.shared.holds.store(self.engine.may_hold_data(), Ordering::Relaxed);
        if !self.shared.parker.park(|| inbox.is_empty()) {
            return;
        }
        match timeout.filter(|_| precise) {
            Some(timeout) => self.poll_precisely(timeout),
            None => self.poll(timeout),
        }
        self.shared.parker.unpark();
        // Pairs with `Workers::watch`.
        if self.shared.watched.load(Ordering::Relaxed) {
            self.shared.watched.store(false, Ordering::Release);
            // Fails only if the waker has fired already.
            let _ = self.control.wake();
        }
        let now = clock::now();
        // Run all commands queued during the sleep, because some may have been acknowledged.
        self.run_commands(now, self.inbox.len());
        self.waiter.progress(now);
        self.handle_ready(now);
    }

    fn poll(&mut self, timeout: Option<Duration>) {
        match self.poll.poll(&mut self.events, timeout) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => self.events.clear(),
            // The epoll descriptor and the buffer are valid, so no other error is possible.
            Err(e) => panic!("epoll: {e}"),
        }
    }

    /// Polls like [`poll`](Self::poll), which rounds the timeout up to milliseconds. Returns so
    /// early that the worker can poll until the deadline.
    fn poll_precisely(&mut self, timeout: Duration) {
        let early = timeout.checked_sub(POLL_AHEAD).unwrap_or(timeout);
        let limit =
            Timespec { tv_sec: early.as_secs() as i64, tv_nsec: early.subsec_nanos().into() };
        let mut descriptors = [PollFd::new(self.poll.registry(), PollFlags::IN)];
        // An error, such as a signal, only ends the wait early.
        let _ = rustix::event::poll(&mut descriptors, Some(&limit));
        self.poll(Some(Duration::ZERO));
    }

    /// Passes readiness events to the engine and the sockets.
    fn handle_ready(&mut self, now: Time) {
        self.polled = now;
        let events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        for event in &events {
            let token = event.token();
            if token == WAKER {
                continue;
            }
            match self.connections.polled(token) {
                Some(Polled::Connection(connection)) => {
                    if event.is_writable() && std::mem::take(&mut connection.blocked) {
                        self.engine.handle_writable(connection.qp);
                    }
                    let closing = event.is_error() || event.is_read_closed();
                    connection.closing |= closing;
                    if closing && connection.paused {
                        connection.pause(&mut self.engine, now);
                    }
                    if (event.is_readable() || closing)
                        && let Some(qp) = self.connections.wanted(token)
                    {
                        self.engine.handle_readable(qp);
                    }
                }
                Some(Polled::Bell { session, .. }) => self.engine.handle_doorbell(*session, now),
                Some(Polled::Datagrams { number, .. }) => self.datagrams.handle_readable(*number),
                Some(Polled::Sender { .. }) => self.connections.flush_sender(token),
                // Removed since the poll.
                None => {}
            }
        }
        self.events = events;
    }
}

/// Aborts the process if a worker panics: its state is suspect, and other threads rely on it.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Maximum number of readiness events per poll.
const EVENTS: usize = 256;
/// Returns the length of a round if `users` users have sessions. `shared` is true if several of
/// them have turns.
fn round_length(shared: bool, users: usize) -> Duration {
    match users {
        _ if shared => SHORT_ROUND,
        0 | 1 => ROUND,
        _ => MIDDLE_ROUND,
    }
}

/// Length of a round, which ends with the turn in progress.
const ROUND: Duration = Duration::from_micros(100);
/// Length of a round while several users have sessions. Another user's program, or the worker that
/// serves it, may wait for this CPU, and the worker yields between rounds.
const MIDDLE_ROUND: Duration = Duration::from_micros(10);
/// Length of a round while several users have turns, because each waits for the others.
const SHORT_ROUND: Duration = Duration::from_micros(5);
/// Maximum number of datagrams read per round, normally and while several users have turns.
const DATAGRAMS: u32 = 32;
const FEW_DATAGRAMS: u32 = 4;
/// Maximum time for commands between two rounds, and number of commands between two clock reads.
const COMMAND_TIME: Duration = Duration::from_micros(200);
const COMMANDS_PER_CLOCK_READ: usize = 4;
/// Maximum number of reads for [`Command::ReadAll`].
const MAX_READS: u32 = 4;
/// Maximum number of log lines of one kind that clients cause, per [`WARN_EVERY`].
const WARNINGS: u32 = 5;
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Spins between two tries of the active sockets. Each try is a system call.
const SPINS_PER_TRY: u32 = 16;
/// Time before the deadline of an emulated link from which the worker polls instead of sleeping, at
/// least the default timer slack of a thread and the time to wake up.
const POLL_AHEAD: Duration = Duration::from_micros(100);
/// Interval between polls for readiness while there is work.
const POLL_EVERY: Duration = Duration::from_micros(20);

#[cfg(test)]
mod tests {
    use super::*;

    /// Commands and doorbells wait for the end of a round.
    #[test]
    fn rounds_are_shorter_with_several_users() {
        let alone = round_length(false, 1);
        assert_eq!(alone, round_length(false, 0));
        assert!(alone <= Duration::from_micros(200));
        assert!(round_length(false, 2) <= alone / 5);
        for users in 0..4 {
            assert!(round_length(true, users) <= round_length(false, 2));
        }
    }
}
