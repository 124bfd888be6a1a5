//! The control loop.

mod accept;
mod leave;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Interest, Poll, Token, Waker};
use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::{Hello, HelloReply, HelloStatus, MAX_MESSAGE, Refusal};
use rnic_core::types::{SessionId, Time};
use slab::Slab;

use super::addresses::Addresses;
use super::budget::Budgets;
use super::connection::{Connection, End, Incoming, Stage};
use super::greetings::Greetings;
use super::high_water::HighWater;
use super::idle::Idle;
use super::notify::Notifier;
use super::reload::Reloader;
use super::socket::{ControlSocket, SocketError};
use super::turns::Turns;
use crate::clock;
use crate::cm::ConnectionManager;
use crate::config::{Config, Seccomp};
use crate::log::{Level, RateLimitedLogs};
use crate::metrics::Writer;
use crate::privilege::{self, Signals, ThreadKind, check_available, confine};
use crate::reaper::Reaper;
use crate::resource::{
    Capacity, Manager, Outcome, PassedPort, Random, Refused, Response, SessionOpened, options,
};
use crate::tree::{StartTreeError, Tree};
use crate::worker::Workers;

/// Why the daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The control socket could not be taken.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The kernel has no filters of system calls.
    #[error("control.seccomp = {value:?}: this kernel cannot: {error}; set it to \"off\"")]
    NoFilters {
        /// The value as configured.
        value: &'static str,
        /// The system's error.
        error: io::Error,
    },
    /// The tree of the devices could not be made where the configuration says.
    #[error(transparent)]
    Tree(#[from] StartTreeError),
    /// The operating system refused something else.
    #[error("{what}: {error}")]
    System {
        /// The operation that failed, in words.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

/// The daemon, listening. [`Server::run`] makes it work.
pub struct Server {
    poll: Poll,
    socket: Option<ControlSocket>,
    signals: Option<Signals>,
    notifier: Notifier,
    seccomp: Seccomp,
    stop: Stopper,
    manager: Manager,
    reaper: Reaper,
    connections: Slab<Connection>,
    by_session: HashMap<SessionId, usize>,
    /// Connections that may have something to read.
    ready: Turns,
    budgets: Budgets,
    /// The thread's time on a CPU when the last turn ended.
    served: Duration,
    /// Connections without a session.
    greetings: Greetings,
    /// When to look for clients again after descriptors ran out.
    accept_again: Option<Time>,
    /// Clients to whom something is to be sent again, and when.
    again: BTreeSet<usize>,
    again_at: Option<Time>,
    /// Clients that were to blame for their end, or were turned away.
    hostile: u64,
    said: RateLimitedLogs,
    buffer: Box<[u8; MAX_MESSAGE]>,
    /// Reads the configuration again; none without a file.
    reloader: Option<Reloader>,
    stopping: Option<Time>,
    /// Nothing if it waits for clients for ever.
    idle: Option<Idle>,
    metrics: Metrics,
    tree: Option<LiveTree>,
    memory: HighWater,
    /// Nothing if the kernel does not tell of changes.
    addresses: Option<Addresses>,
}

/// The tree of the devices, which follows their counters.
struct LiveTree {
    tree: Tree,
    /// When it is written next.
    due: Time,
    /// It shows what there is, and no worker has done anything since.
    is_still: bool,
}

/// Figures that are written to a file, if the configuration names one.
struct Metrics {
    writer: Writer,
    /// When they are written next.
    due: Time,
}

/// Tells a server from another thread to stop.
#[derive(Clone)]
pub struct Stopper {
    asked: Arc<AtomicBool>,
    waker: Arc<Waker>,
}

impl Stopper {
    /// Asks it to stop in order.
    pub fn stop(&self) {
        self.asked.store(true, Ordering::Release);
        // An eventfd of our own: writing fails only when it rings already.
        let _ = self.waker.wake();
    }
}

/// Whether this kernel has the filters that `control.seccomp` asks for.
pub fn check_filters(seccomp: Seccomp) -> Result<(), StartError> {
    check_available(seccomp).map_err(|error| StartError::NoFilters { value: seccomp.name(), error })
}

impl Server {
    /// Starts the workers of a daemon that serves `socket`. Signals are for a server that is told
    /// by them to stop. Threads are started here, so what they are not to inherit is given up
    /// before.
    pub fn start(
        config: Config,
        socket: ControlSocket,
        signals: Option<Signals>,
        notifier: Notifier,
    ) -> Result<Self, StartError> {
        let seccomp = config.control.seccomp;
        check_filters(seccomp)?;
        let capacity = Capacity::of_this_process(&config);
        rnic_core::shm::fault::install().map_err(system("cannot install the fault handler"))?;
        let poll = Poll::new().map_err(system("cannot make a poll"))?;
        let registry = poll.registry();
        let registered = || -> io::Result<Arc<Waker>> {
            let interest = Interest::READABLE;
            registry.register(&mut SourceFd(&socket.as_fd().as_raw_fd()), LISTENER, interest)?;
            if let Some(signals) = &signals {
                registry.register(
                    &mut SourceFd(&signals.as_fd().as_raw_fd()),
                    SIGNALS,
                    interest,
                )?;
            }
            Ok(Arc::new(Waker::new(registry, WAKER)?))
        };
        let waker = registered().map_err(system("cannot register with the poll"))?;
        let clone = registry.try_clone().map_err(system("cannot share the poll"))?;
        let options = options::cm(&config, &capacity);
        let cm = ConnectionManager::new(clone, FIRST_CM.0, options);
        let options = options::workers(&config, capacity.workers);
        let workers = Workers::start(capacity.workers, &options, waker.clone())
            .map_err(system("cannot start workers"))?;
        let reaper =
            Reaper::start(waker.clone(), seccomp).map_err(system("cannot start the reaper"))?;
        let random = Random::from_system().map_err(system("cannot read random numbers"))?;
        let writer = Writer::start("rnicd-metrics", seccomp)
            .map_err(system("cannot start the writer of metrics"))?;
        let metrics = Metrics { writer, due: clock::now() };
        // Before the manager reads them for the first time.
        let addresses = follow_addresses(&poll, &waker, seccomp);
        let (tree_at, path) = (config.device.tree.clone(), socket.path());
        let mut manager =
            Manager::new(Arc::new(config), capacity, workers, cm, reaper.clone(), random);
        let tree = Tree::start(&tree_at, path, &manager.tree_facts(), seccomp)?;
        manager.set_tree(tree.as_ref().map(Tree::path));
        let tree = tree.map(|tree| LiveTree { tree, due: clock::now(), is_still: false });
        Ok(Server {
            poll,
            socket: Some(socket),
            signals,
            notifier,
            seccomp,
            stop: Stopper { asked: Arc::default(), waker },
            manager,
            reaper,
            connections: Slab::new(),
            by_session: HashMap::new(),
            ready: Turns::default(),
            budgets: Budgets::default(),
            served: Duration::ZERO,
            greetings: Greetings::default(),
            accept_again: None,
            again: BTreeSet::new(),
            again_at: None,
            hostile: 0,
            said: RateLimitedLogs::new(10, Duration::from_secs(60)),
            buffer: Box::new([0; MAX_MESSAGE]),
            reloader: None,
            stopping: None,
            idle: None,
            metrics,
            tree,
            memory: HighWater::default(),
            addresses,
        })
    }

    /// Takes the port of other daemons (`wired.port`) before the first client. A daemon that is not
    /// told to takes it with the first QP of the RoCE device.
    pub fn take_wired_port(&mut self, passed: Vec<PassedPort>) {
        self.manager.take_wired_port(passed);
    }

    /// Has it read this file again when SIGHUP comes, which ends it otherwise.
    pub fn reload_from(&mut self, file: PathBuf, level: Option<Level>) -> Result<(), StartError> {
        let reloader = Reloader::start(file, level, self.stop.waker.clone(), self.seccomp)
            .map_err(system("cannot start the thread that reads the configuration"))?;
        self.reloader = Some(reloader);
        Ok(())
    }

    /// Has it stop in order once it has been without a client for so long.
    pub fn exit_when_idle(&mut self, most: Duration) {
        self.idle = Some(Idle::new(most));
    }

    /// Something to stop it with.
    pub fn stopper(&self) -> Stopper {
        self.stop.clone()
    }

    /// Works until told to stop. Confines the thread that calls it to what that takes, for good.
    pub fn run(mut self) -> io::Result<()> {
        confine(ThreadKind::Control, self.seccomp)?;
        self.served = clock::on_cpu();
        // Not before: whoever reads this may look whether it is confined.
        if let Some(socket) = &self.socket {
            for warning in crate::config::warnings(self.manager.config()) {
                tracing::warn!("configuration: {warning}");
            }
            tracing::info!(
                socket = %socket.path().display(),
                pid = std::process::id(),
                workers = self.manager.workers(),
                loopback = self.manager.config().engine.loopback.name(),
                "listening"
            );
        }
        self.notifier.ready(SERVING);
        let mut events = mio::Events::with_capacity(256);
        self.handle_idleness(clock::now());
        while !self.has_stopped() {
            let patience = self.patience();
            match self.poll.poll(&mut events, patience) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            }
            let now = clock::now();
            for event in &events {
                self.handle_ready(event.token(), event, now)?;
            }
            if self.stop.asked.load(Ordering::Acquire) {
                self.begin_stop(now);
            }
            self.handle_timeouts(now);
            if self.notifier.asks(now) {
                self.manager.ask_workers();
            }
            self.follow_addresses();
            self.manager.settle();
            self.go_on_reloading(now);
            if self.manager.poll_alive() {
                self.notifier.alive(now);
            }
            self.serve(now);
            self.handle_idleness(now);
        }
        tracing::info!(hostile = self.hostile, "stopped");
        self.manager.stop();
        Ok(())
    }

    fn has_stopped(&self) -> bool {
        // Sessions that a worker does not let go in time are left to the end of the process.
        self.stopping.is_some_and(|by| self.manager.sessions() == 0 || clock::now() >= by)
    }

    /// How long the poll may sleep.
    fn patience(&mut self) -> Option<Duration> {
        if !self.ready.is_empty() || self.manager.has_outdated_rights() {
            return Some(Duration::ZERO);
        }
        let greeting = self.greetings.first().map(|(deadline, _)| deadline);
        let cm = self.manager.connections().next_timeout();
        let dial = self.manager.next_dial();
        let port = self.manager.next_port_retry();
        let metrics = self.manager.config().metrics.file.as_ref().map(|_| self.metrics.due);
        let watchdog = self.notifier.next_question();
        let next = greeting
            .into_iter()
            .chain(cm)
            .chain(dial)
            .chain(port)
            .chain(self.accept_again)
            .chain(self.again_at)
            .chain(self.stopping)
            .chain(self.idle.as_ref().and_then(Idle::deadline))
            .chain(metrics)
            .chain(self.memory.due())
            .chain(self.tree.as_ref().filter(|live| !live.is_still).map(|live| live.due))
            .chain(self.ready.next_wake())
            .chain(watchdog);
        let next = next.min()?;
        // Rounded up, so that nothing is due just after waking for nothing.
        Some(next.since(clock::now()) + Duration::from_millis(1))
    }

    fn handle_ready(
        &mut self,
        token: Token,
        event: &mio::event::Event,
        now: Time,
    ) -> io::Result<()> {
        match token {
            LISTENER => self.accept(now),
            WAKER => {}
            SIGNALS => self.handle_signals(now)?,
            ADDRESSES => {
                if let Some(addresses) = &self.addresses {
                    addresses.handle_readable();
                }
            }
            Token(n) if n >= FIRST_CM.0 => {
                let (readable, writable) = (event.is_readable(), event.is_writable());
                self.manager.connections().handle_ready(token, readable, writable, now);
            }
            Token(n) => {
                let n = n - FIRST_CLIENT;
                // The client may be another than when the event was collected: everything here
                // looks before it believes.
                self.handle_client(n / SOURCES, n % SOURCES, event.is_writable(), now);
            }
        }
        Ok(())
    }

    fn handle_client(&mut self, key: usize, source: usize, writable: bool, now: Time) {
        let Some(client) = self.connections.get_mut(key) else { return };
        match source {
            SOCKET => {
                client.readable = true;
                // A send that the system has refused makes the socket writable once more, so that
                // the next one would be refused at once, and so on: time tells when to try again.
                if writable && !client.is_to_be_tried_again() {
                    self.flush(key, now);
                }
                self.enqueue(key);
            }
            PROCESS => {
                if client.peer.has_exited() {
                    self.end(key, End::Exited, now);
                }
            }
            _ => {
                if let Some(events) = &client.events {
                    // A channel that nobody reads any more is the client's loss.
                    let _ = events.flush();
                }
            }
        }
    }

    /// Sends what a client was owed.
    fn flush(&mut self, key: usize, now: Time) {
        let Some(client) = self.connections.get_mut(key) else { return };
        match client.flush() {
            Ok(()) => self.sent(key, now),
            Err(error) => self.end(key, ended_by(error), now),
        }
    }

    /// Something was sent to a client, or waits: if nothing will tell when it can be sent, time
    /// does.
    fn sent(&mut self, key: usize, now: Time) {
        let Some(client) = self.connections.get(key) else { return };
        if client.is_to_be_tried_again() {
            self.again.insert(key);
            self.again_at.get_or_insert(now.after(SEND_PAUSE));
        } else {
            // What it asked while it was owed something may be there.
            self.enqueue(key);
        }
    }

    fn handle_signals(&mut self, now: Time) -> io::Result<()> {
        let Some(signals) = &self.signals else { return Ok(()) };
        let mut stop = false;
        while let Some(signal) = signals.next()? {
            match signal.number {
                libc::SIGHUP if self.reloader.is_some() => {
                    self.reloader.iter_mut().for_each(Reloader::ask);
                }
                // Without a file it means what it means to other programs: the terminal is gone.
                libc::SIGHUP if signals.ignores_hangup() => {}
                number => {
                    tracing::info!(signal = number, "stopping");
                    stop = true;
                }
            }
        }
        if stop {
            match self.stopping {
                None => self.begin_stop(now),
                // Asked twice: whoever asks does not want to wait.
                Some(_) => self.stopping = Some(now),
            }
        }
        Ok(())
    }

    /// Begins a reload that was asked for, and goes on with one that is under way.
    fn go_on_reloading(&mut self, now: Time) {
        let Some(reloader) = &mut self.reloader else { return };
        if self.stopping.is_some() {
            return;
        }
        if reloader.begin(&self.manager) {
            self.notifier.reloading();
        }
        let Some(reloaded) = reloader.poll(&mut self.manager) else { return };
        self.metrics.due = now;
        if let Some(addresses) = &self.addresses {
            // The GID table follows `device.addresses`.
            addresses.read_again();
        }
        let status =
            reloaded.map_or_else(|why| format!("{SERVING}; {why}"), |()| SERVING.to_owned());
        self.notifier.ready(&status);
        // One that was asked for meanwhile begins now: nothing else would wake this thread for it.
        if reloader.begin(&self.manager) {
            self.notifier.reloading();
        }
    }

    /// Gives up path and lock, and the tree before them: who takes the place finds nothing there.
    fn leave_place(&mut self) {
        self.tree = None;
        if let Some(socket) = self.socket.take() {
            let _ = self.poll.registry().deregister(&mut SourceFd(&socket.as_fd().as_raw_fd()));
        }
    }

    /// Gives up its place before anything else, then ends every session.
    fn begin_stop(&mut self, now: Time) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(now.after(STOP_DEADLINE));
        self.notifier.stopping(&format!("ending {} sessions", self.manager.sessions()));
        self.leave_place();
        self.accept_again = None;
        let keys: Vec<usize> = self.connections.iter().map(|(key, _)| key).collect();
        for key in keys {
            self.end(key, End::Stopping, now);
        }
    }

    fn handle_timeouts(&mut self, now: Time) {
        if self.manager.connections().next_timeout().is_some_and(|at| at <= now) {
            self.manager.connections().handle_timeout(now);
        }
        if self.manager.next_dial().is_some_and(|at| at <= now) {
            self.manager.dial_due(now);
        }
        self.manager.retry_wired_port(now);
        if self.again_at.is_some_and(|at| at <= now) {
            self.again_at = None;
            for key in std::mem::take(&mut self.again) {
                self.flush(key, now);
            }
        }
        if self.accept_again.is_some_and(|at| at <= now) {
            self.accept_again = None;
            self.accept(now);
        }
        let metrics = &self.manager.config().metrics;
        if self.metrics.due <= now
            && let Some(file) = &metrics.file
        {
            self.metrics.due = now.after(metrics.interval);
            self.metrics.writer.write(vec![(file.clone(), self.manager.metrics())]);
        }
        while let Some((deadline, key)) = self.greetings.first()
            && deadline <= now
        {
            self.end(key, End::Silent, now);
        }
        self.show_counters(now);
        let objects = self.manager.objects();
        self.memory.observe(objects, now);
        if self.memory.is_over(objects, now) {
            self.reaper.return_memory_later(privilege::own_user());
        }
    }

    /// Brings the GID table and its files up to date after addresses have been read again.
    fn follow_addresses(&mut self) {
        let Some(found) = self.addresses.as_ref().and_then(Addresses::poll) else { return };
        self.manager.addresses_read(found);
        if let Some(live) = &mut self.tree {
            live.tree.set_gids(&self.manager.tree_facts());
            live.is_still = false;
        }
    }

    /// Writes the counters to the tree, as long as workers change them.
    fn show_counters(&mut self, now: Time) {
        let Some(live) = &mut self.tree else { return };
        live.is_still &= self.manager.workers_still_sleep();
        if live.due <= now && !live.is_still {
            live.due = now.after(TREE_INTERVAL);
            // Before the counters are looked at: who changes them later says so.
            live.is_still = self.manager.watch_workers();
            live.tree.show(self.manager.sums());
        }
    }

    fn enqueue(&mut self, key: usize) {
        if let Some(client) = self.connections.get_mut(key)
            && !client.queued
        {
            client.queued = true;
            self.ready.add(client.peer.uid, key);
        }
    }

    /// Answers what is due, then gives users their turns, for a bounded time: whoever is not
    /// reached is the first in the next round.
    fn serve(&mut self, now: Time) {
        self.settle_clients(now);
        self.ready.wake(now);
        let began = clock::now();
        for _ in 0..self.ready.users() {
            let Some(user) = self.ready.begin() else { return };
            // He may have had his time already, by clients that were taken in.
            if let Some(until) = self.rest(user, now) {
                self.ready.rest(user, until);
                continue;
            }
            let (turn, had) = (clock::now(), clock::on_cpu());
            let mut over = turn;
            while let Some(key) = self.ready.client(user) {
                self.serve_client(key, now);
                over = clock::now();
                if over.since(turn) >= TURN {
                    break;
                }
            }
            // Nobody pays for what others did to this CPU meanwhile, or for a daemon that was
            // stopped.
            let (led, took) = (had.saturating_sub(self.served), clock::on_cpu() - had);
            self.served = had + took;
            // That requests are heard of costs as well, and mostly for whom there are many.
            self.budgets.spend(user, took + led.min(took), now);
            match self.rest(user, now) {
                Some(until) => self.ready.rest(user, until),
                None => self.ready.end(user),
            }
            if over.since(began) >= ROUND {
                return;
            }
        }
    }

    /// Until when a user is not served, because others have sessions and he has had his time.
    fn rest(&self, user: u32, now: Time) -> Option<Time> {
        self.budgets.rests_until(user, now).filter(|_| self.manager.has_others(user))
    }

    /// Carries out one request of a client, which then stands behind others of its user.
    fn serve_client(&mut self, key: usize, now: Time) {
        let Some(client) = self.connections.get_mut(key) else { return };
        client.queued = false;
        let (uid, session) = (client.peer.uid, client.session());
        let may_pass = || self.manager.may_pass(uid, session);
        match client.receive(&mut self.buffer, &self.reaper, may_pass) {
            Incoming::Nothing => return,
            Incoming::Hello(hello) => self.greet(key, hello, now),
            Incoming::Request(request, descriptor) => {
                let Some(session) = client.session() else { return };
                let id = request.id;
                // Before the answer, which may be there at once.
                client.stage = Stage::AwaitWorkers { session, request: id };
                match self.manager.request(session, request.body, descriptor, now) {
                    Ok(Outcome::Later) => {}
                    Ok(Outcome::Now(granted)) => self.answer(session, Ok(*granted), now),
                    Err(refused) => self.answer(session, Err(refused), now),
                }
                self.settle_clients(now);
            }
            Incoming::End(end) => self.end(key, end, now),
        }
        self.enqueue(key);
    }

    /// Passes on answers that the workers were waited for, and ends sessions that misbehaved.
    fn settle_clients(&mut self, now: Time) {
        while let Some((session, granted)) = self.manager.poll_answer() {
            self.answer(session, Ok(granted), now);
        }
        while let Some((session, why)) = self.manager.poll_ended() {
            if let Some(key) = self.by_session.get(&session) {
                self.end(*key, End::Misbehaved(why), now);
            }
        }
    }

    fn answer(&mut self, session: SessionId, result: Result<Response, Refused>, now: Time) {
        let Some(&key) = self.by_session.get(&session) else { return };
        let Some(client) = self.connections.get_mut(key) else { return };
        let Stage::AwaitWorkers { request, .. } = client.stage else { return };
        client.stage = Stage::AwaitRequest(session);
        match client.reply(request, result) {
            Ok(()) => self.sent(key, now),
            Err(error) => self.end(key, ended_by(error), now),
        }
    }

    fn greet(&mut self, key: usize, hello: Hello, now: Time) {
        let Some(client) = self.connections.get_mut(key) else { return };
        let opened = if self.stopping.is_some() {
            Err(HelloStatus::Stopping)
        } else if !(hello.min_version..=hello.max_version).contains(&ABI_VERSION) {
            Err(HelloStatus::Version)
        } else {
            self.manager.open_session(&client.peer)
        };
        let (session, SessionOpened { reply, descriptors, events }) = match opened {
            Ok(opened) => opened,
            Err(status) => {
                tracing::debug!(pid = client.peer.pid, ?status, "turned away");
                // It is turned away whether or not it hears why.
                let _ = client.welcome(turned_away(status), Vec::new());
                self.remove(key);
                return;
            }
        };
        tracing::debug!(
            %session,
            pid = client.peer.pid,
            uid = client.peer.uid,
            command = client.peer.command,
            "session opened"
        );
        if let Stage::AwaitHello { deadline } = client.stage {
            self.greetings.remove(deadline, key, client.peer.uid);
        }
        client.stage = Stage::AwaitRequest(session);
        let channel = events.as_fd().as_raw_fd();
        client.events = Some(events);
        self.by_session.insert(session, key);
        let token = Token(FIRST_CLIENT + key * SOURCES + EVENTS);
        let watched =
            self.poll.registry().register(&mut SourceFd(&channel), token, Interest::WRITABLE);
        let sent = watched.and_then(|()| client.welcome(reply, descriptors));
        match sent {
            Ok(()) => self.sent(key, now),
            Err(error) => self.end(key, ended_by(error), now),
        }
    }

    /// Ends a client and whatever it owned.
    fn end(&mut self, key: usize, end: End, now: Time) {
        let Some(client) = self.connections.get_mut(key) else { return };
        let (pid, uid, session) = (client.peer.pid, client.peer.uid, client.session());
        let why = end.to_string();
        if let Some(live) = &mut self.tree {
            live.is_still = false;
        }
        if end.is_hostile() {
            let diagnosis_id = self.manager.misbehaved(session, &why, now);
            let refusal = match &end {
                End::Malformed(why) => Some(Refusal::Malformed { why: why.clone() }),
                End::Crowded(refusal) => Some(refusal.clone()),
                _ => None,
            };
            if let Some(refusal) = refusal
                && session.is_some()
            {
                client.complain(refusal, diagnosis_id);
            }
            self.hostile += 1;
            if let Some(suppressed) = self.said.count(end.kind(), Instant::now()) {
                let command = &client.peer.command;
                let reason = end;
                tracing::warn!(pid, uid, command, suppressed, why = diagnosis_id, %reason, "client ended");
            }
        } else {
            tracing::debug!(pid, uid, reason = %end, "client ended");
        }
        self.remove(key);
        if let Some(session) = session {
            self.manager.note_end(session, &why);
            self.manager.close_session(session, now);
        }
    }

    fn remove(&mut self, key: usize) {
        let Some(client) = self.connections.try_remove(key) else { return };
        if client.queued {
            self.ready.remove(client.peer.uid, key);
        }
        match client.stage {
            Stage::AwaitHello { deadline } => {
                self.greetings.remove(deadline, key, client.peer.uid);
            }
            Stage::AwaitRequest(session) | Stage::AwaitWorkers { session, .. } => {
                self.by_session.remove(&session);
            }
        }
        let events = client.events.as_ref().map(|e| e.as_fd().as_raw_fd());
        let sources = [client.as_fd().as_raw_fd(), client.peer.process.as_raw_fd()];
        for fd in sources.into_iter().chain(events) {
            // All are registered; workers may hold the event channel a little longer.
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
        }
        client.close(&self.reaper);
    }
}

fn turned_away(status: HelloStatus) -> HelloReply {
    HelloReply {
        status: status as u32,
        version: ABI_VERSION,
        workers: 0,
        session: SessionId(0),
        arena_len: 0,
        features: 0,
    }
}

/// Follows the addresses of this host, if the kernel tells of changes.
fn follow_addresses(poll: &Poll, waker: &Arc<Waker>, seccomp: Seccomp) -> Option<Addresses> {
    let followed = Addresses::follow(waker.clone(), seccomp).and_then(|addresses| {
        let fd = addresses.as_fd().as_raw_fd();
        poll.registry().register(&mut SourceFd(&fd), ADDRESSES, Interest::READABLE)?;
        Ok(addresses)
    });
    let report = |error: &io::Error| {
        tracing::warn!(%error, "changes of the host's addresses are not followed (AF_NETLINK)");
    };
    followed.inspect_err(report).ok()
}

/// Why a client ends to which nothing can be sent.
fn ended_by(error: io::Error) -> End {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => End::Closed,
        _ => End::Failed(error),
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> StartError {
    move |error| StartError::System { what, error }
}

/// Status for a service manager.
const SERVING: &str = "serving";

const LISTENER: Token = Token(0);
const SIGNALS: Token = Token(1);
const WAKER: Token = Token(2);
const ADDRESSES: Token = Token(3);
/// Clients have [`SOURCES`] tokens each from here on.
const FIRST_CLIENT: usize = 16;
const SOURCES: usize = 3;
const SOCKET: usize = 0;
const PROCESS: usize = 1;
const EVENTS: usize = 2;
/// The connection manager's tokens; no slab of clients grows that long.
const FIRST_CM: Token = Token(1 << 32);

/// How long a client may take for its Hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// How long to wait before something is sent again that the system refused to take.
const SEND_PAUSE: Duration = Duration::from_millis(10);
/// How long one user's requests are carried out before others have their turn.
const TURN: Duration = Duration::from_millis(1);
/// How long turns are given before the poll is asked for who else is there.
const ROUND: Duration = Duration::from_millis(4);
/// Time between two writings of the tree's counters.
const TREE_INTERVAL: Duration = Duration::from_secs(1);
/// How long sessions may take to end when the daemon stops.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
