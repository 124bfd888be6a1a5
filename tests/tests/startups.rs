//! Connections that are not yet anybody's queue pair: one user's, whether silent or undecided, and
//! whatever their peers try, are in no other user's way.

use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rnic_tests::target::Target;
use rnic_tests::wire::{self, CRC, Ending, fpdu, tagged};
use rnic_tests::{DEADLINE, Daemon, Process, binaries};
use rustix::net::sockopt::set_socket_linger;

/// Users, who exist by their numbers.
const MALLORY: u32 = 61_001;
const ALICE: u32 = 61_002;

/// A daemon that all users may use, with this many descriptors.
fn daemon(limits: &str, descriptors: u32) -> Option<Daemon> {
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit("not root: nobody else can be played");
        return None;
    }
    rnic_tests::process::raise_descriptor_limit();
    let config =
        format!("[control]\nmode = \"0666\"\n[engine]\nworkers = 1\nloopback = \"tcp\"\n{limits}");
    Some(Daemon::start_limited(binaries!(), &config, &format!("ulimit -n {descriptors}")))
}

/// Mallory's program with so many listeners, and where it listens.
fn mallory(daemon: &Daemon, listeners: usize) -> (Process, Vec<SocketAddr>) {
    let mut actor = daemon.actor_as(MALLORY, &["ignore", &listeners.to_string()]);
    let address = |_| actor.line_after("listening on ").parse().unwrap();
    let addresses = (0..listeners).map(address).collect();
    (actor, addresses)
}

/// Whether the daemon has ended a connection.
fn is_over(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    match (&mut &*stream).read(&mut [0; 64]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() != ErrorKind::WouldBlock,
    }
}

#[test]
fn undecided_requests_of_one_user_leave_descriptors_to_others() {
    let Some(daemon) = daemon("", 576) else { return };
    // Of 512 descriptors 64 are for connections in start-up, half of them for one user.
    let (mut mallory, addresses) = mallory(&daemon, 20);
    let request = wire::request(CRC, 1, b"");
    let mut requests: Vec<TcpStream> = Vec::new();
    for round in 0..1000 {
        if let Some(mut peer) = wire::knock(addresses[round % addresses.len()]) {
            wire::say(&mut peer, &request);
            requests.push(peer);
        }
    }
    let begun = Instant::now();
    while requests.iter().filter(|peer| is_over(peer)).count() < requests.len() - 32 {
        assert!(begun.elapsed() < DEADLINE, "{:?}", daemon.status());
        std::thread::yield_now();
    }
    assert!(daemon.status().startups <= 32, "{:?}", daemon.status());
    // Others come in, listen, connect over TCP and work, also as users of whom nothing is there
    // yet.
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    daemon.actor(&["traffic", &address, "1", "20"]).succeed();
    daemon.actor_as(ALICE, &["traffic", &address, "2", "20"]).succeed();
    // Those that were kept are told when their listeners go.
    mallory.release();
    mallory.succeed();
    // The daemon waits for their peers to close.
    drop(requests);
    daemon.settles("rid of them", |s| s.startups == 0);
    server.release();
    server.succeed();
}

#[test]
fn peers_far_away_get_in_beside_a_flood_of_silent_connections_to_another_user() {
    let Some(daemon) = daemon("[limits]\nstartups = 64\n[limits.user]\nstartups = 64\n", 4096)
    else {
        return;
    };
    let (mallory, addresses) = mallory(&daemon, 1);
    let (over, come) = (AtomicBool::new(false), AtomicU64::new(0));
    let target = Target::new(&daemon);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut silent = std::collections::VecDeque::new();
                while !over.load(Ordering::Relaxed) {
                    if let Some(peer) = wire::knock(addresses[0]) {
                        // Nothing of it is to linger in the kernel.
                        let _ = set_socket_linger(&peer, Some(Duration::ZERO));
                        silent.push_back(peer);
                    }
                    if silent.len() > 500 {
                        silent.pop_front();
                    }
                    come.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let honest = || {
            let mut peers: Vec<_> =
                (0..26).map(|_| wire::dial(target.listener.local_addr())).collect();
            // As long as their round trips take, and so much of the flood that everybody would have
            // been pushed out many times.
            let (begun, before) = (Instant::now(), come.load(Ordering::Relaxed));
            while begun.elapsed() < Duration::from_millis(150)
                || come.load(Ordering::Relaxed) < before + 640
            {
                assert!(begun.elapsed() < DEADLINE, "{} have come", come.load(Ordering::Relaxed));
                std::thread::sleep(Duration::from_millis(1));
            }
            for peer in &mut peers {
                wire::say(peer, &wire::request(CRC, 1, b""));
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
fn guesses_at_ones_own_stags_bar_nobody_elses_peers() {
    let Some(daemon) = daemon("[limits.peer]\nstag_guesses_per_minute = 5\n", 4096) else { return };
    let mut bait = daemon.actor_as(MALLORY, &["bait"]);
    let address: SocketAddr = bait.line_after("listening on ").parse().unwrap();
    let deadline = Instant::now() + DEADLINE;
    let mut guess = 0;
    loop {
        assert!(Instant::now() < deadline, "{guess} guesses");
        // Five times the guess is terminated; then it is not even asked for.
        let Some(mut peer) = wire::knock(address) else { break };
        wire::say(&mut peer, &wire::request(CRC, 1, b""));
        // A reset that the request has run into is told there, and the rest reads as an end.
        if !matches!(peer.peek(&mut [0]), Ok(1)) {
            break;
        }
        wire::reply(&mut peer);
        guess += 1;
        wire::say(&mut peer, &fpdu(&tagged(0, 0x5151_5100 + guess, 0, b"mine?")));
        let ending = wire::ending(&mut peer);
        assert!(matches!(ending, Ending::Fin(_)), "{ending:?}");
    }
    assert!(guess >= 5, "{guess}");
    // From the same address others' listeners are reached as before.
    let target = Target::new(&daemon);
    for _ in 0..5 {
        drop(target.open());
    }
    drop(target);
    bait.release();
    bait.succeed();
    let said = daemon.stop();
    let told = said.iter().filter(|l| l.contains("limits.peer.stag_guesses_per_minute = 5"));
    assert!(told.clone().all(|line| line.contains(&MALLORY.to_string())), "{said:?}");
    assert_eq!(told.count(), 1, "{said:?}");
}
