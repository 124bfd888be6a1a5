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
use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::{Hello, HelloReply, HelloStatus, MAX_MESSAGE, Refusal};
use rnic_abi::types::{SessionId, Time};
use slab::Slab;

use super::addresses::Addresses;
use super::budget::Budgets;
use super::connection::{Connection, End, Incoming, Stage};
use super::high_water::HighWater;
use super::idle::Idle;
use super::notify::Notifier;
use super::pending_hellos::PendingHellos;
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
    Capacity, DeviceError, Manager, Outcome, PassedPort, Random, Refused, Response, SessionEnd,
    SessionOpened, options,
};
use crate::tree::{StartTreeError, Tree};
use crate::worker::Workers;

/// Reasons why the daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The control socket could not be opened.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The kernel does not support seccomp filters.
    #[error("control.seccomp = {value:?}: this kernel lacks seccomp: {error}; set it to \"off\"")]
    NoFilters {
        /// The value as configured.
        value: &'static str,
        /// The system's error.
        error: io::Error,
    },
    /// A configured device could not be created.
    #[error("wired.devices: {0}")]
    Device(#[from] DeviceError),
    /// The tree of the devices could not be created at the configured path.
    #[error(transparent)]
    Tree(#[from] StartTreeError),
    /// Another operation failed.
    #[error("{what}: {error}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

/// The daemon, ready to serve clients with [`Server::run`].
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
    /// Connections that may have input.
    ready: Turns,
    budgets: Budgets,
    /// CPU time of the thread at the end of the last turn.
    served: Duration,
    /// Connections that have not sent their Hello.
    pending_hellos: PendingHellos,
    /// Time of the next accept that no event announces.
    accept_again: Option<Time>,
    /// Clients with pending packets that need another attempt, and the time of that attempt.
    retry_clients: BTreeSet<usize>,
    retry_at: Option<Time>,
    /// Clients that violated the protocol or a limit.
    hostile: u64,
    log_limits: RateLimitedLogs,
    buffer: Box<[u8; MAX_MESSAGE]>,
    /// Reads the configuration again; `None` without a file.
    reloader: Option<Reloader>,
    stopping: Option<Time>,
    /// `None` if the daemon waits for clients forever.
    idle: Option<Idle>,
    metrics: Metrics,
    tree: Option<LiveTree>,
    memory: HighWater,
    /// `None` if changes cannot be followed.
    addresses: Option<Addresses>,
}

/// The device tree, and the schedule of its updates.
struct LiveTree {
    tree: Tree,
    /// Time of the next update.
    due: Time,
    /// The tree is up to date, and no worker has run since the last update.
    is_still: bool,
}

/// Metrics in a file, if the configuration has one.
struct Metrics {
    writer: Writer,
    /// Time of the next update.
    due: Time,
}

/// Stops a server from another thread.
#[derive(Clone)]
pub struct Stopper {
    asked: Arc<AtomicBool>,
    waker: Arc<Waker>,
}

impl Stopper {
    /// Requests a graceful stop.
    pub fn stop(&self) {
        self.asked.store(true, Ordering::Release);
        // Our own eventfd: fails only if the wake-up is already pending.
        let _ = self.waker.wake();
    }
}

/// Checks that this kernel supports the filters of `control.seccomp`.
pub fn check_filters(seccomp: Seccomp) -> Result<(), StartError> {
    check_available(seccomp).map_err(|error| StartError::NoFilters { value: seccomp.name(), error })
}

impl Server {
    /// Starts the workers of a daemon that serves `socket`. `signals` control the server. The
    /// caller must first drop all privileges that the threads started here must not inherit.
    pub fn start(
        config: Config,
        socket: ControlSocket,
        signals: Option<Signals>,
        notifier: Notifier,
    ) -> Result<Self, StartError> {
        let seccomp = config.control.seccomp;
        check_filters(seccomp)?;
        let capacity = Capacity::of_this_process(&config);
        rnic_abi::shm::fault::install().map_err(system("cannot install the fault handler"))?;
        let poll = Poll::new().map_err(system("cannot set up epoll"))?;
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
        let waker = registered().map_err(system("cannot register with epoll"))?;
        let clone = registry.try_clone().map_err(system("cannot share epoll"))?;
        let options = options::cm(&config, &capacity);
        let cm = ConnectionManager::new(clone, FIRST_CM.0, options);
        let options = options::workers(&config, capacity.workers);
        let workers = Workers::start(capacity.workers, &options, waker.clone())
            .map_err(system("cannot start workers"))?;
        let reaper =
            Reaper::start(waker.clone(), seccomp).map_err(system("cannot start the reaper"))?;
        let random = Random::from_system().map_err(system("cannot read random numbers"))?;
        let writer = Writer::start("rnicd-metrics", seccomp)
            .map_err(system("cannot start the metrics writer"))?;
        let metrics = Metrics { writer, due: clock::now() };
        // Before the manager reads the addresses for the first time.
        let addresses = follow_addresses(&poll, &waker, seccomp);
        let tree_at = config.device.tree.clone();
        let path = socket.path();
        let mut manager =
            Manager::new(Arc::new(config), capacity, workers, cm, reaper.clone(), random);
        manager.create_devices()?;
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
            pending_hellos: PendingHellos::default(),
            accept_again: None,
            retry_clients: BTreeSet::new(),
            retry_at: None,
            hostile: 0,
            log_limits: RateLimitedLogs::new(10, Duration::from_secs(60)),
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

    /// Binds the port for other daemons (`wired.port`) before the first client. Without this call
    /// it is bound with the first QP of the RoCE device.
    pub fn take_wired_port(&mut self, passed: Vec<PassedPort>) {
        self.manager.take_wired_port(passed);
    }

    /// Makes SIGHUP reload this file. Without this call, SIGHUP stops the daemon unless it was
    /// started with SIGHUP ignored.
    pub fn reload_from(&mut self, file: PathBuf, level: Option<Level>) -> Result<(), StartError> {
        let reloader = Reloader::start(file, level, self.stop.waker.clone(), self.seccomp)
            .map_err(system("cannot start the thread that reads the configuration"))?;
        self.reloader = Some(reloader);
        Ok(())
    }

    /// Makes the server stop gracefully when it has had no client for `most`.
    pub fn exit_when_idle(&mut self, most: Duration) {
        self.idle = Some(Idle::new(most));
    }

    /// Returns a handle that stops the server.
    pub fn stopper(&self) -> Stopper {
        self.stop.clone()
    }

    /// Serves clients until the server is stopped. Confines the calling thread permanently.
    pub fn run(mut self) -> io::Result<()> {
        confine(ThreadKind::Control, self.seccomp)?;
        self.served = clock::on_cpu();
        // Logged after `confine`: readers of this line may check that the thread is confined.
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
            if self.notifier.is_keepalive_due(now) {
                self.manager.probe_workers();
            }
            self.follow_addresses();
            self.manager.settle();
            self.continue_reload(now);
            if self.manager.poll_alive() {
                self.notifier.send_keepalive(now);
            }
            self.serve(now);
            self.handle_idleness(now);
        }
        tracing::info!(hostile = self.hostile, "stopped");
        self.manager.stop();
        Ok(())
    }

    fn has_stopped(&self) -> bool {
        // Sessions that a worker does not release in time end with the process.
        self.stopping.is_some_and(|by| self.manager.sessions() == 0 || clock::now() >= by)
    }

    /// Returns how long the poll may sleep.
    fn patience(&mut self) -> Option<Duration> {
        if !self.ready.is_empty() || self.manager.has_outdated_rights() {
            return Some(Duration::ZERO);
        }
        let greeting = self.pending_hellos.first().map(|(deadline, _)| deadline);
        let cm = self.manager.connections().next_timeout();
        let dial = self.manager.next_dial();
        let port = self.manager.next_port_retry();
        let fault = self.manager.next_fault();
        let metrics = self.manager.config().metrics.file.as_ref().map(|_| self.metrics.due);
        let watchdog = self.notifier.next_keepalive();
        let next = greeting
            .into_iter()
            .chain(cm)
            .chain(dial)
            .chain(port)
            .chain(fault)
            .chain(self.accept_again)
            .chain(self.retry_at)
            .chain(self.stopping)
            .chain(self.idle.as_ref().and_then(Idle::deadline))
            .chain(metrics)
            .chain(self.memory.due())
            .chain(self.tree.as_ref().filter(|live| !live.is_still).map(|live| live.due))
            .chain(self.ready.next_wake())
            .chain(watchdog);
        let next = next.min()?;
        // Rounded up, so the thread does not wake up just before the deadline.
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
                let readable = event.is_readable();
                let writable = event.is_writable();
                self.manager.connections().handle_ready(token, readable, writable, now);
            }
            Token(n) => {
                let n = n - FIRST_CLIENT;
                // The slot may have been reused since the event was collected. All handlers check
                // the state again.
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
                // The kernel reports the socket as writable after each send that it has refused, so
                // sending here would loop. A timer determines the next attempt.
                if writable && !client.needs_retry() {
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
                    // If the client does not read its channel, it loses events.
                    let _ = events.flush();
                }
            }
        }
    }

    /// Sends pending packets of a client.
    fn flush(&mut self, key: usize, now: Time) {
        let Some(client) = self.connections.get_mut(key) else { return };
        match client.flush() {
            Ok(()) => self.sent(key, now),
            Err(error) => self.end(key, ended_by(error), now),
        }
    }

    /// Handles a sent or pending packet. Sets a timer if no event reports when it can be sent.
    fn sent(&mut self, key: usize, now: Time) {
        let Some(client) = self.connections.get(key) else { return };
        if client.needs_retry() {
            self.retry_clients.insert(key);
            self.retry_at.get_or_insert(now.after(SEND_PAUSE));
        } else {
            // A request may have arrived while a reply was pending.
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
                // Without a file, SIGHUP only means that the terminal was closed.
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
                // The second signal: stop without waiting.
                Some(_) => self.stopping = Some(now),
            }
        }
        Ok(())
    }

    /// Begins a requested reload, and continues the one in progress.
    fn continue_reload(&mut self, now: Time) {
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
        // A reload requested during this one begins now. No other event would wake this thread.
        if reloader.begin(&self.manager) {
            self.notifier.reloading();
        }
    }

    /// Removes the tree before the path and lock, so the next daemon finds none of them.
    fn release_path(&mut self) {
        self.tree = None;
        if let Some(socket) = self.socket.take() {
            let _ = self.poll.registry().deregister(&mut SourceFd(&socket.as_fd().as_raw_fd()));
        }
    }

    /// Removes the tree, path and lock, then ends every session.
    fn begin_stop(&mut self, now: Time) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(now.after(STOP_DEADLINE));
        self.notifier.stopping(&format!("ending {} sessions", self.manager.sessions()));
        self.release_path();
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
        self.manager.run_faults(now);
        if self.manager.take_changed_devices() {
            self.update_tree();
        }
        if self.retry_at.is_some_and(|at| at <= now) {
            self.retry_at = None;
            for key in std::mem::take(&mut self.retry_clients) {
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
        while let Some((deadline, key)) = self.pending_hellos.first()
            && deadline <= now
        {
            self.end(key, End::Silent, now);
        }
        self.show_counters(now);
        let objects = self.manager.objects();
        self.memory.observe(objects, now);
        if self.memory.take_due(objects, now) {
            self.reaper.return_memory_later(privilege::own_user());
        }
    }

    /// Updates the GID table and its files after the addresses were read again.
    fn follow_addresses(&mut self) {
        let Some(found) = self.addresses.as_ref().and_then(Addresses::poll) else { return };
        self.manager.addresses_read(found);
        self.update_tree();
    }

    /// Updates devices and GID tables in the tree.
    fn update_tree(&mut self) {
        if let Some(live) = &mut self.tree {
            live.tree.update(&self.manager.tree_facts());
            live.is_still = false;
        }
    }

    /// Writes the counters to the tree if they may have changed.
    fn show_counters(&mut self, now: Time) {
        let Some(live) = &mut self.tree else { return };
        live.is_still &= self.manager.workers_still_sleep();
        if live.due <= now && !live.is_still {
            live.due = now.after(TREE_INTERVAL);
            // Before the counters are read, so that later changes are noticed.
            live.is_still = self.manager.watch_workers();
            live.tree.show(&self.manager.sums());
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

    /// Sends pending replies, then gives users their turns for a bounded time. Users that get no
    /// turn are first in the next round.
    fn serve(&mut self, now: Time) {
        self.settle_clients(now);
        self.ready.wake(now);
        let began = clock::now();
        for _ in 0..self.ready.users() {
            let Some(user) = self.ready.begin() else { return };
            // Accepting clients may have exhausted the user's budget.
            if let Some(until) = self.rest(user, now) {
                self.ready.rest(user, until);
                continue;
            }
            let turn = clock::now();
            let had = clock::on_cpu();
            let mut over = turn;
            while let Some(key) = self.ready.client(user) {
                self.serve_client(key, now);
                over = clock::now();
                if over.since(turn) >= TURN {
                    break;
                }
            }
            // CPU time, not wall time, so a user does not pay for other load on this CPU or for a
            // stopped daemon.
            let led = had.saturating_sub(self.served);
            let took = clock::on_cpu() - had;
            self.served = had + took;
            // Polling takes time too, mostly for users with many requests. So the user is also
            // charged for the time before its turn, up to the duration of the turn.
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

    /// Returns when a user may continue, if its budget is overdrawn and other users have sessions.
    fn rest(&self, user: u32, now: Time) -> Option<Time> {
        self.budgets.rests_until(user, now).filter(|_| self.manager.has_others(user))
    }

    /// Handles one request of a client, then queues the client after the others of its user.
    fn serve_client(&mut self, key: usize, now: Time) {
        let Some(client) = self.connections.get_mut(key) else { return };
        client.queued = false;
        let uid = client.peer.uid;
        let session = client.session();
        let may_pass = || self.manager.may_pass(uid, session);
        match client.receive(&mut self.buffer, &self.reaper, may_pass) {
            Incoming::Nothing => return,
            Incoming::Hello(hello) => self.handle_hello(key, hello, now),
            Incoming::Request(request, descriptor) => {
                let Some(session) = client.session() else { return };
                let id = request.id;
                // Set before the request runs, because it may be answered at once.
                client.stage = Stage::AwaitWorkers { session, request: id };
                let answer = self.manager.request(session, request.body, descriptor, now);
                if self.manager.take_changed_devices() {
                    // Before the reply, after which a script may read the tree.
                    self.update_tree();
                }
                match answer {
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

    /// Sends deferred replies, and ends sessions that misbehave or that a fault rule ends.
    fn settle_clients(&mut self, now: Time) {
        while let Some((session, granted)) = self.manager.poll_answer() {
            self.answer(session, Ok(granted), now);
        }
        while let Some((session, why)) = self.manager.poll_ended() {
            let end = match why {
                SessionEnd::Misbehaved(why) => End::Misbehaved(why),
                SessionEnd::Injected(rule) => End::Injected(rule),
            };
            if let Some(key) = self.by_session.get(&session) {
                self.end(*key, end, now);
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

    fn handle_hello(&mut self, key: usize, hello: Hello, now: Time) {
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
                tracing::debug!(pid = client.peer.pid, ?status, "client rejected");
                // The client is rejected even if the reply cannot be sent.
                let _ = client.welcome(rejection(status), Vec::new());
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
            self.pending_hellos.remove(deadline, key, client.peer.uid);
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

    /// Ends a client and all that it owns.
    fn end(&mut self, key: usize, end: End, now: Time) {
        let Some(client) = self.connections.get_mut(key) else { return };
        let pid = client.peer.pid;
        let uid = client.peer.uid;
        let session = client.session();
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
                client.send_last_refusal(refusal, diagnosis_id);
            }
            self.hostile += 1;
            if let Some(suppressed) = self.log_limits.count(end.kind(), Instant::now()) {
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
                self.pending_hellos.remove(deadline, key, client.peer.uid);
            }
            Stage::AwaitRequest(session) | Stage::AwaitWorkers { session, .. } => {
                self.by_session.remove(&session);
            }
        }
        let events = client.events.as_ref().map(|e| e.as_fd().as_raw_fd());
        let sources = [client.as_fd().as_raw_fd(), client.peer.process.as_raw_fd()];
        for fd in sources.into_iter().chain(events) {
            // All are registered. Workers may keep the event channel open a little longer.
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
        }
        client.close(&self.reaper);
    }
}

fn rejection(status: HelloStatus) -> HelloReply {
    HelloReply {
        status: status as u32,
        version: ABI_VERSION,
        workers: 0,
        session: SessionId(0),
        arena_len: 0,
        features: 0,
    }
}

/// Subscribes to address changes, if the kernel announces them.
fn follow_addresses(poll: &Poll, waker: &Arc<Waker>, seccomp: Seccomp) -> Option<Addresses> {
    let followed = Addresses::follow(waker.clone(), seccomp).and_then(|addresses| {
        let fd = addresses.as_fd().as_raw_fd();
        poll.registry().register(&mut SourceFd(&fd), ADDRESSES, Interest::READABLE)?;
        Ok(addresses)
    });
    let report = |error: &io::Error| {
        tracing::warn!(%error, "cannot follow changes to the host's addresses (AF_NETLINK)");
    };
    followed.inspect_err(report).ok()
}

/// Returns the reason for the end of a client to which a send failed.
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
/// First token of clients, which have [`SOURCES`] tokens each.
const FIRST_CLIENT: usize = 16;
const SOURCES: usize = 3;
const SOCKET: usize = 0;
const PROCESS: usize = 1;
const EVENTS: usize = 2;
/// First token of the connection manager. No slab of clients grows that large.
const FIRST_CM: Token = Token(1 << 32);

/// Time limit for a client's Hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// Pause before another attempt to send a packet that the kernel refused.
const SEND_PAUSE: Duration = Duration::from_millis(10);
/// Maximum duration of one user's turn.
const TURN: Duration = Duration::from_millis(1);
/// Duration of a round of turns, after which the thread polls again.
const ROUND: Duration = Duration::from_millis(4);
/// Minimum time between two updates of the tree's counters.
const TREE_INTERVAL: Duration = Duration::from_secs(1);
/// Time limit for sessions to end when the daemon stops.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
