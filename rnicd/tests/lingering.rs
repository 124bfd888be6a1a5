//! Descriptors that nobody takes: the last one of a TCP socket may close for as long as its owner
//! said (`SO_LINGER`), and the thread that drops the packet it is in waits for that.

#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code)]
mod support;

use std::io::{ErrorKind, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rnic_core::abi::control::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use support::*;

/// How long a close takes, and what is no part of it.
const LINGER: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(10);

/// A connection with octets on their way that nobody reads, and its other end.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other = listener.accept().unwrap().0;
    stream.set_nonblocking(true).unwrap();
    let full = loop {
        if let Err(error) = stream.write_all(&[0; 65536]) {
            break error;
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    socket2::SockRef::from(&stream).set_linger(Some(LINGER)).unwrap();
    (stream, other)
}

/// Asks for something that the control thread does, and for something that the reaper does.
fn assert_alive(bystander: &mut Raw, what: &str) {
    let start = Instant::now();
    let segment = bystander.segment(4096);
    bystander.call(RequestBody::RemoveSegment { segment }).unwrap();
    let took = start.elapsed();
    assert!(took < SOON, "{what}: answered after {took:?}");
}

#[test]
fn what_nobody_asked_for_keeps_nobody_waiting() {
    let daemon = daemon("");
    let mut bystander = Raw::open(&daemon.socket());
    let hello = Hello { min_version: 1, max_version: 1, features: 0 }.to_bytes();
    let open_pd = RequestBody::OpenPd { name: None };
    let add_segment = RequestBody::AddSegment { length: 4096, client_address: 0 };
    let memfd = memfd(4096);

    let mut raw = Raw::open(&daemon.socket());
    let (stream, _other) = lingering();
    raw.ask(open_pd.clone(), &[stream.as_fd()]);
    drop(stream);
    assert!(matches!(raw.reply(), Some(Reply { result: Err(Refusal::Malformed { .. }), .. })));
    assert_alive(&mut bystander, "a request that carries none");

    let mut raw = Raw::open(&daemon.socket());
    let (stream, _other) = lingering();
    let mut many = vec![memfd.as_fd(); 16];
    many.push(stream.as_fd());
    raw.ask(add_segment, &many);
    drop(stream);
    assert!(matches!(raw.reply(), Some(Reply { result: Err(Refusal::Malformed { .. }), .. })));
    assert_alive(&mut bystander, "one of many");

    // Behind what ends the client, even in packets of no octets.
    for (last, octets) in [("a packet", b"x".as_slice()), ("an empty packet", b"")] {
        let raw = Raw::connect(&daemon.socket());
        let (stream, _other) = lingering();
        raw.send(&hello[..31], &[]);
        raw.send(octets, &[stream.as_fd()]);
        drop(stream);
        assert_alive(&mut bystander, last);
        drop(raw);
        assert_alive(&mut bystander, last);
    }
    daemon.stop().unwrap();
}

#[test]
fn nothing_can_be_sent_to_the_daemon_on_an_event_channel() {
    let daemon = daemon("");
    let mut raw = Raw::connect(&daemon.socket());
    let (_, descriptors) = raw.hello().unwrap();
    let channel: &OwnedFd = &descriptors[1];
    let rights = [memfd(4096)];
    let rights = [rights[0].as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&rights)));
    let octets = [std::io::IoSlice::new(b"x")];
    let sent = sendmsg(channel, &octets, &mut ancillary, SendFlags::NOSIGNAL);
    assert_eq!(sent, Err(rustix::io::Errno::PIPE));
    daemon.stop().unwrap();
}

/// Requests whose answers, of more than a kilobyte each, do not fit a socket.
const UNREAD: usize = 200;

/// A refusal leaves the session, so it could pass one descriptor after the other that nobody can
/// close yet.
#[test]
fn descriptors_that_wait_to_be_closed_do_not_pile_up() {
    let daemon = daemon("");
    let mut bystander = Raw::open(&daemon.socket());
    let mut raw = Raw::open(&daemon.socket());
    let (stream, _other) = lingering();
    // Answers that nobody reads keep the daemon from taking the next request before this process has
    // closed its own descriptor: the daemon's must be the last.
    let list = RequestBody::List { what: ListKind::Limits, from: 0 };
    for _ in 0..UNREAD {
        raw.ask(list.clone(), &[]);
    }
    raw.ask(RequestBody::AttachMemory, &[stream.as_fd()]);
    drop(stream);
    for _ in 0..UNREAD {
        assert!(matches!(raw.reply(), Some(Reply { result: Ok(_), .. })));
    }
    assert!(matches!(raw.reply(), Some(Reply { result: Err(_), .. })));
    let file = std::fs::File::open("/dev/null").unwrap();
    let passed = (0..1000).take_while(|_| {
        raw.ask(RequestBody::AttachMemory, &[file.as_fd()]);
        raw.reply().is_some()
    });
    let passed = passed.count();
    assert!((10..200).contains(&passed), "{passed} were taken");
    assert_alive(&mut bystander, "a session that passed too many");
    daemon.stop().unwrap();
}
