//! Page protection of this process, from `/proc/self/maps` (`proc_pid_maps(5)`).

use crate::errno::Errno;

/// Returns true if this process may read every page of a range.
pub(crate) fn is_readable(address: u64, length: u64) -> Result<bool, Errno> {
    Ok(covered(&read()?, address, length, |mapping| mapping.readable))
}

/// Returns true if this process may write every page of a range.
pub(crate) fn is_writable(address: u64, length: u64) -> Result<bool, Errno> {
    Ok(covered(&read()?, address, length, |mapping| mapping.writable))
}

/// File names in the table may have any bytes.
fn read() -> Result<String, Errno> {
    let bytes = std::fs::read("/proc/self/maps")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A line of the table.
#[derive(Clone, Copy)]
struct Mapping {
    start: u64,
    /// First address after the mapping.
    end: u64,
    readable: bool,
    writable: bool,
}

/// Returns true if every byte of a range lies in a mapping for which `fits` holds.
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
            let found = covered(MAPS, address, length, |mapping| mapping.writable);
            assert_eq!(found, writable, "{length} bytes at {address:#x}");
        }
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
