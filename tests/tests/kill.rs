//! Clients and daemons killed during checksummed traffic: nothing of a client remains, its peer
//! gets a precise error, and other clients continue.

use std::process::Command;
use std::time::{Duration, Instant};

use rnic_client::{Access, Completion, Context, Error, QpOptions, SendRequest};
use rnic_tests::traffic::Rng;
use rnic_tests::{DEADLINE, Daemon, PATHS, Process, built, on_path};

fn rounds() -> u64 {
    if std::env::var_os("RNIC_TEST_LONG").is_some() { 500 } else { 40 }
}

/// Kills guests and servers at random moments of their traffic.
fn killed_in_the_middle(config: &str, seed: u64) {
    let config = format!("[control]\nmode = \"0666\"\n{config}");
    let daemon = Daemon::start(&config);
    let mut start = daemon.at_rest();
    let mut rng = Rng::new(seed);
    let root = rustix::process::getuid().is_root();
    if !root {
        rnic_tests::omit("not root: all clients run as the same user");
    }
    // Servers run as one user, guests as two others.
    let actor = |uid, part: &[&str]| {
        if root { daemon.actor_as(uid, part) } else { daemon.actor(part) }
    };
    let mut notified_peers = 0;
    let mut under_way = 0;
    for round in 0..rounds() {
        let mut server = actor(61_006, &["serve"]);
        let address = server.line_after("listening on ");
        let visitors = 1 + rng.below(2) as u32;
        let mut visitors: Vec<Process> = (0..visitors)
            .map(|v| actor(61_007 + v, &["traffic", &address, &v.to_string()]))
            .collect();
        if round % 3 != 0 {
            visitors[0].line_after("under way");
            under_way += 1;
        }
        // Only randomises the moment. Nothing depends on the length of the sleep.
        std::thread::sleep(Duration::from_micros(rng.below(50_000)));
        if round % 2 == 0 {
            visitors.drain(..).for_each(Process::kill);
            if round % 3 != 0 {
                let end = server.line_after("ended after ");
                assert!(end.contains("Lost") || end.contains("Terminate"), "{end}");
                notified_peers += 1;
            }
            server.kill();
        } else {
            server.kill();
            for visitor in visitors {
                let (status, lines) = visitor.finish();
                assert!(!status.success(), "{lines:?}");
                let error = lines.iter().find(|l| l.starts_with("actor: "));
                let error = error.unwrap_or_else(|| panic!("{lines:?}"));
                assert!(!error.contains("CORRUPTED") && !error.contains("in time"), "{error}");
                notified_peers += 1;
            }
        }
        if round == 7 {
            // By now the daemon has allocated everything that it keeps for reuse.
            let settled = daemon.shrinks_to(start);
            start.resident = settled.resident;
        }
    }
    assert!(notified_peers > rounds() / 2 && under_way > rounds() / 2);
    let end = daemon.shrinks_to(start);
    assert_eq!(end.threads, start.threads);
    assert!(end.resident <= start.resident + 1024, "{start:?} has become {end:?}");
    assert_eq!(daemon.status().sessions_ended, 0, "being killed is not misbehaviour");
}

#[test]
fn killed_direct_path_clients_leave_nothing() {
    killed_in_the_middle("[engine]\nworkers = 3\n", 1);
}

#[test]
fn clients_killed_on_the_tcp_path_leave_nothing() {
    killed_in_the_middle("[engine]\nworkers = 3\nloopback = \"tcp\"\n", 2);
}

#[test]
fn clients_killed_with_one_worker_leave_nothing() {
    killed_in_the_middle("[engine]\nworkers = 1\n", 3);
}

/// Kills a client while it creates and destroys objects, so that workers still have its requests.
#[test]
fn client_killed_during_creation_leaves_nothing() {
    // The records of killed clients fill rings of a fixed size. While the rings fill, the records
    // would look like a leak.
    let config = "[engine]\nworkers = 3\n[limits]\ndiagnoses = 1\nevent_records = 16\n";
    let daemon = Daemon::start(config);
    let mut start = daemon.at_rest();
    let mut rng = Rng::new(4);
    for round in 0..rounds() {
        let mut makers: Vec<Process> = (0..2).map(|_| daemon.actor(&["churn"])).collect();
        makers.iter_mut().for_each(|m| drop(m.line_after("under way")));
        std::thread::sleep(Duration::from_micros(rng.below(10_000)));
        makers.into_iter().for_each(Process::kill);
        if round == 7 {
            start.resident = daemon.shrinks_to(start).resident;
        }
    }
    let end = daemon.shrinks_to(start);
    assert!(end.resident <= start.resident + 1024, "{start:?} has become {end:?}");
}

#[test]
fn waiters_and_pollers_notice_a_killed_daemon() {
    let daemon = Daemon::start("");
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    let mut visitor = daemon.actor(&["traffic", &address]);
    visitor.line_after("under way");

    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
    let listener = context.listen("127.0.0.1:0", 1).unwrap();
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
    let gone = |e: Error| assert!(matches!(e, Error::DaemonGone), "{e}");
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| gone(cq.wait(&mut [Default::default()], Some(DEADLINE)).unwrap_err()));
        scope.spawn(|| gone(listener.accept_request(Some(DEADLINE)).err().unwrap()));
        scope.spawn(|| gone(context.next_event(Some(DEADLINE)).unwrap_err()));
        scope.spawn(|| {
            let mut none = [Default::default()];
            let e = loop {
                if let Err(e) = cq.poll(&mut none) {
                    break e;
                }
            };
            gone(e);
        });
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    });
    gone(context.status().unwrap_err());
    gone(qp.post_send(&[SendRequest::send_inline(1, b"x")]).unwrap_err().source);
    gone(context.create_shared_buffer(4096).err().unwrap());
    assert!(began.elapsed() < DEADLINE);
    daemon.kill();
    for actor in [server, visitor] {
        let mut actor = actor;
        actor.release();
        let (_, lines) = actor.finish();
        assert!(lines.iter().any(|l| l.contains("daemon is gone")), "{lines:?}");
    }
}

#[test]
fn the_socket_of_a_killed_daemon_is_taken_over() {
    let daemon = Daemon::start("");
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let run = || {
        let mut command = Command::new(built::program("rnicd"));
        command.arg("run").arg("--socket").arg(&socket);
        let mut process = Process::start(command);
        process.line_after("listening");
        process
    };
    run().kill();
    assert!(socket.exists());
    let second = run();
    Context::open_at(&socket).unwrap().status().unwrap();
    second.signal(rustix::process::Signal::TERM);
    second.succeed();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    drop(daemon);
}

/// A client is killed with outstanding requests. The peer of a Read gets an error, and copies in
/// progress end.
#[test]
fn peer_with_outstanding_reads_gets_an_error() {
    for loopback in PATHS {
        let daemon = Daemon::start(&on_path(loopback));
        let mut server = daemon.actor(&["serve"]);
        let address = server.line_after("listening on ");
        let context = Context::open_at(daemon.socket()).unwrap();
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(1024, None).unwrap();
        let options = QpOptions { sq_depth: 512, ..QpOptions::new(&cq) };
        let qp = pd.create_qp(&options).unwrap();
        let connected = qp.connect(&*address, &Default::default()).unwrap();
        let region = rnic_client::RemoteMr::from_bytes(&connected.private_data).unwrap();
        let buffer = context.create_shared_buffer(region.len).unwrap();
        let sink = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
        let read = SendRequest::read(9, sink.sge(0, region.len as u32), region.at(0)).signaled();
        qp.post_send(&[read; 512]).unwrap();
        server.kill();
        let mut outstanding = 512;
        let mut failed = 0;
        while outstanding > 0 {
            let mut some = [Completion::default(); 64];
            let n = cq.wait(&mut some, Some(DEADLINE)).unwrap();
            assert_ne!(n, 0, "{loopback}: {outstanding} reads never completed");
            failed += some[..n].iter().filter(|c| c.ok().is_err()).count();
            outstanding -= n;
            // If the server answered all Reads before it died, post more.
            if failed == 0 {
                qp.post_send(&vec![read; n]).unwrap();
                outstanding += n;
            }
        }
        assert!(failed > 0, "{loopback}");
        let end = qp.wait_disconnected(Some(DEADLINE)).unwrap();
        assert_ne!(end, rnic_client::DisconnectReason::Orderly, "{loopback}");
    }
}
