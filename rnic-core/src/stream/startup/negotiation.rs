//! Tests our state machines against every row of the table `mpa_negotiation` (figures 15 to 17 of
//! RFC 5044 appendix C). An RDMA Consortium (RDMAC) end is simulated with literal frames.

use super::tests::{OPTIONS, REPLY, REQUEST, frame};
use super::*;
use crate::conformance::{Row, table};

/// Result of a start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Connect { version: u8, markers_to_initiator: bool, markers_to_responder: bool },
    Close,
}

/// Returns the options of an end that our state machines implement; `None` for an RDMAC end.
fn ours(kind: &str, markers: bool, revision: u8) -> Option<Options> {
    let rdmac = match kind {
        "rdmac" => return None,
        "ietf-permissive" => true,
        "ietf-non-permissive" => false,
        other => panic!("unknown end {other}"),
    };
    Some(Options { revision, markers, rdmac, ..OPTIONS })
}

/// Flags and revision in all frames of an RDMAC end: M and C, revision 0.
const RDMAC: &str = "c0000000";

/// Returns the result as seen by our Initiator.
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

/// Connects our Initiator and our Responder.
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
    assert_eq!(of_initiator(&a), of_responder(&p), "both ends agree");
    assert_eq!((a.crc, p.crc), (true, true));
    of_initiator(&a)
}

/// Connects an RDMAC Initiator and our Responder.
fn rdmac_initiator(passive: &Options) -> Outcome {
    // Our own CRC option has no effect with an RDMAC peer, which always uses CRCs.
    let mut responder = Responder::new(&Options { crc: false, ..*passive });
    match responder.handle_input(&frame(REQUEST, RDMAC)) {
        Ok(ResponderStep::Request(request)) => {
            assert_eq!(request.revision, 0, "the application learns the revision");
            let (reply, n) = responder.accept(None, None, 64, 64, &[]).expect("undecided");
            assert_eq!(reply, frame(REPLY, RDMAC), "never without M");
            assert!(n.crc);
            of_responder(&n)
        }
        Err(error @ ResponderError::Rdmac { .. }) => {
            // Sends a Reply of revision 1, then closes normally.
            assert_eq!(error.last_frame()[..16], frame(REPLY, ""));
            assert_eq!(error.last_frame()[17], 1);
            Outcome::Close
        }
        other => panic!("{other:?}"),
    }
}

/// Connects our Initiator and an RDMAC Responder.
fn rdmac_responder(active: &Options) -> Outcome {
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
fn every_row_of_the_negotiation_table() {
    let rows = table("mpa_negotiation");
    let mut played = 0;
    for row in &rows {
        let active = row.text("initiator");
        let passive = row.text("responder");
        let m = |who: &str| row.number(who) == 1;
        for revision in [1, 2] {
            let active = ours(active, m("initiator_m"), revision);
            let passive = ours(passive, m("responder_m"), revision);
            let outcome = match (active, passive) {
                (Some(active), Some(passive)) => both(&active, &passive),
                (None, Some(passive)) => rdmac_initiator(&passive),
                (Some(active), None) => rdmac_responder(&active),
                (None, None) => continue,
            };
            played += 1;
            match expected(row) {
                Some(expected) => assert_eq!(outcome, expected, "{row:?}"),
                // A Responder that declares M = 0 to an RDMAC Initiator. Ours always declares
                // M = 1, so the result is that of the next row.
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
    // In one row both ends are RDMAC.
    assert_eq!((rows.len(), played), (25, 2 * 24));
}
