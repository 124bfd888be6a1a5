//! Memory windows and the lifetime of STags, through `rnic-client`: daemons with one worker and
//! three, on both paths.

use std::time::Instant;

use WindowKind::{Type1, Type2};
use rnic_client::{
    AcceptOptions, Access, Bind, CompletionOpcode, CompletionStatus, DisconnectReason, ListKind,
    MemoryWindow, Mr, Qp, QpOptions, RecvRequest, RemoteMr, Rows, SendRequest, TerminateOrigin,
    WindowKind, WindowRow,
};
use rnic_tests::traffic::Rng;
use rnic_tests::{Client, DEADLINE, Daemon, engine, hammer};

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Starts a daemon for each number of workers and each path.
fn daemons() -> impl Iterator<Item = Daemon> {
    [(1, "direct"), (3, "direct"), (1, "tcp"), (3, "tcp")]
        .into_iter()
        .map(|(n, path)| Daemon::start(&engine(n, path)))
}

/// Creates a QP with `signal_all`.
fn qp(client: &Client) -> Qp {
    client.pd.create_qp(&QpOptions { signal_all: true, ..client.options() }).unwrap()
}

/// Registers a region that windows can be bound to.
fn bindable(client: &Client) -> Mr {
    client.region(4096, Access::LOCAL_WRITE | Access::MW_BIND)
}

fn bound(client: &Client, window: &MemoryWindow, qp: &Qp, bind: &Bind<'_>) -> RemoteMr {
    let remote = match window.kind() {
        Type1 => window.bind(qp, 900, bind).unwrap(),
        Type2 => window.bind_with_key(qp, 900, bind, 0x5A).unwrap(),
    };
    client.completes(900, CompletionOpcode::BindMw);
    remote
}

/// Returns the daemon's list of this session's windows.
fn windows(client: &Client) -> Vec<WindowRow> {
    let Rows::Windows(rows) = client.context.list(ListKind::Windows, 0).unwrap().rows else {
        panic!("not windows")
    };
    rows.into_iter().filter(|row| row.session == client.context.session()).collect()
}

/// An owner of memory and its peer, connected.
struct Pair {
    owner: Client,
    peer: Client,
    owned: Qp,
    peering: Qp,
}

impl Pair {
    fn new(daemon: &Daemon) -> Self {
        let owner = Client::new(daemon);
        let peer = Client::new(daemon);
        let (owned, peering) = join(&owner, &peer);
        Pair { owner, peer, owned, peering }
    }

    /// Lets the peer write, and waits until the owner has received a message that follows the
    /// Write.
    fn write(&self, to: &RemoteMr, at: u64, bytes: &[u8]) {
        self.owned.post_recv(&[RecvRequest::new(70, &[])]).unwrap();
        self.peering
            .post_send(&[
                SendRequest::write_inline(71, bytes, to.at(at)),
                SendRequest::send_inline(72, b""),
            ])
            .unwrap();
        self.peer.completes(71, CompletionOpcode::RdmaWrite);
        self.peer.completes(72, CompletionOpcode::Send);
        self.owner.completes(70, CompletionOpcode::Receive);
    }

    /// Lets the peer write without access, and checks the code that the owner's RNIC reports.
    fn write_refused(&self, to: &RemoteMr, at: u64, code: &str) {
        let write = SendRequest::write_inline(73, b"!", to.at(at));
        self.peering.post_send(&[write]).unwrap();
        ended(&self.peering, TerminateOrigin::Peer, code);
        ended(&self.owned, TerminateOrigin::Local, code);
    }
}

fn join(owner: &Client, peer: &Client) -> (Qp, Qp) {
    let owned = qp(owner);
    let peering = qp(peer);
    owner.join(&peering, &owned);
    (owned, peering)
}

fn ended(qp: &Qp, by: TerminateOrigin, expected: &str) {
    match qp.wait_disconnected(Some(DEADLINE)).unwrap() {
        DisconnectReason::Terminate { origin, code, .. } => {
            assert_eq!((origin, code.number().as_str()), (by, expected));
        }
        other => panic!("{other:?} instead of {expected}"),
    }
}

fn bytes(mr: &Mr, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mr.read_at(at, &mut bytes).unwrap();
    bytes
}

#[test]
fn window_gives_access_until_unbound() {
    for daemon in daemons() {
        for kind in [Type1, Type2] {
            let pair = Pair::new(&daemon);
            let Pair { owner, peer, owned, peering } = &pair;
            let region = bindable(owner);
            let window = owner.pd.alloc_window(kind).unwrap();
            assert_eq!(windows(owner)[0].mr, None);
            let bind = Bind::new(&region, 100..200, REMOTE);
            let open = bound(owner, &window, owned, &bind);
            assert_eq!((window.remote(), window.rkey()), (Some(open), open.rkey));
            assert_eq!((open.addr, open.len), (region.iova() + 100, 100));
            let row = &windows(owner)[0];
            assert_eq!((row.stag, row.mr, row.kind), (open.rkey, Some(region.id()), kind));

            pair.write(&open, 0, b"first");
            pair.write(&open, 96, b"last");
            assert_eq!(bytes(&region, 99, 6), b"\0first");
            assert_eq!(bytes(&region, 196, 5), b"last\0");
            let sink = bindable(peer);
            let read = SendRequest::read(1, sink.sge(0, 100), open.at(0));
            peering.post_send(&[read]).unwrap();
            assert_eq!(peer.completes(1, CompletionOpcode::RdmaRead).byte_len, 100);
            assert_eq!(bytes(&sink, 0, 100), bytes(&region, 100, 100));

            window.unbind(owned, 2).unwrap();
            let opcode = match kind {
                Type1 => CompletionOpcode::BindMw,
                Type2 => CompletionOpcode::LocalInvalidate,
            };
            owner.completes(2, opcode);
            assert_eq!((window.remote(), windows(owner)[0].mr), (None, None));
            pair.write_refused(&open, 0, "1/1/00");
            assert_eq!(bytes(&region, 100, 5), b"first");
        }
        daemon.is_empty();
    }
}

#[test]
fn a_region_stays_while_windows_are_bound_to_it() {
    for daemon in daemons() {
        let pair = Pair::new(&daemon);
        let owner = &pair.owner;
        let buffer = owner.shared_buffer(4096);
        let access = Access::LOCAL_WRITE | Access::MW_BIND;
        let view = owner.pd.reg_mr(&buffer, .., Access::empty()).unwrap();
        let region = owner.pd.reg_mr(&buffer, .., access).unwrap();
        let windows = [Type1, Type2].map(|kind| owner.pd.alloc_window(kind).unwrap());
        let open = windows
            .each_ref()
            .map(|window| bound(owner, window, &pair.owned, &Bind::new(&region, ..8, REMOTE)));
        let refused = region.deregister().unwrap_err().to_string();
        assert!(refused.contains("is in use by 2 bound windows"), "{refused}");
        // The call has dropped the handle, which does not free the region either.
        pair.write(&open[0], 0, b"1");
        pair.write(&open[1], 1, b"2");
        assert_eq!(bytes(&view, 0, 3), b"12\0");
        let [one, two] = windows;
        drop(one);
        assert_eq!(owner.context.status().unwrap().mrs, 2);
        drop(two);
        assert_eq!(
            owner.context.status().unwrap().mrs,
            1,
            "the region is freed with its last window"
        );
        pair.write_refused(&open[1], 0, "1/1/00");
    }
}

/// Ways in which the owner revokes access.
#[derive(Clone, Copy, Debug)]
enum Taking {
    /// By a request on the QP that receives the Writes.
    Unbind,
    /// By a request on another QP.
    UnbindElsewhere,
    /// By binding the window to other memory.
    Move,
    Dealloc,
}

/// Length of the window in bytes. A copy of this length takes several steps.
const OPEN: u64 = 192 * 1024;

/// Revokes access while another process writes as fast as it can. Data that the owner writes after
/// the revocation must stay unchanged.
fn revocation(owners: &Daemon, writers: &Daemon, times: u64) {
    let owner = Client::new(owners);
    let listener = owner.listener();
    let mut writer = writers.actor(&["hammer", &listener.local_addr().to_string()]);
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let region = owner.pd.reg_mr(&owner.shared_buffer(OPEN), .., access).unwrap();
    let aside = bindable(&owner);
    let couple = hammer::couple(&owner.context, &owner.pd, &owner.cq).unwrap();
    let mut rng = Rng::new(times);
    let mut found = vec![0; OPEN as usize];
    for n in 0..times {
        let (kind, taking) = [
            (Type1, Taking::Unbind),
            (Type1, Taking::UnbindElsewhere),
            (Type1, Taking::Move),
            (Type1, Taking::Dealloc),
            (Type2, Taking::Unbind),
            (Type2, Taking::Dealloc),
        ][n as usize % 6];
        region.fill(0, OPEN as usize, 0).unwrap();
        let window = owner.pd.alloc_window(kind).unwrap();
        let qp = qp(&owner);
        let request = listener.accept_request(Some(DEADLINE)).unwrap();
        request.accept(&qp, &AcceptOptions::default()).unwrap();
        let bind = Bind::new(&region, .., Access::REMOTE_WRITE);
        let open = bound(&owner, &window, &qp, &bind);
        qp.post_send(&[SendRequest::send_inline(901, &open.to_bytes())]).unwrap();
        owner.completes(901, CompletionOpcode::Send);
        // Waits until a Write has reached a random offset.
        let at = rng.below(OPEN / 8) * 8;
        let began = Instant::now();
        while region.load_u64(at).unwrap() == 0 {
            assert!(began.elapsed() < DEADLINE, "round {n}: nothing was written");
            std::hint::spin_loop();
        }
        match taking {
            Taking::Unbind => window.unbind(&qp, 1).unwrap(),
            Taking::UnbindElsewhere => window.unbind(&couple.1, 1).unwrap(),
            Taking::Move => {
                window.bind(&couple.0, 1, &Bind::new(&aside, .., REMOTE)).map(drop).unwrap();
            }
            Taking::Dealloc => drop(window),
        }
        if !matches!(taking, Taking::Dealloc) {
            let done = owner.completion();
            // The next Write may end the QP before every worker has confirmed the unbind.
            let flushed = done.qp == qp.id() && done.status == CompletionStatus::WrFlush;
            assert!(done.wr_id == 1 && (flushed || done.ok().is_ok()), "round {n}: {done:?}");
        }
        region.fill(0, OPEN as usize, 0x22).unwrap();
        ended(&qp, TerminateOrigin::Local, "1/1/00");
        drop(qp);
        region.read_at(0, &mut found).unwrap();
        let late = found.iter().filter(|byte| **byte != 0x22).count();
        assert_eq!(late, 0, "round {n}: {late} bytes came after {taking:?} of {kind:?} was done");
    }
    drop(listener);
    drop((couple, owner));
    writer.line_after("refused");
    let said = writer.succeed();
    assert!(said.last().is_some_and(|line| line.ends_with("times")), "{said:?}");
}

fn long(short: u64, long: u64) -> u64 {
    if std::env::var_os("RNIC_TEST_LONG").is_some() { long } else { short }
}

#[test]
fn no_write_after_unbind_with_one_worker() {
    let daemon = Daemon::start(&engine(1, "direct"));
    revocation(&daemon, &daemon, long(60, 6000));
}

#[test]
fn no_write_after_unbind_on_direct_path() {
    let daemon = Daemon::start(&engine(3, "direct"));
    revocation(&daemon, &daemon, long(120, 6000));
}

#[test]
fn no_write_after_unbind_over_tcp() {
    let daemon = Daemon::start(&engine(3, "tcp"));
    revocation(&daemon, &daemon, long(60, 6000));
}

#[test]
fn no_write_after_unbind_between_daemons() {
    let owners = Daemon::start(&engine(3, "direct"));
    let writers = Daemon::start(&engine(1, "direct"));
    revocation(&owners, &writers, long(60, 6000));
}

#[test]
fn process_killed_during_bind_leaves_nothing() {
    let daemon = Daemon::start(&engine(3, "direct"));
    let start = daemon.at_rest();
    let mut rng = Rng::new(3);
    for _ in 0..long(15, 500) {
        let mut actor = daemon.actor(&["binds"]);
        actor.line_after("under way");
        for _ in 0..rng.below(20) {
            actor.line_after("under way");
        }
        actor.kill();
    }
    daemon.shrinks_to(start);
}
