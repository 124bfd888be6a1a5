//! Wireshark's dissectors for MPA, DDP and RDMAP decode the daemon's TCP traffic: they find every
//! message, correct CRCs, and no errors.
//!
//! A relay between two daemons records the bytes, which go to a capture file, cut anywhere or, with
//! Markers, at FPDUs. As root, dumpcap also captures the kernel's packets, in a network namespace.
//! Without tshark the tests report an omission and pass, except in CI.

mod talk;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rnic_core::mpa::{Deframer, MARKER_INTERVAL};
use rnic_tests::pcap::Cuts;
use rnic_tests::relay::{Record, Relay, Way, What};
use rnic_tests::tshark::{self, Dissection, Fpdu};
use rnic_tests::{DEADLINE, Process, pcap};
use rustix::process::Signal;
use talk::{
    Count, DEFAULT, Manner, Posted, READ_RESPONSE, TERMINATE, WRITE, Wire, converse, wires,
};
use tempfile::TempDir;

/// Checks the dissection.
fn judge(wire: &Wire, manner: Manner, posted: &Posted, port: u16, found: &Dissection) {
    let what = format!("{}, {manner:?}", wire.name);
    assert_eq!(found.complaints, [""; 0], "{what}");
    let [request, reply] = &found.frames[..] else { panic!("{what}: {:?}", found.frames) };
    assert_eq!((request.reply, reply.reply), (false, true), "{what}");
    let [to_a, to_b] = wire.markers;
    let rejected = manner == Manner::Rejected;
    assert_eq!(request.flags, [to_a, wire.crc, false], "{what}");
    assert_eq!(reply.flags, [to_b, wire.crc, rejected], "{what}");
    assert_eq!((request.revision, reply.revision), (wire.revision, wire.revision), "{what}");
    let enhanced = if wire.revision == 2 { 4 } else { 0 };
    let said = if rejected { b"not now".len() } else { b"a responder".len() } as u64;
    assert_eq!(request.private_data, b"initiator".len() as u64 + enhanced, "{what}");
    assert_eq!(reply.private_data, said + enhanced, "{what}");

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
    let (said, enclosed) = match terminate {
        None => (vec![], vec![]),
        Some(Fpdu { terminate, enclosed, .. }) => (terminate.clone(), enclosed.clone()),
    };
    match manner {
        Manner::Orderly | Manner::Rejected => assert!(said.is_empty()),
        // Layer, type, code, then M, D and R; segment length, DDP and RDMAP headers.
        Manner::BadWrite => assert_eq!((said, enclosed), (vec![1, 1, 0, 1, 1, 0], vec![2, 14])),
        Manner::BadSend => assert_eq!((said, enclosed), (vec![1, 2, 5, 1, 1, 0], vec![2, 18])),
        // Wireshark treats type 1 of every layer as a tagged segment, so it decodes only 14 of the
        // 18 bytes of the DDP header. The length has shown that the rest is present.
        Manner::BadRead => assert_eq!((said, enclosed), (vec![0, 1, 0, 1, 1, 1], vec![2, 14, 28])),
        Manner::BadAtomic => assert_eq!((said, enclosed), (vec![0, 1, 0, 1, 1, 0], vec![2, 14])),
    }
}

/// Returns the lengths of the FPDUs of a record in each direction, found without tshark.
fn fpdus(wire: &Wire, record: &Record) -> [Vec<usize>; 2] {
    [Way::Up, Way::Down].map(|way| {
        let said = record.iter().filter(|(w, _)| *w == way).filter_map(|(_, what)| match what {
            What::Bytes(bytes) => Some(&bytes[..]),
            What::Fin => None,
        });
        // Skip the start-up frame.
        let mut stream = said.skip(1).collect::<Vec<_>>().concat();
        let markers = wire.markers[if way == Way::Up { 1 } else { 0 }];
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
fn only_marked(wire: &Wire) -> Option<Way> {
    match wire.markers {
        [false, true] => Some(Way::Up),
        [true, false] => Some(Way::Down),
        _ => None,
    }
}

/// Returns true if an FPDU ends directly before a Marker. The Marker belongs to the next FPDU (RFC
/// 5044 section 4.3), but Wireshark 4.0 counts it with this one and then waits for four bytes that
/// never come.
fn ends_at_a_marker(lengths: &[usize]) -> bool {
    let mut end = 0;
    lengths.iter().any(|len| {
        end += len;
        end % MARKER_INTERVAL == 0
    })
}

/// Talks over a relay and checks the dissection of the record. FPDU boundaries depend on the
/// kernel's MSS, so a further attempt can give a record that Wireshark decodes correctly.
fn relayed(dir: &Path, wire: &Wire, manner: Manner) {
    let readable = (0..10).any(|_| talked_and_dissected(dir, wire, manner));
    assert!(readable, "{}: each of ten talks has an FPDU that ends at a Marker", wire.name);
}

/// Returns false if Wireshark would misread the record.
fn talked_and_dissected(dir: &Path, wire: &Wire, manner: Manner) -> bool {
    let mut relay: Option<Relay> = None;
    let mut posted = converse(wire, manner, |listener| {
        relay.insert(Relay::start(listener.local_addr(), wire.edit)).address
    });
    let mut record = relay.take().unwrap().finish();
    // If one direction has Markers, Wireshark expects them in both. Show it only that one.
    if let Some(way) = only_marked(wire) {
        posted.retain(way == Way::Up);
        let bytes = |what: &What| matches!(what, What::Bytes(_));
        let frames = record.drain(..2).collect::<Vec<_>>();
        record.retain(|(w, what)| *w == way || !bytes(what));
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
    let file = dir.join(format!("{}-{manner:?}.pcap", wire.name));
    pcap::write(&file, &record, &cuts).unwrap();
    let found = tshark::dissect(&file);
    judge(wire, manner, &posted, pcap::PORT, &found);
    let ups = found.fpdus.iter().filter(|fpdu| fpdu.from != pcap::PORT).count();
    assert_eq!([ups, found.fpdus.len() - ups], counted, "{}", wire.name);
    let markers = found.fpdus.iter().any(|fpdu| fpdu.markers > 0);
    assert_eq!(markers, marked && manner != Manner::Rejected);
    true
}

#[test]
fn wireshark_dissects_every_operation() {
    if !tshark::is_available() {
        return;
    }
    let dir = TempDir::with_prefix("rnic-test-").unwrap();
    for wire in wires() {
        relayed(dir.path(), &wire, Manner::Orderly);
    }
}

#[test]
fn wireshark_dissects_terminates_and_rejections() {
    if !tshark::is_available() {
        return;
    }
    let dir = TempDir::with_prefix("rnic-test-").unwrap();
    for manner in
        [Manner::BadWrite, Manner::BadRead, Manner::BadAtomic, Manner::BadSend, Manner::Rejected]
    {
        for wire in wires().iter().filter(|wire| only_marked(wire).is_none()) {
            relayed(dir.path(), wire, manner);
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
    converse(&DEFAULT, Manner::BadWrite, |listener| {
        relay.insert(Relay::start(listener.local_addr(), DEFAULT.edit)).address
    });
    let mut record = relay.take().unwrap().finish();
    let lengths = fpdus(&DEFAULT, &record);
    // Corrupt the last byte of the Terminate before its CRC.
    let What::Bytes(last) = &mut record
        .iter_mut()
        .rfind(|(way, what)| *way == Way::Down && *what != What::Fin)
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

/// Set in the process that runs inside a network namespace.
const INSIDE: &str = "RNIC_TEST_INSIDE_NAMESPACE";
const CAUGHT: &str = "wireshark_dissects_kernel_traffic";

#[test]
fn wireshark_dissects_kernel_traffic() {
    if std::env::var_os(INSIDE).is_some() {
        return play_inside();
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
    command.arg(std::env::current_exe().unwrap()).args(["--exact", CAUGHT, "--nocapture"]);
    command.env(INSIDE, "1");
    Process::start(command).succeed();
}

/// Captures all packets on the loopback interface of this namespace, which carries no other
/// traffic.
fn play_inside() {
    let dir = TempDir::with_prefix("rnic-test-").unwrap();
    for manner in [Manner::Orderly, Manner::BadWrite, Manner::Rejected] {
        let file = dir.path().join(format!("{manner:?}.pcap"));
        let mut command = Command::new("dumpcap");
        command.args(["-q", "-P", "-i", "lo", "-f", "tcp or udp", "-w"]).arg(&file);
        let mut dumpcap = Process::start(command);
        dumpcap.line_after("File: ");
        let mut port = 0;
        let posted = converse(&DEFAULT, manner, |listener| {
            port = listener.local_addr().port();
            listener.local_addr()
        });
        catches_up(&file);
        dumpcap.signal(Signal::INT);
        dumpcap.succeed();
        judge(&DEFAULT, manner, &posted, port, &tshark::dissect(&file));
    }
}

/// Waits until the capture file contains all packets, by waiting for one sent after them.
fn catches_up(file: &Path) {
    const LAST: &[u8] = b"nothing comes behind this";
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(LAST, socket.local_addr().unwrap()).unwrap();
    let deadline = Instant::now() + DEADLINE;
    while !std::fs::read(file).unwrap().windows(LAST.len()).any(|w| w == LAST) {
        assert!(Instant::now() < deadline, "dumpcap does not catch up");
        std::thread::yield_now();
    }
}

#[test]
fn recordings_of_siw_are_read_without_complaint() {
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
        assert_eq!(found.complaints, [""; 0], "{name}");
        let crc = name.starts_with("crc-");
        let right = |f: &Fpdu| f.crc_is_good == crc.then_some(true) && f.opcode.is_some();
        assert!(found.fpdus.iter().all(right), "{name}: {:?}", found.fpdus);
        files += 1;
        fpdus += found.fpdus.len();
    }
    assert_eq!((files, fpdus), (33, 475));
}
