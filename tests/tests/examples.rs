//! The library's examples run unchanged.

use std::process::Command;

use rnic_client::{AcceptOptions, Access, ConnectOptions, RecvRequest, SendRequest};
use rnic_tests::{Client, DEADLINE, Daemon, PATHS, Process, built, engine, on_path};

#[test]
fn poll_loop_serves_many_peers_in_one_thread() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let example = |arguments: &[&str]| {
            let mut command = Command::new(built::example("event_loop"));
            command.env("RNIC_SOCKET", daemon.socket()).args(arguments);
            Process::start(command)
        };
        let mut server = example(&["serve", "127.0.0.1:0", "6"]);
        let address = server.line_after("listening on ");
        let mut visitors: Vec<Process> = (0..6).map(|_| example(&["visit", &address])).collect();
        for visitor in &mut visitors {
            let said = visitor.line_after("100 messages echoed: ");
            assert_eq!(said, "Orderly", "{path}");
        }
        visitors.into_iter().for_each(|visitor| drop(visitor.succeed()));
        let lines = server.succeed();
        let ends = lines.iter().filter(|line| line.contains("ended: Orderly")).count();
        assert_eq!((ends, lines.last().map(String::as_str)), (6, Some("served 6")), "{lines:?}");
    }
}

#[test]
fn get_returns_the_stored_value() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let example = |arguments: &[&str]| {
            let mut command = Command::new(built::example("kv"));
            command.env("RNIC_SOCKET", daemon.socket()).args(arguments);
            command
        };
        let mut server = Process::start(example(&["serve", "127.0.0.1:0"]));
        let address = server.line_after("listening on ");
        let get = |key: &str| example(&["get", &address, key]).output().unwrap();
        assert_eq!(get("colour").status.code(), Some(1), "{path}");
        for value in ["red", "dark blue"] {
            Process::start(example(&["put", &address, "colour", value])).succeed();
            let found = get("colour");
            let text = String::from_utf8_lossy(&found.stdout);
            assert_eq!((found.status.code(), text.trim_end()), (Some(0), value), "{path}");
        }
        assert_eq!(get("shape").status.code(), Some(1), "{path}");
        server.kill();
    }
}

fn pingpong(daemon: &Daemon, arguments: &[&str]) -> Process {
    let mut command = Command::new(built::example("pingpong"));
    command.env("RNIC_SOCKET", daemon.socket()).args(arguments);
    Process::start(command)
}

#[test]
fn pingpong_works_within_a_host_and_between_two() {
    let [direct, tcp] = PATHS.map(|path| Daemon::start(&on_path(path)));
    for (serving, visiting, path) in
        [(&direct, &direct, "direct"), (&tcp, &tcp, "tcp"), (&direct, &tcp, "tcp")]
    {
        for size in ["0", "8", "100000"] {
            let mut server = pingpong(serving, &["serve", "127.0.0.1:0"]);
            let address = server.line_after("listening on ");
            let lines = pingpong(visiting, &["visit", &address, size, "50"]).succeed();
            let said =
                format!("50 round trips of {size} bytes over the {path} path, all data correct");
            assert_eq!(lines[0], said);
            let lines = server.succeed();
            let said = format!("50 messages of {size} bytes: it was closed normally");
            assert_eq!(lines.last(), Some(&said));
        }
    }
}

/// Each message has its own content, so an end that echoes the previous message causes an error.
#[test]
fn damaged_message_is_noticed_by_both_ends() {
    let daemon = Daemon::start("");
    let own = Client::new(&daemon);
    let memory = own.region(64, Access::LOCAL_WRITE);
    let whole = [memory.sge(0, 64)];
    let fails = |process: Process, words: &str| {
        let (status, lines) = process.finish();
        assert_eq!(status.code(), Some(1), "{lines:?}");
        assert!(lines.iter().any(|line| line.contains(words)), "{lines:?}");
    };

    let listener = own.listener();
    let address = listener.local_addr().to_string();
    let visitor = pingpong(&daemon, &["visit", &address, "64", "3"]);
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    let private_data = request.private_data().to_vec();
    let qp = own.qp();
    qp.post_recv(&[RecvRequest::new(1, &whole)]).unwrap();
    request.accept(&qp, &AcceptOptions::default()).unwrap();
    own.success();
    qp.post_send(&[SendRequest::send(2, &whole)]).unwrap();
    fails(visitor, "message 0 is damaged");

    for message in [&[7; 64][..], &[7; 63], &[]] {
        let mut server = pingpong(&daemon, &["serve", "127.0.0.1:0"]);
        let address = server.line_after("listening on ");
        let qp = own.qp();
        let private_data = private_data.clone();
        qp.connect(&*address, &ConnectOptions { private_data, ..ConnectOptions::default() })
            .unwrap();
        qp.post_send(&[SendRequest::send_inline(3, message)]).unwrap();
        fails(server, "message 0 is damaged");
    }

    let mut server = pingpong(&daemon, &["serve", "127.0.0.1:0"]);
    let address = server.line_after("listening on ");
    own.qp().connect(&*address, &ConnectOptions::default()).unwrap_err();
    fails(server, "rejected a client");
}

#[test]
fn streams_echo_more_than_they_can_hold() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(2, path));
        let example = |arguments: &[&str]| {
            let mut command = Command::new(built::example("async_echo"));
            command.env("RNIC_SOCKET", daemon.socket()).args(arguments);
            Process::start(command)
        };
        let mut server = example(&["serve", "127.0.0.1:0"]);
        let address = server.line_after("listening on ");
        let sizes = ["0", "1", "3000000"];
        let visitors: Vec<Process> =
            sizes.iter().map(|size| example(&["visit", &address, size])).collect();
        for (visitor, size) in visitors.into_iter().zip(sizes) {
            let lines = visitor.succeed();
            assert_eq!(lines, [format!("{size} bytes echoed")], "{path}");
        }
        server.kill();
    }
}
