//! Parsing of rules: every action and key, and every error.

use std::time::Duration;

use super::verb::VERBS;
use super::*;
use crate::abi::control::LibraryCall;
use crate::faults::order::{Order, OrderModel};
use crate::types::{CompletionStatus, CqId, TerminateCode};

/// Parses a text with one rule.
pub(super) fn parse_one(text: &str) -> Result<FaultRule, String> {
    let mut rules = FaultRule::parse_all(text).map_err(|error| error.to_string())?;
    assert_eq!(rules.len(), 1, "{text}");
    Ok(rules.remove(0))
}

fn one(text: &str) -> FaultRule {
    parse_one(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn action(text: &str) -> Action {
    one(text).action
}

fn error(text: &str) -> String {
    let error = FaultRule::parse_all(text).expect_err(text);
    error.to_string()
}

const MS: Duration = Duration::from_millis(1);

#[test]
fn every_action_has_its_arguments() {
    let by = MS * 5;
    let code = TerminateCode { layer: 1, etype: 2, code: 0x1F };
    for (text, expected, point) in [
        (
            "do=complete status=rem-op-err",
            Action::Complete { status: CompletionStatus::RemoteOperation },
            Point::Request,
        ),
        ("do=delay-request by=5ms", Action::DelayRequest { by }, Point::Request),
        (
            "do=refuse as=access-error",
            Action::Refuse { error: RefusedAs::AccessError },
            Point::Message,
        ),
        (
            "do=refuse as=invalid-request",
            Action::Refuse { error: RefusedAs::InvalidRequest },
            Point::Message,
        ),
        (
            "do=refuse as=operation-error",
            Action::Refuse { error: RefusedAs::OperationError },
            Point::Message,
        ),
        ("do=terminate code=1/2/1F", Action::Terminate { code }, Point::Message),
        ("do=rnr", Action::Rnr { times: 1 }, Point::Receive),
        ("do=rnr times=1000000", Action::Rnr { times: 1_000_000 }, Point::Receive),
        (
            "do=hold-completion by=5ms",
            Action::HoldCompletion { by, batch: None, gap: Duration::ZERO },
            Point::Completion,
        ),
        (
            "do=hold-completion by=5ms batch=4 flushed=true",
            Action::HoldCompletion { by, batch: Some(4), gap: Duration::ZERO },
            Point::Completion,
        ),
        (
            "do=hold-completion gap=5ms",
            Action::HoldCompletion { by, batch: None, gap: by },
            Point::Completion,
        ),
        ("do=hold-event by=5ms", Action::HoldEvent { by }, Point::CompletionEvent),
        ("do=lose-event", Action::LoseEvent, Point::CompletionEvent),
        ("do=extra-event", Action::ExtraEvent, Point::QuietCompletion),
        ("do=cq-fatal", Action::CqFatal, Point::Once),
        ("do=srq-fatal", Action::SrqFatal, Point::Once),
        ("do=lose-completion", Action::LoseCompletion, Point::Completion),
        ("do=corrupt-crc", Action::CorruptCrc, Point::Fpdu),
        ("do=cut-fpdu", Action::CutFpdu { reset: false }, Point::Fpdu),
        ("do=cut-fpdu reset=true", Action::CutFpdu { reset: true }, Point::Fpdu),
        ("do=stop", Action::Stop { time: None }, Point::Once),
        ("do=stop for=5ms", Action::Stop { time: Some(by) }, Point::Once),
        ("do=disconnect", Action::Disconnect, Point::Once),
        ("do=disconnect opcode=send", Action::Disconnect, Point::Request),
        ("do=disconnect verb=reg_mr", Action::Disconnect, Point::Verb),
        ("do=qp-fatal", Action::QpFatal, Point::Once),
        ("do=fail errno=ENOMEM verb=reg_mr", Action::Fail { errno: 12 }, Point::Verb),
        ("do=fail errno=4095 verb=reg_mr", Action::Fail { errno: 4095 }, Point::Verb),
        ("do=reject", Action::Reject { reason: 28 }, Point::Verb),
        ("do=reject reason=1", Action::Reject { reason: 1 }, Point::Verb),
        (
            "do=unreachable",
            Action::Unreachable { errno: libc::ETIMEDOUT as u16, by: Duration::ZERO },
            Point::Verb,
        ),
        (
            "do=unreachable errno=EHOSTUNREACH by=5ms",
            Action::Unreachable { errno: libc::EHOSTUNREACH as u16, by },
            Point::Verb,
        ),
        ("do=addr-error", Action::AddrError { errno: 19, by: Duration::ZERO }, Point::Verb),
        ("do=addr-error errno=EIO by=5ms", Action::AddrError { errno: 5, by }, Point::Verb),
        ("do=route-error", Action::RouteError { errno: 110, by: Duration::ZERO }, Point::Verb),
        ("do=route-error errno=EIO by=5ms", Action::RouteError { errno: 5, by }, Point::Verb),
        ("do=late-reply by=5ms", Action::LateReply { by }, Point::Verb),
        ("do=no-reply", Action::NoReply, Point::Verb),
        ("do=port-down", Action::PortDown { time: None }, Point::Once),
        ("do=port-down for=5ms", Action::PortDown { time: Some(by) }, Point::Once),
        ("do=event event=port-err", Action::Event { event: AsyncEvent::PORT_ERR }, Point::Once),
        ("do=device-fatal", Action::DeviceFatal, Point::Once),
        ("do=end-session", Action::EndSession, Point::Once),
    ] {
        let rule = one(text);
        assert_eq!((rule.action, rule.point), (expected, point), "{text}");
        assert_eq!(rule.action_name, &text[3..text.find(' ').unwrap_or(text.len())]);
    }
}

#[test]
fn settings_have_their_arguments() {
    let rule = one("do=link delay=1ms jitter=2us rate=3Mbit stall=true loss=0.5 duplicate=1% \
                    reorder=0 truncate=1 seed=9");
    let Action::Link(shape) = rule.action else { panic!("{rule:?}") };
    assert_eq!(rule.point, Point::Setting);
    assert_eq!((shape.delay, shape.jitter), (MS, MS / 500));
    assert_eq!((shape.rate, shape.stall, shape.seed), (Some(3_000_000), true, 9));
    let losses = [shape.loss, shape.duplicate, shape.reorder, shape.truncate];
    assert_eq!(losses, [500_000, 10_000, 0, 1_000_000]);
    for (text, rate) in [("2000bit", 2000), ("2kbit", 2000), ("1Gbit", 1_000_000_000)] {
        let Action::Link(shape) = action(&format!("do=link rate={text}")) else { panic!("{text}") };
        assert_eq!(shape.rate, Some(rate));
    }
    assert_eq!(
        action("do=order order=worst hold=1s model=rc-relaxed inversions=3..7"),
        Action::Order {
            order: Order::Worst { hold: MS * 1000 },
            model: Some(OrderModel::RcRelaxed),
            inversions: Some((3, 7)),
        }
    );
    assert_eq!(
        action("do=order order=random seed=5"),
        Action::Order { order: Order::Random { seed: 5, hold: MS }, model: None, inversions: None }
    );
}

#[test]
fn statuses_have_the_names_of_verbs() {
    for (name, status) in [
        ("IBV_WC_LOC_LEN_ERR", CompletionStatus::LocalLength),
        ("IBV_WC_LOC_QP_OP_ERR", CompletionStatus::LocalQpOperation),
        ("IBV_WC_LOC_PROT_ERR", CompletionStatus::LocalProtection),
        ("IBV_WC_WR_FLUSH_ERR", CompletionStatus::WrFlush),
        ("IBV_WC_MW_BIND_ERR", CompletionStatus::MwBind),
        ("IBV_WC_BAD_RESP_ERR", CompletionStatus::BadResponse),
        ("IBV_WC_LOC_ACCESS_ERR", CompletionStatus::LocalAccess),
        ("IBV_WC_REM_INV_REQ_ERR", CompletionStatus::RemoteInvalidRequest),
        ("IBV_WC_REM_ACCESS_ERR", CompletionStatus::RemoteAccess),
        ("IBV_WC_REM_OP_ERR", CompletionStatus::RemoteOperation),
        ("IBV_WC_RETRY_EXC_ERR", CompletionStatus::TransportRetryExceeded),
        ("IBV_WC_RNR_RETRY_EXC_ERR", CompletionStatus::ReceiverNotReady),
        ("IBV_WC_REM_ABORT_ERR", CompletionStatus::RemoteAborted),
        ("IBV_WC_FATAL_ERR", CompletionStatus::Fatal),
        ("IBV_WC_GENERAL_ERR", CompletionStatus::General),
    ] {
        let short = name.strip_prefix("IBV_WC_").unwrap().to_lowercase();
        for text in [name, &short, &short.replace('_', "-"), &name.to_lowercase()] {
            assert_eq!(action(&format!("do=complete status={text}")), Action::Complete { status });
        }
    }
    assert!(error("do=complete status=success").contains("needs one of loc-len-err, "));
}

/// The numbers are those of `ibv_event_type`.
#[test]
fn events_have_the_names_of_verbs() {
    use Element::*;
    let names = [
        ("CQ_ERR", Cq),
        ("QP_FATAL", Qp),
        ("QP_REQ_ERR", Qp),
        ("QP_ACCESS_ERR", Qp),
        ("COMM_EST", Qp),
        ("SQ_DRAINED", Qp),
        ("PATH_MIG", Qp),
        ("PATH_MIG_ERR", Qp),
        ("DEVICE_FATAL", Device),
        ("PORT_ACTIVE", Port),
        ("PORT_ERR", Port),
        ("LID_CHANGE", Port),
        ("PKEY_CHANGE", Port),
        ("SM_CHANGE", Port),
        ("SRQ_ERR", Srq),
        ("SRQ_LIMIT_REACHED", Srq),
        ("QP_LAST_WQE_REACHED", Qp),
        ("CLIENT_REREGISTER", Port),
        ("GID_CHANGE", Port),
    ];
    for (number, (name, element)) in (0..).zip(names) {
        let Action::Event { event } = action(&format!("do=event event=IBV_EVENT_{name}")) else {
            panic!("{name}")
        };
        assert_eq!((event.number(), event.element()), (number, element), "{name}");
        assert_eq!(event.name(), name);
        let short = name.to_lowercase().replace('_', "-");
        assert_eq!(action(&format!("do=event event={short}")), Action::Event { event });
    }
    assert!(error("do=event event=power").contains("needs one of cq-err, qp-fatal, "));
}

#[test]
fn every_selector_is_parsed() {
    let rule = one(
        "do=stop name=a.b_c-9 device=rnic0 port=1 pd=2 qp=3 cq=4 peer=10.0.0.2 user=1000 pid=7 \
         command=\"my; program\"",
    );
    let Selector { device, pd, qp, cq, mr, peer, user, pid, command, verb, opcode, flushed } =
        rule.select;
    assert_eq!((device.as_deref(), command.as_deref()), (Some("rnic0"), Some("my; program")));
    assert_eq!((pd, qp, cq, pid), (Some(2), Some(3), Some(4), Some(7)));
    assert_eq!(peer, Some([10, 0, 0, 2].into()));
    assert_eq!(user, Some(UserSelector::Uid(1000)));
    assert_eq!((verb, opcode, mr, flushed), (None, None, None, false));
    for (rkey, number) in [("0x1f00", 0x1F00), ("31", 31)] {
        assert_eq!(one(&format!("do=terminate code=1/2/00 mr={rkey}")).select.mr, Some(number));
    }
    assert!(one("do=lose-completion flushed=true").select.flushed);
    assert_eq!(rule.name.unwrap().as_str(), "a.b_c-9");
    assert_eq!(one("do=stop user=any").select.user, Some(UserSelector::Any));
    assert_eq!(one("do=stop").select, Selector::default());
    assert_eq!(one("do=reject").select.verb, Some(Verb::CONNECT));
    assert_eq!(one("do=addr-error").select.verb, Some(Verb::RESOLVE_ADDR));
    assert_eq!(one("do=route-error").select.verb, Some(Verb::RESOLVE_ROUTE));
    let posts = one("do=fail errno=EIO verb=post_send opcode=read").select;
    assert_eq!((posts.verb, posts.opcode), (Verb::of_request("PostSend"), Some(Opcode::Read)));
    let of = |opcode| one(&format!("do=lose-completion opcode={opcode}")).select.opcode;
    for (name, opcode) in [
        ("send", Opcode::Send),
        ("write", Opcode::Write),
        ("read", Opcode::Read),
        ("atomic", Opcode::Atomic),
        ("bind-mw", Opcode::BindMw),
        ("local-inv", Opcode::LocalInv),
        ("recv", Opcode::Recv),
    ] {
        assert_eq!(of(name), Some(opcode));
    }
}

#[test]
fn programs_are_selected_by_pid_and_command() {
    let selects = |text: &str| one(text).select.selects_program(7, "server");
    assert!(selects("do=stop") && selects("do=stop pid=7") && selects("do=stop command=server"));
    assert!(selects("do=stop command=server pid=7"));
    assert!(!selects("do=stop pid=8") && !selects("do=stop command=serve"));
    assert!(!selects("do=stop command=server pid=8"));
}

#[test]
fn every_trigger_is_parsed() {
    let strikes = |text: &str, of: u64| {
        let trigger = one(&format!("do=lose-completion {text}")).trigger;
        let counter = Counter::default();
        (1..=of).filter(|_| counter.strikes(&trigger)).collect::<Vec<_>>()
    };
    assert_eq!(strikes("nth=2", 5), [2]);
    assert_eq!(strikes("every=2 limit=2", 9), [2, 4]);
    assert_eq!(strikes("limit=1", 9), [1]);
    assert_eq!(strikes("probability=0", 9), [0; 0]);
    assert_eq!(strikes("probability=100%", 3), [1, 2, 3]);
    let half = |seed| strikes(&format!("probability=0.5 seed={seed}"), 64);
    assert_eq!(half(3), half(3));
    assert_ne!(half(3), half(4));
    assert_eq!(one("do=stop after=5ms").trigger.after, MS * 5);
}

#[test]
fn a_text_has_several_rules() {
    let rules = FaultRule::parse_all(
        " do=stop;do=rnr times=2 ;; \n\tdo=event\tevent=port-err\n\n; do=disconnect qp=1 ",
    )
    .unwrap();
    let names: Vec<_> = rules.iter().map(|rule| rule.action_name).collect();
    assert_eq!(names, ["stop", "rnr", "event", "disconnect"]);
    for empty in ["", " ", ";", "\n ; \n"] {
        assert_eq!(FaultRule::parse_all(empty), Ok(Vec::new()), "{empty:?}");
    }
}

/// `rnicctl faults` shows the text, which sets the same rule again.
#[test]
fn the_text_of_a_rule_gives_the_same_rule() {
    for text in [
        "do=complete status=RNR_RETRY_EXC_ERR opcode=send nth=3 name=x",
        "do=stop command=\"a b\" device=\"d;e\"",
        "do=link   delay=50us\tpeer=10.0.0.2",
        "do=fail errno=ENOMEM verb=ibv_reg_mr probability=0.5 seed=7",
    ] {
        let rule = one(text);
        assert_eq!(one(&rule.text), rule, "{text}");
        assert!(!rule.text.contains(['\t', '\n']), "{text}");
    }
    let pairs = [("do", "stop"), ("command", "a; b"), ("for", "5ms")];
    let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let rule = FaultRule::of_pairs(pairs).unwrap();
    assert_eq!(rule.text, "do=stop command=\"a; b\" for=5ms");
    assert_eq!(one(&rule.text), rule);
}

/// A value of a TOML file may contain any character. The text of the rule must not be parsed as a
/// different rule.
#[test]
fn a_value_with_special_characters_is_refused() {
    for value in ["a\"b", "a\nb", "a\tb", "\u{1b}", "\"", "a\" do=qp-fatal; \""] {
        let pairs = [("do", "stop"), ("command", value)];
        let pairs = pairs.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let error = FaultRule::of_pairs(pairs).map(|rule| rule.text);
        assert!(error.is_err(), "{value:?}: {error:?}");
    }
}

#[test]
fn errors_of_the_form() {
    for (text, expected) in [
        ("do=stop now", "\"now\" is not of the form KEY=VALUE"),
        ("stop", "\"stop\" is not of the form KEY=VALUE"),
        ("do=stop command=\"x", "\"command=x\" has no closing quotation mark"),
        ("do=stop command=\"x\ny\"", "\"command=x\" has no closing quotation mark"),
        ("do=stop qp=1 qp=2", "qp is given twice"),
        ("do=stop do=rnr", "do is given twice"),
        ("do=complete", "do=complete needs status"),
        ("do=refuse", "do=refuse needs as"),
        ("do=terminate", "do=terminate needs code"),
        ("do=hold-completion", "do=hold-completion needs by or gap"),
        ("do=fail verb=reg_mr", "do=fail needs errno"),
        ("do=event", "do=event needs event"),
        ("do=order", "do=order needs order"),
        ("do=stop; do=fail errno=1 verb=reg_mr; qp", "\"qp\" is not of the form KEY=VALUE"),
    ] {
        assert_eq!(error(text), expected, "{text}");
    }
    let none = error("qp=1");
    assert!(none.starts_with("do is missing; the actions are complete, delay-request, "), "{none}");
    let unknown = error("do=explode");
    assert!(unknown.starts_with("do=explode: needs one of complete, delay-request, "), "{unknown}");
}

#[test]
fn errors_of_values() {
    for (text, expected) in [
        ("do=stop port=2", "port=2: needs a whole number from 1 to 1"),
        ("do=refuse as=access-error mr=x", "mr=x: needs a remote key (rkey), decimal or with 0x"),
        ("do=lose-event flushed=1", "flushed=1: needs true or false"),
        ("do=hold-completion by=1s batch=1", "batch=1: needs a whole number from 2 to 4294967295"),
        ("do=stop qp=x", "qp=x: needs a whole number from 0 to 4294967295"),
        ("do=stop pd=4294967296", "pd=4294967296: needs a whole number from 0 to 4294967295"),
        ("do=stop pid=0", "pid=0: needs a whole number from 1 to 2147483647"),
        ("do=stop peer=host", "peer=host: needs an IPv4 or IPv6 address"),
        ("do=stop user=root", "user=root: needs a user ID or any"),
        ("do=stop user=-1", "user=-1: needs a user ID or any"),
        ("do=rnr times=0", "times=0: needs a whole number from 1 to 1000000"),
        ("do=rnr times=1000001", "times=1000001: needs a whole number from 1 to 1000000"),
        ("do=reject reason=65536", "reason=65536: needs a whole number from 1 to 65535"),
        ("do=rnr nth=0", "nth=0: needs a whole number of at least 1"),
        ("do=rnr nth=1 every=2", "nth=1: cannot be combined with every"),
        ("do=rnr every=0", "every=0: needs a whole number from 1 to 18446744073709551615"),
        ("do=rnr limit=0", "limit=0: needs a whole number from 1 to 18446744073709551615"),
        ("do=rnr probability=2", "probability=2: needs a number from 0 to 1, or a percentage"),
        (
            "do=terminate code=3/0/00",
            "code=3/0/00: needs LAYER/TYPE/CODE in hexadecimal, as in 1/2/02 (RFC 5040 section \
             4.8)",
        ),
        ("do=stop name=", "name=: a name has 1 to 24 letters, digits, '-', '_' and '.'"),
        ("do=stop name=a/b", "name=a/b: a name has 1 to 24 letters, digits, '-', '_' and '.'"),
        ("do=link stall=yes", "stall=yes: needs true or false"),
        ("do=order order=best", "order=best: needs worst or random"),
        ("do=order order=worst seed=1", "order=worst: cannot be combined with seed"),
        ("do=order order=worst hold=2s", "hold=2s: is longer than 1 s"),
        ("do=order order=worst model=x", "model=x: needs one of iwarp, rc, rc-relaxed"),
    ] {
        assert_eq!(error(text), expected, "{text}");
    }
    for bad in ["1/2", "1/2/100", "1/10/00", "1/2/02/3", "x/2/02", ""] {
        assert!(FaultRule::parse_all(&format!("do=terminate code={bad}")).is_err(), "{bad}");
    }
    for errno in ["0", "4096", "EWHAT", "-1", ""] {
        let error = error(&format!("do=fail verb=reg_mr errno={errno}"));
        let text = format!("errno={errno}: needs a number from 1 to 4095 or one of EPERM, ");
        assert!(error.starts_with(&text), "{error}");
    }
    for rate in ["100", "100Mb", "Mbit", "999bit", "99999999999999999999bit"] {
        assert!(FaultRule::parse_all(&format!("do=link rate={rate}")).is_err(), "{rate}");
    }
    assert!(error("do=stop for=5").contains("times are written like"));
    assert!(error("do=fail errno=EIO verb=fly").starts_with("verb=fly: needs one of "));
    assert!(error("do=refuse as=x").ends_with("access-error, invalid-request, operation-error"));
    assert!(error("do=link delay=61s").contains("must not exceed 60 s"));
}

#[test]
fn a_rule_has_a_maximum_length() {
    let of_len = |len: usize| {
        let start = "do=stop command=";
        format!("{start}{}", "x".repeat(len - start.len()))
    };
    assert_eq!(one(&of_len(MAX_RULE_LEN)).text.len(), MAX_RULE_LEN);
    let longer = error(&of_len(MAX_RULE_LEN + 1));
    assert_eq!(longer, "the rule has 1025 bytes; the maximum is 1024");
    let name = "n".repeat(FaultName::MAX);
    assert_eq!(one(&format!("do=stop name={name}")).name.unwrap().to_string(), name);
    assert!(error(&format!("do=stop name={name}n")).contains("a name has 1 to 24"));
}

#[test]
fn verbs_are_named_with_and_without_prefix() {
    for name in ["ibv_reg_mr", "reg_mr"] {
        let rule = one(&format!("do=fail errno=EIO verb={name}"));
        assert_eq!(rule.select.verb, Verb::of_request("RegMr"));
        assert_eq!(rule.select.verb.unwrap().name(), "reg_mr");
    }
    for (name, _, requests) in VERBS {
        for request in *requests {
            assert_eq!(Verb::of_request(request).unwrap().name(), *name);
        }
    }
}

#[test]
fn verbs_of_the_library_have_their_calls() {
    let calls = |verb| one(&format!("do=stop verb={verb}")).select.verb.unwrap().library_calls();
    assert_eq!(calls("ibv_poll_cq"), LibraryCall::PollCq { cq: CqId(1) }.bit());
    assert_eq!(calls("query_pkey"), LibraryCall::QueryPkey.bit());
    assert_eq!(calls("reg_mr"), 0);
}

/// Each request that a program makes by calling a verb can fail.
#[test]
fn every_request_is_a_verb_or_internal() {
    /// Requests of `rnicctl`, and requests of the library that belong to no verb, that it also
    /// makes for other verbs, or that destroy an object and so must not fail.
    const INTERNAL: [&str; 24] = [
        "QueryDevice",
        "QueryGids",
        "QueryQp",
        "ClosePd",
        "DeallocWindow",
        "DestroyChannel",
        "DestroyCq",
        "DestroySrq",
        "DestroyQp",
        "RemoveSharedBuffer",
        "FillSharedBuffer",
        "CloseListener",
        "SetContext",
        "Status",
        "List",
        "AttachMemory",
        "ServeCopies",
        "AdminDisconnect",
        "Drain",
        "Diagnosis",
        "AddDevice",
        "RemoveDevice",
        "SetFaults",
        "ClearFaults",
    ];
    let source = include_str!("../abi/control/request.rs");
    let named = source.split(".named(\"").skip(1).map(|rest| rest.split('"').next().unwrap());
    let names: Vec<_> = named.chain(LibraryCall::names()).collect();
    assert!(names.len() > 40, "{names:?}");
    for name in &names {
        let is_internal = INTERNAL.contains(name);
        assert_ne!(Verb::of_request(name).is_some(), is_internal, "{name}");
    }
    let all = VERBS.iter().flat_map(|(.., requests)| requests.iter()).chain(&INTERNAL);
    for name in all {
        assert!(names.contains(name), "there is no request {name}");
    }
}
