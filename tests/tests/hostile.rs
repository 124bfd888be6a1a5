//! Clients that obey nothing, beside clients whose every octet is checked.

use rnic_tests::{Daemon, Process, binaries};

/// Seconds of each attack: two attackers on two daemons at once are enough for two cores.
fn seconds() -> String {
    match std::env::var("RNIC_TEST_LONG") {
        Ok(_) => "3600".to_owned(),
        Err(_) => "5".to_owned(),
    }
}

fn attack(config: &str, seeds: [u64; 2]) {
    let daemon = Daemon::start(binaries!(), config);
    daemon.is_empty();
    let start = daemon.footprint();
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    let mut visitor = daemon.actor(&["traffic", &address, "9"]);
    visitor.line_after("under way");
    let attackers: Vec<Process> = seeds
        .into_iter()
        .map(|seed| daemon.actor(&["attack", &seed.to_string(), &seconds(), &address]))
        .collect();
    for attacker in attackers {
        let (status, lines) = attacker.finish_within(seconds().parse::<u64>().unwrap() + 60);
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
    let status = daemon.is_empty();
    assert!(status.sessions_ended > 0, "{status:?}");
    let end = daemon.footprint();
    assert_eq!((end.mappings, end.threads), (start.mappings, start.threads));
    assert!(end.resident < start.resident + 16 * 1024, "{start:?} has become {end:?}");
    let said = daemon.stop();
    // It says what happened without being made to fill a disk.
    assert!(said.len() < 200, "{} lines", said.len());
    assert!(!said.iter().any(|l| l.contains("panicked") || l.contains("ERROR")), "{said:?}");
}

#[test]
fn beside_the_direct_path_with_three_workers() {
    attack("[engine]\nworkers = 3\n", [1, 2]);
}

#[test]
fn beside_tcp_with_one_worker() {
    attack("[engine]\nworkers = 1\nloopback = \"tcp\"\n", [3, 4]);
}
