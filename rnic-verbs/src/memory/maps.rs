//! What this process has mapped where, as `/proc/self/maps` tells (`proc_pid_maps(5)`).

use crate::errno::Errno;

/// Whether this process may write every page of a range. The daemon's way to the memory does not
/// ask, so this is asked when the range is registered.
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

/// The mappings inside of a range, cut off at its ends.
pub(crate) fn within(address: u64, length: u64) -> Result<Vec<Mapping>, Errno> {
    let end = address.saturating_add(length);
    let maps = read()?;
    let overlapping = maps.lines().filter_map(parse).filter(|m| m.start < end && address < m.end);
    let cut = |m: Mapping| Mapping { start: m.start.max(address), end: m.end.min(end), ..m };
    Ok(overlapping.map(cut).collect())
}

fn read() -> Result<String, Errno> {
    Ok(std::fs::read_to_string("/proc/self/maps")?)
}

/// One line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// First address.
    pub(crate) start: u64,
    /// First address behind it.
    pub(crate) end: u64,
    readable: bool,
    writable: bool,
    private: bool,
    /// Of the file that is mapped; 0 for memory.
    pub(crate) inode: u64,
    /// Of the allocator or nobody in particular: neither stack nor something of the kernel's.
    unnamed: bool,
}

impl Mapping {
    /// Whether it is memory of this process alone that is read and written, and no stack.
    pub(crate) fn is_private_memory(self) -> bool {
        self.readable && self.writable && self.private && self.inode == 0 && self.unnamed
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
    // Behind the offset and the device.
    let inode = words.nth(2)?.parse().ok()?;
    let name = words.next();
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        readable: rights.first() == Some(&b'r'),
        writable: rights.get(1) == Some(&b'w'),
        private: rights.get(3) == Some(&b'p'),
        inode,
        unnamed: name.is_none_or(|name| name == "[heap]" || name.starts_with("[anon:")),
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
        assert_eq!((last.inode, last.private), (99, false));
    }

    #[test]
    fn this_program_may_write_its_heap_and_not_its_code() {
        let here = vec![0u8; 100_000];
        assert_eq!(is_writable(here.as_ptr() as u64, 100_000), Ok(true));
        let code = is_writable as *const () as u64;
        assert_eq!(is_writable(code, 1), Ok(false));
    }
}
