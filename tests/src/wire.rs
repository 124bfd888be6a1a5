//! A peer on plain TCP that builds frames itself, so that a test can corrupt any byte. It shares no
//! code with the daemon.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType};

use crate::DEADLINE;

/// Returns an MPA Request: key, flags, revision, length of private data (RFC 5044 section 7.1.1).
pub fn request(flags: u8, revision: u8, private_data: &[u8]) -> Vec<u8> {
    let mut frame = b"MPA ID Req Frame".to_vec();
    frame.extend([flags, revision]);
    frame.extend((private_data.len() as u16).to_be_bytes());
    frame.extend(private_data);
    frame
}

/// Flag of a start-up frame: CRCs are used.
pub const CRC: u8 = 0x40;

/// Returns an FPDU without Markers around a ULPDU (RFC 5044 section 4).
pub fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
    let mut bytes = (ulpdu.len() as u16).to_be_bytes().to_vec();
    bytes.extend(ulpdu);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let crc = crc32c::crc32c(&bytes);
    bytes.extend(crc.to_le_bytes());
    bytes
}

/// Returns a tagged segment with the Last flag. RDMA Write is opcode 0.
pub fn tagged(opcode: u8, stag: u32, offset: u64, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![0xC1, 0x40 | opcode];
    ulpdu.extend(stag.to_be_bytes());
    ulpdu.extend(offset.to_be_bytes());
    ulpdu.extend(payload);
    ulpdu
}

/// Returns an untagged segment with the Last flag. Send is opcode 3 on queue 0.
pub fn untagged(opcode: u8, queue: u32, number: u32, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![0x41, 0x40 | opcode, 0, 0, 0, 0];
    for word in [queue, number, 0] {
        ulpdu.extend(word.to_be_bytes());
    }
    ulpdu.extend(payload);
    ulpdu
}

/// Returns a segment of a Send at this offset of the message.
pub fn part(number: u32, offset: u32, last: bool, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = untagged(3, 0, number, payload);
    ulpdu[0] = if last { 0x41 } else { 0x01 };
    ulpdu[14..18].copy_from_slice(&offset.to_be_bytes());
    ulpdu
}

/// How a connection ended, with the last bytes from the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The daemon closed the connection gracefully after these bytes.
    Fin(Vec<u8>),
    /// The daemon reset the connection after these bytes. Some may be lost.
    Reset(Vec<u8>),
    /// The daemon neither closed the stream nor sent more before the deadline.
    Silence(Vec<u8>),
}

/// Connects to a daemon that may refuse the connection. Returns `None` if it resets the connection
/// before `connect` returns, which is rare and equivalent to a reset afterwards.
pub fn try_dial(address: SocketAddr) -> Option<TcpStream> {
    match TcpStream::connect(address) {
        Ok(stream) => Some(with_deadlines(stream)),
        Err(e) if e.kind() == ErrorKind::ConnectionReset => None,
        Err(e) => panic!("cannot connect to {address}: {e}"),
    }
}

/// Connects and sets deadlines for reads and writes.
pub fn dial(address: SocketAddr) -> TcpStream {
    with_deadlines(TcpStream::connect(address).expect("a daemon that listens"))
}

/// Like [`dial`], from a given address of this host.
pub fn dial_from(source: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None);
    let socket = socket.expect("a socket");
    rustix::net::bind(&socket, &SocketAddr::from((source, 0))).expect("an address of this host");
    rustix::net::connect(&socket, &to).expect("a daemon that listens");
    with_deadlines(TcpStream::from(socket))
}

fn with_deadlines(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(DEADLINE)).expect("a deadline");
    stream.set_write_timeout(Some(DEADLINE)).expect("a deadline");
    stream.set_nodelay(true).expect("a TCP socket");
    stream
}

/// Reads exactly `n` bytes.
pub fn exactly(stream: &mut TcpStream, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    stream.read_exact(&mut bytes).expect("bytes from the daemon");
    bytes
}

/// Reads and returns the Reply frame.
pub fn reply(stream: &mut TcpStream) -> Vec<u8> {
    let mut frame = exactly(stream, 20);
    assert_eq!(&frame[..16], b"MPA ID Rep Frame");
    let private = usize::from(u16::from_be_bytes([frame[18], frame[19]]));
    frame.extend(exactly(stream, private));
    frame
}

/// Reads an FPDU without Markers and returns its ULPDU.
pub fn ulpdu(stream: &mut TcpStream) -> Vec<u8> {
    let length = exactly(stream, 2);
    let len = usize::from(u16::from_be_bytes([length[0], length[1]]));
    let rest = exactly(stream, (2 + len).next_multiple_of(4) + 4 - 2);
    assert_eq!(fpdu(&rest[..len]), [&length[..], &rest[..]].concat());
    rest[..len].to_vec()
}

/// Sends as many of these bytes as the daemon accepts.
pub fn send_bytes(stream: &mut TcpStream, bytes: &[u8]) {
    // In some tests the daemon has closed the connection already. The next read shows it.
    let _ = stream.write_all(bytes);
}

/// Like [`ending`], with its own deadline.
pub fn ending_after(stream: &mut TcpStream, timeout: Duration) -> Ending {
    stream.set_read_timeout(Some(timeout)).expect("a deadline");
    ending(stream)
}

/// Reads until the end of the connection.
pub fn ending(stream: &mut TcpStream) -> Ending {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ending::Fin(bytes),
            Ok(n) => bytes.extend(&buffer[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ending::Silence(bytes);
            }
            Err(_) => return Ending::Reset(bytes),
        }
    }
}

/// Returns the ULPDUs of these whole FPDUs without Markers and checks their CRCs.
///
/// # Panics
///
/// If an FPDU is malformed.
pub fn ulpdus(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    while bytes.len() >= 2 {
        let len = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
        let ulpdu = bytes.get(2..2 + len).expect("a whole FPDU").to_vec();
        let frame = fpdu(&ulpdu);
        assert_eq!(bytes.get(..frame.len()), Some(&frame[..]), "padding and CRC");
        bytes = &bytes[frame.len()..];
        found.push(ulpdu);
    }
    assert!(bytes.is_empty(), "part of an FPDU");
    found
}

/// Reads a Terminate and the end of the stream. Returns layer, type and code.
///
/// # Panics
///
/// If anything else arrives.
pub fn terminated(peer: &mut TcpStream) -> [u8; 3] {
    match ending(peer) {
        Ending::Fin(bytes) => {
            terminate(&bytes).unwrap_or_else(|| panic!("no Terminate in {bytes:02x?}"))
        }
        other => panic!("{other:?}"),
    }
}

/// Returns layer, type and code of a Terminate at the end of these FPDUs (RFC 5040 section 4.8).
pub fn terminate(mut bytes: &[u8]) -> Option<[u8; 3]> {
    let mut last = None;
    while bytes.len() >= 2 {
        let len = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
        let ulpdu = bytes.get(2..2 + len)?;
        let whole = (2 + len).next_multiple_of(4) + 4;
        let is_terminate = ulpdu.len() >= 22 && ulpdu[0] & 0x80 == 0 && ulpdu[1] & 0x0F == 7;
        last = is_terminate.then(|| [ulpdu[18] >> 4, ulpdu[18] & 15, ulpdu[19]]);
        bytes = bytes.get(whole..)?;
    }
    last
}
