//! Wireshark's dissectors for MPA, DDP and RDMAP decode the daemon's TCP traffic: they find every
//! message, correct CRCs, and no errors.
//!
//! A relay between two daemons records the bytes. The tests write them to a capture file, cut into
//! segments anywhere or, with Markers, at FPDUs. As root, dumpcap also captures the kernel's
//! packets, in a network namespace. Without tshark the tests report an omission and pass, except in
//! CI.

mod talk;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rnic_core::mpa::{Deframer, MARKER_INTERVAL};
use rnic_tests::pcap::Cuts;
use rnic_tests::relay::{Content, Direction, Record, Relay};
use rnic_tests::tshark::{self, Dissection, Fpdu};
use rnic_tests::{DEADLINE, Process, pcap};
use rustix::process::Signal;
use talk::{
    Count, DEFAULT, Ending, Posted, READ_RESPONSE, TERMINATE, WRITE, Wire, converse, wires,
};
use tempfile::TempDir;

/// Compares a dissection with the configuration and the posted messages.
fn check(wire: &Wire, ending: Ending, posted: &Posted, port: u16, found: &Dissection) {
    let what = format!("{}, {ending:?}", wire.name);
    assert_eq!(found.problems, [""; 0], "{what}");
    let [request, reply] = &found.frames[..] else { panic!("{what}: {:?}", found.frames) };
    assert_eq!((request.reply, reply.reply), (false, true), "{what}");
    let [to_a, to_b] = wire.markers;
    let rejected = ending == Ending::Rejected;
    assert_eq!(request.flags, [to_a, wire.crc, false], "{what}");
    assert_eq!(reply.flags, [to_b, wire.crc, rejected], "{what}");
    assert_eq!((request.revision, reply.revision), (wire.revision, wire.revision), "{what}");
    let enhanced = if wire.revision == 2 { 4 } else { 0 };
    let answer = if rejected { b"not now".len() } else { b"a responder".len() } as u64;
    assert_eq!(request.private_data, b"initiator".len() as u64 + enhanced, "{what}");
    assert_eq!(reply.private_data, answer + enhanced, "{what}");

    let mut messages = Count::new();
    let mut bytes = BTreeMap::new();
    for fpdu in &found.fpdus {
        let up = fpdu.from != port;
        let Some(opcode) = fpdu.opcode else { panic!("{what}: no opcode in {fpdu:?}") };
        let header = if matches!(opcode, WRITE | READ_RESPONSE) { 14 } else { 18 };
        *messages.entry((up, opcode)).or_default() += usize::from(fpdu.last);
        *bytes.entry((up, opcode)).or_default() += fpdu.len - header;
        assert_eq!(fpdu.crc_is_good, wire.crc.then_some(true), "{what}: {fpdu:?}");
    }
    assert_eq!(messages, posted.messages, "{what}");
    assert_eq!(bytes, posted.bytes, "{what}");
    let terminate = found.fpdus.iter().find(|f| f.opcode == Some(TERMINATE));
    let (error, enclosed) = match terminate {
        None => (vec![], vec![]),
        Some(Fpdu { terminate, enclosed, .. }) => (terminate.clone(), enclosed.clone()),
    };
    match ending {
        Ending::Orderly | Ending::Rejected => assert!(error.is_empty()),
        // Layer, type, code, then M, D and R; segment length, DDP and RDMAP headers.
        Ending::BadWrite => assert_eq!((error, enclosed), (vec![1, 1, 0, 1, 1, 0], vec![2, 14])),
        Ending::BadSend => assert_eq!((error, enclosed), (vec![1, 2, 5, 1, 1, 0], vec![2, 18])),
        // Wireshark treats type 1 of every layer as a tagged segment, so it decodes only 14 of the
        // 18 bytes of the DDP header. The comparison of `bytes` shows that the rest is present.
        Ending::BadRead => assert_eq!((error, enclosed), (vec![0, 1, 0, 1, 1, 1], vec![2, 14, 28])),
        Ending::BadAtomic => assert_eq!((error, enclosed), (vec![0, 1, 0, 1, 1, 0], vec![2, 14])),
    }
}

/// Returns the lengths of the FPDUs of a record in each direction, found without tshark.
fn fpdus(wire: &Wire, record: &Record) -> [Vec<usize>; 2] {
    [Direction::Up, Direction::Down].map(|way| {
        let sent =
            record.iter().filter(|(w, _)| *w == way).filter_map(|(_, content)| match content {
                Content::Bytes(bytes) => Some(&bytes[..]),
                Content::Fin => None,
            });
        // Skip the start-up frame.
        let mut stream = sent.skip(1).collect::<Vec<_>>().concat();
        let markers = wire.markers[if way == Direction::Up { 1 } else { 0 }];
        let mut deframer = Deframer::new(markers, wire.crc);
        let mut lengths = Vec::new();
        while !stream.is_empty() {
            let rest = stream.split_off(deframer.needed(&stream));
            deframer.take(&mut stream).unwrap();
            lengths.push(stream.len());
            stream = rest;
        }
        lengths
    })
}

/// Returns the direction with Markers, if only one has them.
fn only_marked(wire: &Wire) -> Option<Direction> {
    match wire.markers {
        [false, true] => Some(Direction::Up),
        [true, false] => Some(Direction::Down),
        _ => None,
    }
}

/// Returns true if an FPDU ends directly before a Marker. The Marker belongs to the next FPDU (RFC
/// 5044 section 4.3), but Wireshark 4.0 counts it with the FPDU before it, and then waits for four
/// bytes that never arrive.
fn ends_at_a_marker(lengths: &[usize]) -> bool {
    let mut end = 0;
    lengths.iter().any(|len| {
        end += len;
        end % MARKER_INTERVAL == 0
    })
}

/// Records conversations until Wireshark can decode one, and checks its dissection. FPDU boundaries
/// depend on the kernel's MSS and so differ between attempts.
fn relayed(dir: &Path, wire: &Wire, ending: Ending) {
    let readable = (0..10).any(|_| recorded_and_dissected(dir, wire, ending));
    assert!(readable, "{}: in each of ten records, an FPDU ends at a Marker", wire.name);
}

/// Records a conversation and checks its dissection. Returns false if Wireshark would misread the
/// record.
fn recorded_and_dissected(dir: &Path, wire: &Wire, ending: Ending) -> bool {
    let mut relay: Option<Relay> = None;
    let mut posted = converse(wire, ending, |listener| {
        relay.insert(Relay::start(listener.local_addr(), wire.edit)).address
    });
    let mut record = relay.take().unwrap().finish();
    // If one direction has Markers, Wireshark expects them in both, so the capture contains only
    // the direction with Markers.
    if let Some(way) = only_marked(wire) {
        posted.retain(way == Direction::Up);
        let bytes = |content: &Content| matches!(content, Content::Bytes(_));
        let frames = record.drain(..2).collect::<Vec<_>>();
        record.retain(|(w, content)| *w == way || !bytes(content));
        record.splice(..0, frames);
    }
    let lengths = fpdus(wire, &record);
    // Direction `Up` leads to the responder.
    let streams = [(wire.markers[1], &lengths[0]), (wire.markers[0], &lengths[1])];
    if streams.iter().any(|(marked, lengths)| *marked && ends_at_a_marker(lengths)) {
        return false;
    }
    let counted = lengths.each_ref().map(Vec::len);
    // With Markers, Wireshark requires exactly one FPDU per segment.
    let marked = wire.markers != [false; 2];
    let cuts = if marked { Cuts::Fpdus(lengths) } else { Cuts::Anywhere };
    let file = dir.join(format!("{}-{ending:?}.pcap", wire.name));
    pcap::write(&file, &record, &cuts).unwrap();
    let found = tshark::dissect(&file);
    check(wire, ending, &posted, pcap::PORT, &found);
    let ups = found.fpdus.iter().filter(|fpdu| fpdu.from != pcap::PORT).count();
    assert_eq!([ups, found.fpdus.len() - ups], counted, "{}", wire.name);
    let markers = found.fpdus.iter().any(|fpdu| fpdu.markers > 0);
    assert_eq!(markers, marked && ending != Ending::Rejected);
    true
}

#[test]
fn wireshark_dissects_every_operation() {
    if !tshark::is_available() {
        return;
    }
    let dir = TempDir::with_prefix("rnic-test-").unwrap();
    for wire in wires() {
        relayed(dir.path(), &wire, Ending::Orderly);
    }
}

#[test]
fn wireshark_dissects_terminates_and_rejections() {
    if !tshark::is_available() {
        return;
    }
    let dir = TempDir::with_prefix("rnic-test-").unwrap();
    for ending in
        [Ending::BadWrite, Ending::BadRead, Ending::BadAtomic, Ending::BadSend, Ending::Rejected]
    {
        for wire in wires().iter().filter(|wire| only_marked(wire).is_none()) {
            relayed(dir.path(), wire, ending);
        }
    }
}

#[test]
fn wireshark_sees_a_wrong_byte() {
    if !tshark::is_available() {
        return;
    }
    let dir = TempDir::with_prefix("rnic-test-").unwrap();
    let mut relay = None;
    converse(&DEFAULT, Ending::BadWrite, |listener| {
        relay.insert(Relay::start(listener.local_addr(), DEFAULT.edit)).address
    });
    let mut record = relay.take().unwrap().finish();
    let lengths = fpdus(&DEFAULT, &record);
    // Corrupt the last byte of the Terminate before its CRC.
    let Content::Bytes(last) = &mut record
        .iter_mut()
        .rfind(|(way, content)| *way == Direction::Down && *content != Content::Fin)
        .unwrap()
        .1
    else {
        panic!("bytes")
    };
    let at = last.len() - 5;
    last[at] ^= 1;
    let file = dir.path().join("wrong.pcap");
    pcap::write(&file, &record, &Cuts::Anywhere).unwrap();
    let verdicts: Vec<_> = tshark::dissect(&file).fpdus.iter().map(|f| f.crc_is_good).collect();
    let mut expected = vec![Some(true); lengths[0].len()];
    expected.push(Some(false));
    assert_eq!(verdicts, expected);
}

/// Environment variable of the process that runs inside a network namespace.
const INSIDE: &str = "RNIC_TEST_INSIDE_NAMESPACE";
/// Test that this process runs.
const CAPTURE: &str = "wireshark_dissects_kernel_traffic";

#[test]
fn wireshark_dissects_kernel_traffic() {
    if std::env::var_os(INSIDE).is_some() {
        return capture_inside();
    }
    if !tshark::is_available() {
        return;
    }
    let probe = Command::new("unshare").args(["--net", "ip", "link", "set", "lo", "up"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        return rnic_tests::omit("no packets captured: network namespaces require root");
    }
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""]);
    command.arg(std::env::current_exe().unwrap()).args(["--exact", CAPTURE, "--nocapture"]);
    command.env(INSIDE, "1");
    Process::start(command).succeed();
}

/// Captures all packets on the loopback interface of this namespace, which carries no other
/// traffic.
fn capture_inside() {
    let dir = TempDir::with_prefix("rnic-test-").unwrap();
    for ending in [Ending::Orderly, Ending::BadWrite, Ending::Rejected] {
        let file = dir.path().join(format!("{ending:?}.pcap"));
        let mut command = Command::new("dumpcap");
        command.args(["-q", "-P", "-i", "lo", "-f", "tcp or udp", "-w"]).arg(&file);
        let mut dumpcap = Process::start(command);
        dumpcap.line_after("File: ");
        let mut port = 0;
        let posted = converse(&DEFAULT, ending, |listener| {
            port = listener.local_addr().port();
            listener.local_addr()
        });
        catches_up(&file);
        dumpcap.signal(Signal::INT);
        dumpcap.succeed();
        check(&DEFAULT, ending, &posted, port, &tshark::dissect(&file));
    }
}

/// Waits until the capture file contains all packets, by waiting for one sent after them.
fn catches_up(file: &Path) {
    const LAST: &[u8] = b"the last packet of the capture";
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(LAST, socket.local_addr().unwrap()).unwrap();
    let deadline = Instant::now() + DEADLINE;
    while !std::fs::read(file).unwrap().windows(LAST.len()).any(|w| w == LAST) {
        assert!(Instant::now() < deadline, "dumpcap does not catch up");
        std::thread::yield_now();
    }
}

#[test]
fn captures_of_siw_have_no_errors() {
    if !tshark::is_available() {
        return;
    }
    let captures = Path::new(env!("CARGO_MANIFEST_DIR")).join("captures");
    let mut files = 0;
    let mut fpdus = 0;
    for entry in std::fs::read_dir(captures).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_none_or(|e| e != "pcap") {
            continue;
        }
        let found = tshark::dissect(&file);
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(found.problems, [""; 0], "{name}");
        let crc = name.starts_with("crc-");
        let right = |f: &Fpdu| f.crc_is_good == crc.then_some(true) && f.opcode.is_some();
        assert!(found.fpdus.iter().all(right), "{name}: {:?}", found.fpdus);
        files += 1;
        fpdus += found.fpdus.len();
    }
    assert_eq!((files, fpdus), (33, 475));
}
