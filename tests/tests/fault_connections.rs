//! Fault rules of connections, as seen by programs of librdmacm: replies that are late or
//! missing, messages of the connection manager, and streams that end inside an FPDU.

use std::path::PathBuf;

use rnic_tests::{Daemon, PATHS, Process, on_path, ports, verbs};
use tempfile::TempDir;

/// Names of the devices.
const IWARP: &str = "rnicd0";
const ROCE: &str = "rnicd1";

/// Events with their status.
const REQUEST: &str = "RDMA_CM_EVENT_CONNECT_REQUEST 0";
const ESTABLISHED: &str = "RDMA_CM_EVENT_ESTABLISHED 0";
const DISCONNECTED: &str = "RDMA_CM_EVENT_DISCONNECTED 0";
const TIMEWAIT_EXIT: &str = "RDMA_CM_EVENT_TIMEWAIT_EXIT 0";
const TIMED_OUT: &str = "RDMA_CM_EVENT_UNREACHABLE -110";

/// The daemons of both ends: one daemon for both, or one for each.
struct Rig {
    passive: Daemon,
    active: Option<Daemon>,
    /// Address of the passive end.
    at: &'static str,
    device: &'static str,
    program: PathBuf,
    _scratch: TempDir,
}

impl Rig {
    /// Starts one daemon. Returns `None` without a C compiler.
    fn one(device: &'static str, config: &str) -> Option<Rig> {
        let scratch = tempfile::tempdir().unwrap();
        let program = verbs::program("tests/fault_connections.c", scratch.path())?;
        let passive = Daemon::start(config);
        let at = "127.0.0.1";
        Some(Rig { passive, active: None, at, device, program, _scratch: scratch })
    }

    /// Starts two daemons, each with its own address.
    fn two(device: &'static str, config: &str) -> Option<Rig> {
        let scratch = tempfile::tempdir().unwrap();
        let program = verbs::program("tests/fault_connections.c", scratch.path())?;
        let port = ports::unused_port();
        let start = |ip: &str| {
            let own = format!("[device]\naddresses = [\"{ip}\"]\n[wired]\nport = {port}\n");
            Daemon::start(&format!("{config}{own}"))
        };
        let at = "127.0.0.2";
        let passive = start(at);
        let active = Some(start("127.0.0.1"));
        Some(Rig { passive, active, at, device, program, _scratch: scratch })
    }

    /// Returns the daemon of the active end.
    fn active(&self) -> &Daemon {
        self.active.as_ref().unwrap_or(&self.passive)
    }

    fn start(&self, daemon: &Daemon, rules: &str, steps: &[&str]) -> Process {
        let mut command = verbs::command(&self.program, daemon);
        command.args(steps).env("RNIC_FAULTS", rules).env("RNIC_DEVICES", self.device);
        Process::start(command)
    }

    /// Starts the passive end with rules for its session. Returns the process and its port.
    fn listens(&self, rules: &str, steps: &[&str]) -> (Process, String) {
        let mut end = self.start(&self.passive, rules, &[&["listen", self.at], steps].concat());
        let port = end.line_after("port ");
        (end, port)
    }

    fn asks(&self, port: &str, rules: &str, steps: &[&str]) -> Process {
        self.start(self.active(), rules, &[&["ask", self.at, port], steps].concat())
    }

    /// Checks that no objects are left in the daemons.
    fn is_empty(&self) {
        for daemon in [Some(&self.passive), self.active.as_ref()].into_iter().flatten() {
            daemon.is_empty();
        }
    }
}

/// Returns the texts of the records that name a fault.
fn log_of(daemon: &Daemon, fault: &str) -> Vec<String> {
    let log = daemon.json(&["fault", "log"]);
    let rule = format!("injected by fault {fault}");
    let of_fault = log.as_array().unwrap().iter().filter(|record| record["rule"] == rule.as_str());
    of_fault.map(|record| record["text"].as_str().unwrap().to_owned()).collect()
}

/// Returns the number of occasions of a rule.
fn seen(daemon: &Daemon, name: &str) -> u64 {
    let list = daemon.json(&["fault", "list"]);
    let row = list.as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
    row["seen"].as_u64().unwrap()
}

/// Returns one daemon for each path, and a pair of daemons.
fn rigs(device: &'static str, config: &str) -> Vec<Rig> {
    let one = PATHS.into_iter().map(|path| Rig::one(device, &format!("{}{config}", on_path(path))));
    one.chain([Rig::two(device, config)]).flatten().collect()
}

/// Returns the lines of a passive end after its port.
fn lines_of(passive: Process) -> Vec<String> {
    passive.succeed().split_off(1)
}

/// Steps of both ends: one Send, and the active end disconnects.
const PASSIVE: [&str; 6] = ["event", "accept", "event", "receive", "event", "event"];
const ACTIVE: [&str; 6] = ["event", "send", "wc", "disconnect", "event", "event"];
/// Output of the ends on the RoCE device.
const SEEN_BY_PASSIVE: [&str; 6] =
    [REQUEST, ESTABLISHED, "receive 0", DISCONNECTED, TIMEWAIT_EXIT, "ready"];
const SEEN_BY_ACTIVE: [&str; 4] = [ESTABLISHED, "wc 0", DISCONNECTED, TIMEWAIT_EXIT];

/// Connects both ends on the RoCE device under rules, and checks that their output is the same as
/// without rules. The passive end exits last.
fn connect_under(rig: &Rig, of_active: &str, of_passive: &str) {
    let steps = [&PASSIVE[..], &["input", "silent"]].concat();
    let (mut passive, port) = rig.listens(of_passive, &steps);
    let active = rig.asks(&port, of_active, &[&ACTIVE[..], &["silent"]].concat());
    let which = format!("{of_active}, {of_passive}");
    assert_eq!(active.succeed(), SEEN_BY_ACTIVE, "{which}");
    passive.release();
    assert_eq!(lines_of(passive), SEEN_BY_PASSIVE, "{which}");
    rig.is_empty();
}

#[test]
fn a_late_reply_establishes_the_connection() {
    for device in [IWARP, ROCE] {
        for rig in rigs(device, "") {
            let steps = ["event", "accept", "event", "receive", "event"];
            let (passive, port) = rig.listens("do=late-reply by=50ms name=late", &steps);
            let active = rig.asks(&port, "", &["event", "send", "wc", "disconnect", "event"]);
            assert_eq!(active.succeed(), [ESTABLISHED, "wc 0", DISCONNECTED], "{device}");
            let seen = [REQUEST, ESTABLISHED, "receive 0", DISCONNECTED];
            assert_eq!(lines_of(passive), seen, "{device}");
            assert_eq!(log_of(&rig.passive, "late").len(), 1, "{device}");
            rig.is_empty();
        }
    }
}

/// Both ends of an iWARP connection give up after the deadlines of the configuration.
#[test]
fn a_missing_mpa_reply_times_out() {
    for rig in rigs(IWARP, "[mpa]\nreply_deadline = \"20s\"\n") {
        let (passive, port) = rig.listens("do=no-reply", &["event", "accept", "event", "silent"]);
        let active = rig.asks(&port, "", &["event", "silent"]);
        assert_eq!(active.succeed(), [TIMED_OUT]);
        assert_eq!(lines_of(passive), [REQUEST, "RDMA_CM_EVENT_CONNECT_ERROR -104"]);
        rig.is_empty();
    }
}

/// A rule of the active end rejects the request locally. A rule of the passive end sends the
/// rejection.
#[test]
fn a_rejection_has_private_data() {
    for (device, seen, of_passive) in [
        (IWARP, "RDMA_CM_EVENT_REJECTED -111 3 00ff61", "RDMA_CM_EVENT_CONNECT_ERROR -104"),
        (ROCE, "RDMA_CM_EVENT_REJECTED 28 148 00ff61", "RDMA_CM_EVENT_REJECTED 28"),
    ] {
        for rig in rigs(device, "") {
            let (mut passive, port) = rig.listens("", &["input", "silent"]);
            let active = rig.asks(&port, "do=reject data=00ff61", &["event", "silent"]);
            assert_eq!(active.succeed(), [seen]);
            passive.release();
            passive.succeed();
            let rules = "do=reject verb=rdma_accept data=00ff61 name=passive";
            let (passive, port) = rig.listens(rules, &["event", "accept", "event", "silent"]);
            let active = rig.asks(&port, "", &["event", "silent"]);
            assert_eq!(active.succeed(), [seen]);
            assert_eq!(lines_of(passive), [REQUEST, of_passive]);
            assert_eq!(log_of(&rig.passive, "passive"), ["the connection request was rejected"]);
            rig.is_empty();
        }
    }
}

/// The request fails locally, so the passive end sees nothing.
#[test]
fn an_unreachable_peer_has_its_error() {
    let later = "do=unreachable errno=EHOSTUNREACH by=1ms";
    for device in [IWARP, ROCE] {
        for rig in rigs(device, "") {
            for (rules, seen) in
                [("do=unreachable", TIMED_OUT), (later, "RDMA_CM_EVENT_UNREACHABLE -113")]
            {
                let (mut passive, port) = rig.listens("", &["input", "silent"]);
                let active = rig.asks(&port, rules, &["event", "silent"]);
                assert_eq!(active.succeed(), [seen], "{rules} on {device}");
                passive.release();
                assert_eq!(lines_of(passive), ["ready"], "{rules} on {device}");
                rig.is_empty();
            }
        }
    }
}

/// Each copy of an event has its own private data and must be acknowledged. A copy that is not
/// fetched is discarded with its id.
#[test]
fn rdma_cm_events_are_repeated() {
    for (device, established) in [
        (IWARP, "RDMA_CM_EVENT_ESTABLISHED 0 2 6869"),
        (ROCE, "RDMA_CM_EVENT_ESTABLISHED 0 196 6869"),
    ] {
        for rig in rigs(device, "") {
            let steps = ["event", "answer", "event", "receive", "event"];
            let rules = "do=cm-event effect=duplicate name=twice";
            for fetched in [true, false] {
                let (passive, port) = rig.listens("", &steps);
                let rules = format!("{rules} type=established; {rules}-2 type=disconnected");
                let twice = ["hold", "hold", "ack", "send", "wc", "ack", "disconnect"];
                let once = ["event", "send", "wc", "disconnect"];
                let steps = if fetched { &twice[..] } else { &once };
                let active = rig.asks(&port, &rules, &[steps, &["event", "event"]].concat());
                let seen = if fetched {
                    let twice = [established, established, established, "wc 0", established];
                    [&twice[..], &[DISCONNECTED; 2]].concat()
                } else {
                    // The second DISCONNECTED is not fetched.
                    vec![established, "wc 0", established, DISCONNECTED]
                };
                assert_eq!(active.succeed(), seen, "{device}");
                let seen = [REQUEST, ESTABLISHED, "receive 0", DISCONNECTED];
                assert_eq!(lines_of(passive), seen, "{device}");
            }
            assert_eq!(log_of(rig.active(), "twice")[0], "ESTABLISHED was repeated");
            rig.is_empty();
        }
    }
}

#[test]
fn rdma_cm_events_are_lost() {
    for (device, rejected) in
        [(IWARP, "RDMA_CM_EVENT_REJECTED -111"), (ROCE, "RDMA_CM_EVENT_REJECTED 28")]
    {
        for rig in rigs(device, "") {
            let rules = "do=cm-event effect=drop type=established";
            let (passive, port) = rig.listens(rules, &["event", "accept", "receive", "event"]);
            let active = rig.asks(&port, "", &["event", "send", "wc", "disconnect", "event"]);
            assert_eq!(active.succeed(), [ESTABLISHED, "wc 0", DISCONNECTED], "{device}");
            assert_eq!(lines_of(passive), [REQUEST, "receive 0", DISCONNECTED], "{device}");
            let rules = "do=cm-event effect=drop type=connect-request";
            let (mut passive, port) = rig.listens(rules, &["input", "silent"]);
            assert_eq!(rig.asks(&port, "", &["event"]).succeed(), [rejected], "{device}");
            passive.release();
            passive.succeed();
            rig.is_empty();
        }
    }
}

#[test]
fn rdma_get_cm_event_fails() {
    for device in [IWARP, ROCE] {
        let Some(rig) = Rig::one(device, "") else { return };
        let (passive, port) = rig.listens("", &["event", "accept", "event", "receive", "event"]);
        // The first two events are those of the resolution.
        let rules = "do=fail errno=EINTR verb=rdma_get_cm_event nth=3";
        let steps = ["get", "event", "send", "wc", "disconnect", "event"];
        let active = rig.asks(&port, rules, &steps);
        assert_eq!(active.succeed(), ["get 4", ESTABLISHED, "wc 0", DISCONNECTED], "{device}");
        passive.succeed();
        rig.is_empty();
    }
}

#[test]
fn rdma_disconnect_fails() {
    let rules = "do=fail errno=EIO verb=rdma_disconnect nth=1";
    for device in [IWARP, ROCE] {
        for rig in rigs(device, "") {
            let steps = ["event", "accept", "event", "receive", "event"];
            let (passive, port) = rig.listens("", &steps);
            let steps = ["event", "send", "wc", "leave", "disconnect", "event"];
            let active = rig.asks(&port, rules, &steps);
            assert_eq!(
                active.succeed(),
                [ESTABLISHED, "wc 0", "leave 5", DISCONNECTED],
                "{device}"
            );
            passive.succeed();
            rig.is_empty();
        }
    }
}

/// A reply after the deadline has no effect. A QP that is destroyed before its reply sends none.
#[test]
fn an_mpa_reply_comes_too_late() {
    for rig in rigs(IWARP, "[mpa]\nreply_deadline = \"20s\"\n") {
        let steps = ["event", "accept", "event", "silent"];
        let (passive, port) = rig.listens("do=late-reply by=1h", &steps);
        assert_eq!(rig.asks(&port, "", &["event", "silent"]).succeed(), [TIMED_OUT]);
        assert_eq!(lines_of(passive), [REQUEST, "RDMA_CM_EVENT_CONNECT_ERROR -104"]);
        let (passive, port) = rig.listens("do=late-reply by=1h", &["event", "accept"]);
        let active = rig.asks(&port, "", &["event", "silent"]);
        assert_eq!(lines_of(passive), [REQUEST]);
        // The passive program rejects the request, or its session ends first, which closes the
        // stream.
        let seen = active.succeed();
        assert!(seen.len() == 1 && seen[0] != ESTABLISHED, "{seen:?}");
        rig.is_empty();
    }
}

/// Neither REP nor its repetitions are sent until the rule is cleared.
#[test]
fn rep_is_held_back_until_its_rule_is_cleared() {
    for rig in rigs(ROCE, "") {
        rig.passive.control(&["fault", "add", "do=no-reply"]);
        let steps = ["event", "accept", "silent", "input", "event", "receive", "event"];
        let (mut passive, port) = rig.listens("", &steps);
        let active = rig.asks(&port, "", &["event", "send", "wc", "disconnect", "event"]);
        passive.line_after("ready");
        assert_eq!(log_of(&rig.passive, "no-reply")[0], "REP was not sent");
        rig.passive.control(&["fault", "clear"]);
        passive.ask("", ESTABLISHED);
        assert_eq!(active.succeed(), [ESTABLISHED, "wc 0", DISCONNECTED]);
        passive.succeed();
        rig.is_empty();
    }
}

/// DREQ is repeated after its own loss and after the loss of DREP. By the second DREP the
/// connection of the passive end has ended, so that DREP belongs to no program and no rule counts
/// it.
#[test]
fn lost_connection_messages_are_repeated() {
    for rig in [Rig::one(ROCE, ""), Rig::two(ROCE, "")].into_iter().flatten() {
        let active = rig.active();
        let passive = &rig.passive;
        let kinds = [(active, "req", 2), (active, "dreq", 3), (passive, "rep", 2)];
        let kinds = [&kinds[..], &[(passive, "drep", 1)]].concat();
        for (daemon, kind, _) in &kinds {
            let name = format!("name={kind}");
            let kind = format!("type={kind}");
            daemon.control(&["fault", "add", &name, "do=cm-message", &kind, "effect=drop nth=1"]);
        }
        connect_under(&rig, "", "");
        for (daemon, kind, sent) in kinds {
            let text = format!("{} was not sent", kind.to_uppercase());
            assert_eq!(log_of(daemon, kind), [text], "{kind}");
            assert!(seen(daemon, kind) >= sent, "{kind}");
        }
    }
}

/// A lost SIDR request is repeated, and a repeated request gets the lost reply again.
#[test]
fn lost_sidr_messages_are_repeated() {
    for path in PATHS {
        let scratch = tempfile::tempdir().unwrap();
        let Some(program) = verbs::program("tests/resolution.c", scratch.path()) else { return };
        let daemon = Daemon::start(&on_path(path));
        for rule in ["type=sidr-req name=req", "type=sidr-rep name=rep"] {
            daemon.control(&["fault", "add", "do=cm-message", "effect=drop nth=1", rule]);
        }
        let mut command = verbs::command(&program, &daemon);
        command.arg("accepted");
        assert_eq!(Process::start(command).succeed(), ["done"], "{path}");
        assert!(seen(&daemon, "req") >= 3 && seen(&daemon, "rep") >= 2, "{path}");
        daemon.is_empty();
    }
}

/// A request that arrives twice is handled once. The daemon answers the copy with MRA while the
/// request is undecided, and later with another REP.
#[test]
fn duplicate_connection_messages_have_no_effect() {
    for rig in rigs(ROCE, "") {
        for counts in ["type=mra name=mra", "type=rep name=rep"] {
            let rule = ["fault", "add", "do=cm-message", "effect=drop probability=0", counts];
            rig.passive.control(&rule);
        }
        let rules = "do=cm-message effect=duplicate";
        connect_under(&rig, rules, rules);
        assert!(seen(&rig.passive, "mra") + seen(&rig.passive, "rep") > 1);
        let rules = "do=cm-message effect=duplicate by=9ms name=later";
        connect_under(&rig, rules, rules);
        assert!(!log_of(&rig.passive, "later").is_empty());
    }
}

#[test]
fn delayed_connection_messages_arrive() {
    for rig in rigs(ROCE, "") {
        let rules = "do=cm-message by=9ms name=later";
        connect_under(&rig, rules, rules);
        assert!(!log_of(&rig.passive, "later").is_empty());
    }
}

#[test]
fn the_first_send_replaces_a_lost_rtu() {
    for rig in rigs(ROCE, "") {
        connect_under(&rig, "do=cm-message type=rtu effect=drop", "");
    }
}

/// The end of a session first sends the session's delayed RTU. Otherwise the peer would see the end
/// of a connection that was never established.
#[test]
fn delayed_messages_leave_with_their_session() {
    for rig in rigs(ROCE, "") {
        let steps = ["event", "accept", "input", "silent", "input", "event", "event"];
        let (mut passive, port) = rig.listens("", &steps);
        let rules = "do=cm-message type=rtu by=1h";
        let mut active = rig.asks(&port, rules, &["event", "input"]);
        active.line_after(ESTABLISHED);
        passive.line_after("ready");
        passive.ask("", "ready");
        active.kill();
        passive.ask("", ESTABLISHED);
        passive.line_after(DISCONNECTED);
        passive.succeed();
        rig.is_empty();
    }
}

#[test]
fn rules_select_connection_messages() {
    let Some(rig) = Rig::two(ROCE, "") else { return };
    let active = rig.active();
    let add = |name: &str, selector: &str| {
        let name = format!("name={name}");
        let rule = ["fault", "add", &name, "do=cm-message", "effect=duplicate", selector];
        active.control(&rule);
    };
    for (name, selector) in [
        ("other-device", "device=rnicd9"),
        ("other-peer", "peer=127.0.0.9"),
        ("other-qp", "qp=4294967295"),
        ("other-pd", "pd=4294967295"),
        ("other-cq", "cq=4294967295"),
        ("other-type", "type=sidr-req"),
        ("other-program", "pid=1"),
        ("device", "device=rnicd1 nth=1"),
        ("peer", "peer=127.0.0.2 nth=1"),
        ("program", "command=program nth=1"),
    ] {
        add(name, selector);
    }
    connect_under(&rig, "", "");
    let list = active.json(&["fault", "list"]);
    for row in list.as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        let (seen, injected) = (row["seen"].as_u64().unwrap(), row["injected"].as_u64().unwrap());
        assert_eq!((seen > 0, injected), (!name.starts_with("other"), seen.min(1)), "{row}");
    }
}

/// Rules of the active end, its steps once it is connected, and their output on each device.
const ACTIONS: [(&str, &str, &str); 14] = [
    ("do=complete status=fatal-err opcode=send", "send wc", "wc 19"),
    ("do=delay-request by=1ms opcode=send", "send wc", "wc 0"),
    ("do=hold-completion by=1ms opcode=send", "send wc", "wc 0"),
    ("do=lose-completion opcode=send nth=1", "send send wc", "wc 0"),
    ("do=hold-event by=1ms", "send wc", "wc 0"),
    ("do=stop for=1ms opcode=send nth=1", "send wc", "wc 0"),
    ("do=link delay=1ms", "send wc", "wc 0"),
    ("do=disconnect opcode=send nth=1", "send wc", "wc 5"),
    ("do=qp-fatal opcode=send nth=1", "send wc async", "wc 5, async 1"),
    ("do=cq-fatal opcode=send nth=1", "send async", "async 0"),
    ("do=device-fatal opcode=send nth=1", "send wc async async", "wc 5, async 8, async 1"),
    ("do=event event=sq-drained opcode=send nth=1", "send wc async", "wc 0, async 5"),
    ("do=port-down for=1ms opcode=send nth=1", "send wc async async", "wc 0, async 10, async 9"),
    (
        "do=speed-change speed=sdr for=1ms opcode=send nth=1",
        "send wc async async",
        "wc 0, async 9, async 9",
    ),
];

#[test]
fn actions_have_the_same_effect_on_both_devices() {
    for device in [IWARP, ROCE] {
        for rig in rigs(device, "") {
            for (rules, steps, seen) in ACTIONS {
                let (mut passive, port) = rig.listens("", &["event", "accept", "input"]);
                let steps: Vec<_> = ["event"].into_iter().chain(steps.split(' ')).collect();
                let active = rig.asks(&port, &format!("{rules} name=table"), &steps);
                let printed = active.succeed().split_off(1).join(", ");
                assert_eq!(printed, seen, "{rules} on {device}");
                assert!(!log_of(rig.active(), "table").is_empty(), "{rules} on {device}");
                passive.line_after("ready");
                passive.release();
                passive.succeed();
                rig.is_empty();
            }
        }
    }
}

/// Rules of the passive end, for a Send that it refuses: its event, and the output of the active
/// end on each device. An iWARP Send has completed before.
const REFUSALS: [(&str, &[&str], [&str; 2]); 4] = [
    ("do=refuse as=access-error", &["async 3"], ["wc 0", "wc 10"]),
    ("do=refuse as=invalid-request", &["async 2"], ["wc 0", "wc 9"]),
    ("do=refuse as=operation-error", &[], ["wc 0", "wc 11"]),
    ("do=terminate code=1/2/01", &[], ["wc 0", "wc 9"]),
];

/// The QP of the active end gets no event, and its connection ends.
#[test]
fn messages_are_refused_on_both_devices() {
    for (number, device) in [IWARP, ROCE].into_iter().enumerate() {
        for rig in rigs(device, "") {
            for (n, (rules, events, seen)) in REFUSALS.into_iter().enumerate() {
                let name = format!("refusal-{n}");
                let steps = ["event", "accept", "event", "receive"];
                let asyncs = vec!["async"; events.len()];
                let steps = [&steps[..], &asyncs, &["input"]].concat();
                let (mut passive, port) = rig.listens(&format!("{rules} name={name}"), &steps);
                let active = rig.asks(&port, "", &["event", "send", "wc"]);
                assert_eq!(active.succeed(), [ESTABLISHED, seen[number]], "{rules} on {device}");
                passive.line_after("ready");
                passive.release();
                let start = [REQUEST, ESTABLISHED, "receive 5"];
                let seen = [&start[..], events, &["ready"]].concat();
                assert_eq!(lines_of(passive), seen, "{rules} on {device}");
                assert_eq!(log_of(&rig.passive, &name).len(), 1, "{rules} on {device}");
                rig.is_empty();
            }
        }
    }
}

/// On iWARP the receiver ends the stream of a Send that has completed. An RC QP drops it, like an
/// adapter. The direct path has no FPDUs.
#[test]
fn a_corrupt_crc_loses_the_message() {
    let rules = "do=corrupt-crc nth=1 name=crc";
    for device in [IWARP, ROCE] {
        let tcp = [Rig::one(device, &on_path("tcp")), Rig::two(device, "")];
        for rig in tcp.into_iter().flatten() {
            let (status, received) =
                if device == IWARP { ("wc 0", "receive 5") } else { ("wc 12", "silent") };
            let receives: &[&str] = if device == IWARP { &["receive"] } else { &[] };
            let steps = [&["event", "accept", "event"], receives, &["event"]].concat();
            let (passive, port) = rig.listens("", &steps);
            let active = rig.asks(&port, rules, &["event", "send", "wc", "disconnect", "event"]);
            assert_eq!(active.succeed(), [ESTABLISHED, status, DISCONNECTED], "{device}");
            let mut seen = vec![REQUEST, ESTABLISHED, received, DISCONNECTED];
            seen.retain(|line| *line != "silent");
            assert_eq!(lines_of(passive), seen, "{device}");
            let text = "the CRC of an FPDU was corrupted";
            assert_eq!(log_of(rig.active(), "crc")[0], text, "{device}");
            rig.is_empty();
        }
        let Some(rig) = Rig::one(device, &on_path("direct")) else { return };
        let (passive, port) = rig.listens("", &["event", "accept", "event", "receive"]);
        let active = rig.asks(&port, rules, &["event", "send", "wc"]);
        assert_eq!(active.succeed(), [ESTABLISHED, "wc 0"], "{device}");
        assert_eq!(lines_of(passive), [REQUEST, ESTABLISHED, "receive 0"], "{device}");
        assert!(log_of(rig.active(), "crc").is_empty(), "{device}");
        rig.is_empty();
    }
}

/// The request in progress is flushed. On RC it is not acknowledged.
#[test]
fn a_stream_ends_inside_an_fpdu() {
    let all = |device| [Rig::one(device, &on_path("tcp")), Rig::two(device, "")];
    for reset in [false, true] {
        let rules = format!("do=cut-fpdu nth=1 reset={reset} name=cut");
        for rig in all(IWARP).into_iter().flatten() {
            let steps = ["event", "accept", "event", "receive", "event", "silent"];
            let (passive, port) = rig.listens("", &steps);
            let active = rig.asks(&port, &rules, &["event", "send", "wc", "event", "silent"]);
            assert_eq!(active.succeed(), [ESTABLISHED, "wc 5", DISCONNECTED], "{rules}");
            let seen = [REQUEST, ESTABLISHED, "receive 5", DISCONNECTED];
            assert_eq!(lines_of(passive), seen, "{rules}");
            rig.is_empty();
        }
        for rig in all(ROCE).into_iter().flatten() {
            let (passive, port) = rig.listens("", &["event", "accept", "event", "event"]);
            let steps = ["event", "send", "wc", "disconnect", "event"];
            let active = rig.asks(&port, &rules, &steps);
            assert_eq!(active.succeed(), [ESTABLISHED, "wc 12", DISCONNECTED], "{rules}");
            assert_eq!(lines_of(passive), [REQUEST, ESTABLISHED, DISCONNECTED], "{rules}");
            rig.is_empty();
        }
    }
}
