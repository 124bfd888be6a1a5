//! Recorded traffic of Linux siw (`tests/captures`), replayed with our engine as either side.
//!
//! `recording` reads the files, `conversation` extracts the messages of the two sides, and `replay`
//! plays a connection. `differences` lists where our engine differs. The list must be complete and
//! must not contain anything else.

mod conversation;
mod differences;
mod recording;
mod replay;

use std::path::Path;

use super::link::Cuts;
use crate::rdmap::{Layout, Opcode, Terminate, codes};
use conversation::{Act, Conversation};
use differences::{DIFFERENCES, ENDS, FLAWS};
use recording::Side;
use replay::{Flaw, Outcome, play};
use rnic_abi::types::TerminateCode;

/// Number of recordings in `tests/captures`.
const FILES: usize = 33;

/// Returns every recorded connection with its name.
fn conversations() -> Vec<(String, Conversation)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/captures");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|e| e == "pcap"));
    files.sort();
    assert_eq!(files.len(), FILES);
    let mut found = Vec::new();
    for file in files {
        let name = file.file_stem().unwrap().to_str().unwrap();
        let connections = recording::connections(&std::fs::read(&file).unwrap());
        for (n, connection) in connections.iter().enumerate() {
            let name = if connections.len() > 1 { format!("{name}/{n}") } else { name.to_owned() };
            found.push((name, Conversation::new(connection)));
        }
    }
    found
}

fn flaw(name: &str, us: Side) -> Flaw {
    FLAWS.iter().find(|(of, side, _)| (*of, *side) == (name, us)).map_or(Flaw::None, |f| f.2)
}

/// Returns the listed differences, in order, and the end of a connection.
fn expected(name: &str, talk: &Conversation, us: Side) -> (Vec<[String; 2]>, Vec<String>) {
    let of = DIFFERENCES.iter().filter(|d| d.at.contains(&(name, us)));
    let differences = of.map(|d| [d.ours, d.theirs].map(str::to_owned)).collect();
    let end = match ENDS.iter().find(|(of, side, _)| (*of, *side) == (name, us)) {
        Some((_, _, words)) => words,
        // Closed by one side and then by the other.
        None => {
            let closed = talk.acts.iter().find(|(_, act)| matches!(act, Act::Finished));
            match closed {
                Some((side, _)) if *side == us => &["disconnected"][..],
                _ => &["peer closed", "disconnected"],
            }
        }
    };
    (differences, end.iter().map(|w| (*w).to_owned()).collect())
}

fn replay_all(cuts: &Cuts) -> usize {
    let mut wrong = Vec::new();
    let mut same = 0;
    for (name, talk) in conversations() {
        for us in [Side::Initiator, Side::Responder] {
            let outcome = play(&talk, us, flaw(&name, us), cuts.clone());
            let Outcome { differences, end, .. } = &outcome;
            same += outcome.same;
            if (differences.clone(), end.clone()) != expected(&name, &talk, us) {
                wrong.push(format!("{name} as {us:?}: {outcome:#?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    same
}

#[test]
fn replays_match_siw_except_for_the_list() {
    let same = replay_all(&Cuts::None);
    assert_eq!(same, 216_936, "bytes that are the same");
    // The lists contain only existing connections.
    let names: Vec<String> = conversations().into_iter().map(|(name, _)| name).collect();
    let known = |name: &str| names.iter().any(|n| n == name);
    for difference in DIFFERENCES {
        assert!(!difference.reason.is_empty() && difference.ours != difference.theirs);
        assert!(difference.at.iter().all(|(name, _)| known(name)), "{:?}", difference.at);
    }
    assert!(ENDS.iter().all(|(name, ..)| known(name)));
    assert!(FLAWS.iter().all(|(name, ..)| known(name)));
}

#[test]
fn replays_do_not_depend_on_cuts() {
    for cuts in [Cuts::Every(1), Cuts::Every(7), Cuts::Random(3)] {
        replay_all(&cuts);
    }
}

#[test]
fn recorded_terminates_have_the_siw_layout() {
    let mut found = Vec::new();
    for (name, talk) in conversations() {
        for side in [Side::Initiator, Side::Responder] {
            for message in talk.messages(side).filter(|m| m.opcode == Opcode::Terminate) {
                let t = Terminate::parse(&message.payload).unwrap();
                assert_eq!(t.layout, Layout::Siw, "{name}");
                found.push((name.clone(), t.code, t.read_request.is_some()));
            }
        }
    }
    let expected: [(&str, TerminateCode, bool); 8] = [
        ("gen-sendseinv", codes::TAGGED_INVALID_STAG, false),
        ("term-read-bad-stag", codes::PROTECTION_INVALID_STAG, true),
        ("term-read-bounds", codes::PROTECTION_BOUNDS, true),
        ("term-send-nobuf", codes::UNTAGGED_NO_BUFFER, false),
        ("term-send-toolong", codes::UNTAGGED_NO_BUFFER, false),
        ("term-write-bad-stag", codes::TAGGED_INVALID_STAG, false),
        ("term-write-bounds", codes::TAGGED_BOUNDS, false),
        ("term-write-noperm", codes::TAGGED_INVALID_STAG, false),
    ];
    assert_eq!(found, expected.map(|(name, code, read)| (name.to_owned(), code, read)));
}
