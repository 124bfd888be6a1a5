//! Outgoing direction: turns ULPDUs into FPDUs (RFC 5044 sections 4.1 to 4.4).

use crc32c::crc32c_append;

use super::{
    CRC_LEN, LENGTH_LEN, MARKER_INTERVAL, MARKER_LEN, MAX_ULPDU, marker_bytes, to_marker,
    unmarked_len,
};

/// Approximate number of payload bytes that are filled and then checksummed together, so that the
/// CRC reads them from the L1 cache. A multiple of `CRC_STRIDE`.
pub const BLOCK: usize = 10 * CRC_STRIDE;

/// Bytes per iteration of the CRC's fast loop, which has three interleaved lanes.
const CRC_STRIDE: usize = 768;

/// Frames the ULPDUs of one direction of a stream.
///
/// Stream position 0 is the byte after the start-up frame in that direction.
#[derive(Debug)]
pub struct Framer {
    markers: bool,
    crc: bool,
    /// Stream position modulo [`MARKER_INTERVAL`]; a multiple of 4.
    phase: usize,
}

impl Framer {
    /// Creates a framer at the start of Full Operation. `markers` is true if the peer declared
    /// M = 1, `crc` if either end declared C = 1.
    #[must_use]
    pub fn new(markers: bool, crc: bool) -> Self {
        //= MPA-4.3-9, MPA-7.1.2-7
        Framer { markers, crc, phase: 0 }
    }

    /// Returns true if FPDUs have a valid CRC.
    pub fn has_crc(&self) -> bool {
        self.crc
    }

    /// Creates a framer with Markers and CRCs at the given phase.
    #[cfg(test)]
    pub(super) fn at_phase(phase: usize) -> Self {
        Framer { markers: true, crc: true, phase }
    }

    /// Returns the length of the next FPDU with a ULPDU of `ulpdu_len` bytes, Markers included.
    #[must_use]
    pub fn fpdu_len(&self, ulpdu_len: usize) -> usize {
        let unmarked = unmarked_len(ulpdu_len);
        //= MPA-4.1-7
        if self.markers { unmarked + marker_bytes(self.phase, unmarked) } else { unmarked }
    }

    /// Writes the FPDU of one ULPDU to the front of `out` and returns its length.
    ///
    /// The ULPDU is `header` followed by `payload_len` bytes, which `fill(offset, block)` writes in
    /// order. `offset` counts from the start of the payload. Blocks are not empty and not much
    /// larger than [`BLOCK`]. If `fill` fails, the stream position is unchanged and the contents of
    /// `out` are undefined.
    ///
    /// # Panics
    ///
    /// If `out` is shorter than [`Framer::fpdu_len`] of the ULPDU, or the ULPDU is longer than
    /// [`MAX_ULPDU`].
    //= MPA-3-1
    pub fn frame<E>(
        &mut self,
        out: &mut [u8],
        header: &[u8],
        payload_len: usize,
        mut fill: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        let ulpdu_len = header.len() + payload_len;
        assert!(ulpdu_len <= MAX_ULPDU, "a ULPDU of {ulpdu_len} bytes cannot be framed");
        let len = self.fpdu_len(ulpdu_len);
        let out = &mut out[..len];
        #[expect(clippy::cast_possible_truncation, reason = "at most MAX_ULPDU, as asserted")]
        //= MPA-4.1-2
        let length = (ulpdu_len as u16).to_be_bytes();
        //= MPA-4.3-2
        if self.markers {
            self.frame_marked(out, length, header, payload_len, &mut fill)?;
            //= MPA-4.3-10
            self.phase = (self.phase + len) % MARKER_INTERVAL;
        } else {
            self.frame_plain(out, length, header, payload_len, &mut fill)?;
        }
        Ok(len)
    }

    /// Returns the bytes around a ULPDU that is sent without being copied: the length field before
    /// it, and the pad and unused CRC field after it. `None` if CRCs or Markers are on.
    #[must_use]
    pub fn length_and_trailer(&self, ulpdu_len: u16) -> Option<([u8; LENGTH_LEN], &'static [u8])> {
        if self.markers || self.crc {
            return None;
        }
        let trailer = unmarked_len(usize::from(ulpdu_len)) - LENGTH_LEN - usize::from(ulpdu_len);
        Some((ulpdu_len.to_be_bytes(), &[0; 3 + CRC_LEN][..trailer]))
    }

    //= MPA-4.1-1
    fn frame_plain<E>(
        &self,
        out: &mut [u8],
        length: [u8; LENGTH_LEN],
        header: &[u8],
        payload_len: usize,
        fill: &mut impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = LENGTH_LEN + header.len();
        out[..LENGTH_LEN].copy_from_slice(&length);
        out[LENGTH_LEN..start].copy_from_slice(header);
        let end = start + payload_len;
        let crc_at = out.len() - CRC_LEN;
        //= MPA-4.1-3
        out[end..].fill(0);

        // The first block ends so that the later ones are aligned for the CRC's fast loop.
        let aligned = out.as_ptr().align_offset(8) % 8;
        let mut stop = end.min((aligned + BLOCK).max(start + CRC_STRIDE));
        let mut at = start;
        let mut crc = 0;
        let mut summed = 0;
        while at < end {
            fill(at - start, &mut out[at..stop])?;
            if self.crc && stop < end {
                //= RDMAP-5.5-8
                crc = crc32c_append(crc, &out[summed..stop]);
                summed = stop;
            }
            at = stop;
            stop = end.min(stop + BLOCK);
        }
        if self.crc {
            //= MPA-4.4-1, MPA-4.4-13, MPA-4.4-14, DDP-3-6
            crc = crc32c_append(crc, &out[summed..crc_at]);
            //= MPA-4.4-17
            out[crc_at..].copy_from_slice(&crc.to_le_bytes());
        }
        Ok(())
    }

    fn frame_marked<E>(
        &self,
        out: &mut [u8],
        length: [u8; LENGTH_LEN],
        header: &[u8],
        payload_len: usize,
        fill: &mut impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let crc_at = out.len() - CRC_LEN;
        let pad = unmarked_len(header.len() + payload_len)
            - (LENGTH_LEN + header.len() + payload_len + CRC_LEN);
        let mut writer = MarkedWriter::new(out, self.phase);
        writer.put(&length);
        writer.put(header);
        //= MPA-4.3-1, MPA-4.4-16
        let mut crc = 0;
        let mut summed = 0;
        let mut filled = 0;
        while filled < payload_len {
            let block = writer.block(payload_len - filled);
            let taken = block.len();
            fill(filled, block)?;
            filled += taken;
            if self.crc && writer.at - summed >= BLOCK {
                crc = crc32c_append(crc, &writer.out[summed..writer.at]);
                summed = writer.at;
            }
        }
        //= MPA-4.1-3
        writer.put(&[0; 3][..pad]);
        // A Marker between pad and CRC belongs to this FPDU and is covered by the CRC.
        writer.put(&[0; CRC_LEN]);
        debug_assert_eq!(writer.at, writer.out.len());
        if self.crc {
            //= MPA-4.4-15, DDP-3-6
            crc = crc32c_append(crc, &out[summed..crc_at]);
            //= MPA-4.4-17
            out[crc_at..].copy_from_slice(&crc.to_le_bytes());
        }
        Ok(())
    }
}

/// Writes an FPDU and inserts Markers at their positions.
struct MarkedWriter<'o> {
    out: &'o mut [u8],
    /// Offset of the next byte to write.
    at: usize,
    /// Offset in `out` of the next Marker.
    marker: usize,
    /// Offset in `out` of the ULPDU_Length field.
    start: usize,
}

impl<'o> MarkedWriter<'o> {
    fn new(out: &'o mut [u8], phase: usize) -> Self {
        let marker = to_marker(phase);
        //= MPA-4.3-7
        let start = if marker == 0 { MARKER_LEN } else { 0 };
        MarkedWriter { out, at: 0, marker, start }
    }

    /// Reserves up to `wanted` bytes before the next Marker, for the caller to write.
    fn block(&mut self, wanted: usize) -> &mut [u8] {
        if self.at == self.marker {
            // Between FPDUs the pointer is 0. Inside an FPDU it is below 64 Ki, because
            // MAX_MULPDU limits the FPDUs we send.
            #[expect(clippy::cast_possible_truncation, reason = "below 64 Ki, see above")]
            //= MPA-4.2-6, MPA-4.3-5, MPA-4.3-11, MPA-4.3-12
            let pointer = self.at.saturating_sub(self.start) as u16;
            let [high, low] = pointer.to_be_bytes();
            //= MPA-4.2-1, MPA-4.2-2
            self.out[self.at..][..MARKER_LEN].copy_from_slice(&[0, 0, high, low]);
            self.at += MARKER_LEN;
            //= MPA-4.3-4
            self.marker += MARKER_INTERVAL;
        }
        let from = self.at;
        self.at += wanted.min(self.marker - from);
        &mut self.out[from..self.at]
    }

    fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let block = self.block(bytes.len());
            let (now, later) = bytes.split_at(block.len());
            block.copy_from_slice(now);
            bytes = later;
        }
    }
}
