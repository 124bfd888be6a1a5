//! Connections in start-up: silent or undecided connections of one user do not impede other users.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rnic_tests::target::Target;
use rnic_tests::wire::{self, CRC, Ending, fpdu, tagged};
use rnic_tests::{DEADLINE, Daemon, Process};
use rustix::net::sockopt::set_socket_linger;

/// Users without an entry in any database.
const MALLORY: u32 = 61_001;
const ALICE: u32 = 61_002;

/// Starts a daemon for all users, with this limit on descriptors. Returns `None` if not root.
fn daemon(limits: &str, descriptors: u32) -> Option<Daemon> {
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit("not root: the test cannot act as other users");
        return None;
    }
    rnic_tests::process::raise_descriptor_limit();
    let config =
        format!("[control]\nmode = \"0666\"\n[engine]\nworkers = 1\nloopback = \"tcp\"\n{limits}");
    Some(Daemon::start_limited(&config, &format!("ulimit -n {descriptors}")))
}

/// Starts Mallory's program with `listeners` listeners. Returns it and their addresses.
fn mallory(daemon: &Daemon, listeners: usize) -> (Process, Vec<SocketAddr>) {
    let mut actor = daemon.actor_as(MALLORY, &["ignore", &listeners.to_string()]);
    let address = |_| actor.line_after("listening on ").parse().unwrap();
    let addresses = (0..listeners).map(address).collect();
    (actor, addresses)
}

/// Returns true if the daemon has ended a connection.
fn is_over(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match (&mut &*stream).read(&mut [0; 64]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock,
    }
}

#[test]
fn undecided_requests_leave_descriptors_free() {
    let Some(daemon) = daemon("", 576) else { return };
    // Of 512 descriptors 64 are for connections in start-up, and one user may use half of those.
    let (mut mallory, addresses) = mallory(&daemon, 20);
    let request = wire::request(CRC, 1, b"");
    let mut requests: Vec<TcpStream> = Vec::new();
    for round in 0..1000 {
        if let Some(mut peer) = wire::try_dial(addresses[round % addresses.len()]) {
            wire::send_bytes(&mut peer, &request);
            requests.push(peer);
        }
    }
    let begun = Instant::now();
    while requests.iter().filter(|peer| is_over(peer)).count() < requests.len() - 32 {
        assert!(begun.elapsed() < DEADLINE, "{:?}", daemon.status());
        std::thread::yield_now();
    }
    assert!(daemon.status().startups <= 32, "{:?}", daemon.status());
    // Others can connect to the daemon, listen, connect over TCP and send, even if they are new
    // users.
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    daemon.actor(&["traffic", &address, "1", "20"]).succeed();
    daemon.actor_as(ALICE, &["traffic", &address, "2", "20"]).succeed();
    // The peers of kept connections see the end of the stream when their listeners are destroyed.
    mallory.release();
    mallory.succeed();
    // The daemon waits for these peers to close.
    drop(requests);
    daemon.wait_status("rid of them", |s| s.startups == 0);
    server.release();
    server.succeed();
}

#[test]
fn distant_peers_connect_despite_a_silent_flood() {
    let Some(daemon) = daemon("[limits]\nstartups = 64\n[limits.user]\nstartups = 64\n", 4096)
    else {
        return;
    };
    let (mallory, addresses) = mallory(&daemon, 1);
    let over = AtomicBool::new(false);
    let arrived = AtomicU64::new(0);
    let target = Target::new(&daemon);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut silent = std::collections::VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    if let Some(peer) = wire::try_dial(addresses[0]) {
                        // Avoids a TIME_WAIT socket.
                        let _ = set_socket_linger(&peer, Some(Duration::ZERO));
                        silent.push_back(peer);
                    }
                    if silent.len() > 500 {
                        silent.pop_front();
                    }
                    arrived.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let honest = || {
            let mut peers: Vec<_> =
                (0..26).map(|_| wire::dial(target.listener.local_addr())).collect();
            // Waits for longer than a round trip between distant hosts, and until the flood would
            // have evicted each connection many times.
            let begun = Instant::now();
            let before = arrived.load(Ordering::Relaxed);
            while begun.elapsed() < Duration::from_millis(150)
                || arrived.load(Ordering::Relaxed) < before + 640
            {
                assert!(
                    begun.elapsed() < DEADLINE,
                    "{} have arrived",
                    arrived.load(Ordering::Relaxed)
                );
                std::thread::sleep(Duration::from_millis(1));
            }
            for peer in &mut peers {
                wire::send_bytes(peer, &wire::request(CRC, 1, b""));
            }
            let qps: Vec<_> = peers.iter().map(|_| target.accept()).collect();
            for peer in &mut peers {
                wire::reply(peer);
            }
            (peers, qps)
        };
        let all = std::panic::catch_unwind(std::panic::AssertUnwindSafe(honest));
        over.store(true, Ordering::Relaxed);
        assert_eq!(all.unwrap().1.len(), 26);
    });
    drop(target);
    mallory.kill();
}

#[test]
fn self_guessed_stags_bar_no_other_peers() {
    let Some(daemon) = daemon("[limits.peer]\nstag_guesses_per_minute = 5\n", 4096) else { return };
    let mut bait = daemon.actor_as(MALLORY, &["bait"]);
    let address: SocketAddr = bait.line_after("listening on ").parse().unwrap();
    let deadline = Instant::now() + DEADLINE;
    let mut guess = 0;
    loop {
        assert!(Instant::now() < deadline, "{guess} guesses");
        // Five guesses are terminated. After them, connections are refused.
        let Some(mut peer) = wire::try_dial(address) else { break };
        wire::send_bytes(&mut peer, &wire::request(CRC, 1, b""));
        // If the request hits a reset, the next call fails, and further ones read an end.
        if !matches!(peer.peek(&mut [0]), Ok(1)) {
            break;
        }
        wire::reply(&mut peer);
        guess += 1;
        wire::send_bytes(&mut peer, &fpdu(&tagged(0, 0x5151_5100 + guess, 0, b"mine?")));
        let ending = wire::ending(&mut peer);
        assert!(matches!(ending, Ending::Fin(_)), "{ending:?}");
    }
    assert!(guess >= 5, "{guess}");
    // Peers at the same address still reach listeners of other users.
    let target = Target::new(&daemon);
    for _ in 0..5 {
        drop(target.open());
    }
    drop(target);
    bait.release();
    bait.succeed();
    let log = daemon.stop();
    let lines = log.iter().filter(|l| l.contains("used 5 invalid STags"));
    assert!(lines.clone().all(|line| line.contains(&MALLORY.to_string())), "{log:?}");
    assert_eq!(lines.count(), 1, "{log:?}");
}
