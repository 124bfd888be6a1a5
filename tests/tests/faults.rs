//! Faults that a client or peer cannot control or causes by mistake. The affected client gets a
//! precise error, no other client loses anything, and nothing is left behind.

use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rnic_client::{
    AcceptOptions, Completion, CompletionStatus, ConnectOptions, Context, DisconnectReason, Error,
    Event, QpOptions, RecvRequest, Refusal, SendRequest,
};
use rnic_tests::{DEADLINE, Daemon, PATHS, Process, built, engine, on_path};
use rustix::process::Signal;

fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

#[test]
fn sigterm_under_load_stops_in_order() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let mut server = daemon.actor(&["serve"]);
        let address = server.line_after("listening on ");
        let mut visitors: Vec<Process> =
            (0..3).map(|n| daemon.actor(&["traffic", &address, &n.to_string()])).collect();
        visitors.iter_mut().for_each(|v| drop(v.line_after("under way")));
        let began = Instant::now();
        let said = daemon.stop();
        assert!(began.elapsed() < DEADLINE);
        assert!(!said.iter().any(|l| l.contains("ERROR") || l.contains("panic")), "{said:?}");
        for visitor in visitors {
            let (status, lines) = visitor.finish();
            assert_eq!(status.code(), Some(1), "{lines:?}");
            // A visitor may see the server's session end first.
            let told = ["daemon is gone", "flushed", "peer aborted", "was lost", "Terminate"];
            let said = |l: &String| told.iter().any(|word| l.contains(word));
            assert!(lines.iter().any(said), "{lines:?}");
        }
        server.release();
        server.finish();
    }
}

#[test]
fn exec_runs_processes_and_leaves_nothing() {
    let temp = tempfile::tempdir().unwrap();
    let exec = |arguments: &[&str]| {
        let mut command = Command::new(built::program("rnicd"));
        command.arg("exec").args(arguments).env("TMPDIR", temp.path());
        Process::start(command).finish()
    };
    for way in ["direct", "tcp"] {
        let (status, lines) = exec(&["--loopback", way, "--", &built::program("actor"), "duet"]);
        assert!(status.success(), "{lines:?}");
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    }
    // A failing client in a nested daemon.
    let inner =
        [&built::program("rnicd"), "exec", "--", &built::program("actor"), "visit", "127.0.0.1:1"];
    let (status, lines) = exec(&[&["--"], &inner[..]].concat());
    assert_eq!(status.code(), Some(1), "{lines:?}");
    assert!(lines.iter().any(|l| l.contains("refused")), "{lines:?}");
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
}

/// The terminal sends SIGWINCH to the whole foreground group, so the wrapper must not forward it.
/// The program here is outside that group and must not receive it at all.
#[test]
fn terminal_signals_are_not_forwarded_twice() {
    // The wrapper gets SIGWINCH when the size changes. It must forward the two signals that follow,
    // and handles SIGWINCH before the second. The shell sees all pending signals before it
    // continues.
    let script = "trap told=yes WINCH; trap 'kill -s USR1 $PPID' TERM; trap done=yes USR1; \
                  stty rows 31 cols 101; kill -s TERM $PPID; \
                  while [ -z \"$done\" ]; do sleep 0.05; done; \
                  [ -z \"$told\" ] && stty size";
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("script");
    std::fs::write(&file, script).unwrap();
    let line = format!("exec '{}' exec -- setsid sh '{}'", built::program("rnicd"), file.display());
    let mut command = Command::new("script");
    command.args(["--quiet", "--return", "--command", &line, "/dev/null"]).stdin(Stdio::null());
    let output = match command.env("SHELL", "/bin/sh").output() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            rnic_tests::omit("the program \"script\", which provides a terminal, is missing");
            return;
        }
        output => output.unwrap(),
    };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("31 101"), "{said}");
}

#[test]
fn unwritable_log_blocks_no_client() {
    let dir = tempfile::tempdir().unwrap();
    for log in ["/dev/full", "closed"] {
        let socket = dir.path().join("s");
        let script = match log {
            "closed" => "exec \"$0\" run --socket \"$1\" 2>&-",
            _ => "exec \"$0\" run --socket \"$1\" 2>/dev/full",
        };
        let mut daemon = Command::new("sh")
            .args(["-c", script, &built::program("rnicd")])
            .arg(&socket)
            .env("RUST_LOG", "trace")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + DEADLINE;
        let context = loop {
            match Context::open_at(&socket) {
                Ok(context) => break context,
                Err(e) => assert!(Instant::now() < deadline, "{log}: {e}"),
            }
        };
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(16, None).unwrap();
        drop(pd.create_qp(&QpOptions::new(&cq)).unwrap());
        let pid = rustix::process::Pid::from_child(&daemon);
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        assert!(daemon.wait().unwrap().success(), "{log}");
        assert!(!socket.exists(), "{log}");
    }
}

#[test]
fn descriptor_shortage_affects_only_newcomers() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut command = Command::new("sh");
    let script = "ulimit -n 200; exec \"$0\" run --socket \"$1\"";
    command.args(["-c", script, &built::program("rnicd")]).arg(&socket);
    let mut daemon = Process::start(command);
    daemon.line_after("listening");
    let first = Context::open_at(&socket).unwrap();
    let pd = first.open_pd(None).unwrap();
    let mut crowd = Vec::new();
    let refused = loop {
        match Context::open_at(&socket) {
            Ok(context) => crowd.push(context),
            Err(e) => break e,
        }
        assert!(crowd.len() < 100, "200 descriptors serve 100 clients");
    };
    assert!(!crowd.is_empty() && matches!(refused, Error::NotAdmitted { .. }), "{refused}");
    // Admitted clients continue. A request that needs a descriptor may get a precise refusal.
    let cq = first.create_cq(16, None);
    match cq {
        Ok(cq) => drop(pd.create_qp(&QpOptions::new(&cq)).unwrap()),
        Err(Error::Refused { refusal: Refusal::System { .. } | Refusal::Limit { .. }, .. }) => {}
        Err(e) => panic!("{e}"),
    }
    first.status().unwrap();
    crowd.clear();
    let deadline = Instant::now() + DEADLINE;
    while let Err(e) = Context::open_at(&socket) {
        assert!(Instant::now() < deadline, "{e}");
    }
    daemon.signal(Signal::TERM);
    daemon.succeed();
}

#[test]
fn unusable_socket_is_reported_as_such() {
    if !rustix::process::geteuid().is_root() {
        return rnic_tests::omit("only root can act as several users");
    }
    let daemon = Daemon::start("[control]\nmode = \"0600\"\n");
    let (status, lines) = daemon.actor_as(65_534, &["clients"]).finish();
    let said = lines.join("\n");
    assert!(!status.success() && said.contains("no access to the RNIC daemon: "), "{said}");
    assert!(said.contains("permission denied: mode 0600, user root, group root"), "{said}");
    assert!(said.contains("control.mode") && !said.contains("rnicd run"), "{said}");
}

#[test]
fn unreachable_peer_is_named_and_qp_can_retry() {
    let config = "[mpa]\nstartup_deadline = \"50ms\"\ndecision_deadline = \"60s\"\n\
                  connect_deadline = \"300ms\"\nreply_deadline = \"3s\"\n";
    let daemon = Daemon::start(config);
    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
    let fails = |address: SocketAddr, word: &str| match qp
        .connect(address, &ConnectOptions::default())
        .unwrap_err()
    {
        Error::Unreachable { reason } => assert!(reason.contains(word), "{reason}"),
        other => panic!("{other}"),
    };
    // A port without a listener.
    let nobody = SocketAddr::new(loopback().ip(), rnic_tests::ports::unused_port());
    fails(nobody, "refused");
    // A peer that accepts the connection and sends nothing.
    let silent = TcpListener::bind(loopback()).unwrap();
    fails(silent.local_addr().unwrap(), "no MPA reply");
    // A peer that does not accept the connection, because its queue is full.
    let full = socket_with_full_queue();
    fails(full.0.local_addr().unwrap(), "no TCP connection");
    // A bound address of this daemon without a listener.
    let bound = context.bind(loopback()).unwrap();
    fails(bound.local_addr(), "refused");
    // The same address with a listener.
    bound.listen(1).unwrap();
    qp.start_connect(bound.local_addr(), &ConnectOptions::default()).unwrap();
    let other = pd.create_qp(&QpOptions::new(&cq)).unwrap();
    let request = bound.accept_request(Some(DEADLINE)).unwrap();
    request.accept(&other, &AcceptOptions::default()).unwrap();
    qp.wait_connected(Some(DEADLINE)).unwrap();
}

/// Returns a listener with a full accept queue, and the connections that fill it.
fn socket_with_full_queue() -> (TcpListener, Vec<std::net::TcpStream>) {
    let listener = TcpListener::bind(loopback()).unwrap();
    // The standard library sets a longer queue. `listen` can be called again.
    rustix::net::listen(&listener, 0).unwrap();
    let address = listener.local_addr().unwrap();
    let mut streams = Vec::new();
    while let Ok(stream) =
        std::net::TcpStream::connect_timeout(&address, Duration::from_millis(150))
    {
        streams.push(stream);
    }
    (listener, streams)
}

#[test]
fn a_rejection_carries_its_reason_on_both_paths() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let context = Context::open_at(daemon.socket()).unwrap();
        let other = Context::open_at(daemon.socket()).unwrap();
        let listener = other.listen(loopback(), 2).unwrap();
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(16, None).unwrap();
        let qps: Vec<_> = (0..3).map(|_| pd.create_qp(&QpOptions::new(&cq)).unwrap()).collect();
        let options = ConnectOptions { private_data: b"let me in".into(), ..Default::default() };
        let rejected =
            |qp: &rnic_client::Qp, why: &[u8]| match qp.wait_connected(Some(DEADLINE)).unwrap_err()
            {
                Error::Rejected { private_data } => assert_eq!(private_data, why, "{path}"),
                other => panic!("{path}: {other}"),
            };
        // Rejected by the program, by dropping the request, and by a full backlog.
        for qp in &qps[..2] {
            qp.start_connect(listener.local_addr(), &options).unwrap();
        }
        let first = listener.accept_request(Some(DEADLINE)).unwrap();
        assert_eq!(first.private_data(), b"let me in");
        let second = listener.accept_request(Some(DEADLINE)).unwrap();
        qps[2].start_connect(listener.local_addr(), &options).unwrap();
        rejected(&qps[2], b"");
        first.reject(b"not you").unwrap();
        drop(second);
        let mut said: Vec<Vec<u8>> = qps[..2]
            .iter()
            .map(|qp| match qp.wait_connected(Some(DEADLINE)).unwrap_err() {
                Error::Rejected { private_data } => private_data,
                other => panic!("{path}: {other}"),
            })
            .collect();
        said.sort();
        assert_eq!(said, [b"".to_vec(), b"not you".to_vec()], "{path}");
        // Destroying the listener or its session also rejects.
        qps[0].start_connect(listener.local_addr(), &options).unwrap();
        let undecided = listener.accept_request(Some(DEADLINE)).unwrap();
        let address = listener.local_addr();
        drop(listener);
        rejected(&qps[0], b"");
        drop(undecided);
        let listener = other.listen(address, 2).unwrap();
        qps[0].start_connect(listener.local_addr(), &options).unwrap();
        let undecided = listener.accept_request(Some(DEADLINE)).unwrap();
        drop((listener, other, undecided));
        let e = qps[0].wait_connected(Some(DEADLINE)).unwrap_err();
        assert!(matches!(e, Error::Rejected { .. } | Error::Unreachable { .. }), "{path}: {e}");
    }
}

#[test]
fn undecided_request_times_out() {
    for path in PATHS {
        let config = format!("{}[mpa]\ndecision_deadline = \"1s\"\n", on_path(path));
        let daemon = Daemon::start(&config);
        let context = Context::open_at(daemon.socket()).unwrap();
        let listener = context.listen(loopback(), 2).unwrap();
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(16, None).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let guest = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        guest.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
        let request = listener.accept_request(Some(DEADLINE)).unwrap();
        let e = guest.wait_connected(Some(DEADLINE)).unwrap_err();
        assert!(matches!(e, Error::Rejected { .. } | Error::Unreachable { .. }), "{path}: {e}");
        let e = request.accept(&qp, &AcceptOptions::default()).unwrap_err();
        assert!(matches!(e.refusal(), Some(Refusal::NoSuchObject { .. })), "{path}: {e}");
    }
}

#[test]
fn a_client_that_gives_up_withdraws_its_request() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let context = Context::open_at(daemon.socket()).unwrap();
        let listener = context.listen(loopback(), 2).unwrap();
        let pd = context.open_pd(None).unwrap();
        let cq = context.create_cq(16, None).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        for by_destroying in [true, false] {
            let guest = pd.create_qp(&QpOptions::new(&cq)).unwrap();
            guest.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
            let request = listener.accept_request(Some(DEADLINE)).unwrap();
            let kept = if by_destroying {
                drop(guest);
                None
            } else {
                guest.abort().unwrap();
                Some(guest)
            };
            daemon.wait_status("rid of the request", |s| s.startups == 0);
            let e = request.accept(&qp, &AcceptOptions::default()).unwrap_err();
            assert!(matches!(e, Error::Refused { .. }), "{path}: {e}");
            drop(kept);
        }
    }
}

#[test]
fn full_cq_affects_only_its_owner() {
    for path in PATHS {
        let daemon = Daemon::start(&engine(3, path));
        let context = Context::open_at(daemon.socket()).unwrap();
        let pd = context.open_pd(None).unwrap();
        let other = Context::open_at(daemon.socket()).unwrap();
        let other_pd = other.open_pd(None).unwrap();
        let other_cq = other.create_cq(1024, None).unwrap();
        let listener = context.listen(loopback(), 8).unwrap();
        let small = context.create_cq(4, None).unwrap();
        let roomy = context.create_cq(64, None).unwrap();
        let options = QpOptions { rq_depth: 64, ..QpOptions::new(&small) };
        let connect = |options: &QpOptions<'_>| {
            let qp = pd.create_qp(options).unwrap();
            qp.post_recv(&[RecvRequest::new(1, &[]); 32]).unwrap();
            let guest = other_pd.create_qp(&QpOptions::new(&other_cq)).unwrap();
            guest.start_connect(listener.local_addr(), &ConnectOptions::default()).unwrap();
            let request = listener.accept_request(Some(DEADLINE)).unwrap();
            request.accept(&qp, &AcceptOptions::default()).unwrap();
            guest.wait_connected(Some(DEADLINE)).unwrap();
            (qp, guest)
        };
        let (victim, sender) = connect(&options);
        // The second QP shares only the CQ.
        let (second, second_guest) = connect(&options);
        let (spared, spared_guest) =
            connect(&QpOptions { recv_cq: &roomy, send_cq: &roomy, ..options });
        sender.post_send(&[SendRequest::send_inline(1, b""); 10]).unwrap();
        let dead = |qp: &rnic_client::Qp| {
            let end = qp.wait_disconnected(Some(DEADLINE)).unwrap();
            assert!(!matches!(end, DisconnectReason::Orderly), "{path}: {end:?}");
        };
        [&victim, &sender, &second, &second_guest].into_iter().for_each(dead);
        let deadline = Instant::now() + DEADLINE;
        loop {
            match context.next_event(Some(DEADLINE)).unwrap() {
                Some(Event::CqError { cq, .. }) => {
                    assert_eq!(cq, small.id());
                    break;
                }
                Some(_) => {}
                None => panic!("{path}: no CQ error event"),
            }
            assert!(Instant::now() < deadline);
        }
        // Completions written before the overflow are still available.
        let mut some = [Completion::default(); 8];
        let n = small.poll(&mut some).unwrap();
        assert!(some[..n].iter().filter(|c| c.status == CompletionStatus::Success).count() >= 3);
        spared_guest.post_send(&[SendRequest::send_inline(7, b"").signaled(); 10]).unwrap();
        let mut seen = 0;
        while seen < 10 {
            let n = roomy.wait(&mut some, Some(DEADLINE)).unwrap();
            assert!(n > 0, "{path}: {seen} of 10");
            assert!(some[..n].iter().all(|c| c.status == CompletionStatus::Success), "{some:?}");
            seen += n;
        }
        drop((spared, victim));
    }
}

#[test]
fn stopped_client_delays_no_other() {
    let daemon = Daemon::start("[engine]\nworkers = 2\n[limits]\nevents = 16\n");
    let mut stopped = daemon.actor(&["serve"]);
    let address = stopped.line_after("listening on ");
    stopped.signal(Signal::STOP);
    // The stopped client reads no events, and gets more of them than the daemon keeps.
    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let mut rejected = 0;
    let qps: Vec<_> = (0..300).map(|_| pd.create_qp(&QpOptions::new(&cq)).unwrap()).collect();
    for qp in &qps {
        qp.start_connect(address.parse().unwrap(), &ConnectOptions::default()).unwrap();
    }
    // Its backlog is 64. All further requests are rejected.
    let deadline = Instant::now() + DEADLINE;
    let mut undecided: Vec<_> = qps.iter().collect();
    while rejected < 200 {
        assert!(Instant::now() < deadline, "{rejected}");
        undecided.retain(|qp| {
            let ended = qp.wait_connected(Some(Duration::from_millis(1)));
            let is_rejected = matches!(ended, Err(Error::Rejected { .. }));
            rejected += u32::from(is_rejected);
            !is_rejected
        });
    }
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    daemon.actor(&["traffic", &address, "3", "50"]).succeed();
    drop(qps);
    stopped.signal(Signal::CONT);
    stopped.kill();
    server.release();
    server.succeed();
    drop((cq, pd, context));
    daemon.is_empty();
}
