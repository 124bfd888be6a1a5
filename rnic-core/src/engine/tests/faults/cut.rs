//! Streams that end inside an FPDU.

use std::time::Duration;

use super::super::rc::{LIMITS, linked, ms};
use super::super::requests::Wr;
use super::super::world::{A, B, Wiring, World};
use super::{assert_injected, counts, iwarp, set, set_one};
use rnic_abi::faults::link::LinkShape;
use rnic_abi::types::QpState;

/// Returns the number of bytes that an end has sent.
fn sent(w: &World, end: usize) -> u64 {
    w.links[0].pipes[end].sent
}

/// The peer sees FIN or RST inside an FPDU of which it has a part.
#[test]
fn an_iwarp_stream_ends_inside_an_fpdu() {
    for wiring in Wiring::all() {
        for reset in [false, true] {
            let which = format!("{wiring:?} {reset}");
            let mut w = iwarp(wiring);
            let rule = set_one(&mut w, A, &format!("do=cut-fpdu nth=2 reset={reset} name=cut"));
            let a = w.any_mr(A, 100);
            let b = w.any_mr(B, 100);
            w.recv(A, 9, &[]);
            (1..=3).for_each(|n| w.recv(B, n, &[b.all()]));
            w.post(A, &[Wr::send(1, &[a.all()])]);
            assert_eq!(w.completions(A), ["1 Send"], "{which}");
            assert_eq!(w.completions(B), ["1 Receive 100"], "{which}");
            if wiring.direct {
                assert_eq!(counts(&rule), (0, 0));
                continue;
            }
            let whole = sent(&w, A);
            w.post(A, &[Wr::send(2, &[a.all()]), Wr::send(3, &[])]);
            let flushed = ["2 Send WrFlush", "3 Send WrFlush", "9 Receive WrFlush"];
            assert_eq!(w.completions(A), flushed, "{which}");
            assert_eq!(w.completions(B), ["2 Receive WrFlush", "3 Receive WrFlush"], "{which}");
            assert_eq!(w.events(A), ["lost: injected by fault cut"], "{which}");
            let seen = if reset { "reset" } else { "the peer closed inside a message" };
            let events = w.events(B);
            assert!(events.len() == 1 && events[0].contains(seen), "{which}: {events:?}");
            assert_eq!([w.state(A), w.state(B)], [QpState::Error; 2], "{which}");
            assert_eq!(counts(&rule), (2, 1), "{which}");
            // Of about 150 bytes.
            assert!((60..90).contains(&(sent(&w, A) - whole)), "{which}");
            assert_injected_first(&w);
        }
    }
}

/// Checks that the first diagnosis of A names the rule.
fn assert_injected_first(w: &World) {
    assert_eq!(w.diagnoses(A)[0].rule, "injected by fault cut");
}

/// As after any loss of the stream, the QP survives. The request in flight fails when the QP gets
/// another stream, or gets none in time.
#[test]
fn an_rc_qp_outlives_a_cut_stream() {
    for comes_back in [false, true] {
        let mut w = linked(Wiring::tcp());
        set(&mut w, A, "do=cut-fpdu nth=1 name=cut");
        (1..=3).for_each(|n| w.recv(B, n, &[]));
        w.post(A, &[Wr::send(1, &[])]);
        assert_eq!(w.completions(A), [""; 0]);
        assert_eq!(w.completions(B), [""; 0]);
        assert_eq!([w.state(A), w.state(B)], [QpState::Rts; 2]);
        assert_injected(&w, A, "cut");
        if comes_back {
            w.link([A, B], Wiring::tcp(), LIMITS);
        } else {
            w.advance(ms(1000));
        }
        assert_eq!(w.completions(A), ["1 Send TransportRetryExceeded"], "{comes_back}");
        assert_eq!(w.state(A), QpState::Error, "{comes_back}");
    }
}

/// Long messages in shared memory are sent without a copy, unless a rule may cut them.
#[test]
fn a_long_message_is_cut() {
    for crc in [false, true] {
        let mut w = iwarp(Wiring::tcp().with(|options| options.crc = crc));
        let a = w.any_mr(A, 300_000);
        let b = w.any_mr(B, 300_000);
        let rule = set_one(&mut w, A, "do=cut-fpdu nth=9 name=cut");
        w.post(A, &[Wr::write(1, &[a.all()], &b, 0)]);
        assert_eq!(w.completions(A), ["1 RdmaWrite WrFlush"], "{crc}");
        assert_eq!(counts(&rule), (9, 1), "{crc}");
        assert_injected_first(&w);
    }
}

/// The end of the stream waits for the bytes before it, which TCP or an emulated link delays.
#[test]
fn bytes_before_a_cut_arrive() {
    for emulated in [false, true] {
        let mut w = iwarp(Wiring::tcp());
        if emulated {
            let delay = Duration::from_millis(10);
            w.set_link(A, LinkShape { delay, ..LinkShape::default() });
        } else {
            w.links[0].pipes[A].window = 10;
        }
        set(&mut w, A, "do=cut-fpdu nth=2 name=cut");
        w.recv(B, 1, &[]);
        w.push(A, &[Wr::send(1, &[]), Wr::send(2, &[])]);
        w.engines[0].poll_doorbells(w.now);
        w.round();
        // Nothing is framed after the cut, although the rule is cleared.
        set(&mut w, A, "");
        w.advance(ms(20));
        assert_eq!(w.completions(B), ["1 Receive"], "{emulated}");
        assert_eq!(w.completions(A), ["1 Send", "2 Send WrFlush"], "{emulated}");
        assert_eq!(w.state(B), QpState::Error, "{emulated}");
        assert!(w.next_timeout().is_none(), "{emulated}");
    }
}

/// A CRC rule does not count FPDUs without a CRC, although another rule counts them.
#[test]
fn fpdus_without_crc_do_not_count_for_crc_rules() {
    let mut w = iwarp(Wiring::tcp().with(|options| options.crc = false));
    let rules = set(&mut w, A, "do=corrupt-crc; do=cut-fpdu nth=9");
    w.recv(B, 1, &[]);
    w.post(A, &[Wr::send(1, &[])]);
    assert_eq!(w.completions(B), ["1 Receive"]);
    assert_eq!((counts(&rules[0]), counts(&rules[1])), ((0, 0), (1, 0)));
}
