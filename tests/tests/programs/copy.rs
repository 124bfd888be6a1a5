//! `rnic-copy`: a file arrives completely or not at all, and both sides report the reason.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rnic_client::{Access, Context, ListKind, Mr, RemoteMr, Rows};
use rnic_tests::{DEADLINE, Daemon, PATHS, Process, built, on_path};
use tempfile::TempDir;

use super::talker::Talker;
use super::{RCOPY, end, fails, run, start};

/// A receiver and its folder.
struct Receiver {
    process: Process,
    address: String,
    folder: TempDir,
}

impl Receiver {
    fn start(daemon: &Daemon, options: &[&str]) -> Receiver {
        Receiver::start_as(daemon, Command::new(built::program(RCOPY)), options)
    }

    /// Starts `rnic-copy` through a program that passes its arguments on.
    fn start_as(daemon: &Daemon, mut program: Command, options: &[&str]) -> Receiver {
        let folder = TempDir::with_prefix("rnic-copy-test-").unwrap();
        program.args(["serve", "127.0.0.1:0", "--dir"]).arg(folder.path()).args(options);
        program.env("RNIC_SOCKET", daemon.socket());
        let mut process = Process::start(program);
        let address = process.line_after(" at ");
        Receiver { process, address, folder }
    }

    fn socket_address(&self) -> SocketAddr {
        self.address.parse().unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn content(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder.path().join(name)).unwrap()
    }

    /// Checks that nothing of the failed file remains, and that the receiver accepts another one.
    fn is_unharmed(&self, daemon: &Daemon) {
        assert_eq!(self.names(), [""; 0]);
        let file = file_of(b"afterwards");
        let (code, said) = send(daemon, file.path(), &format!("{}/afterwards", self.address));
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(self.names(), ["afterwards"]);
    }
}

fn file_of(content: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    file
}

/// Returns a sparse file that takes a while to read, hash and send.
fn large() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4 << 30).unwrap();
    file
}

/// Returns pseudorandom bytes that depend on the seed.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn sending(daemon: &Daemon, file: &Path, to: &str) -> Process {
    start(daemon, RCOPY, &["send".as_ref(), file.as_os_str(), to.as_ref()])
}

fn send(daemon: &Daemon, file: &Path, to: &str) -> (Option<i32>, String) {
    end(sending(daemon, file, to))
}

/// Waits until the daemon has placed `bytes` bytes for a QP.
pub fn placed(daemon: &Daemon, bytes: u64) {
    let context = Context::open_at(daemon.socket()).unwrap();
    let deadline = Instant::now() + DEADLINE;
    loop {
        let rows = context.list(ListKind::Qps, 0).unwrap().rows;
        let Rows::Qps(rows) = rows else { panic!("{rows:?}") };
        if rows.iter().any(|row| row.counters.bytes_received >= bytes) {
            return;
        }
        assert!(Instant::now() < deadline, "{rows:?}");
        std::thread::yield_now();
    }
}

#[test]
fn files_of_any_size_arrive_whole_on_both_paths() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let receiver = Receiver::start(&daemon, &["--chunk", "4KiB", "--chunks", "3"]);
        for len in [0, 1, 4095, 4096, 4097, 3 * 4096, 1_000_000] {
            let content = pattern(len as u64, len);
            let file = file_of(&content);
            let name = format!("of-{len}");
            let (code, said) = send(&daemon, file.path(), &format!("{}/{name}", receiver.address));
            assert_eq!(code, Some(0), "{said}");
            assert!(said.contains("verified and stored by the receiver"), "{said}");
            assert!(receiver.content(&name) == content, "{name}");
        }
        assert_eq!(receiver.names().len(), 7);
    }
}

/// A sender driven by the test. It uses the layout that `rnic-copy` documents and shares no code
/// with it.
struct HostileSender {
    talker: Talker,
    ring: RemoteMr,
}

/// SHA-256 of "abc" (FIPS 180-4).
const ABC: [u8; 32] = [
    0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22, 0x23,
    0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17, 0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad,
];

const FILLED: u8 = 1;
const FINISHED: u8 = 2;
const CREDIT: u8 = 3;
const STORED: u8 = 4;
const ABORT: u8 = 5;

/// Returns a greeting: magic, version and `rest`.
fn greeting(rest: &[&[u8]]) -> Vec<u8> {
    [b"rcopy\x01", &rest.concat()[..]].concat()
}

fn filled(index: u64, length: u32) -> Vec<u8> {
    [&[FILLED][..], &index.to_le_bytes(), &length.to_le_bytes()].concat()
}

fn finished(size: u64, digest: &[u8; 32]) -> Vec<u8> {
    [&[FINISHED][..], &size.to_le_bytes(), digest].concat()
}

impl HostileSender {
    /// Offers a file of this size in chunks of 4 KiB.
    fn offer(daemon: &Daemon, to: SocketAddr, name: &str, size: u64) -> HostileSender {
        let talker = Talker::new(daemon);
        let offer = greeting(&[
            &size.to_le_bytes(),
            &4096_u32.to_le_bytes(),
            &4_u16.to_le_bytes(),
            name.as_bytes(),
        ]);
        let grant = talker.connect(to, &offer).unwrap();
        assert_eq!(&grant[..6], b"rcopy\x01");
        let ring = RemoteMr::from_bytes(grant[12..].try_into().unwrap()).unwrap();
        HostileSender { talker, ring }
    }

    /// Returns the receiver's final message, skipping credits.
    fn verdict(&self) -> (u8, String) {
        loop {
            let message = self.talker.next_message().expect("a verdict");
            if let STORED | ABORT = message[0] {
                return (message[0], String::from_utf8_lossy(&message[1..]).into_owned());
            }
        }
    }
}

#[test]
fn wrong_sha256_is_refused() {
    let daemon = Daemon::start("");
    let mut receiver = Receiver::start(&daemon, &[]);
    let copy = |receiver: &Receiver, digest: &[u8; 32]| {
        let liar = HostileSender::offer(&daemon, receiver.socket_address(), "abc", 3);
        liar.talker.write(liar.ring.at(0), b"abc");
        liar.talker.send_message(&filled(0, 3));
        liar.talker.send_message(&finished(3, digest));
        liar.verdict()
    };
    for at in [0, 31] {
        let mut wrong = ABC;
        wrong[at] ^= 1;
        let (verdict, why) = copy(&receiver, &wrong);
        assert_eq!(verdict, ABORT, "{why}");
        assert!(why.contains("SHA-256") && why.contains("arrived"), "{why}");
        receiver.process.line_after("the copy was discarded");
        assert_eq!(receiver.names(), [""; 0]);
    }
    // The same with the correct digest is stored.
    assert_eq!(copy(&receiver, &ABC).0, STORED);
    assert_eq!(receiver.content("abc"), b"abc");

    let receiver = Receiver::start(&daemon, &["--once"]);
    assert_eq!(copy(&receiver, &[0; 32]).0, ABORT);
    assert_eq!(receiver.names(), [""; 0]);
    fails(end(receiver.process), "the copy was discarded");
}

#[test]
fn invalid_requests_store_nothing() {
    let daemon = Daemon::start("");
    let receiver = Receiver::start(&daemon, &[]);
    let messages: [(&str, Vec<Vec<u8>>); 6] = [
        ("the end before the file", vec![finished(3, &ABC)]),
        ("too little", vec![filled(0, 2)]),
        ("too much", vec![filled(0, 4)]),
        ("out of order", vec![filled(1, 3)]),
        ("more than was offered", vec![filled(0, 3), filled(1, 1)]),
        ("no message", vec![vec![99; 9]]),
    ];
    for (what, messages) in messages {
        let liar = HostileSender::offer(&daemon, receiver.socket_address(), "abc", 3);
        liar.talker.write(liar.ring.at(0), b"abc");
        messages.iter().for_each(|message| liar.talker.send_message(message));
        let (verdict, why) = liar.verdict();
        assert_eq!(verdict, ABORT, "{what}");
        assert!(why.starts_with("broken protocol: "), "{what}: {why}");
    }
    receiver.is_unharmed(&daemon);
}

/// Starts a receiver driven by the test, which lends four chunks of 1 KiB, and an `rnic-copy` that
/// sends a file to it.
fn filled_by(daemon: &Daemon, file: &Path) -> (Talker, Mr, Process) {
    let talker = Talker::new(daemon);
    let listener = talker.listen();
    let buffer = talker.context.create_shared_buffer(4096).unwrap();
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::ZERO_BASED;
    let ring = talker.pd.reg_mr(&buffer, .., rights).unwrap();
    let grant =
        greeting(&[&1024_u32.to_le_bytes(), &4_u16.to_le_bytes(), &ring.remote().to_bytes()]);
    let sender = sending(daemon, file, &format!("{}/abc", listener.local_addr()));
    talker.accept(&listener, &grant);
    (talker, ring, sender)
}

/// The receiver reports the digest of a file other than the one that was sent.
#[test]
fn sender_rejects_a_wrong_digest() {
    let daemon = Daemon::start("");
    let file = file_of(b"abc");
    for (digest, code) in [(ABC, 0), ([0; 32], 1)] {
        let (talker, _ring, sender) = filled_by(&daemon, file.path());
        assert_eq!(talker.next_message().unwrap(), filled(0, 3));
        assert_eq!(talker.next_message().unwrap(), finished(3, &ABC));
        talker.send_message(&[&[STORED][..], &digest].concat());
        let (ended, said) = end(sender);
        assert_eq!(ended, Some(code), "{said}");
        assert!(code == 0 || said.contains("stored a file with SHA-256 0000000000"), "{said}");
    }
}

/// The receiver returns more chunks than it has received, or the same chunk again.
#[test]
fn sender_rejects_invalid_credits() {
    let daemon = Daemon::start("");
    let file = file_of(&pattern(1, 8 << 10));
    for (taken, words) in [
        (5_u64, "credit for 5 chunks, but 4 were sent and 0 credited before"),
        (0, "credit for 0 chunks, but 4 were sent and 0 credited before"),
    ] {
        let (talker, _ring, sender) = filled_by(&daemon, file.path());
        for index in 0..4 {
            assert_eq!(talker.next_message().unwrap(), filled(index, 1024));
        }
        talker.send_message(&[&[CREDIT][..], &taken.to_le_bytes()].concat());
        let said = talker.next_message().expect("an abort with a reason");
        assert_eq!(said[0], ABORT);
        fails(end(sender), &format!("violates the protocol: {words}"));
    }
}

#[test]
fn excess_sender_is_refused_until_one_leaves() {
    let daemon = Daemon::start("");
    let mut receiver = Receiver::start(&daemon, &["--clients", "1"]);
    let first = HostileSender::offer(&daemon, receiver.socket_address(), "first", 3);
    let file = file_of(b"second");
    let sent = send(&daemon, file.path(), &format!("{}/second", receiver.address));
    fails(sent, "too many files are being received already; try again later");
    receiver.process.line_after("rnic-copy: rejected 127.0.0.1:");
    drop(first);
    // Printed when there is room again.
    receiver.process.line_after("rnic-copy: ");
    receiver.is_unharmed(&daemon);
}

#[test]
fn killed_sender_leaves_no_partial_file() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let file = large();
        let once = Receiver::start(&daemon, &["--once"]);
        let sender = sending(&daemon, file.path(), &format!("{}/half", once.address));
        placed(&daemon, 8 << 20);
        sender.kill();
        let names = once.names();
        fails(end(once.process), "127.0.0.1:");
        assert_eq!(names, [""; 0]);
        // A receiver without --once reports the failure and serves the next sender.
        let mut serving = Receiver::start(&daemon, &[]);
        let sender = sending(&daemon, file.path(), &format!("{}/half", serving.address));
        placed(&daemon, 8 << 20);
        sender.kill();
        serving.process.line_after("rnic-copy: the connection with 127.0.0.1:");
        serving.is_unharmed(&daemon);
    }
}

#[test]
fn killed_receiver_leaves_no_partial_file() {
    for path in PATHS {
        let daemon = Daemon::start(&on_path(path));
        let file = large();
        let receiver = Receiver::start(&daemon, &[]);
        let address = receiver.address.clone();
        let sender = sending(&daemon, file.path(), &format!("{address}/half"));
        placed(&daemon, 8 << 20);
        let Receiver { process, folder, .. } = receiver;
        process.kill();
        fails(end(sender), &format!("the connection with {address} "));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn killed_daemon_leaves_no_partial_file() {
    let daemon = Daemon::start("");
    let file = large();
    let receiver = Receiver::start(&daemon, &[]);
    let sender = sending(&daemon, file.path(), &format!("{}/half", receiver.address));
    placed(&daemon, 8 << 20);
    daemon.kill();
    let Receiver { process, folder, .. } = receiver;
    for side in [sender, process] {
        fails(end(side), "the RNIC daemon is gone or has ended this session");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A TCP relay that fails after a number of bytes to the server.
struct Line {
    address: SocketAddr,
    carried: Arc<AtomicU64>,
}

#[derive(Clone, Copy, PartialEq)]
enum Cut {
    /// Both ends are reset. An orderly end between two FPDUs would be a disconnect by the peer.
    Reset,
    /// No more data passes.
    Silence,
}

const CUT_AFTER: u64 = 4 << 20;

impl Line {
    fn to(server: SocketAddr, cut: Cut) -> Line {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let carried = Arc::new(AtomicU64::new(0));
        let counter = carried.clone();
        std::thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let server = TcpStream::connect(server).unwrap();
            let up = client.try_clone().unwrap();
            let down = server.try_clone().unwrap();
            let other = counter.clone();
            std::thread::spawn(move || carry(&down, &up, cut, &other, false));
            carry(&client, &server, cut, &counter, true);
        });
        Line { address, carried }
    }
}

/// Relays one direction until enough bytes have gone to the server, or an end closes.
fn carry(mut from: &TcpStream, mut to: &TcpStream, cut: Cut, carried: &AtomicU64, up: bool) {
    let mut buffer = [0; 16 << 10];
    from.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    loop {
        let n = match from.read(&mut buffer) {
            Ok(n) if n > 0 => n,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                if cut == Cut::Reset && carried.load(Ordering::Relaxed) >= CUT_AFTER {
                    break;
                }
                continue;
            }
            // Closed by an end that received nothing for too long.
            _ => break,
        };
        if up {
            carried.fetch_add(n as u64, Ordering::Relaxed);
        }
        if carried.load(Ordering::Relaxed) < CUT_AFTER {
            if to.write_all(&buffer[..n]).is_err() {
                break;
            }
        } else if cut != Cut::Silence {
            // With `Silence`, data and end of stream are discarded in both directions.
            break;
        }
    }
    if cut == Cut::Reset {
        for end in [from, to] {
            let _ = rustix::net::sockopt::set_socket_linger(end, Some(Duration::ZERO));
        }
    }
}

#[test]
fn lost_link_leaves_no_partial_file() {
    for (cut, words) in [(Cut::Reset, "the connection with"), (Cut::Silence, "nothing heard from")]
    {
        let daemon = Daemon::start(&on_path("tcp"));
        let receiver = Receiver::start(&daemon, &["--once", "--timeout", "2"]);
        let line = Line::to(receiver.socket_address(), cut);
        let file = large();
        let to = format!("{}/half", line.address);
        let file: PathBuf = file.path().to_owned();
        let arguments =
            ["send".as_ref(), file.as_os_str(), to.as_ref(), "--timeout".as_ref(), "2".as_ref()];
        let sent = run(&daemon, RCOPY, &arguments);
        assert!(line.carried.load(Ordering::Relaxed) >= CUT_AFTER, "{}", sent.1);
        fails(sent, words);
        let Receiver { process, folder, .. } = receiver;
        fails(end(process), words);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn one_of_four_senders_of_a_name_succeeds() {
    let daemon = Daemon::start("");
    // Large enough that all are in progress at the same time.
    let contents: Vec<Vec<u8>> = (0..4).map(|n| pattern(n, 8 << 20)).collect();
    let files: Vec<_> = contents.iter().map(|content| file_of(content)).collect();
    let all_at_once = |receiver: &Receiver| -> Vec<(Option<i32>, String)> {
        let to = format!("{}/one", receiver.address);
        let senders: Vec<_> = files.iter().map(|f| sending(&daemon, f.path(), &to)).collect();
        senders.into_iter().map(end).collect()
    };
    let receiver = Receiver::start(&daemon, &[]);
    let ended = all_at_once(&receiver);
    let stored: Vec<usize> = (0..4).filter(|n| ended[*n].0 == Some(0)).collect();
    assert_eq!(stored.len(), 1, "{ended:?}");
    for (n, ended) in ended.into_iter().enumerate() {
        if n != stored[0] {
            fails(ended, "a file of this name already exists");
        }
    }
    assert_eq!(receiver.names(), ["one"]);
    assert!(receiver.content("one") == contents[stored[0]], "the file of another sender");

    let receiver = Receiver::start(&daemon, &["--replace"]);
    let ended = all_at_once(&receiver);
    assert!(ended.iter().all(|(code, _)| *code == Some(0)), "{ended:?}");
    assert_eq!(receiver.names(), ["one"]);
    let content = receiver.content("one");
    assert!(contents.contains(&content), "a mixture of several");
}

#[test]
fn oversized_file_is_refused_before_sending() {
    let daemon = Daemon::start("");
    let receiver = Receiver::start(&daemon, &["--max-size", "1MiB"]);
    let file = large();
    let sent = send(&daemon, file.path(), &format!("{}/large", receiver.address));
    fails(sent, "4294967296 bytes are above the limit of 1048576");
    receiver.is_unharmed(&daemon);
    // A file that is larger than any disk.
    let receiver = Receiver::start(&daemon, &["--once"]);
    file.as_file().set_len(1 << 42).unwrap();
    let sent = send(&daemon, file.path(), &format!("{}/large", receiver.address));
    fails(sent, "do not fit the ");
    fails(end(receiver.process), "do not fit the ");
}

/// The kernel refuses further writes in the middle of a copy.
#[test]
fn failed_write_leaves_no_partial_file() {
    let daemon = Daemon::start("");
    let mut limited = Command::new("sh");
    // In blocks of 512 bytes: 256 KiB, which is enough for the ring.
    limited.args(["-c", "trap '' XFSZ; ulimit -f 512; exec \"$0\" \"$@\"", &built::program(RCOPY)]);
    let mut receiver = Receiver::start_as(&daemon, limited, &["--chunk", "4KiB", "--chunks", "4"]);
    let file = file_of(&pattern(1, 2 << 20));
    let sent = send(&daemon, file.path(), &format!("{}/half", receiver.address));
    fails(sent, "cannot write it: file too large");
    receiver.process.line_after("File too large");
    receiver.is_unharmed(&daemon);
}

/// The disk fills up in the middle of a copy. Only root can mount a small disk everywhere.
#[test]
fn full_disk_leaves_no_partial_file() {
    if !rustix::process::getuid().is_root() {
        rnic_tests::omit("not root: a full disk is not tested");
        return;
    }
    let daemon = Daemon::start("");
    let mut mounted = Command::new("unshare");
    // The folder is the third argument of `rnic-copy`. The disk mounted on it has 4 MiB.
    let script = "mount -t tmpfs -o size=4m none \"$4\" && exec \"$0\" \"$@\"";
    mounted.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    mounted.arg(built::program(RCOPY));
    let mut receiver = Receiver::start_as(&daemon, mounted, &["--chunk", "4KiB", "--chunks", "4"]);
    // Seen from outside its mount namespace.
    let disk = PathBuf::from(format!("/proc/{}/root", receiver.process.id()));
    let disk = disk.join(receiver.folder.path().strip_prefix("/").unwrap());
    let liar = HostileSender::offer(&daemon, receiver.socket_address(), "half", 2 << 20);
    // Another writer takes the space after the offer was accepted.
    std::fs::write(disk.join("other"), vec![0; 3 << 20]).unwrap();
    let mut chunks = 0;
    let why = loop {
        liar.talker.write(liar.ring.at(chunks % 4 * 4096), &pattern(chunks, 4096));
        liar.talker.send_message(&filled(chunks, 4096));
        let message = liar.talker.next_message().expect("a credit or a verdict");
        if message[0] == ABORT {
            break String::from_utf8_lossy(&message[1..]).into_owned();
        }
        chunks += 1;
        assert!(chunks < 512, "3 and 2 MiB fit into 4");
    };
    assert!(why.contains("cannot write it: no storage space"), "{why}");
    receiver.process.line_after("No space left on device");
    let names: Vec<_> =
        std::fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["other"]);
}

#[test]
fn read_only_folder_is_refused_at_start() {
    let daemon = Daemon::start("");
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    for (dir, why) in [
        (missing.as_path(), "No such file or directory"),
        (file.as_path(), "not a directory"),
        // Not even root can create files here.
        (Path::new("/proc/self"), ""),
    ] {
        let arguments =
            ["serve".as_ref(), "127.0.0.1:0".as_ref(), "--dir".as_ref(), dir.as_os_str()];
        let (code, said) = run(&daemon, RCOPY, &arguments);
        let words = format!("cannot put files into {}: {why}", dir.display());
        fails((code, said.clone()), &words);
        assert!(!said.contains("receiving files"), "{said}");
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
}
