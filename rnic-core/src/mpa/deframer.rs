//! The incoming half: FPDUs become ULPDUs, each verified before any of it is handed out
//! (RFC 5044 sections 4.3, 4.4 and 6).

use crc32c::crc32c;

use super::{
    CRC_LEN, LENGTH_LEN, MARKER_INTERVAL, MARKER_LEN, MpaFault, marker_bytes, to_marker,
    unmarked_len,
};

/// Takes the FPDUs of one direction of a stream apart.
///
/// The caller collects bytes until it holds as many as [`Deframer::needed`] asks for and gives
/// exactly those to [`Deframer::take`]; how the stream was cut into reads makes no difference.
#[derive(Debug)]
pub struct Deframer {
    markers: bool,
    crc: bool,
    /// Stream position modulo [`MARKER_INTERVAL`]; a multiple of 4.
    phase: usize,
}

impl Deframer {
    /// A deframer at the start of Full Operation. `markers` if we declared M = 1, `crc` if either
    /// side declared C = 1.
    #[must_use]
    pub fn new(markers: bool, crc: bool) -> Self {
        Deframer { markers, crc, phase: 0 }
    }

    /// One with Markers and CRCs at some other place in the stream.
    #[cfg(test)]
    pub(super) fn at_phase(phase: usize) -> Self {
        Deframer { markers: true, crc: true, phase }
    }

    /// Bytes the FPDU at the front of `have` takes in the stream, Markers included; while `have`
    /// is too short to tell, the bytes it takes to tell. The FPDU is complete exactly if `have`
    /// is at least as long as the answer.
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

    /// Verifies one whole FPDU, CRC first and then Markers, and returns its ULPDU. Markers are
    /// removed in place; without Markers nothing is moved.
    ///
    /// After a fault the stream is lost: where the next FPDU starts is unknown.
    ///
    /// # Panics
    ///
    /// If `fpdu` is not exactly as long as [`Deframer::needed`] says.
    //= MPA-6-1
    pub fn take<'b>(&mut self, fpdu: &'b mut [u8]) -> Result<&'b [u8], MpaFault> {
        //= MPA-6-5
        assert_eq!(fpdu.len(), self.needed(fpdu), "take() wants exactly one FPDU");
        let (covered, field) = fpdu.split_at(fpdu.len() - CRC_LEN);
        // A fuzzer cannot guess CRCs; what lies behind them must be reachable all the same.
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

    /// Where the ULPDU_Length field of the next FPDU stands: behind a Marker that is due now.
    fn length_at(&self) -> usize {
        if self.markers && self.phase == 0 { MARKER_LEN } else { 0 }
    }

    /// Every Marker must point to this FPDU's ULPDU_Length. The reserved bytes and the low two
    /// bits of the pointer are not looked at (section 4.2 with erratum 1427).
    fn check_markers(&self, fpdu: &[u8]) -> Result<(), MpaFault> {
        let start = self.length_at();
        for at in (to_marker(self.phase)..fpdu.len()).step_by(MARKER_INTERVAL) {
            //= MPA-4.2-3, MPA-4.2-5, MPA-4.3-8
            let pointer = u16::from_be_bytes([fpdu[at + 2], fpdu[at + 3]]) & 0xFFFC;
            // An FPDU near 64 KiB can put a Marker further away than the field can say; the
            // sender can only have written the low 16 bits.
            #[expect(clippy::cast_possible_truncation, reason = "so does the sender")]
            if pointer != at.saturating_sub(start) as u16 {
                return Err(MpaFault::Marker);
            }
        }
        Ok(())
    }
}

/// Closes the gaps that the Markers at `first`, `first + 512`, ... leave in the ULPDU of `len`
/// bytes that begins at `start`.
fn strip_markers(fpdu: &mut [u8], first: usize, start: usize, len: usize) -> &[u8] {
    let end = start + len;
    let mut marker = if first < start { first + MARKER_INTERVAL } else { first };
    let (mut from, mut to) = (start, start);
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
