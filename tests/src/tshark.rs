//! Wireshark's dissectors, asked what they make of a capture file.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

/// Severity from which on Wireshark warns (`PI_WARN`).
const WARNING: u64 = 0x0060_0000;

/// What it says of a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dissection {
    /// FPDUs in the order of the capture.
    pub fpdus: Vec<Fpdu>,
    /// Start-up frames.
    pub frames: Vec<Frame>,
    /// What it calls malformed, wrong or worth a warning, with the number of the packet. TCP's own
    /// affairs (full windows, resets) are left out; bytes that were lost are missed anyway.
    pub complaints: Vec<String>,
}

/// What it says of an FPDU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fpdu {
    /// Port of its sender.
    pub from: u16,
    /// Bytes of the ULPDU.
    pub len: u64,
    /// Its verdict on the CRC, if it believes that there is one.
    pub crc_is_good: Option<bool>,
    /// Opcode, if it understood what is in it.
    pub opcode: Option<u8>,
    /// Last of its message.
    pub last: bool,
    /// Markers in it.
    pub markers: usize,
    /// Layer, type and code of a Terminate, and which of M, D and R are set.
    pub terminate: Vec<u64>,
    /// Bytes of each thing that it encloses: segment length, DDP header, Read Request header.
    pub enclosed: Vec<u64>,
}

/// What it says of a start-up frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// A Reply.
    pub reply: bool,
    /// M, C and R.
    pub flags: [bool; 3],
    /// Revision.
    pub revision: u64,
    /// Bytes of private data, enhanced data included.
    pub private_data: u64,
}

/// Whether there is a tshark. Says so if there is not; fails where the environment is that of CI.
///
/// # Panics
///
/// If there is none and `CI` is set.
pub fn is_there() -> bool {
    let asked = Command::new("tshark").arg("--version").stderr(Stdio::null()).output();
    if asked.is_ok_and(|output| output.status.success()) {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "no tshark (Debian package tshark)");
    crate::omit("no tshark here (Debian package tshark), so nothing was dissected");
    false
}

/// Asks for everything in a capture file.
///
/// # Panics
///
/// If tshark fails.
pub fn dissect(file: &Path) -> Dissection {
    let mut command = Command::new("tshark");
    // Its guesser for RPC over RDMA takes short Sends for its own and calls them malformed.
    command.args(["-n", "--disable-protocol", "rpcordma", "-T", "pdml", "-r"]).arg(file);
    let output = command.output().expect("tshark");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", file.display());
    read(&String::from_utf8_lossy(&output.stdout))
}

/// A capture file of what came by UDP to an IPv4 address, and from where.
///
/// # Panics
///
/// If one is of IPv6.
pub fn udp_capture(packets: &[(SocketAddr, Vec<u8>)], to: SocketAddr) -> Vec<u8> {
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

/// What it finds of these fields in packets of RoCE to this port of UDP, a line for each.
///
/// # Panics
///
/// If tshark fails.
pub fn udp_fields(file: &Path, port: u16, fields: &[&str]) -> Vec<String> {
    let mut command = Command::new("tshark");
    // Its guesser for Ethernet over InfiniBand takes short datagrams for its own.
    command.args(["--disable-protocol", "infiniband.eoib"]);
    command.args(["-n", "-d", &format!("udp.port=={port},infiniband"), "-r"]).arg(file);
    command.args(["-T", "fields", "-E", "separator=|"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// Reads PDML, which has a tag on each line.
fn read(pdml: &str) -> Dissection {
    let mut found = Dissection::default();
    let (mut packet, mut port) = (String::new(), 0);
    let (mut protocol, mut message) = (String::new(), String::new());
    for line in pdml.lines().map(str::trim_start) {
        let Some(name) = attribute(line, "name") else { continue };
        let show = attribute(line, "show").unwrap_or_default();
        if line.starts_with("<proto ") {
            protocol = name.to_owned();
            if name == "_ws.malformed" {
                found.complaints.push(format!("packet {packet}: malformed"));
            }
            continue;
        }
        match name {
            "frame.number" => packet = show.to_owned(),
            "tcp.srcport" => port = number(show) as u16,
            // The message comes before its severity.
            "_ws.expert.message" => message = show.to_owned(),
            "_ws.expert.severity" if number(show) >= WARNING && protocol != "tcp" => {
                found.complaints.push(format!("packet {packet}: {protocol}: {message}"));
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

/// An attribute of a tag.
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

/// Newer versions show a flag as a word.
fn is_set(show: &str) -> bool {
    matches!(show, "1" | "True" | "Set")
}
