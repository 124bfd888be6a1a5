//! Lengths as the numbers that queues, headers and costs have. Each says why nothing is lost.

/// How many there are of something that queues, messages or tables have: all of these are bounded
/// by 32-bit numbers.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "counts below 2^32, see above")]
pub(super) const fn count(len: usize) -> u32 {
    debug_assert!(len <= u32::MAX as usize);
    len as u32
}

/// The low bits of a number that is only to tell some apart.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the rest is not wanted")]
pub(super) const fn low_half(number: u64) -> u32 {
    number as u32
}

/// The high bits of a number.
#[inline]
pub(super) const fn high_half(number: u64) -> u32 {
    (number >> 32) as u32
}

/// Length of a ULPDU or a part of one, which MPA carries in 16 bits.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a ULPDU is shorter than 64 KiB")]
pub(super) const fn ulpdu_len(len: usize) -> u16 {
    debug_assert!(len <= u16::MAX as usize);
    len as u16
}

/// What so many bytes or steps cost in a turn.
#[inline]
#[expect(clippy::cast_possible_wrap, reason = "no piece of memory has 2^63 bytes")]
pub(super) const fn cost(amount: usize) -> i64 {
    amount as i64
}
