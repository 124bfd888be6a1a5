//! Lost hosts, cut links, and clients outside the daemon's network namespace.

use std::net::{SocketAddr, SocketAddrV6, TcpListener};
use std::time::{Duration, Instant};

use rnic_client::{
    AcceptOptions, CompletionStatus, ConnectOptions, Context, DisconnectReason, Error, QpState,
    RecvRequest, SendRequest,
};
use rnic_tests::apart::{Apart, Side};
use rnic_tests::{Client, DEADLINE, Daemon, End};

/// Creates an end with two receives without buffers.
fn end(context: &Context) -> End {
    let end = End::new(Client::of(context));
    end.qp.post_recv(&[RecvRequest::new(1, &[]), RecvRequest::new(2, &[])]).unwrap();
    end
}

/// Connects an end of the first context to an end of the second, which listens on `listen`. The
/// first end reaches that address as `host`.
fn connect(contexts: [&Context; 2], listen: SocketAddr, mut host: SocketAddr) -> [End; 2] {
    let ends = contexts.map(end);
    let listener = contexts[1].listen(listen, 1).unwrap();
    host.set_port(listener.local_addr().port());
    ends[0].qp.start_connect(host, &ConnectOptions::default()).unwrap();
    let request = listener.accept_request(Some(DEADLINE)).unwrap();
    request.accept(&ends[1].qp, &AcceptOptions::default()).unwrap();
    ends[0].qp.wait_connected(Some(DEADLINE)).unwrap();
    ends
}

/// Waits until a daemon has at most `before` descriptors.
fn gives_back(daemon: &Daemon, before: usize) {
    let deadline = Instant::now() + DEADLINE;
    while daemon.footprint().descriptors > before {
        assert!(Instant::now() < deadline, "{:?} instead of {before}", daemon.footprint());
        std::thread::yield_now();
    }
}

/// Cuts the link of a connection and checks that both ends notice, with outstanding Reads or idle.
fn notices(tcp: &str, reading: bool) {
    let Some(apart) = Apart::available() else { return };
    let config = format!("[engine]\nworkers = 1\n[tcp]\n{tcp}");
    let daemons = [Side::A, Side::B].map(|side| apart.daemon(side, &config));
    let contexts = daemons.each_ref().map(|d| Context::open_at(d.socket()).unwrap());
    let address: SocketAddr = format!("{}:0", Side::B.ip()).parse().unwrap();
    let [a, b] = connect([&contexts[0], &contexts[1]], address, address);
    let ends = [(&a, &b, &daemons[0]), (&b, &a, &daemons[1])];
    let descriptors = daemons.each_ref().map(|d| d.footprint().descriptors);
    apart.cut(Side::B);
    let mut expected = 2;
    if reading {
        for (end, other, _) in ends {
            let read = SendRequest::read(3, end.region.sge(0, 8), other.region.remote().at(0));
            end.qp.post_send(&[read.signaled()]).unwrap();
        }
        expected = 3;
    }
    for ((end, _, daemon), before) in ends.into_iter().zip(descriptors) {
        match end.qp.wait_disconnected(Some(DEADLINE)).unwrap() {
            DisconnectReason::Lost { why } => {
                assert!(why.contains("the peer's host no longer answers"), "{why}");
            }
            other => panic!("{other}"),
        }
        let ended = end.completions(expected);
        assert!(ended.iter().all(|c| c.status != CompletionStatus::Success), "{ended:?}");
        assert_eq!(end.qp.query().unwrap().state, QpState::Error);
        // The socket is closed. The QP keeps all other resources until it is destroyed.
        gives_back(daemon, before - 1);
    }
    drop((a, b, contexts));
    daemons.iter().for_each(|daemon| drop(daemon.is_empty()));
}

#[test]
fn lost_host_is_noticed_with_outstanding_data() {
    notices("keepalive = \"off\"\nuser_timeout = \"2s\"\n", true);
}

#[test]
fn lost_host_is_noticed_while_idle() {
    notices("keepalive = \"1s\"\nkeepalive_interval = \"1s\"\nuser_timeout = \"2s\"\n", false);
}

#[test]
fn link_local_addresses_keep_their_interface() {
    let Some(apart) = Apart::available() else { return };
    // This process is in neither namespace, so it needs an explicit permission.
    let config = "[[user]]\nwho = 0\nhost_loopback = true\n";
    let daemons = [Side::A, Side::B].map(|side| apart.daemon(side, config));
    let contexts = daemons.each_ref().map(|d| Context::open_at(d.socket()).unwrap());
    let of = |ip: Side, seen_from: Side| -> SocketAddr {
        let ip = ip.link_local().parse().unwrap();
        SocketAddrV6::new(ip, 0, 0, apart.index(seen_from)).into()
    };
    let same = |x: SocketAddr, y: SocketAddr| {
        let (SocketAddr::V6(x), SocketAddr::V6(y)) = (x, y) else { panic!("{x} {y}") };
        (x.ip(), x.scope_id()) == (y.ip(), y.scope_id())
    };
    let [a, b] = connect([&contexts[0], &contexts[1]], of(Side::B, Side::B), of(Side::B, Side::A));
    let rows = [a.qp.query().unwrap(), b.qp.query().unwrap()];
    let addresses = rows.each_ref().map(|row| row.addresses.unwrap());
    assert_eq!(rows[0].path, "tcp");
    assert!(same(addresses[0].local, of(Side::A, Side::A)), "{addresses:?}");
    assert!(same(addresses[0].peer, of(Side::B, Side::A)), "{addresses:?}");
    assert!(same(addresses[1].local, of(Side::B, Side::B)), "{addresses:?}");
    assert!(same(addresses[1].peer, of(Side::A, Side::B)), "{addresses:?}");
    // A host reaches itself by its link-local address without a network.
    let here = of(Side::B, Side::B);
    let [c, _d] = connect([&contexts[1], &contexts[1]], here, here);
    let row = c.qp.query().unwrap();
    assert_eq!(row.path, "direct");
    assert!(same(row.addresses.unwrap().peer, here), "{row:?}");
    // Without a scope, a link-local address is invalid.
    let bare: SocketAddr = "[fe80::2]:0".parse().unwrap();
    assert!(matches!(contexts[1].listen(bare, 1), Err(Error::Refused { .. })));
}

/// Runs `part` in another namespace. Returns its output, or the error output if it fails.
fn contained(daemon: &Daemon, part: &[&str]) -> Result<Vec<String>, String> {
    let (status, lines) = daemon.actor_contained(part).finish();
    if status.success() { Ok(lines) } else { Err(lines.join("\n")) }
}

#[test]
fn loopback_is_not_shared_between_namespaces() {
    if Apart::available().is_none() {
        return;
    }
    for path in ["direct", "tcp"] {
        let config = format!("[engine]\nloopback = \"{path}\"\n[mpa]\nreply_deadline = \"1s\"\n");
        let daemon = Daemon::start(&config);
        // Private services of the host, and a listener of the daemon itself.
        let services = ["127.0.0.1:0", "[::1]:0"].map(|at| TcpListener::bind(at).unwrap());
        let context = Context::open_at(daemon.socket()).unwrap();
        let listener = context.listen("127.0.0.1:0", 4).unwrap();
        let port = services[0].local_addr().unwrap().port();
        let wanted = [
            format!("127.0.0.1:{port}"),
            format!("127.9.9.9:{port}"),
            format!("0.0.0.0:{port}"),
            format!("[::ffff:127.0.0.1]:{port}"),
            format!("[::1]:{}", services[1].local_addr().unwrap().port()),
            format!("[::]:{port}"),
            "169.254.169.254:80".to_owned(),
            "[fe80::1%1]:80".to_owned(),
            listener.local_addr().to_string(),
        ];
        for address in &wanted {
            let said = contained(&daemon, &["visit", address]).unwrap_err();
            let rule = "not allowed by user.host_loopback: connect to ";
            assert!(said.contains(rule), "{address}: {said}");
        }
        for address in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0", "[::1]:0"] {
            let said = contained(&daemon, &["host", "1", address]).unwrap_err();
            assert!(said.contains("not allowed by user.host_loopback: bind "), "{said}");
        }
        // No connection was established, not even briefly.
        for service in &services {
            service.set_nonblocking(true).unwrap();
            let accepted = service.accept().map(drop).map_err(|e| e.kind());
            assert_eq!(accepted, Err(std::io::ErrorKind::WouldBlock));
        }
        let request = listener.accept_request(Some(Duration::ZERO));
        assert!(matches!(request, Err(Error::TimedOut { .. })));
        // A program in the daemon's own namespace may connect.
        let qp = end(&context).qp;
        let stranger = services[0].local_addr().unwrap();
        let error = qp.connect(stranger, &ConnectOptions::default()).unwrap_err();
        assert!(error.to_string().contains("no MPA reply"), "{error}");
    }
}

#[test]
fn loopback_sources_cannot_be_spoofed() {
    let Some(apart) = Apart::available() else { return };
    let daemon = apart.daemon(Side::A, "");
    // This process is in another namespace, but may connect wherever the host may.
    let context = Context::open_at(daemon.socket()).unwrap();
    let qp = end(&context).qp;
    let to: SocketAddr = format!("{}:7", Side::A.ip()).parse().unwrap();
    let local = |from: &str| {
        let options = ConnectOptions { local: from.parse().ok(), ..ConnectOptions::default() };
        qp.connect(to, &options).unwrap_err().to_string()
    };
    let said = local("127.0.0.1:0");
    assert!(said.contains("not allowed by user.host_loopback: connect from 127.0.0.1:0"), "{said}");
    for from in ["0.0.0.0:0", "10.77.0.1:0"] {
        let said = local(from);
        assert!(said.contains("refused (os error"), "{from}: {said}");
    }
}
