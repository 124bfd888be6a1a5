//! Hostile clients, next to clients that check every byte.

use std::time::{Duration, Instant};

use rnic_abi::types::QpType;
use rnic_tests::raw::Raw;
use rnic_tests::{Daemon, Process, hostile};

/// Duration of each attack in seconds. Three attackers on each daemon keep two cores busy.
fn seconds() -> String {
    match std::env::var("RNIC_TEST_LONG") {
        Ok(_) => "3600".to_owned(),
        Err(_) => "5".to_owned(),
    }
}

/// Starts a client process. For root, `n` chooses its user and namespaces.
fn client(daemon: &Daemon, n: usize, part: &[&str]) -> Process {
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit("not root: all clients run as the same user");
        return daemon.actor(part);
    }
    match n % 3 {
        0 => daemon.actor_as(61_004, part),
        // A trusted attacker can do more.
        1 => daemon.actor(part),
        _ => daemon.actor_contained(part),
    }
}

fn attack(config: &str, seeds: [u64; 3]) {
    // The attacker in its own namespace needs access to the victim.
    let rule = "[[user]]\nwho = \"root\"\nhost_loopback = true\n";
    let config = format!("[control]\nmode = \"0666\"\n{config}{rule}");
    let began = Instant::now();
    let daemon = Daemon::start(&config);
    // The first RC QP opens the listener for peers, and the first UD QP opens the UDP sockets. Both
    // belong to the initial footprint.
    Raw::open(daemon.socket()).rc_qp();
    Raw::open(daemon.socket()).qp_of(QpType::Ud);
    let start = daemon.at_rest();
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    let mut visitor = client(&daemon, 0, &["traffic", &address, "9"]);
    visitor.line_after("under way");
    let attackers: Vec<Process> = seeds
        .into_iter()
        .enumerate()
        .map(|(n, seed)| client(&daemon, n, &["attack", &seed.to_string(), &seconds(), &address]))
        .collect();
    for attacker in attackers {
        let (status, lines) = attacker.finish_within(seconds().parse::<u64>().unwrap() + 600);
        let sessions = lines.iter().find_map(|l| l.strip_suffix(" sessions"));
        let sessions: u64 = sessions.unwrap_or_else(|| panic!("{lines:?}")).parse().unwrap();
        assert!(status.success() && sessions > 20, "{status}: {lines:?}");
    }
    assert!(!visitor.has_ended());
    visitor.release();
    let lines = visitor.succeed();
    let rounds = lines.iter().find_map(|l| l.strip_suffix(" rounds")).unwrap();
    assert!(rounds.parse::<u64>().unwrap() > 20, "{lines:?}");
    server.release();
    let (status, lines) = server.finish();
    assert!(status.success() && !lines.iter().any(|l| l.contains("CORRUPTED")), "{lines:?}");
    let end = daemon.shrinks_to(start);
    assert!(daemon.status().sessions_ended > 0);
    assert_eq!(end.threads, start.threads);
    assert!(end.resident < start.resident + 16 * 1024, "{start:?} has become {end:?}");
    let said = daemon.stop();
    // The log must report the events without filling a disk: at most ten lines a minute, plus 40.
    let minutes = began.elapsed().as_secs() as usize / 60 + 1;
    assert!(said.len() < 40 + 10 * minutes, "{} lines", said.len());
    assert!(!said.iter().any(|l| l.contains("panicked") || l.contains("ERROR")), "{said:?}");
}

#[test]
fn attack_on_three_workers_with_the_direct_path() {
    attack("[engine]\nworkers = 3\n", [1, 2, 5]);
}

#[test]
fn attack_on_one_worker_over_tcp() {
    attack("[engine]\nworkers = 1\nloopback = \"tcp\"\n", [3, 4, 6]);
}

#[test]
fn corrupted_sessions_cost_no_cpu() {
    for config in ["[engine]\nworkers = 2\n", "[engine]\nloopback = \"tcp\"\n"] {
        let daemon = Daemon::start(config);
        let lingering: Vec<_> =
            (0..20).filter_map(|seed| hostile::linger(daemon.socket(), seed)).collect();
        assert!(lingering.len() > 10);
        daemon.status();
        // A spinning worker would use far more, even beside other load.
        let window = Duration::from_millis(500);
        let used = (0..4)
            .map(|_| {
                let before = daemon.cpu_time();
                std::thread::sleep(window);
                daemon.cpu_time().saturating_sub(before)
            })
            .min();
        assert!(used.unwrap() <= window / 10, "{used:?} of CPU time in {window:?}");
        drop(lingering);
        daemon.is_empty();
    }
}
