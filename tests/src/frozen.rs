//! A file system that takes questions and never answers some: whoever closes a file of it, or
//! touches its pages, waits until the server is gone, past `SIGKILL`.
//!
//! Mounted in a mount namespace of the server's own, so that nothing but descriptors and address
//! spaces leads into it, and nothing of it is left behind.

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
use rnic_core::abi::ABI_VERSION;
use rnic_core::abi::control::{Hello, Reply, RequestBody};
use rnic_core::shm::Mapping;

use crate::attached::{self, CopyQueue};
use crate::raw::Raw;
use crate::traffic::Failure;

/// Bytes of the one file.
pub const LEN: usize = 65536;

/// The name of the one file.
const NAME: &str = "frozen";
const FILE: INodeNo = INodeNo(2);
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// How a client passes a descriptor of a frozen file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Passed {
    /// As a shared buffer.
    SharedBuffer,
    /// As its memory.
    Memory,
    /// As a TCP socket.
    Socket,
    /// With a request that carries none.
    Unasked,
    /// With its greeting.
    Hello,
}

/// Mounts the file system at a directory, and starts a client under its eyes, in the same mount
/// namespace, as another user; returns when that has ended. Prints which questions are left
/// unanswered.
///
/// # Errors
///
/// Those of the system; a client that fails.
pub fn serve(directory: &Path, uid: u32, part: &[String]) -> Result<(), Failure> {
    let _mounted = mount(directory)?;
    println!("mounted");
    let mut client = Command::new("setpriv");
    // It ends with its server: it cannot alone.
    client.args(["--pdeathsig=KILL", "--clear-groups"]);
    client.args([format!("--reuid={uid}"), format!("--regid={uid}")]);
    client.arg(std::env::current_exe()?).args(part).arg(directory.join(NAME));
    match client.status()? {
        status if status.success() => Ok(()),
        status => Err(format!("its client: {status}").into()),
    }
}

fn mount(directory: &Path) -> std::io::Result<BackgroundSession> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("frozen".to_owned()), MountOption::NoSuid];
    config.acl = SessionACL::All;
    fuser::spawn_mount(Frozen, directory, &config)
}

/// Passes a descriptor of a frozen file to the daemon; prints the refusal.
///
/// # Errors
///
/// If it is taken.
pub fn pass(socket: &Path, how: Passed, file: &Path) -> Result<(), Failure> {
    // Never closed here: it would be this process that waits.
    let frozen = std::mem::ManuallyDrop::new(OwnedFd::from(File::open(file)?));
    let descriptor = [frozen.as_fd()];
    if how == Passed::Hello {
        let raw = Raw::try_connect(socket).ok_or("the daemon is not there")?;
        let hello = Hello { min_version: ABI_VERSION, max_version: ABI_VERSION, features: 0 };
        raw.send(&hello.to_bytes(), &descriptor);
        return match raw.receive() {
            None => Ok(()),
            Some(_) => Err("it was greeted".into()),
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
    println!("refused: {}", refusal.ok_or("it was taken")?);
    Ok(())
}

/// A frozen file's pages, lent to everybody in a protection domain.
pub struct Lent {
    _session: Raw,
    _pages: Arc<Mapping>,
}

impl Lent {
    /// Attaches its memory and registers the pages in the named domain; prints address and STag.
    /// Threads make the copies as those of the library do.
    ///
    /// # Errors
    ///
    /// Those of the system; refusals of the daemon.
    pub fn new(socket: &Path, pd: &str, file: &Path) -> Result<Self, Failure> {
        let file = File::options().read(true).write(true).open(file)?;
        let file = std::mem::ManuallyDrop::new(file);
        let pages = Mapping::map_arena(file.as_fd(), LEN)?;
        let mut raw = Raw::try_open(socket).ok_or("no session")?;
        for queue in CopyQueue::of_each_worker(&mut raw)? {
            std::thread::spawn(|| queue.serve_for_ever());
        }
        let (_, lent) = attached::register_raw(&mut raw, pd, &pages)?;
        println!("region {} {}", lent.addr, lent.rkey.0);
        Ok(Lent { _session: raw, _pages: pages })
    }
}

/// The file system: one directory with one file.
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

/// Leaves a question without an answer; dropping the reply would be one.
fn leave(question: &str, reply: impl Sized) {
    println!("asked: {question}");
    std::mem::forget(reply);
}

impl Filesystem for Frozen {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == NAME {
            true => reply.entry(&FOR_EVER, &attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOR_EVER, &attributes(ino));
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
