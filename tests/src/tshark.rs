//! Dissection of capture files with Wireshark.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

/// Minimum severity of a warning in Wireshark (`PI_WARN`).
const WARNING: u64 = 0x0060_0000;

/// Wireshark's dissection of a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dissection {
    /// FPDUs in the order of the capture.
    pub fpdus: Vec<Fpdu>,
    /// Start-up frames.
    pub frames: Vec<Frame>,
    /// Malformed packets, errors and warnings, with packet numbers. TCP's own warnings (full
    /// windows, resets) are omitted. Lost bytes show as missing FPDUs.
    pub problems: Vec<String>,
}

/// Wireshark's dissection of an FPDU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fpdu {
    /// Source port.
    pub from: u16,
    /// Length of the ULPDU in bytes.
    pub len: u64,
    /// Result of the CRC check, if Wireshark expects a CRC.
    pub crc_is_good: Option<bool>,
    /// Opcode, if Wireshark decoded the ULPDU.
    pub opcode: Option<u8>,
    /// True for the last segment of a message.
    pub last: bool,
    /// Number of Markers.
    pub markers: usize,
    /// Layer, type and code of a Terminate, then its M, D and R flags.
    pub terminate: Vec<u64>,
    /// Lengths of the parts in a Terminate: segment length, DDP header, Read Request header.
    pub enclosed: Vec<u64>,
}

/// Wireshark's dissection of a start-up frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// True for a Reply.
    pub reply: bool,
    /// Flags M, C and R.
    pub flags: [bool; 3],
    /// Revision.
    pub revision: u64,
    /// Length of private data in bytes, including enhanced data.
    pub private_data: u64,
}

/// Returns true if tshark is installed. Otherwise reports that the test is omitted.
///
/// # Panics
///
/// If tshark is missing and `CI` is set.
pub fn is_available() -> bool {
    let version = Command::new("tshark").arg("--version").stderr(Stdio::null()).output();
    if version.is_ok_and(|output| output.status.success()) {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "no tshark (Debian package tshark)");
    crate::omit("no tshark here (Debian package tshark), so nothing was dissected");
    false
}

/// Dissects a capture file.
///
/// # Panics
///
/// If tshark fails.
pub fn dissect(file: &Path) -> Dissection {
    let mut command = Command::new("tshark");
    // The heuristic dissector of RPC over RDMA claims short Sends and reports them as malformed.
    command.args(["-n", "--disable-protocol", "rpcordma", "-T", "pdml", "-r"]).arg(file);
    let output = command.output().expect("tshark");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {errors}", file.display());
    read(&String::from_utf8_lossy(&output.stdout))
}

/// Returns a capture file of UDP packets from the given sources to an IPv4 address.
fn udp_capture(packets: &[(SocketAddr, Vec<u8>)], to: SocketAddr) -> Vec<u8> {
    let mut file = Vec::new();
    let words = [0xA1B2_C3D4u32, 2 | 4 << 16, 0, 0, 65_535, 1];
    file.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    for (from, bytes) in packets {
        let (IpAddr::V4(source), IpAddr::V4(sink)) = (from.ip(), to.ip()) else { unreachable!() };
        let mut frame = Vec::new();
        etherparse::PacketBuilder::ethernet2([0; 6], [0; 6])
            .ipv4(source.octets(), sink.octets(), 64)
            .udp(from.port(), to.port())
            .write(&mut frame, bytes)
            .unwrap();
        let len = frame.len() as u32;
        file.extend([0, 0, len, len].iter().flat_map(|word| word.to_le_bytes()));
        file.extend(frame);
    }
    file
}

/// Returns these fields of each RoCE packet, one line per packet. The packets have been received
/// from the given sources at an IPv4 address.
///
/// # Panics
///
/// If an address is IPv6, or tshark fails.
pub fn udp_fields(
    packets: &[(SocketAddr, Vec<u8>)],
    to: SocketAddr,
    fields: &[&str],
) -> Vec<String> {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), udp_capture(packets, to)).expect("a writable file");
    let port = to.port();
    let mut command = Command::new("tshark");
    // The heuristic dissector of Ethernet over InfiniBand claims short datagrams.
    command.args(["--disable-protocol", "infiniband.eoib"]);
    command.args(["-n", "-d", &format!("udp.port=={port},infiniband"), "-r"]).arg(file.path());
    command.args(["-T", "fields", "-E", "separator=|"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// Parses PDML with one tag per line.
fn read(pdml: &str) -> Dissection {
    let mut found = Dissection::default();
    let mut packet = String::new();
    let mut port = 0;
    let mut protocol = String::new();
    let mut message = String::new();
    for line in pdml.lines().map(str::trim_start) {
        let Some(name) = attribute(line, "name") else { continue };
        let show = attribute(line, "show").unwrap_or_default();
        if line.starts_with("<proto ") {
            protocol = name.to_owned();
            if name == "_ws.malformed" {
                found.problems.push(format!("packet {packet}: malformed"));
            }
            continue;
        }
        match name {
            "frame.number" => packet = show.to_owned(),
            "tcp.srcport" => port = number(show) as u16,
            // The message precedes its severity.
            "_ws.expert.message" => message = show.to_owned(),
            "_ws.expert.severity" if number(show) >= WARNING && protocol != "tcp" => {
                found.problems.push(format!("packet {packet}: {protocol}: {message}"));
            }
            "iwarp_mpa.req" | "iwarp_mpa.rep" => {
                found.frames.push(Frame { reply: name == "iwarp_mpa.rep", ..Frame::default() })
            }
            "iwarp_mpa.fpdu" => found.fpdus.push(Fpdu { from: port, ..Fpdu::default() }),
            _ => {}
        }
        if let Some(frame) = found.frames.last_mut() {
            match name {
                "iwarp_mpa.marker_flag" => frame.flags[0] = is_set(show),
                "iwarp_mpa.crc_flag" => frame.flags[1] = is_set(show),
                "iwarp_mpa.rej_flag" => frame.flags[2] = is_set(show),
                "iwarp_mpa.rev" => frame.revision = number(show),
                "iwarp_mpa.pdlength" => frame.private_data = number(show),
                _ => {}
            }
        }
        if let Some(fpdu) = found.fpdus.last_mut() {
            match name {
                "iwarp_mpa.ulpdulength" => fpdu.len = number(show),
                "iwarp_mpa.crc_check" => {
                    let verdict = attribute(line, "showname").unwrap_or_default();
                    fpdu.crc_is_good = Some(verdict.contains("Good CRC32"));
                }
                "iwarp_mpa.marker_fpduptr" => fpdu.markers += 1,
                "iwarp_rdma.opcode" => fpdu.opcode = Some(number(show) as u8),
                "iwarp_ddp.last_flag" => fpdu.last = is_set(show),
                "iwarp_rdma.term_ddp_seg_len"
                | "iwarp_rdma.term_ddp_h"
                | "iwarp_rdma.term_rdma_h" => {
                    fpdu.enclosed.push(number(attribute(line, "size").unwrap_or_default()));
                }
                _ if name.starts_with("iwarp_rdma.term_layer")
                    || name.starts_with("iwarp_rdma.term_etype")
                    || name.starts_with("iwarp_rdma.term_errcode")
                    || name.starts_with("iwarp_rdma.term_hdrct_")
                    || name.starts_with("iwarp_rdma.hdrct_") =>
                {
                    fpdu.terminate.push(number(show));
                }
                _ => {}
            }
        }
    }
    found
}

/// Returns the value of an attribute of a tag.
fn attribute<'a>(tag: &'a str, name: &str) -> Option<&'a str> {
    let at = tag.find(&format!(" {name}=\""))? + name.len() + 3;
    tag[at..].split('"').next()
}

fn number(show: &str) -> u64 {
    match show.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).unwrap_or(u64::MAX),
        None => show.parse().unwrap_or(u64::from(is_set(show))),
    }
}

/// Returns true if a flag is set. Newer versions print a word.
fn is_set(show: &str) -> bool {
    matches!(show, "1" | "True" | "Set")
}
