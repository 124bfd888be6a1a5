//! Tests the start-up state machines against each other and against literal frames.

use proptest::prelude::*;

use super::*;
use crate::mpa::Deframer;
use crate::mpa::startup::{Enhanced, FrameKind, HEADER_LEN, Repr};
use crate::mpa::tests::{hex, pattern};
use crate::rdmap::{Terminate, codes};
use crate::stream::{Arrival, Inbound};

pub(super) const OPTIONS: Options = Options {
    revision: 2,
    crc: true,
    markers: false,
    rdmac: false,
    peer_to_peer: true,
    ird: 16,
    ord: 8,
    rtr: RtrKinds::all(),
};

const REVISION_1: Options = Options { revision: 1, ..OPTIONS };

pub(super) const REQUEST: &str = "4d504120 49442052 65712046 72616d65";
pub(super) const REPLY: &str = "4d504120 49442052 65702046 72616d65";

pub(super) fn frame(key: &str, rest: &str) -> Vec<u8> {
    [hex(key), hex(rest)].concat()
}

fn responder_with(options: &Options, request: &[u8]) -> (Responder, ConnectRequest) {
    let mut responder = Responder::new(options);
    match responder.handle_input(request) {
        Ok(ResponderStep::Request(request)) => (responder, request),
        other => panic!("{other:?}"),
    }
}

fn accept(options: &Options, request: &[u8]) -> (Vec<u8>, Negotiated) {
    responder_with(options, request).0.accept(None, None, 64, 64, &[]).expect("undecided")
}

pub(super) fn accepted(initiator: &mut Initiator, reply: &[u8]) -> Negotiated {
    match initiator.handle_input(reply) {
        Ok(InitiatorStep::Accepted(negotiated)) => negotiated,
        other => panic!("{other:?}"),
    }
}

/// Connects both machines and returns the parameters of each end.
fn connect(active: &Options, passive: &Options) -> (Negotiated, Negotiated) {
    let mut initiator = Initiator::new(active, &[]).expect("no private data");
    let (reply, of_passive) = accept(passive, initiator.request());
    (accepted(&mut initiator, &reply), of_passive)
}

/// Returns an enhanced frame.
fn enhanced(kind: FrameKind, enhanced: Enhanced) -> Vec<u8> {
    Repr {
        markers: false,
        crc: true,
        reject: false,
        revision: 2,
        enhanced: Some(enhanced),
        private_data: &[],
    }
    .to_vec(kind)
}

const PLAIN: Enhanced = Enhanced { peer_to_peer: false, rtr: RtrKinds::empty(), ird: 4, ord: 4 };

#[test]
fn pd_length_513_is_refused_by_header() {
    let header = frame(REQUEST, "40010201");
    assert_eq!(header.len(), HEADER_LEN);
    let error = Responder::new(&OPTIONS).handle_input(&header);
    assert_eq!(error, Err(FrameError::PrivateDataTooLong(513).into()));
    let mut initiator = Initiator::new(&OPTIONS, &[]).expect("short");
    let error = initiator.handle_input(&frame(REPLY, "40010201"));
    assert_eq!(error, Err(FrameError::PrivateDataTooLong(513).into()));
}

#[test]
fn private_data_of_every_boundary_length() {
    for options in [OPTIONS, REVISION_1] {
        for len in [0, 1, 507, 508, 509, 511, 512] {
            let data = pattern(len);
            let mut initiator = Initiator::new(&options, &data).expect("at most 512");
            let revision = initiator.request()[17];
            assert_eq!(revision, if len > 508 { 1 } else { options.revision });
            let (mut responder, request) = responder_with(&options, initiator.request());
            assert_eq!(request.private_data, data);
            match responder.accept(None, None, 64, 64, &data) {
                Ok((reply, of_passive)) => {
                    assert_eq!(of_passive.private_data, data);
                    assert_eq!(accepted(&mut initiator, &reply).private_data, data);
                }
                Err(error) => {
                    let too_long = PrivateDataTooLong { len, limit: 508 };
                    assert_eq!((error, revision), (too_long.into(), 2));
                }
            }
            let mut initiator = Initiator::new(&options, &[]).expect("short");
            let (mut responder, _) = responder_with(&options, initiator.request());
            if let Ok(reply) = responder.reject(&data) {
                let step = initiator.handle_input(&reply);
                assert_eq!(step, Ok(InitiatorStep::Rejected { private_data: data }));
            } else {
                assert!(len > 508 && options.revision == 2);
            }
        }
    }
    let too_long = PrivateDataTooLong { len: 513, limit: 512 };
    assert_eq!(Initiator::new(&OPTIONS, &[0; 513]).err(), Some(too_long));
}

#[test]
fn too_long_reply_data_keep_the_request() {
    let (mut responder, _) = responder_with(&REVISION_1, &frame(REQUEST, "40010000"));
    assert!(responder.accept(None, None, 64, 64, &[0; 513]).is_err());
    assert!(responder.reject(&[0; 513]).is_err());
    assert!(responder.accept(None, None, 64, 64, &[0; 512]).is_ok());
}

#[test]
fn key_is_refused_at_its_first_wrong_byte() {
    for at in 0..16 {
        let mut bytes = hex(REQUEST);
        bytes[at] ^= 0x20;
        bytes.truncate(at + 1);
        let mut responder = Responder::new(&OPTIONS);
        assert_eq!(responder.handle_input(&bytes), Err(FrameError::NoKey.into()), "{at}");
    }
    let error = Responder::new(&OPTIONS).handle_input(b"GET / HTTP/1.1\r\n");
    assert_eq!(error, Err(FrameError::NoKey.into()));
}

//= MPA-7.1.1-10
//= MPA-7.1.1-13
#[test]
fn reserved_request_bits_are_ignored() {
    let (_, n) = accept(&OPTIONS, &frame(REQUEST, "7f010000"));
    assert_eq!((n.revision, n.version, n.peer_to_peer), (1, 1, false));
    assert!(n.crc && !n.tx_markers);
    // Reserved bits of a Reply are ignored, too.
    let mut initiator = Initiator::new(&REVISION_1, &[]).expect("short");
    let n = accepted(&mut initiator, &frame(REPLY, "5f010000"));
    assert_eq!((n.revision, n.version, n.peer_to_peer), (1, 1, false));
    assert!(n.crc && !n.tx_markers);
}

#[test]
fn bytes_after_the_request_are_refused() {
    let mut bytes = frame(REQUEST, "40010000");
    bytes.extend(hex("000ec140"));
    let error = Responder::new(&OPTIONS).handle_input(&bytes).err();
    assert_eq!(error, Some(ResponderError::BytesAfterRequest));
    assert_eq!(error.as_ref().map(ResponderError::last_frame), Some(&[][..]));

    let (mut responder, _) = responder_with(&OPTIONS, &bytes[..20]);
    assert_eq!(responder.handle_input(&[0]), Err(ResponderError::BytesAfterRequest));
    assert!(responder.accept(None, None, 64, 64, &[]).is_err());
}

#[test]
fn bytes_after_the_reply_are_kept() {
    let mut initiator = Initiator::new(&REVISION_1, &[]).expect("short");
    let n = accepted(&mut initiator, &frame(REPLY, "40010003 010203 000ec140"));
    assert_eq!((n.private_data, n.leftover), (vec![1, 2, 3], hex("000ec140")));
}

#[test]
fn revisions_of_a_request() {
    let revision_2_plain = accept(&OPTIONS, &frame(REQUEST, "40020000")).0;
    assert_eq!(revision_2_plain, frame(REPLY, "40020000"));
    let revision_1 = accept(&OPTIONS, &frame(REQUEST, "50010004 80048004"));
    assert_eq!(revision_1.0, frame(REPLY, "40010000"));
    assert_eq!(revision_1.1.private_data, hex("80048004"));
    for revision in [3, 255] {
        let request = frame(REQUEST, &format!("40{revision:02x}0000"));
        let error = Responder::new(&OPTIONS).handle_input(&request);
        assert_eq!(error, Err(FrameError::Revision(revision).into()));
    }
    let error = Responder::new(&REVISION_1).handle_input(&frame(REQUEST, "50020004 00040004"));
    assert_eq!(error, Err(FrameError::Revision(2).into()));
    let error = Responder::new(&OPTIONS).handle_input(&frame(REQUEST, "50020003"));
    assert_eq!(error, Err(FrameError::NoEnhancedData(3).into()));
}

#[test]
fn revision_0_gets_a_revision_1_rejection() {
    for request in ["c0000000", "00000000"] {
        let error = Responder::new(&OPTIONS).handle_input(&frame(REQUEST, request)).err();
        let reply = frame(REPLY, "60010000");
        assert_eq!(error.as_ref().map(ResponderError::last_frame), Some(&reply[..]));
    }
    let mut initiator = Initiator::new(&OPTIONS, &[]).expect("short");
    assert_eq!(initiator.handle_input(&frame(REPLY, "c0000000")), Err(StartupError::Rdmac));
}

#[test]
fn permissive_mode_accepts_rdmac_peers() {
    let options = Options { rdmac: true, crc: false, ..OPTIONS };
    let (reply, n) = accept(&options, &frame(REQUEST, "c0000001 77"));
    assert_eq!(reply, frame(REPLY, "c0000000"));
    assert_eq!((n.revision, n.version, n.private_data.as_slice()), (0, 0, &[0x77][..]));
    assert!(n.crc && n.tx_markers && n.rx_markers);

    let mut initiator = Initiator::new(&options, &[]).expect("short");
    assert_eq!(initiator.request(), frame(REQUEST, "00010000"));
    let n = accepted(&mut initiator, &frame(REPLY, "c0000000"));
    assert_eq!((n.revision, n.version), (0, 0));
    assert!(n.crc && n.tx_markers && n.rx_markers);

    // siw, started with revision 0, is not an RDMAC peer: it could not read our Markers.
    for flags in ["00", "40", "80"] {
        let request = frame(REQUEST, &format!("{flags}000000"));
        let error = Responder::new(&options).handle_input(&request);
        assert!(matches!(error, Err(ResponderError::Rdmac { .. })), "{flags}");
        let mut initiator = Initiator::new(&options, &[]).expect("short");
        let reply = frame(REPLY, &format!("{flags}000000"));
        assert_eq!(initiator.handle_input(&reply), Err(StartupError::Rdmac), "{flags}");
    }
}

/// A rejection declares the same Markers and CRCs as an acceptance.
#[test]
fn rejection_declares_own_flags() {
    let plain = Options { rdmac: true, crc: false, markers: false, ..OPTIONS };
    for (options, request, reply) in [
        (plain, "00010000", "20010000"),
        (Options { crc: true, ..plain }, "00010000", "60010000"),
        (Options { markers: true, ..plain }, "00010000", "a0010000"),
        // The Reply to an RDMAC peer always declares Markers and CRCs.
        (plain, "c0000000", "e0000000"),
    ] {
        let (mut responder, _) = responder_with(&options, &frame(REQUEST, request));
        assert_eq!(responder.reject(&[]), Ok(frame(REPLY, reply)), "{options:?}");
    }
}

//= MPA-7.1.1-7
//= MPA-7.1.1-8
#[test]
fn crc_is_off_only_if_both_ends_agree() {
    for (active, passive) in [(false, false), (false, true), (true, false), (true, true)] {
        let (a, p) =
            connect(&Options { crc: active, ..OPTIONS }, &Options { crc: passive, ..OPTIONS });
        assert_eq!((a.crc, p.crc), (active || passive, active || passive));
    }
}

/// An Initiator may rely on the Reply alone, as siw does: it refuses a Reply without C if it needs
/// CRCs, and otherwise does not use them.
//= MPA-7.1.1-8
#[test]
fn reply_declares_crc_of_either_end() {
    for (ours, request, accepts, rejects) in [
        (false, "00010000", "00010000", "20010000"),
        (false, "40010000", "40010000", "60010000"),
        (true, "00010000", "40010000", "60010000"),
        (true, "40010000", "40010000", "60010000"),
    ] {
        let options = Options { crc: ours, ..OPTIONS };
        let request = frame(REQUEST, request);
        assert_eq!(accept(&options, &request).0, frame(REPLY, accepts), "{options:?}");
        let (mut responder, _) = responder_with(&options, &request);
        assert_eq!(responder.reject(&[]), Ok(frame(REPLY, rejects)), "{options:?}");
    }
}

//= MPA-7.1.1-5
//= MPA-7.1.1-6
#[test]
fn markers_follow_the_receivers_wish() {
    for (active, passive) in [(false, false), (false, true), (true, false), (true, true)] {
        let (a, p) = connect(
            &Options { markers: active, ..OPTIONS },
            &Options { markers: passive, ..OPTIONS },
        );
        assert_eq!((a.rx_markers, p.tx_markers), (active, active));
        assert_eq!((a.tx_markers, p.rx_markers), (passive, passive));
    }
}

//= RDMAP-6.1-5
#[test]
fn reads_are_bounded_by_both_ends() {
    let passive = Options { ird: 3, ord: 100, ..OPTIONS };
    let (a, p) = connect(&Options { ird: 5, ord: 7, ..OPTIONS }, &passive);
    assert_eq!((a.ird, a.ord, p.ird, p.ord), (5, 7, 7, 5));
    assert_eq!((a.peer_ird, a.peer_ord), (Some(7), Some(5)));
    assert_eq!((p.peer_ird, p.peer_ord), (Some(5), Some(7)));
}

//= RDMAP-6.1-5
#[test]
fn explicit_ird_is_not_raised() {
    let mut initiator = Initiator::new(&Options { ord: 9, ..OPTIONS }, &[]).expect("short");
    let (mut responder, request) = responder_with(&OPTIONS, initiator.request());
    assert_eq!((request.peer_ird, request.peer_ord), (Some(16), Some(9)));
    let (reply, p) = responder.accept(Some(2), Some(1), 64, 64, &[]).expect("undecided");
    let a = accepted(&mut initiator, &reply);
    assert_eq!((p.ird, p.ord, a.ird, a.ord), (2, 1, 1, 2));
}

#[test]
fn revision_1_uses_local_ird_and_ord() {
    let (a, p) = connect(&REVISION_1, &OPTIONS);
    assert_eq!((a.ird, a.ord, p.ird, p.ord), (16, 8, 16, 8));
    assert_eq!((a.peer_ird, a.peer_ord, p.peer_ird, p.peer_ord), (None, None, None, None));
}

#[test]
fn unnegotiated_reads_are_mirrored() {
    let request = enhanced(FrameKind::Request, Enhanced { ird: 0x3FFF, ord: 0x3FFF, ..PLAIN });
    let (reply, n) = accept(&OPTIONS, &request);
    assert_eq!(reply[20..24], hex("3fff3fff"));
    assert_eq!((n.ird, n.ord, n.peer_ird, n.peer_ord), (16, 8, None, None));

    let request = enhanced(FrameKind::Request, Enhanced { ord: 0x3FFF, ..PLAIN });
    let (reply, n) = accept(&OPTIONS, &request);
    assert_eq!(reply[20..24], hex("3fff0004"));
    assert_eq!((n.ird, n.ord), (16, 4));

    let mut initiator =
        Initiator::new(&Options { peer_to_peer: false, ..OPTIONS }, &[]).expect("short");
    let reply = enhanced(FrameKind::Reply, Enhanced { ird: 0x3FFF, ord: 0x3FFF, ..PLAIN });
    let n = accepted(&mut initiator, &reply);
    assert_eq!((n.ird, n.ord, n.peer_ird), (16, 8, None));
}

#[test]
fn local_values_stay_below_not_negotiated() {
    let many = Options { ird: u16::MAX, ord: 0x3FFF, ..OPTIONS };
    let initiator = Initiator::new(&many, &[]).expect("short");
    let (_, request) = responder_with(&OPTIONS, initiator.request());
    assert_eq!((request.peer_ird, request.peer_ord), (Some(0x3FFE), Some(0x3FFE)));
}

#[test]
fn reply_with_too_high_ord_is_terminated() {
    let options = Options { peer_to_peer: false, ..OPTIONS };
    let mut initiator = Initiator::new(&options, &[]).expect("short");
    let reply = enhanced(FrameKind::Reply, Enhanced { ord: 17, ..PLAIN });
    let error = initiator.handle_input(&reply).expect_err("17 is above 16");
    assert!(matches!(error, StartupError::InsufficientIrd { wanted: 17, offered: 16, .. }));
    assert_eq!(terminate_in(error.last_frame()), codes::LLP_IRD);
}

/// Returns the code of the Terminate that an Initiator sends as its only FPDU.
fn terminate_in(frame: &[u8]) -> rnic_abi::types::TerminateCode {
    let mut fpdu = frame.to_vec();
    let mut deframer = Deframer::new(false, true);
    assert_eq!(deframer.needed(&fpdu), fpdu.len());
    let ulpdu = deframer.take(&mut fpdu).expect("valid FPDU");
    match Inbound::new(1).handle(ulpdu, true) {
        Ok(Arrival::Terminate(Terminate { code, .. })) => code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn rtr_with_fewest_side_effects_is_chosen() {
    let kinds = |bits| RtrKinds::from_bits_truncate(bits);
    for active in 1..8 {
        for passive in 1..8 {
            let mut initiator =
                Initiator::new(&Options { rtr: kinds(active), ..OPTIONS }, &[]).expect("short");
            let options = Options { rtr: kinds(passive), ..OPTIONS };
            let (reply, p) = accept(&options, initiator.request());
            let common = kinds(active & passive);
            assert_eq!(p.role, Role::Responder { await_rtr: Some(common) });
            let best = [
                (RtrKinds::WRITE, Rtr::Write),
                (RtrKinds::READ, Rtr::Read),
                (RtrKinds::SEND, Rtr::Send),
            ]
            .into_iter()
            .find(|(kind, _)| common.contains(*kind));
            match (initiator.handle_input(&reply), best) {
                (Ok(InitiatorStep::Accepted(n)), Some((_, rtr))) => {
                    assert_eq!(n.role, Role::Initiator { rtr: Some(rtr) });
                    assert!(n.peer_to_peer && p.peer_to_peer);
                }
                (Err(error), None) => {
                    assert_eq!(terminate_in(error.last_frame()), codes::LLP_RTR);
                }
                other => panic!("{active} {passive}: {other:?}"),
            }
        }
    }
}

#[test]
fn read_rtr_raises_ird_to_one() {
    let only_read = Options { rtr: RtrKinds::READ, ird: 0, ord: 0, ..OPTIONS };
    let (a, p) = connect(&only_read, &only_read);
    assert_eq!((a.role, p.ird), (Role::Initiator { rtr: Some(Rtr::Read) }, 1));

    // IRD is raised only if both ends offer a Read.
    let not_read = Options { rtr: RtrKinds::WRITE | RtrKinds::SEND, ..OPTIONS };
    for (active, passive) in [(not_read, OPTIONS), (OPTIONS, not_read)] {
        let (_, p) = connect(&Options { ord: 0, ..active }, &Options { ird: 0, ..passive });
        let await_rtr = Some(not_read.rtr);
        assert_eq!((p.ird, p.role), (0, Role::Responder { await_rtr }), "{active:?}");
    }

    let request = Initiator::new(&Options { ord: 0, ..OPTIONS }, &[]).expect("short");
    let (mut responder, _) = responder_with(&OPTIONS, request.request());
    let (_, p) = responder.accept(Some(0), None, 0, 64, &[]).expect("undecided");
    let await_rtr = Some(RtrKinds::WRITE | RtrKinds::SEND);
    assert_eq!((p.ird, p.role), (0, Role::Responder { await_rtr }));
}

#[test]
fn client_server_model_has_no_rtr() {
    let (a, p) = connect(&Options { peer_to_peer: false, ..OPTIONS }, &OPTIONS);
    assert_eq!(a.role, Role::Initiator { rtr: None });
    assert_eq!(p.role, Role::Responder { await_rtr: None });
    assert!(!a.peer_to_peer && !p.peer_to_peer);
}

/// A connection is peer-to-peer only if the Request asks for it, whatever the Reply offers.
#[test]
fn reply_alone_is_not_peer_to_peer() {
    let eager = Enhanced { peer_to_peer: true, rtr: RtrKinds::all(), ..PLAIN };
    for (asks, answer) in [(false, eager), (true, PLAIN)] {
        let options = Options { peer_to_peer: asks, ..OPTIONS };
        let mut initiator = Initiator::new(&options, &[]).expect("short");
        let n = accepted(&mut initiator, &enhanced(FrameKind::Reply, answer));
        assert_eq!((n.peer_to_peer, n.role), (false, Role::Initiator { rtr: None }), "{asks}");
    }
}

#[test]
fn reply_without_enhanced_data() {
    for reply in ["40010000", "40020000"] {
        let mut initiator = Initiator::new(&OPTIONS, &[]).expect("short");
        let n = accepted(&mut initiator, &frame(REPLY, reply));
        assert_eq!((n.role, n.ird, n.ord), (Role::Initiator { rtr: None }, 16, 8));
        assert!(!n.peer_to_peer);
    }
    let mut initiator = Initiator::new(&REVISION_1, &[]).expect("short");
    let error = initiator.handle_input(&frame(REPLY, "50020004 00040004"));
    assert_eq!(error, Err(FrameError::Revision(2).into()));
}

#[test]
fn eof_without_a_reply_retries_revision_1() {
    for (options, heard, retry) in
        [(OPTIONS, &[][..], true), (OPTIONS, &b"MPA ID"[..], false), (REVISION_1, &[][..], false)]
    {
        let mut initiator = Initiator::new(&options, &[]).expect("short");
        assert_eq!(initiator.handle_input(heard), Ok(InitiatorStep::NeedMore));
        let expected =
            if retry { EofAction::RetryRevision1 } else { EofAction::Fail(StartupError::Closed) };
        assert_eq!(initiator.handle_eof(), expected);
    }
}

fn any_options() -> impl Strategy<Value = Options> {
    let flags = any::<(bool, bool, bool, bool)>();
    (1u8..=2, flags, any::<u16>(), any::<u16>(), 0u8..8).prop_map(
        |(revision, (crc, markers, rdmac, peer_to_peer), ird, ord, rtr)| {
            let rtr = RtrKinds::from_bits_truncate(rtr);
            Options { revision, crc, markers, rdmac, peer_to_peer, ird, ord, rtr }
        },
    )
}

proptest! {
    #[test]
    fn any_two_ends_agree_or_fail(
        active in any_options(),
        passive in any_options(),
        (ird, ord) in any::<(Option<u16>, Option<u16>)>(),
        (ird_limit, ord_limit) in any::<(u16, u16)>(),
        data in prop::collection::vec(any::<u8>(), 0..=508),
    ) {
        let mut initiator = Initiator::new(&active, &data).expect("at most 512");
        let mut responder = Responder::new(&passive);
        let request = match responder.handle_input(initiator.request()) {
            Ok(ResponderStep::Request(request)) => request,
            Err(ResponderError::Frame(FrameError::Revision(2))) if passive.revision == 1 => {
                return Ok(());
            }
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        };
        prop_assert_eq!(&request.private_data, &data);
        let (reply, p) = responder.accept(ird, ord, ird_limit, ord_limit, &data).expect("fits");
        prop_assert!(p.ird <= ird_limit && p.ord <= ord_limit);
        match initiator.handle_input(&reply) {
            Ok(InitiatorStep::Accepted(a)) => {
                prop_assert_eq!((a.crc, a.version, a.revision), (p.crc, p.version, p.revision));
                prop_assert_eq!((a.tx_markers, a.rx_markers), (p.rx_markers, p.tx_markers));
                prop_assert_eq!(a.peer_to_peer, p.peer_to_peer);
                prop_assert_eq!(&a.private_data, &data);
                if a.revision == 2 {
                    prop_assert!(a.ord <= p.ird && p.ord <= a.ird);
                }
            }
            Err(error) => prop_assert!(!error.last_frame().is_empty()),
            other => return Err(TestCaseError::fail(format!("{other:?}"))),
        }
    }

    #[test]
    fn any_frame_round_trips(
        (markers, crc, reject) in any::<(bool, bool, bool)>(),
        revision: u8,
        words in any::<Option<[u8; 4]>>(),
        data in prop::collection::vec(any::<u8>(), 0..=508),
    ) {
        let enhanced = words.filter(|_| revision >= 2).map(Enhanced::parse);
        // Without A the RTR bits have no meaning and are not sent.
        let enhanced = enhanced.map(|e| {
            if e.peer_to_peer { e } else { Enhanced { rtr: RtrKinds::empty(), ..e } }
        });
        let repr = Repr { markers, crc, reject, revision, enhanced, private_data: &data };
        let mut bytes = vec![0xAA; repr.buffer_len()];
        repr.emit(FrameKind::Reply, &mut bytes);
        let frame = crate::mpa::startup::Frame::check(FrameKind::Reply, 255, &bytes);
        let Ok(crate::mpa::startup::Progress::Complete(frame, &[])) = frame else {
            return Err(TestCaseError::fail(format!("{frame:?}")));
        };
        prop_assert_eq!(Repr::parse(&frame), repr);
    }

    #[test]
    fn arbitrary_bytes_after_a_key_do_not_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        rdmac: bool,
    ) {
        let options = Options { rdmac, ..OPTIONS };
        let mut responder = Responder::new(&options);
        let input = [hex(REQUEST), bytes.clone()].concat();
        if let Ok(ResponderStep::Request(_)) = responder.handle_input(&input) {
            let _ = responder.accept(None, None, 64, 64, &[]);
        }
        let mut initiator = Initiator::new(&options, &[]).expect("short");
        let _ = initiator.handle_input(&[hex(REPLY), bytes].concat());
    }
}

#[test]
fn missing_bytes_end_exactly_at_the_frame() {
    // 5 bytes of private data after the enhanced data.
    let request = Initiator::new(&OPTIONS, b"hello").expect("short").request().to_vec();
    let mut responder = Responder::new(&OPTIONS);
    let mut rest = [request.as_slice(), b"streaming"].concat();
    let mut reads = Vec::new();
    while responder.missing() > 0 {
        let n = responder.missing();
        reads.push(n);
        let bytes: Vec<u8> = rest.drain(..n).collect();
        responder.handle_input(&bytes).expect("valid");
    }
    assert_eq!((reads, rest.as_slice()), (vec![20, 9], &b"streaming"[..]));
    let reply = responder.reject(b"no").expect("short");
    let mut initiator = Initiator::new(&OPTIONS, b"hello").expect("short");
    for byte in &reply {
        assert!(initiator.missing() > 0);
        initiator.handle_input(&[*byte]).expect("valid");
    }
    assert_eq!((initiator.missing(), responder.missing()), (0, 0));
}

#[test]
fn startup_error_codes() {
    use crate::rdmap::codes;
    let wanted = StartupError::InsufficientIrd { wanted: 2, offered: 1, terminate: Vec::new() };
    for (error, code) in [
        (StartupError::Closed, Some(codes::LLP_CLOSED)),
        (StartupError::Rdmac, Some(codes::LLP_STARTUP)),
        (wanted, Some(codes::LLP_IRD)),
        (StartupError::Over, None),
    ] {
        assert_eq!(error.code(), code, "{error}");
    }
    assert_eq!(ResponderError::BytesAfterRequest.code(), Some(codes::LLP_STARTUP));
    assert_eq!(ResponderError::InvalidState.code(), None);
}
