//! MPA (RFC 5044): start-up frames, FPDU framing, Markers and CRC.
//!
//! Turns ULPDUs into the bytes of a TCP stream and back. [`Framer`] is the outgoing direction of a
//! connection, [`Deframer`] the incoming one. Their only state is the position in the Marker
//! interval. The engine's transmit and receive paths call them and interpret the ULPDUs.
//! [`crate::stream::startup`] negotiates their parameters with the frames of [`startup`].

#[cfg(test)]
mod bytes;
pub mod deframer;
pub mod framer;
#[cfg(test)]
mod limits;
pub mod startup;
#[cfg(test)]
pub(crate) mod tests;

pub use deframer::Deframer;
pub use framer::Framer;

/// Distance between the starts of two Markers in the stream (section 4.3).
pub const MARKER_INTERVAL: usize = 512;
/// Size of a Marker in bytes: two reserved bytes, then FPDUPTR.
pub const MARKER_LEN: usize = 4;
/// Size of the ULPDU_Length field in bytes.
pub const LENGTH_LEN: usize = 2;
/// Size of the CRC field in bytes. It is present even without CRCs.
pub const CRC_LEN: usize = 4;
/// Maximum ULPDU in bytes that the length field can express.
pub const MAX_ULPDU: usize = 0xFFFF;
/// Minimum MULPDU in bytes (section 3).
pub const MIN_MULPDU: u16 = 128;
/// Maximum MULPDU, and maximum ULPDU sent, in bytes (section 3).
pub const MAX_MULPDU: u16 = 64768;
/// Maximum FPDU in the stream, in bytes: the largest ULPDU with its pad and all its Markers.
pub const MAX_FPDU: usize = {
    let data = (LENGTH_LEN + MAX_ULPDU).next_multiple_of(4) + CRC_LEN;
    data + data.div_ceil(MARKER_INTERVAL - MARKER_LEN) * MARKER_LEN
};

/// Returns the largest ULPDU whose FPDU fits one TCP segment of `emss` bytes at any Marker phase
/// (section 4.5), clamped to [`MIN_MULPDU`]..=[`MAX_MULPDU`].
#[must_use]
//= MPA-3-2
pub fn mulpdu(emss: usize, markers: bool) -> u16 {
    //= MPA-4.5-1
    let markers = if markers { MARKER_LEN * emss.div_ceil(MARKER_INTERVAL) } else { 0 };
    //= MPA-4.5-2
    let overhead = LENGTH_LEN + CRC_LEN + markers + emss % 4;
    let room = emss.saturating_sub(overhead);
    //= MPA-3-4, MPA-4.5-7, MPA-4.5-8
    u16::try_from(room).unwrap_or(MAX_MULPDU).clamp(MIN_MULPDU, MAX_MULPDU)
}

/// Fault in a received FPDU. None of its bytes has been delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MpaFault {
    /// The CRC does not match (error 2).
    #[error("CRC mismatch")]
    Crc,
    /// A Marker disagrees with the ULPDU_Length (error 3).
    #[error("Marker and ULPDU_Length disagree")]
    Marker,
}

/// Returns the length of an FPDU without its Markers: length field, ULPDU, pad and CRC field.
/// Always a multiple of 4, so a Marker never splits a length or CRC field.
const fn unmarked_len(ulpdu_len: usize) -> usize {
    //= MPA-4.1-5, MPA-4.4-12
    (LENGTH_LEN + ulpdu_len).next_multiple_of(4) + CRC_LEN
}

/// Returns the number of bytes from `phase` to the next Marker; 0 if a Marker is due at `phase`.
const fn to_marker(phase: usize) -> usize {
    (MARKER_INTERVAL - phase) % MARKER_INTERVAL
}

/// Returns the total size of the Markers that are inserted into `unmarked` bytes starting at
/// `phase`. A Marker due at their end belongs to the next FPDU.
const fn marker_bytes(phase: usize, unmarked: usize) -> usize {
    let after_first = unmarked.saturating_sub(to_marker(phase));
    after_first.div_ceil(MARKER_INTERVAL - MARKER_LEN) * MARKER_LEN
}

#[cfg(test)]
mod arithmetic {
    use super::*;

    //= MPA-3-4
    //= MPA-4.5-7
    #[test]
    fn mulpdu_is_clamped_for_extreme_emss() {
        for markers in [false, true] {
            for emss in [0, 1, 7, 100, 133] {
                assert_eq!(mulpdu(emss, markers), 128);
            }
            assert_eq!(mulpdu(usize::MAX >> 8, markers), 64768);
        }
    }

    //= MPA-5.1-1
    #[test]
    fn mulpdu_fits_the_segment_at_every_phase() {
        for emss in (134..3000).chain([8960, 16344, 32741, 64000]) {
            for markers in [false, true] {
                let ulpdu = usize::from(mulpdu(emss, markers));
                if ulpdu == usize::from(MIN_MULPDU) {
                    continue;
                }
                for phase in (0..MARKER_INTERVAL).step_by(4) {
                    let marks = if markers { marker_bytes(phase, unmarked_len(ulpdu)) } else { 0 };
                    assert!(unmarked_len(ulpdu) + marks <= emss, "EMSS {emss} phase {phase}");
                }
            }
        }
    }

    #[test]
    fn marker_count_is_the_number_of_due_positions() {
        for phase in (0..MARKER_INTERVAL).step_by(4) {
            for ulpdu in 0..1600 {
                let unmarked = unmarked_len(ulpdu);
                let mut position = phase;
                let mut left = unmarked;
                let mut markers = 0;
                while left > 0 {
                    if position % MARKER_INTERVAL == 0 {
                        markers += 1;
                        position += MARKER_LEN;
                    }
                    position += 4;
                    left -= 4;
                }
                assert_eq!(marker_bytes(phase, unmarked), markers * MARKER_LEN);
            }
        }
    }
}
