//! Incoming direction: turns FPDUs into ULPDUs. An FPDU is verified before any byte of it is
//! delivered (RFC 5044 sections 4.3, 4.4 and 6).

use crc32c::crc32c;

use super::{
    CRC_LEN, LENGTH_LEN, MARKER_INTERVAL, MARKER_LEN, MpaFault, marker_bytes, to_marker,
    unmarked_len,
};

/// Deframes the FPDUs of one direction of a stream.
///
/// The caller collects as many bytes as [`Deframer::needed`] returns and passes exactly those to
/// [`Deframer::take`]. The result does not depend on the sizes of its reads.
#[derive(Debug)]
pub struct Deframer {
    markers: bool,
    crc: bool,
    /// Stream position modulo [`MARKER_INTERVAL`]; a multiple of 4.
    phase: usize,
}

impl Deframer {
    /// Creates a deframer at the start of Full Operation. `markers` is true if this end declared
    /// M = 1, `crc` if either end declared C = 1.
    #[must_use]
    pub fn new(markers: bool, crc: bool) -> Self {
        Deframer { markers, crc, phase: 0 }
    }

    /// Creates a deframer with Markers and CRCs at the given phase.
    #[cfg(test)]
    pub(super) fn at_phase(phase: usize) -> Self {
        Deframer { markers: true, crc: true, phase }
    }

    /// Returns the length of the FPDU at the front of `have`, Markers included. If `have` is too
    /// short to determine it, returns the number of bytes needed for that. The FPDU is complete if
    /// and only if `have` is at least as long as the result.
    #[must_use]
    //= MPA-5.1-6, MPA-A.4-1
    pub fn needed(&self, have: &[u8]) -> usize {
        let length_at = self.length_at();
        let Some(field) = have.get(length_at..length_at + LENGTH_LEN) else {
            return length_at + LENGTH_LEN;
        };
        //= MPA-5.2-1
        let unmarked = unmarked_len(usize::from(u16::from_be_bytes([field[0], field[1]])));
        if self.markers { unmarked + marker_bytes(self.phase, unmarked) } else { unmarked }
    }

    /// Verifies one complete FPDU, first its CRC and then its Markers, and returns its ULPDU.
    /// Removes Markers in place; without Markers it moves no bytes.
    ///
    /// After a fault the stream is unusable, because the start of the next FPDU is unknown.
    ///
    /// # Panics
    ///
    /// If `fpdu` is not exactly as long as [`Deframer::needed`] returns.
    //= MPA-6-1
    pub fn take<'b>(&mut self, fpdu: &'b mut [u8]) -> Result<&'b [u8], MpaFault> {
        //= MPA-6-5
        assert_eq!(fpdu.len(), self.needed(fpdu), "take() needs exactly one FPDU");
        let (covered, field) = fpdu.split_at(fpdu.len() - CRC_LEN);
        // A fuzzer cannot guess CRCs, but must reach the code after this check.
        //= MPA-4.1-6, MPA-4.4-18, MPA-6-3, MPA-7.1.1-7, MPA-7.1.1-9
        if self.crc && !cfg!(fuzzing) && crc32c(covered).to_le_bytes() != *field {
            //= MPA-4.4-19
            return Err(MpaFault::Crc);
        }
        let start = self.length_at() + LENGTH_LEN;
        let len = usize::from(u16::from_be_bytes([fpdu[start - 2], fpdu[start - 1]]));
        if !self.markers {
            //= MPA-3-8, MPA-4.1-4, MPA-4.3-13, MPA-4.3-14, DDP-3-4, DDP-3-7
            return Ok(&fpdu[start..start + len]);
        }
        self.check_markers(fpdu)?;
        let first = to_marker(self.phase);
        //= MPA-4.3-6
        self.phase = (self.phase + fpdu.len()) % MARKER_INTERVAL;
        //= MPA-4.3-14
        Ok(strip_markers(fpdu, first, start, len))
    }

    /// Returns the offset of the next FPDU's ULPDU_Length field, after a Marker if one is due now.
    fn length_at(&self) -> usize {
        if self.markers && self.phase == 0 { MARKER_LEN } else { 0 }
    }

    /// Checks that every Marker points to this FPDU's ULPDU_Length. Ignores the reserved bytes and
    /// the low two bits of the pointer (section 4.2 with erratum 1427).
    fn check_markers(&self, fpdu: &[u8]) -> Result<(), MpaFault> {
        let start = self.length_at();
        for at in (to_marker(self.phase)..fpdu.len()).step_by(MARKER_INTERVAL) {
            //= MPA-4.2-3, MPA-4.2-5, MPA-4.3-8
            let pointer = u16::from_be_bytes([fpdu[at + 2], fpdu[at + 3]]) & 0xFFFC;
            // In an FPDU near 64 KiB the distance may exceed the field. The sender can then only
            // write the low 16 bits.
            #[expect(clippy::cast_possible_truncation, reason = "the sender truncates, too")]
            if pointer != at.saturating_sub(start) as u16 {
                return Err(MpaFault::Marker);
            }
        }
        Ok(())
    }
}

/// Removes the Markers at `first`, `first + 512`, ... from the ULPDU of `len` bytes that begins at
/// `start`.
fn strip_markers(fpdu: &mut [u8], first: usize, start: usize, len: usize) -> &[u8] {
    let end = start + len;
    let mut marker = if first < start { first + MARKER_INTERVAL } else { first };
    let mut from = start;
    let mut to = start;
    while to < end {
        let run = (marker - from).min(end - to);
        if from != to {
            fpdu.copy_within(from..from + run, to);
        }
        to += run;
        from = marker + MARKER_LEN;
        marker += MARKER_INTERVAL;
    }
    &fpdu[start..end]
}
