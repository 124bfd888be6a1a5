//! A FUSE file system that leaves some requests unanswered. A process that closes its file or
//! touches the file's pages blocks until the server exits, even after `SIGKILL`.
//!
//! The file system is mounted in the server's own mount namespace. Only descriptors and address
//! spaces refer to it, so nothing remains after a test.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use clap::ValueEnum;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, IoctlFlags, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLseek, ReplyStatfs, Request, SessionACL,
};
use rnic_abi::abi::ABI_VERSION;
use rnic_abi::abi::control::{Hello, Reply, RequestBody};
use rnic_abi::shm::Mapping;

use crate::attached::{self, CopyQueue};
use crate::raw::Raw;
use crate::traffic::Failure;

/// Length of the only file in bytes.
pub const LEN: usize = 65536;

/// Name of the only file.
const NAME: &str = "frozen";
const FILE: INodeNo = INodeNo(2);
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// Requests with which a client can pass a descriptor of a frozen file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Passed {
    /// As a shared buffer.
    SharedBuffer,
    /// As the client's memory.
    Memory,
    /// As a TCP socket.
    Socket,
    /// With a request that carries no descriptors.
    Unasked,
    /// With Hello.
    Hello,
}

/// Mounts the file system at a directory and starts a client as another user in the same mount
/// namespace. Returns when the client has ended. Prints the names of unanswered requests.
///
/// # Errors
///
/// System errors, or failure of the client.
pub fn serve(directory: &Path, uid: u32, part: &[String]) -> Result<(), Failure> {
    let _mounted = mount(directory)?;
    println!("mounted");
    let mut client = Command::new("setpriv");
    // Kill the client when the server dies. A client that is blocked on the file cannot exit.
    client.args(["--pdeathsig=KILL", "--clear-groups"]);
    client.args([format!("--reuid={uid}"), format!("--regid={uid}")]);
    client.arg(std::env::current_exe()?).args(part).arg(directory.join(NAME));
    match client.status()? {
        status if status.success() => Ok(()),
        status => Err(format!("the client failed: {status}").into()),
    }
}

fn mount(directory: &Path) -> std::io::Result<BackgroundSession> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("frozen".to_owned()), MountOption::NoSuid];
    config.acl = SessionACL::All;
    fuser::spawn_mount(Frozen, directory, &config)
}

/// Passes a descriptor of a frozen file to the daemon and prints the refusal.
///
/// # Errors
///
/// If the daemon accepts it.
pub fn pass(socket: &Path, how: Passed, file: &Path) -> Result<(), Failure> {
    // Never closed here, because this process would block in the close.
    let frozen = std::mem::ManuallyDrop::new(OwnedFd::from(File::open(file)?));
    let descriptor = [frozen.as_fd()];
    if how == Passed::Hello {
        let raw = Raw::try_connect(socket).ok_or("cannot connect to the daemon")?;
        let hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };
        raw.send(&hello.to_bytes(), &descriptor);
        return match raw.receive() {
            None => Ok(()),
            Some(_) => Err("the daemon answered the Hello".into()),
        };
    }
    let mut raw = Raw::try_open(socket).ok_or("no session")?;
    let body = match how {
        Passed::SharedBuffer => RequestBody::AddSharedBuffer { length: LEN as u64 },
        Passed::Memory => RequestBody::AttachMemory,
        Passed::Socket => RequestBody::ServeOver { context: 0 },
        Passed::Unasked | Passed::Hello => RequestBody::OpenPd { name: None },
    };
    raw.ask(body, &descriptor);
    let refusal = match raw.receive() {
        Some((bytes, _)) => postcard::from_bytes::<Reply>(&bytes)?.result.err(),
        None => None,
    };
    println!("refused: {}", refusal.ok_or("the request was granted")?);
    Ok(())
}

/// Pages of a frozen file, lent to all members of a protection domain.
pub struct Lent {
    _session: Raw,
    _pages: Arc<Mapping>,
}

impl Lent {
    /// Attaches this process's memory, registers the pages in the named domain and prints their
    /// address and STag. Threads serve the copy queues, as in the library.
    ///
    /// # Errors
    ///
    /// System errors and refusals of the daemon.
    pub fn new(socket: &Path, pd: &str, file: &Path) -> Result<Self, Failure> {
        let file = File::options().read(true).write(true).open(file)?;
        let file = std::mem::ManuallyDrop::new(file);
        let pages = Mapping::map_arena(file.as_fd(), LEN)?;
        let mut raw = Raw::try_open(socket).ok_or("no session")?;
        for queue in CopyQueue::of_each_worker(&mut raw)? {
            std::thread::spawn(|| queue.serve_forever());
        }
        let (_, lent) = attached::register_raw(&mut raw, pd, &pages)?;
        println!("region {} {}", lent.addr, lent.rkey.0);
        Ok(Lent { _session: raw, _pages: pages })
    }
}

/// The file system, which has one directory with one file.
struct Frozen;

fn attributes(ino: INodeNo) -> FileAttr {
    let (kind, perm, size) = match ino {
        FILE => (FileType::RegularFile, 0o666, LEN as u64),
        _ => (FileType::Directory, 0o755, 0),
    };
    FileAttr {
        ino,
        size,
        blocks: size.div_ceil(512),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// Leaves a request unanswered. Dropping the reply would send an error.
fn leave(question: &str, reply: impl Sized) {
    println!("asked: {question}");
    std::mem::forget(reply);
}

impl Filesystem for Frozen {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == NAME {
            reply.entry(&FOREVER, &attributes(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOREVER, &attributes(ino));
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        leave("read", reply);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        leave("flush", reply);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        leave("statfs", reply);
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        leave("lseek", reply);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        leave("ioctl", reply);
    }
}
