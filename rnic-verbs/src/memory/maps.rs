//! What this process has mapped where, as `/proc/self/maps` tells (`proc_pid_maps(5)`).

use crate::errno::Errno;

/// Whether this process may read every page of a range.
pub(crate) fn is_readable(address: u64, length: u64) -> Result<bool, Errno> {
    covered_by(address, length, |mapping| mapping.readable)
}

/// Whether this process may write every page of a range.
pub(crate) fn is_writable(address: u64, length: u64) -> Result<bool, Errno> {
    covered_by(address, length, |mapping| mapping.writable)
}

/// Whether every byte of a range lies in mappings for which `fits` holds.
pub(crate) fn covered_by(
    address: u64,
    length: u64,
    fits: impl Fn(Mapping) -> bool,
) -> Result<bool, Errno> {
    Ok(covered(&read()?, address, length, fits))
}

/// All mappings.
pub(crate) fn all() -> Result<Vec<Mapping>, Errno> {
    Ok(read()?.lines().filter_map(parse).collect())
}

/// The mappings inside of a range, cut off at its ends.
pub(crate) fn within(address: u64, length: u64) -> Result<Vec<Mapping>, Errno> {
    let end = address.saturating_add(length);
    let maps = read()?;
    let overlapping = maps.lines().filter_map(parse).filter(|m| m.start < end && address < m.end);
    Ok(overlapping.map(|mapping| mapping.cut(address, end)).collect())
}

/// Names of files may be of any bytes.
fn read() -> Result<String, Errno> {
    let bytes = std::fs::read("/proc/self/maps")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// First address.
    pub(crate) start: u64,
    /// First address behind it.
    pub(crate) end: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    private: bool,
    /// Where in its file it begins.
    pub(crate) offset: u64,
    /// Of the file that is mapped; 0 for memory.
    pub(crate) inode: u64,
    /// Of the allocator or nobody in particular: neither stack nor something of the kernel's.
    unnamed: bool,
    /// The heap of `brk(2)`, where small objects of everybody lie.
    pub(crate) heap: bool,
}

impl Mapping {
    /// Whether it is memory of this process alone that is read and written, and no stack.
    pub(crate) fn is_private_memory(self) -> bool {
        self.readable && self.writable && self.private && self.inode == 0 && self.unnamed
    }

    /// Shared memory of a whole file.
    pub(crate) fn of_file(start: u64, len: u64, inode: u64) -> Mapping {
        Mapping {
            start,
            end: start + len,
            readable: true,
            writable: true,
            private: false,
            offset: 0,
            inode,
            unnamed: false,
            heap: false,
        }
    }

    /// Whether it is shared memory of this file.
    pub(crate) fn is_shared(self, inode: u64) -> bool {
        !self.private && self.inode == inode
    }

    /// The part of it between two addresses.
    fn cut(self, start: u64, end: u64) -> Mapping {
        let start = start.max(self.start);
        let offset = self.offset + (start - self.start);
        Mapping { start, end: end.min(self.end), offset, ..self }
    }
}

fn covered(maps: &str, address: u64, length: u64, fits: impl Fn(Mapping) -> bool) -> bool {
    let Some(end) = address.checked_add(length) else { return false };
    let mut at = address;
    for mapping in maps.lines().filter_map(parse).skip_while(|m| m.end <= address) {
        if at >= end || mapping.start > at || !fits(mapping) {
            break;
        }
        at = mapping.end;
    }
    at >= end
}

fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes();
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    let offset = hex(words.next()?)?;
    // Behind the device.
    let inode = words.nth(1)?.parse().ok()?;
    let name = words.next();
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        readable: rights.first() == Some(&b'r'),
        writable: rights.get(1) == Some(&b'w'),
        private: rights.get(3) == Some(&b'p'),
        offset,
        inode,
        unnamed: name.is_none_or(|name| name == "[heap]" || name.starts_with("[anon:")),
        heap: name == Some("[heap]"),
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
                        a000-b000 rw-p 00000000 00:00 0          [stack]\n\
                        b000-c000 rw-s 00000000 00:01 99 /memfd:rnic-adopted (deleted)\n";

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
            let found = covered(MAPS, address, length, |mapping| mapping.writable);
            assert_eq!(found, writable, "{length} bytes at {address:#x}");
        }
    }

    #[test]
    fn only_memory_of_the_process_alone_is_private() {
        let private: Vec<_> =
            MAPS.lines().filter_map(parse).filter(|m| m.is_private_memory()).collect();
        assert_eq!(private.iter().map(|m| m.start).collect::<Vec<_>>(), [0x4000, 0x8000]);
        let last = MAPS.lines().filter_map(parse).next_back().expect("a line");
        assert!(last.is_shared(99) && !last.is_shared(71));
    }

    #[test]
    fn a_part_of_a_mapping_begins_further_on_in_its_file() {
        let mapping = MAPS.lines().filter_map(parse).nth(1).expect("a line");
        let part = mapping.cut(0x3800, 0x9000);
        assert_eq!((part.start, part.end, part.offset), (0x3800, 0x4000, 0x2800));
    }

    #[test]
    fn this_program_may_write_its_heap_and_not_its_code() {
        let here = vec![0u8; 100_000];
        assert_eq!(is_writable(here.as_ptr() as u64, 100_000), Ok(true));
        let code = is_writable as *const () as u64;
        assert_eq!((is_writable(code, 1), is_readable(code, 1)), (Ok(false), Ok(true)));
        assert_eq!(is_readable(0, 1), Ok(false));
    }
}
