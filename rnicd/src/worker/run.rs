//! The life of a worker thread.
//!
//! One round: commands, doorbells, some turns of QPs (sending and receiving), deadlines, and what
//! the engine wants carried out; rounds are short, so that nobody waits long for any of it. After a
//! round without work it spins a little, yields a little, and sleeps (by the same `Waiter` as in
//! the client); while it waits it tries the sockets that were active lately before it asks the
//! kernel about all of them. A sleep ends with a look at the commands before anything else, because
//! the control thread may have answered for the sleeper.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use mio::{Events, Poll, Waker};
use rnic_core::abi::control::Event;
use rnic_core::engine::{
    Engine, EngineOptions, Notification, Output, PeerLimits, Receive, Transmit, Work,
};
use rnic_core::shm::io::send_pieces;
use rnic_core::shm::wait::{Step, Waiter, cpus};
use rnic_core::stream::startup::Negotiated;
use rnic_core::types::{QpId, SessionId, Time};
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};

use super::clients::Clients;
use super::command::{Command, TicketedCommand};
use super::connections::{Connections, Polled, WAKER};
use super::copy_queues::{Answer, CopyQueues};
use super::datagrams::DatagramSockets;
use crate::clock;
use crate::log::RateLimitedLog;
use crate::privilege::set_short_slices;
use crate::socket::Socket;

use super::{ConnectedEnd, Report, Ticket, WorkerOptions, WorkerShared};

/// One worker, on its own thread.
pub(super) struct Worker {
    number: u32,
    engine: Engine,
    connections: Connections,
    clients: Clients,
    copy_queues: CopyQueues,
    datagrams: DatagramSockets,
    waiter: Waiter,
    /// It has short slices, because somebody computes on its CPU.
    crowded: bool,
    poll: Poll,
    events: Events,
    /// When the kernel was last asked what is ready.
    polled: Time,
    inbox: Receiver<TicketedCommand>,
    shared: Arc<WorkerShared>,
    control: Arc<Waker>,
    reports: Sender<Report>,
    stopping: bool,
    /// Commands are left that could not be carried out with the last ones.
    behind: bool,
    /// Who waits for the end of which session.
    detaching: HashMap<SessionId, Ticket>,
    /// Log lines that clients can bring about as often as they like.
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
            crowded: false,
            poll,
            events: Events::with_capacity(EVENTS),
            polled: Time(0),
            inbox,
            shared,
            control,
            reports,
            stopping: false,
            behind: false,
            detaching: HashMap::new(),
            warnings: RateLimitedLog::new(WARNINGS, WARN_EVERY),
            unfair: RateLimitedLog::new(WARNINGS, WARN_EVERY),
            unpolled: RateLimitedLog::new(WARNINGS, WARN_EVERY),
        })
    }

    /// Works until it is told to stop.
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
                self.look_around(now);
                if self.engine.users() > 1 {
                    let now = clock::now();
                    self.mind_the_crowd(now);
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
                // What this worker has just sent may be for another QP of its own: a look takes
                // less than a yield.
                Step::Yield if idle_rounds == 1 && self.connections.several_hot() => {
                    self.retry_hot();
                }
                Step::Yield => {
                    self.retry_hot();
                    self.look_around(now);
                    std::thread::yield_now();
                }
                Step::Sleep => self.sleep(now),
            }
        }
    }

    /// Some of what there is to do, as long as commands and doorbells can wait for it; whether
    /// there was anything.
    fn round(&mut self, now: Time) -> bool {
        let mut worked = self.engine.poll_doorbells(now);
        if self.datagrams.has_some() {
            let most = if self.engine.is_shared() { FEW_DATAGRAMS } else { DATAGRAMS };
            let management = &self.shared.management;
            // Fails only if the control thread is being woken already.
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
            self.end_some(now);
            worked = true;
        }
        self.carry_out();
        worked
    }

    /// Whether a command waits: then a round is cut short, so that whoever waits for the
    /// acknowledgement gets it soon. With more commands than can be obeyed at once they take turns
    /// with rounds as they are.
    fn interrupted(&self) -> bool {
        !self.behind && !self.inbox.is_empty()
    }

    /// Serves QPs in their turns until nobody is ready, or the round ends: by the work done, as the
    /// engine counts it, or by time, where what is done takes longer than counted.
    fn serve(&mut self, begun: Time) -> bool {
        let before = self.engine.turns();
        let round = round_of(self.engine.is_shared(), self.engine.users());
        let (mut now, mut worked) = (begun, false);
        while let Some(work) = self.engine.poll_work(now) {
            match work {
                Work::Transmit(qp) => self.transmit(qp, now),
                Work::TurnTaken => {}
                Work::Receive(qp) => {
                    worked |= self.receive(qp, now);
                    // That a connection stands is told before anything completes that came behind.
                    self.carry_out();
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

    fn transmit(&mut self, qp: QpId, now: Time) {
        // The engine closes a connection by an output, so one without a socket is about to go.
        if let Some(connection) = self.connections.of_qp(qp) {
            let emss = connection.emss(now);
            let stream = &connection.stream;
            let sent =
                self.engine.transmit(qp, now, emss, |batch| send_pieces(stream, batch.pieces()));
            connection.blocked = sent == Transmit::Blocked;
        }
    }

    /// Reads a connection once; whether anything came.
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

    /// Has the connections that were active lately tried once more.
    fn retry_hot(&mut self) {
        for qp in self.connections.hot() {
            self.engine.handle_readable(qp);
        }
        self.datagrams.retry_hot();
    }

    /// Carries out what the engine wants.
    fn carry_out(&mut self) {
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
                    self.clients.tell(session, &event, &mut self.connections);
                }
                Output::NotifyCq(cq) => self.clients.notify(cq.id(), &mut self.connections),
                Output::ShutdownWrite(qp) => self.connections.shutdown(qp),
                Output::FinalTerminate { qp, bytes } => self.connections.send_last(qp, &bytes),
                Output::Close { qp, reset } => self.connections.close(qp, reset),
                Output::Copy(job) => {
                    let now = clock::now();
                    let answer = self.copy_queues.submit(job, now);
                    self.copied(answer, now);
                }
                Output::SendDatagram { from, to, packet } => {
                    self.datagrams.send(from, to, &packet);
                }
                Output::ReadAgain(qp) => {
                    if self.connections.read_again(qp) {
                        self.engine.handle_readable(qp);
                    }
                }
                Output::Warning { session, text } => {
                    // As many as clients bring about: most go without a line.
                    if let Some(held_back) = self.warnings.count(Instant::now()) {
                        tracing::warn!(%session, held_back, "{text}");
                    }
                }
                Output::Notification(notification) => {
                    self.report(Report::Engine { worker: self.number, notification });
                }
            }
        }
    }

    /// Passes results of copy jobs to the engine, and reports them if a revocation waits.
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
            self.misbehaved(session, format!("its queue of copies: {fault}"));
        }
        if polled.worked {
            self.carry_out();
        }
        polled.worked
    }

    /// A session cannot be served as it should be, and is to end.
    fn misbehaved(&self, session: SessionId, why: String) {
        let notification = Notification::Misbehaved { session, why };
        self.report(Report::Engine { worker: self.number, notification });
    }

    fn report(&self, report: Report) {
        // The receiver lives until all threads have ended.
        let _ = self.reports.send(report);
        // As with the ticket's wake below: this fails only if it rings already.
        let _ = self.control.wake();
    }

    // --- Commands ----------------------------------------------------------------------------

    /// Carries out commands and says which: at least so many, then as long as rounds can wait.
    fn run_commands(&mut self, now: Time, at_least: usize) {
        self.behind = false;
        if self.inbox.is_empty() {
            return;
        }
        let mut last = None;
        let mut carried = 0;
        while let Ok(TicketedCommand { ticket, command }) = self.inbox.try_recv() {
            match (&command, ticket) {
                // That takes its time: it is answered for by itself.
                (Command::Detach(session), Some(ticket)) => {
                    self.detaching.insert(*session, ticket);
                }
                _ => last = ticket.or(last),
            }
            let before = self.engine.qp_count();
            self.carry(command, now);
            self.unload(before);
            carried += 1;
            if carried >= at_least
                && carried % COMMANDS_PER_LOOK == 0
                && clock::now().since(now) >= OBEY
            {
                self.behind = !self.inbox.is_empty();
                break;
            }
        }
        // Sockets and descriptors of what went must be gone before anybody is told that it is.
        self.carry_out();
        if let Some(Ticket(number)) = last {
            self.shared.carried_out.store(number, Ordering::Release);
            let _ = self.control.wake();
        }
    }

    /// There were so many QPs before, and may be fewer now.
    fn unload(&self, before: usize) {
        let gone = before.saturating_sub(self.engine.qp_count());
        // A count of QPs of one worker fits.
        self.shared.load.fetch_sub(gone as u32, Ordering::Relaxed);
    }

    /// Ends some QPs of sessions that are over, and says so when a session is gone.
    fn end_some(&mut self, begun: Time) {
        while self.engine.is_ending() {
            let now = clock::now();
            let before = self.engine.qp_count();
            let ended = self.engine.poll_session_end(now);
            self.unload(before);
            self.carry_out();
            if let Some(session) = ended {
                self.clients.detach(session);
                self.connections.remove_session(session);
                let left = self.copy_queues.remove(session);
                self.copied(left, now);
                self.carry_out();
                if let Some(ticket) = self.detaching.remove(&session) {
                    self.report(Report::Gone { worker: self.number as usize, ticket });
                }
            }
            if now.since(begun) >= ROUND && !self.stopping {
                break;
            }
        }
    }

    fn carry(&mut self, command: Command, now: Time) {
        match command {
            Command::Attach { session, user, scanner, eventfd, events } => {
                self.engine.attach_session(session, user, scanner, now);
                self.clients.attach(session, events);
                if let Err(e) = self.connections.add_bell(session, eventfd) {
                    self.misbehaved(session, format!("its eventfd cannot be polled: {e}"));
                }
            }
            // The rest is done in rounds.
            Command::Detach(session) => self.engine.close_session(session, now),
            Command::RegisterCq { cq, session, channel } => {
                self.clients.register_cq(cq, session, channel);
            }
            Command::UnregisterCq(cq) => self.clients.unregister_cq(cq),
            Command::InstallStag(entry) => self.engine.install_stag(entry),
            Command::RevokeStag(stag) => self.engine.revoke_stag(stag),
            Command::AddWindow(window) => self.engine.add_window(window),
            Command::RemoveWindow(window) => self.engine.remove_window(&window),
            Command::ChangeStags(change) => self.engine.change_stags(&change),
            Command::StagsChanged(qp) => self.engine.handle_stags_changed(qp, now),
            Command::AddCopyQueue { copier, queue } => self.copy_queues.add(copier, queue),
            Command::SpaceFreed(cq) => self.engine.handle_cq_space(&cq, now),
            Command::ReceivesPosted(srq) => self.engine.handle_receives_posted(&srq, now),
            Command::AttachTcp { end, stream } => {
                let ConnectedEnd { config, negotiated, addresses } = end;
                let qp = config.qp;
                let added = self.connections.add(qp, stream);
                self.engine.attach_tcp(config, negotiated, addresses, now);
                if let Err(e) = added {
                    if let Some(held_back) = self.unpolled.count(Instant::now()) {
                        tracing::warn!(%qp, held_back, "its connection cannot be polled: {e}");
                    }
                    self.engine.to_error(qp, now);
                }
            }
            Command::AttachDirect { active, passive } => {
                let parts = |end: ConnectedEnd| (end.config, end.negotiated, end.addresses);
                self.engine.attach_direct(parts(active), parts(passive), now);
            }
            Command::AttachInError(config) => self.engine.attach_in_error(config, now),
            Command::AttachWired(config) => self.engine.attach_wired(config, now),
            Command::AddDatagramSocket { socket, at } => {
                let fd = socket.as_raw_fd();
                let number = self.datagrams.add(socket, at);
                if let Err(e) = self.connections.add_datagrams(number, fd) {
                    tracing::warn!("no datagrams are received at {at}: {e}");
                }
            }
            Command::RemoveDatagramSocket { at } => {
                if let Some((number, _socket)) = self.datagrams.remove(at) {
                    self.connections.remove_datagrams(number);
                }
            }
            Command::DatagramPort { qp, port } => self.engine.set_datagram_port(qp, &port),
            Command::SendDatagram { from, to, packet } => self.datagrams.send(from, to, &packet),
            Command::DatagramRules { qp, rules } => self.engine.set_datagram_rules(qp, rules),
            Command::LinkDirect(ends) => self.engine.link_direct(ends, now),
            Command::LinkTcp { qp, negotiated, peer, stream } => {
                self.link_tcp(qp, *negotiated, peer, stream, now);
            }
            Command::Change { qp, change } => self.engine.change_qp(qp, &change, now),
            Command::UnlinkedBecause { qp, why } => self.engine.set_unlinked_because(qp, why),
            Command::Unlink { qp, why } => self.engine.unlink(qp, &why, now),
            Command::Disconnect { qp, mode } => self.engine.disconnect(qp, mode, now),
            Command::ToError(qp) => self.engine.to_error(qp, now),
            Command::AdminDisconnect(qp) => self.engine.admin_disconnect(qp, now),
            Command::SetOptions(options) => self.engine.set_options(options),
            Command::Destroy(qp) => {
                if let Some(Work::Transmit(qp)) = self.engine.take_last_turn(qp, now) {
                    self.transmit(qp, now);
                }
                self.engine.destroy(qp, now);
            }
            Command::Answer => {}
            Command::Stop => self.stopping = true,
        }
    }

    /// Gives a QP that is wired by hand its stream. One that has a stream, or has ended, wants no
    /// other, which is closed.
    fn link_tcp(
        &mut self,
        qp: QpId,
        negotiated: Negotiated,
        peer: PeerLimits,
        stream: Socket,
        now: Time,
    ) {
        if !self.engine.is_unlinked(qp) {
            return;
        }
        let added = self.connections.add(qp, stream);
        self.engine.link_tcp(qp, negotiated, peer, now);
        if let Err(e) = added {
            self.engine.unlink(qp, &format!("its connection cannot be polled: {e}"), now);
        }
    }

    /// Detaches all sessions and ends what is left of their QPs.
    fn end(&mut self, now: Time) {
        for session in self.clients.sessions() {
            self.carry(Command::Detach(session), now);
        }
        self.end_some(now);
    }

    // --- Waiting -----------------------------------------------------------------------------

    /// Asks the kernel what is ready, unless that was a moment ago.
    fn look_around(&mut self, now: Time) {
        if now.since(self.polled) >= LOOK_EVERY {
            self.poll(Some(Duration::ZERO));
            self.handle_ready(now);
        }
    }

    /// Where somebody computes on this CPU, who is woken is to run at once: short slices do that.
    fn mind_the_crowd(&mut self, now: Time) {
        let crowded = self.waiter.is_crowded(now);
        if crowded != self.crowded {
            self.crowded = crowded;
            if let Err(error) = set_short_slices(crowded) {
                tracing::debug!(%error, "the slices of a worker stay as they are");
            }
        }
    }

    /// Sleeps until a socket, a client, the control thread or a deadline wants something.
    fn sleep(&mut self, now: Time) {
        self.connections.cool();
        self.datagrams.cool();
        self.mind_the_crowd(now);
        // Nobody will say again that a socket is readable: it counts as work.
        if self.engine.has_work() || self.datagrams.has_some() || !self.engine.prepare_sleep() {
            return;
        }
        // A library that completes a job from here on rings the doorbell. These polls find jobs
        // that were completed before.
        self.copy_queues.wake_all();
        for _ in 0..self.copy_queues.rounds() {
            if self.poll_copies(now) {
                return;
            }
        }
        let timeout = self.engine.poll_timeout().map(|at| at.since(now));
        let inbox = &self.inbox;
        if !self.shared.parker.park(|| inbox.is_empty()) {
            return;
        }
        self.poll(timeout);
        self.shared.parker.unpark();
        // The other side of `Workers::watch`.
        if self.shared.watched.load(Ordering::Relaxed) {
            self.shared.watched.store(false, Ordering::Release);
            // As with the ticket's wake above: this fails only if it rings already.
            let _ = self.control.wake();
        }
        let now = clock::now();
        // Those that came while this slept were answered for: all of them precede everything else.
        self.run_commands(now, self.inbox.len());
        self.waiter.progress(now);
        self.handle_ready(now);
    }

    fn poll(&mut self, timeout: Option<Duration>) {
        match self.poll.poll(&mut self.events, timeout) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => self.events.clear(),
            // The epoll descriptor and the buffer are ours: nothing else is left to go wrong.
            Err(e) => panic!("epoll: {e}"),
        }
    }

    /// Passes on what the kernel said.
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
                // Removed since the event was collected.
                None => {}
            }
        }
        self.events = events;
    }
}

/// Ends the process if a worker panics: its state is suspect, and others rely on it.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Readiness events taken at once.
const EVENTS: usize = 256;
/// How long a round takes: of users with turns (`shared`) or one of `users` with sessions.
fn round_of(shared: bool, users: usize) -> Duration {
    match users {
        _ if shared => SHORT_ROUND,
        0 | 1 => ROUND,
        _ => MIDDLE_ROUND,
    }
}

/// How long a round takes, with the turn in which it ends.
const ROUND: Duration = Duration::from_micros(100);
/// The same while several users have sessions: a program of another one, or the worker that serves
/// it, may wait for this CPU, and between rounds there is a yield.
const MIDDLE_ROUND: Duration = Duration::from_micros(10);
/// The same while several users have turns: each waits for the other's.
const SHORT_ROUND: Duration = Duration::from_micros(5);
/// Packets with datagrams that are read in a round, and while several users have turns.
const DATAGRAMS: u32 = 32;
const FEW_DATAGRAMS: u32 = 4;
/// How long commands are carried out between two rounds, and how many before the next look at the
/// clock.
const OBEY: Duration = Duration::from_micros(200);
const COMMANDS_PER_LOOK: usize = 4;
/// Log lines of one kind about what clients bring about, in so long.
const WARNINGS: u32 = 5;
const WARN_EVERY: Duration = Duration::from_secs(60);
/// Spins between two tries of the active sockets: a try is a system call.
const SPINS_PER_TRY: u32 = 16;
/// How long what the kernel said about readiness is good while there is work.
const LOOK_EVERY: Duration = Duration::from_micros(20);

#[cfg(test)]
mod tests {
    use super::*;

    /// Commands and doorbells wait for the end of a round, on every worker.
    #[test]
    fn rounds_are_short_and_shorter_in_company() {
        let alone = round_of(false, 1);
        assert_eq!(alone, round_of(false, 0));
        assert!(alone <= Duration::from_micros(200));
        assert!(round_of(false, 2) <= alone / 5);
        for users in 0..4 {
            assert!(round_of(true, users) <= round_of(false, 2));
        }
    }
}
