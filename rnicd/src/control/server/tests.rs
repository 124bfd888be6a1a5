//! Tests of individual steps of the control loop, which does not run here. The tests set the time.

use std::os::fd::OwnedFd;
use std::path::Path;

use rnic_abi::abi::control::{Request, RequestBody};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with, socketpair,
};
use tempfile::TempDir;

use super::*;
use crate::config::tests::{AT_START, OTHER_VALUES, other_values};
use crate::privilege::Peer;
use crate::resource::Reload;

/// A daemon without a running loop.
struct Rig {
    folder: TempDir,
    server: Server,
}

impl Rig {
    fn new(configuration: &str) -> Self {
        let folder = tempfile::tempdir().unwrap_or_else(|e| panic!("{e}"));
        let text = format!("[engine]\nworkers = 1\n[control]\nseccomp = \"off\"\n{configuration}");
        let config = Config::parse(Path::new("t"), &text).unwrap_or_else(|e| panic!("{e}"));
        let socket = ControlSocket::open(Some(&folder.path().join("s")), &config.control);
        let socket = socket.unwrap_or_else(|e| panic!("{e}"));
        let server = Server::start(config, socket, None, Notifier::default());
        Rig { folder, server: server.unwrap_or_else(|e| panic!("{e}")) }
    }

    /// A client that has connected and waits for the accept.
    fn client(&self) -> OwnedFd {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap_or_else(|e| panic!("{e}"));
        let address = SocketAddrUnix::new(self.folder.path().join("s"));
        let connected = address.and_then(|address| connect(&socket, &address));
        connected.unwrap_or_else(|e| panic!("{e}"));
        socket
    }

    /// An accepted client of this user.
    fn client_of(&mut self, uid: u32) -> OwnedFd {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap_or_else(|e| panic!("{e}"));
        let peer = Peer::of(ours.as_fd()).unwrap_or_else(|e| panic!("{e}"));
        self.server.add(ours, Peer { uid, ..peer }, clock::now().after(HELLO_DEADLINE));
        theirs
    }

    /// A client of this user with a session.
    fn session_of(&mut self, uid: u32) -> OwnedFd {
        let client = self.client_of(uid);
        assert!(send(&client, &hello().to_bytes(), SendFlags::empty()).is_ok());
        self.serve(clock::now());
        client
    }

    fn clients(&self) -> usize {
        self.server.connections.len()
    }

    /// Gives turns until no client waits. A round may end early on a busy machine, because its time
    /// is limited.
    fn serve(&mut self, now: Time) {
        self.server.serve(now);
        while !self.server.ready.is_empty() {
            self.server.serve(now);
        }
    }

    /// Ends the threads of the daemon.
    fn stop(self) {
        self.server.manager.stop();
    }
}

#[test]
fn a_client_without_a_hello_is_disconnected() {
    let mut rig = Rig::new("");
    let silent = rig.client();
    let speaks = rig.client();
    let now = clock::now();
    rig.server.accept(now);
    assert!(send(&speaks, &hello().to_bytes(), SendFlags::empty()).is_ok());
    rig.serve(now);
    assert_eq!((rig.clients(), rig.server.manager.sessions()), (2, 1));
    // The loop sleeps no longer than the deadline.
    assert!(rig.server.ready.is_empty());
    let patience = rig.server.patience();
    assert!(patience.is_some_and(|most| most <= Duration::from_secs(10)), "{patience:?}");
    let at = |seconds| now.after(Duration::from_secs(seconds));
    rig.server.handle_timeouts(at(1));
    assert_eq!(rig.clients(), 2, "before the deadline");
    rig.server.handle_timeouts(at(10));
    assert_eq!((rig.clients(), rig.server.manager.sessions()), (1, 1));
    let heard = recv(&silent, &mut [0; 64][..], RecvFlags::DONTWAIT).map(|(_, n)| n);
    assert_eq!(heard, Ok(0), "end of stream");
    rig.stop();
}

#[test]
fn metrics_are_written_at_their_interval() {
    let file = tempfile::NamedTempFile::new().unwrap_or_else(|e| panic!("{e}"));
    let mut rig = Rig::new(&format!("[metrics]\nfile = {:?}\ninterval = \"7s\"\n", file.path()));
    let now = rig.server.metrics.due;
    for seconds in [0, 6, 7, 13, 14] {
        let at = now.after(Duration::from_secs(seconds));
        rig.server.handle_timeouts(at);
        let due = now.after(Duration::from_secs(seconds / 7 * 7 + 7));
        assert_eq!(rig.server.metrics.due, due, "{seconds}");
    }
    rig.stop();
}

#[test]
fn idle_daemon_ends_at_its_timeout() {
    let mut rig = Rig::new("");
    rig.server.exit_when_idle(Duration::from_secs(60));
    let start = clock::now();
    let at = |seconds| start.after(Duration::from_secs(seconds));
    rig.server.handle_idleness(start);
    let patience = rig.server.patience();
    assert!(patience.is_some_and(|most| most <= Duration::from_secs(61)), "{patience:?}");
    // A client stops the timer, which starts again at the client's end.
    let client = rig.session_of(7);
    rig.server.handle_idleness(at(59));
    rig.server.handle_idleness(at(600));
    assert!(
        rig.server.idle.as_ref().is_some_and(|idle| idle.deadline().is_none())
            && rig.server.socket.is_some()
    );
    drop(client);
    let keys: Vec<usize> = rig.server.connections.iter().map(|(key, _)| key).collect();
    keys.into_iter().for_each(|key| rig.server.end(key, End::Closed, at(600)));
    while rig.server.manager.sessions() > 0 {
        rig.server.manager.settle();
    }
    rig.server.handle_idleness(at(601));
    rig.server.handle_idleness(at(660));
    assert!(rig.server.socket.is_some());
    rig.server.handle_idleness(at(661));
    assert!(rig.server.stopping.is_some() && rig.server.socket.is_none());
    assert_eq!(std::fs::read_dir(rig.folder.path()).map(Iterator::count).ok(), Some(0));
    rig.stop();
}

/// More clients connect than one call accepts.
#[test]
fn ending_daemon_serves_queued_clients() {
    let mut rig = Rig::new("");
    rig.server.exit_when_idle(Duration::ZERO);
    let clients: Vec<OwnedFd> = (0..20).map(|_| rig.client()).collect();
    let now = clock::now();
    rig.server.handle_idleness(now);
    // New clients are refused, but path and lock still belong to this daemon.
    let path = rig.folder.path().join("s");
    let refused = std::os::unix::net::UnixStream::connect(&path).map_err(|e| e.kind());
    assert!(refused.is_err_and(|kind| kind != std::io::ErrorKind::NotFound));
    let late = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .unwrap_or_else(|e| panic!("{e}"));
    let address = SocketAddrUnix::new(&path).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(connect(&late, &address), Err(rustix::io::Errno::CONNREFUSED));
    while rig.server.socket.is_some() {
        rig.server.handle_timeouts(clock::now());
        rig.server.handle_idleness(clock::now());
    }
    assert!(!path.exists() && rig.server.stopping.is_none());
    for client in &clients {
        assert!(send(client, &hello().to_bytes(), SendFlags::empty()).is_ok());
    }
    while rig.server.manager.sessions() < clients.len() {
        rig.serve(clock::now());
    }
    rig.server.handle_idleness(clock::now());
    assert!(rig.server.stopping.is_none(), "clients from the queue are still served");
    drop(clients);
    let keys: Vec<usize> = rig.server.connections.iter().map(|(key, _)| key).collect();
    keys.into_iter().for_each(|key| rig.server.end(key, End::Closed, clock::now()));
    while rig.server.manager.sessions() > 0 {
        rig.server.manager.settle();
    }
    rig.server.handle_idleness(clock::now());
    assert!(rig.server.stopping.is_some(), "ends with the last client");
    rig.stop();
}

#[test]
fn clients_wait_for_the_turns_of_their_users() {
    let mut rig = Rig::new("");
    let clients = [1, 1, 2, 1].map(|uid| rig.client_of(uid));
    assert_eq!(rig.server.ready.users(), 2);
    // Clients that leave while queued leave no entry.
    let keys: Vec<usize> = rig.server.connections.iter().map(|(key, _)| key).collect();
    for key in keys {
        rig.server.remove(key);
    }
    rig.serve(clock::now());
    assert!(rig.server.ready.is_empty());
    drop(clients);
    rig.stop();
}

#[test]
fn reload_applies_or_reports_each_key() {
    let mut rig = Rig::new("");
    let wanted = Config::parse(Path::new("t"), &other_values()).unwrap_or_else(|e| panic!("{e}"));
    let before = rig.server.manager.config().clone();
    let keys = |changes: &[crate::config::Change]| -> Vec<String> {
        changes.iter().map(|change| change.key.clone()).collect()
    };
    let reload = Reload::prepare(wanted, &before);
    let kept = keys(&reload.kept);
    let changed = keys(&reload.changed);
    drop(rig.server.manager.reload(reload));
    assert_eq!(kept, AT_START);
    let others = OTHER_VALUES.iter().map(|row| row.0).filter(|key| !AT_START.contains(key));
    assert_eq!(changed, others.collect::<Vec<_>>());
    let in_force = crate::config::changes(&before, rig.server.manager.config());
    assert_eq!(keys(&in_force), changed);
    rig.stop();
}

fn hello() -> Hello {
    Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 }
}

fn question() -> Vec<u8> {
    let question = Request { id: 1, body: RequestBody::QueryDevice };
    postcard::to_stdvec(&question).unwrap_or_else(|e| panic!("{e}"))
}

/// Fills the socket with requests before each round, all at the time `now`. Returns the CPU time
/// until the user rests, or `None` if it does not rest within `most`.
fn served(rig: &mut Rig, client: &OwnedFd, most: Duration, now: Time) -> Option<Duration> {
    let question = question();
    let mut buffer = [0; 4096];
    let mut took = Duration::ZERO;
    while took < most {
        while recv(client, &mut buffer[..], RecvFlags::DONTWAIT).is_ok() {}
        while send(client, &question, SendFlags::DONTWAIT).is_ok() {}
        for key in 0..rig.clients() {
            rig.server.handle_client(key, SOCKET, true, now);
        }
        let had = clock::on_cpu();
        rig.server.serve(now);
        took += clock::on_cpu() - had;
        if rig.server.ready.is_empty() && rig.server.ready.next_wake().is_some() {
            return Some(took);
        }
    }
    None
}

#[test]
fn busy_user_rests_if_others_have_sessions() {
    let mut rig = Rig::new("");
    let now = clock::now();
    let asks = rig.session_of(1);
    let most = Duration::from_millis(200);
    assert_eq!(served(&mut rig, &asks, most, now), None, "alone");
    let other = rig.session_of(2);
    let now = now.after(Duration::from_secs(1));
    let took = served(&mut rig, &asks, most, now).expect("it rests");
    assert!(took < Duration::from_millis(50), "{took:?}");
    // Other users still have their turns.
    let question = question();
    while recv(&other, &mut [0; 4096][..], RecvFlags::DONTWAIT).is_ok() {}
    assert!(send(&other, &question, SendFlags::DONTWAIT).is_ok());
    rig.server.handle_client(1, SOCKET, true, now);
    rig.serve(now);
    assert!(recv(&other, &mut [0; 4096][..], RecvFlags::DONTWAIT).is_ok());
    rig.stop();
}

#[test]
fn accepts_are_charged_to_their_user() {
    let mut rig = Rig::new("");
    let me = rustix::process::getuid().as_raw();
    let other = rig.session_of(me + 1);
    let mine = rig.client_of(me);
    let deadline = Instant::now() + Duration::from_secs(180);
    let now = clock::now();
    while rig.server.rest(me, now).is_none() {
        assert!(Instant::now() < deadline, "accepts are not charged");
        let client = rig.client();
        rig.server.accept(now);
        // The third client, in slot 2.
        rig.server.remove(2);
        drop(client);
    }
    // The Hello of a resting user waits. Other users are served.
    let mut buffer = [0; 4096];
    while recv(&other, &mut buffer[..], RecvFlags::DONTWAIT).is_ok() {}
    assert!(send(&other, &question(), SendFlags::DONTWAIT).is_ok());
    assert!(send(&mine, &hello().to_bytes(), SendFlags::DONTWAIT).is_ok());
    for key in 0..2 {
        rig.server.handle_client(key, SOCKET, true, now);
    }
    rig.serve(now);
    assert!(recv(&other, &mut buffer[..], RecvFlags::DONTWAIT).is_ok());
    assert!(recv(&mine, &mut buffer[..], RecvFlags::DONTWAIT).is_err());
    rig.serve(now.after(Duration::from_secs(1)));
    assert!(recv(&mine, &mut buffer[..], RecvFlags::DONTWAIT).is_ok());
    rig.stop();
}

/// The reaper may have to close a rejected client, so accepts wait for it.
#[test]
fn no_accept_while_many_closes_are_pending() {
    let mut rig = Rig::new("[limits]\nclosing = 8\n");
    rig.server.reaper = Reaper::without_threads();
    for _ in 0..rig.server.manager.most_closing() {
        let memfd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC);
        rig.server.reaper.close_memfd(1000, memfd.unwrap_or_else(|e| panic!("{e}")));
    }
    let _client = rig.client();
    let now = clock::now();
    rig.server.accept(now);
    assert_eq!(rig.clients(), 0);
    assert!(rig.server.accept_again.is_some_and(|at| at > now));
    rig.server.reaper = Reaper::without_threads();
    rig.server.handle_timeouts(now.after(Duration::from_secs(1)));
    assert_eq!(rig.clients(), 1);
    rig.stop();
}
