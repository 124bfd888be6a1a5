//! The table `mpa_negotiation`: figures 15 to 17 of RFC 5044 appendix C, every row of them, played
//! by our machines. An end that we cannot be, the RDMA Consortium's, is played by hand.

use super::tests::{OPTIONS, REPLY, REQUEST, frame};
use super::*;
use crate::conformance::{Row, table};

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Connect { version: u8, markers_to_initiator: bool, markers_to_responder: bool },
    Close,
}

/// An end of the table that we can be.
fn ours(kind: &str, markers: bool, revision: u8) -> Option<Options> {
    let rdmac = match kind {
        "rdmac" => return None,
        "ietf-permissive" => true,
        "ietf-non-permissive" => false,
        other => panic!("what is {other}?"),
    };
    Some(Options { revision, markers, rdmac, ..OPTIONS })
}

/// A frame as an RDMA Consortium end sends it always: Rev 0, M and C.
const RDMAC: &str = "c0000000";

/// Our Initiator's view of a connection.
fn of_initiator(n: &Negotiated) -> Outcome {
    Outcome::Connect {
        version: n.version,
        markers_to_initiator: n.rx_markers,
        markers_to_responder: n.tx_markers,
    }
}

fn of_responder(n: &Negotiated) -> Outcome {
    Outcome::Connect {
        version: n.version,
        markers_to_initiator: n.tx_markers,
        markers_to_responder: n.rx_markers,
    }
}

/// Both ends are ours.
fn both(active: &Options, passive: &Options) -> Outcome {
    let mut initiator = Initiator::new(active, &[]).expect("no private data");
    let mut responder = Responder::new(passive);
    let asked = responder.handle_input(initiator.request());
    let Ok(ResponderStep::Request(request)) = asked else { panic!("{asked:?}") };
    assert!(request.revision > 0, "an IETF end never asks for Rev 0");
    let (reply, p) = responder.accept(None, None, 64, 64, &[]).expect("undecided");
    let Ok(InitiatorStep::Accepted(a)) = initiator.handle_input(&reply) else {
        panic!("{reply:02x?}")
    };
    assert_eq!(of_initiator(&a), of_responder(&p), "both ends believe the same");
    assert_eq!((a.crc, p.crc), (true, true));
    of_initiator(&a)
}

/// An Initiator of the RDMA Consortium and our Responder.
fn asked_by_rdmac(passive: &Options) -> Outcome {
    // What we want for ourselves does not matter to such a peer: it always has CRCs.
    let mut responder = Responder::new(&Options { crc: false, ..*passive });
    match responder.handle_input(&frame(REQUEST, RDMAC)) {
        Ok(ResponderStep::Request(request)) => {
            assert_eq!(request.revision, 0, "the application is told");
            let (reply, n) = responder.accept(None, None, 64, 64, &[]).expect("undecided");
            assert_eq!(reply, frame(REPLY, RDMAC), "never without M");
            assert!(n.crc);
            of_responder(&n)
        }
        Err(error @ ResponderError::Rdmac { .. }) => {
            // A Reply of Rev 1, and then the end, in order.
            assert_eq!(error.last_frame()[..16], frame(REPLY, ""));
            assert_eq!(error.last_frame()[17], 1);
            Outcome::Close
        }
        other => panic!("{other:?}"),
    }
}

/// Our Initiator and a Responder of the RDMA Consortium.
fn answered_by_rdmac(active: &Options) -> Outcome {
    let mut initiator =
        Initiator::new(&Options { crc: false, ..*active }, &[]).expect("no private data");
    assert_ne!(initiator.request()[17], 0);
    assert!(!active.rdmac || initiator.request()[17] == 1, "a permissive end asks for Rev 1");
    match initiator.handle_input(&frame(REPLY, RDMAC)) {
        Ok(InitiatorStep::Accepted(n)) => {
            assert!(n.crc && n.revision == 0);
            of_initiator(&n)
        }
        Err(StartupError::Rdmac) => Outcome::Close,
        other => panic!("{other:?}"),
    }
}

fn expected(row: &Row) -> Option<Outcome> {
    let is = |key: &str| row.number(key) == 1;
    match row.text("result") {
        "connect" => Some(Outcome::Connect {
            version: u8::try_from(row.number("version")).expect("0 or 1"),
            markers_to_initiator: is("markers_to_initiator"),
            markers_to_responder: is("markers_to_responder"),
        }),
        "close" => Some(Outcome::Close),
        "not-applicable" => None,
        other => panic!("{other}"),
    }
}

//= MPA-4.3-3
//= MPA-C.1-1
//= MPA-C.1-2
//= MPA-C.1-4
//= MPA-C.2.1-1
//= MPA-C.2.2-1
//= MPA-C.2.3-1
//= MPA-C.2.4-1
//= MPA-C.2.5-1
//= MPA-C.3-1
#[test]
fn every_row_of_the_table_is_what_our_machines_do() {
    let rows = table("mpa_negotiation");
    let mut played = 0;
    for row in &rows {
        let (active, passive) = (row.text("initiator"), row.text("responder"));
        let m = |who: &str| row.number(who) == 1;
        for revision in [1, 2] {
            let active = ours(active, m("initiator_m"), revision);
            let passive = ours(passive, m("responder_m"), revision);
            let outcome = match (active, passive) {
                (Some(active), Some(passive)) => both(&active, &passive),
                (None, Some(passive)) => asked_by_rdmac(&passive),
                (Some(active), None) => answered_by_rdmac(&active),
                (None, None) => continue,
            };
            played += 1;
            match expected(row) {
                Some(expected) => assert_eq!(outcome, expected, "{row:?}"),
                // A Responder that declares M = 0 to such an Initiator: ours declares M = 1 then,
                // whatever it was told to want, so this is the next row.
                None => {
                    let all = Outcome::Connect {
                        version: 0,
                        markers_to_initiator: true,
                        markers_to_responder: true,
                    };
                    assert_eq!(outcome, all, "{row:?}");
                }
            }
        }
    }
    // In one row neither end is ours.
    assert_eq!((rows.len(), played), (25, 2 * 24));
}
