//! The administrator's rules between real processes: domains shared by sessions, configurations
//! that change under traffic, and connections that an administrator ends.

use std::os::unix::fs::PermissionsExt;
use std::time::Instant;

use rnic_abi::abi::control::RequestBody;
use rnic_abi::abi::queue::Sge;
use rnic_abi::types::{Stag, TerminateOrigin};
use rnic_client::{
    Access, CompletionStatus, Context, DeviceAttributes, DisconnectReason, Error, Event, QpOptions,
    QpState, RecvRequest, RemoteMr, SendRequest,
};
use rnic_tests::raw::Raw;
use rnic_tests::{Client, DEADLINE, Daemon, End, PATHS, Process, engine, on_path};
use rustix::process::{Signal, geteuid};

/// Writes an end's bytes to a region and returns the status.
fn write(from: &End, to: RemoteMr) -> CompletionStatus {
    from.region.write_at(0, b"rnic").unwrap();
    let sges = [from.region.sge(0, 4)];
    from.qp.post_send(&[SendRequest::write(7, &sges, to.at(0)).signaled()]).unwrap();
    // A Write completes when it is sent. Only a Read after it can show the result of the Write.
    let read = SendRequest::read(8, from.region.sge(8, 4), to.at(0)).signaled();
    let posted = from.qp.post_send(&[read]);
    let first = from.completion();
    match (first.status, posted) {
        (CompletionStatus::Success, Ok(())) => from.completion().status,
        (status, _) => status,
    }
}

fn disconnected(end: &End) -> DisconnectReason {
    match end.event(|event| matches!(event, Event::Disconnected { .. })) {
        Event::Disconnected { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

/// Connects a writer to a session with domain `pd`.
fn pair(daemon: &Daemon, pd: Option<&str>) -> (End, End) {
    let mut target = Client::new(daemon);
    if let Some(name) = pd {
        target = target.in_domain(name);
    }
    let [writer, target] = End::joined([Client::new(daemon), target]);
    (writer, target)
}

fn owner_in_the_domain(daemon: &Daemon) -> (Process, RemoteMr) {
    let mut owner = daemon.actor(&["share", "shared"]);
    let line = owner.line_after("region ");
    let (addr, rkey) = line.split_once(' ').unwrap();
    let rkey = Stag(rkey.parse().unwrap());
    (owner, RemoteMr { addr: addr.parse().unwrap(), len: 4096, rkey })
}

#[test]
fn named_domain_shares_regions_between_sessions() {
    for loopback in PATHS {
        let daemon = Daemon::start(&format!(
            "{}[[pd]]\nname = \"shared\"\nusers = [{}]\n",
            engine(2, loopback),
            geteuid().as_raw()
        ));
        let (mut owner, region) = owner_in_the_domain(&daemon);
        // A QP of another session of the domain gives access to the owner's memory.
        let (writer, partner) = pair(&daemon, Some("shared"));
        assert_eq!(write(&writer, region), CompletionStatus::Success, "{loopback}");
        // A QP of a private domain does not.
        let (stranger, _private) = pair(&daemon, None);
        let status = write(&stranger, region);
        assert!(status != CompletionStatus::Success, "{loopback}: {status:?}");
        // Local SGEs must refer to the partner's own memory, even in the same domain.
        let foreign = [Sge { addr: region.addr, length: 4, lkey: region.rkey.0 }];
        partner.qp.post_send(&[SendRequest::send(9, &foreign).signaled()]).unwrap();
        assert_eq!(partner.completion().status, CompletionStatus::LocalProtection, "{loopback}");
        owner.release();
        let said = owner.succeed().join("\n");
        assert!(said.contains("holds [114, 110, 105, 99]"), "{said}");
    }
}

#[test]
fn owner_end_is_a_remote_error_for_partners() {
    for loopback in PATHS {
        let daemon = Daemon::start(&format!(
            "{}[[pd]]\nname = \"shared\"\nusers = [{}]\n",
            on_path(loopback),
            geteuid().as_raw()
        ));
        let (owner, region) = owner_in_the_domain(&daemon);
        let (writer, partner) = pair(&daemon, Some("shared"));
        let (second_writer, second_partner) = pair(&daemon, Some("shared"));
        assert_eq!(write(&writer, region), CompletionStatus::Success, "{loopback}");
        owner.kill();
        // Four sessions remain in addition to the querying one.
        daemon.wait_status("rid of the owner", |s| s.sessions == 5);
        let status = write(&writer, region);
        assert!(status != CompletionStatus::Success, "{loopback}: {status:?}");
        let reason = disconnected(&partner);
        let ours = |origin| origin == TerminateOrigin::Local;
        assert!(
            matches!(reason, DisconnectReason::Terminate { origin, .. } if ours(origin)),
            "{loopback}: {reason:?}"
        );
        // The other partner's region and connection in the same domain are unaffected.
        let own = second_partner.context.open_pd(Some("shared")).unwrap();
        let buffer = second_partner.context.create_shared_buffer(4096).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let region = own.reg_mr(&buffer, .., access).unwrap();
        assert_eq!(write(&second_writer, region.remote()), CompletionStatus::Success, "{loopback}");
    }
}

#[test]
fn unlisted_user_cannot_open_the_domain() {
    if geteuid().as_raw() != 0 {
        rnic_tests::omit("only root can act as several users");
        return;
    }
    let daemon = Daemon::start(
        "[control]\nmode = \"0666\"\n[[pd]]\nname = \"shared\"\nusers = [0]\ngroups = [5000]\n",
    );
    let everybody = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(daemon.dir(), everybody).unwrap();
    let _mine = Context::open_at(daemon.socket()).unwrap().open_pd(Some("shared")).unwrap();
    // Each thread has its own credentials.
    let socket = daemon.socket();
    let as_user = |uid, gids: &[u32]| {
        std::thread::scope(|scope| {
            let open = || {
                let gids: Vec<_> =
                    gids.iter().map(|g| rustix::process::Gid::from_raw(*g)).collect();
                rustix::thread::set_thread_groups(&gids).unwrap();
                rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(uid)).unwrap();
                let context = Context::open_at(socket).unwrap();
                context.open_pd(Some("shared")).map(drop)
            };
            scope.spawn(open).join().unwrap()
        })
    };
    let refused = as_user(4711, &[4711]).unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }));
    assert!(refused.to_string().contains("not allowed by pd.shared: "), "{refused}");
    as_user(4711, &[4711, 5000]).unwrap();
}

/// Returns the text of a refusal.
fn refusal<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => panic!("access was granted"),
        Err(error) => error.to_string(),
    }
}

/// Writes another configuration and makes the daemon reload it.
fn reload(daemon: &Daemon, config: &str) {
    std::fs::write(daemon.dir().join("rnicd.toml"), config).unwrap();
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
    rustix::process::kill_process(pid, Signal::HUP).unwrap();
}

/// Retries until the result is granted (`wanted` is true) or refused.
fn until<T>(wanted: bool, mut attempt: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let result = attempt();
        if result.is_ok() == wanted {
            return result;
        }
        assert!(Instant::now() < deadline, "the reload has no effect");
        drop(result);
        std::thread::yield_now();
    }
}

#[test]
fn reload_changes_limits_under_traffic() {
    let config = |qps: u32, workers: u32| {
        format!("[engine]\nworkers = {workers}\n[limits.session]\nqps = {qps}\n")
    };
    let mut daemon = Daemon::start(&config(2, 1));
    let mut server = daemon.actor(&["serve"]);
    let address = server.line_after("listening on ");
    let mut traffic = daemon.actor(&["traffic", &address]);
    traffic.line_after("under way");

    let context = Context::open_at(daemon.socket()).unwrap();
    let pd = context.open_pd(None).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let create = || pd.create_qp(&QpOptions::new(&cq));
    let mut qps = vec![create().unwrap(), create().unwrap()];
    let refused = refusal(create());
    assert!(refused.contains("limits.session.qps = 2 reached"), "{refused}");
    reload(&daemon, &config(3, 2));
    qps.push(until(true, create).unwrap());
    let refused = refusal(create());
    assert!(refused.contains("limits.session.qps = 3 reached"), "{refused}");

    reload(&daemon, "[limits.session]\nqps = many\n");
    // Two signals in quick succession may cause only one reload, of the latest file.
    daemon.line_after("configuration not reloaded");
    let refused = refusal(create());
    assert!(refused.contains("limits.session.qps = 3 reached"), "{refused}");

    // A limit below the present use keeps existing objects and refuses new ones.
    reload(&daemon, &config(1, 1));
    let mut refused = String::new();
    while !refused.contains("limits.session.qps = 1 reached") {
        qps.truncate(3);
        refused = refusal(create());
    }
    assert!(qps.iter().all(|qp| qp.query().is_ok()));
    qps.truncate(1);
    refusal(create());
    qps.clear();
    drop(create().unwrap());

    traffic.release();
    let said = traffic.succeed().join("\n");
    assert!(said.contains(" rounds"), "{said}");
    server.release();
    server.succeed();
    drop((pd, cq, context));
    let lines = daemon.stop().join("\n");
    for line in [
        "reloaded: limits.session.qps: 2 -> 3",
        "takes effect after a restart: engine.workers: 1 -> 2",
        "configuration not reloaded, the previous one remains: ",
        "rnicd.toml:2:7: limits.session.qps = many: ",
        "reloaded: limits.session.qps: 3 -> 1",
    ] {
        assert!(lines.contains(line), "{line}\n{lines}");
    }
}

#[test]
fn log_level_changes_at_run_time() {
    if std::env::var_os("RUST_LOG").is_some() {
        rnic_tests::omit("RUST_LOG is set and overrides log.level");
        return;
    }
    let daemon = Daemon::start("");
    drop(Context::open_at(daemon.socket()).unwrap());
    reload(&daemon, "[log]\nlevel = \"debug\"\n[limits]\nsge = 3\n");
    let context = Context::open_at(daemon.socket()).unwrap();
    let deadline = Instant::now() + DEADLINE;
    while context.device().unwrap().max_sge != 3 {
        assert!(Instant::now() < deadline, "the reload has no effect");
    }
    drop(Context::open_at(daemon.socket()).unwrap());
    drop(context);
    let lines = daemon.stop();
    let at = |text: &str| lines.iter().position(|line| line.contains(text));
    let reloaded = at("reloaded: log.level: info -> debug").expect("a reload event");
    assert!(at("session opened").is_some_and(|opened| opened > reloaded), "{lines:?}");
}

#[test]
fn device_identity_is_fixed_at_start() {
    let text = "[device]\nname = \"mlx\"\nvendor_id = 0x2c9\nvendor_part_id = 4119\nhw_ver = 3\n\
                guid = \"02:00:5e:00:53:01:00:01\"\n[limits]\nqueue_depth = 512\nbacklog = 9\n";
    let daemon = Daemon::start(text);
    let context = Context::open_at(daemon.socket()).unwrap();
    let device = context.device().unwrap();
    let iwarp = |d: &DeviceAttributes| d.devices.last().cloned().expect("the iWARP device");
    let identity = |d: &DeviceAttributes| {
        let row = iwarp(d);
        (row.vendor_id, row.vendor_part_id, d.hw_ver, d.guid)
    };
    let written = (0x2c9, 4119, 3, 0x0200_5e00_5301_0001);
    assert_eq!((device.name.as_str(), identity(&device)), ("mlx", written));
    assert_eq!((device.max_srq_wr, device.max_backlog), (512, 9));
    reload(&daemon, "[device]\nname = \"other\"\nvendor_id = 1\n[limits]\nsge = 3\n");
    let deadline = Instant::now() + DEADLINE;
    while context.device().unwrap().max_sge != 3 {
        assert!(Instant::now() < deadline, "the reload has no effect");
    }
    assert_eq!(identity(&context.device().unwrap()), written);
    drop(context);
    let lines = daemon.stop().join("\n");
    for key in ["device.name: mlx -> other", "device.vendor_id: 0x2c9 -> 0x1", "device.guid: "] {
        let line = format!("takes effect after a restart: {key}");
        assert!(lines.contains(&line), "{line}\n{lines}");
    }
}

#[test]
fn default_device_identity_is_stable() {
    let device = |daemon: &Daemon| Context::open_at(daemon.socket()).unwrap().device().unwrap();
    let start = |config: &str| Daemon::start(config);
    let first = start("");
    let again = start("");
    let other = start("[device]\nname = \"rnicd7\"\n");
    let first = device(&first);
    let again = device(&again);
    let other = device(&other);
    for device in &first.devices {
        assert_eq!((device.vendor_id, device.vendor_part_id), (0x02_524e, 0));
    }
    assert_eq!(first.hw_ver, 0);
    // The GIDs of the RoCE device may change with the addresses of the host.
    let guids = |d: &DeviceAttributes| d.devices.iter().map(|row| row.guid).collect::<Vec<_>>();
    assert_eq!((first.guid, guids(&first)), (again.guid, guids(&again)));
    assert_ne!(first.devices[0].guid, first.guid);
    assert_ne!(first.devices[0].guid, other.devices[0].guid);
    assert_ne!(first.guid, other.guid);
    assert!(first.guid >> 32 != 0 && first.guid << 32 != 0, "{:#x}", first.guid);
}

#[test]
fn rules_change_while_the_daemon_runs() {
    let uid = geteuid().as_raw();
    let daemon = Daemon::start("");
    let context = Context::open_at(daemon.socket()).unwrap();
    let listen = || context.bind("127.0.0.1:0");
    drop(listen().unwrap());
    let open = || context.open_pd(Some("late"));
    refusal(open());
    let pd = format!("[[pd]]\nname = \"late\"\nusers = [{uid}]\nmrs = 1\n");
    reload(&daemon, &pd);
    let late = until(true, open).unwrap();
    // Without the rule, open domains remain, but nothing new is allowed.
    reload(&daemon, &format!("[[listen]]\nwho = {uid}\naddress = \"10.9.8.7\"\n"));
    let refused = refusal(until(false, open));
    assert!(refused.contains("no [[pd]] named \"late\""), "{refused}");
    let buffer = context.create_shared_buffer(4096).unwrap();
    let refused = refusal(late.reg_mr(&buffer, .., Access::empty()));
    assert!(refused.contains("any more"), "{refused}");
    let refused = refusal(listen());
    assert!(refused.contains("not allowed by listen: bind 127.0.0.1:0"), "{refused}");
    reload(&daemon, &pd);
    drop(until(true, listen).unwrap());
    late.reg_mr(&buffer, .., Access::empty()).unwrap();
}

#[test]
fn admin_disconnect_keeps_the_qp() {
    for loopback in PATHS {
        let daemon = Daemon::start(&on_path(loopback));
        let (peer, victim) = pair(&daemon, None);
        // Both ends have sent a message, so either may send a Terminate.
        for (to, from) in [(&victim, &peer), (&peer, &victim)] {
            let sges = [to.region.sge(64, 4)];
            to.qp.post_recv(&[RecvRequest::new(1, &sges), RecvRequest::new(2, &sges)]).unwrap();
            let sges = [from.region.sge(0, 4)];
            from.qp.post_send(&[SendRequest::send(3, &sges).signaled()]).unwrap();
            assert_eq!(from.completion().status, CompletionStatus::Success);
            assert_eq!(to.completion().status, CompletionStatus::Success);
        }
        let mut admin = Raw::open(daemon.socket());
        let body = RequestBody::AdminDisconnect { qp: victim.qp.id() };
        admin.call(body).unwrap();
        let origin = |end: &End| match disconnected(end) {
            DisconnectReason::Terminate { origin, .. } => origin,
            other => panic!("{loopback}: {other:?}"),
        };
        assert_eq!(origin(&victim), TerminateOrigin::Local, "{loopback}");
        assert_eq!(origin(&peer), TerminateOrigin::Peer, "{loopback}");
        for end in [&victim, &peer] {
            let flushed = end.completion();
            assert_eq!((flushed.wr_id, flushed.status), (2, CompletionStatus::WrFlush));
        }
        assert_eq!(victim.qp.query().unwrap().state, QpState::Error);
    }
}
