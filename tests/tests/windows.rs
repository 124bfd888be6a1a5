//! Memory windows and the lifetime of STags, through `rnic-client`, with daemons as processes: one
//! worker and three, on both paths.

use std::time::Instant;

use WindowKind::{Type1, Type2};
use rnic_client::{
    AcceptOptions, Access, Bind, CompletionOpcode, CompletionStatus, DisconnectReason, Error,
    ListKind, MemoryWindow, Mr, MrOptions, Pd, Qp, QpOptions, RecvRequest, RemoteMr, Rows, Scope,
    SendRequest, TerminateOrigin, WindowKind, WindowRow,
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

    /// Lets the peer write, and the owner receive a message after it.
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
fn window_bounds_and_rights_are_enforced() {
    for daemon in [Daemon::start(&engine(3, "direct")), Daemon::start(&engine(3, "tcp"))] {
        for kind in [Type1, Type2] {
            for (access, at, code) in [
                (REMOTE, 100, "1/1/01"),
                (REMOTE, u64::MAX, "1/1/01"),
                (Access::REMOTE_WRITE | Access::ZERO_BASED, 100, "1/1/01"),
                (Access::REMOTE_READ, 0, "1/1/00"),
            ] {
                let pair = Pair::new(&daemon);
                let region = bindable(&pair.owner);
                let window = pair.owner.pd.alloc_window(kind).unwrap();
                let bind = Bind::new(&region, 100..200, access);
                let open = bound(&pair.owner, &window, &pair.owned, &bind);
                if access.contains(Access::ZERO_BASED) {
                    assert_eq!(open.addr, 0);
                    pair.write(&open, 99, b"x");
                    assert_eq!(bytes(&region, 199, 1), b"x");
                    region.write_at(199, b"\0").unwrap();
                }
                pair.write_refused(&open, at, code);
                assert_eq!(bytes(&region, 0, 4096), vec![0; 4096]);
            }
        }
    }
}

#[test]
fn rebound_type_1_window_invalidates_its_old_key() {
    for daemon in daemons() {
        let pair = Pair::new(&daemon);
        // Another connection of the same domain, possibly on another worker, binds.
        let (other, _peering) = join(&pair.owner, &pair.peer);
        let first = bindable(&pair.owner);
        let second = bindable(&pair.owner);
        let window = pair.owner.pd.alloc_window(Type1).unwrap();
        let old = bound(&pair.owner, &window, &other, &Bind::new(&first, .., REMOTE));
        pair.write(&old, 0, b"one");
        let new = bound(&pair.owner, &window, &other, &Bind::new(&second, 8..16, REMOTE));
        assert_eq!(new.rkey.0, old.rkey.0 & !0xFF | (old.rkey.0 + 1) & 0xFF);
        pair.write(&new, 0, b"two");
        assert_eq!(
            (bytes(&first, 0, 4), bytes(&second, 7, 5)),
            (b"one\0".to_vec(), b"\0two\0".to_vec())
        );
        first.deregister().unwrap();
        pair.write_refused(&old, 0, "1/1/00");
    }
}

#[test]
fn invalidated_type_2_window_can_be_rebound() {
    for daemon in daemons() {
        let pair = Pair::new(&daemon);
        let Pair { owner, peer, owned, peering } = &pair;
        let region = bindable(owner);
        let window = owner.pd.alloc_window(Type2).unwrap();
        let bind = Bind::new(&region, ..10, REMOTE);
        for key in 0..3 {
            let open = window.bind_with_key(owned, 1, &bind, key).unwrap();
            owner.completes(1, CompletionOpcode::BindMw);
            assert_eq!(open.rkey.0 & 0xFF, u32::from(key));
            pair.write(&open, 0, &[key + 1]);
            owned.post_recv(&[RecvRequest::new(2, &[])]).unwrap();
            peering.post_send(&[SendRequest::send_invalidate(3, &[], open.rkey)]).unwrap();
            peer.completes(3, CompletionOpcode::Send);
            let received = owner.completes(2, CompletionOpcode::Receive);
            assert_eq!(received.invalidated, Some(open.rkey));
            assert_eq!(bytes(&region, 0, 1), [key + 1]);
            assert_eq!(windows(owner)[0].mr, None);
        }
        // The peer may not invalidate an STag that is not limited to its stream.
        let shared = owner.pd.alloc_window(Type1).unwrap();
        let open = bound(owner, &shared, owned, &bind);
        owned.post_recv(&[RecvRequest::new(4, &[])]).unwrap();
        peering.post_send(&[SendRequest::send_invalidate(5, &[], open.rkey)]).unwrap();
        ended(peering, TerminateOrigin::Peer, "0/2/09");
        let refused = owner.completion();
        assert_eq!((refused.wr_id, refused.status), (4, CompletionStatus::RemoteInvalidRequest));
        assert_eq!(windows(owner).iter().filter(|row| row.mr.is_some()).count(), 1);
    }
}

#[test]
fn invalid_binds_end_the_connection() {
    let daemon = Daemon::start(&engine(3, "direct"));
    let strange = Client::new(&daemon);
    let foreign = bindable(&strange);
    for (kind, what) in [Type1, Type2].into_iter().flat_map(|k| (0..6).map(move |n| (k, n))) {
        let pair = Pair::new(&daemon);
        let owner = &pair.owner;
        let region = bindable(owner);
        let plain = owner.pd.reg_mr(&owner.shared_buffer(4096), .., Access::LOCAL_WRITE).unwrap();
        let constant = owner.pd.reg_mr(&owner.shared_buffer(4096), .., Access::MW_BIND).unwrap();
        let own = MrOptions {
            access: Access::LOCAL_WRITE | Access::MW_BIND,
            scope: Scope::Qp(pair.peering.id()),
            ..MrOptions::default()
        };
        let own = pair.peer.pd.reg_mr_with(&pair.peer.shared_buffer(4096), .., &own).unwrap();
        let window = owner.pd.alloc_window(kind).unwrap();
        let present = window.rkey();
        let next = rnic_client::Stag(window.rkey().0 ^ 1);
        let bind = match what {
            0 => Bind::new(&region, 4000..4097, REMOTE),
            1 => Bind::new(&plain, 0..8, REMOTE),
            2 => Bind::new(&constant, 0..8, REMOTE),
            3 => Bind::new(&region, 0..8, REMOTE | Access::LOCAL_WRITE),
            4 => Bind::new(&foreign, 0..8, REMOTE),
            _ => Bind::new(&own, 0..8, REMOTE),
        };
        pair.owned.post_send(&[SendRequest::bind(1, present, next, &bind).signaled()]).unwrap();
        let completion = owner.completion();
        let expected = (1, CompletionOpcode::BindMw, CompletionStatus::MwBind);
        let found = (completion.wr_id, completion.opcode, completion.status);
        assert_eq!(found, expected, "{kind:?} {what}");
        ended(&pair.owned, TerminateOrigin::Local, "0/0/00");
        assert_eq!(windows(owner)[0].mr, None);
    }
    // The library itself refuses objects of another context, and calls for the other window type.
    let pair = Pair::new(&daemon);
    let window = pair.owner.pd.alloc_window(Type1).unwrap();
    let refused = window.bind(&pair.owned, 1, &Bind::new(&foreign, 0..8, REMOTE)).unwrap_err();
    assert!(matches!(refused, Error::ForeignObject { .. }));
    let refused = window.bind(&pair.peering, 1, &Bind::nothing()).unwrap_err();
    assert!(matches!(refused, Error::ForeignObject { .. }));
    let refused = window.bind_with_key(&pair.owned, 1, &Bind::nothing(), 7).unwrap_err();
    assert!(matches!(refused, Error::WrongWindow { kind: Type1 }));
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
        // Dropping its handle does not free it either.
        pair.write(&open[0], 0, b"1");
        pair.write(&open[1], 1, b"2");
        assert_eq!(bytes(&view, 0, 3), b"12\0");
        let [one, two] = windows;
        drop(one);
        assert_eq!(owner.context.status().unwrap().mrs, 2);
        two.deallocate();
        assert_eq!(
            owner.context.status().unwrap().mrs,
            1,
            "the region is freed with its last window"
        );
        pair.write_refused(&open[1], 0, "1/1/00");
    }
}

#[test]
fn a_qp_that_goes_leaves_its_windows_unbound() {
    for daemon in daemons() {
        let pair = Pair::new(&daemon);
        let owner = &pair.owner;
        let region = bindable(owner);
        let window = owner.pd.alloc_window(Type2).unwrap();
        bound(owner, &window, &pair.owned, &Bind::new(&region, ..8, REMOTE));
        assert!(windows(owner)[0].mr.is_some());
        drop(pair.owned);
        assert_eq!(windows(owner)[0].mr, None);
        region.deregister().unwrap();
        // Another QP may bind it.
        let region = bindable(owner);
        let (owned, _peering) = join(owner, &pair.peer);
        bound(owner, &window, &owned, &Bind::new(&region, ..8, REMOTE));
    }
}

#[test]
fn invalidated_region_can_be_deregistered() {
    for daemon in daemons() {
        for own in [false, true] {
            let pair = Pair::new(&daemon);
            let Pair { owner, peer, owned, peering } = &pair;
            let scope = if own { Scope::Qp(owned.id()) } else { Scope::Pd };
            let access = Access::LOCAL_WRITE | REMOTE;
            let options = MrOptions { access, scope, ..MrOptions::default() };
            let region = || owner.pd.reg_mr_with(&owner.shared_buffer(4096), .., &options).unwrap();
            let local = region();
            let read = region();
            let source = peer.pd.reg_mr(&peer.shared_buffer(4096), .., access).unwrap();
            source.write_at(0, b"placed").unwrap();
            pair.write(&local.remote(), 0, b"x");
            owned
                .post_send(&[
                    SendRequest::local_invalidate(1, local.lkey()),
                    SendRequest::read_invalidate(2, read.sge(0, 6), source.remote().at(0)),
                ])
                .unwrap();
            owner.completes(1, CompletionOpcode::LocalInvalidate);
            owner.completes(2, CompletionOpcode::RdmaRead);
            assert_eq!(bytes(&read, 0, 6), b"placed");
            if own {
                let third = region();
                owned.post_recv(&[RecvRequest::new(3, &[])]).unwrap();
                let send = SendRequest::send_invalidate(4, &[], third.rkey());
                peering.post_send(&[send]).unwrap();
                let received = owner.completes(3, CompletionOpcode::Receive);
                assert_eq!(received.invalidated, Some(third.rkey()));
                third.deregister().unwrap();
            }
            let gone = [local.remote(), read.remote()];
            let count = owner.context.status().unwrap().mrs;
            local.deregister().unwrap();
            read.deregister().unwrap();
            assert_eq!(owner.context.status().unwrap().mrs, count - 2);
            pair.write_refused(&gone[usize::from(own)], 0, "1/1/00");
        }
        daemon.is_empty();
    }
}

#[test]
fn regions_for_one_qp_and_from_zero() {
    let daemon = Daemon::start(&engine(3, "tcp"));
    let pair = Pair::new(&daemon);
    let owner = &pair.owner;
    let access = Access::LOCAL_WRITE | REMOTE | Access::ZERO_BASED;
    let scope = Scope::Qp(pair.owned.id());
    let options = MrOptions { access, scope, iova: None };
    let region = owner.pd.reg_mr_with(&owner.shared_buffer(4096), 1000..2000, &options).unwrap();
    assert_eq!((region.iova(), region.remote().addr, region.len()), (0, 0, 1000));
    pair.write(&region.remote(), 999, b"x");
    assert_eq!(bytes(&region, 998, 2), b"\0x");
    // The region does not serve another QP of the domain, and not every QP can be named.
    let (other, peering) = join(owner, &pair.peer);
    let write = SendRequest::write_inline(1, b"!", region.remote().at(0));
    peering.post_send(&[write]).unwrap();
    ended(&other, TerminateOrigin::Local, "1/1/02");
    let buffer = owner.shared_buffer(4096);
    let register = |pd: &Pd, qp: &Qp| {
        let options = MrOptions { scope: Scope::Qp(qp.id()), ..MrOptions::default() };
        pd.reg_mr_with(&buffer, .., &options).map(drop).map_err(|e| e.to_string())
    };
    let foreign = register(&owner.pd, &pair.peering).unwrap_err();
    assert!(foreign.contains(&format!("no QP {}", pair.peering.id())), "{foreign}");
    let elsewhere = register(&owner.context.open_pd(None).unwrap(), &pair.owned).unwrap_err();
    assert!(elsewhere.contains("scope: QP"), "{elsewhere}");
    pair.write_refused(&region.remote(), 1000, "1/1/01");
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
            Taking::Dealloc => window.deallocate(),
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
