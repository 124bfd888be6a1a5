//! Page protection of this process, from `/proc/self/maps` (`proc_pid_maps(5)`).
//!
//! An ioctl on that file, `PROCMAP_QUERY`, returns the mapping of an address. Kernels before Linux
//! 6.11 lack it, so the library reads the whole file there.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;

use crate::errno::Errno;

/// Returns true if this process may read every page of a range.
pub(crate) fn is_readable(address: u64, length: u64) -> Result<bool, Errno> {
    Ok(covered(&Maps::open()?, address, length, |mapping| mapping.readable)?)
}

/// Returns true if this process may write every page of a range.
pub(crate) fn is_writable(address: u64, length: u64) -> Result<bool, Errno> {
    Ok(covered(&Maps::open()?, address, length, |mapping| mapping.writable)?)
}

/// The mappings of this process.
enum Maps {
    Queried(File),
    /// All mappings, ordered by address.
    Read(Vec<Mapping>),
}

/// A mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    /// First address after the mapping.
    end: u64,
    readable: bool,
    writable: bool,
}

impl Maps {
    fn open() -> io::Result<Maps> {
        let file = File::open("/proc/self/maps")?;
        match query(&file, 0) {
            Ok(_) => Ok(Maps::Queried(file)),
            Err(_) => Maps::read(file),
        }
    }

    fn read(mut file: File) -> io::Result<Maps> {
        // Each read searches the mappings from the start, so few large reads are cheaper.
        let mut text = Vec::with_capacity(64 * 1024);
        file.read_to_end(&mut text)?;
        // File names may contain any bytes.
        let text = String::from_utf8_lossy(&text);
        Ok(Maps::Read(text.lines().filter_map(parse).collect()))
    }

    /// Returns the mapping that contains an address.
    fn at(&self, address: u64) -> io::Result<Option<Mapping>> {
        match self {
            Maps::Queried(file) => query(file, address),
            Maps::Read(mappings) => {
                let next = mappings.partition_point(|m| m.end <= address);
                Ok(mappings.get(next).filter(|m| m.start <= address).copied())
            }
        }
    }
}

/// Returns true if every byte of a range lies in a mapping that matches `fits`.
fn covered(
    maps: &Maps,
    address: u64,
    length: u64,
    fits: impl Fn(Mapping) -> bool,
) -> io::Result<bool> {
    let Some(end) = address.checked_add(length) else { return Ok(false) };
    let mut at = address;
    while at < end {
        match maps.at(at)? {
            Some(mapping) if fits(mapping) => at = mapping.end,
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `PROCMAP_QUERY`: `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::Ioctl = 0xC068_6611;
/// `PROCMAP_QUERY_VMA_READABLE` and `PROCMAP_QUERY_VMA_WRITABLE`.
const READABLE: u64 = 1;
const WRITABLE: u64 = 2;

const _: () = assert!(size_of::<ProcmapQuery>() == 0x68);

/// Queries the kernel for the mapping that contains an address.
fn query(maps: &File, address: u64) -> io::Result<Option<Mapping>> {
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_addr: address,
        ..ProcmapQuery::default()
    };
    // SAFETY: the kernel reads and writes `size` bytes of a live local. It writes neither name nor
    // build id, because their buffers have size 0.
    let done = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
    if done == 0 {
        return Ok(Some(Mapping {
            start: query.vma_start,
            end: query.vma_end,
            readable: query.vma_flags & READABLE != 0,
            writable: query.vma_flags & WRITABLE != 0,
        }));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        error => Err(error),
    }
}

fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes();
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        readable: rights.first() == Some(&b'r'),
        writable: rights.get(1) == Some(&b'w'),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "1000-3000 r-xp 00000000 08:01 71 /bin/program\n\
                        3000-4000 rw-p 00002000 08:01 71 /bin/program\n\
                        4000-6000 rw-p 00000000 00:00 0\n\
                        8000-9000 rw-p 00000000 00:00 0          [heap]\n\
                        9000-a000 r--p 00000000 00:00 0\n\
                        a000-b000 rw-p 00000000 00:00 0          [stack]\n";

    #[test]
    fn every_page_of_a_range_counts() {
        for (address, length, writable) in [
            (0x3000, 0x3000, true),
            (0x3fff, 2, true),
            (0x5000, 0x1000, true),
            (0x5000, 0x1001, false),
            (0x2fff, 2, false),
            (0x7fff, 2, false),
            (0x8000, 0x1001, false),
            (0x10000, 1, false),
            (u64::MAX, 2, false),
        ] {
            let maps = Maps::Read(MAPS.lines().filter_map(parse).collect());
            let found = covered(&maps, address, length, |mapping| mapping.writable);
            assert_eq!(found.expect("text"), writable, "{length} bytes at {address:#x}");
        }
    }

    #[test]
    fn heap_is_writable_and_code_is_not() {
        let here = vec![0u8; 100_000];
        assert_eq!(is_writable(here.as_ptr() as u64, 100_000), Ok(true));
        let code = is_writable as *const () as u64;
        assert_eq!((is_writable(code, 1), is_readable(code, 1)), (Ok(false), Ok(true)));
        assert_eq!(is_readable(0, 1), Ok(false));
    }

    /// Compares both ways on kernels with the ioctl. Other tests change other mappings.
    #[test]
    fn query_and_file_agree() {
        let file = || File::open("/proc/self/maps").expect("procfs");
        if let Err(error) = query(&file(), 0) {
            assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
            return;
        }
        let heap = vec![0u8; 1 << 20];
        let code = is_writable as *const () as u64;
        let text = Maps::read(file()).expect("procfs");
        for address in [heap.as_ptr() as u64 + 9999, code, &raw const code as u64] {
            let queried = query(&file(), address).expect("a query").expect("a mapping");
            let read = text.at(address).expect("text").expect("a mapping");
            let rights = |m: Mapping| (m.readable, m.writable);
            assert_eq!(rights(queried), rights(read), "{address:#x}");
            assert!((queried.start..queried.end).contains(&address));
        }
        assert_eq!(query(&file(), 0).expect("a query"), None);
        assert_eq!(text.at(0).expect("text"), None);
    }
}
