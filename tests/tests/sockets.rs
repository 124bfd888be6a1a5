//! Sockets that clients create and pass: from other network namespaces, with traffic before and
//! after MPA, of every wrong kind, and with all options that could make a daemon block.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use rnic_abi::abi::control::{Refusal, ReplyBody, RequestBody};
use rnic_abi::types::{CqId, QpId};
use rnic_client::{AcceptOptions, Access, Context, Error, QpOptions, RecvRequest, SendRequest};
use rnic_tests::raw::{Raw, memfd};
use rnic_tests::wire::{self, CRC, Ending, fpdu, untagged};
use rnic_tests::{DEADLINE, Daemon, Process, built, over};
use rustix::net::sockopt::{set_socket_linger, set_socket_recv_buffer_size};

fn daemon() -> Daemon {
    Daemon::start("[engine]\nworkers = 2\n")
}

/// Returns both ends of a TCP connection.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (theirs, _) = listener.accept().unwrap();
    for stream in [&ours, &theirs] {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
    }
    (ours, theirs)
}

//= MPA-7.1-4
//= MPA-7.1.2-2d
//= MPA-7.1.2-3b
#[test]
fn rejected_socket_continues_in_plain_tcp() {
    let daemon = daemon();
    let start = daemon.at_rest();
    let contexts = [(); 2].map(|()| Context::open_at(daemon.socket()).unwrap());
    over::play(&contexts[0], &contexts[1]).unwrap();
    drop(contexts);
    daemon.shrinks_to(start);
}

#[test]
fn client_in_another_netns_passes_sockets() {
    let daemon = daemon();
    let start = daemon.at_rest();
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "sh", "-c"]);
    command.arg("ip link set lo up && echo apart && exec \"$0\" over");
    command.arg(built::program("actor")).env("RNIC_SOCKET", daemon.socket());
    let (status, lines) = Process::start(command).finish();
    if !lines.iter().any(|l| l == "apart") {
        rnic_tests::omit(&format!("no separate network namespace here: {}", lines.join("; ")));
        return;
    }
    assert!(status.success(), "{}", lines.join("\n"));
    assert!(lines.iter().any(|l| l == "both ends are done"), "{lines:?}");
    daemon.shrinks_to(start);
}

#[test]
fn other_users_may_not_pass_sockets() {
    if !rustix::process::geteuid().is_root() {
        rnic_tests::omit("only root can act as another user");
        return;
    }
    // Other rights do not include this one.
    for (right, may) in [("", false), ("trusted = true", false), ("sockets = true", true)] {
        let config = format!("[control]\nmode = \"0666\"\n[[user]]\nwho = {OTHER}\n{right}\n");
        let daemon = Daemon::start(&config);
        let (status, lines) = daemon.actor_as(OTHER, &["over"]).finish();
        assert_eq!(status.success(), may, "{right}: {lines:?}");
        let why = format!("not allowed by user.sockets: pass a TCP socket as user {OTHER}");
        assert_eq!(lines.iter().any(|l| l.contains(&why)), !may, "{right}: {lines:?}");
        // Neither end was touched: the refusal is the last line of the actor, and no resource is
        // left.
        daemon.is_empty();
    }
}

/// Another user.
const OTHER: u32 = 61_004;

#[test]
fn a_refused_socket_is_returned() {
    let daemon = daemon();
    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
    let options = rnic_client::ConnectOptions { ird: Some(u16::MAX), ..Default::default() };
    let (ours, mut theirs) = pair();
    let error = qp.connect_over(ours, &options).unwrap_err();
    assert!(matches!(error.error.refusal(), Some(Refusal::AboveMaximum { .. })), "{error}");
    let mut ours = error.stream.unwrap();
    ours.write_all(b"still mine").unwrap();
    assert_eq!(wire::exactly(&mut theirs, 10), b"still mine");
    // A peer without an MPA request, and a peer that closes after its request.
    let serving = context.serve_over(ours).unwrap();
    theirs.write_all(b"GET / HTTP/1.1 and more").unwrap();
    match serving.accept_request(Some(DEADLINE)) {
        Err(Error::Unreachable { reason }) => assert!(reason.contains("not an MPA"), "{reason}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a request of nothing"),
    }
    assert!(!matches!(wire::ending(&mut theirs), Ending::Silence(_)));
    let (ours, theirs) = pair();
    drop(theirs);
    let error = qp.connect_over(ours, &Default::default()).unwrap_err();
    assert!(matches!(error.error, Error::Unreachable { .. }), "{error}");
    assert!(error.stream.is_none());
}

/// Rules for connecting and listening also apply to sockets that a program has created itself.
#[test]
fn rules_hold_for_passed_sockets() {
    let uid = rustix::process::geteuid().as_raw();
    let daemon = |network: &str| {
        let rules = ["connect", "listen"].map(|rule| {
            let network = match rule {
                "connect" => format!("network = \"{network}\""),
                _ => format!("address = \"{network}\""),
            };
            format!("[[{rule}]]\nwho = {uid}\n{network}\nports = \"1-65535\"\n")
        });
        Daemon::start(&rules.concat())
    };
    let elsewhere = daemon("10.0.0.0/8");
    let (mut raw, qp, _) = raw_with_qp(&elsewhere);
    for (body, rule) in
        [(connect_over(qp), "connect"), (RequestBody::ServeOver { context: 0 }, "listen")]
    {
        let (ours, _theirs) = pair();
        match raw.try_call(body, &[ours.as_fd()]) {
            Some(Err(Refusal::NotAllowed { rule: named, .. })) => assert_eq!(named, rule),
            other => panic!("{rule}: {other:?}"),
        }
    }
    // If a rule allows it, the same request is accepted.
    let here = daemon("127.0.0.0/8");
    let (mut raw, qp, _) = raw_with_qp(&here);
    let (ours, mut theirs) = pair();
    assert_eq!(raw.call_with(connect_over(qp), &[ours.as_fd()]), Ok(ReplyBody::Done));
    assert_eq!(wire::exactly(&mut theirs, 16), b"MPA ID Req Frame");
    let (ours, _theirs) = pair();
    let serving = raw.try_call(RequestBody::ServeOver { context: 0 }, &[ours.as_fd()]);
    assert!(matches!(serving, Some(Ok(ReplyBody::Listener { .. }))), "{serving:?}");
}

/// Opens a session in the raw protocol, with a QP.
fn raw_with_qp(daemon: &Daemon) -> (Raw, QpId, CqId) {
    let mut raw = Raw::open(daemon.socket());
    let pd = raw.pd();
    let cq = raw.cq(64);
    let qp = raw.qp(pd, cq);
    (raw, qp, cq)
}

fn connect_over(qp: QpId) -> RequestBody {
    RequestBody::ConnectOver { qp, ird: None, ord: None, private_data: Vec::new() }
}

#[test]
fn wrong_descriptors_are_refused_by_name() {
    let daemon = daemon();
    let start = daemon.at_rest();
    let (mut raw, qp, _) = raw_with_qp(&daemon);
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.connect(udp.local_addr().unwrap()).unwrap();
    let (unix, _other) = UnixStream::pair().unwrap();
    let listening = TcpListener::bind("127.0.0.1:0").unwrap();
    let fresh = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    // The client's end of a connection that its peer has reset.
    let (gone, peer) = pair();
    set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
    drop(peer);
    assert!(matches!(wire::ending(&mut gone.try_clone().unwrap()), Ending::Reset(_)));
    let sockets: [(&dyn AsFd, &str); 5] = [
        (&udp, "it is not a stream socket"),
        (&unix, "it is not an IPv4 or IPv6 socket"),
        (&listening, "it is a listening socket"),
        (&fresh, "it is not connected"),
        (&gone, "it is not connected"),
    ];
    for (socket, expected) in sockets {
        for body in [connect_over(qp), RequestBody::ServeOver { context: 0 }] {
            match raw.call_with(body, &[socket.as_fd()]) {
                Err(Refusal::Invalid { field, why }) => {
                    assert_eq!((field.as_str(), why.as_str()), ("socket", expected));
                }
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
    // The listener still listens, and the datagram socket still sends.
    TcpStream::connect(listening.local_addr().unwrap()).unwrap();
    udp.send(b"x").unwrap();
    drop(raw);
    let memfd = memfd(4096);
    let (ours, _theirs) = pair();
    let pipe = rustix::pipe::pipe().unwrap();
    let wrong: [&[BorrowedFd<'_>]; 4] =
        [&[memfd.as_fd()], &[pipe.0.as_fd()], &[ours.as_fd(), ours.as_fd()], &[]];
    for descriptors in wrong {
        let (mut raw, qp, _) = raw_with_qp(&daemon);
        raw.ask(connect_over(qp), descriptors);
        let (reply, _) = raw.receive().unwrap();
        let reply: rnic_abi::abi::control::Reply = postcard::from_bytes(&reply).unwrap();
        assert!(matches!(reply.result, Err(Refusal::Malformed { .. })), "{reply:?}");
        assert!(raw.receive().is_none(), "the session goes on");
    }
    daemon.shrinks_to(start);
}

/// Time that closing a trap takes.
const LINGER: Duration = Duration::from_secs(900);

/// Passes a socket with adverse options, establishes a connection with more to send than the peer
/// reads, and exits. Returns the peer's end, from which nothing is read.
fn leave_a_trap(daemon: &Daemon) -> TcpStream {
    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(64, None).unwrap();
    let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
    qp.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    let buffer = context.create_shared_buffer(1 << 20).unwrap();
    let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
    let (ours, mut theirs) = pair();
    set_socket_recv_buffer_size(&theirs, 4096).unwrap();
    let mine = ours.try_clone().unwrap();
    let serving = context.serve_over(ours).unwrap();
    // Set after the daemon has taken the socket, because it may set its own options.
    mine.set_nonblocking(false).unwrap();
    set_socket_linger(&mine, Some(LINGER)).unwrap();
    wire::send_bytes(&mut theirs, &wire::request(CRC, 1, b""));
    let request = serving.accept_request(Some(DEADLINE)).unwrap();
    let sges = [region.sge(0, 1 << 20)];
    let sends: Vec<_> = (0..8).map(|n| SendRequest::send(n, &sges)).collect();
    qp.post_send(&sends).unwrap();
    let accepted = std::thread::scope(|scope| {
        let accepting = scope.spawn(|| request.accept(&qp, &AcceptOptions::default()));
        wire::reply(&mut theirs);
        wire::send_bytes(&mut theirs, &fpdu(&untagged(3, 0, 1, b"")));
        accepting.join().unwrap()
    });
    accepted.unwrap();
    mine.set_nonblocking(false).unwrap();
    // Waits until the daemon has filled the buffers to the peer.
    let deadline = Instant::now() + DEADLINE;
    let mut last = (0, Instant::now());
    while last.1.elapsed() < Duration::from_millis(20) {
        let sent = qp.query().unwrap().counters.bytes_sent;
        if sent != last.0 {
            last = (sent, Instant::now());
        }
        assert!(Instant::now() < deadline);
    }
    drop((qp, mine));
    theirs
}

#[test]
fn client_sockets_never_block_the_daemon() {
    let daemon = daemon();
    let start = daemon.at_rest();
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    let mut visitor = daemon.actor(&["traffic", &address, "7"]);
    visitor.line_after("under way");
    let begun = Instant::now();
    let traps: Vec<_> = (0..8).map(|_| leave_a_trap(&daemon)).collect();
    // Any trap would have blocked a thread for longer.
    assert!(begun.elapsed() < LINGER, "{:?}", begun.elapsed());
    visitor.release();
    visitor.succeed();
    server.line_after("ended after ");
    server.release();
    server.succeed();
    daemon.shrinks_to(start);
    drop(traps);
}
