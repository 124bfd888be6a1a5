//! Fault rules for calls that the library executes without the daemon: posts, polls and resolutions
//! of a verbs program and of a native program.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use rnic_client::{Arm, Completion, Error, LeasedRequest, RecvRequest, SendRequest, SrqOptions};
use rnic_tests::{Client, DEADLINE, Daemon, PATHS, Process, on_path, verbs};
use tempfile::TempDir;

const IWARP: &str = "rnicd0";
const ROCE: &str = "rnicd1";

struct Rig {
    daemon: Daemon,
    program: PathBuf,
    _scratch: TempDir,
}

impl Rig {
    /// Starts a daemon and compiles the program. Returns `None` without a C compiler.
    fn start(path: &str) -> Option<Rig> {
        let scratch = tempfile::tempdir().unwrap();
        let program = verbs::program("tests/fault_calls.c", scratch.path())?;
        let daemon = Daemon::start(&on_path(path));
        Some(Rig { daemon, program, _scratch: scratch })
    }

    fn command(&self, device: &str, rules: &str, steps: &[&str]) -> Command {
        let mut command = verbs::command(&self.program, &self.daemon);
        command.args(steps).env("RNIC_FAULTS", rules).env("RNIC_DEVICES", device);
        command.env("RNIC_LOG", "debug");
        command
    }
}

/// Runs the program on both devices and both paths, and compares its output.
fn check(rules: &str, steps: &[&str], printed: &[&str]) {
    for path in PATHS {
        let Some(rig) = Rig::start(path) else { return };
        for device in [IWARP, ROCE] {
            let found = Process::start(rig.command(device, rules, steps)).succeed();
            assert_eq!(found, printed, "{rules} on {device} and path {path}");
        }
        rig.daemon.is_empty();
    }
}

#[test]
fn a_chain_is_posted_up_to_the_failed_send() {
    check(
        "do=fail errno=ENOMEM verb=post_send nth=3",
        &["post=wwwww", "wc=2", "post=wr", "wc=2"],
        // The requests after the third one are not counted.
        &["post 12 2", "wc 0 1", "post 0 2", "wc 5 6"],
    );
}

#[test]
fn failed_sends_are_selected_by_opcode() {
    check(
        "do=fail errno=EIO verb=ibv_post_send opcode=read every=2",
        &["post=wrwwrw", "wc=4", "post=rw", "wc=2", "post=r"],
        &["post 5 4", "wc 0 1 2 3", "post 0 2", "wc 6 7", "post 5 0"],
    );
}

#[test]
fn a_started_batch_fails_as_a_whole() {
    check(
        "do=fail errno=EAGAIN verb=post_send nth=3",
        &["wr=www", "wr=wr", "wc=2", "post=w", "wc=1"],
        &["wr 11", "wr 0", "wc 3 4", "post 0 1", "wc 5"],
    );
}

#[test]
fn a_bind_fails_as_a_post() {
    check(
        "do=fail errno=EBUSY verb=post_send opcode=bind-mw limit=1",
        &["post=w", "bind", "bind", "wc=2"],
        &["post 0 1", "bind 16", "bind 0", "wc 0 2"],
    );
}

#[test]
fn receives_are_posted_up_to_the_failed_one() {
    let rules = "do=fail errno=ENOMEM verb=post_recv nth=3; \
                 do=fail errno=EIO verb=post_srq_recv every=2";
    check(
        rules,
        &["recv=5", "recv=5", "srq=3", "srq=1", "srq=1"],
        &["recv 12 2", "recv 0 5", "srq 5 1", "srq 0 1", "srq 5 0"],
    );
}

#[test]
fn polls_and_notifications_fail() {
    check(
        "do=fail errno=EIO verb=poll_cq nth=2; do=fail errno=ENOSPC verb=req_notify_cq every=2",
        &["poll", "poll", "next", "notify"],
        &["poll 0 0", "poll -5 5", "next 2", "notify 0 28"],
    );
    check("do=fail errno=EIO verb=poll_cq nth=1", &["next", "next"], &["next 5", "next 2"]);
}

#[test]
fn a_failed_poll_takes_no_completions() {
    let Some(rig) = Rig::start("direct") else { return };
    for device in [IWARP, ROCE] {
        let steps = ["post=ww", "input", "poll", "wc=2"];
        let mut program = Process::start(rig.command(device, "", &steps));
        program.line_after("ready");
        let add = ["fault", "add", "do=fail", "errno=EIO", "verb=poll_cq", "limit=1"];
        rig.daemon.control(&add);
        program.ask("", "poll -5 5");
        program.line_after("wc 0 1");
        program.succeed();
        rig.daemon.control(&["fault", "clear"]);
    }
}

#[test]
fn queries_and_address_handles_fail() {
    let rules = "do=fail errno=ENODEV verb=query_port limit=1; \
                 do=fail errno=ENOMEM verb=query_pkey limit=1";
    check(rules, &["port", "pkey", "port", "pkey"], &["port 19", "pkey 12", "port 0", "pkey 0"]);
    let Some(rig) = Rig::start("direct") else { return };
    let command = rig.command(ROCE, "do=fail errno=ENOMEM verb=create_ah limit=1", &["ah", "ah"]);
    assert_eq!(Process::start(command).succeed(), ["ah 12", "ah 0"]);
}

#[test]
fn a_failed_destruction_leaves_the_object() {
    let verbs = ["destroy_qp", "destroy_srq", "destroy_cq", "destroy_comp_channel", "dealloc_mw"];
    let verbs = verbs.into_iter().chain(["dealloc_pd"]).zip(5..);
    let rules = verbs.map(|(verb, errno)| format!("do=fail errno={errno} verb={verb} limit=1"));
    let rules: Vec<_> = rules.collect();
    check(&rules.join("; "), &["destroy"], &["destroy 5 6 7 8 9 10"]);
}

#[test]
fn a_forked_child_sends_no_call_request() {
    check(
        "do=fail errno=ENOMEM verb=poll_cq nth=1",
        &["fork", "poll", "poll"],
        &["child 5", "poll -12 12", "poll 0 0"],
    );
}

#[test]
fn resolutions_fail_at_once_or_by_an_event() {
    check(
        "do=fail errno=EADDRNOTAVAIL verb=rdma_resolve_addr limit=1",
        &["addr"],
        &["addr 99", "addr ADDR_RESOLVED 0"],
    );
    check(
        "do=fail errno=ENETUNREACH verb=rdma_resolve_route limit=1",
        &["route"],
        &["route 101", "route ROUTE_RESOLVED 0"],
    );
    check(
        "do=addr-error limit=1; do=route-error by=1ms limit=1",
        &["addr", "route"],
        &[
            "addr ADDR_ERROR -19",
            "addr ADDR_RESOLVED 0",
            "route ROUTE_ERROR -110",
            "route ROUTE_RESOLVED 0",
        ],
    );
    check(
        "do=addr-error errno=EHOSTUNREACH peer=127.0.0.1 limit=1; do=addr-error peer=127.0.0.2",
        &["sync", "sync"],
        &["sync 113", "sync 0"],
    );
}

/// A rule takes effect on the first call after `rnicctl fault add`, and on no call after
/// `fault clear`.
#[test]
fn set_rules_select_objects_of_calls() {
    for path in PATHS {
        let Some(rig) = Rig::start(path) else { return };
        for device in [IWARP, ROCE] {
            let steps = ["input", "post=w", "poll", "input", "post=w", "wc=1"];
            for (verb, key) in [("post_send", "qp"), ("post_send", "pd"), ("poll_cq", "cq")] {
                for offset in [0, 1000] {
                    let mut program = Process::start(rig.command(device, "", &steps));
                    let line = program.line_after("ready");
                    let number = line.split_whitespace().find_map(|word| word.strip_prefix(key));
                    let number: u32 = number.unwrap()[1..].parse().unwrap();
                    let selector = format!("{key}={}", number + offset);
                    let verb_is = format!("verb={verb}");
                    let other = if device == ROCE { IWARP } else { ROCE };
                    let not_here = format!("device={other}");
                    let fail = ["fault", "add", "do=fail", "errno=EIO", &verb_is];
                    let add = |more: &[&str]| {
                        let output = rig.daemon.rnicctl(&[&fail[..], more].concat());
                        assert!(output.status.success(), "{output:?}");
                    };
                    add(&[&selector]);
                    // A CQ has neither a device nor a peer.
                    if verb == "post_send" {
                        add(&[&not_here]);
                        add(&["peer=192.0.2.1"]);
                    }
                    let failed = offset == 0;
                    let post = failed && verb == "post_send";
                    program.ask("", if post { "post 5 0" } else { "post 0 1" });
                    let polled = program.line_after("poll ");
                    assert_eq!(polled == "-5 5", failed && verb == "poll_cq", "{polled}");
                    program.line_after("ready");
                    if failed {
                        let log = rig.daemon.json(&["fault", "log"]);
                        assert_eq!(log[0]["rule"], "injected by fault fail", "{log}");
                        assert_eq!(rig.daemon.json(&["fault", "list"])[0]["injected"], 1);
                    }
                    rig.daemon.control(&["fault", "clear"]);
                    program.ask("", "post 0 1");
                    let (status, lines) = program.finish();
                    assert!(status.success(), "{lines:?}");
                }
            }
        }
    }
}

fn refused(error: &Error) -> String {
    match error {
        Error::Refused { refusal, diagnosis_id: 1.. } => refusal.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn native_posts_fail_with_a_refusal() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let client = Client::new(&daemon);
        let [a, b] = client.pair();
        let set = |rules: &str| client.context.set_own_faults(rules).unwrap();
        let receive = |n| RecvRequest::new(n, &[]);
        set("do=fail errno=ENOMEM verb=post_recv nth=2");
        let error = b.post_recv(&[receive(0), receive(1), receive(2)]).unwrap_err();
        assert_eq!(error.posted, 1);
        assert!(refused(&error.source).starts_with("injected by fault fail: "));
        b.post_recv(&[receive(3)]).unwrap();
        set("name=second do=fail errno=ENOMEM verb=post_send nth=2");
        let send = |n| SendRequest::send_inline(n, b"").signaled();
        let error = a.post_send(&[send(4), send(5), send(6)]).unwrap_err();
        assert_eq!(error.posted, 1);
        assert!(refused(&error.source).starts_with("injected by fault second: "));
        a.post_send(&[send(7)]).unwrap();
        let mut done: Vec<u64> = client.successes(4).iter().map(|c| c.wr_id).collect();
        done.sort_unstable();
        assert_eq!(done, [0, 3, 4, 7]);
    }
}

#[test]
fn an_admitted_batch_is_not_checked_again() {
    let daemon = Daemon::start("");
    let client = Client::new(&daemon);
    let [a, b] = client.pair();
    b.post_recv(&[RecvRequest::new(1, &[]), RecvRequest::new(2, &[])]).unwrap();
    client.context.set_own_faults("do=fail errno=EIO verb=post_send nth=3").unwrap();
    let send = |n| SendRequest::send_inline(n, b"").signaled();
    let mut posting = a.posting().unwrap();
    for _ in 0..2 {
        posting.admit(rnic_client::SendOpcode::Send).unwrap();
    }
    posting.push(&send(3)).unwrap();
    posting.push(&send(4)).unwrap();
    refused(&posting.push(&send(5)).unwrap_err());
    posting.finish().unwrap();
    client.successes(4);
}

#[test]
fn native_leases_polls_and_waits_fail() {
    let daemon = Daemon::start("");
    let client = Client::new(&daemon);
    let [a, b] = client.pair();
    let set = |rules: &str| client.context.set_own_faults(rules).unwrap();
    set("do=fail errno=EIO verb=post_send limit=1; do=fail errno=EIO verb=post_recv limit=1");
    let region = client.pd.reg_local(4096).unwrap();
    let lease = |from: u64| region.lease(from..from + 8).unwrap();
    let error = b.post_recv_leased(1, lease(0)).unwrap_err();
    refused(&error.error);
    drop(b.post_recv_leased(1, error.lease).unwrap());
    let request: LeasedRequest = lease(8).send(2);
    refused(&a.post_send_leased(request).unwrap_err().error);
    let srq = client.pd.create_srq(&SrqOptions::default()).unwrap();
    set("do=fail errno=EIO verb=post_srq_recv limit=1");
    refused(&srq.post_recv(&[RecvRequest::new(1, &[])]).unwrap_err().source);
    srq.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    set("do=fail errno=EIO verb=poll_cq every=2; do=fail errno=EIO verb=req_notify_cq limit=1");
    let mut space = [Completion::default(); 2];
    assert_eq!(client.cq.poll(&mut space).unwrap(), 0);
    refused(&client.cq.wait(&mut space, Some(DEADLINE)).unwrap_err());
    refused(&client.cq.arm(Arm::Next).unwrap_err());
    client.cq.arm(Arm::Next).unwrap();
}

/// After the daemon has stopped, the program polls the completions left in the queue, although a
/// rule applies to polls.
#[test]
fn polls_under_rules_outlast_the_daemon() {
    let daemon = Daemon::start("");
    let client = Client::new(&daemon);
    let [a, b] = client.pair();
    b.post_recv(&[RecvRequest::new(1, &[])]).unwrap();
    client.context.set_own_faults("do=fail errno=EIO verb=poll_cq nth=1000").unwrap();
    a.post_send(&[SendRequest::send_inline(2, b"").signaled()]).unwrap();
    let until = Instant::now() + DEADLINE;
    while client.cq.unpolled() < 2 {
        assert!(Instant::now() < until);
        std::thread::yield_now();
    }
    daemon.stop();
    let mut space = [Completion::default(); 4];
    assert_eq!(client.cq.poll(&mut space).unwrap(), 2);
    assert!(matches!(client.cq.poll(&mut space), Err(Error::DaemonGone)));
}
