//! Mechanisms that a naive implementation lacks: few system calls per post, a direct path without
//! sockets, revocation that blocks all later access, and events that are never lost.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rnic_client::{
    Access, AddressPair, Arm, Completion, CompletionChannel, CompletionStatus, Context, Cq, Mr, Qp,
    QpOptions, RecvRequest, SendRequest,
};
use rnic_tests::attacks::cpu;
use rnic_tests::pinger::Pinger;
use rnic_tests::traffic::Rng;
use rnic_tests::{Client, DEADLINE, Daemon, PATHS, built, copy_files, engine, join, timing};

fn long(short: u64, long: u64) -> u64 {
    if std::env::var_os("RNIC_TEST_LONG").is_some() { long } else { short }
}

fn daemon(workers: u32, loopback: &str) -> Daemon {
    // A writer that continues after a revocation uses an invalid STag and reconnects at once.
    let config =
        format!("{}[limits.peer]\nstag_guesses_per_minute = 1000000\n", engine(workers, loopback));
    Daemon::start(&config)
}

/// Creates a QP with enough depth for all requests that the tests post at once.
fn qp(client: &Client) -> Qp {
    client.pd.create_qp(&QpOptions { sq_depth: 128, ..client.options() }).unwrap()
}

/// Returns the number of read and write system calls of a process, including writes to eventfds.
fn calls(pid: &str) -> u64 {
    let io = std::fs::read_to_string(format!("/proc/{pid}/io")).unwrap();
    let number = |key: &str| {
        let line = io.lines().find_map(|l| l.strip_prefix(key)).unwrap();
        line.trim().parse::<u64>().unwrap()
    };
    number("syscr:") + number("syscw:")
}

#[test]
fn busy_batch_skips_most_doorbells() {
    for loopback in PATHS {
        let daemon = daemon(1, loopback);
        let posts = long(100_000, 1_000_000);
        let burst = || {
            let mut host = daemon.actor(&["sink"]);
            let address = host.line_after("listening on ");
            let pid = daemon.pid().to_string();
            let before = calls(&pid);
            let mut burst = daemon.actor(&["burst", &address, &posts.to_string()]);
            let client: u64 = burst.line_after("calls: ").parse().unwrap();
            let daemon_calls = calls(&pid) - before;
            burst.succeed();
            host.release();
            host.succeed();
            (client, daemon_calls)
        };
        // On a busy machine, sleeping threads need more wake-ups. Accept the quietest of several
        // attempts.
        let mut tries = Vec::<(u64, u64)>::new();
        let begun = Instant::now();
        while !tries.iter().any(|(client, daemon)| *client.max(daemon) < posts / 100) {
            tries.push(burst());
            assert!(begun.elapsed() < DEADLINE, "{loopback}: calls for {posts} posts: {tries:?}");
        }
    }
}

/// Returns the number of established TCP sockets of this machine between two IPv4 addresses. The
/// kernel may list a socket twice if others come and go while the table is read.
fn sockets_between(ends: AddressPair) -> usize {
    let entry = |end: SocketAddr| {
        let IpAddr::V4(ip) = end.ip() else { panic!("{end} is not an IPv4 address") };
        format!("{:08X}:{:04X}", u32::from_ne_bytes(ip.octets()), end.port())
    };
    let ends = [entry(ends.local), entry(ends.peer)];
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let found: BTreeSet<_> = table
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().skip(1).take(3).collect();
            let [local, peer, "01"] = fields[..] else { return None };
            ends.iter().all(|end| [local, peer].contains(&&**end)).then_some((local, peer))
        })
        .collect();
    found.len()
}

#[test]
fn direct_path_copies_each_byte_once() {
    for (loopback, sockets) in [("direct", 0), ("tcp", 2)] {
        let daemon = daemon(2, loopback);
        let a = Client::new(&daemon);
        let b = Client::new(&daemon);
        let qp_a = qp(&a);
        let qp_b = qp(&b);
        let listener = b.listener();
        join(&listener, &qp_a, &qp_b);
        let row = qp_a.query().unwrap();
        assert_eq!(row.path, loopback);
        let ends = row.addresses.unwrap();
        assert_eq!(ends.peer, listener.local_addr());
        assert_eq!(sockets_between(ends), sockets, "{loopback}");
        let before = (row.counters, qp_b.query().unwrap().counters);
        let source = a.region(1 << 20, Access::empty());
        let sink = b.region(1 << 20, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let sges = [source.sge(0, 1 << 20)];
        let write = SendRequest::write(1, &sges, sink.remote().at(0));
        qp_a.post_send(&[write, write, write.signaled()]).unwrap();
        // A Send after the Writes: when it arrives, they are placed.
        qp_b.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
        qp_a.post_send(&[SendRequest::send_inline(2, b"")]).unwrap();
        a.success();
        b.success();
        let after = (qp_a.query().unwrap().counters, qp_b.query().unwrap().counters);
        assert_eq!(after.0.bytes_sent - before.0.bytes_sent, 3 << 20, "{loopback}");
        assert_eq!(after.1.bytes_received - before.1.bytes_received, 3 << 20, "{loopback}");
    }
}

/// Length in bytes of a Write during which a region is revoked. Its copy takes several steps.
const WRITE: u32 = 192 * 1024;

/// Revokes regions while two QPs write into them as fast as they can. After the answer to a
/// revocation, the owner has exclusive access: its later data stays unchanged.
fn revocation(workers: u32, loopback: &str, times: u64) {
    let daemon = daemon(workers, loopback);
    let owner = Client::new(&daemon);
    let writer = Client::new(&daemon);
    let buffer = owner.context.create_shared_buffer(WRITE.into()).unwrap();
    // The owner's own view is never revoked.
    let view = owner.pd.reg_mr(&buffer, .., Access::LOCAL_WRITE).unwrap();
    let source = writer.region(WRITE.into(), Access::empty());
    source.fill(0, WRITE as usize, 0x11).unwrap();
    let listener = owner.listener();
    let mut rng = Rng::new(workers.into());
    let mut found = vec![0; WRITE as usize];
    for n in 0..times {
        view.fill(0, WRITE as usize, 0).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = owner.pd.reg_mr(&buffer, .., access).unwrap();
        let pairs: Vec<(Qp, Qp)> = (0..2)
            .map(|_| {
                let pair = (qp(&writer), qp(&owner));
                join(&listener, &pair.0, &pair.1);
                pair
            })
            .collect();
        let sges = [source.sge(0, WRITE)];
        let write = SendRequest::write(n, &sges, region.remote().at(0)).signaled();
        for (qp, _) in &pairs {
            qp.post_send(&[write; 100]).unwrap();
        }
        // Wait until a Write has reached a random offset.
        let at = rng.below(u64::from(WRITE) / 8) * 8;
        let began = Instant::now();
        while view.load_u64(at).unwrap() == 0 {
            assert!(began.elapsed() < DEADLINE, "nothing was written");
            std::hint::spin_loop();
        }
        region.deregister().unwrap();
        view.fill(0, WRITE as usize, 0x22).unwrap();
        let mut completions = 0;
        let mut failed = 0;
        while completions < 200 {
            let mut some = [Completion::default(); 64];
            let taken = writer.cq.wait(&mut some, Some(DEADLINE)).unwrap();
            assert_ne!(taken, 0, "round {n}: {completions} of 200 completions");
            failed +=
                some[..taken].iter().filter(|c| c.status != CompletionStatus::Success).count();
            completions += taken;
        }
        for (qp, _) in &pairs {
            // Either all Writes preceded the revocation, or the rest was refused.
            if failed > 0 && qp.query().unwrap().terminate.is_some() {
                qp.wait_disconnected(Some(DEADLINE)).unwrap();
            }
        }
        view.read_at(0, &mut found).unwrap();
        let late = found.iter().filter(|byte| **byte != 0x22).count();
        assert_eq!(late, 0, "round {n}: {late} bytes came after the revocation was answered");
    }
}

#[test]
fn no_write_after_revocation_on_direct_path() {
    revocation(3, "direct", long(600, 60_000));
}

#[test]
fn no_write_after_revocation_with_one_worker() {
    revocation(1, "direct", long(200, 10_000));
}

#[test]
fn no_write_after_revocation_over_tcp() {
    revocation(3, "tcp", long(200, 40_000));
}

/// A player of an event-driven ping-pong: arms, polls, and sleeps only if the CQ is empty.
struct Player {
    qp: Qp,
    cq: Cq,
    channel: CompletionChannel,
    slept: u64,
}

impl Player {
    fn new(side: &Client) -> Self {
        let channel = side.context.create_completion_channel().unwrap();
        let cq = side.context.create_cq(64, Some(&channel)).unwrap();
        let qp = side.pd.create_qp(&QpOptions::new(&cq)).unwrap();
        qp.post_recv(&[RecvRequest::new(0, &[]); 4]).unwrap();
        Player { qp, cq, channel, slept: 0 }
    }

    /// Waits for a message. Returns false at the deadline.
    fn receive(&mut self, rng: &mut Rng) -> bool {
        let mut one = [Completion::default()];
        let deadline = Instant::now() + DEADLINE;
        // A channel with spurious events must not prolong the wait forever.
        while Instant::now() < deadline {
            self.cq.arm(Arm::Next).unwrap();
            // A random delay, so that the message arrives at any point between arming and sleeping.
            for _ in 0..rng.below(200) {
                std::hint::spin_loop();
            }
            if self.cq.poll(&mut one).unwrap() == 1 {
                one[0].ok().unwrap();
                self.qp.post_recv(&[RecvRequest::new(0, &[])]).unwrap();
                return true;
            }
            self.slept += 1;
            if self.channel.recv(Some(DEADLINE)).unwrap().is_none() {
                return false;
            }
        }
        false
    }

    fn send(&self) {
        self.qp.post_send(&[SendRequest::send_inline(1, b"")]).unwrap();
    }
}

fn no_event_is_lost(workers: u32, loopback: &str, messages: u64) {
    let daemon = daemon(workers, loopback);
    let a = Client::new(&daemon);
    let b = Client::new(&daemon);
    let mut first = Player::new(&a);
    let mut second = Player::new(&b);
    let listener = b.listener();
    join(&listener, &first.qp, &second.qp);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::new(1);
            for n in 0..messages {
                first.send();
                assert!(first.receive(&mut rng), "reply {n} of {messages} was lost");
            }
        });
        scope.spawn(|| {
            let mut rng = Rng::new(2);
            for n in 0..messages {
                assert!(second.receive(&mut rng), "message {n} of {messages} was lost");
                second.send();
            }
        });
    });
    assert!(first.slept + second.slept > messages / 10, "the players hardly slept");
}

#[test]
fn no_event_is_lost_with_one_worker() {
    no_event_is_lost(1, "direct", long(50_000, 1_000_000));
}

#[test]
fn no_event_is_lost_with_three_workers() {
    no_event_is_lost(3, "direct", long(50_000, 1_000_000));
}

#[test]
fn no_event_is_lost_over_tcp() {
    no_event_is_lost(2, "tcp", long(20_000, 1_000_000));
}

#[test]
fn removed_buffer_is_unmapped_before_the_reply() {
    let daemon = daemon(1, "direct");
    // The context has no queues, because their arenas count as mappings, too.
    let context = Context::open_at(daemon.socket()).unwrap();
    let before = daemon.footprint().mappings;
    for n in 0..20 {
        let shared_buffers: Vec<_> =
            (0..20).map(|_| context.create_shared_buffer(1 << 20).unwrap()).collect();
        assert_eq!(daemon.footprint().mappings, before + 20);
        drop(shared_buffers);
        assert_eq!(daemon.footprint().mappings, before, "round {n}");
    }
    // The same for sessions: a session counts, with its memory, until the daemon has released it.
    let limited = Daemon::start("[limits]\nshared_buffers = 20\n");
    let other = Context::open_at(limited.socket()).unwrap();
    for round in 0..20 {
        let crowd = Context::open_at(limited.socket()).unwrap();
        let shared_buffers: Vec<_> =
            (0..20).map_while(|_| crowd.create_shared_buffer(1 << 20).ok()).collect();
        let mapped = limited.footprint().mappings;
        // 20 shared buffers, and the arenas of two sessions and of the one that ends.
        assert!(mapped <= 20 + 3, "round {round}: {mapped} mappings");
        drop(shared_buffers);
    }
    other.status().unwrap();
}

/// Revokes regions under writers repeatedly, next to an unrelated ping-pong pair. The revoking side
/// runs on one CPU, the pair and the workers on another, because wake-ups between CPUs affect a
/// round trip more than any revocation.
#[test]
fn revocations_do_not_slow_others_down() {
    let is_measured = timing("round trips beside revocations");
    let rounds = if is_measured { long(9, 199) } else { 3 };
    let daemon = daemon(3, "direct");
    let cpus = cpu::allowed();
    let ours = *cpus.first().unwrap();
    let theirs = *cpus.last().unwrap();
    assert_eq!(cpu::confine_threads(daemon.pid(), "rnicd-worker", ours), 3);
    let pinger = Pinger::new(&daemon);
    let sides = [Client::new(&daemon), Client::new(&daemon)];
    let revoker = Revoker::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cpu::confine(&[theirs]);
            revoker.revoke(sides);
        });
        let _stopped = Stopped(&revoker);
        cpu::confine(&[ours]);
        let mut ratios: Vec<f64> = (0..rounds)
            .map(|_| {
                revoker.pauses(true);
                let alone = pinger.median(500);
                revoker.pauses(false);
                let before = revoker.revoked();
                let beside = pinger.median(500);
                revoker.wait_beyond(before);
                beside.as_secs_f64() / alone.as_secs_f64()
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios[ratios.len() / 2];
        assert!(
            !is_measured || ratio < 3.0,
            "round trips take {ratio:.1} times as long beside revocations"
        );
    });
}

/// Revokes regions while they are written to, and pauses on request.
#[derive(Default)]
struct Revoker {
    paused: AtomicBool,
    stopped: AtomicBool,
    /// Number of revocations during a Write.
    revoked: AtomicU64,
}

impl Revoker {
    /// Revokes regions until stopped.
    fn revoke(&self, [owner, writer]: [Client; 2]) {
        let buffer = owner.context.create_shared_buffer(WRITE.into()).unwrap();
        let source = writer.region(WRITE.into(), Access::empty());
        let listener = owner.listener();
        while !self.stopped.load(Ordering::Relaxed) {
            if self.paused.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(100));
                continue;
            }
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let region = owner.pd.reg_mr(&buffer, .., access).unwrap();
            let active = qp(&writer);
            let passive = qp(&owner);
            join(&listener, &active, &passive);
            let sges = [source.sge(0, WRITE)];
            let write = SendRequest::write(1, &sges, region.remote().at(0)).signaled();
            active.post_send(&[write; 100]).unwrap();
            // One Write has completed, and others follow.
            writer.success();
            region.deregister().unwrap();
            let mut left = 99;
            while left > 0 {
                let mut some = [Completion::default(); 64];
                let taken = writer.cq.wait(&mut some, Some(DEADLINE)).unwrap();
                assert_ne!(taken, 0, "{left} of 100 Writes did not complete");
                left -= taken;
            }
            self.revoked.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn pauses(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    fn revoked(&self) -> u64 {
        self.revoked.load(Ordering::Relaxed)
    }

    /// Waits until the number of revocations exceeds `revoked`.
    fn wait_beyond(&self, revoked: u64) {
        let deadline = Instant::now() + DEADLINE;
        while self.revoked() <= revoked {
            assert!(Instant::now() < deadline, "nothing is revoked");
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Stops a revoker even if the test fails.
struct Stopped<'a>(&'a Revoker);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.stopped.store(true, Ordering::Relaxed);
    }
}

/// Registers more regions of one shared buffer than a process may have mappings
/// (`vm.max_map_count`), so they cannot each have one.
#[test]
fn regions_of_one_buffer_share_a_mapping() {
    const REGIONS: u64 = 100_000;
    let daemon = daemon(2, "direct");
    let side = Client::new(&daemon);
    let buffer = side.context.create_shared_buffer(REGIONS).unwrap();
    let before = daemon.footprint().mappings;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let regions: Vec<Mr> =
        (0..REGIONS).map(|n| side.pd.reg_mr(&buffer, n..n + 1, access).unwrap()).collect();
    assert_eq!(daemon.footprint().mappings, before);
    // Each region is separate. A peer can write one byte to the first, the last and one in between,
    // but not a second byte.
    let a = Client::new(&daemon);
    let b = &side;
    let source = a.region(8, Access::LOCAL_WRITE);
    source.fill(0, 8, 0x33).unwrap();
    let listener = b.listener();
    for n in [0, REGIONS / 2 + 1, REGIONS - 1] {
        let region = &regions[n as usize];
        for (length, expected) in
            [(1, CompletionStatus::Success), (2, CompletionStatus::RemoteAccess)]
        {
            let active = qp(&a);
            let passive = qp(b);
            join(&listener, &active, &passive);
            let sges = [source.sge(0, length)];
            active
                .post_send(&[
                    SendRequest::write(1, &sges, region.remote().at(0)),
                    // Its response shows that the Write is placed.
                    SendRequest::read(2, source.sge(0, 0), region.remote().at(0)).signaled(),
                ])
                .unwrap();
            let first = a.completion();
            let arrived = first.status == CompletionStatus::Success;
            assert_eq!(arrived, expected == CompletionStatus::Success, "{n}: {first:?}");
            if !arrived {
                active.wait_disconnected(Some(DEADLINE)).unwrap();
                a.drain();
            }
        }
    }
    let whole = side.pd.reg_mr(&buffer, .., access).unwrap();
    let mut bytes = vec![0; REGIONS as usize];
    whole.read_at(0, &mut bytes).unwrap();
    let written: Vec<u64> =
        (0..).zip(&bytes).filter(|(_, byte)| **byte != 0).map(|(n, _)| n).collect();
    assert_eq!(written, [0, REGIONS / 2 + 1, REGIONS - 1]);
}

/// Clients of other users, and one in its own user and network namespaces. Needs root to become
/// other users.
#[test]
fn clients_may_be_of_any_user_and_namespace() {
    use std::os::unix::fs::PermissionsExt;
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit("not root: clients of other users are not tested");
        return;
    }
    let daemon = Daemon::start(
        "[control]\nmode = \"0666\"\n[[user]]\nwho = \"root\"\nhost_loopback = true\n",
    );
    let dir = daemon.dir();
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    // Copied to a place where other users can run it.
    let actor = dir.join("actor");
    copy_files(built::program("actor"), &actor);
    let actor = actor.to_str().unwrap();
    let run = |wrapper: &[&str], part: &[&str]| {
        let mut command = std::process::Command::new(wrapper[0]);
        command.env("RNIC_SOCKET", daemon.socket()).args(&wrapper[1..]).arg(actor).args(part);
        rnic_tests::Process::start(command)
    };
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let contained = ["unshare", "--user", "--map-root-user", "--net"];
    for (host, guest) in [(&nobody[..], &["env"][..]), (&["env"], &nobody), (&["env"], &contained)]
    {
        let mut hosting = run(host, &["host", "1"]);
        let address = hosting.line_after("listening on ");
        address.parse::<SocketAddr>().unwrap();
        run(guest, &["visit", &address]).succeed();
        hosting.succeed();
    }
    // A user sees its own sessions. An administrator sees all.
    let mine = Context::open_at(daemon.socket()).unwrap();
    let counted = run(&nobody, &["clients"]).succeed();
    assert_eq!(counted, ["1 clients"]);
    let counted = run(&["env"], &["clients"]).succeed();
    assert_eq!(counted, ["2 clients"]);
    drop(mine);
    daemon.is_empty();
}
