//! `pingpong`.

use crate::rcopy::placed;
use rnic_tests::{Daemon, PATHS, on_path};

use super::talker::Talker;
use super::{PINGPONG, end, fails, run, start};

#[test]
fn every_message_is_checked_on_both_paths() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let way = if path.contains("direct") { "direct" } else { "tcp" };
        for options in [&[][..], &["--poll"], &["--event"]] {
            let arguments = [&["server", "127.0.0.1:0", "--once"], options].concat();
            let mut server = start(&daemon, PINGPONG, &arguments);
            let address = server.line_after("waiting for clients at ");
            let game = ["client", &address, "--size", "5000", "-n", "50"];
            let (code, said) = run(&daemon, PINGPONG, &[&game, options].concat());
            assert_eq!(code, Some(0), "{said}");
            let line = format!("50 round trips of 5000 bytes, all verified, over the {way} path");
            assert!(said.contains(&line), "{said}");
            assert!(said.contains("round trip  min "), "{said}");
            let (code, said) = end(server);
            assert_eq!(code, Some(0), "{said}");
            assert!(said.contains("50 round trips of 5000 bytes, all verified"), "{said}");
        }
    }
}

/// Each message has its own content, so echoing the previous one unchanged is an error.
#[test]
fn damaged_message_is_noticed_by_both_ends() {
    let daemon = Daemon::start("");
    let server = Talker::new(&daemon);
    let listener = server.listen();
    let address = listener.local_addr().to_string();
    let client = start(&daemon, PINGPONG, &["client", &address, "--size", "64", "-n", "3"]);
    let game = server.accept(&listener, b"");
    assert_eq!(game, [&b"pingpong\x01"[..], &[64, 0, 0, 0], &[3, 0, 0, 0, 0, 0, 0, 0]].concat());
    let ball = server.next_message().unwrap();
    server.send_message(&ball);
    fails(end(client), "message 0 from 127.0.0.1:");

    let mut server = start(&daemon, PINGPONG, &["server", "127.0.0.1:0", "--once"]);
    let address = server.line_after("waiting for clients at ").parse().unwrap();
    let client = Talker::new(&daemon);
    client.connect(address, &game).unwrap();
    client.send_message(&[7; 64]);
    fails(end(server), "is damaged from byte 0 on");

    let mut server = start(&daemon, PINGPONG, &["server", "127.0.0.1:0", "--once"]);
    let address = server.line_after("waiting for clients at ").parse().unwrap();
    let client = Talker::new(&daemon);
    client.connect(address, &game).unwrap();
    client.send_message(&[7; 63]);
    fails(end(server), "has 63 bytes instead of 64");
}

#[test]
fn lost_peer_or_daemon_is_reported_in_pingpong() {
    let daemon = Daemon::start("");
    let endless =
        |address: &str| start(&daemon, PINGPONG, &["client", address, "-n", "1000000000"]);
    let mut server = start(&daemon, PINGPONG, &["server", "127.0.0.1:0", "--once"]);
    let address = server.line_after("waiting for clients at ");
    let client = endless(&address);
    placed(&daemon, 1);
    server.kill();
    fails(end(client), &format!("the connection with {address} "));

    let mut server = start(&daemon, PINGPONG, &["server", "127.0.0.1:0", "--once"]);
    let address = server.line_after("waiting for clients at ");
    let client = endless(&address);
    placed(&daemon, 1);
    client.kill();
    fails(end(server), "the connection with 127.0.0.1:");

    let mut server = start(&daemon, PINGPONG, &["server", "127.0.0.1:0", "--once"]);
    let address = server.line_after("waiting for clients at ");
    let client = endless(&address);
    placed(&daemon, 1);
    daemon.kill();
    for side in [client, server] {
        fails(end(side), "the RNIC daemon is gone or has ended this session");
    }
}

#[test]
fn a_match_that_is_refused_is_refused_in_words() {
    let daemon = Daemon::start("");
    let server = ["server", "127.0.0.1:0", "--once", "--max-size", "1KiB"];
    let mut server = start(&daemon, PINGPONG, &server);
    let address = server.line_after("waiting for clients at ");
    let client = run(&daemon, PINGPONG, &["client", &address, "--size", "1025"]);
    fails(client, &format!("{address} refused: message size 1025 is above the maximum, 1024"));
    fails(end(server), "message size 1025 is above the maximum, 1024");
}
