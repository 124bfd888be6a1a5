//! Tests every state of both state machines against every event.

use super::tests::{OPTIONS, REPLY, REQUEST, accepted, frame};
use super::*;
use crate::mpa::tests::hex;

#[test]
fn every_initiator_state_against_every_event() {
    let states = ["AwaitReply", "Done"];
    let events: [(&str, Option<Vec<u8>>); 6] = [
        ("part", Some(hex("4d50"))),
        ("accepting reply", Some(frame(REPLY, "40010000"))),
        ("rejecting reply", Some(frame(REPLY, "60010000"))),
        ("request", Some(frame(REQUEST, "40010000"))),
        ("junk", Some(b"HTTP".to_vec())),
        ("eof", None),
    ];
    let mut table = String::new();
    for state in states {
        for (name, input) in &events {
            let mut initiator = Initiator::new(&OPTIONS, &[]).expect("short");
            if state == "Done" {
                accepted(&mut initiator, &frame(REPLY, "40010000"));
            }
            let outcome = match input {
                Some(bytes) => match initiator.handle_input(bytes) {
                    Ok(InitiatorStep::NeedMore) => "more".to_owned(),
                    Ok(InitiatorStep::Accepted(_)) => "accepted".to_owned(),
                    Ok(InitiatorStep::Rejected { .. }) => "rejected".to_owned(),
                    Err(error) => error.to_string(),
                },
                None => format!("{:?}", initiator.handle_eof()),
            };
            table += &format!("{state} + {name} -> {outcome} {:?}\n", initiator.state());
        }
    }
    assert_eq!(
        table,
        "AwaitReply + part -> more AwaitReply\n\
         AwaitReply + accepting reply -> accepted Done\n\
         AwaitReply + rejecting reply -> rejected Done\n\
         AwaitReply + request -> an MPA start-up frame of the wrong kind Done\n\
         AwaitReply + junk -> not an MPA start-up frame Done\n\
         AwaitReply + eof -> RetryRevision1 Done\n\
         Done + part -> start-up is already over Done\n\
         Done + accepting reply -> start-up is already over Done\n\
         Done + rejecting reply -> start-up is already over Done\n\
         Done + request -> start-up is already over Done\n\
         Done + junk -> start-up is already over Done\n\
         Done + eof -> Fail(Over) Done\n"
    );
}

#[test]
fn every_responder_state_against_every_event() {
    let request = frame(REQUEST, "40010000");
    let states: [(&str, &[u8]); 3] =
        [("AwaitRequest", b""), ("Deciding", &request), ("Done", b"HTTP")];
    let mut table = String::new();
    for (state, before) in states {
        for event in ["nothing", "part", "request", "reply", "accept", "reject"] {
            let mut responder = Responder::new(&OPTIONS);
            let _ = responder.handle_input(before);
            assert_eq!(responder.state(), state);
            let stepped = |step| match step {
                ResponderStep::NeedMore => "more",
                ResponderStep::Request(_) => "request",
            };
            let outcome = match event {
                "nothing" => responder.handle_input(&[]).map(stepped),
                "part" => responder.handle_input(b"MPA").map(stepped),
                "request" => responder.handle_input(&request).map(stepped),
                "reply" => responder.handle_input(&frame(REPLY, "40010000")).map(stepped),
                "accept" => responder.accept(None, None, 1, 1, &[]).map(|_| "reply"),
                _ => responder.reject(&[]).map(|_| "reply"),
            };
            let outcome = outcome.map_or_else(|e| e.to_string(), str::to_owned);
            table += &format!("{state} + {event} -> {outcome} {}\n", responder.state());
        }
    }
    assert_eq!(
        table,
        "AwaitRequest + nothing -> more AwaitRequest\n\
         AwaitRequest + part -> more AwaitRequest\n\
         AwaitRequest + request -> request Deciding\n\
         AwaitRequest + reply -> an MPA start-up frame of the wrong kind Done\n\
         AwaitRequest + accept -> call not allowed in this start-up state AwaitRequest\n\
         AwaitRequest + reject -> call not allowed in this start-up state AwaitRequest\n\
         Deciding + nothing -> more Deciding\n\
         Deciding + part -> the peer sent bytes after its request, before the reply Done\n\
         Deciding + request -> the peer sent bytes after its request, before the reply Done\n\
         Deciding + reply -> the peer sent bytes after its request, before the reply Done\n\
         Deciding + accept -> reply Done\n\
         Deciding + reject -> reply Done\n\
         Done + nothing -> call not allowed in this start-up state Done\n\
         Done + part -> call not allowed in this start-up state Done\n\
         Done + request -> call not allowed in this start-up state Done\n\
         Done + reply -> call not allowed in this start-up state Done\n\
         Done + accept -> call not allowed in this start-up state Done\n\
         Done + reject -> call not allowed in this start-up state Done\n"
    );
}
