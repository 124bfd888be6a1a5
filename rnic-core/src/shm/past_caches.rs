//! Copies whose result goes to memory past the caches: for so many bytes that the caches would hold
//! none of them when somebody comes back for them.
//!
//! An ordinary store first reads the line that it is about to replace, and writes it to memory when
//! it is evicted. Non-temporal stores do neither, which nearly doubles the rate of a copy that is
//! larger than the caches and costs a third of that of one that is not.

/// Copies `len` bytes. They are in place, for all who see a later store of this thread, when it
/// returns.
///
/// # Safety
/// `from` is valid for reading and `to` for writing `len` bytes, in shared memory of which no part
/// of this process holds a reference, and the two ranges do not overlap.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    let head = to.align_offset(LINE).min(len);
    let lines = (len - head) / LINE * LINE;
    // SAFETY: the three parts make up the range that the caller vouches for. `to` is at a multiple
    // of a line where the lines begin, so every store there is aligned; loads need not be. SSE2 is
    // part of the architecture. The fence is what orders these stores before later ones.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        let mut at = head;
        while at < head + lines {
            let (source, sink) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
            let line = [
                _mm_loadu_si128(source),
                _mm_loadu_si128(source.add(1)),
                _mm_loadu_si128(source.add(2)),
                _mm_loadu_si128(source.add(3)),
            ];
            for (n, part) in line.into_iter().enumerate() {
                _mm_stream_si128(sink.add(n), part);
            }
            at += LINE;
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(from.add(at), to.add(at), len - at);
    }
}

/// The same on other architectures, by way of the caches.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller vouches for.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// Bytes of a cache line, which is written as a whole.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

#[cfg(test)]
mod tests {
    use crate::shm::Mapping;

    #[test]
    fn every_length_and_alignment_arrives_and_nothing_beside() {
        const LEN: usize = 1 << 14;
        let (source, _fd) = Mapping::create_shared_buffer(LEN).expect("a little memory");
        let bytes: Vec<u8> = (0..LEN).map(|n| (n % 251) as u8).collect();
        source.write(0, &bytes).expect("in range");
        for (from, to) in [(0, 0), (1, 0), (0, 1), (63, 65), (17, 48), (100, 163)] {
            for len in (0..200).chain([4095, 4096, 5000]) {
                for tail_last in [false, true] {
                    let (sink, _fd) = Mapping::create_shared_buffer(LEN).expect("a little memory");
                    sink.fill(0, LEN, 0xEE).expect("in range");
                    source.copy_past_caches_to(from, &sink, to, len, tail_last).expect("in range");
                    let mut expected = vec![0xEE; LEN];
                    expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
                    let mut found = vec![0; LEN];
                    sink.read(0, &mut found).expect("in range");
                    assert!(found == expected, "{len} bytes from {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn ranges_are_checked_and_overlapping_ones_moved() {
        let (m, _fd) = Mapping::create_shared_buffer(8192).expect("a little memory");
        assert!(m.copy_past_caches_to(0, &m, 4096, 4097, false).is_err());
        assert!(m.copy_past_caches_to(4096, &m, 0, 4097, true).is_err());
        let bytes: Vec<u8> = (0..8192).map(|n| (n % 251) as u8).collect();
        for (from, to) in [(100, 164), (164, 100), (100, 100)] {
            m.write(0, &bytes).expect("in range");
            m.copy_past_caches_to(from, &m, to, 1000, true).expect("in range");
            let mut expected = bytes.clone();
            expected.copy_within(from..from + 1000, to);
            let mut found = vec![0; 8192];
            m.read(0, &mut found).expect("in range");
            assert!(found == expected, "{from} to {to}");
        }
    }

    #[test]
    fn a_poisoned_mapping_fails_it() {
        let (m, _fd) = Mapping::create_shared_buffer(4096).expect("a little memory");
        let (other, _fd) = Mapping::create_shared_buffer(4096).expect("a little memory");
        m.poison();
        assert!(m.copy_past_caches_to(0, &other, 0, 4096, true).is_err());
        assert!(other.copy_past_caches_to(0, &m, 0, 4096, true).is_err());
    }
}
